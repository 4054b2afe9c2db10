"""Support (spec chapter LOSS, LOSS-6 and LOSS-13 to -15): where the teacher has mass and the student may attend."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import (
    Array,
    Mask,
    as_float,
    as_mask,
    check_probs,
    first_of,
    in_dtype_of,
    mask_logits,
    place_of,
)
from shd_ref.errors import ShdError


class IntersectedMaps(NamedTuple):
    """What ``intersect_support`` returns (LOSS-15)."""

    supervision: Array  # (B, H_s, L, S), rows with the sums they had, or zero where nothing is left
    dropped: Array  # (B, H_s, L), the mass that lay where the student may not attend


def intersect_support(
    supervision: ArrayLike,
    student_logits: ArrayLike,
    *,
    loss_mask: ArrayLike | None = None,
    attn_mask: ArrayLike | None = None,
    row_sums: str = "one",
) -> IntersectedMaps:
    """Zero the teacher's mass where the student may not attend, scale the rows back, report the loss (LOSS-15).

    Args:
        supervision: A~ ``(B, H_s, L, S)``, one layer.
        student_logits: same shape; -inf marks a key that the student may not attend.
        loss_mask: boolean ``(B, L)``, True = the row counts; other rows need not be distributions.
        attn_mask: boolean, broadcastable to the logits, True = may attend.
        row_sums: ``"one"``, or ``"at_most_one"`` for maps with attention sinks.

    Returns:
        The maps and the mass dropped from each row.

    Raises:
        ShdError: ``argument-shape``, ``argument-value``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.

    Source: silent. Decision: D-17.
    """
    teacher, logits, _ = check_layer(
        supervision, student_logits, loss_mask=loss_mask, attn_mask=attn_mask, row_sums=row_sums, layer=0
    )
    maps, dropped = intersect(teacher, ~np.isneginf(logits))
    return IntersectedMaps(in_dtype_of(supervision, maps), dropped)


def intersect(teacher: Array, may_attend: Mask) -> IntersectedMaps:
    """``intersect_support`` on checked arrays."""
    maps = np.where(may_attend, teacher, 0.0)
    dropped: Array = np.where(may_attend, 0.0, teacher).sum(axis=-1)
    return IntersectedMaps(rescale_rows(maps, teacher.sum(axis=-1), dropped), dropped)


def rescale_rows(maps: Array, mass: Array, dropped: Array) -> Array:
    """Rows ``(..., S)`` scaled back to their mass; those that lost nothing stay as they are, bit for bit."""
    sums = maps.sum(axis=-1, keepdims=True)
    rescaled = maps / np.where(sums == 0.0, 1.0, sums) * mass[..., None]
    return np.where(dropped[..., None] > 0.0, rescaled, maps)


def check_layer(
    supervision: ArrayLike,
    student_logits: ArrayLike,
    *,
    loss_mask: ArrayLike | None,
    attn_mask: ArrayLike | None,
    row_sums: str,
    layer: int,
) -> tuple[Array, Array, Mask]:
    """One layer's maps and masked logits ``(B, H_s, L, S)``, and ``loss_mask`` as ``(B, H_s, L)`` (LOSS-3)."""
    logits = as_float(student_logits, "student_logits", ndim=4, allow_minus_inf=True, layer=layer)
    batch, heads, rows, _ = logits.shape
    if np.shape(supervision) != logits.shape:
        rule = f"supervision and student_logits must share one shape (B, H_s, L, S) in layer {layer}"
        raise ShdError("argument-shape", f"{rule}; got {np.shape(supervision)} and {logits.shape}", "LOSS-3")
    row_mask = None if loss_mask is None else as_mask(loss_mask, "loss_mask", (batch, rows))
    teacher = check_probs(supervision, "supervision", query_mask=row_mask, layer=layer, row_sums=row_sums)
    counted = np.ones((batch, rows), dtype=np.bool_) if row_mask is None else row_mask
    return teacher, mask_logits(logits, attn_mask), np.repeat(counted[:, None], heads, axis=1)


def check_support(teacher: Array, may_attend: Mask, counted: Mask, *, divergence: str, layer: int) -> None:
    """The two sides must have one support: LOSS-6, and for the reverse KL the other way as well (LOSS-13)."""
    outside = (teacher > 0.0) & ~may_attend & counted[..., None]
    if outside.any():
        where = first_of(outside)
        got = f"{teacher[where]:.6g} at {place_of(where, 4, layer)}"
        rule = f"supervision must be 0 where the student may not attend; got {got}"
        raise ShdError("support-mismatch", f"{rule}: teacher and student must share one mask", "LOSS-6")
    if divergence != "reverse_kl":
        return
    empty = (teacher == 0.0) & may_attend & counted[..., None]
    if empty.any():
        position = place_of(first_of(empty), 4, layer)
        rule = "supervision must be above 0 where the student may attend, for reverse_kl is infinite otherwise"
        message = f"{rule}; got 0 at {position}: js is the divergence for maps with zeros"
        raise ShdError("support-mismatch", message, "LOSS-13")
