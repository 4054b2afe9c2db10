"""Key and value heads that more query heads come to share: second moments over the calibration, then the merge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.shrink.heads import HeadMerge, HeadWeights, mix_queries
from shd_ref.shrink.sharing import Group, SeenGroup, find_rotations, group_heads, rotate_heads, share_heads
from shd_torch.shrink.calibration import Batch, recorded_attention, run_layer
from shd_torch.shrink.families import Array, Family, as_array, find_part

ROWS = 4096
"""Of the calibration that moments are summed over, evenly spread: some hundred entries need no more."""
_FORMS = 2**22  # entries of the products of queries and keys in one step: 32 MiB
_MOMENTS = 2**27  # of a layer's moments: 1 GiB; without them the average of rotated heads stays


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

    ``streams`` are the teacher's before the layer, ``moment`` and ``pairs`` as ``find_rotations`` takes them.
    """
    layer, groups = family.layers_of(model)[number], group_heads(weights, merge, num_kv_heads)
    free, seen = None, None
    if family.query_norm is not None:
        names = family.query_norm, family.query_norm.replace("q_norm", "k_norm")
        scales = [as_array(find_part(layer, name).weight) for name in names]
        free = np.all([scale[:pairs] == scale[pairs : 2 * pairs] for scale in scales], axis=0)
    rotations = find_rotations(weights, groups, moment, pairs, free)
    squares = weights.key.shape[2] ** 2 + weights.value.shape[2] ** 2
    entries = sum(len(group.heads) * len(group.members) ** 2 for group in groups) * squares
    if any(len(group.members) > 1 for group in groups) and free is None and entries <= _MOMENTS:
        sums = _Seen(groups, rotations, pairs, batches, streams[0].device)
        with recorded_attention(model, find_part(layer, family.attention), sums.take):
            for _ in run_layer(layer, streams, batches, number):
                pass
        seen = [SeenGroup(*map(as_array, pair)) for pair in sums.sums]
    rotated = rotate_heads(weights, groups, rotations)
    shared, exact = share_heads(rotated, groups, pairs, seen, normed=free is not None)
    return (shared if len(merge.groups) == weights.num_heads else mix_queries(shared, merge)), exact


class _Seen:
    """Sums of ``SeenGroup`` for each group, over some rows of a layer's maps."""

    def __init__(
        self,
        groups: Sequence[Group],
        rotations: tuple[Array, Array],
        pairs: int,
        batches: Sequence[Batch],
        device: Any,
    ) -> None:
        self._groups, self._pairs = groups, pairs
        self._rotations = [torch.from_numpy(rotation).to(device) for rotation in rotations]
        self.sums: list[list[Tensor]] = []
        for group in groups:
            sizes = [len(group.members) * rotation.shape[1] for rotation in rotations]
            shapes = [(len(group.heads), size, size) for size in sizes]
            self.sums.append([torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes])
        self._every = -(-sum(int(batch.counted.sum()) for batch in batches) // ROWS)
        self._batches, self._row = iter(batches), 0

    def take(self, probs: Tensor, values: Tensor, rows: slice, queries: Tensor, keys: Tensor) -> None:
        if rows.start == 0:  # the attention runs once for each batch
            self._counted = next(self._batches).counted
        for sample, row_mask in enumerate(self._counted[:, rows]):
            numbers = row_mask.nonzero()[:, 0]
            chosen = numbers[(torch.arange(len(numbers), device=numbers.device) + self._row) % self._every == 0]
            self._row += len(numbers)
            parts = probs[sample, :, chosen], values[sample], queries[sample, :, chosen], keys[sample]
            self._add(*(part.double() for part in parts))

    def _add(self, probs: Tensor, values: Tensor, queries: Tensor, keys: Tensor) -> None:
        """Maps ``(H, n, S)``, values ``(H_kv, S, d_v)``, queries ``(H, n, d)``, keys ``(H_kv, S, d)``."""
        start = 0
        for group, (seen_keys, seen_values) in zip(self._groups, self.sums, strict=True):
            members, span = list(group.members), slice(start, start + len(group.members))
            start = span.stop
            rotations = [rotation[span] for rotation in self._rotations]
            rotated_keys, rotated_values = (
                (part[members] @ matrices).transpose(0, 1)
                for part, matrices in zip((keys, values), rotations, strict=True)
            )
            step = max(1, _FORMS // rotated_keys.numel())  # (S, G, d)
            for member, (head, home) in enumerate(zip(group.heads, group.homes, strict=True)):
                out = probs[head] @ rotated_values.flatten(1)
                seen_values[member] += out.mT @ out
                rotated_queries = queries[head] @ rotations[0][home]
                for first in range(0, len(rotated_queries), step):
                    mass = probs[head, first : first + step]
                    some = rotated_queries[first : first + step]
                    forms = _multiply(some, rotated_keys, self._pairs)  # (n, S, G * d)
                    mean = (mass[:, None] @ forms)[:, 0]
                    weighed = (forms * mass.sqrt()[..., None]).flatten(0, 1)
                    seen_keys[member] += weighed.mT @ weighed - mean.mT @ mean


def _multiply(queries: Tensor, keys: Tensor, pairs: int) -> Tensor:
    """The entries' products of queries ``(n, d)`` and keys ``(S, G, d)``, as ``SeenGroup`` has them."""
    queries = queries[:, None, None]
    real, imaginary = queries[..., :pairs], queries[..., pairs : 2 * pairs]
    key_real, key_imaginary = keys[..., :pairs], keys[..., pairs : 2 * pairs]
    rest = queries[..., 2 * pairs :] * keys[..., 2 * pairs :]
    same, crossed = real * key_real + imaginary * key_imaginary, imaginary * key_real - real * key_imaginary
    return torch.cat([same, crossed, rest], dim=-1).flatten(2)
