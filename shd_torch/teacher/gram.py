"""The gram tensor of a teacher's heads from its queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_torch.checks import check_mask, check_option, check_real
from shd_torch.maps.alpha import ALPHA_PER
from shd_torch.maps.gram import gram_of_products
from shd_torch.precision import without_autocast
from shd_torch.supervision.factored import Factored


@torch.no_grad()
@without_autocast
def gram_tensor_from_qk(
    teacher: Factored,
    values: Tensor,
    output_projection: Tensor,
    *,
    query_mask: Tensor | None = None,
    alpha_per: str = "map",
    check: bool = True,
) -> Tensor:
    """``gram_tensor`` of a teacher whose maps are never formed: the products ``A_i V_j`` are fused attention.

    Args:
        teacher: its queries and keys, see ``Factored.teacher``; the mixing plays no part.
        values: V ``(B, H_kv, S, d_v)``; query head i reads value head ``i // (H_t / H_kv)``.
        output_projection: W_o ``(H_t * d_v, D)``.
        query_mask: boolean ``(B, L)``, True = the row counts; default all.
        alpha_per: ``"map"``, or ``"row"`` for one G per query row.
        check: validate the values of the arguments, which costs a device sync.

    Returns:
        G ``(B, H_t, H_t, H_t, H_t)``, or with a last axis L; float64 sums of products made in float32 or wider.

    Raises:
        ShdError: ``argument-shape``, ``argument-value``, ``argument-dtype``, ``not-finite``, ``mixing-invalid``.

    Source: silent. Decision: D-22.
    """
    check_option("alpha_per", alpha_per, ALPHA_PER, "ALPHA-9")
    projection = check_factors(teacher, values, output_projection, query_mask, check=check)
    heads = projection.shape[0]
    maps, group = teacher.unmixed(), heads // values.shape[1]
    read = [maps.apply_to(values[:, head : head + 1]) for head in range(values.shape[1])]  # (B, H_t, L, d_v) each
    products = torch.stack(read, dim=2).repeat_interleave(group, dim=2)
    return gram_of_products(products.double(), projection, query_mask, alpha_per)


def check_factors(
    teacher: Factored, values: Tensor, output_projection: Tensor, query_mask: Tensor | None, *, check: bool
) -> Tensor:
    """Teacher, values and output projection must fit; the projection ``(H_t, d_v, D)``, float64 (GRAM-6)."""
    check_real(values, "values", check=check, ndim=4)
    check_real(output_projection, "output_projection", check=check, ndim=2)
    batch, heads, rows, _ = teacher.queries.shape
    num_kv_heads, width = values.shape[1], values.shape[3]
    fits = values.shape[0] == batch and values.shape[2] == teacher.keys.shape[2]
    if not fits or num_kv_heads == 0 or heads % num_kv_heads or output_projection.shape[0] != heads * width:
        raise ShdError(
            "argument-shape",
            "the teacher's queries (B, H_t, L, d), values (B, H_kv, S, d_v) and output_projection (H_t * d_v, D) "
            f"must fit; got {tuple(teacher.queries.shape)}, {tuple(values.shape)}, {tuple(output_projection.shape)}",
            "GRAM-6",
        )
    if query_mask is not None:
        check_mask(query_mask, "query_mask", (batch, rows))
    if check:
        teacher.check(None, 0)  # also rows that do not count (MAP-5)
    return output_projection.detach().double().reshape(heads, width, -1)
