"""Knowledge distillation beside a cross entropy, for language models and for images (REC-8, REC-9)."""

from __future__ import annotations

from numpy.typing import ArrayLike

from shd_ref.kd.loss import Targets, kd_loss
from shd_ref.kd.targets import as_logits, cut
from shd_ref.recipes.cross_entropy import label_loss
from shd_ref.recipes.labels import as_labels, check_all_count
from shd_ref.recipes.terms import Term, Terms, check_share


def language_kd(
    student_logits: ArrayLike,
    labels: ArrayLike,
    targets: Targets,
    *,
    kd_weight: float = 0.5,
    temperature: float | None = None,
    shift: bool = False,
    vocab_size: int | None = None,
) -> Terms:
    """``(1 - w) CE + w T^2 soft CE``, both means over the rows whose label counts (REC-8).

    Args:
        student_logits: z ``(B, L, V)``.
        labels: ``(B, L)``, -100 = the row does not count, in either term.
        targets: of the teacher, as in ``kd_loss``.
        kd_weight: w.
        temperature: T; default that of the record, 1 for logits.
        shift: as in ``cross_entropy``; the teacher's rows are never shifted.
        vocab_size: as in ``kd_loss``, for both terms.

    Returns:
        The terms ``cross_entropy`` and ``kd``.

    Raises:
        ShdError: as ``cross_entropy`` and ``kd_loss``.
    """
    weight = check_share("kd_weight", kd_weight)
    logits = as_logits(student_logits, "student_logits")
    kept = cut(logits, vocab_size, "student_logits")
    checked = as_labels(labels, kept.shape, shift=shift)
    soft = kd_loss(
        targets,
        logits,
        divergence="cross_entropy",
        temperature=temperature,
        loss_mask=checked.counted,
        vocab_size=vocab_size,
    )
    return {"cross_entropy": Term(label_loss(kept, checked), 1 - weight), "kd": Term(soft, weight)}


def image_kd(
    student_logits: ArrayLike,
    labels: ArrayLike,
    targets: Targets,
    *,
    kd_weight: float = 0.5,
    temperature: float = 4.0,
) -> Terms:
    """``(1 - w) CE + w T^2 soft CE``, means over images (REC-9).

    Args:
        student_logits: z ``(B, C)``.
        labels: ``(B,)``, or ``(B, C)`` where they are mixed or smoothed.
        targets: of the teacher, as in ``kd_loss``.
        kd_weight: w.
        temperature: T.

    Returns:
        The terms ``cross_entropy`` and ``kd``.

    Raises:
        ShdError: as ``cross_entropy`` and ``kd_loss``.
    """
    weight = check_share("kd_weight", kd_weight)
    logits = as_logits(student_logits, "student_logits")
    checked = as_labels(labels, logits.shape)
    check_all_count(checked, "image_kd")
    soft = kd_loss(targets, logits, divergence="cross_entropy", temperature=temperature)
    return {"cross_entropy": Term(label_loss(logits, checked), 1 - weight), "kd": Term(soft, weight)}
