"""Around the loss: Hugging Face's trainer, its terms and their schedules, shares of a batch.

Imports ``data``, ``capture``, ``kd`` and ``teacher``. Start with ``trainer.py``.
"""

from shd_torch.training.schedules import BetaSchedule, LossBalancer
from shd_torch.training.shares import batch_share
from shd_torch.training.terms import HiddenTerm, KdTerm

__all__ = [
    "BetaSchedule",
    "HiddenTerm",
    "KdTerm",
    "LossBalancer",
    "batch_share",
]
