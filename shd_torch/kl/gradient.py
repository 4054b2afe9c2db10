"""Gradients that are known after the forward pass, handed to automatic differentiation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from shd_ref.errors import ShdError

_REMEDY = "shd_loss on the student's logits has derivatives of every order and mode"


class KlResult(NamedTuple):
    """A backend's result for one layer; gradients of the weighted sum."""

    value: Tensor | None  # (), None where it is not wanted
    dq: Tensor | None = None  # (B, H_s, L, d)
    dk: Tensor | None = None  # (B, H_kv, S, d)
    dbias: Tensor | None = None  # shaped as the added mask


class AttachGradient(torch.autograd.Function):
    """A value with the gradients that belong to it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, tie: Tensor | None, *tensors: Tensor | None) -> Tensor:
        """Keep the gradients; they are multiplied in their own wide dtype, so that loss scaling works in float16."""
        (q, k, bias), gradients = tensors[:3], tensors[3:]
        # A compiler knows what a gradient depends on by the inputs of its graph that are kept, and by nothing less.
        roots = [root for root in (q, k, bias) if root is not None] if tie is None else [tie]
        ctx.save_for_backward(*gradients, *roots)
        ctx.dtypes = [None if root is None else root.dtype for root in (q, k, bias)]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients; a second derivative is refused, not zero."""
        dq, dk, db, *roots = ctx.saved_tensors
        scaled = [
            None if grad is None else once((upstream.detach() * grad).to(dtype), upstream, *roots)
            for grad, dtype in zip((dq, dk, db), ctx.dtypes, strict=True)
        ]
        return None, None, *scaled, None, None, None


def once(gradient: Tensor, *roots: Tensor) -> Tensor:
    """A gradient whose own derivative is refused, not zero."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():  # with create_graph=True, or it might be
        gradient = differentiated_once(gradient, list(roots))
    return gradient


@torch.library.custom_op("squeezing_heads::differentiated_once", mutates_args=())
def differentiated_once(gradient: Tensor, roots: list[Tensor]) -> Tensor:
    """A gradient that depends on its roots in a way that was not computed: differentiating it is an error.

    ``torch.autograd.function.once_differentiable`` says so only where the incoming gradient has a graph. Where it is
    a constant, as in a gradient penalty, the second derivative would be 0 without a word.
    """
    return gradient.clone()


@differentiated_once.register_fake
def _(gradient: Tensor, roots: list[Tensor]) -> Tensor:
    return torch.empty_like(gradient)


def _refuse_second(ctx: Any, upstream: Tensor) -> tuple[None, ...]:
    raise ShdError(
        "argument-value",
        "attention_kl must be differentiated once, in reverse mode, as must kd_loss and linear_kd_loss; got a "
        f"derivative of the gradient (a gradient penalty, a Hessian): {_REMEDY}",
    )


differentiated_once.register_autograd(_refuse_second)


def refuse_transforms(*tensors: Tensor | None, name: str = "attention_kl", remedy: str = _REMEDY) -> None:
    """Derivatives other than reverse mode's first are not computed, and must not be taken for 0."""
    if torch._C._are_functorch_transforms_active():
        got = "a call inside a transform of torch.func (grad, vmap, jvp, ...)"
    elif any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):  # type: ignore[no-untyped-call]
        got = "a tensor with a tangent of forward mode"
    else:
        return
    raise ShdError(
        "argument-value",
        f"{name} must be differentiated in reverse mode, by backward or torch.autograd.grad; got {got}: {remedy}",
    )


def attach(result: KlResult, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """The value of one layer, attached to the student's graph.

    Without a value it is ``sum q dq``: not the divergence, but 0 with it, and with the same gradient.
    """
    if result.dq is None:
        assert result.value is not None  # a request wants one or the other
        return result.value
    value = (q.detach().to(result.dq.dtype) * result.dq).sum() if result.value is None else result.value
    # No entry of the roots, but their graph: what lets the backward pass know them without keeping them.
    tie = None
    if not torch.compiler.is_compiling():
        roots = [root for root in (q, k, bias) if root is not None]
        tie = torch.cat([root[..., None].narrow(0, 0, 0).flatten().to(value) for root in roots])
    attached: Tensor = AttachGradient.apply(value, tie, q, k, bias, result.dq, result.dk, result.dbias)  # type: ignore[no-untyped-call]
    return attached
