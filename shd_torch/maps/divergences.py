"""Divergences of two rows (spec chapters LOSS and GRAD): their values, and their gradients in closed form.

All take rows made safe by ``shd_torch.maps.loss``: P and Q are exactly 0 where a key plays no part and log Q is
finite everywhere. A logarithm of P is taken only where P has mass, so neither a value nor a gradient is ever
``0 * inf``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DIVERGENCES: tuple[str, ...] = ("kl", "reverse_kl", "js", "mse")


def row_divergence(p: Tensor, log_q: Tensor, may_attend: Tensor, divergence: str) -> Tensor:
    """The divergence of each row of P and Q, differentiable in ``log_q`` (LOSS-11, LOSS-12).

    Args:
        p: rows ``(..., S)``, without gradient.
        log_q: the same shape, finite; anything where ``may_attend`` is False.
        may_attend: boolean, the same shape; Q is 0 elsewhere.
        divergence: one of ``DIVERGENCES``.

    Returns:
        ``(...)``; 0 for a row that is zero in both.
    """
    if divergence == "kl":
        return (p * (_log(p) - log_q)).sum(-1)
    q = student_probs(log_q, may_attend)
    if divergence == "mse":
        return (p - q).square().sum(-1)
    log_p = _log(p)
    if divergence == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    log_r = _log_middle(p, log_p, log_q)
    return 0.5 * (p * (log_p - log_r) + q * (log_q - log_r)).sum(-1)


def row_gradient(p: Tensor, log_q: Tensor, may_attend: Tensor, divergence: str) -> Tensor:
    """The gradient of ``row_divergence`` in ``z / T``, of which Q is the softmax (GRAD-1): ``(..., S)``."""
    q = student_probs(log_q, may_attend)
    if divergence == "kl":
        return p.sum(-1, keepdim=True) * q - p
    if divergence == "reverse_kl":
        factor, r = 1.0, log_q - _log(p)
    elif divergence == "js":
        factor, r = 0.5, log_q - _log_middle(p, _log(p), log_q)
    else:
        factor, r = 2.0, q - p
    return factor * q * (r - (q * r).sum(-1, keepdim=True))


def student_probs(log_q: Tensor, may_attend: Tensor) -> Tensor:
    """Q, exactly 0 where the student may not attend."""
    return log_q.exp().masked_fill(~may_attend, 0.0)


def _log(p: Tensor) -> Tensor:
    return p.masked_fill(p == 0, 1.0).log()


def _log_middle(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """``log((P + Q) / 2)`` from the logarithms: Q may be too small for the dtype where P is 0."""
    return torch.where(p == 0, log_q, torch.logaddexp(log_p, log_q)) - math.log(2.0)
