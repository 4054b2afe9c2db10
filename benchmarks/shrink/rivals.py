"""Other starts of a student's size, as options of ``shrink``, and the operations of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from shd_ref.shrink.heads import HeadMerge, HeadWeights
from shd_torch.shrink import layer, student
from shd_torch.shrink.families import Array
from shd_torch.shrink.layer import AttentionStatistics, Squeezed
from shd_torch.shrink.student import Shrunk


def count_flops(model: Any, data: Mapping[str, Tensor]) -> int:
    """Floating point operations of matrix products in a forward pass of one sample."""
    from torch.utils.flop_counter import FlopCounterMode

    # The counter knows the fused attention of GPUs and not that of CPUs, and takes what it does not know as free.
    fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _count_attention}
    counter = FlopCounterMode(display=False, custom_mapping=fused)
    with torch.no_grad(), counter:
        model(**{key: tensor[:1] for key, tensor in data.items()})
    return int(counter.get_total_flops())


def _count_attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Two products, of ``(B, H, L, d)`` with ``(B, H_kv, S, d)`` and of the map with ``(B, H_kv, S, d_v)``."""
    samples, heads, length, size = query
    return 2 * samples * heads * length * key[2] * (size + value[3])


class _Sums(layer.AttentionSums):
    """Also ``output_size``: the mean length of each head's output before the projection ``(H,)``."""

    def __init__(self, weights: HeadWeights, device: torch.device) -> None:
        super().__init__(weights, device)
        self.lengths = torch.zeros(weights.num_heads, dtype=torch.float64, device=device)

    def add_maps(self, probs: Tensor, values: Tensor, counted: Tensor, rows: slice) -> None:
        super().add_maps(probs, values, counted, rows)
        outputs = probs.to(values.dtype) @ values.repeat_interleave(probs.shape[1] // values.shape[1], 1)
        self.lengths += (outputs.double().norm(dim=-1) * counted[:, None, rows]).sum((0, 2))

    def read(self, length: int, rows: int, *, with_maps: bool) -> AttentionStatistics:
        statistics = super().read(length, rows, with_maps=with_maps)
        object.__setattr__(statistics, "output_size", (self.lengths / rows).cpu().numpy())
        return statistics


def shrink(teacher: Any, data: Mapping[str, Any], **options: Any) -> Shrunk:
    """``shd_torch.shrink.shrink``, perhaps by a rival's ``axes``, ``squeezer`` and ``importance``."""
    own = {name: options.pop(name) for name in ("axes", "squeezer", "importance") if name in options}
    parts = ((student, "principal_axes", "axes"),)
    parts += ((layer, "squeeze_attention", "squeezer"), (layer, "score_neurons", "importance"))
    with ExitStack() as stack:
        stack.enter_context(patch.object(layer, "AttentionSums", _Sums))
        for module, name, part in parts:
            if part in own:
                stack.enter_context(patch.object(module, name, own[part]))
        return student.shrink(teacher, data, **options)


Choice = Callable[[HeadWeights, HeadMerge, AttentionStatistics], Sequence[Sequence[int]]]
"""Which teacher heads a student head is made of, student head by student head."""


def keep_largest(_: HeadWeights, merge: HeadMerge, statistics: AttentionStatistics) -> list[list[int]]:
    """Of each group the head with the largest output."""
    energy = np.einsum("hhhh->h", statistics.gram)
    return [[max(group, key=lambda head: float(energy[head]))] for group in merge.groups]


def keep_important(weights: HeadWeights, merge: HeadMerge, statistics: AttentionStatistics) -> list[list[int]]:
    """Minitron (arXiv 2407.14679): heads whose output before the projection is longest, not group by group.

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


def pick_heads(choose: Choice) -> Callable[..., Squeezed]:
    """A ``squeezer`` that takes weights as they are, or their means."""

    def squeeze(
        weights: HeadWeights, merge: HeadMerge, study: AttentionStatistics, kv_heads: int, head_dim: int, **_: Any
    ) -> Squeezed:
        chosen = [list(heads) for heads in choose(weights, merge, study)]
        per = len(chosen) // kv_heads
        sharing = [chosen[start : start + per] for start in range(0, len(chosen), per)]
        read = [[weights.reads[head] for heads in group for head in heads] for group in sharing]
        scale = (head_dim / weights.head_dim) ** 0.5  # it undoes the scale of a head of another length

        def fit(rows: Array) -> Array:
            """``(..., d)`` filled with zeros, or cut, to the student's length."""
            room = max(0, head_dim - rows.shape[-1])
            return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, room)])[..., :head_dim]

        means: dict[str, Any] = {"output_bias": weights.output_bias}
        for name, sets, factor in (("query", chosen, scale), ("key", read, 1.0), ("value", read, 1.0)):
            for field in (name, f"{name}_bias"):
                rows = getattr(weights, field)
                mean = None if rows is None else np.stack([rows[heads].mean(0) for heads in sets])
                means[field] = None if mean is None else fit(mean) * factor
        output = np.stack([weights.output[heads].sum(0) for heads in chosen]).swapaxes(1, 2)
        return Squeezed(HeadWeights(output=fit(output).swapaxes(1, 2), **means), "picked", False)

    return squeeze


def keep_channels(moment: Array, width: int, _: str) -> Array:
    """``axes``: the channels with the largest activation in place of the principal axes."""
    best = np.sort(np.argsort(-moment.diagonal(), kind="stable")[:width])
    return np.eye(len(moment))[:, best]


RIVALS: dict[str, dict[str, Any]] = {
    "kept heads": {"axes": keep_channels, "squeezer": pick_heads(keep_largest)},
    "mean pooling": {"axes": keep_channels, "squeezer": pick_heads(pool_groups)},
    "Minitron importance": {
        "axes": keep_channels,
        "squeezer": pick_heads(keep_important),
        "importance": lambda squares, _: np.sqrt(squares),  # how large neurons are, not how much of them is read
    },
}
"""Options of this ``shrink`` by name."""
