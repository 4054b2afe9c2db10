"""Attention maps (spec chapter MAP): masked softmax, temperature, value outputs.

Axes are always ``(B, H, L, S)``: batch, heads, query length, key length. A boolean mask is True where attending
is allowed or where a row counts. float64 stays float64, everything else is computed in float32; maps come back
in the dtype they came in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shd_torch.checks import (
    check_attn_mask,
    check_probs,
    check_real,
    check_shapes,
    check_temperature,
    compute_dtype,
    map_dtype,
    without_autocast,
)


def softmax(
    attn_logits: Tensor, attn_mask: Tensor | None = None, *, temperature: float = 1.0, check: bool = True
) -> Tensor:
    """``softmax(attn_logits / temperature)`` over keys; a fully masked row is all zeros (MAP-1, MAP-2).

    Differentiable; neither values nor gradients are NaN on fully masked rows.

    Arguments and errors are those of ``shd_ref.softmax``.

    Returns:
        ``attn_probs`` of the same shape and dtype; masked entries are exactly 0.
    """
    check_real(attn_logits, "attn_logits", check=check, allow_minus_inf=True)
    check_shapes(attn_logits.ndim >= 2, "attn_logits must be (..., L, S)", attn_logits, spec_id="MAP-13")
    temperature = check_temperature(temperature)
    logits = mask_logits(attn_logits.to(compute_dtype(attn_logits)), attn_mask)
    empty = torch.isneginf(logits).all(dim=-1, keepdim=True)
    # Twice: the inner fill keeps NaN out of the softmax and so out of its gradient, the outer one zeroes the row.
    logits = logits.masked_fill(empty, 0.0)
    probs = temper(logits, logits, temperature).softmax(dim=-1).masked_fill(empty, 0.0)
    return probs.to(map_dtype(attn_logits))


def temper(logits: Tensor, allowed: Tensor, temperature: float) -> Tensor:
    """``logits / T`` less the largest entry of the row, so that finite logits of any size stay in range (MAP-1).

    ``allowed`` are the logits with -inf where a key plays no part, and a finite entry in each row.
    """
    peak = allowed.detach().amax(dim=-1, keepdim=True)
    if temperature == 1.0:
        return logits - peak
    # In the order in which neither step can overflow unless the result does.
    return logits / temperature - peak / temperature if temperature > 1.0 else (logits - peak) / temperature


def mask_logits(attn_logits: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Logits with -inf where ``attn_mask`` is False; no gradient passes there (MAP-2)."""
    if attn_mask is None:
        return attn_logits
    check_attn_mask(attn_mask, attn_logits.shape)
    return attn_logits.masked_fill(~attn_mask, -torch.inf)


def soften(attn_probs: Tensor, temperature: float, *, row_sums: str = "one", check: bool = True) -> Tensor:
    """``softmax(logits / T)`` from the probabilities alone: ``A^(1/T) / rowsum`` per head (TEMP-2, TEMP-5..7).

    Meant for supervision: the derivative at a probability of 0 is infinite for T > 1.

    Arguments and errors are those of ``shd_ref.soften``.

    Returns:
        The softened maps, same shape and dtype.
    """
    check_shapes(attn_probs.ndim >= 2, "attn_probs must be (..., L, S)", attn_probs, spec_id="MAP-13")
    check_probs(attn_probs, "attn_probs", check=check, row_sums=row_sums, ndim=None)
    probs = attn_probs.to(compute_dtype(attn_probs))
    softened = soften_probs(probs, check_temperature(temperature), row_sums).to(map_dtype(attn_probs))
    return softened.clone() if softened is attn_probs else softened


def soften_probs(probs: Tensor, temperature: float, row_sums: str = "one") -> Tensor:
    if temperature == 1.0 or probs.numel() == 0:
        return probs
    # Relative to the row's maximum, so that a large 1/T cannot underflow a whole row (TEMP-6).
    peak = probs.amax(dim=-1, keepdim=True)
    powers = (probs / peak.masked_fill(peak == 0, 1.0)) ** (1.0 / temperature)
    sums = powers.sum(dim=-1, keepdim=True)
    softened = powers / sums.masked_fill(sums == 0, 1.0)
    return softened * probs.sum(dim=-1, keepdim=True) if row_sums == "at_most_one" else softened


@without_autocast
def value_outputs(values: Tensor, output_projection: Tensor, *, check: bool = True) -> Tensor:
    """``X_i = V_i W_i``: each head's values after the output projection (MAP-6).

    Arguments and errors are those of ``shd_ref.value_outputs``.

    Returns:
        X ``(B, H_t, S, D)``, float64 or float32.
    """
    check_real(values, "values", check=check, ndim=4)
    check_real(output_projection, "output_projection", check=check, ndim=2)
    num_kv_heads, d_v = values.shape[1], values.shape[3]
    width = num_kv_heads * d_v
    fit = output_projection.shape[0] > 0 and width > 0 and output_projection.shape[0] % width == 0
    rule = "output_projection must have a multiple of H_kv * d_v rows, as values (B, H_kv, S, d_v)"
    check_shapes(fit, rule, output_projection, values, spec_id="MAP-6")
    dtype = compute_dtype(values, output_projection)
    group = output_projection.shape[0] // width  # query heads that share one value head
    projection = output_projection.to(dtype).reshape(num_kv_heads, group, d_v, -1)
    outputs = torch.einsum("bksv,kgvd->bkgsd", values.to(dtype), projection)  # values are never repeated
    return outputs.flatten(1, 2)
