"""The gram tensor (spec chapter GRAM): every alpha of every round without the wide value outputs.

Always float64 (GRAM-5): its entries are expanded squares, which subtract nearly equal numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import check_integer
from shd_torch.checks import check_mask, check_probs, check_real, check_shapes, check_weights, without_autocast
from shd_torch.maps.alpha import AlphaSolution, minimize


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
    read = torch.einsum("bils,bgsd->bigld", teacher_probs.double(), values.double())
    group = len(projection) // values.shape[1]
    return gram_of_products(read.repeat_interleave(group, dim=2), projection, query_mask)


def split_projection(
    maps: tuple[int, ...], values: Tensor, output_projection: Tensor, query_mask: Tensor | None, *, check: bool
) -> Tensor:
    """The projection by heads ``(H_t, d_v, D)``, float64; all must fit maps ``(B, H_t, L, S)`` (GRAM-6)."""
    check_real(values, "values", check=check, ndim=4)
    check_real(output_projection, "output_projection", check=check, ndim=2)
    (batch, heads, rows, keys), (num_kv_heads, width) = maps, values.shape[1::2]
    fit = values.shape[0] == batch and values.shape[2] == keys and output_projection.shape[0] == heads * width
    check_shapes(
        fit and num_kv_heads > 0 and heads % num_kv_heads == 0,
        "values (B, H_kv, S, d_v) and output_projection (H_t * d_v, D) must fit the teacher's (B, H_t, L, S)",
        values,
        output_projection,
        spec_id="GRAM-6",
    )
    if query_mask is not None:
        check_mask(query_mask, "query_mask", (batch, rows))
    return output_projection.detach().double().reshape(heads, width, -1)


def gram_of_products(read: Tensor, projection: Tensor, query_mask: Tensor | None) -> Tensor:
    """The gram tensor of heads from ``A_i V_j`` ``(B, H, H, L, d_v)`` and W_j ``(H, d_v, D)``, float64 (GRAM-1)."""
    inner = torch.einsum("jdm,lem->jlde", projection, projection)  # K
    if query_mask is not None:
        read = read.masked_fill(~query_mask[:, None, None, :, None], 0.0)
    # One l after another: all at once would hold H_t^3 outputs.
    terms = [
        torch.einsum("bijrd,bkrd->bijk", read @ inner[:, head], read[:, :, head])
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


def solve_gram_pair(gram: Tensor, p: int, q: int) -> AlphaSolution:
    """``solve_alpha_from_gram`` on a checked float64 tensor, with what the report needs."""
    both = [p, q]
    pair = gram[:, both][:, :, both][:, :, :, both][:, :, :, :, both]  # (B, 2, 2, 2, 2)
    maps = pair.movedim((1, 3), (0, 1))  # (2, 2, B, 2, 2): both maps first, then both value outputs
    difference = maps[0, 0] - maps[0, 1] - maps[1, 0] + maps[1, 1]  # g (B, 2, 2)
    numerator, denominator = difference[:, 0].sum(1), difference.sum((1, 2))
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
    others = [head for head in range(gram.shape[1]) if head not in (p, q)]
    weight = alpha.double().reshape(-1, 1, 1, 1, 1)
    merged = gram.double()
    for axis in (1, 2, 3, 4):
        first, second = merged.narrow(axis, p, 1), merged.narrow(axis, q, 1)
        new = weight * first + (1.0 - weight) * second if axis in (1, 3) else first + second
        rest = merged.index_select(axis, torch.tensor(others, dtype=torch.int64, device=merged.device))
        merged = torch.cat((new, rest), dim=axis)
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
