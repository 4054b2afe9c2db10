"""Mixing (spec chapter MIX): every strategy returns a mixing matrix; everything after it is shared.

``mixing`` C is ``(B, H_s, H_t)``, or ``(B, H_s, H_t, L)`` when rows have their own weights; its entries are
at least 0 and sum to one over the teacher's heads. The student's maps are ``A~_h = sum_t C[h, t] A_t``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.alpha import ALPHA_PER, ALPHA_RULES, AlphaSolution, check_option, solve_pair
from shd_ref.attention import Array, Mask, as_float, as_mask, check_probs, check_temperature, soften
from shd_ref.errors import ShdError
from shd_ref.plans import MergePlan, merge_plan, plan_groups
from shd_ref.tolerances import degenerate_threshold, row_sum_tolerance

STRATEGIES: tuple[str, ...] = ("shd", "constant", "hard", "mean", "simplex")
ALPHA_FROM: tuple[str, ...] = ("teacher", "softened")


@dataclass(frozen=True)
class SqueezeResult:
    """What ``squeeze_heads`` returns (MIX-9).

    Attributes:
        probs: the merged maps ``(B, H_s, L, S)``, at the temperature asked for.
        mixing: C ``(B, H_s, H_t)``, or ``(B, H_s, H_t, L)`` with ``alpha_per="row"``.
        alphas: one array per round, ``(B, num_pairs)`` or ``(B, num_pairs, L)``, clipped; empty for the
            strategies ``mean`` and ``simplex``, which have no pairwise weights.
        residual: ``(B,)``, relative error of the merged attention output at temperature 1 over counted rows:
            ``|| sum_h A~_h X'_h - sum_t A_t X_t ||_F / || sum_t A_t X_t ||_F``.
        num_clipped: how many alphas lay outside [0, 1] before clipping.
        num_degenerate: how many pairs (or counted rows of pairs) had no preferred alpha.
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
    alpha_per: str = "map",
    alpha_from: str = "teacher",
) -> SqueezeResult:
    """Merge a teacher's maps into as many as the student has heads (MIX-1..10).

    Args:
        teacher_probs: A ``(B, H_t, L, S)``, after softmax, before dropout.
        value_outputs: X ``(B, H_t, S, D)``, from ``value_outputs``.
        num_student_heads: H_s, from 1 to H_t.
        plan: a kind (``"progressive"``, the default, or ``"balanced"``) or explicit rounds of pairs.
        strategy: ``shd`` (closed-form alphas), ``constant`` (1/2), ``hard`` (the better of 0 and 1),
            ``mean`` (every map is the mean of all), ``simplex`` (the best convex weights of each group at once).
        query_mask: boolean ``(B, L)``, True = the row counts; default all.
        temperature: T_a; C is solved on the maps as given and mixes the softened ones (TEMP-3).
        alpha_rule: see ``solve_alpha``.
        alpha_per: ``"map"`` or ``"row"``.
        alpha_from: ``"teacher"``, or ``"softened"`` to solve on the softened maps (D-3).

    Raises:
        ShdError: any code of the meaning; see the spec's chapter ERR.

    Source: Algorithm 1, Eq. 5-10. Deviations: D-1, D-2, D-5.
    """
    check_option("strategy", strategy, STRATEGIES, "MIX-2")
    check_option("alpha_rule", alpha_rule, ALPHA_RULES, "ALPHA-4")
    check_option("alpha_per", alpha_per, ALPHA_PER, "ALPHA-9")
    check_option("alpha_from", alpha_from, ALPHA_FROM, "TEMP-3")
    temperature = check_temperature(temperature)
    maps = np.asarray(teacher_probs)
    outputs = as_float(value_outputs, "value_outputs", ndim=4)
    if maps.ndim != 4:
        raise ShdError("argument-shape", f"teacher_probs must be (B, H_t, L, S); got shape {maps.shape}", "MAP-4")
    batch, num_heads, rows, keys = maps.shape
    if outputs.shape[:3] != (batch, num_heads, keys):
        raise ShdError(
            "argument-shape",
            f"value_outputs must be (B, H_t, S, D) with B={batch}, H_t={num_heads}, S={keys}; got {outputs.shape}",
            "MIX-1",
        )
    mask = None if query_mask is None else as_mask(query_mask, "query_mask", (batch, rows))
    probs = check_probs(maps, "teacher_probs", query_mask=mask)
    rounds = merge_plan(num_heads, num_student_heads, "progressive" if plan is None else plan)

    softened = soften(probs, temperature)
    solved_on = softened if alpha_from == "softened" else probs
    groups = plan_groups(rounds, num_heads)
    solutions: list[list[AlphaSolution]] = []
    mixing = np.broadcast_to(np.eye(num_heads)[None, :, :, None], (batch, num_heads, num_heads, rows))
    if strategy == "mean":
        mixing = np.full((batch, len(groups), num_heads, rows), 1.0 / num_heads)
    elif strategy == "simplex":
        mixing = _simplex_mixing(solved_on, outputs, groups, mask, alpha_per)
    else:
        solutions = _pairwise_solutions(solved_on, outputs, rounds, strategy, mask, alpha_rule, alpha_per)
    alphas = tuple(np.stack([s.clipped for s in one_round], axis=1) for one_round in solutions)
    if alphas:
        mixing = compose_mixing(alphas, rounds, num_heads)
    elif alpha_per == "map":
        mixing = mixing[..., 0]  # every row has the same weights
    return SqueezeResult(
        probs=mix_heads(softened, mixing),
        mixing=mixing,
        alphas=alphas,
        residual=_residual(probs, outputs, mixing, groups, mask),
        num_clipped=sum(int(((s.raw < 0.0) | (s.raw > 1.0)).sum()) for r in solutions for s in r),
        num_degenerate=sum(int(s.degenerate.sum()) for r in solutions for s in r),
        plan=rounds,
    )


def mix_heads(teacher_probs: ArrayLike, mixing: ArrayLike) -> Array:
    """``A~_h = sum_t C[h, t] A_t``, or with one weight per row ``C[h, t, i]`` (MIX-3).

    Args:
        teacher_probs: ``(B, H_t, L, S)``.
        mixing: ``(B, H_s, H_t)`` or ``(B, H_s, H_t, L)``, at least 0, summing to one over H_t.

    Returns:
        ``(B, H_s, L, S)``.

    Raises:
        ShdError: ``argument-shape``, ``mixing-invalid``.
    """
    probs = as_float(teacher_probs, "teacher_probs", ndim=4)
    weights = check_mixing(mixing, probs.shape)
    terms = "bht,btls->bhls" if weights.ndim == 3 else "bhtl,btls->bhls"
    mixed: Array = np.einsum(terms, weights, probs)
    return mixed


def check_mixing(mixing: ArrayLike, probs_shape: tuple[int, ...]) -> Array:
    """A mixing matrix as float64, after checking its shape and that its rows are convex (MIX-3)."""
    given = np.asarray(mixing)
    weights = as_float(given, "mixing")
    batch, num_heads, rows, _ = probs_shape
    if not (
        weights.ndim in (3, 4)
        and weights.shape[0] == batch
        and weights.shape[2] == num_heads
        and weights.shape[3:] in ((), (rows,))
    ):
        raise ShdError(
            "argument-shape",
            f"mixing must be (B, H_s, H_t) or (B, H_s, H_t, L) with B={batch}, H_t={num_heads}, L={rows}; "
            f"got {weights.shape}",
            "MIX-3",
        )
    tolerance = row_sum_tolerance(str(given.dtype.name))
    if (weights < 0.0).any() or (np.abs(weights.sum(axis=2) - 1.0) > tolerance).any():
        raise ShdError(
            "mixing-invalid",
            f"mixing must be at least 0 and sum to 1 over the teacher's heads within {tolerance:g}; "
            f"got a minimum of {weights.min():.6g} and sums from {weights.sum(axis=2).min():.6g} "
            f"to {weights.sum(axis=2).max():.6g}",
            "MIX-3",
        )
    return weights


def simplex_weights(gram: Array) -> Array:
    """The convex weights c that minimise ``c^T gram c``: the point of a hull nearest to zero (MIX-7).

    Wolfe's active-set method on the Gram matrix of the hull's points; exact in finitely many steps.

    Args:
        gram: ``(k, k)``, positive semi-definite.

    Returns:
        ``(k,)``, at least 0, summing to one.
    """
    k = len(gram)
    tolerance = 1e-14 * max(float(np.trace(gram)), np.finfo(np.float64).tiny)
    weights: Array = np.zeros(k)
    active = [int(np.argmin(np.diag(gram)))]
    weights[active[0]] = 1.0
    for _ in range(8 * k * k + 8):  # finite in theory; the bound only guards against rounding cycles
        slope = gram @ weights
        best = int(np.argmin(slope))
        if best in active or slope[best] >= weights @ slope - tolerance:
            break
        active.append(best)
        while True:
            affine = _affine_minimum(gram[np.ix_(active, active)])
            if (affine > 0.0).all():
                weights[:] = 0.0
                weights[active] = affine
                break
            current = weights[active]
            falling = affine <= 0.0
            drop = current[falling] - affine[falling]
            step = float(np.min(current[falling] / np.where(drop == 0.0, 1.0, drop)))
            weights[active] = np.maximum(current + min(step, 1.0) * (affine - current), 0.0)
            kept = [i for i in active if weights[i] > 1e-15]
            weights[[i for i in active if i not in kept]] = 0.0
            active = kept
    normalised: Array = weights / weights.sum()
    return normalised


def _affine_minimum(gram: Array) -> Array:
    """Weights summing to one, of any sign, that minimise the quadratic form."""
    k = len(gram)
    scale = max(float(np.trace(gram)) / k, np.finfo(np.float64).tiny)
    system = np.zeros((k + 1, k + 1))
    system[:k, :k] = gram / scale
    system[:k, k] = system[k, :k] = 1.0
    target = np.zeros(k + 1)
    target[k] = 1.0
    solution: Array = np.asarray(np.linalg.lstsq(system, target, rcond=None)[0][:k], dtype=np.float64)
    return solution


def compose_mixing(alphas: Sequence[Array], plan: MergePlan, num_teacher_heads: int) -> Array:
    """The mixing matrix that a plan's merge weights amount to (MIX-4).

    Args:
        alphas: one array a round, ``(B, num_pairs)`` or ``(B, num_pairs, L)``, in [0, 1].
        plan: the rounds, as from ``merge_plan``.
        num_teacher_heads: H_t.

    Returns:
        ``(B, H_s, H_t)`` or ``(B, H_s, H_t, L)``.
    """
    first = np.asarray(alphas[0])
    batch, by_row = first.shape[0], first.shape[2:]
    unit = np.eye(num_teacher_heads).reshape(num_teacher_heads, num_teacher_heads, *(1 for _ in by_row))
    pool = [np.broadcast_to(unit[t], (batch, num_teacher_heads, *by_row)) for t in range(num_teacher_heads)]
    for weights, one_round in zip(alphas, plan, strict=True):
        merged = []
        for number, (p, q) in enumerate(one_round):
            alpha = np.asarray(weights, dtype=np.float64)[:, None, number]  # (B, 1) or (B, 1, L)
            merged.append(alpha * pool[p] + (1 - alpha) * pool[q])
        used = {head for pair in one_round for head in pair}
        pool = merged + [head for position, head in enumerate(pool) if position not in used]
    return np.stack(pool, axis=1)


def _pairwise_solutions(
    probs: Array,
    outputs: Array,
    rounds: MergePlan,
    strategy: str,
    mask: Mask | None,
    alpha_rule: str,
    alpha_per: str,
) -> list[list[AlphaSolution]]:
    """Run the plan: after each round the pool is merged heads first, then untouched ones (PLAN-4)."""
    batch, num_heads = probs.shape[:2]
    pool = [(probs[:, t], outputs[:, t]) for t in range(num_heads)]
    solutions = []
    for one_round in rounds:
        solved = []
        merged = []
        for p, q in one_round:
            (a_p, x_p), (a_q, x_q) = pool[p], pool[q]
            solution = solve_pair(a_p, a_q, x_p, x_q, query_mask=mask, rule=alpha_rule, alpha_per=alpha_per)
            if strategy == "constant":
                half = np.full_like(solution.raw, 0.5)
                nothing = np.zeros_like(solution.degenerate)
                solution = AlphaSolution(half, half, nothing, solution.counted)
            elif strategy == "hard":
                # E is a parabola around alpha: the nearer of 0 and 1 is the better; ties keep p (MIX-5).
                chosen = np.where(solution.raw >= 0.5, 1.0, 0.0)
                solution = solution._replace(raw=chosen, clipped=chosen)
            alpha = solution.clipped.reshape(batch, -1, 1)  # (B, 1 or L, 1)
            merged.append((alpha * a_p + (1 - alpha) * a_q, x_p + x_q))
            solved.append(solution)
        used = {head for pair in one_round for head in pair}
        pool = merged + [head for position, head in enumerate(pool) if position not in used]
        solutions.append(solved)
    return solutions


def _simplex_mixing(
    probs: Array, outputs: Array, groups: Sequence[Sequence[int]], mask: Mask | None, alpha_per: str
) -> Array:
    """The k-way optimum of each group: min over the simplex of || sum_i c_i U_i ||^2 (MIX-7).

    As the weights sum to one, the group's error is a convex combination of ``U_i = A_i X - O`` with X the
    sum of the group's value outputs and O its attention output.
    """
    batch, num_heads, num_rows, _ = probs.shape
    mixing = np.zeros((batch, len(groups), num_heads, num_rows))
    weight = np.ones((batch, num_rows)) if mask is None else mask.astype(np.float64)
    for h, members in enumerate(groups):
        group = list(members)
        total = outputs[:, group].sum(axis=1, keepdims=True)
        merged = probs[:, group] @ total  # (B, k, L, D)
        errors = merged - (probs[:, group] @ outputs[:, group]).sum(axis=1, keepdims=True)
        gram = np.einsum("bild,bjld,bl->blij", errors, errors, weight)
        scale = np.einsum("bild,bild,bl->bl", merged, merged, weight)
        if alpha_per == "map":
            gram, scale = gram.sum(axis=1, keepdims=True), scale.sum(axis=1, keepdims=True)
        for b in range(batch):
            for i in range(gram.shape[1]):
                rows = slice(None) if alpha_per == "map" else slice(i, i + 1)
                mixing[b, h, group, rows] = _group_weights(gram[b, i], scale[b, i])[:, None]
    return mixing


def _group_weights(gram: Array, scale: float) -> Array:
    norms = np.diag(gram)
    farthest = float((norms[:, None] + norms[None, :] - 2 * gram).max())  # max ||U_i - U_j||^2
    if farthest <= degenerate_threshold() * scale:
        return np.full(len(gram), 1.0 / len(gram))
    return simplex_weights(gram)


def _residual(
    probs: Array, outputs: Array, mixing: Array, groups: Sequence[Sequence[int]], mask: Mask | None
) -> Array:
    """Relative Frobenius error of the merged attention output per sample (MIX-8)."""
    weight = np.ones(1) if mask is None else mask[:, :, None].astype(np.float64)
    target: Array = (probs @ outputs).sum(axis=1)  # (B, L, D)
    merged_outputs = np.stack([outputs[:, list(group)].sum(axis=1) for group in groups], axis=1)
    merged = (mix_heads(probs, mixing) @ merged_outputs).sum(axis=1)
    error = np.sqrt((((merged - target) * weight) ** 2).sum(axis=(1, 2)))
    norm = np.sqrt(((target * weight) ** 2).sum(axis=(1, 2)))
    relative = error / np.where(norm == 0.0, 1.0, norm)
    residual: Array = np.where((norm == 0.0) & (error > 0.0), np.inf, relative)
    return residual
