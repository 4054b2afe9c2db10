"""BabyLlama: the mean logits of several teachers, softened (REC-15)."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from shd_ref.kd.loss import kd_loss
from shd_ref.kd.targets import as_logits, mean_logits
from shd_ref.recipes.cross_entropy import label_loss
from shd_ref.recipes.labels import as_labels
from shd_ref.recipes.terms import Term, Terms, check_share


def babyllama(
    student_logits: ArrayLike,
    labels: ArrayLike,
    teacher_logits: Sequence[ArrayLike],
    *,
    kd_weight: float = 0.5,
    temperature: float = 2.0,
    shift: bool = True,
) -> Terms:
    """``(1 - w) CE + w T^2 sum over all positions of KL(P || Q) / B`` with P of the mean logits (REC-15).

    Args:
        student_logits: z ``(B, L, V)``.
        labels: ``(B, L)``, -100 = the row does not count in the cross entropy.
        teacher_logits: one array ``(B, L, V)`` a teacher.
        kd_weight: w, one less the published alpha.
        temperature: T.
        shift: as in ``cross_entropy``.

    Returns:
        The terms ``cross_entropy`` and ``kd``.

    Raises:
        ShdError: as ``cross_entropy``, ``mean_logits`` and ``kd_loss``.
    """
    weight = check_share("kd_weight", kd_weight)
    logits = as_logits(student_logits, "student_logits")
    checked = as_labels(labels, logits.shape, shift=shift)
    soft = kd_loss(mean_logits(teacher_logits), logits, temperature=temperature, reduction="batch_mean")
    return {"cross_entropy": Term(label_loss(logits, checked), 1 - weight), "kd": Term(soft, weight)}
