"""Normalised knowledge distillation: the target class and the others apart (REC-10, REC-11)."""

from __future__ import annotations

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_torch.checks import check_temperature, compute_dtype
from shd_torch.kd import kd_loss
from shd_torch.kd.targets import check_logits
from shd_torch.precision import without_autocast
from shd_torch.recipes.labels import as_labels, label_loss
from shd_torch.recipes.terms import SHD, Term, Terms, check_weight, join


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
        shd: the attention term beside it.
        check: look at the values, which makes the host wait for the device.

    Returns:
        The terms ``cross_entropy`` (1), ``target`` (1) and ``nontarget`` (g; ``T^2`` is in its value).

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.
    """
    weight, temperature = check_weight("nontarget_weight", nontarget_weight), check_temperature(temperature)
    for name, logits in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        check_logits(logits, name, check=check)
    if student_logits.shape != teacher_logits.shape or student_logits.shape[-1] < 2:
        raise ShdError(
            "argument-shape",
            "student_logits and teacher_logits must share one shape (B, C) with two classes at least; "
            f"got {tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}",
            "REC-10",
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
    """The logits of all classes but one a row ``(..., C - 1)``."""
    places = torch.arange(logits.shape[-1] - 1, device=logits.device)
    return logits.gather(-1, places + (places >= at))
