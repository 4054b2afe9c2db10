"""Factored records: the teacher's queries and keys in place of maps (CACHE-140 to CACHE-153).

For long samples these are smaller. Keys are centred first: what is added to all keys of a head changes no map, and
smaller numbers are rounded by less. If rounding moves no logit of a row by more than e, the row's KL is at most ``e^2
/ 2`` (CACHE-151, by Hoeffding's lemma); mixing only lowers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import (
    INT8_LEVELS,
    SUPPORTS,
    check_blob,
    check_finite,
    largest_move,
    to_float16,
    to_int8,
)
from shd_ref.cache.storage.documents import optional
from shd_ref.errors import ShdError, need
from shd_ref.integers import check_option

Array32 = NDArray[np.float32]
Array64 = NDArray[np.float64]

FACTORED_CODECS: Final = ("float16", "int8")
DEFAULT_FACTORED_CODEC: Final = "int8"

MAX_SCALE: Final = 2.0**128
"""Below it no logit of binary32 queries and keys overflows in binary64."""


@dataclass(frozen=True)
class LayerFactors:
    """A layer's parameters for computing maps from queries and keys; one per layer of a manifest (CACHE-141)."""

    num_key_heads: int  # H_kv, a divisor of H_t: query head t reads key head t // (H_t / H_kv)
    width: int  # d, components of a query and of a key
    scale: float  # of their products, above 0 and below 2^128
    window: int | None = optional(None)  # a row attends to keys fewer than so many positions away (CACHE-144)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", float(self.scale))  # a document tells 1 from 1.0


@dataclass(frozen=True, eq=False)
class CodedFactors:
    """Queries and keys of one sample and layer as codes."""

    queries: NDArray[Any]  # (H_t, n, d) float16 or int8
    keys: NDArray[Any]  # (H_kv, n, d), centred
    query_steps: Array32 | None = None  # (H_t, n), the value of code 1; None for float16
    key_steps: Array32 | None = None  # (H_kv, n)


def encode_factors(codec: str, queries: NDArray[Any], keys: NDArray[Any]) -> CodedFactors:
    """Code queries ``(H_t, n, d)`` and keys ``(H_kv, n, d)``, which are centred (CACHE-143 to CACHE-148).

    Both are float32, as the teacher multiplies them, without padding. Raises ``argument-value`` (codec, a number
    beyond float16), ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    check_option("codec", codec, FACTORED_CODECS, "CACHE-142")
    for name, values in (("queries", queries), ("keys", keys)):
        fits = values.ndim == 3 and values.shape[1:] == queries.shape[1:] and values.size > 0
        need(fits, "argument-shape", name, "be (heads, n, d)", values.shape, spec_id="CACHE-143")
        need(values.dtype == np.float32, "argument-dtype", name, "be float32", values.dtype, spec_id="CACHE-143")
        check_finite(name, values, "CACHE-143")
    centred = keys - keys.mean(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
    if codec == "float16":
        return CodedFactors(to_float16("queries", queries), to_float16("keys", centred))
    query_codes, query_steps = to_int8(queries)
    key_codes, key_steps = to_int8(centred)
    return CodedFactors(query_codes, key_codes, query_steps, key_steps)


def decode_factors(coded: CodedFactors) -> tuple[Array32, Array32]:
    """Queries ``(H_t, n, d)`` and centred keys ``(H_kv, n, d)``, float32 (CACHE-147, CACHE-148)."""
    queries, keys = coded.queries.astype(np.float32), coded.keys.astype(np.float32)
    if coded.query_steps is not None and coded.key_steps is not None:
        queries *= coded.query_steps[..., None]
        keys *= coded.key_steps[..., None]
    return queries, keys


def factored_size(codec: str, num_heads: int, layer: LayerFactors, length: int) -> int:
    """Bytes of one blob of H_t = ``num_heads`` and n = ``length`` (CACHE-149)."""
    check_option("codec", codec, FACTORED_CODECS, "CACHE-142")
    vectors = (num_heads + layer.num_key_heads) * length
    return vectors * (2 * layer.width if codec == "float16" else layer.width + 4)


def pack_factors(coded: CodedFactors) -> NDArray[np.uint8]:
    """Codes of one layer as bytes: steps if there are any, then codes, queries before keys (CACHE-149)."""
    stored = (coded.query_steps, coded.key_steps, coded.queries, coded.keys)
    arrays = [array for array in stored if array is not None]
    little = (np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")) for array in arrays)
    return np.concatenate([array.reshape(-1).view(np.uint8) for array in little])


def unpack_factors(
    blob: NDArray[np.uint8], codec: str, num_heads: int, layer: LayerFactors, length: int
) -> CodedFactors:
    """The inverse of ``pack_factors``; ``argument-shape`` for a blob of the wrong size."""
    size = factored_size(codec, num_heads, layer, length)
    layout = f"{num_heads} and {layer.num_key_heads} heads x {length} positions of width {layer.width} ({codec})"
    check_blob("blob", blob, size, layout, "CACHE-149")
    dtype, vectors, start = np.dtype(codec), (num_heads + layer.num_key_heads) * length, 0
    steps: list[Array32] = []
    if codec == "int8":
        start = 4 * vectors
        # A copy: blobs lie in a shard without alignment.
        rows = blob[:start].copy().view("<f4").astype(np.float32, copy=False).reshape(-1, length)
        steps = np.split(rows, [num_heads])
    codes = blob[start:].copy().view(dtype.newbyteorder("<")).astype(dtype, copy=False)
    return CodedFactors(*np.split(codes.reshape(-1, length, layer.width), [num_heads]), *steps)


def check_coded_factors(coded: CodedFactors) -> None:
    """Refuse codes that no encoder makes: ``not-finite``, ``argument-value`` (CACHE-150)."""
    for codes, steps in ((coded.queries, coded.query_steps), (coded.keys, coded.key_steps)):
        check_finite("queries and keys", codes if steps is None else steps, "CACHE-150")
        if steps is not None and ((steps < 0).any() or (codes == -INT8_LEVELS - 1).any()):
            raise ShdError("argument-value", "steps must not be negative, and no code -128", "CACHE-150")


def rebuild_maps(
    queries: NDArray[Any],
    keys: NDArray[Any],
    scale: float,
    support: str,
    mixing: NDArray[Any] | None = None,
    *,
    window: int | None = None,
    rows: slice | None = None,
) -> Array32:
    """Maps from queries and keys: the teacher's, or mixed to the student's (CACHE-152).

    Args:
        queries: ``(H_t, n, d)``, without padding.
        keys: ``(H_kv, n, d)``.
        scale: of their products.
        support: ``"full"`` or ``"causal"``; ``argument-value`` for another.
        mixing: ``(H_s, H_t)``, or None for the teacher's own maps.
        window: see ``LayerFactors``.
        rows: the ones to make. Default: all.

    Returns:
        ``(H_s or H_t, rows, n)`` float32, made in float64 head by head.
    """
    check_option("support", support, SUPPORTS, "CACHE-125")
    (heads, length), heads_per_key = queries.shape[:2], len(queries) // len(keys)
    mixing = np.eye(heads) if mixing is None else mixing.astype(np.float64)
    selected = slice(None) if rows is None else rows
    low, high = (bound[selected, None] for bound in row_bounds(length, support, window))
    masked = (np.arange(length) < low) | (np.arange(length) > high)
    merged = np.zeros((len(mixing), *masked.shape))
    for head in range(heads):
        key = keys[head // heads_per_key].astype(np.float64)
        logits = scale * (queries[head, selected].astype(np.float64) @ key.T)
        logits[masked] = -np.inf
        probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probs /= probs.sum(axis=-1, keepdims=True)
        for student in np.flatnonzero(mixing[:, head]):
            merged[student] += mixing[student, head] * probs
    return merged.astype(np.float32)


def row_bounds(length: int, support: str, window: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first and the last key ``(length,)`` that each row attends to, and to all between (CACHE-144)."""
    rows = np.arange(length, dtype=np.int64)
    reach = length if window is None else min(window, length)
    low = np.maximum(rows - reach + 1, 0)
    return low, rows if support == "causal" else np.minimum(rows + reach - 1, length - 1)


def factored_kl_bound(
    codec: str, queries: NDArray[Any], keys: NDArray[Any], scale: float, support: str = "full"
) -> Array64:
    """The most that coding can cost each row of the teacher's maps, in nats ``(H_t, n)`` float64 (CACHE-151).

    From queries ``(H_t, n, d)`` and keys ``(H_kv, n, d)`` before coding. Within a window a row attends to fewer keys,
    and the bound holds all the more. A row of a mixed map costs at most the largest of its members'.
    """
    check_option("codec", codec, FACTORED_CODECS, "CACHE-142")
    keys = keys.astype(np.float64) - keys.mean(axis=1, keepdims=True, dtype=np.float64)
    keys = np.repeat(keys, len(queries) // len(keys), axis=0)
    queries = queries.astype(np.float64)
    moved_queries, moved_keys = largest_move(codec, queries), largest_move(codec, keys)  # (H_t, n)
    key_sums = np.abs(keys).sum(axis=-1)
    # A rounded query is longer than the query by at most d times its move.
    query_sums = np.abs(queries).sum(axis=-1) + queries.shape[-1] * moved_queries
    if support == "causal":  # row i attends to keys 0 to i
        key_sums, moved_keys = (np.maximum.accumulate(values, axis=1) for values in (key_sums, moved_keys))
    else:
        key_sums, moved_keys = (values.max(axis=1, keepdims=True) for values in (key_sums, moved_keys))
    moved = scale * (moved_queries * key_sums + moved_keys * query_sums)
    return np.asarray(moved**2 / 2, dtype=np.float64)
