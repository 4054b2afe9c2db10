"""DeiT: a distillation token that learns from the teacher, softly or by its decisions (REC-12, REC-13)."""

from __future__ import annotations

from torch import Tensor

from shd_ref.errors import ShdError
from shd_torch.kd import kd_loss
from shd_torch.kd.rows import Targets
from shd_torch.kd.targets import check_logits
from shd_torch.precision import without_autocast
from shd_torch.recipes.labels import Labels, as_labels, first_largest, label_loss
from shd_torch.recipes.terms import SHD, Term, Terms, check_share, join


@without_autocast
def deit_soft(
    student_logits: Tensor,
    labels: Tensor,
    distillation_logits: Tensor,
    targets: Targets,
    *,
    kd_weight: float = 0.5,
    temperature: float = 1.0,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``(1 - w) CE + w T^2 sum KL(P || Q_dist) / (B C)`` (REC-12).

    Every row counts. The published denominator is the number of logits: the KD term is C times smaller than the mean
    over images that ``image_kd`` takes, a thousandfold on ImageNet. Defaults are DeiT's (w = .5, T = 1).

    Args:
        student_logits: of the class token ``(B, C)``.
        labels: ``(B,)`` or ``(B, C)``.
        distillation_logits: of the distillation token ``(B, C)``.
        targets: of the teacher, as in ``kd_loss``.
        kd_weight: w.
        temperature: T.
        shd: the attention term beside it; the student has one token more than a teacher without such a token.
        check: look at the values, which makes the host wait for the device.

    Returns:
        The terms ``cross_entropy`` (1 - w) and ``kd`` (w; ``T^2`` is in its value).

    Raises:
        ShdError: as ``cross_entropy`` and ``kd_loss``.
    """
    weight = check_share("kd_weight", kd_weight)
    checked = check_tokens(student_logits, labels, distillation_logits, "deit_soft", check)
    soft = kd_loss(targets, distillation_logits, temperature=temperature, reduction="sum", check=check)
    return join(
        shd,
        cross_entropy=Term(label_loss(student_logits, checked), 1 - weight),
        kd=Term(soft / distillation_logits.numel(), weight),
    )


@without_autocast
def deit_hard(
    student_logits: Tensor,
    labels: Tensor,
    distillation_logits: Tensor,
    teacher_logits: Tensor,
    *,
    kd_weight: float = 0.5,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``(1 - w) CE + w CE(z_dist, argmax u)`` (REC-13).

    Every row counts; denominator of both terms: B. Default: DeiT's (w = .5).

    Args:
        student_logits: of the class token ``(B, C)``.
        labels: ``(B,)`` or ``(B, C)``.
        distillation_logits: of the distillation token ``(B, C)``.
        teacher_logits: u ``(B, C)``.
        kd_weight: w.
        shd: the attention term beside it.
        check: look at the values, which makes the host wait for the device.

    Returns:
        The terms ``cross_entropy`` (1 - w) and ``kd`` (w).

    Raises:
        ShdError: as ``cross_entropy``.
    """
    weight = check_share("kd_weight", kd_weight)
    checked = check_tokens(student_logits, labels, distillation_logits, "deit_hard", check)
    check_logits(teacher_logits, "teacher_logits", check=check)
    if teacher_logits.shape != distillation_logits.shape:
        raise ShdError(
            "argument-shape",
            f"teacher_logits must be {tuple(distillation_logits.shape)}, as the student's; "
            f"got {tuple(teacher_logits.shape)}",
            "REC-13",
        )
    decided = Labels(first_largest(teacher_logits.detach().to(distillation_logits.device)), None, None)
    return join(
        shd,
        cross_entropy=Term(label_loss(student_logits, checked), 1 - weight),
        kd=Term(label_loss(distillation_logits, decided), weight),
    )


def check_tokens(
    student_logits: Tensor, labels: Tensor, distillation_logits: Tensor, recipe: str, check: bool
) -> Labels:
    """Labels of two tokens' logits, which share one shape (REC-12)."""
    for name, logits in (("student_logits", student_logits), ("distillation_logits", distillation_logits)):
        check_logits(logits, name, check=check)
    if distillation_logits.shape != student_logits.shape:
        raise ShdError(
            "argument-shape",
            f"distillation_logits must be {tuple(student_logits.shape)}, as student_logits; "
            f"got {tuple(distillation_logits.shape)}",
            "REC-12",
        )
    return as_labels(labels, student_logits, check=check, all_count=recipe)
