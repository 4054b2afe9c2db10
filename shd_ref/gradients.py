"""Gradients of the SHD loss (spec chapter GRAD), in closed form; none reaches the supervision."""

from __future__ import annotations

from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, as_float
from shd_ref.errors import ShdError
from shd_ref.integers import check_number
from shd_ref.loss import LayerRows, Layers, LossKeywords, as_layers, layer_rows, safe_log


def shd_loss_gradient(
    supervision: Layers, student_logits: Layers, **keywords: Unpack[LossKeywords]
) -> Array | list[Array]:
    """The gradient of ``shd_loss`` with respect to the student's logits (GRAD-1..3, LOSS-8).

    For the KL it is ``beta * (rho A_student - A~) / (n T)`` on rows that count; exactly 0 on other rows and on
    masked keys.

    Args:
        supervision: A~ ``(B, H_s, L, S)``, or a list with one array per layer.
        student_logits: same shape(s), before softmax and before the division by T.
        **keywords: those of ``shd_loss``, with its defaults.

    Returns:
        dz ``(B, H_s, L, S)``; a list with one array per layer where the logits were a list.

    Raises:
        ShdError: as ``shd_loss``.

    Source: silent. Decision: D-21.
    """
    maps, logits = as_layers(supervision=supervision, student_logits=student_logits)
    layers = layer_rows(maps, logits, **keywords)
    gradients = [_logit_gradient(rows, keywords.get("divergence", "kl")) for rows in layers]
    return gradients if isinstance(student_logits, list | tuple) else gradients[0]


def shd_loss_gradient_qk(
    supervision: Layers, queries: Layers, keys: Layers, *, scale: float, **keywords: Unpack[LossKeywords]
) -> tuple[Array | list[Array], Array | list[Array]]:
    """The gradients with respect to queries and keys, where ``logits = scale * q k^T`` (GRAD-4..9).

    ``dq = scale * dz k`` and ``dk = scale * dz^T q``, the latter summed over the query heads that share a key head.

    Args:
        supervision: A~ ``(B, H_s, L, S)``, or a list with one array per layer.
        queries: ``(B, H_s, L, d)``, or a list with one array per layer.
        keys: ``(B, H_kv, S, d)`` with H_kv a divisor of H_s, or such a list.
        scale: the factor of the logits, usually ``1 / sqrt(d)``.
        **keywords: those of ``shd_loss``, with its defaults; masked keys are given by ``attn_mask``.

    Returns:
        ``(dq, dk)``, shaped as queries and keys; lists where the queries were a list.

    Raises:
        ShdError: as ``shd_loss``; ``argument-shape`` (GRAD-5), ``argument-value`` (GRAD-8).

    Source: silent. Decision: D-21.
    """
    scale = check_number("scale", scale, "GRAD-8")
    maps, given_q, given_k = as_layers(supervision=supervision, queries=queries, keys=keys)
    pairs = [_check_qk(q, k, layer) for layer, (q, k) in enumerate(zip(given_q, given_k, strict=True))]
    # Every query head beside the key head that it reads: h // (H_s / H_kv).
    read = [np.repeat(k, q.shape[1] // k.shape[1], axis=1) for q, k in pairs]  # (B, H_s, S, d)
    logits: list[ArrayLike] = [scale * (q @ k.swapaxes(-1, -2)) for (q, _), k in zip(pairs, read, strict=True)]
    rows = layer_rows(maps, logits, **keywords)
    dz = [_logit_gradient(layer, keywords.get("divergence", "kl")) for layer in rows]
    dq = [scale * (g @ k) for g, k in zip(dz, read, strict=True)]
    dk = []
    for g, (q, k) in zip(dz, pairs, strict=True):
        batch, num_kv_heads, num_keys, width = k.shape
        by_query_head = scale * (g.swapaxes(-1, -2) @ q)  # (B, H_s, S, d)
        dk.append(by_query_head.reshape(batch, num_kv_heads, -1, num_keys, width).sum(axis=2))
    return (dq, dk) if isinstance(queries, list | tuple) else (dq[0], dk[0])


def _logit_gradient(rows: LayerRows, divergence: str) -> Array:
    """dz of one layer (GRAD-1): through the softmax's Jacobian, ``Q_j (r_j - sum_k Q_k r_k)``."""
    p, q = rows.p, rows.q
    weight = (rows.weight * rows.mass / rows.temperature)[..., None]
    if divergence == "kl":
        through: Array = weight * (p.sum(axis=-1, keepdims=True) * q - p)
        return through
    if divergence == "reverse_kl":
        slope = rows.log_q - safe_log(p)
    elif divergence == "js":
        slope = (rows.log_q - safe_log((p + q) / 2)) / 2
    else:
        slope = 2 * (q - p)
    gradient: Array = weight * q * (slope - (q * slope).sum(axis=-1, keepdims=True))
    return gradient


def _check_qk(queries: ArrayLike, keys: ArrayLike, layer: int) -> tuple[Array, Array]:
    q = as_float(queries, "queries", ndim=4, layer=layer)
    k = as_float(keys, "keys", ndim=4, layer=layer)
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or not k.shape[1] or q.shape[1] % k.shape[1]:
        fit = f"B={q.shape[0]}, d={q.shape[3]} and H_kv a divisor of {q.shape[1]} in layer {layer}"
        raise ShdError("argument-shape", f"keys must be (B, H_kv, S, d) with {fit}; got {k.shape}", "GRAD-5")
    return q, k
