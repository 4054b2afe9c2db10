"""Merge weights (spec chapter ALPHA): what best keeps the attention output of heads merged into one.

Merging p and q into ``a A_p + (1 - a) A_q`` with value outputs ``X_p + X_q`` costs ``E(a) = || a m - u ||^2``
with ``u = (A_p - A_q) X_p`` and ``m = (A_p - A_q)(X_p + X_q)``, from products with *differences* of maps: a Gram
tensor of ``A_i X_j`` would subtract nearly equal numbers, which float32 does not forgive.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shd_ref.merging.plans import MergePlan
from shd_ref.tolerances import degenerate_threshold
from shd_torch.checks import (
    check_mask,
    check_option,
    check_probs,
    check_real,
    check_shapes,
    compute_dtype,
    without_autocast,
)

ALPHA_RULES: tuple[str, ...] = ("least_squares", "as_printed")

_DEGENERATE = degenerate_threshold()  # read once, here: a compiled graph cannot read files


class AlphaSolution(NamedTuple):
    """The alphas of one round with what the report needs; every tensor ``(B, P)``."""

    raw: Tensor  # before clipping; 1/2 where degenerate
    clipped: Tensor  # in [0, 1]
    degenerate: Tensor  # boolean: every a is optimal

    def hardened(self) -> AlphaSolution:
        """The nearer of 0 and 1, which is the better, E being a parabola around alpha; ties keep p (MIX-5)."""
        chosen = (self.raw >= 0.5).to(self.raw.dtype)
        return self._replace(raw=chosen, clipped=chosen)


@torch.no_grad()
@without_autocast
def solve_alpha(
    probs_p: Tensor,
    probs_q: Tensor,
    value_outputs_p: Tensor,
    value_outputs_q: Tensor,
    *,
    query_mask: Tensor | None = None,
    rule: str = "least_squares",
    row_sums: str = "one",
    check: bool = True,
) -> Tensor:
    """The closed-form merge weight of head p against head q, clipped to [0, 1] (ALPHA-1..11).

    ``a* = <u, u + w> / ||u + w||^2`` with ``u = (A_p - A_q) X_p`` and ``w = (A_p - A_q) X_q``. The objective is
    convex, so clipping gives the constrained optimum. Degenerate pairs get 1/2. Runs without gradient.

    Arguments and errors are those of ``shd_ref.solve_alpha``.

    Returns:
        ``(B,)``; float64 or float32.

    Source: Eq. 5-9. Deviation: N as derived from Eq. 6, not as printed under Eq. 7 (D-1).
    """
    check_option("rule", rule, ALPHA_RULES, "ALPHA-4")
    for name, tensor in (("probs_p", probs_p), ("probs_q", probs_q)):
        check_real(tensor, name, check=False)
    fit = probs_p.ndim == 3 and probs_p.shape == probs_q.shape
    check_shapes(fit, "probs_p and probs_q must share one shape (B, L, S)", probs_p, probs_q, spec_id="ALPHA-1")
    batch, rows, keys = probs_p.shape
    for name, tensor in (("value_outputs_p", value_outputs_p), ("value_outputs_q", value_outputs_q)):
        check_real(tensor, name, check=check, ndim=3)
    fit = value_outputs_p.shape == value_outputs_q.shape and value_outputs_p.shape[:2] == (batch, keys)
    rule_of_values = "maps (B, L, S) must have two value outputs (B, S, D)"
    check_shapes(fit, rule_of_values, probs_p, value_outputs_p, value_outputs_q, spec_id="ALPHA-1")
    if query_mask is not None:
        check_mask(query_mask, "query_mask", (batch, rows))
    check_probs(probs_p[:, None], "probs_p", check=check, query_mask=query_mask, row_sums=row_sums)
    check_probs(probs_q[:, None], "probs_q", check=check, query_mask=query_mask, row_sums=row_sums)
    dtype = compute_dtype(probs_p, probs_q, value_outputs_p, value_outputs_q)
    pair = [t[:, None].to(dtype) for t in (probs_p, probs_q, value_outputs_p, value_outputs_q)]
    return solve_pairs(*pair, query_mask=query_mask, rule=rule).clipped[:, 0]


def solve_pairs(
    a_p: Tensor, a_q: Tensor, x_p: Tensor, x_q: Tensor, *, query_mask: Tensor | None, rule: str
) -> AlphaSolution:
    """``solve_alpha`` for all pairs of a round: checked maps ``(B, P, L, S)``, value outputs ``(B, P, S, D)``."""
    both = x_p + x_q
    difference = a_p - a_q
    m = difference @ both  # (B, P, L, D)
    kept = a_q @ both
    minus_n = difference @ x_p if rule == "least_squares" else a_p @ x_q - a_q @ x_p
    sums = torch.stack(
        (
            (minus_n * m).sum(-1),
            m.square().sum(-1),
            (kept + m).square().sum(-1) + kept.square().sum(-1),  # ||A_p X||^2 + ||A_q X||^2
        )
    )  # (3, B, P, L)
    if query_mask is not None:
        # Rows that do not count enter no sum (ALPHA-7).
        sums = sums.masked_fill(~query_mask[:, None, :], 0.0)
    return minimize(*sums.sum(-1).unbind())


def minimize(numerator: Tensor, denominator: Tensor, scale: Tensor) -> AlphaSolution:
    """The minimum of the parabola, 1/2 where it is flat against the scale of its maps (ALPHA-6)."""
    degenerate = denominator <= _DEGENERATE * scale
    raw = (numerator / denominator.masked_fill(degenerate, 1.0)).masked_fill(degenerate, 0.5)
    return AlphaSolution(raw, raw.clamp(0.0, 1.0), degenerate)


def constant_alphas(rounds: MergePlan, identity: Tensor) -> list[AlphaSolution]:
    """1/2 for every pair of every round, in the dtype of the mixing ``(B, ...)`` that they make."""
    halves = [identity.new_full((len(identity), len(pairs)), 0.5) for pairs in rounds]
    return [AlphaSolution(half, half, torch.zeros_like(half, dtype=torch.bool)) for half in halves]
