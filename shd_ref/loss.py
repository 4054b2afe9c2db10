"""The SHD loss (spec chapter LOSS): teach the student's maps with the merged ones.

``L = beta * sum_layers sum_heads mean_rows KL(A~ || A_student)``, natural logarithm, the teacher's entropy
included, so that it is zero exactly where the maps are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.alpha import check_option
from shd_ref.attention import Array, as_float, as_mask, check_probs, check_temperature, mask_logits
from shd_ref.errors import ShdError

REDUCTIONS: tuple[str, ...] = ("sum", "mean")

Layers: TypeAlias = ArrayLike | Sequence[ArrayLike]


def shd_loss(
    supervision: Layers,
    student_logits: Layers,
    *,
    beta: float = 1.0,
    loss_mask: ArrayLike | None = None,
    attn_mask: ArrayLike | None = None,
    temperature: float = 1.0,
    reduction: str = "sum",
) -> float:
    """``beta * KL(supervision || softmax(student_logits / T))``, teacher first (LOSS-1..9).

    Per map: the sum over keys, then the mean over the rows that count in the whole batch. A row counts
    where ``loss_mask`` is True and the supervision has mass. A map with no such row contributes exactly 0.

    Args:
        supervision: A~ ``(B, H_s, L, S)``, or a list with one array a layer; already at this temperature.
        student_logits: before softmax, same shape(s); -inf marks a masked key.
        beta: weight of the term, at least 0.
        loss_mask: boolean ``(B, L)``, True = the row counts; apart from the attention mask.
        attn_mask: boolean, broadcastable to ``(B, H_s, L, S)``, True = may attend.
        temperature: T_a of both maps; the supervision is softened before mixing, the student's map here.
        reduction: ``"sum"`` over layers and heads (the source), or ``"mean"`` over both.

    Returns:
        The loss as a float, in nats times beta.

    Raises:
        ShdError: ``support-mismatch`` (the teacher has mass where the student may not attend: LOSS-6),
            ``argument-shape``, ``argument-value``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.

    Source: Eq. 11.
    """
    check_option("reduction", reduction, REDUCTIONS, "LOSS-5")
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < np.inf:
        raise ShdError("argument-value", f"beta must be a finite number of at least 0; got {beta!r}", "LOSS-2")
    teachers, students = as_layers(supervision), as_layers(student_logits)
    if len(teachers) != len(students) or not teachers:
        raise ShdError(
            "argument-shape",
            f"supervision and student_logits must hold the same number of layers, at least 1; "
            f"got {len(teachers)} and {len(students)}",
            "LOSS-3",
        )
    total, num_maps = 0.0, 0
    for layer, (teacher, student) in enumerate(zip(teachers, students, strict=True)):
        kl, counted = kl_rows(
            teacher, student, loss_mask=loss_mask, attn_mask=attn_mask, temperature=temperature, layer=layer
        )
        rows = counted.sum(axis=(0, 2))  # (H_s,)
        total += float((np.where(counted, kl, 0.0).sum(axis=(0, 2)) / np.maximum(rows, 1)).sum())
        num_maps += kl.shape[1]
    return float(beta) * (total / num_maps if reduction == "mean" else total)


def kl_rows(
    supervision: ArrayLike,
    student_logits: ArrayLike,
    *,
    loss_mask: ArrayLike | None = None,
    attn_mask: ArrayLike | None = None,
    temperature: float = 1.0,
    layer: int = 0,
) -> tuple[Array, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
    """KL of every row of one layer, and which rows count; both ``(B, H_s, L)`` (LOSS-1, LOSS-4, LOSS-6)."""
    temperature = check_temperature(temperature)
    logits = as_float(student_logits, "student_logits", ndim=4, allow_minus_inf=True, layer=layer)
    shape = np.shape(supervision)
    if shape != logits.shape:
        raise ShdError(
            "argument-shape",
            f"supervision and student_logits must share one shape (B, H_s, L, S) in layer {layer}; "
            f"got {shape} and {logits.shape}",
            "LOSS-3",
        )
    row_mask = None if loss_mask is None else as_mask(loss_mask, "loss_mask", (shape[0], shape[2]))
    teacher = check_probs(supervision, "supervision", query_mask=row_mask, layer=layer)
    logits = mask_logits(logits, attn_mask) / temperature
    counted = teacher.sum(axis=-1) > 0.0
    if row_mask is not None:
        counted &= row_mask[:, None, :]
    outside = (teacher > 0.0) & np.isneginf(logits) & counted[..., None]
    if outside.any():
        b, h, i, j = (int(x) for x in np.argwhere(outside)[0])
        raise ShdError(
            "support-mismatch",
            f"supervision must be 0 where the student may not attend; got {teacher[b, h, i, j]:.6g} at "
            f"layer {layer}, sample {b}, head {h}, row {i}, key {j}: teacher and student must share one mask",
            "LOSS-6",
        )
    peak = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    shifted = logits - np.where(np.isneginf(peak), 0.0, peak)
    sums = np.exp(shifted).sum(axis=-1, keepdims=True)
    # 0 log 0 = 0, on either side: entries without teacher mass contribute nothing.
    student_log_probs = np.where(teacher > 0.0, shifted, 0.0) - np.log(np.where(sums == 0.0, 1.0, sums))
    log_ratio = np.log(np.where(teacher > 0.0, teacher, 1.0)) - student_log_probs
    return np.where(counted, np.where(teacher > 0.0, teacher * log_ratio, 0.0).sum(axis=-1), 0.0), counted


def as_layers(value: Layers) -> list[ArrayLike]:
    """One array is one layer; a list or tuple holds one array a layer (LOSS-3)."""
    return [*value] if isinstance(value, list | tuple) else [np.asarray(value)]
