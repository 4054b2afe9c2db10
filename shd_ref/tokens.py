"""Tokens (spec chapter TOKEN): positions that only one side has are left out, tokens cut otherwise are pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.attention import Array, Mask, as_float, as_mask, check_probs, first_of, in_dtype_of
from shd_ref.errors import ShdError
from shd_ref.integers import as_index, check_integer
from shd_ref.support import rescale_rows


class AlignedMaps(NamedTuple):
    """What ``align_tokens`` and ``pool_tokens`` return (TOKEN-2, TOKEN-9)."""

    probs: Array  # (B, H, l, s), rows with the sums they had, or zero where nothing is left
    dropped: Array  # (B, H, l), the mass that lay on columns not kept, or on tokens without a group


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
    probs, _ = _check_maps(attn_probs, query_mask, row_sums)
    kept_rows = _check_positions("rows", rows, probs.shape[2])
    kept_columns = _check_positions("columns", columns, probs.shape[3])
    probs = probs[:, :, kept_rows]
    others = np.setdiff1d(np.arange(probs.shape[3]), kept_columns)
    dropped: Array = probs[..., others].sum(axis=-1)
    aligned = rescale_rows(probs[..., kept_columns], probs.sum(axis=-1), dropped)
    return AlignedMaps(in_dtype_of(attn_probs, aligned), dropped)


def pool_tokens(
    attn_probs: ArrayLike,
    row_groups: ArrayLike | None = None,
    column_groups: ArrayLike | None = None,
    *,
    query_mask: ArrayLike | None = None,
    row_sums: str = "one",
) -> AlignedMaps:
    """Maps over the tokens of a student that cuts its input otherwise: rows averaged, columns summed (TOKEN-8..11).

    For merged maps, after ``squeeze_heads`` (TOKEN-12): alpha reads every token of the teacher. ``patch_groups``,
    ``span_groups`` and ``id_groups`` make groups; self-attention takes the same for rows and columns.

    Args:
        attn_probs: ``(B, H, L, S)``.
        row_groups: ``(l, L)``, or ``(B, l, L)`` by sample: the weight, at least 0, of each of the teacher's tokens
            in each of the student's; None keeps every token.
        column_groups: ``(s, S)`` or ``(B, s, S)``, alike for keys.
        query_mask: boolean ``(B, L)``, True = the row counts; other rows have no weight.
        row_sums: ``"one"``, or ``"at_most_one"`` for maps with attention sinks.

    Returns:
        Maps ``(B, H, l, s)``, with the mean mass of the rows that they were made of, and the mass of each on keys
        that are in no group, before scaling.

    Raises:
        ShdError: ``argument-value`` (a weight below 0), ``argument-shape``, ``argument-dtype``, ``not-finite``,
            ``not-a-distribution``.

    Source: silent. Decision: D-20, D-25.
    """
    probs, mask = _check_maps(attn_probs, query_mask, row_sums)
    rows = _check_groups("row_groups", row_groups, probs.shape[0], probs.shape[2])
    columns = _check_groups("column_groups", column_groups, probs.shape[0], probs.shape[3])
    pooled = pool_maps(probs, rows, columns, mask)
    return AlignedMaps(in_dtype_of(attn_probs, pooled.probs), pooled.dropped)


def pool_maps(probs: Array, rows: Array, columns: Array, mask: Mask | None) -> AlignedMaps:
    """``pool_tokens`` on checked arrays, groups ``(B or 1, 1, l, L)``."""
    counted: Mask = np.any(probs > 0.0, axis=-1)  # (B, H, L)
    if mask is not None:
        counted &= mask[:, None]
    weights = _normalised(rows * counted[:, :, None], axis=-1)  # (B, H, l, L)
    counted_probs = np.where(counted[..., None], probs, 0.0)
    grouped = columns.any(axis=-2, keepdims=True)  # (B or 1, 1, 1, S)
    dropped: Array = (weights @ np.where(grouped, 0.0, counted_probs).sum(axis=-1)[..., None])[..., 0]
    mass = (weights @ counted_probs.sum(axis=-1)[..., None])[..., 0]
    pooled = weights @ counted_probs @ _normalised(columns, axis=-2).swapaxes(-1, -2)
    return AlignedMaps(rescale_rows(pooled, mass, dropped), dropped)


def patch_groups(teacher_grid: Sequence[int], student_grid: Sequence[int], *, extra: int = 0) -> Array:
    """Groups of two grids of patches over one image, by the share of their areas that they have in common.

    Args:
        teacher_grid: patches along each axis, such as ``(14, 14)``; tokens are in row-major order.
        student_grid: alike; neither need divide the other.
        extra: tokens in front that are no patches (class token, registers); each is a group.

    Returns:
        ``(l, L)``, for ``pool_tokens``.

    Raises:
        ShdError: ``argument-value``.
    """
    grids = [
        [check_integer(name, size, 1, None) for size in grid]
        for name, grid in (("teacher_grid", teacher_grid), ("student_grid", student_grid))
    ]
    front = check_integer("extra", extra, 0, None)
    if len(grids[0]) != len(grids[1]) or not grids[0]:
        message = f"student_grid must have as many axes as teacher_grid, at least one; got {grids[1]} and {grids[0]}"
        raise ShdError("argument-value", message)
    areas: Array = np.ones((1, 1))
    for many, few in zip(*grids, strict=True):
        # An axis of many * few units, of which each of the teacher's patches covers few, each of the student's many.
        ends = [np.arange(count)[:, None] * size + [0, size] for count, size in ((many, few), (few, many))]
        areas = np.kron(areas, _overlaps(*ends)).astype(np.float64)
    groups = np.eye(front + areas.shape[0], front + areas.shape[1])
    groups[front:, front:] = areas
    return groups


def span_groups(teacher_spans: ArrayLike, student_spans: ArrayLike) -> Array:
    """Groups of two tokenizers of one text, by the number of characters that their tokens have in common.

    Tokens without characters (special ones) meet by their order: those in front with those in front, those behind
    with those behind, as far as both have some.

    Args:
        teacher_spans: integers ``(L, 2)``, of each token the first character and the one after its last: a fast
            tokenizer's ``offset_mapping``, without padding.
        student_spans: ``(l, 2)``, of the same text.

    Returns:
        ``(l, L)``, for ``pool_tokens``.

    Raises:
        ShdError: ``argument-value``.
    """
    spans = [np.asarray(value) for value in (teacher_spans, student_spans)]
    for name, value in zip(("teacher_spans", "student_spans"), spans, strict=True):
        pairs = value.dtype.kind in "iu" and value.ndim == 2 and value.shape[1] == 2
        if not pairs or (value[:, 1] < value[:, 0]).any():
            rule = f"{name} must be integers (tokens, 2), each token's first character and the one after its last"
            raise ShdError("argument-value", f"{rule}; got {value.dtype} {value.shape}: {str(value)[:60]}")
    groups = _overlaps(*spans)
    # How many tokens in front, and behind, have no characters; all are in front where no token has any.
    ends = [_outer(value[:, 1] == value[:, 0]) for value in spans]
    front, behind = (min(both) for both in zip(*ends, strict=True))
    for i in range(front):
        groups[i, i] = 1.0
    for i in range(1, behind + 1):
        groups[-i, -i] = 1.0
    return groups


def _outer(empty: Mask) -> tuple[int, int]:
    if empty.all():
        return len(empty), 0
    return int(np.argmin(empty)), int(np.argmin(empty[::-1]))


def id_groups(ids: ArrayLike, num_groups: int | None = None) -> Array:
    """Groups of tokens that were merged, of each the number of its group; a number below 0 is in none.

    Args:
        ids: integers ``(L,)``, or ``(B, L)`` by sample.
        num_groups: l; default: the largest number and one.

    Returns:
        ``(l, L)`` or ``(B, l, L)``, for ``pool_tokens``.

    Raises:
        ShdError: ``argument-value``, also for a number from ``num_groups`` on.
    """
    numbers = np.asarray(ids)
    if numbers.dtype.kind not in "iu" or numbers.ndim not in (1, 2) or not numbers.size:
        raise ShdError("argument-value", f"ids must be integers (L,) or (B, L); got {numbers.dtype} {numbers.shape}")
    least = max(int(numbers.max()) + 1, 1)
    count = least if num_groups is None else check_integer("num_groups", num_groups, least, None)
    groups: Array = (numbers[..., None, :] == np.arange(count)[:, None]).astype(np.float64)
    return groups


def _overlaps(teacher_spans: NDArray[Any], student_spans: NDArray[Any]) -> Array:
    """Length ``(l, L)`` that spans of the student have in common with those of the teacher."""
    teacher, student = teacher_spans.astype(np.float64), student_spans.astype(np.float64)[:, None]
    ends: Array = np.minimum(teacher[:, 1], student[..., 1]) - np.maximum(teacher[:, 0], student[..., 0])
    return np.asarray(np.maximum(ends, 0.0))


def _normalised(weights: Array, *, axis: int) -> Array:
    sums: Array = weights.sum(axis=axis, keepdims=True)
    return weights / np.where(sums == 0.0, 1.0, sums)


def _check_maps(attn_probs: ArrayLike, query_mask: ArrayLike | None, row_sums: str) -> tuple[Array, Mask | None]:
    shape = np.shape(attn_probs)
    mask = None
    if query_mask is not None and len(shape) == 4:
        mask = as_mask(query_mask, "query_mask", (shape[0], shape[2]))
    return check_probs(attn_probs, "attn_probs", query_mask=mask, row_sums=row_sums), mask


def _check_groups(name: str, groups: ArrayLike | None, batch: int, size: int) -> Array:
    """Weights ``(B or 1, 1, l, L)`` (TOKEN-8, TOKEN-11)."""
    if groups is None:
        return np.eye(size)[None, None]
    weights = as_float(groups, name)
    if weights.ndim not in (2, 3) or weights.shape[-1] != size or (weights.ndim == 3 and len(weights) != batch):
        rule = f"{name} must be (groups, {size}), or ({batch}, groups, {size}) by sample"
        raise ShdError("argument-shape", f"{rule}; got {weights.shape}", "TOKEN-11")
    if (weights < 0.0).any():
        where = first_of(weights < 0.0)
        message = f"{name} must be at least 0; got {weights[where]:.6g} at index {where}"
        raise ShdError("argument-value", message, "TOKEN-11")
    return weights[..., None, :, :] if weights.ndim == 3 else weights[None, None]


def _check_positions(name: str, positions: Sequence[int] | None, size: int) -> list[int]:
    """A list of distinct positions of an axis (TOKEN-4)."""
    if positions is None:
        return list(range(size))
    values = list(positions)
    try:
        places = [as_index(i) for i in values]
    except TypeError:
        places = []
    if not places or not all(0 <= i < size for i in places) or len(set(places)) < len(places):
        message = f"{name} must name at least one position, each once, of 0..{size - 1}; got {values!r}"
        raise ShdError("argument-value", message, "TOKEN-4")
    return places
