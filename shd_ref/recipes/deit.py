"""DeiT: a distillation token that learns from the teacher, softly or by its decisions (REC-12, REC-13)."""

from __future__ import annotations

from numpy.typing import ArrayLike

from shd_ref.attention import Array
from shd_ref.errors import ShdError
from shd_ref.kd.loss import Targets, kd_loss
from shd_ref.kd.targets import as_logits
from shd_ref.recipes.cross_entropy import label_loss
from shd_ref.recipes.labels import Labels, as_labels, check_all_count
from shd_ref.recipes.terms import Term, Terms, check_share


def deit_soft(
    student_logits: ArrayLike,
    labels: ArrayLike,
    distillation_logits: ArrayLike,
    targets: Targets,
    *,
    kd_weight: float = 0.5,
    temperature: float = 1.0,
) -> Terms:
    """``(1 - w) CE + w T^2 sum KL(P || Q_dist) / (B C)`` (REC-12).

    Args:
        student_logits: of the class token ``(B, C)``.
        labels: ``(B,)`` or ``(B, C)``.
        distillation_logits: of the distillation token ``(B, C)``.
        targets: of the teacher, as in ``kd_loss``.
        kd_weight: w.
        temperature: T.

    Returns:
        The terms ``cross_entropy`` and ``kd``.

    Raises:
        ShdError: as ``cross_entropy`` and ``kd_loss``.
    """
    weight = check_share("kd_weight", kd_weight)
    token, logits, checked = check_tokens(student_logits, labels, distillation_logits, "deit_soft")
    soft = kd_loss(targets, token, temperature=temperature, reduction="sum") / token.size
    return {"cross_entropy": Term(label_loss(logits, checked), 1 - weight), "kd": Term(soft, weight)}


def deit_hard(
    student_logits: ArrayLike,
    labels: ArrayLike,
    distillation_logits: ArrayLike,
    teacher_logits: ArrayLike,
    *,
    kd_weight: float = 0.5,
) -> Terms:
    """``(1 - w) CE + w CE(z_dist, argmax u)`` (REC-13).

    Args:
        student_logits: of the class token ``(B, C)``.
        labels: ``(B,)`` or ``(B, C)``.
        distillation_logits: of the distillation token ``(B, C)``.
        teacher_logits: u ``(B, C)``.
        kd_weight: w.

    Returns:
        The terms ``cross_entropy`` and ``kd``.

    Raises:
        ShdError: as ``cross_entropy``.
    """
    weight = check_share("kd_weight", kd_weight)
    token, logits, checked = check_tokens(student_logits, labels, distillation_logits, "deit_hard")
    teacher = as_logits(teacher_logits, "teacher_logits")
    if teacher.shape != token.shape:
        raise ShdError(
            "argument-shape", f"teacher_logits must be {token.shape}, as the student's; got {teacher.shape}", "REC-13"
        )
    hard = label_loss(token, as_labels(teacher.argmax(axis=-1), token.shape))
    return {"cross_entropy": Term(label_loss(logits, checked), 1 - weight), "kd": Term(hard, weight)}


def check_tokens(
    student_logits: ArrayLike, labels: ArrayLike, distillation_logits: ArrayLike, recipe: str
) -> tuple[Array, Array, Labels]:
    """Checked logits of the distillation and of the class token, and labels (REC-12)."""
    logits = as_logits(student_logits, "student_logits")
    token = as_logits(distillation_logits, "distillation_logits")
    if token.shape != logits.shape:
        raise ShdError(
            "argument-shape",
            f"distillation_logits must be {logits.shape}, as student_logits; got {token.shape}",
            "REC-12",
        )
    checked = as_labels(labels, logits.shape)
    check_all_count(checked, recipe)
    return token, logits, checked
