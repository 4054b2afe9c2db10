"""Around the loss: Hugging Face's trainer, its terms and their schedules, shares of a batch.

Imports ``data``, ``capture``, ``kd``, ``recipes`` and ``teacher``. Start with ``trainer.py``.
"""

from shd_torch.training.embeddings import EmbeddingLoss, EmbeddingTerm
from shd_torch.training.recipe import Recipe
from shd_torch.training.rows import batch_share
from shd_torch.training.schedules import BetaSchedule, LossBalancer
from shd_torch.training.terms import HiddenTerm, KdTerm, RowsTerm

__all__ = [
    "BetaSchedule",
    "EmbeddingLoss",
    "EmbeddingTerm",
    "HiddenTerm",
    "KdTerm",
    "LossBalancer",
    "Recipe",
    "RowsTerm",
    "batch_share",
]
