"""Tokens (spec chapter TOKEN): positions that only one side has are left out by explicit lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, as_mask, check_probs, in_dtype_of
from shd_ref.errors import ShdError
from shd_ref.integers import as_index
from shd_ref.support import rescale_rows


class AlignedMaps(NamedTuple):
    """What ``align_tokens`` returns (TOKEN-2)."""

    probs: Array  # (B, H, len(rows), len(columns)), rows with the sums they had, or zero where nothing is left
    dropped: Array  # (B, H, len(rows)), the mass that lay on columns not kept


def align_tokens(
    attn_probs: ArrayLike,
    rows: Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
    *,
    query_mask: ArrayLike | None = None,
    row_sums: str = "one",
) -> AlignedMaps:
    """Keep the listed query and key positions, scale the rows back, report the mass that was dropped (TOKEN-1..4).

    For merged maps, after ``squeeze_heads`` (TOKEN-5): alpha reads every position of the teacher.

    Args:
        attn_probs: ``(B, H, L, S)``.
        rows: query positions to keep, in the order wanted; None keeps all.
        columns: key positions to keep, in the order wanted; None keeps all.
        query_mask: boolean ``(B, L)``, True = the row counts; other rows need not be distributions.
        row_sums: ``"one"``, or ``"at_most_one"`` for maps with attention sinks.

    Returns:
        The aligned maps and the dropped mass of each kept row.

    Raises:
        ShdError: ``argument-value`` (a position that is not in the map, or named twice, or none),
            ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.

    Source: silent. Decision: D-20.
    """
    shape = np.shape(attn_probs)
    mask = None
    if query_mask is not None and len(shape) == 4:
        mask = as_mask(query_mask, "query_mask", (shape[0], shape[2]))
    probs = check_probs(attn_probs, "attn_probs", query_mask=mask, row_sums=row_sums)
    kept_rows = _check_positions("rows", rows, probs.shape[2])
    kept_columns = _check_positions("columns", columns, probs.shape[3])
    probs = probs[:, :, kept_rows]
    others = np.setdiff1d(np.arange(probs.shape[3]), kept_columns)
    dropped: Array = probs[..., others].sum(axis=-1)
    aligned = rescale_rows(probs[..., kept_columns], probs.sum(axis=-1), dropped)
    return AlignedMaps(in_dtype_of(attn_probs, aligned), dropped)


def _check_positions(name: str, positions: Sequence[int] | None, size: int) -> list[int]:
    """A list of distinct positions of an axis (TOKEN-4)."""
    if positions is None:
        return list(range(size))
    values = list(positions)
    try:
        kept = [as_index(i) for i in values]
    except TypeError:
        kept = []
    if not kept or not all(0 <= i < size for i in kept) or len(set(kept)) < len(kept):
        message = f"{name} must name at least one position, each once, of 0..{size - 1}; got {values!r}"
        raise ShdError("argument-value", message, "TOKEN-4")
    return kept
