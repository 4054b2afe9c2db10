"""Cross entropy with labels: the base of every recipe with labels (REC-7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array
from shd_ref.kd.targets import as_logits, log_softmax
from shd_ref.recipes.labels import Labels, as_labels
from shd_ref.recipes.terms import Term, Terms


def cross_entropy(student_logits: ArrayLike, labels: ArrayLike, *, shift: bool = False) -> Terms:
    """``- mean over counted rows of log softmax(z)_y``, with soft labels ``- sum_c y_c log softmax(z)_c`` (REC-7).

    Args:
        student_logits: z ``(..., C)``.
        labels: classes ``(...)``, -100 = the row does not count; or distributions ``(..., C)``.
        shift: row t of ``(B, L, C)`` predicts the label at t + 1, as in Hugging Face's language models.

    Returns:
        The term ``cross_entropy``, weight 1.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.
    """
    logits = as_logits(student_logits, "student_logits")
    return {"cross_entropy": Term(label_loss(logits, as_labels(labels, logits.shape, shift=shift)), 1.0)}


def label_loss(logits: Array, labels: Labels) -> float:
    """The cross entropy of checked arguments; 0 where no row counts."""
    log_q = log_softmax(logits)
    if labels.soft is not None:
        terms = -(labels.soft * log_q).sum(axis=-1)
    else:
        terms = -np.take_along_axis(log_q, labels.classes[..., None], -1)[..., 0]
    return float(terms[labels.counted].sum() / max(labels.counted.sum(), 1))
