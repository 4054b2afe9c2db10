"""Hugging Face's trainer with terms of distillation: from the collator to the loss.

In ``batch.py`` a collator puts samples and records into one batch, which is taken apart again where its rows are
counted; ``trainer.py`` runs teachers and student on it. Each term of ``terms.py`` (and ``recipe.py``, of the base
loss) measures its losses on this pass; weighed by its schedule, their shares of the whole step are the loss.
"""

from shd_torch.training.batch import batch_share
from shd_torch.training.recipe import Recipe
from shd_torch.training.terms import BetaSchedule, EmbeddingLoss, EmbeddingTerm, HiddenTerm, KdTerm, Term

__all__ = ["BetaSchedule", "EmbeddingLoss", "EmbeddingTerm", "HiddenTerm", "KdTerm", "Recipe", "Term", "batch_share"]
