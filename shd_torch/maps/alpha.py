"""Merge weights (spec chapter ALPHA): what best keeps the attention output of heads merged into one.

Merging p and q into ``a A_p + (1 - a) A_q`` with value outputs ``X_p + X_q`` costs ``E(a) = || a m - u ||^2``
with ``u = (A_p - A_q) X_p`` and ``m = (A_p - A_q)(X_p + X_q)``, a parabola in a; merging a whole group costs a
quadratic form in its weights. Both are formed from products with *differences* of maps: expanding the squares
into a Gram tensor of ``A_i X_j`` would subtract nearly equal numbers, which float32 does not forgive.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.tolerances import degenerate_threshold
from shd_torch.checks import check_mask, check_option, check_probs, check_real, compute_dtype
from shd_torch.precision import without_autocast

ALPHA_RULES: tuple[str, ...] = ("least_squares", "as_printed")
ALPHA_PER: tuple[str, ...] = ("map", "row")

_DEGENERATE = degenerate_threshold()  # read once, here: a compiled graph cannot read files


class AlphaSolution(NamedTuple):
    """The alphas of one round with what the report needs; every tensor ``(B, P)`` or, per row, ``(B, P, L)``."""

    raw: Tensor  # before clipping; 1/2 where degenerate or not counted
    clipped: Tensor  # in [0, 1]
    degenerate: Tensor  # boolean: every a is optimal, and the row counts


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
    alpha_per: str = "map",
    row_sums: str = "one",
    check: bool = True,
) -> Tensor:
    """The closed-form merge weight of head p against head q, clipped to [0, 1] (ALPHA-1..11).

    ``a* = <u, u + w> / ||u + w||^2`` with ``u = (A_p - A_q) X_p`` and ``w = (A_p - A_q) X_q``. The objective is
    convex, so clipping gives the constrained optimum. Degenerate pairs get 1/2. Runs without gradient.

    Arguments and errors are those of ``shd_ref.solve_alpha``.

    Returns:
        ``(B,)``, or ``(B, L)`` with ``alpha_per="row"``; float64 or float32.

    Source: Eq. 5-9. Deviation: N as derived from Eq. 6, not as printed under Eq. 7 (D-1); per row (D-5).
    """
    check_option("rule", rule, ALPHA_RULES, "ALPHA-4")
    check_option("alpha_per", alpha_per, ALPHA_PER, "ALPHA-9")
    for name, tensor in (("probs_p", probs_p), ("probs_q", probs_q)):
        check_real(tensor, name, check=False)
    if probs_p.ndim != 3 or probs_p.shape != probs_q.shape:
        raise ShdError(
            "argument-shape",
            f"probs_p and probs_q must share one shape (B, L, S); got {tuple(probs_p.shape)} and "
            f"{tuple(probs_q.shape)}",
            "ALPHA-1",
        )
    batch, rows, keys = probs_p.shape
    for name, tensor in (("value_outputs_p", value_outputs_p), ("value_outputs_q", value_outputs_q)):
        check_real(tensor, name, check=check, ndim=3)
    if value_outputs_p.shape != value_outputs_q.shape or value_outputs_p.shape[:2] != (batch, keys):
        raise ShdError(
            "argument-shape",
            f"value_outputs must both be (B, S, D) with B={batch}, S={keys}; got {tuple(value_outputs_p.shape)} "
            f"and {tuple(value_outputs_q.shape)}",
            "ALPHA-1",
        )
    if query_mask is not None:
        check_mask(query_mask, "query_mask", (batch, rows))
    check_probs(probs_p[:, None], "probs_p", check=check, query_mask=query_mask, row_sums=row_sums)
    check_probs(probs_q[:, None], "probs_q", check=check, query_mask=query_mask, row_sums=row_sums)
    dtype = compute_dtype(probs_p, probs_q, value_outputs_p, value_outputs_q)
    pair = [t[:, None].to(dtype) for t in (probs_p, probs_q, value_outputs_p, value_outputs_q)]
    return solve_pairs(*pair, query_mask=query_mask, rule=rule, alpha_per=alpha_per).clipped[:, 0]


def solve_pairs(
    a_p: Tensor, a_q: Tensor, x_p: Tensor, x_q: Tensor, *, query_mask: Tensor | None, rule: str, alpha_per: str
) -> AlphaSolution:
    """``solve_alpha`` for every pair of a round at once, on checked tensors of one dtype.

    Args:
        a_p: first maps ``(B, P, L, S)``.
        a_q: second maps, same shape.
        x_p: value outputs ``(B, P, S, D)`` of the first heads.
        x_q: the same of the second heads.
        query_mask: boolean ``(B, L)``, True = the row counts.
        rule: see ``solve_alpha``.
        alpha_per: see ``solve_alpha``.
    """
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
    if alpha_per == "map":
        sums = sums.sum(-1)
    numerator, denominator, scale = sums.unbind()
    degenerate = denominator <= _DEGENERATE * scale
    raw = (numerator / denominator.masked_fill(degenerate, 1.0)).masked_fill(degenerate, 0.5)
    if alpha_per == "row" and query_mask is not None:
        degenerate = degenerate & query_mask[:, None, :]
    return AlphaSolution(raw, raw.clamp(0.0, 1.0), degenerate)
