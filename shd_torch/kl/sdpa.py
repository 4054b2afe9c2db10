"""The backend of fused attention: PyTorch's public calls, memory linear in the length, no map of either side.

With ``Y = A_student k`` and ``U = A~ k``, both products of a map with the student's keys, the gradients are

    dq = s w (rho Y - U)        dk = s (A_student^T (w rho q) - A~^T (w q))

and the transposed products are what fused attention gives to its values as gradient. The keys are shifted by their
mean first: ``rho Y - U`` stays the same, since both sides have one mass, and rounding falls with the keys' size.
"""

from __future__ import annotations

import torch

from shd_torch.fused import MapFactors, attend_both_ways, expand_heads, sum_heads
from shd_torch.kl.dense import weighted_kl
from shd_torch.kl.gradient import KlResult
from shd_torch.kl.request import KlRequest


def unsupported_reason(request: KlRequest) -> str | None:
    """Why products alone do not suffice; None where they do."""
    if request.softcap is not None:
        return "a soft cap bends the logits: their gradient needs the map"
    if request.wants_bias_gradient:
        return "the gradient of an added mask is a map"
    if request.support == "intersect":
        return "support='intersect' needs the maps"
    return None


def default_product_dtype(request: KlRequest) -> torch.dtype:
    """Of the fused calls: float16 for a half-precision student on an accelerator, else what sums are made in.

    float16 carries eight times bfloat16's precision, and with weights of one its range suffices. On the processor
    its products are slower than float32's.
    """
    if request.queries.dtype.itemsize == 2 and request.queries.device.type != "cpu":
        return torch.float16
    return request.dtype


@torch.no_grad()
def run(request: KlRequest) -> KlResult:
    """Value and gradients of one layer from products with the student's keys and queries."""
    value = weighted_kl(request) if request.wants_value else None
    if not request.wants_gradient:
        return KlResult(value)
    dtype, heads = request.product_dtype or default_product_dtype(request), request.shape[1]
    wide = request.dtype
    keys = request.keys.to(wide)
    keys = expand_heads((keys - keys.mean(2, keepdim=True)).to(dtype), heads)
    queries = request.queries.to(dtype)
    # Weights of one inside: beta over the number of rows is too small for half precision, and comes in afterwards.
    counted = (request.weights != 0)[..., None]
    number = request.weights.amax((0, 2))[:, None, None]  # (H_s, 1, 1), every counted row of a head weighs the same
    taught = request.queries.to(wide) * counted
    mass = request.mass[..., None]

    maps = MapFactors(queries, keys, request.mask, request.scale, request.temperature)
    own, own_transposed = attend_both_ways(maps, keys, (mass * taught).to(dtype))
    merged, transposed = request.supervision.products(keys, taught, temperature=request.temperature)
    factor = request.scale / request.temperature
    dq = factor * number * counted * (mass * own.to(wide) - merged.to(wide))
    dk = factor * number * (own_transposed.to(wide) - transposed.to(wide))
    return KlResult(value, dq, sum_heads(dk, request.keys.shape[1]))
