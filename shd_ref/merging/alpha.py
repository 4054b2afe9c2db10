"""Alpha (spec chapter ALPHA): the weight that best keeps the attention output of two merged heads.

Merging p and q into ``a A_p + (1 - a) A_q`` with value outputs ``X_p + X_q`` costs
``E(a) = || a M + N ||^2`` with ``M = (A_p - A_q)(X_p + X_q)`` and ``N = (A_q - A_p) X_p``, a parabola in a.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, Mask, as_float, as_mask, check_probs
from shd_ref.errors import ShdError
from shd_ref.integers import check_option
from shd_ref.tolerances import degenerate_threshold

ALPHA_RULES: tuple[str, ...] = ("least_squares", "as_printed")


class AlphaSolution(NamedTuple):
    """One pair's alpha with what the report needs; every array ``(B,)``."""

    raw: Array  # before clipping; 1/2 where degenerate
    clipped: Array  # in [0, 1]
    degenerate: Mask  # every a is optimal


def solve_alpha(
    probs_p: ArrayLike,
    probs_q: ArrayLike,
    value_outputs_p: ArrayLike,
    value_outputs_q: ArrayLike,
    *,
    query_mask: ArrayLike | None = None,
    rule: str = "least_squares",
    row_sums: str = "one",
) -> Array:
    """The closed-form merge weight of head p against head q, clipped to [0, 1] (ALPHA-1..11).

    ``a* = <u, u + w> / ||u + w||^2`` with ``u = (A_p - A_q) X_p`` and ``w = (A_p - A_q) X_q``. The objective
    is convex, so clipping gives the constrained optimum. Degenerate pairs get 1/2.

    Args:
        probs_p: A_p ``(B, L, S)``, rows summing to one (or zero where fully masked).
        probs_q: A_q, same shape.
        value_outputs_p: X_p ``(B, S, D)``, see ``value_outputs``.
        value_outputs_q: X_q, same shape.
        query_mask: boolean ``(B, L)``, True = the row counts; default all.
        rule: ``"least_squares"``, or ``"as_printed"`` for the misprinted N of the source (worse; for comparison).
        row_sums: ``"one"``, or ``"at_most_one"`` for maps with attention sinks, used as they are.

    Returns:
        ``(B,)``.

    Raises:
        ShdError: ``argument-shape``, ``argument-value``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.

    Source: Eq. 5-9. Deviation: N as derived from Eq. 6, not as printed under Eq. 7 (D-1).
    """
    a_p, a_q = (np.asarray(a) for a in (probs_p, probs_q))
    if a_p.ndim != 3 or a_p.shape != a_q.shape:
        message = f"probs_p and probs_q must share one shape (B, L, S); got {a_p.shape} and {a_q.shape}"
        raise ShdError("argument-shape", message, "ALPHA-1")
    batch, rows, keys = a_p.shape
    x_p = as_float(value_outputs_p, "value_outputs_p", ndim=3)
    x_q = as_float(value_outputs_q, "value_outputs_q", ndim=3)
    if x_p.shape != x_q.shape or x_p.shape[:2] != (batch, keys):
        message = f"value_outputs must both be (B, S, D) with B={batch}, S={keys}; got {x_p.shape} and {x_q.shape}"
        raise ShdError("argument-shape", message, "ALPHA-1")
    mask = None if query_mask is None else as_mask(query_mask, "query_mask", (batch, rows))
    checked_p = check_probs(a_p[:, None], "probs_p", query_mask=mask, row_sums=row_sums)[:, 0]
    checked_q = check_probs(a_q[:, None], "probs_q", query_mask=mask, row_sums=row_sums)[:, 0]
    return solve_pair(checked_p, checked_q, x_p, x_q, query_mask=mask, rule=rule).clipped


def solve_pair(
    a_p: Array, a_q: Array, x_p: Array, x_q: Array, *, query_mask: Mask | None, rule: str
) -> AlphaSolution:
    """``solve_alpha`` on checked float64 arrays, with the report that strategies need."""
    check_option("rule", rule, ALPHA_RULES, "ALPHA-4")
    both = x_p + x_q
    m = (a_p - a_q) @ both  # (B, L, D)
    n = (a_q - a_p) @ x_p if rule == "least_squares" else a_q @ x_p - a_p @ x_q
    # Rows that do not count enter no sum (ALPHA-7).
    weight = np.ones(m.shape[:2]) if query_mask is None else query_mask.astype(np.float64)
    by_row = -(n * m).sum(-1), (m * m).sum(-1), ((a_p @ both) ** 2).sum(-1) + ((a_q @ both) ** 2).sum(-1)
    numerator, denominator, scale = ((terms * weight).sum(-1) for terms in by_row)  # each (B,)
    degenerate = denominator <= degenerate_threshold() * scale
    raw = np.where(degenerate, 0.5, numerator / np.where(degenerate, 1.0, denominator))
    return AlphaSolution(raw, np.clip(raw, 0.0, 1.0), degenerate)


def check_alphas(alphas: Array, name: str, spec_id: str) -> None:
    """Alphas given by a caller are weights: both they and what they leave are at least 0 (MIX-13, GRAM-6)."""
    if ((alphas < 0.0) | (alphas > 1.0)).any():
        message = f"{name} must lie in [0, 1]; got from {alphas.min():.6g} to {alphas.max():.6g}: clip them first"
        raise ShdError("mixing-invalid", message, spec_id)


def merge_error(
    a_p: Array, a_q: Array, x_p: Array, x_q: Array, alpha: Array, *, query_mask: Mask | None = None
) -> Array:
    """``E(alpha)`` ``(B,)``, squared error of the merged attention output (PLAN-12); alpha ``(B,)``."""
    a = alpha[:, None, None]
    error = ((a * a_p + (1.0 - a) * a_q) @ (x_p + x_q) - a_p @ x_p - a_q @ x_q) ** 2  # (B, L, D)
    weight = 1.0 if query_mask is None else query_mask[:, :, None].astype(np.float64)
    total: Array = (error * weight).sum(axis=(1, 2))
    return total
