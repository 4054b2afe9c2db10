"""The backend of fused attention: PyTorch's public calls, memory linear in the length, no map of either side.

With ``Y = A_student k`` and ``U = A~ k``, both products of a map with the student's keys, the gradients are

    dq = s w (rho Y - U)        dk = s (A_student^T (w rho q) - A~^T (w q))

and the transposed products are what fused attention gives to its values as gradient. The keys are shifted by their
mean first: ``rho Y - U`` stays the same, since both sides have one mass, and rounding falls with the keys' size.

Half-precision products round each side before the subtraction. That does not show where rows look mostly at one key
(``benchmarks/attention_kl_accuracy.py``): values are shifted by that key, and columns made to sum to what they must.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shd_torch.kl.dense import weighted_kl
from shd_torch.kl.gradient import KlResult
from shd_torch.kl.request import KlRequest
from shd_torch.supervision.factored import MapFactors, attend_both_ways, center_keys
from shd_torch.supervision.mask import expand_heads, sum_heads

_SAMPLE_ROWS = 16


def unsupported_reason(request: KlRequest) -> str | None:
    """Why products alone do not suffice; None where they do."""
    if request.rule.softcap is not None:
        return "a soft cap bends the logits: their gradient needs the map"
    if request.wants_bias_gradient:
        return "the gradient of an added mask is a map"
    if request.support == "intersect":
        return "support='intersect' needs the maps"
    return None


@torch.no_grad()
def run(request: KlRequest) -> KlResult:
    value = weighted_kl(request) if request.wants_value else None
    if not request.wants_gradient:
        return KlResult(value)
    dtype, wide, heads = request.product_dtype, request.dtype, request.shape[1]
    if dtype is None:
        # float16 has eight times bfloat16's precision, and range enough with weights of one and units that fit
        # (``attend_both_ways``); on the processor its products are slower than float32's.
        is_half = request.queries.dtype.itemsize == 2 and request.queries.device.type != "cpu"
        dtype = torch.float16 if is_half else wide
    keys = expand_heads(request.keys.to(wide), heads)
    values = (keys - _usual_key(request, keys, dtype)).to(dtype)
    queries = request.queries.to(dtype)
    # Weights of one inside: beta over the number of rows is too small for half precision, and comes in afterwards.
    counted = (request.weights != 0)[..., None]
    number = request.weights.amax((0, 2))[:, None, None]  # (H_s, 1, 1), every counted row of a head weighs the same
    counted_queries = request.queries.to(wide) * counted
    mass = request.mass[..., None]

    centred = expand_heads(center_keys(request.keys, dtype), heads)
    maps = MapFactors(queries, centred, request.rule, request.temperature)
    student, own_transposed = attend_both_ways(maps, values, mass * counted_queries)
    merged, transposed = request.supervision.products(values, counted_queries, temperature=request.temperature)
    factor = request.scale / request.temperature
    dq = factor * number * counted * (mass * student.to(wide) - merged.to(wide))
    dk = factor * number * _settle_columns(own_transposed.to(wide), transposed.to(wide))
    return KlResult(value, dq, sum_heads(dk, request.keys.shape[1]))


def _usual_key(request: KlRequest, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The shift of the values ``(B, H_s, 1, d)``: the mean key; for half precision the key that rows see.

    Where rows look at one key with most of their weight, the products then round only the rest.
    """
    mean = keys.mean(2, keepdim=True)
    if dtype.itemsize > 2:
        return mean
    middle = request.shape[2] // 2
    rows = slice(max(0, middle - _SAMPLE_ROWS // 2), middle + _SAMPLE_ROWS // 2)
    probs, _ = request.log_probs(slice(None), rows, slice(0, request.shape[3]))
    counted = (request.weights[:, :, rows, None] != 0).to(keys.dtype)
    number = counted.sum(2, keepdim=True)
    average = (probs.exp() * counted).sum(2, keepdim=True) @ keys / number.clamp(min=1.0)
    return torch.where(number == 0, mean, average)


def _settle_columns(student: Tensor, merged: Tensor) -> Tensor:
    """``student - merged`` ``(B, H_s, S, d)``, made to sum to zero over keys as it does without rounding.

    Both sides have one mass in every row. What they miss goes to the keys in the ratio of their roundings' variances:
    nearly all of it to a key that most rows look at, whose two large sums leave a small difference.
    """
    difference = student - merged
    variance = student.square() + merged.square()
    share = variance / variance.sum(2, keepdim=True).clamp(min=torch.finfo(student.dtype).tiny)
    return difference - share * difference.sum(2, keepdim=True)
