"""Gradients that are known after the forward pass, handed to automatic differentiation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class KlResult(NamedTuple):
    """What a backend returns for one layer; gradients of the weighted sum."""

    value: Tensor | None  # (), None where it was not asked for
    dq: Tensor | None = None  # (B, H_s, L, d)
    dk: Tensor | None = None  # (B, H_kv, S, d)
    dbias: Tensor | None = None  # shaped as the added mask


class AttachGradient(torch.autograd.Function):
    """A value with the gradients that belong to it."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, q: Tensor, k: Tensor, bias: Tensor | None, dq: Tensor, dk: Tensor, db: Tensor | None
    ) -> Tensor:
        """Keep the gradients; they are multiplied in their own wide dtype, so that loss scaling works in float16."""
        ctx.save_for_backward(dq, dk, db)
        ctx.dtypes = q.dtype, k.dtype, None if bias is None else bias.dtype
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients; one's own derivative is refused, not zero."""
        given = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = [None if grad is None else (upstream * grad).to(dtype) for grad, dtype in given]
        return None, *scaled, None, None, None


def attach(result: KlResult, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """The value of one layer, attached to the student's graph.

    Without a value it is ``sum q dq``: not the divergence, but 0 with it, and with the same gradient.
    """
    if result.dq is None:
        assert result.value is not None  # a request wants one or the other
        return result.value
    value = (q.detach().to(result.dq.dtype) * result.dq).sum() if result.value is None else result.value
    attached: Tensor = AttachGradient.apply(value, q, k, bias, result.dq, result.dk, result.dbias)  # type: ignore[no-untyped-call]
    return attached
