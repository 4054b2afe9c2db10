"""Mixing (spec chapter MIX): every strategy returns a mixing matrix; everything after it is shared.

C is ``(B, H_s, H_t)``, at least 0, and sums to one over the teacher's heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import (
    Array,
    Mask,
    as_float,
    as_mask,
    check_probs,
    check_temperature,
    dtype_name,
    in_dtype_of,
    soften_rows,
)
from shd_ref.errors import ShdError
from shd_ref.integers import check_option
from shd_ref.merging.alpha import ALPHA_RULES, AlphaSolution, check_alphas, solve_pair
from shd_ref.merging.plans import MergePlan, Pair, check_count, check_plan, merge_plan, plan_groups
from shd_ref.tolerances import row_sum_tolerance

STRATEGIES: tuple[str, ...] = ("shd", "constant", "hard", "mean")
ALPHA_FROM: tuple[str, ...] = ("teacher", "softened")


@dataclass(frozen=True)
class SqueezeResult:
    """What ``squeeze_heads`` returns (MIX-9).

    Attributes:
        probs: the merged maps ``(B, H_s, L, S)``, at the temperature asked for.
        mixing: C ``(B, H_s, H_t)``.
        alphas: one array ``(B, num_pairs)`` per round, clipped; empty for the strategy ``mean``, which has no
            pairwise weights.
        residual: ``(B,)``, relative error of the merged attention output at temperature 1 over counted rows:
            ``|| sum_h A~_h X'_h - sum_t A_t X_t ||_F / || sum_t A_t X_t ||_F``.
        num_clipped: how many alphas lay outside [0, 1] before clipping.
        num_degenerate: how many pairs had no preferred alpha.
        plan: the rounds that were run.
    """

    probs: Array
    mixing: Array
    alphas: tuple[Array, ...]
    residual: Array
    num_clipped: int
    num_degenerate: int
    plan: MergePlan


def squeeze_heads(
    teacher_probs: ArrayLike,
    value_outputs: ArrayLike,
    num_student_heads: int,
    *,
    plan: str | Iterable[Iterable[Sequence[int]]] | None = None,
    strategy: str = "shd",
    query_mask: ArrayLike | None = None,
    temperature: float = 1.0,
    alpha_rule: str = "least_squares",
    alpha_from: str = "teacher",
    row_sums: str = "one",
) -> SqueezeResult:
    """Merge a teacher's maps into as many as the student has heads (MIX-1..17).

    Args:
        teacher_probs: A ``(B, H_t, L, S)``, after softmax, before dropout.
        value_outputs: X ``(B, H_t, S, D)``, from ``value_outputs``.
        num_student_heads: H_s, from 1 to H_t.
        plan: a kind (``"progressive"``, the default, or ``"balanced"``) or explicit rounds of pairs.
        strategy: ``shd`` (closed-form alphas), ``constant`` (1/2), ``hard`` (the better of 0 and 1),
            ``mean`` (every map is the mean of all).
        query_mask: boolean ``(B, L)``, True = the row counts; default all.
        temperature: T_a; C is solved on the maps as given and mixes the softened ones (TEMP-3).
        alpha_rule: see ``solve_alpha``.
        alpha_from: ``"teacher"``, or ``"softened"`` to solve on the softened maps (D-3).
        row_sums: ``"one"``, or ``"at_most_one"`` for maps with attention sinks: used as they are, softened at
            their own mass.

    Raises:
        ShdError: any code of the meaning; see the spec's chapter ERR.

    Source: Algorithm 1, Eq. 5-10. Deviations: D-1, D-2, D-11.
    """
    check_option("strategy", strategy, STRATEGIES, "MIX-2")
    check_option("alpha_rule", alpha_rule, ALPHA_RULES, "ALPHA-4")
    check_option("alpha_from", alpha_from, ALPHA_FROM, "TEMP-3")
    temperature = check_temperature(temperature)
    probs, outputs, mask = check_teacher(teacher_probs, value_outputs, query_mask, row_sums=row_sums)
    rounds = merge_plan(probs.shape[1], num_student_heads, "progressive" if plan is None else plan)

    softened = soften_rows(probs, temperature, row_sums=row_sums)
    solved_on = softened if alpha_from == "softened" else probs
    mixing, solutions = solve_mixing(
        solved_on, outputs, rounds, strategy=strategy, query_mask=mask, alpha_rule=alpha_rule
    )
    return SqueezeResult(
        probs=in_dtype_of(teacher_probs, mix_maps(softened, mixing)),
        mixing=mixing,
        alphas=tuple(np.stack([s.clipped for s in one_round], axis=1) for one_round in solutions),
        residual=output_residual(probs, outputs, mixing, plan_groups(rounds, probs.shape[1]), mask),
        num_clipped=sum(int(((s.raw < 0.0) | (s.raw > 1.0)).sum()) for r in solutions for s in r),
        num_degenerate=sum(int(s.degenerate.sum()) for r in solutions for s in r),
        plan=rounds,
    )


def solve_mixing(
    probs: Array, outputs: Array, rounds: MergePlan, *, strategy: str, query_mask: Mask | None, alpha_rule: str
) -> tuple[Array, list[list[AlphaSolution]]]:
    """C of checked arrays, and the solutions of each round: all follows from the products of maps and value outputs.

    Factors ``(B, H_t, L, m)`` and ``(B, H_t, m, D)`` of these products will do as well.
    """
    batch, num_heads = probs.shape[:2]
    if strategy == "mean":
        return np.full((batch, len(plan_groups(rounds, num_heads)), num_heads), 1.0 / num_heads), []
    if not rounds:
        return np.broadcast_to(np.eye(num_heads), (batch, num_heads, num_heads)), []
    pool, solutions = make_pool(probs, outputs), []
    for one_round in rounds:
        pool, solved = merge_round(pool, one_round, strategy=strategy, query_mask=query_mask, rule=alpha_rule)
        solutions.append(solved)
    alphas = [np.stack([s.clipped for s in one_round], axis=1) for one_round in solutions]
    return compose_mixing(alphas, rounds, num_heads), solutions


def check_teacher(
    teacher_probs: ArrayLike, value_outputs: ArrayLike, query_mask: ArrayLike | None, *, row_sums: str
) -> tuple[Array, Array, Mask | None]:
    """Maps ``(B, H_t, L, S)``, value outputs ``(B, H_t, S, D)`` and mask ``(B, L)`` after their checks (MIX-1)."""
    maps = np.asarray(teacher_probs)
    outputs = as_float(value_outputs, "value_outputs", ndim=4)
    if maps.ndim != 4:
        raise ShdError("argument-shape", f"teacher_probs must be (B, H_t, L, S); got shape {maps.shape}", "MAP-4")
    batch, num_heads, rows, keys = maps.shape
    if outputs.shape[:3] != (batch, num_heads, keys):
        fit = f"B={batch}, H_t={num_heads}, S={keys}"
        message = f"value_outputs must be (B, H_t, S, D) with {fit}; got {outputs.shape}"
        raise ShdError("argument-shape", message, "MIX-1")
    mask = None if query_mask is None else as_mask(query_mask, "query_mask", (batch, rows))
    return check_probs(maps, "teacher_probs", query_mask=mask, row_sums=row_sums), outputs, mask


def mix_heads(teacher_probs: ArrayLike, mixing: ArrayLike) -> Array:
    """``A~_h = sum_t C[h, t] A_t`` (MIX-3).

    Args:
        teacher_probs: ``(B, H_t, L, S)``, at least 0; a row sums to at most one (MIX-18).
        mixing: ``(B, H_s, H_t)``, at least 0, summing to one over H_t.

    Returns:
        ``(B, H_s, L, S)``.

    Raises:
        ShdError: ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``, ``mixing-invalid``.

    Source: Eq. 5, for any number of heads at once.
    """
    probs = check_probs(teacher_probs, "teacher_probs", row_sums="at_most_one")
    return in_dtype_of(teacher_probs, mix_maps(probs, check_mixing(mixing, probs.shape)))


def mix_maps(probs: Array, weights: Array) -> Array:
    """``mix_heads`` on checked arrays, whose rows that do not count may have any sum."""
    mixed: Array = np.einsum("bht,btls->bhls", weights, probs)
    return mixed


def check_mixing(mixing: ArrayLike, probs_shape: tuple[int, ...]) -> Array:
    """A mixing matrix as float64, after checking its shape and that its rows are convex (MIX-3)."""
    raw = np.asarray(mixing)
    weights = as_float(raw, "mixing")
    batch, num_heads = probs_shape[:2]
    if weights.ndim != 3 or weights.shape[::2] != (batch, num_heads):
        rule = f"mixing must be (B, H_s, H_t) with B={batch}, H_t={num_heads}"
        raise ShdError("argument-shape", f"{rule}; got {weights.shape}", "MIX-3")
    tolerance, sums = row_sum_tolerance(dtype_name(raw)), weights.sum(axis=2)
    if (weights < 0.0).any() or (np.abs(sums - 1.0) > tolerance).any():
        rule = f"mixing must be at least 0 and sum to 1 over the teacher's heads within {tolerance:g}"
        got = f"a minimum of {weights.min():.6g} and sums from {sums.min():.6g} to {sums.max():.6g}"
        raise ShdError("mixing-invalid", f"{rule}; got {got}", "MIX-3")
    return weights


def compose_mixing(
    alphas: Sequence[ArrayLike], plan: Iterable[Iterable[Sequence[int]]], num_teacher_heads: int
) -> Array:
    """The mixing matrix that a plan's merge weights amount to (MIX-13).

    Args:
        alphas: one array ``(B, num_pairs)`` per round, in [0, 1]; at least one, to determine B.
        plan: the rounds, as from ``merge_plan``.
        num_teacher_heads: H_t.

    Returns:
        ``(B, H_s, H_t)``.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``, ``plan-invalid``,
            ``mixing-invalid``.
    """
    check_count("num_teacher_heads", num_teacher_heads)
    rounds = check_plan(plan, num_teacher_heads)
    arrays = [as_float(weights, "alphas") for weights in alphas]
    shapes = [weights.shape for weights in arrays]
    if not shapes or shapes != [(*shapes[0][:1], len(one_round)) for one_round in rounds]:
        count = f"for each of {len(rounds)} rounds, and at least one"
        message = f"alphas must hold one array (B, num_pairs) {count}; got {shapes}"
        raise ShdError("argument-shape", message, "MIX-13")
    for weights in arrays:
        check_alphas(weights, "alphas", "MIX-13")
    pool = [np.broadcast_to(unit, (shapes[0][0], num_teacher_heads)) for unit in np.eye(num_teacher_heads)]
    for weights, one_round in zip(arrays, rounds, strict=True):
        merged = []
        for number, (p, q) in enumerate(one_round):
            alpha = weights[:, number, None]  # (B, 1)
            merged.append(alpha * pool[p] + (1 - alpha) * pool[q])
        used = {head for pair in one_round for head in pair}
        pool = merged + [head for position, head in enumerate(pool) if position not in used]
    return np.stack(pool, axis=1)


def output_residual(
    probs: Array, outputs: Array, mixing: Array, groups: Sequence[Sequence[int]], mask: Mask | None
) -> Array:
    """Relative Frobenius error of the merged attention output per sample (MIX-8)."""
    weight = np.ones(1) if mask is None else mask[:, :, None].astype(np.float64)
    target: Array = (probs @ outputs).sum(axis=1)  # (B, L, D)
    merged_outputs = np.stack([outputs[:, list(group)].sum(axis=1) for group in groups], axis=1)
    merged = (mix_maps(probs, mixing) @ merged_outputs).sum(axis=1)
    error = np.sqrt((((merged - target) * weight) ** 2).sum(axis=(1, 2)))
    norm = np.sqrt(((target * weight) ** 2).sum(axis=(1, 2)))
    relative = error / np.where(norm == 0.0, 1.0, norm)
    residual: Array = np.where((norm == 0.0) & (error > 0.0), np.inf, relative)
    return residual


Head: TypeAlias = tuple[Array, Array]  # a map (B, L, S) and its value output (B, S, D)


def make_pool(probs: Array, outputs: Array) -> list[Head]:
    """The first pool: the teacher's heads in order, from maps ``(B, H_t, L, S)`` and outputs ``(B, H_t, S, D)``."""
    return [(probs[:, head], outputs[:, head]) for head in range(probs.shape[1])]


def merge_round(
    pool: Sequence[Head],
    one_round: Sequence[Pair],
    *,
    strategy: str = "shd",
    query_mask: Mask | None = None,
    rule: str = "least_squares",
) -> tuple[list[Head], list[AlphaSolution]]:
    """The pool after one round, merged heads first and untouched ones after, and each pair's alpha (MIX-4, MIX-5)."""
    merged, solutions = [], []
    for p, q in one_round:
        (a_p, x_p), (a_q, x_q) = pool[p], pool[q]
        solution = solve_pair(a_p, a_q, x_p, x_q, query_mask=query_mask, rule=rule)
        if strategy == "constant":
            half = np.full_like(solution.raw, 0.5)
            solution = AlphaSolution(half, half, np.zeros_like(solution.degenerate))
        elif strategy == "hard":
            # E is a parabola around alpha: the nearer of 0 and 1 is the better; ties keep p.
            chosen = np.where(solution.raw >= 0.5, 1.0, 0.0)
            solution = solution._replace(raw=chosen, clipped=chosen)
        alpha = solution.clipped[:, None, None]
        merged.append((alpha * a_p + (1 - alpha) * a_q, x_p + x_q))
        solutions.append(solution)
    used = {head for pair in one_round for head in pair}
    return merged + [head for position, head in enumerate(pool) if position not in used], solutions
