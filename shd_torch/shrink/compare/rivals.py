"""Starts that a squeezed student is compared with: heads, channels and neurons that are kept, and heads pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shd_ref.shrink.merges import HeadMerge
from shd_ref.shrink.weights import HeadWeights
from shd_ref.shrink.width import Axes
from shd_torch.shrink.families import Array
from shd_torch.shrink.heads import AttentionStatistics, Squeezed
from shd_torch.shrink.layer import Squeezer

Choice = Callable[[HeadWeights, HeadMerge, AttentionStatistics], Sequence[Sequence[int]]]
"""Which teacher heads a student head is made of, student head by student head."""


def keep_largest(_: HeadWeights, merge: HeadMerge, statistics: AttentionStatistics) -> list[list[int]]:
    """Of each group the head with the largest output."""
    energy = np.einsum("hhhh->h", statistics.gram)
    return [[max(group, key=lambda head: float(energy[head]))] for group in merge.groups]


def keep_important(weights: HeadWeights, merge: HeadMerge, statistics: AttentionStatistics) -> list[list[int]]:
    """Minitron (arXiv 2407.14679): heads whose output before the projection is longest; groups play no part.

    Inside key/value groups where all of these stay, else of all heads.
    """
    kept, groups = len(merge.groups), weights.num_kv_heads
    groups = groups if kept % groups == 0 else 1
    order = np.argsort(-statistics.output_size.reshape(groups, -1), axis=1, kind="stable")
    chosen = np.sort(order[:, : kept // groups], axis=1)
    starts = np.arange(groups)[:, None] * order.shape[1]
    return [[int(head)] for head in (chosen + starts).ravel()]


def pool_groups(_: HeadWeights, merge: HeadMerge, __: AttentionStatistics) -> list[list[int]]:
    """All heads of each group: the mean of their queries, keys and values, and the sum of their outputs."""
    return [list(group) for group in merge.groups]


def pick_heads(choose: Choice) -> Squeezer:
    """A ``squeezer`` of ``shrink`` that takes weights as they are, or their means."""

    def squeeze(
        weights: HeadWeights,
        merge: HeadMerge,
        statistics: AttentionStatistics,
        num_kv_heads: int,
        head_dim: int,
        **_: Any,
    ) -> Squeezed:
        chosen = [list(heads) for heads in choose(weights, merge, statistics)]
        per = len(chosen) // num_kv_heads
        sharing = [chosen[start : start + per] for start in range(0, len(chosen), per)]
        read = [[weights.reads[head] for heads in part for head in heads] for part in sharing]
        scale = (head_dim / weights.head_dim) ** 0.5  # it undoes the scale of a head of another length

        def fit(part: Array) -> Array:
            """``(..., d)`` filled with zeros, or cut, to the student's length."""
            room = max(0, head_dim - part.shape[-1])
            return np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, room)])[..., :head_dim]

        def mean(part: Array, sets: list[list[int]]) -> Array:
            return fit(np.stack([part[heads].mean(0) for heads in sets]))

        query_bias, key_bias, value_bias = weights.query_bias, weights.key_bias, weights.value_bias
        made = HeadWeights(
            mean(weights.query, chosen) * scale,
            mean(weights.key, read),
            mean(weights.value, read),
            fit(np.stack([weights.output[heads].sum(0) for heads in chosen]).swapaxes(1, 2)).swapaxes(1, 2),
            None if query_bias is None else mean(query_bias, chosen) * scale,
            None if key_bias is None else mean(key_bias, read),
            None if value_bias is None else mean(value_bias, read),
            weights.output_bias,
        )
        return Squeezed(made, "picked", False)

    return squeeze


def keep_channels(moment: Array, width: int, _: str) -> Axes:
    """``axes`` of ``shrink``: the channels with the largest activation in place of the principal axes."""
    size = moment.diagonal()
    best = np.sort(np.argsort(-size, kind="stable")[:width])
    return Axes(np.eye(len(moment))[:, best], float(size[best].sum() / size.sum()))


def by_activation(squares: Array, _: Array) -> Array:
    """``importance`` of ``shrink`` as Minitron has it: how large a neuron is, not how much of it is read."""
    size: Array = np.sqrt(squares)
    return size


RIVALS: dict[str, dict[str, Any]] = {
    "kept heads": {"squeezer": pick_heads(keep_largest), "axes": keep_channels},
    "mean pooling": {"squeezer": pick_heads(pool_groups), "axes": keep_channels},
    "Minitron importance": {
        "squeezer": pick_heads(keep_important),
        "axes": keep_channels,
        "importance": by_activation,
    },
}
"""Options of ``shrink`` by name; all are compared without alignment."""
