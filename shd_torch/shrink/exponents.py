"""Exponents that fit the mixture of a merged head's softmax, by descent from those of the alphas (HEAD-21)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shd_torch.maps.alpha import simplex_weights
from shd_torch.shrink.merges import HeadMerge

MAX_STEPS = 200
SMALL_STEP = 1e-9
"""A step this short, in the largest change of a weight, ends the descent."""


def fit_mixing(items: Sequence[Sequence[Tensor]], merge: HeadMerge, projection: Tensor | None = None) -> HeadMerge:
    """The merge with fitted weights (HEAD-21).

    Args:
        items: maps ``(B, H, L, S)`` and value outputs ``(B, H, S, D)``, and where not every row counts a boolean
            ``(B, L)``; of any floating dtype, computed with in float64.
        merge: where the descent begins; the groups stay.
        projection: W_O ``(H, d_v, D)``; the items then hold values ``(B, H_kv, S, d_v)`` in place of value outputs,
            which would be many times as large.
    """
    mixing = merge.mixing.clone()
    for head, group in enumerate(merge.groups):
        if len(group) > 1:
            members = list(group)
            turn = None if projection is None else _shorten(projection[members])
            parts = [part for item in items for part in _read_samples(item, members, turn)]
            mixing[head, members] = _descend(parts, mixing[head, members])
    return replace(merge, mixing=mixing)


def _shorten(projection: Tensor) -> Tensor:
    """A group's W_O ``(k, d_v, D)`` in coordinates of the rows that it spans: all lengths and angles stay."""
    if projection.shape[0] * projection.shape[1] >= projection.shape[2]:
        return projection
    upper: Tensor = torch.linalg.qr(projection.flatten(0, 1).mT)[1]
    return upper.mT.reshape(*projection.shape[:2], -1)


def _read_samples(
    item: Sequence[Tensor], members: list[int], projection: Tensor | None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Sample by sample the logarithms of a group's maps ``(k, L, S)``, its summed value outputs and its output."""
    found = []
    per = item[0].shape[1] // item[1].shape[1]  # query heads of a value head
    reads = [head // per for head in members]
    for sample in range(len(item[0])):
        probs, outputs = item[0][sample, members].double(), item[1][sample, reads].double()
        outputs = outputs if projection is None else outputs @ projection
        wanted = (probs @ outputs).sum(0)
        if len(item) > 2:
            probs, wanted = probs[:, item[2][sample]], wanted[item[2][sample]]
        logs = probs.log().masked_fill((probs == 0).any(0), -torch.inf)
        found.append((logs, outputs.sum(0), wanted))
    return found


def _expand(parts: list[tuple[Tensor, Tensor, Tensor]], weights: Tensor) -> tuple[float, Tensor, Tensor, Tensor]:
    """The error at these weights, and to first order in a change of them: ``e + 2 g d + d H d``."""
    error, slope = 0.0, torch.zeros_like(weights)
    curvature = weights.new_zeros(len(weights), len(weights))
    for logs, outputs, wanted in parts:
        barred = logs[0].isneginf()
        finite = logs.masked_fill(barred, 0.0)
        mixture = torch.tensordot(weights, finite, 1).masked_fill(barred, -torch.inf).softmax(-1).nan_to_num(0.0)
        missing = mixture @ outputs - wanted
        away = finite - (finite * mixture).sum(-1, keepdim=True)
        changes = (mixture * away) @ outputs  # (k, L, D)
        flat = changes.flatten(1)
        error += float(missing.square().sum())
        slope += flat @ missing.flatten()
        curvature += flat @ flat.mT
    return error, slope, curvature, curvature.trace() / len(weights)


def _descend(parts: list[tuple[Tensor, Tensor, Tensor]], weights: Tensor) -> Tensor:
    damping = 0.0
    error, slope, curvature, size = _expand(parts, weights)
    for _ in range(MAX_STEPS):
        damped = curvature + damping * size * torch.eye(len(weights), dtype=weights.dtype, device=weights.device)
        found = simplex_weights(damped, slope - damped @ weights)
        if float((found - weights).abs().max()) <= SMALL_STEP:
            break
        trial = _expand(parts, found)
        if trial[0] <= error * (1.0 + 1e-14):  # at the minimum rounding decides
            weights, (error, slope, curvature, size), damping = found, trial, damping / 4
        elif damping > 1e6:
            break
        else:
            damping = max(4 * damping, 1e-3)
    return weights
