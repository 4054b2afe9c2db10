"""Around the loss: Hugging Face's trainer, its terms and their schedules, shares of a batch.

Imports ``data``, ``capture``, ``kd``, ``recipes`` and ``teacher``. Start with ``trainer.py``.
"""

from collections.abc import Callable

from shd_torch.training.embeddings import EmbeddingLoss, EmbeddingTerm
from shd_torch.training.recipe import Recipe
from shd_torch.training.rows import batch_share
from shd_torch.training.schedules import BetaSchedule, LossBalancer
from shd_torch.training.terms import HiddenTerm, KdTerm, RowsTerm, exact_term

TERMS: dict[str, Callable[..., RowsTerm]] = {
    "logits": KdTerm,
    "hidden": HiddenTerm,
    "embeddings": EmbeddingTerm,
    "exact": exact_term,
}
"""By the subject of a form the term that ``SHDTrainer(terms={subject: weight})`` makes; others may be entered."""

__all__ = [
    "TERMS",
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
