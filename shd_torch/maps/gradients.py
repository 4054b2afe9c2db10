"""Gradients of the loss in closed form (spec chapter GRAD), for students that autograd cannot reach.

``shd_loss(...).backward()`` gives the same numbers; these need no graph, and work on tensors of inference mode.
"""

from __future__ import annotations

from typing import TypeAlias, Unpack

import torch
from torch import Tensor

from shd_ref.integers import check_number
from shd_torch.checks import check_query_key, check_real, compute_dtype
from shd_torch.maps.loss import Layers, LossKeywords, LossOptions, as_layers, layer_rows, match_layers, row_gradient
from shd_torch.precision import without_autocast

Gradients: TypeAlias = Tensor | list[Tensor]


@torch.no_grad()
def shd_loss_gradient(supervision: Layers, student_logits: Layers, **keywords: Unpack[LossKeywords]) -> Gradients:
    """The gradient of ``shd_loss`` with respect to the student's logits as given (GRAD-1..3, GRAD-9).

    Arguments and errors are those of ``shd_ref.shd_loss_gradient``.

    Returns:
        ``dz``, shaped as the logits: a tensor for a tensor, a list for a list; float64 or float32. Exactly 0 on
        rows that do not count and on masked keys.
    """
    options = LossOptions(**keywords)
    gradients = []
    for rows in layer_rows(supervision, student_logits, options):
        factor = rows.weight * rows.mass / options.temperature  # (B, H_s, L)
        slope = row_gradient(rows.p, rows.log_q, rows.may_attend, options.divergence)
        gradients.append(factor[..., None] * slope)
    return gradients[0] if isinstance(student_logits, Tensor) else gradients


@torch.no_grad()
@without_autocast
def shd_loss_gradient_qk(
    supervision: Layers, queries: Layers, keys: Layers, *, scale: float, **keywords: Unpack[LossKeywords]
) -> tuple[Gradients, Gradients]:
    """The gradients of ``shd_loss`` where the logits are ``scale * q k^T`` (GRAD-4..9).

    Arguments and errors are those of ``shd_ref.shd_loss_gradient_qk``.

    Returns:
        ``dq`` and ``dk``, shaped as queries and keys: tensors for tensors, lists for lists; float64 or float32.
    """
    scale = check_number("scale", scale, "GRAD-8")
    check = keywords.get("check", True)
    teachers, all_queries, all_keys = match_layers(supervision=supervision, queries=queries, keys=keys)
    pairs = [_check_qk(q, k, layer, check) for layer, (q, k) in enumerate(zip(all_queries, all_keys, strict=True))]
    logits = [scale * torch.einsum("bgrld,bgsd->bgrls", q, k).flatten(1, 2) for q, k in pairs]
    gradients = as_layers(shd_loss_gradient(teachers, logits, **keywords))
    dq, dk = [], []
    for (q, k), dz in zip(pairs, gradients, strict=True):
        by_group = scale * dz.to(q.dtype).reshape(*q.shape[:3], *dz.shape[2:])  # (B, H_kv, H_s / H_kv, L, S)
        dq.append(torch.einsum("bgrls,bgsd->bgrld", by_group, k).flatten(1, 2))
        dk.append(torch.einsum("bgrls,bgrld->bgsd", by_group, q))
    return dq[0] if isinstance(queries, Tensor) else dq, dk[0] if isinstance(keys, Tensor) else dk


def _check_qk(queries: Tensor, keys: Tensor, layer: int, check: bool) -> tuple[Tensor, Tensor]:
    """Queries ``(B, H_kv, H_s / H_kv, L, d)`` by the key head that they read, and keys, in one dtype (GRAD-5)."""
    check_real(queries, "queries", check=check, ndim=4, layer=layer)
    check_real(keys, "keys", check=check, ndim=4, layer=layer)
    check_query_key(queries, keys, f"queries and keys of layer {layer}")
    batch, _, rows, width = queries.shape
    dtype = compute_dtype(queries, keys)
    return queries.to(dtype).reshape(batch, keys.shape[1], -1, rows, width), keys.to(dtype)
