"""Key and value heads that more query heads come to share: what these see in the calibration, then the merge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.shrink.heads import HeadMerge, HeadWeights, mix_queries
from shd_ref.shrink.sharing import Group, SeenGroup, find_turns, group_heads, share_heads, turn_heads
from shd_torch.shrink.calibration import Batch, recorded_attention, run_layer
from shd_torch.shrink.families import Array, Family, as_array, find_part

ROWS = 4096
"""Of the calibration that are looked at, evenly spread: moments of some hundred entries settle sooner."""
_FORMS = 2**22  # entries of the products of queries and keys in one step: 32 MiB
_MOMENTS = 2**27  # of a layer's moments: 1 GiB; without them the average of turned heads stays


class _Seen:
    """Sums of ``SeenGroup`` for each group, over some rows of a layer's maps."""

    def __init__(
        self, groups: Sequence[Group], turns: tuple[Array, Array], pairs: int, batches: Sequence[Batch], device: Any
    ) -> None:
        self._groups, self._pairs = groups, pairs
        self._turns = [torch.from_numpy(turn).to(device) for turn in turns]
        sizes = [[len(group.members) * turn.shape[1] for turn in turns] for group in groups]
        self._sums = [
            [torch.zeros(len(group.heads), size, size, dtype=torch.float64, device=device) for size in both]
            for group, both in zip(groups, sizes, strict=True)
        ]
        self._every = -(-sum(int(batch.counted.sum()) for batch in batches) // ROWS)
        self._batches, self._row = iter(batches), 0

    def take(self, probs: Tensor, values: Tensor, rows: slice, queries: Tensor, keys: Tensor) -> None:
        if rows.start == 0:  # the attention runs once for each batch
            self._counted = next(self._batches).counted
        for sample, there in enumerate(self._counted[:, rows]):
            numbers = there.nonzero()[:, 0]
            chosen = numbers[(torch.arange(len(numbers), device=numbers.device) + self._row) % self._every == 0]
            self._row += len(numbers)
            if len(chosen):
                parts = probs[sample, :, chosen], values[sample], queries[sample, :, chosen], keys[sample]
                self._add(*(part.double() for part in parts))

    def _add(self, probs: Tensor, values: Tensor, queries: Tensor, keys: Tensor) -> None:
        """Maps ``(H, n, S)``, values ``(H_kv, S, d_v)``, queries ``(H, n, d)``, keys ``(H_kv, S, d)``."""
        end = 0
        for group, sums in zip(self._groups, self._sums, strict=True):
            start, end = end, end + len(group.members)
            turns = [turn[start:end] for turn in self._turns]
            own_keys, own_values = (
                (part[list(group.members)] @ turn).transpose(0, 1)
                for part, turn in zip((keys, values), turns, strict=True)
            )  # (S, G, d)
            step = max(1, _FORMS // own_keys.numel())
            for at, (head, home) in enumerate(zip(group.heads, group.homes, strict=True)):
                asking = queries[head] @ turns[0][home]
                for first in range(0, len(asking), step):
                    some = slice(first, first + step)
                    mass = probs[head, some]
                    forms = _multiply(asking[some], own_keys, self._pairs)  # (n, S, G * d)
                    mean = (mass[:, None] @ forms)[:, 0]
                    weighed = (forms * mass.sqrt()[..., None]).flatten(0, 1)
                    sums[0][at] += weighed.mT @ weighed - mean.mT @ mean
                    out = mass @ own_values.flatten(1)
                    sums[1][at] += out.mT @ out

    def read(self) -> list[SeenGroup]:
        return [SeenGroup(*map(as_array, sums)) for sums in self._sums]


def _multiply(queries: Tensor, keys: Tensor, pairs: int) -> Tensor:
    """The entries' products of queries ``(n, d)`` and keys ``(S, G, d)``, as ``SeenGroup`` has them."""
    asking = queries[:, None, None]
    real, imaginary = asking[..., :pairs], asking[..., pairs : 2 * pairs]
    own, other = keys[..., :pairs], keys[..., pairs : 2 * pairs]
    rest = asking[..., 2 * pairs :] * keys[..., 2 * pairs :]
    return torch.cat([real * own + imaginary * other, imaginary * own - real * other, rest], dim=-1).flatten(2)


@torch.no_grad()
def share_attention(
    model: nn.Module,
    family: Family,
    number: int,
    streams: Sequence[Tensor],
    batches: Sequence[Batch],
    weights: HeadWeights,
    merge: HeadMerge,
    moment: Array,
    num_kv_heads: int,
    pairs: int,
) -> tuple[HeadWeights, bool]:
    """A layer's attention with fewer key and value heads, then its query heads merged; whether that is exact.

    ``streams`` are the teacher's before the layer, ``moment`` the inputs' as ``find_turns`` takes it.
    """
    layer, groups = family.layers_of(model)[number], group_heads(weights, merge, num_kv_heads)
    normed = family.query_norm is not None
    turns = find_turns(weights, groups, moment, pairs, _find_free(layer, family, pairs))
    turned, seen = turn_heads(weights, groups, turns), None
    width = weights.key.shape[2] ** 2 + weights.value.shape[2] ** 2
    entries = sum(len(group.heads) * len(group.members) ** 2 * width for group in groups)
    if any(len(group.members) > 1 for group in groups) and not normed and entries <= _MOMENTS:
        sums = _Seen(groups, turns, pairs, batches, streams[0].device)
        with recorded_attention(model, find_part(layer, family.attention), sums.take):
            for _ in run_layer(layer, streams, batches, number):
                pass
        seen = sums.read()
    shared, exact = share_heads(turned, groups, pairs, seen, normed=normed)
    if len(merge.groups) == weights.num_heads:
        return shared, exact
    return mix_queries(shared, merge), exact


def _find_free(layer: nn.Module, family: Family, pairs: int) -> Any:
    """Where norms of queries and of keys have one scale for both entries of a rotated pair; None without norms."""
    if family.query_norm is None:
        return None
    names = family.query_norm, family.query_norm.replace("q_norm", "k_norm")
    scales = [as_array(find_part(layer, name).weight) for name in names]
    return np.all([scale[:pairs] == scale[pairs : 2 * pairs] for scale in scales], axis=0)
