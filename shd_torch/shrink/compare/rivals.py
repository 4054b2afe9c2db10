"""Starts that a squeezed student is compared with: heads, channels and neurons that are kept, and heads pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shd_torch.shrink.heads import AttentionStatistics, Squeezed
from shd_torch.shrink.layer import Squeezer
from shd_torch.shrink.merges import HeadMerge
from shd_torch.shrink.weights import AttentionWeights

Choice = Callable[[AttentionWeights, HeadMerge, AttentionStatistics], Sequence[Sequence[int]]]
"""Which teacher heads a student head is made of, student head by student head."""


def keep_largest(_: AttentionWeights, merge: HeadMerge, statistics: AttentionStatistics) -> list[list[int]]:
    """Of each group the head with the largest output."""
    heads = len(statistics.gram)
    energy = statistics.gram.flatten()[:: sum(heads**power for power in range(4))]
    return [[max(group, key=lambda head: float(energy[head]))] for group in merge.groups]


def keep_important(weights: AttentionWeights, merge: HeadMerge, statistics: AttentionStatistics) -> list[list[int]]:
    """Minitron (arXiv 2407.14679): heads whose output before the projection is longest; groups play no part.

    Inside key/value groups where all of these stay, else of all heads.
    """
    assert statistics.output_size is not None
    kept, groups = len(merge.groups), weights.num_kv_heads
    groups = groups if kept % groups == 0 else 1
    order = statistics.output_size.reshape(groups, -1).argsort(dim=1, descending=True, stable=True)
    chosen = order[:, : kept // groups].sort(dim=1).values
    starts = torch.arange(groups, device=chosen.device)[:, None] * order.shape[1]
    return [[int(head)] for head in (chosen + starts).flatten()]


def pool_groups(_: AttentionWeights, merge: HeadMerge, __: AttentionStatistics) -> list[list[int]]:
    """All heads of each group: the mean of their queries, keys and values, and the sum of their outputs."""
    return [list(group) for group in merge.groups]


def pick_heads(choose: Choice) -> Squeezer:
    """A ``squeezer`` of ``shrink`` that takes weights as they are, or their means."""

    def squeeze(
        weights: AttentionWeights,
        merge: HeadMerge,
        statistics: AttentionStatistics,
        num_kv_heads: int,
        head_dim: int,
        **_: Any,
    ) -> Squeezed:
        chosen = [list(heads) for heads in choose(weights, merge, statistics)]
        per = len(chosen) // num_kv_heads
        sharing = [chosen[start : start + per] for start in range(0, len(chosen), per)]
        read = [[weights.read_by(head) for heads in part for head in heads] for part in sharing]
        scale = (head_dim / weights.head_dim) ** 0.5  # it undoes the scale of a head of another length

        def mean(part: Tensor | None, sets: list[list[int]], factor: float = 1.0) -> Tensor | None:
            """Of ``(H, ..., d)`` the means over sets of heads, ``d`` filled with zeros or cut."""
            if part is None:
                return None
            made = torch.stack([part[heads].mean(0) for heads in sets])
            room = max(0, head_dim - made.shape[-1])
            return torch.nn.functional.pad(made, (0, room))[..., :head_dim] * factor

        def sure(part: Tensor | None) -> Tensor:
            assert part is not None
            return part

        output = torch.stack([weights.output[heads].sum(0) for heads in chosen]).mT
        made = AttentionWeights(
            sure(mean(weights.query, chosen, scale)),
            sure(mean(weights.key, read)),
            sure(mean(weights.value, read)),
            sure(mean(output, [[head] for head in range(len(chosen))])).mT,
            mean(weights.query_bias, chosen, scale),
            mean(weights.key_bias, read),
            mean(weights.value_bias, read),
            weights.output_bias,
        )
        return Squeezed(made, "picked", False)

    return squeeze


def keep_channels(moment: Tensor, width: int, _: str) -> Tensor:
    """``axes`` of ``shrink``: the channels with the largest activation in place of the principal axes."""
    best = moment.diagonal().argsort(descending=True, stable=True)[:width].sort().values
    return torch.eye(len(moment), dtype=moment.dtype, device=moment.device)[:, best]


def by_activation(squares: Tensor, _: Tensor) -> Tensor:
    """``importance`` of ``shrink`` as Minitron has it: how large a neuron is, not how much of it is read."""
    return squares.sqrt()


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
