"""Tokens (spec chapter TOKEN): positions that only one side has are left out by explicit lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_torch.checks import check_mask, check_probs, check_real, compute_dtype, map_dtype
from shd_torch.maps.support import rescale_rows


class AlignedMaps(NamedTuple):
    """What ``align_tokens`` returns (TOKEN-2)."""

    probs: Tensor  # (B, H, len(rows), len(columns)), rows with the sums they had, or zero where nothing is left
    dropped: Tensor  # (B, H, len(rows)), the mass that lay on columns not kept


@torch.no_grad()
def align_tokens(
    attn_probs: Tensor,
    rows: Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
    *,
    query_mask: Tensor | None = None,
    row_sums: str = "one",
    check: bool = True,
) -> AlignedMaps:
    """Keep the listed query and key positions, scale the rows back, report the mass that was dropped (TOKEN-1..4).

    For merged maps, after ``squeeze_heads`` (TOKEN-5): alpha reads every position of the teacher. Runs without
    gradient.

    Args:
        attn_probs: ``(B, H, L, S)``.
        rows: query positions to keep, in the order wanted; None keeps all.
        columns: key positions to keep, in the order wanted; None keeps all.
        query_mask: boolean ``(B, L)``, True = the row counts; other rows need not be distributions.
        row_sums: ``"one"``, or ``"at_most_one"`` for maps with attention sinks.
        check: validate the values of the maps, which costs a device sync.

    Returns:
        The aligned maps in the dtype they came in, and the dropped mass of each kept row in float64 or float32.

    Raises:
        ShdError: ``argument-value`` (a position that is not in the map, or named twice, or none),
            ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.

    Source: silent. Decision: D-20.
    """
    check_real(attn_probs, "attn_probs", check=False, ndim=4)
    batch, _, num_rows, num_columns = attn_probs.shape
    if query_mask is not None:
        check_mask(query_mask, "query_mask", (batch, num_rows))
    check_probs(attn_probs, "attn_probs", check=check, query_mask=query_mask, row_sums=row_sums)
    kept_rows = _check_positions("rows", rows, num_rows)
    kept_columns = _check_positions("columns", columns, num_columns)
    probs = attn_probs.detach()[:, :, kept_rows].to(compute_dtype(attn_probs))
    others = sorted(set(range(num_columns)) - set(kept_columns))
    dropped = probs[..., others].sum(-1)
    aligned = rescale_rows(probs[..., kept_columns], probs.sum(-1), dropped)
    return AlignedMaps(aligned.to(map_dtype(attn_probs)), dropped)


def _check_positions(name: str, positions: Sequence[int] | None, size: int) -> list[int]:
    """A list of distinct positions of an axis (TOKEN-4)."""
    if positions is None:
        return list(range(size))
    given = positions.tolist() if isinstance(positions, Tensor) else list(positions)
    valid = all(hasattr(i, "__index__") and not isinstance(i, bool) and 0 <= int(i) < size for i in given)
    if not given or not valid or len({int(i) for i in given}) < len(given):
        raise ShdError(
            "argument-value",
            f"{name} must name at least one position, each once, of 0..{size - 1}; got {given!r}",
            "TOKEN-4",
        )
    return [int(i) for i in given]
