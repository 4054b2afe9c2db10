"""Fitted exponents (spec chapter HEAD, HEAD-21): C for the geometric mixture that a merged head really makes.

HEAD-3 solves for weights of the arithmetic mixture of maps. Here each group's row moves on from there, by
Gauss-Newton steps over the simplex, until the student head's output is nearest to what the group gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, as_float, as_mask, check_probs
from shd_ref.errors import ShdError
from shd_ref.merging.simplex import simplex_weights
from shd_ref.shrink.merges import HeadMerge, as_merge

MAX_STEPS = 200
SMALL_STEP = 1e-9
"""A step this short, in the largest change of a weight, ends the descent."""


def fit_mixing(calibration: Sequence[Sequence[ArrayLike | None]], merge: HeadMerge | Mapping[str, Any]) -> HeadMerge:
    """The merge with exponents that fit the group's output, by descent from those of ``merge`` (HEAD-21).

    Args:
        calibration: items ``(probs, value_outputs)`` or ``(probs, value_outputs, query_mask)``: maps
            ``(B, H, L, S)``, value outputs ``(B, H, S, D)``, boolean ``(B, L)`` with True = the row counts.
        merge: where the descent begins, from ``pooled_mixing``; the groups stay.

    Returns:
        The merge. Its error is at most that of ``merge``, group by group.

    Raises:
        ShdError: ``argument-shape``, ``argument-value``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``,
            ``mixing-invalid``.
    """
    start = as_merge(merge)
    items = [_check_item(item, start.mixing.shape[1]) for item in calibration]
    if not items:
        raise ShdError("argument-shape", "calibration must hold at least one item; got none", "HEAD-21")
    mixing = start.mixing.copy()
    for head, group in enumerate(start.groups):
        if len(group) > 1:
            mixing[head, list(group)] = _descend([_Part.of(item, group) for item in items], mixing[head, list(group)])
    return HeadMerge(mixing, start.groups)


class _Part(NamedTuple):
    """One item of the calibration as a group sees it.

    Attributes:
        logs: of the group's maps ``(B, k, L, S)``; 0 in all of them where one is 0.
        barred: where one map is 0 ``(B, L, S)``: the mixture is too.
        outputs: the sum of the group's value outputs ``(B, S, D)``.
        wanted: what the group's heads give together ``(B, L, D)``, 0 in rows that do not count.
        counted: ``(B, L, 1)``, 1 where the row counts.
    """

    logs: Array
    barred: Array
    outputs: Array
    wanted: Array
    counted: Array

    @classmethod
    def of(cls, item: tuple[Array, Array, Array], group: Sequence[int]) -> _Part:
        probs, outputs = item[0][:, list(group)], item[1][:, list(group)]
        counted = item[2][..., None]
        barred = (probs == 0.0).any(axis=1)
        logs = np.log(np.where(barred[:, None], 1.0, probs))
        return cls(logs, barred, outputs.sum(axis=1), (probs @ outputs).sum(axis=1) * counted, counted)

    def residual(self, weights: Array) -> tuple[Array, Array]:
        """What the mixture's output misses ``(n,)``, and its slope in every exponent ``(k, n)``."""
        logits = np.einsum("k,bkls->bls", weights, self.logs)
        logits = np.where(self.barred, -np.inf, logits)
        peak = logits.max(axis=-1, keepdims=True)
        mixture = np.exp(logits - np.where(np.isneginf(peak), 0.0, peak))
        sums = mixture.sum(axis=-1, keepdims=True)
        mixture /= np.where(sums == 0.0, 1.0, sums)
        means = np.einsum("bls,bkls->bkl", mixture, self.logs)[..., None]
        slopes = (mixture[:, None] * (self.logs - means)) @ self.outputs[:, None] * self.counted[:, None]
        missing = mixture @ self.outputs * self.counted - self.wanted
        return missing.ravel(), slopes.swapaxes(0, 1).reshape(len(weights), -1)


def _descend(parts: Sequence[_Part], weights: Array) -> Array:
    damping = 0.0
    error, missing, slopes = _measure(parts, weights)
    for _ in range(MAX_STEPS):
        # To first order the error of weights w is || sum_i w_i U_i ||^2, as in MIX-7, with these U.
        away = np.eye(len(weights)) - weights
        points = missing + away @ slopes
        gram = points @ points.T
        size = float(np.trace(slopes @ slopes.T)) / len(weights)
        found = simplex_weights(gram + damping * size * away @ away.T)
        step = float(np.abs(found - weights).max())
        trial = _measure(parts, found)
        if step <= SMALL_STEP:
            break
        if trial[0] <= error * (1.0 + 1e-14):  # at the minimum rounding decides
            weights, (error, missing, slopes), damping = found, trial, damping / 4
        elif damping > 1e6:
            break
        else:
            damping = max(4 * damping, 1e-3)
    return weights


def _measure(parts: Sequence[_Part], weights: Array) -> tuple[float, Array, Array]:
    pieces = [part.residual(weights) for part in parts]
    missing = np.concatenate([piece[0] for piece in pieces])
    return float(missing @ missing), missing, np.concatenate([piece[1] for piece in pieces], axis=1)


def _check_item(item: Sequence[ArrayLike | None], heads: int) -> tuple[Array, Array, Array]:
    if len(item) not in (2, 3) or item[0] is None or item[1] is None:
        raise ShdError(
            "argument-shape",
            f"calibration items must be (probs, value_outputs[, query_mask]); got {len(item)} parts",
            "HEAD-21",
        )
    mask = item[2] if len(item) == 3 else None
    outputs = as_float(item[1], "value_outputs", ndim=4)
    shape = np.shape(item[0])
    counted = np.ones(shape[::2][:2], np.bool_) if mask is None else as_mask(mask, "query_mask", (shape[0], shape[2]))
    probs = check_probs(item[0], "probs", query_mask=counted)
    if probs.shape[1] != heads or outputs.shape[:3] != (*probs.shape[:2], probs.shape[3]):
        raise ShdError(
            "argument-shape",
            f"probs (B, {heads}, L, S) and value_outputs (B, {heads}, S, D) must fit; "
            f"got {probs.shape} and {outputs.shape}",
            "HEAD-21",
        )
    return probs, outputs, counted.astype(np.float64)
