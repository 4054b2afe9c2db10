"""Which case of chapter HEAD makes a layer's attention, from what was measured of the teacher's (HEAD-7..18)."""

from __future__ import annotations

from dataclasses import dataclass

from shd_ref.errors import ShdError
from shd_ref.shrink.heads import concatenate_heads, low_rank_heads, mix_queries
from shd_ref.shrink.merges import HeadMerge
from shd_ref.shrink.weights import HeadWeights, Rotary
from shd_torch.shrink.families import Array

SLOW_ANGLE = 1.0
"""A rotated pair that turns by less than this, in radians, over a calibration sample is slow (HEAD-16)."""


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """What one layer's attention says over the whole calibration set.

    Attributes:
        gram: the gram tensor, summed ``(H, H, H, H)``.
        augmented: second moment of the inputs with a one, ``[x, 1]``, ``(D + 1, D + 1)``.
        centred: of the inputs less their mean over the sample, ``(D, D)``.
        query_size: root mean square of each head's queries ``(H,)``.
        output_size: mean length of each head's output before the projection ``(H,)``, for comparisons.
        length: of the longest sample.
    """

    gram: Array
    augmented: Array
    centred: Array
    query_size: Array
    output_size: Array
    length: int


@dataclass(frozen=True, eq=False)
class Squeezed:
    """A student's attention, the case of chapter HEAD that made it, and whether that is exact."""

    weights: HeadWeights
    case: str
    exact: bool


def squeeze_attention(
    weights: HeadWeights,
    merge: HeadMerge,
    statistics: AttentionStatistics,
    num_kv_heads: int,
    head_dim: int,
    *,
    frequencies: Array | None = None,
    query_norm: bool = False,
) -> Squeezed:
    """The best case that applies (HEAD's table).

    Args:
        weights: of the teacher.
        merge: groups and C.
        statistics: of the layer.
        num_kv_heads: of the student.
        head_dim: of the student.
        frequencies: of rotary positions, one a pair of entries i and ``i + d / 2``; None without.
        query_norm: whether queries are normed before their product with keys.
    """
    same_shape = num_kv_heads == weights.num_kv_heads and head_dim == weights.head_dim
    if len(merge.groups) == weights.num_heads and same_shape:
        return Squeezed(weights, "copied", True)
    if same_shape and merge.shares_keys(num_kv_heads):
        mixed = mix_queries(weights, merge, statistics.query_size if query_norm else None)
        return Squeezed(mixed, "queries", not query_norm)
    if query_norm:
        raise ShdError(
            "shrink-unsupported",
            "heads must merge inside key and value heads where queries are normed, since keys are normed too: ask "
            f"for a multiple of the teacher's {weights.num_kv_heads} key and value heads; got groups {merge.groups}",
            "HEAD-18",
        )
    longest = max(len(group) for group in merge.groups)
    if frequencies is None and num_kv_heads == len(merge.groups) and longest * weights.head_dim <= head_dim:
        return Squeezed(concatenate_heads(weights, merge, head_dim), "side-by-side", True)
    rotary = None
    if frequencies is not None:
        rotary = Rotary(frequencies, slow=frequencies * statistics.length < SLOW_ANGLE)
    moments = statistics.augmented, statistics.centred
    nearest = low_rank_heads(weights, merge, num_kv_heads, head_dim, moments[0], key_moment=moments[1], rotary=rotary)
    return Squeezed(nearest, "low-rank" if rotary is None else "rotary", False)
