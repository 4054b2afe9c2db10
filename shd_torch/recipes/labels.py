"""What labels say, and the rows that count with them (REC-4 to REC-6)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shd_ref.errors import ShdError
from shd_ref.tolerances import row_sum_tolerance
from shd_torch.checks import check_real, compute_dtype
from shd_torch.kd import TopkTargets, kd_loss

IGNORED = -100
"""The hard label of a row that does not count (REC-4)."""

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class Labels(NamedTuple):
    """Labels of rows ``(...)`` of C classes, on the device of the logits."""

    classes: Tensor  # (...), int64; -100 where the row does not count; of soft labels the first of the largest
    soft: Tensor | None  # (..., C)
    counted: Tensor | None  # (...), None where all rows count


def as_labels(
    labels: Tensor, logits: Tensor, *, check: bool, shift: bool = False, all_count: str | None = None
) -> Labels:
    """Checked labels for these logits ``(..., C)``, moved to the rows that predict them with ``shift``.

    Args:
        labels: classes ``(...)`` or distributions ``(..., C)``.
        logits: that they belong to.
        check: look at the values.
        shift: row t of ``(B, L, C)`` has the label at t + 1.
        all_count: a recipe of which every row counts, so that -100 is refused in its name.
    """
    rows = tuple(logits.shape[:-1])
    if not isinstance(labels, Tensor) or labels.dtype == torch.bool:
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise ShdError("argument-dtype", f"labels must be a tensor of classes or of floats; got {kind}", "REC-4")
    if labels.dtype.is_floating_point and labels.shape == logits.shape:
        if shift:
            raise ShdError("argument-shape", "labels must be hard, (B, L), to be shifted; got soft ones", "REC-6")
        return _soft(labels, logits, check)
    if labels.dtype not in _INTEGERS:
        raise ShdError(
            "argument-dtype",
            f"labels must be integers, or floats {tuple(logits.shape)}; got {labels.dtype} {tuple(labels.shape)}",
            "REC-4",
        )
    if tuple(labels.shape) != rows:
        raise ShdError(
            "argument-shape", f"labels must have the shape of the rows {rows}; got {tuple(labels.shape)}", "REC-4"
        )
    classes = labels.to(logits.device, torch.int64)
    if shift:
        if classes.ndim != 2:
            raise ShdError("argument-shape", f"labels must be (B, L) to be shifted; got {rows}", "REC-6")
        _check_classes(classes, logits.shape[-1], check, all_count)
        classes = F.pad(classes[:, 1:], (0, 1), value=IGNORED)
    else:
        _check_classes(classes, logits.shape[-1], check, all_count)
    return Labels(classes, None, None if all_count else classes != IGNORED)


def label_loss(logits: Tensor, labels: Labels) -> Tensor:
    """The mean over counted rows of ``- log softmax(z)_y``, or of that over soft labels; 0 where no row counts.

    Hard labels are a teacher with one class and nothing outside of it (KD-11): so the logits are not copied into a
    wide dtype as a whole.
    """
    if labels.soft is not None:
        return F.cross_entropy(logits.to(compute_dtype(logits)).flatten(0, -2), labels.soft.flatten(0, -2))
    sure = torch.zeros((*labels.classes.shape, 1), dtype=compute_dtype(logits), device=logits.device)
    targets = TopkTargets(
        labels.classes.clamp(min=0)[..., None], sure, torch.full_like(sure[..., 0], -math.inf), 1.0, logits.shape[-1]
    )
    return kd_loss(targets, logits, divergence="cross_entropy", loss_mask=labels.counted, check=False)


def _check_classes(classes: Tensor, size: int, check: bool, all_count: str | None) -> None:
    if not check:
        return
    outside = (classes < 0) | (classes >= size)
    if all_count is None:
        outside &= classes != IGNORED
    if outside.any():
        first = int(classes[outside][0])
        rule = f"as every row of {all_count} counts" if all_count else f"or {IGNORED} where a row does not count"
        raise ShdError("argument-value", f"labels must be 0 to {size - 1}, {rule}; got {first}", "REC-4")


def _soft(labels: Tensor, logits: Tensor, check: bool) -> Labels:
    check_real(labels, "labels", check=check)
    soft = labels.detach().to(logits.device, compute_dtype(logits))
    bound = row_sum_tolerance(str(labels.dtype).removeprefix("torch."))
    if check and bool(((soft < 0).any(-1) | ((soft.sum(-1) - 1).abs() > bound)).any()):
        raise ShdError(
            "not-a-distribution", f"labels must be at least 0 and sum to 1 within {bound:g} in every row", "REC-5"
        )
    return Labels(first_largest(soft), soft, None)


def first_largest(rows: Tensor) -> Tensor:
    """The first of the largest entries of each row; which of several ``argmax`` takes is not promised."""
    places = torch.arange(rows.shape[-1], device=rows.device).expand_as(rows)
    return places.masked_fill(rows < rows.amax(-1, keepdim=True), rows.shape[-1]).amin(-1)
