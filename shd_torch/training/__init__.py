"""Hugging Face's trainer with terms of distillation: from the collator to the loss.

``collator.py`` puts samples and records into one batch, ``batch.py`` takes it apart again and counts its rows, and
``trainer.py`` runs teachers and student on it. Each term of ``terms.py`` (and ``recipe.py``, of the base loss)
measures its losses on this pass; weighed by ``schedules.py``, their shares of the whole step add up to the loss.
"""

from collections.abc import Callable

from shd_torch.training.batch import batch_share
from shd_torch.training.embeddings import EmbeddingLoss
from shd_torch.training.recipe import Recipe
from shd_torch.training.schedules import BetaSchedule, LossBalancer
from shd_torch.training.terms import EmbeddingTerm, HiddenTerm, KdTerm, RowsTerm, exact_term

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
