"""Images with a distillation token (DeiT), and the target class apart from the others (NKD): REC-10 to REC-13."""

from __future__ import annotations

import torch
from torch import Tensor

from shd_torch.checks import check_shapes, check_temperature, compute_dtype
from shd_torch.kd import kd_loss
from shd_torch.kd.rows import Targets
from shd_torch.precision import without_autocast
from shd_torch.recipes.terms import (
    SHD,
    Labels,
    Term,
    Terms,
    as_labels,
    check_alike,
    check_share,
    check_weight,
    first_largest,
    join,
    label_loss,
)


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
        shd: the attention term; the student has one token more than a teacher without such a token.

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

    Returns:
        The terms ``cross_entropy`` (1 - w) and ``kd`` (w).

    Raises:
        ShdError: as ``cross_entropy``.
    """
    weight = check_share("kd_weight", kd_weight)
    checked = check_tokens(student_logits, labels, distillation_logits, "deit_hard", check)
    models = {"teacher_logits": teacher_logits, "distillation_logits": distillation_logits}
    check_alike("(B, C)", "REC-13", check=check, **models)
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
    tokens = {"student_logits": student_logits, "distillation_logits": distillation_logits}
    check_alike("(B, C)", "REC-12", check=check, **tokens)
    return as_labels(labels, student_logits, check=check, all_count=recipe)


@without_autocast
def nkd(
    student_logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor,
    *,
    nontarget_weight: float = 1.0,
    temperature: float = 1.0,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``CE - mean P_y log Q_y - g T^2 mean sum_{c != y} P'_c log Q'_c`` (REC-10, REC-11).

    ``P_y``, ``Q_y`` are at temperature 1; ``P'``, ``Q'`` are softmax over the other classes, at T. Every row counts;
    denominator: B. The cross entropy keeps the weight 1. Defaults are those of cls_KD's DeiT configurations (g = 1,
    T = 1; for convolutional students g = 1.5).

    Args:
        student_logits: z ``(B, C)``, C of at least 2.
        labels: ``(B,)``, or ``(B, C)``: y is then the likeliest class, the first of several.
        teacher_logits: u ``(B, C)``.
        nontarget_weight: g.
        temperature: T of the other classes; the target class has none.

    Returns:
        The terms ``cross_entropy`` (1), ``target`` (1) and ``nontarget`` (g; ``T^2`` is in its value).

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.
    """
    weight, temperature = check_weight("nontarget_weight", nontarget_weight), check_temperature(temperature)
    check_alike("(B, C)", "REC-10", check=check, student_logits=student_logits, teacher_logits=teacher_logits)
    check_shapes(
        student_logits.shape[-1] > 1, "student_logits must have two classes at least", "REC-10", student_logits
    )
    checked = as_labels(labels, student_logits, check=check, all_count="nkd")
    dtype, at = compute_dtype(student_logits), checked.classes[..., None]
    z, u = student_logits.to(dtype), teacher_logits.detach().to(student_logits.device, dtype)
    target = -(u.log_softmax(-1).gather(-1, at).exp() * z.log_softmax(-1).gather(-1, at)).mean()
    nontarget = kd_loss(
        _without(u, at), _without(z, at), divergence="cross_entropy", temperature=temperature, check=False
    )
    return join(
        shd,
        cross_entropy=Term(label_loss(student_logits, checked), 1.0),
        target=Term(target, 1.0),
        nontarget=Term(nontarget, weight),
    )


def _without(logits: Tensor, at: Tensor) -> Tensor:
    """The logits of all classes but one per row ``(..., C - 1)``."""
    columns = torch.arange(logits.shape[-1] - 1, device=logits.device)
    return logits.gather(-1, columns + (columns >= at))
