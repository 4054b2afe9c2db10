"""The loss on hidden states (``specs/kd.md``, chapter HID), by operations that PyTorch differentiates."""

from __future__ import annotations

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_torch.checks import check_mask, check_option, check_real, compute_dtype
from shd_torch.maps.loss import Layers, match_layers
from shd_torch.precision import without_autocast

DISTANCES: tuple[str, ...] = ("mse", "cosine", "normalized_mse")
REDUCTIONS: tuple[str, ...] = ("sum", "mean")


@without_autocast
def hidden_loss(
    student_hidden: Layers,
    teacher_hidden: Layers,
    *,
    distance: str = "mse",
    loss_mask: Tensor | None = None,
    reduction: str = "sum",
    check: bool = True,
) -> Tensor:
    """The distance between hidden states: the mean over counted rows, the sum over layers (HID-1 to HID-9).

    Args:
        student_hidden: ``(..., D)``, or a list with one a layer; a projection to the teacher's width is the caller's.
        teacher_hidden: the same shape(s), on any device; no gradient reaches it.
        distance: ``"mse"`` (mean over features), ``"cosine"`` (one less the cosine), or ``"normalized_mse"`` (squared
            distance of the unit vectors).
        loss_mask: boolean, the shape of the rows, for all layers; True = counts.
        reduction: ``"sum"`` over layers or ``"mean"``.
        check: look at the values, which makes the host wait for the device.

    Returns:
        The loss ``()``, float64 if the student's side is, else float32; 0 where no row counts. Rows that do not count
        have a gradient of exactly 0.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    check_option("distance", distance, DISTANCES, "HID-3")
    check_option("reduction", reduction, REDUCTIONS, "HID-4")
    students, teachers = match_layers(student_hidden=student_hidden, teacher_hidden=teacher_hidden)
    terms = []
    for number, (student, teacher) in enumerate(zip(students, teachers, strict=True)):
        check_real(student, "student_hidden", check=check, layer=number)
        check_real(teacher, "teacher_hidden", check=check, layer=number)
        if student.ndim < 2 or student.shape != teacher.shape:
            raise ShdError(
                "argument-shape",
                f"student_hidden and teacher_hidden must share one shape (..., D) in layer {number}; "
                f"got {tuple(student.shape)} and {tuple(teacher.shape)}: project the student's where widths differ",
                "HID-1",
            )
        if loss_mask is not None:
            check_mask(loss_mask, "loss_mask", student.shape[:-1])
        terms.append(_layer_loss(student, teacher, loss_mask, distance))
    total = torch.stack([term.to(terms[0].device) for term in terms]).sum()
    return total / len(terms) if reduction == "mean" else total


def _layer_loss(student: Tensor, teacher: Tensor, loss_mask: Tensor | None, distance: str) -> Tensor:
    dtype = compute_dtype(student)
    s, t = student.to(dtype), teacher.detach().to(student.device, dtype)
    rows = float(max(s[..., 0].numel(), 1))
    divisor: Tensor | float = rows
    if loss_mask is not None:
        counted = loss_mask.to(s.device)
        divisor = counted.sum().clamp(min=1).to(dtype)
        # What does not count is zero on both sides, before anything is computed of it.
        s, t = (side.masked_fill(~counted[..., None], 0.0) for side in (s, t))
    if distance == "mse":
        terms = (s - t).square().mean(-1)
    elif distance == "cosine":
        terms = 1 - (_unit(s) * _unit(t)).sum(-1)
        terms = terms - terms.detach().clamp(max=0)  # rounding can leave -1e-7; the gradient stays
    else:
        terms = (_unit(s) - _unit(t)).square().sum(-1)
    if loss_mask is not None:
        terms = terms.masked_fill(~counted, 0.0)
    return terms.sum() / divisor


def _unit(vectors: Tensor) -> Tensor:
    """Unit vectors, of which no square over- or underflows (HID-9); a zero vector stays zero, with no gradient."""
    largest = vectors.detach().abs().amax(-1, keepdim=True)
    zero = largest == 0
    scaled = vectors / largest.masked_fill(zero, 1.0)
    length = scaled.square().sum(-1, keepdim=True).masked_fill(zero, 1.0).sqrt()
    return (scaled / length).masked_fill(zero, 0.0)
