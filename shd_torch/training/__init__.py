"""Around the loss: Hugging Face's trainer, schedules of beta, shares of a batch.

Imports ``data``, ``capture`` and ``teacher``. Start with ``trainer.py``.
"""

from shd_torch.training.schedules import BetaSchedule, LossBalancer
from shd_torch.training.shares import batch_share

__all__ = [
    "BetaSchedule",
    "LossBalancer",
    "batch_share",
]
