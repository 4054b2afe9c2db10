"""Gradients of the loss on logits in closed form (KD-22 to KD-25): what automatic differentiation must give."""

from __future__ import annotations

from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array
from shd_ref.kd.loss import KdKeywords, KdRows, Targets, check_head, head_logits, kd_rows, log_mixture


def kd_loss_gradient(targets: Targets, student_logits: ArrayLike, **keywords: Unpack[KdKeywords]) -> Array:
    """The gradient of ``kd_loss`` with respect to the student's logits, before the division by T.

    Args:
        targets: those of ``kd_loss``.
        student_logits: those of ``kd_loss``.
        **keywords: those of ``kd_loss``, with its defaults.

    Returns:
        dz, shaped as the student's logits; exactly 0 on rows that do not count and on classes that are cut.

    Raises:
        ShdError: as ``kd_loss``.
    """
    rows = kd_rows(targets, student_logits, **keywords)
    gradient = np.zeros((rows.counted.size, rows.shape[-1]))
    gradient[rows.counted, : rows.log_q.shape[-1]] = rows.factor / rows.temperature * _row_gradient(rows)
    return gradient.reshape(rows.shape)


def linear_kd_loss_gradient(
    targets: Targets,
    hidden: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    **keywords: Unpack[KdKeywords],
) -> tuple[Array, Array, Array | None]:
    """The gradients of ``linear_kd_loss`` (KD-25).

    Args:
        targets: those of ``linear_kd_loss``.
        hidden: the input of the output layer, as there.
        weight: the output layer's, as there.
        bias: the output layer's, as there.
        **keywords: those of ``kd_loss``, with its defaults.

    Returns:
        ``(dhidden, dweight, dbias)``, shaped as their arguments; dbias is None without a bias.

    Raises:
        ShdError: as ``kd_loss``.
    """
    h, w, b = check_head(hidden, weight, bias)
    dz = kd_loss_gradient(targets, head_logits(h, w, b), **keywords)
    flat = dz.reshape(-1, dz.shape[-1])
    return dz @ w, flat.T @ h.reshape(-1, h.shape[-1]), None if b is None else flat.sum(axis=0)


def _row_gradient(rows: KdRows) -> Array:
    """dz times T of every counted row ``(R, V)`` (KD-22, KD-23)."""
    log_q = rows.class_log_q
    q = np.exp(log_q)
    if rows.log_p is None:
        assert rows.ids is not None
        assert rows.weights is not None
        whole: Array = rows.weights.sum(axis=-1, keepdims=True) * np.exp(rows.log_q)
        np.subtract.at(whole, (np.arange(len(whole))[:, None], rows.ids), rows.weights)
        return whole
    if rows.divergence in ("kl", "cross_entropy"):
        p = np.exp(rows.log_p)
        by_class = p.sum(axis=-1, keepdims=True) * q - p
    else:
        reverse = rows.divergence == "reverse_kl"
        slope = log_q - rows.log_p if reverse else (1 - rows.mixing) * (log_q - log_mixture(rows, log_q))
        by_class = q * (slope - (q * slope).sum(axis=-1, keepdims=True))
    return by_class if rows.ids is None else _spread(rows, by_class)


def _spread(rows: KdRows, by_class: Array) -> Array:
    """From classes to the vocabulary: the tail's share goes to each of its classes as the student has it."""
    assert rows.ids is not None
    k = rows.ids.shape[-1]
    spread = np.zeros_like(rows.log_q)
    if by_class.shape[-1] > k:
        spread = np.exp(rows.log_q - rows.log_tail[:, None]) * by_class[:, k:]
    np.put_along_axis(spread, rows.ids, by_class[:, :k], -1)
    return spread
