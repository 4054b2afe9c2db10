"""The closed form of a layer's attention, and the sums of what is refitted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.shrink.align import RowSums, choose_change, solve_change
from shd_ref.shrink.heads import concatenate_heads, low_rank_heads, mix_queries
from shd_ref.shrink.merges import HeadMerge, HeadWeights, Rotary
from shd_torch.shrink.families import Array, Rows, as_array

SLOW_ANGLE = 1.0
"""A rotated pair that turns by less than this, in radians, over a calibration sample is slow."""


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """What one layer's attention says over the whole calibration set."""

    length: int  # of the longest sample
    with_maps: bool  # whether maps were read; without them gram and output_size are zeros
    gram: Array  # the gram tensor, summed (H, H, H, H)
    augmented: Array  # second moment of the inputs with a one, [x, 1], (D + 1, D + 1)
    centred: Array  # of the inputs less their mean over the sample, (D, D)
    query_size: Array  # root mean square of each head's queries (H,)
    output_size: Array  # mean length of each head's output before the projection (H,), for comparisons


@dataclass(frozen=True, eq=False)
class Squeezed:
    """A student's attention, the case that made it, and whether that is exact."""

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
    """The best case that applies (``shd_ref/shrink/heads.py``), for a student of these sizes.

    ``frequencies`` are of rotary positions, one a pair of entries i and ``i + d / 2``; ``query_norm`` says whether
    queries are normed before their product with keys.
    """
    same_shape = num_kv_heads == weights.num_kv_heads and head_dim == weights.head_dim
    if len(merge.groups) == weights.num_heads and same_shape:
        return Squeezed(weights, "copied", True)
    if same_shape and merge.shares_keys(num_kv_heads):
        mixed = mix_queries(weights, merge, statistics.query_size if query_norm else None)
        return Squeezed(mixed, "queries", not query_norm)
    if query_norm:
        rule = "heads must merge inside key and value heads where queries are normed, since keys are normed too"
        advice = f"ask for a multiple of the teacher's {weights.num_kv_heads} key and value heads"
        raise ShdError("shrink-unsupported", f"{rule}: {advice}; got groups {merge.groups}")
    longest = max(len(group) for group in merge.groups)
    if frequencies is None and num_kv_heads == len(merge.groups) and longest * weights.head_dim <= head_dim:
        return Squeezed(concatenate_heads(weights, merge, head_dim), "side-by-side", True)
    rotary = None
    if frequencies is not None:
        rotary = Rotary(frequencies, slow=frequencies * statistics.length < SLOW_ANGLE)
    sizes, moments = (num_kv_heads, head_dim), (statistics.augmented, statistics.centred)
    nearest = low_rank_heads(weights, merge, *sizes, moments[0], key_moment=moments[1], rotary=rotary)
    return Squeezed(nearest, "low-rank" if rotary is None else "rotary", False)


class OutputFit:
    """Sums of one ridge regression from W0 ``(F, D)`` of the closed form, batch by batch.

    Without a ridge, one, or no change at all, is ``chosen`` on samples that are held out.
    """

    def __init__(self, matrix: Array, bias: Array | None, ridge: float | None, device: torch.device) -> None:
        self.start = matrix if bias is None else np.concatenate([matrix, bias[None]])
        self.biased, self.ridge = bias is not None, ridge
        self.chosen = ridge
        self._matrix = torch.from_numpy(self.start).to(device)
        self._fitted, self._held = _Sums(self._matrix), _Sums(self._matrix)

    def add(self, inputs: Tensor, targets: Tensor, held: Tensor) -> None:
        """Rows that count: what the matrix reads ``(n, F)`` and should give ``(n, D)``, and which are held out."""
        z, goal = inputs.double(), targets.double()
        if self.biased:
            z = torch.cat([z, z.new_ones(len(z), 1)], dim=1)
        if self.ridge is not None:
            self._fitted.add(z, goal)
        else:
            self._fitted.add(z[~held], goal[~held])
            self._held.add(z[held], goal[held])

    def solve(self) -> Rows:
        """The refitted matrix and bias."""
        if self.ridge is not None:
            change: Array | None = solve_change(self._fitted.read(), self.ridge, biased=self.biased)
        else:
            change, self.chosen = choose_change(self._fitted.read(), self._held.read(), biased=self.biased)
        refitted = self.start if change is None else self.start + change
        return (refitted[:-1], refitted[-1]) if self.biased else (refitted, None)


class _Sums:
    """``RowSums`` on the device, of rows z and what ``matrix`` leaves of their targets."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.inner, self.cross = matrix.new_zeros(len(matrix), len(matrix)), torch.zeros_like(matrix)
        self.rows, self.size = 0, 0.0

    def add(self, z: Tensor, goal: Tensor) -> None:
        self.inner += z.mT @ z
        self.cross += z.mT @ (goal - z @ self.matrix)
        self.rows += len(z)
        self.size += float(goal.square().sum())

    def read(self) -> RowSums:
        return RowSums(as_array(self.inner), as_array(self.cross), self.rows, self.size)
