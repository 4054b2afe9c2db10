"""Merge weights (spec chapters ALPHA and MIX-7): what best keeps the attention output of heads merged into one.

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

    Args:
        probs_p: A_p ``(B, L, S)``, rows summing to one (or zero where fully masked).
        probs_q: A_q, same shape.
        value_outputs_p: X_p ``(B, S, D)``, see ``value_outputs``.
        value_outputs_q: X_q, same shape.
        query_mask: boolean ``(B, L)``, True = the row counts; default all.
        rule: ``"least_squares"``, or ``"as_printed"`` for the misprinted N of the source (worse; for comparison).
        alpha_per: ``"map"`` (one per sample) or ``"row"`` (one per sample and query row).
        row_sums: ``"one"``, or ``"at_most_one"`` for maps with attention sinks.
        check: validate the values of the arguments, which costs a device sync.

    Returns:
        ``(B,)``, or ``(B, L)`` with ``alpha_per="row"``; float64 or float32.

    Raises:
        ShdError: ``argument-shape``, ``argument-value``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.

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


def solve_group(probs: Tensor, outputs: Tensor, *, query_mask: Tensor | None, alpha_per: str) -> Tensor:
    """The weights on the simplex that best merge a whole group of k heads at once (MIX-7).

    With ``D_i = A_i - A_0`` and X the sum of the group's value outputs, the error of the merged output is
    ``sum_i c_i D_i X - sum_i D_i X_i``. Equal weights where all members give the same output.

    Args:
        probs: the group's maps ``(B, k, L, S)``.
        outputs: their value outputs ``(B, k, S, D)``.
        query_mask: boolean ``(B, L)``, True = the row counts.
        alpha_per: ``"map"`` or ``"row"``.

    Returns:
        ``(B, k, 1)`` or, per row, ``(B, k, L)``.
    """
    total = outputs.sum(1, keepdim=True)
    difference = probs - probs[:, :1]
    spread = difference @ total  # (B, k, L, D)
    target = (difference @ outputs).sum(1)  # (B, L, D)
    merged = spread + probs[:, :1] @ total
    if query_mask is not None:
        keep = query_mask[:, None, :, None]
        spread, merged, target = (
            torch.where(keep, spread, 0.0),
            torch.where(keep, merged, 0.0),
            torch.where(keep[:, 0], target, 0.0),
        )
    by_row = spread.transpose(1, 2)  # (B, L, k, D)
    scale = merged.square().sum((1, 3))  # (B, L)
    if alpha_per == "map":
        by_row, target = spread.flatten(2)[:, None], target.flatten(1)[:, None]
        scale = scale.sum(1, keepdim=True)
    quadratic = by_row @ by_row.mT  # (B, 1 or L, k, k)
    linear = -(by_row @ target[..., None])[..., 0]
    return _settled_weights(quadratic, linear, scale)


def solve_gram_group(gram: Tensor) -> Tensor:
    """``solve_group`` from a group's gram tensor (GRAM-1, MIX-7).

    Args:
        gram: G ``(B, k, k, k, k)``, or with a last axis L; float64.

    Returns:
        ``(B, k, 1)`` or, per row, ``(B, k, L)``.
    """
    gram = gram.unsqueeze(-1) if gram.ndim == 5 else gram
    difference = gram - gram[:, :1]
    difference = difference - difference[:, :, :, :1]  # <(A_i - A_0) X_j, (A_k - A_0) X_l>
    quadratic = difference.sum((2, 4)).movedim(-1, 1)  # (B, 1 or L, k, k)
    linear = -torch.einsum("bijkkl->bli", difference)
    scale = gram.sum((2, 4)).diagonal(dim1=1, dim2=2).sum(-1)  # (B, 1 or L), sum_i ||A_i X||^2
    return _settled_weights(quadratic, linear, scale)


def _settled_weights(quadratic: Tensor, linear: Tensor, scale: Tensor) -> Tensor:
    """The weights of a group ``(B, k, 1 or L)``, equal where all members give the same output (MIX-15)."""
    norms = quadratic.diagonal(dim1=-2, dim2=-1)
    distances = norms[..., :, None] + norms[..., None, :] - 2 * quadratic  # ||(A_i - A_j) X||^2
    degenerate = distances.amax((-2, -1)) <= _DEGENERATE * scale
    weights = simplex_weights(quadratic, linear).masked_fill(degenerate[..., None], 1.0 / linear.shape[-1])
    return weights.mT


def simplex_weights(quadratic: Tensor, linear: Tensor) -> Tensor:
    """The convex weights c that minimise ``c^T Q c + 2 b^T c``, for a whole batch of problems (MIX-7).

    Wolfe's active-set method, all problems in step: exact in finitely many steps, usually about k. Each step
    waits for the device once, to ask whether every problem is solved. Solved in float64 for every dtype of the data.

    Args:
        quadratic: Q ``(..., k, k)``, positive semi-definite.
        linear: b ``(..., k)``, in the range of Q.

    Returns:
        ``(..., k)``, at least 0, summing to one, in the dtype of the data.
    """
    k = linear.shape[-1]
    q, b = quadratic.reshape(-1, k, k).double(), linear.reshape(-1, k).double()
    size = q.diagonal(dim1=1, dim2=2).sum(1)
    size = torch.where(size > 0, size, 1.0)  # with a trace of one, absolute tolerances are relative ones
    q, b = q / size[:, None, None], b / size[:, None]
    tolerance = 1e-14
    start = (q.diagonal(dim1=1, dim2=2) + 2 * b).argmin(1)
    active = torch.nn.functional.one_hot(start, k).bool()
    weights = active.double()
    settled = torch.ones_like(start, dtype=torch.bool)  # weights are optimal on the active set
    stuck = torch.zeros_like(settled)  # the head that should enter leaves at once: rounding, not progress
    for _ in range(8 * k * k + 8):  # finite in theory; the bound only guards against rounding cycles
        slope = (q @ weights[..., None])[..., 0] + b
        best = torch.nn.functional.one_hot(slope.argmin(1), k).bool()
        lower = slope.amin(1) < (weights * slope).sum(1) - tolerance
        grow = settled & lower & ~stuck & ~(best & active).any(1)
        settled = settled & ~grow
        if settled.all():
            break
        active = active | (best & grow[:, None])
        affine = _affine_minimum(q, b, active)
        inside = ((affine > 0) | ~active).all(1)
        # Walk towards the affine minimum until the first weight reaches zero; that head leaves the set.
        falling = active & (affine <= 0)
        drop = torch.where(falling & (weights > affine), weights - affine, 1.0)
        step = torch.where(falling, weights / drop, 1.0).amin(1, keepdim=True).clamp(max=1.0)
        walked = (weights + step * (affine - weights)).clamp(min=0.0)
        stuck = stuck | (~settled & ~inside & (step[:, 0] == 0))
        kept = active & (walked > 1e-15)
        moved = torch.where(inside[:, None], affine.where(active, 0.0), walked.where(kept, 0.0))
        weights = torch.where(settled[:, None], weights, moved)
        active = torch.where((settled | inside)[:, None], active, kept)
        settled = settled | inside
    weights = weights / weights.sum(1, keepdim=True)
    return weights.to(linear.dtype).reshape(linear.shape)


def _affine_minimum(q: Tensor, b: Tensor, active: Tensor) -> Tensor:
    """Weights of any sign, zero off the active set and summing to one, that minimise the quadratic form."""
    count, k = b.shape
    both = active[:, :, None] & active[:, None, :]
    system = q.new_zeros((count, k + 1, k + 1))
    system[:, :k, :k] = torch.where(both, q, torch.diag_embed((~active).to(q.dtype)))
    system[:, :k, k] = system[:, k, :k] = active.to(q.dtype)
    target = torch.cat((-b * active, b.new_ones((count, 1))), dim=1)
    # The pseudo-inverse because heads may agree exactly, which makes the system singular but still solvable.
    inverse: Tensor = torch.linalg.pinv(system, hermitian=True)
    return (inverse @ target[..., None])[:, :k, 0]
