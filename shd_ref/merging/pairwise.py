"""Running a plan (spec chapters PLAN and MIX, PLAN-4 and MIX-4): a pool of heads, merged round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from shd_ref.attention import Array, Mask
from shd_ref.merging.alpha import AlphaSolution, solve_pair
from shd_ref.merging.plans import Pair

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
    alpha_per: str = "map",
) -> tuple[list[Head], list[AlphaSolution]]:
    """The pool after one round, merged heads first and untouched ones after, and each pair's alpha (MIX-4, MIX-5)."""
    merged, solutions = [], []
    for p, q in one_round:
        (a_p, x_p), (a_q, x_q) = pool[p], pool[q]
        solution = solve_pair(a_p, a_q, x_p, x_q, query_mask=query_mask, rule=rule, alpha_per=alpha_per)
        if strategy == "constant":
            half = np.full_like(solution.raw, 0.5)
            solution = AlphaSolution(half, half, np.zeros_like(solution.degenerate), solution.counted)
        elif strategy == "hard":
            # E is a parabola around alpha: the nearer of 0 and 1 is the better; ties keep p.
            chosen = np.where(solution.raw >= 0.5, 1.0, 0.0)
            solution = solution._replace(raw=chosen, clipped=chosen)
        alpha = solution.clipped.reshape(len(a_p), -1, 1)  # (B, 1 or L, 1)
        merged.append((alpha * a_p + (1 - alpha) * a_q, x_p + x_q))
        solutions.append(solution)
    used = {head for pair in one_round for head in pair}
    return merged + [head for position, head in enumerate(pool) if position not in used], solutions
