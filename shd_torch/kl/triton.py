"""The backend of Triton kernels: both maps rebuilt a tile at a time on the device, and subtracted before rounding.

dk is summed by one pass with atomic additions, whose order differs from run to run; after
``torch.use_deterministic_algorithms(True)`` by a second pass, in one order.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

import shd_torch.kernels as kernels
from shd_torch.kernels.divergence import CODEC
from shd_torch.kl.gradient import KlResult
from shd_torch.kl.request import KlRequest
from shd_torch.supervision.coded import Coded
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.mask import AttentionRule


def unsupported_reason(request: KlRequest) -> str | None:
    """Why the kernels or the device cannot serve; None where they can. No device sync."""
    supervision = request.supervision
    if isinstance(supervision, Factored):
        heads: tuple[Tensor, ...] = (request.queries, request.keys, supervision.queries, supervision.keys)
    elif isinstance(supervision, Coded):
        heads = request.queries, request.keys
    else:
        return "it reads a teacher's queries and keys, or a cache's codes, and no maps"
    if isinstance(supervision, Coded) and supervision.key_lengths is not None and supervision.support == "causal":
        return "it decodes triangles of square maps; got rows and keys of two sequences"
    if isinstance(supervision, Coded) and supervision.codec != CODEC:
        return f"it decodes the codec {CODEC}; got {supervision.codec}"
    reason = kernels.unsupported_reason(*heads)
    if reason is not None:
        return reason
    for queries, keys in zip(heads[::2], heads[1::2], strict=True):
        if queries.dtype != keys.dtype:
            return f"queries and keys must have one dtype; got {queries.dtype} and {keys.dtype}"
    if request.support == "intersect":
        return "support='intersect' needs the maps"
    return _logits_reason(request) or _mask_reason(request)


@torch.no_grad()
def run(request: KlRequest) -> KlResult:
    supervision = cast(Coded | Factored, request.supervision)  # any other was refused
    rows = kernels.kl_rows(
        request.queries,
        request.keys,
        supervision,
        request.weights.float(),
        request.rule,
        temperature=request.temperature,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        want_value=request.wants_value,
    )
    value = None if rows.kl is None else (request.weights * rows.kl).sum()
    if value is not None and supervision.row_sums == "one":
        # The kernels count what a row lacks of one as the sinks' mass, and here it is a rounding (LOSS-10).
        value = value + (request.weights * torch.xlogy(request.mass, request.mass)).sum()
    return KlResult(value, rows.dq, rows.dk) if request.wants_gradient else KlResult(value)


def _logits_reason(request: KlRequest) -> str | None:
    supervision = request.supervision
    if request.wants_bias_gradient:
        return "the gradient of an added mask is a map"
    rules = [("student", request.rule)]
    if isinstance(supervision, Factored):
        rules.append(("teacher", supervision.rule))
    for side, rule in rules:
        if rule.softcap is not None:
            return f"its logits are products alone, and the {side} has a soft cap"
        if rule.is_biased:
            return f"its logits are products alone, and the {side} has an added mask"
    return None


def _mask_reason(request: KlRequest) -> str | None:
    """Why causality, a window and one mask of keys do not describe who may attend."""
    rule, supervision = request.rule, request.supervision
    mask = rule.attn_mask
    if mask is not None and tuple(mask.shape[1:3]) != (1, 1):
        return (
            "it takes causality, a window and a mask of keys (B, 1, 1, S); got an attn_mask of heads or rows "
            f"{tuple(mask.shape)}"
        )
    if isinstance(supervision, Factored) and not _is_same(rule, supervision.rule):
        return (
            "student and teacher must have one mask: is_causal, window, and attn_mask as one tensor on the student's "
            "device, which is known without looking at it"
        )
    return None


def _is_same(rule: AttentionRule, other: AttentionRule) -> bool:
    """Whether two descriptions allow the same; tensors are the same where they are the same memory."""
    if (rule.is_causal, rule.window) != (other.is_causal, other.window):
        return False
    a, b = rule.attn_mask, other.attn_mask
    if a is None or b is None:
        return a is b
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())
