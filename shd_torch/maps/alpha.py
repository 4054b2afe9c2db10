"""Merge weights (spec chapter ALPHA): what best keeps the attention output of heads merged into one.

Merging p and q into ``a A_p + (1 - a) A_q`` with value outputs ``X_p + X_q`` costs ``E(a) = || a m - u ||^2``
with ``u = (A_p - A_q) X_p`` and ``m = (A_p - A_q)(X_p + X_q)``, from products with *differences* of maps: a Gram
tensor of ``A_i X_j`` would subtract nearly equal numbers, which float32 does not forgive. Where maps are never
formed, it is all there is (spec chapter GRAM): every alpha of every round without the wide value outputs, always in
float64 (GRAM-5), at the end of this file.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import check_integer
from shd_ref.merging.plans import MergePlan
from shd_ref.tolerances import degenerate_threshold
from shd_torch.checks import (
    check_mask,
    check_option,
    check_probs,
    check_real,
    check_shapes,
    check_weights,
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
        nearest = (self.raw >= 0.5).to(self.raw.dtype)
        return self._replace(raw=nearest, clipped=nearest)


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
    x_sum = x_p + x_q
    difference = a_p - a_q
    m = difference @ x_sum  # (B, P, L, D)
    output_q = a_q @ x_sum
    minus_n = difference @ x_p if rule == "least_squares" else a_p @ x_q - a_q @ x_p
    sums = torch.stack(
        (
            (minus_n * m).sum(-1),
            m.square().sum(-1),
            (output_q + m).square().sum(-1) + output_q.square().sum(-1),  # ||A_p X||^2 + ||A_q X||^2
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


@torch.no_grad()
@without_autocast
def gram_tensor(
    teacher_probs: Tensor,
    values: Tensor,
    output_projection: Tensor,
    *,
    query_mask: Tensor | None = None,
    row_sums: str = "one",
    check: bool = True,
) -> Tensor:
    """``G[i,j,k,l] = <A_i X_j, A_k X_l>`` over counted rows, without forming the D-wide X (GRAM-1).

    Arguments and errors are those of ``shd_ref.gram_tensor``.

    Returns:
        G ``(B, H_t, H_t, H_t, H_t)``; float64.
    """
    check_real(teacher_probs, "teacher_probs", check=False, ndim=4)
    projection = split_projection(tuple(teacher_probs.shape), values, output_projection, query_mask, check=check)
    check_probs(teacher_probs, "teacher_probs", check=check, query_mask=query_mask, row_sums=row_sums)
    # Every head's map with every head's values: ordinary attention outputs (B, H_t, H_t, L, d_v).
    products = torch.einsum("bils,bgsd->bigld", teacher_probs.double(), values.double())
    group = len(projection) // values.shape[1]
    return gram_of_products(products.repeat_interleave(group, dim=2), projection, query_mask)


def split_projection(
    maps: tuple[int, ...], values: Tensor, output_projection: Tensor, query_mask: Tensor | None, *, check: bool
) -> Tensor:
    """The projection by heads ``(H_t, d_v, D)``, float64; all must fit maps ``(B, H_t, L, S)`` (GRAM-6)."""
    check_real(values, "values", check=check, ndim=4)
    check_real(output_projection, "output_projection", check=check, ndim=2)
    (batch, heads, rows, keys), (num_kv_heads, width) = maps, values.shape[1::2]
    fit = values.shape[0] == batch and values.shape[2] == keys and output_projection.shape[0] == heads * width
    fit = fit and num_kv_heads > 0 and heads % num_kv_heads == 0
    rule = "values (B, H_kv, S, d_v) and output_projection (H_t * d_v, D) must fit the teacher's (B, H_t, L, S)"
    check_shapes(fit, rule, values, output_projection, spec_id="GRAM-6")
    if query_mask is not None:
        check_mask(query_mask, "query_mask", (batch, rows))
    return output_projection.detach().double().reshape(heads, width, -1)


def gram_of_products(products: Tensor, projection: Tensor, query_mask: Tensor | None) -> Tensor:
    """The gram tensor of heads from ``A_i V_j`` ``(B, H, H, L, d_v)`` and W_j ``(H, d_v, D)``, float64 (GRAM-1)."""
    inner = torch.einsum("jdm,lem->jlde", projection, projection)  # K
    if query_mask is not None:
        products = products.masked_fill(~query_mask[:, None, None, :, None], 0.0)
    # One l after another: all at once would hold H_t^3 outputs.
    terms = [
        torch.einsum("bijrd,bkrd->bijk", products @ inner[:, head], products[:, :, head])
        for head in range(projection.shape[0])
    ]
    return torch.stack(terms, dim=4)


@torch.no_grad()
@without_autocast
def solve_alpha_from_gram(gram: Tensor, p: int, q: int, *, check: bool = True) -> Tensor:
    """``solve_alpha`` for heads p and q of the pool that a gram tensor describes (GRAM-2, GRAM-3, GRAM-7).

    Arguments and errors are those of ``shd_ref.solve_alpha_from_gram``.

    Returns:
        ``(B,)``; the weight of p, in [0, 1]; float64.
    """
    p, q = _check_pool(gram, p, q, check)
    return solve_gram_pair(gram.double(), p, q).clipped


def solve_gram_pair(gram: Tensor, p: int, q: int, rule: str = "least_squares") -> AlphaSolution:
    """``solve_alpha_from_gram`` on a checked float64 tensor, with what the report needs and under either rule."""
    heads = [p, q]
    pair = gram[:, heads][:, :, heads][:, :, :, heads][:, :, :, :, heads]  # (B, 2, 2, 2, 2)
    maps = pair.movedim((1, 3), (0, 1))  # (2, 2, B, 2, 2): both maps first, then both value outputs
    difference = maps[0, 0] - maps[0, 1] - maps[1, 0] + maps[1, 1]  # g (B, 2, 2)
    if rule == "least_squares":
        numerator = difference[:, 0].sum(1)
    else:
        # <A_p X_q - A_q X_p, M>: a map and a value output on the left, M's difference and sum on the right.
        numerator = (maps[0, 0] - maps[0, 1])[:, 1].sum(1) - (maps[1, 0] - maps[1, 1])[:, 0].sum(1)
    denominator = difference.sum((1, 2))
    # Where value outputs cancel, rounding leaves this scale below 0, and the quotient of two zeros (GRAM-7).
    scale = (maps[0, 0] + maps[1, 1]).sum((1, 2)).clamp_min(0.0)
    return minimize(numerator, denominator, scale)


@torch.no_grad()
@without_autocast
def merge_gram(gram: Tensor, p: int, q: int, alpha: Tensor, *, check: bool = True) -> Tensor:
    """The gram tensor of the pool in which p and q are merged; the merged head comes first (GRAM-4).

    Arguments and errors are those of ``shd_ref.merge_gram``.

    Returns:
        G of H - 1 heads; float64.
    """
    p, q = _check_pool(gram, p, q, check)
    check_real(alpha, "alpha", check=check)
    check_shapes(alpha.shape == gram.shape[:1], "alpha must be (B,), as gram", gram, alpha, spec_id="GRAM-6")
    if check:
        check_weights(alpha, "alpha", "GRAM-6")
    remaining = [head for head in range(gram.shape[1]) if head not in (p, q)]
    weight = alpha.double().reshape(-1, 1, 1, 1, 1)
    merged = gram.double()
    for axis in (1, 2, 3, 4):
        first, second = merged.narrow(axis, p, 1), merged.narrow(axis, q, 1)
        new = weight * first + (1.0 - weight) * second if axis in (1, 3) else first + second
        untouched = merged.index_select(axis, torch.tensor(remaining, dtype=torch.int64, device=merged.device))
        merged = torch.cat((new, untouched), dim=axis)
    return merged


def _check_pool(gram: Tensor, p: int, q: int, check: bool) -> tuple[int, int]:
    """Two positions of the pool of a gram tensor (GRAM-6), as Python's integers: torch takes uint8 for a mask."""
    check_real(gram, "gram", check=check)
    fit = gram.ndim == 5 and len(set(gram.shape[1:])) == 1
    check_shapes(fit, "gram must be (B, H, H, H, H)", gram, spec_id="GRAM-6")
    heads = gram.shape[1]
    p, q = (check_integer(name, head, 0, heads - 1, "GRAM-6") for name, head in (("p", p), ("q", q)))
    if p == q:
        raise ShdError("argument-value", f"p and q must be two positions of 0..{heads - 1}; got {p} twice", "GRAM-6")
    return p, q
