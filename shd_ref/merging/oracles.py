"""Oracles (spec chapter ORACLE): the best map of any merge, head by head, and how far strategies are. Needs scipy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, Mask
from shd_ref.errors import import_package
from shd_ref.integers import check_option
from shd_ref.merging.mixing import STRATEGIES, check_teacher, mix_maps, squeeze_heads
from shd_ref.merging.plans import MergePlan, merge_plan, plan_groups
from shd_ref.tolerances import degenerate_threshold

Groups: TypeAlias = Sequence[Sequence[int]]


@dataclass(frozen=True)
class StrategyReport:
    """One strategy against the optima; every array ``(B,)`` (ORACLE-5)."""

    residual: Array  # of the whole layer's attention output (MIX-8)
    head_residual: Array  # head by head (ORACLE-1)
    over_unconstrained: Array  # head_residual over that of the unconstrained optimum
    over_stochastic: Array  # head_residual over that of the row-stochastic optimum


@dataclass(frozen=True)
class Diagnosis:
    """What ``diagnose`` returns (ORACLE-5)."""

    plan: MergePlan
    unconstrained: Array  # head residual of the unconstrained optimum (B,)
    stochastic: Array  # head residual of the row-stochastic optimum (B,)
    strategies: dict[str, StrategyReport]


def diagnose(
    teacher_probs: ArrayLike,
    value_outputs: ArrayLike,
    num_student_heads: int,
    *,
    plan: str | Iterable[Iterable[Sequence[int]]] | None = None,
    strategies: Iterable[str] = STRATEGIES,
    query_mask: ArrayLike | None = None,
    row_sums: str = "one",
) -> Diagnosis:
    """How far each strategy is from the best possible maps, at temperature 1 (ORACLE-5).

    Args:
        teacher_probs: A ``(B, H_t, L, S)``.
        value_outputs: X ``(B, H_t, S, D)``.
        num_student_heads: H_s, from 1 to H_t.
        plan: as for ``squeeze_heads``; one plan for all strategies.
        strategies: names of strategies.
        query_mask: boolean ``(B, L)``, True = the row counts; default all.
        row_sums: ``"one"`` or ``"at_most_one"``.

    Raises:
        ShdError: ``dependency-missing``, and any code of ``squeeze_heads``.

    Source: section 4.1.
    """
    names = tuple(strategies)
    for strategy in names:
        check_option("strategies", strategy, STRATEGIES, "ORACLE-7")
    probs, outputs, mask = check_teacher(teacher_probs, value_outputs, query_mask, row_sums=row_sums)
    rounds = merge_plan(probs.shape[1], num_student_heads, "progressive" if plan is None else plan)
    groups = plan_groups(rounds, probs.shape[1])
    unconstrained = head_residual(unconstrained_optimum(probs, outputs, groups), probs, outputs, groups, mask)
    best = stochastic_optimum(probs, outputs, groups, row_sums=row_sums)
    stochastic = head_residual(best, probs, outputs, groups, mask)
    reports = {}
    for strategy in names:
        result = squeeze_heads(
            teacher_probs,
            outputs,
            num_student_heads,
            plan=rounds,
            strategy=strategy,
            query_mask=mask,
            row_sums=row_sums,
        )
        reached = head_residual(mix_maps(probs, result.mixing), probs, outputs, groups, mask)
        reports[strategy] = StrategyReport(
            result.residual, reached, _ratio(reached, unconstrained), _ratio(reached, stochastic)
        )
    return Diagnosis(rounds, unconstrained, stochastic, reports)


_NEEDS_SCIPY = "the row-stochastic optimum needs scipy; got none: pip install '.[oracles]' (in a checkout)"


def head_residual(maps: Array, probs: Array, outputs: Array, groups: Groups, mask: Mask | None = None) -> Array:
    """``sqrt(sum_h ||A_h X'_h - O_h||^2 / sum_h ||O_h||^2)`` per sample over counted rows (ORACLE-1)."""
    merged, targets = _group_outputs(probs, outputs, groups)
    weight = 1.0 if mask is None else mask[:, None, :, None].astype(np.float64)
    error = (((maps @ merged - targets) ** 2) * weight).sum(axis=(1, 2, 3))
    norm = ((targets**2) * weight).sum(axis=(1, 2, 3))
    ratio = np.sqrt(error / np.where(norm == 0.0, 1.0, norm))
    residual: Array = np.where((norm == 0.0) & (error > 0.0), np.inf, ratio)
    return residual


def unconstrained_optimum(probs: Array, outputs: Array, groups: Groups) -> Array:
    """``O_h X'_h^+``: the best real matrix in place of each merged map ``(B, H_s, L, S)`` (ORACLE-2)."""
    merged, targets = _group_outputs(probs, outputs, groups)
    cutoff = max(merged.shape[2:]) * np.finfo(np.float64).eps  # smaller singular values are rounding
    best: Array = targets @ np.linalg.pinv(merged, rcond=cutoff)
    return best


def stochastic_optimum(probs: Array, outputs: Array, groups: Groups, *, row_sums: str = "one") -> Array:
    """The best distribution over the allowed keys for every row of each merged map ``(B, H_s, L, S)`` (ORACLE-3)."""
    merged, targets = _group_outputs(probs, outputs, groups)
    batch, num_rows, num_keys = len(probs), probs.shape[2], probs.shape[3]
    allowed = probs.max(axis=1) > 0.0  # (B, L, S)
    best = np.zeros((batch, len(groups), num_rows, num_keys))
    for b, h, i in np.ndindex(batch, len(groups), num_rows):
        keys = np.flatnonzero(allowed[b, i])
        # With a sink, a row that gave nothing reads nothing: no rounding of a solver stands over an output of 0.
        if not len(keys) or (row_sums == "at_most_one" and not targets[b, h, i].any()):
            continue
        if row_sums == "at_most_one":
            # Where the best weights of any sum stay below one, the sink takes the rest; else it takes nothing.
            free = _free_weights(merged[b, h, keys], targets[b, h, i])
            if free.sum() <= 1.0:
                best[b, h, i, keys] = free
                continue
        best[b, h, i, keys] = nearest_weights(merged[b, h, keys] - targets[b, h, i])
    return best


def _free_weights(rows: Array, target: Array) -> Array:
    """Weights ``(k,)`` of at least 0 that bring ``sum_j a_j x_j`` of rows ``(k, D)`` nearest to a target ``(D,)``."""
    # Each of its own scale: weights may be far below one.
    unit, size = (float(np.abs(array).max(initial=0.0)) or 1.0 for array in (rows, target))
    return _solve(rows.T / unit, target / size) * (size / unit)


def nearest_weights(points: Array) -> Array:
    """Weights ``(k,)`` on the simplex that bring ``sum_j a_j p_j`` of points ``(k, D)`` nearest to zero (ORACLE-4).

    The minimum over ``a >= 0`` of ``||sum_j a_j p_j||^2 + (sum_j a_j - 1)^2``, by non-negative least squares, has the
    same direction: for ``a = t c``, c on the simplex, the best t leaves ``e / (1 + e)`` of ``e = ||sum c_j p_j||^2``.
    """
    scale = float(np.abs(points).max(initial=0.0)) or 1.0
    # Both terms of one size, for value outputs of any unit.
    system = np.vstack((points.T / scale, np.ones(len(points))))
    target = np.zeros(len(system))
    target[-1] = 1.0
    weights = _solve(system, target)
    normalised: Array = weights / weights.sum()
    return normalised


def _solve(system: Array, target: Array) -> Array:
    optimize = import_package("scipy.optimize", _NEEDS_SCIPY, "ERR-5")
    try:
        solution = optimize.nnls(system, target, maxiter=30 * system.shape[1] + 30)[0]
    except RuntimeError:  # it gave up: the same by active sets of bounds, slower
        solution = optimize.lsq_linear(system, target, (0.0, np.inf), method="bvls", tol=1e-15).x
    return np.asarray(solution, dtype=np.float64)


def _group_outputs(probs: Array, outputs: Array, groups: Groups) -> tuple[Array, Array]:
    """``X'_h`` ``(B, H_s, S, D)`` and ``O_h`` ``(B, H_s, L, D)``."""
    per_head = probs @ outputs
    merged = np.stack([outputs[:, list(group)].sum(axis=1) for group in groups], axis=1)
    targets = np.stack([per_head[:, list(group)].sum(axis=1) for group in groups], axis=1)
    return merged, targets


def _ratio(reached: Array, optimum: Array) -> Array:
    """One head residual over another; what is 0 by DEGENERATE counts as 0 (ORACLE-6)."""
    threshold = degenerate_threshold()
    at_zero, reached_zero = optimum**2 <= threshold, reached**2 <= threshold
    both_infinite = np.isinf(reached) & np.isinf(optimum)  # no attention output to be relative to
    divisor = np.where(at_zero | both_infinite, 1.0, optimum)
    counted = np.where(reached_zero, 0.0, reached)
    ratio: Array = np.where(at_zero, np.where(reached_zero, 1.0, np.inf), counted / divisor)
    ratio[both_infinite] = 1.0
    return ratio
