"""The SHD loss (spec chapter LOSS): ``beta * sum_layers sum_heads mean_rows KL(A~ || A_student)``, natural logarithm.

The teacher's entropy is included, so that it is zero exactly where the maps are equal. Then its gradients (chapter
GRAD), in closed form; none reaches the supervision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, Mask, as_float, check_temperature
from shd_ref.errors import ShdError
from shd_ref.integers import check_number, check_option
from shd_ref.support import check_layer, check_support, intersect

REDUCTIONS: tuple[str, ...] = ("sum", "mean")
DIVERGENCES: tuple[str, ...] = ("kl", "reverse_kl", "js", "mse")
SUPPORTS: tuple[str, ...] = ("error", "intersect")

Layers: TypeAlias = ArrayLike | Sequence[ArrayLike]


class LossKeywords(TypedDict, total=False):
    """The keywords of ``shd_loss``, which its gradients share."""

    beta: float
    loss_mask: ArrayLike | None
    attn_mask: ArrayLike | None
    temperature: float
    reduction: str
    divergence: str
    support: str
    row_sums: str


@dataclass(frozen=True)
class LayerRows:
    """The terms of one layer's loss and gradient; rows that do not count are zero in P, rho and w."""

    p: Array  # P (B, H_s, L, S), the supervision as distributions (LOSS-10)
    mass: Array  # rho (B, H_s, L)
    log_q: Array  # log of the student's map, 0 where it may not attend (B, H_s, L, S)
    may_attend: Mask  # where it may (B, H_s, L, S)
    weight: Array  # beta / n on rows that count, and over the number of maps with reduction="mean" (B, H_s, L)
    temperature: float  # T

    @property
    def q(self) -> Array:
        """The student's map; exactly 0 where it may not attend."""
        return np.where(self.may_attend, np.exp(self.log_q), 0.0)


def shd_loss(
    supervision: Layers,
    student_logits: Layers,
    *,
    beta: float = 1.0,
    loss_mask: ArrayLike | None = None,
    attn_mask: ArrayLike | None = None,
    temperature: float = 1.0,
    reduction: str = "sum",
    divergence: str = "kl",
    support: str = "error",
    row_sums: str = "one",
) -> float:
    """``beta * KL(supervision || softmax(student_logits / T))``, teacher first (LOSS-1..18).

    Per map: the sum over keys, then the mean over the rows that count in the whole batch. A row counts
    where ``loss_mask`` is True and the supervision has mass. A map with no such row contributes exactly 0.

    Args:
        supervision: A~ ``(B, H_s, L, S)``, or a list with one array per layer; already at this temperature.
        student_logits: before softmax, same shape(s); -inf marks a masked key.
        beta: weight of the term, at least 0.
        loss_mask: boolean ``(B, L)``, True = the row counts; apart from the attention mask.
        attn_mask: boolean, broadcastable to ``(B, H_s, L, S)``, True = may attend.
        temperature: T_a of both maps; the supervision is softened before mixing, the student's map here.
        reduction: ``"sum"`` over layers and heads (the source), or ``"mean"`` over both.
        divergence: ``"kl"`` (the source), ``"reverse_kl"``, ``"js"`` (Jensen-Shannon) or ``"mse"`` (squared
            differences, summed over keys).
        support: ``"error"`` where the teacher has mass that the student may not attend, or ``"intersect"``: that
            mass is dropped and the row scaled back, see ``intersect_support``.
        row_sums: ``"one"``, or ``"at_most_one"`` for maps with attention sinks: a row is compared as a
            distribution over its keys and weighs with its mass.

    Returns:
        The loss as a float, in nats times beta (a pure number for ``mse``).

    Raises:
        ShdError: ``support-mismatch`` (the teacher has mass where the student may not attend: LOSS-6; the reverse
            KL also where it has none and the student may: LOSS-13), ``argument-shape``, ``argument-value``,
            ``argument-dtype``, ``not-finite``, ``not-a-distribution``.

    Source: Eq. 11. Deviations: D-13..17.
    """
    maps, logits = as_layers(supervision=supervision, student_logits=student_logits)
    options = temperature, reduction, divergence, support, row_sums
    layers = layer_rows(maps, logits, beta, loss_mask, attn_mask, *options)
    return float(sum((rows.weight * rows.mass * row_divergence(rows, divergence)).sum() for rows in layers))


def row_divergence(rows: LayerRows, divergence: str) -> Array:
    """The divergence of P and Q for every row ``(B, H_s, L)`` (LOSS-11); 0 log 0 = 0 (LOSS-12)."""
    p, q, log_p = rows.p, rows.q, safe_log(rows.p)
    if divergence == "kl":
        terms = p * (log_p - rows.log_q)
    elif divergence == "reverse_kl":
        terms = q * (rows.log_q - log_p)
    elif divergence == "js":
        log_r = safe_log((p + q) / 2)
        terms = (p * (log_p - log_r) + q * (rows.log_q - log_r)) / 2
    else:
        terms = (p - q) ** 2
    summed: Array = terms.sum(axis=-1)
    return summed


def layer_rows(
    supervision: list[ArrayLike],
    student_logits: list[ArrayLike],
    beta: float = 1.0,
    loss_mask: ArrayLike | None = None,
    attn_mask: ArrayLike | None = None,
    temperature: float = 1.0,
    reduction: str = "sum",
    divergence: str = "kl",
    support: str = "error",
    row_sums: str = "one",
) -> list[LayerRows]:
    """Check every argument of the loss, and prepare its terms layer by layer."""
    check_option("reduction", reduction, REDUCTIONS, "LOSS-5")
    check_option("divergence", divergence, DIVERGENCES, "LOSS-11")
    check_option("support", support, SUPPORTS, "LOSS-14")
    beta = check_number("beta", beta, "LOSS-2", least=0)
    temperature = check_temperature(temperature)
    num_maps = sum(np.shape(logits)[1] for logits in student_logits if np.ndim(logits) == 4)
    scale = beta / num_maps if reduction == "mean" and num_maps else beta
    layers = []
    for layer, (source, logits) in enumerate(zip(supervision, student_logits, strict=True)):
        teacher, masked_logits, counted = check_layer(
            source, logits, loss_mask=loss_mask, attn_mask=attn_mask, row_sums=row_sums, layer=layer
        )
        may_attend = ~np.isneginf(masked_logits)
        if support == "intersect":
            teacher = intersect(teacher, may_attend).supervision
        counted &= teacher.sum(axis=-1) > 0.0  # after the intersection, which may empty a row (LOSS-14)
        check_support(teacher, may_attend, counted, divergence=divergence, layer=layer)
        teacher = np.where(counted[..., None], teacher, 0.0)
        mass = counted.astype(np.float64) if row_sums == "one" else teacher.sum(axis=-1)
        num_rows = np.maximum(counted.sum(axis=(0, 2)), 1)  # n, per map (H_s,)
        layers.append(
            LayerRows(
                p=teacher / np.where(mass == 0.0, 1.0, mass)[..., None],
                mass=mass,
                log_q=log_softmax(masked_logits, temperature),
                may_attend=may_attend,
                weight=np.where(counted, scale / num_rows[None, :, None], 0.0),
                temperature=temperature,
            )
        )
    return layers


def log_softmax(logits: Array, temperature: float) -> Array:
    """Log-probabilities from logits, finite however small the probability (LOSS-12); 0 where a logit is -inf."""
    is_masked = np.isneginf(logits)
    peak = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    with np.errstate(over="ignore"):  # a small temperature
        # -inf less -inf is NaN: a row without keys has 0 for its peak.
        shifted = (logits - np.where(np.isneginf(peak), 0.0, peak)) / temperature
    sums = np.exp(shifted).sum(axis=-1, keepdims=True)
    # A difference beyond the largest number stays the largest number.
    shifted = np.where(is_masked, 0.0, np.maximum(shifted, -np.finfo(np.float64).max))
    return shifted - np.where(is_masked, 0.0, np.log(np.where(sums == 0.0, 1.0, sums)))


def safe_log(probs: Array) -> Array:
    """The logarithm, and 0 where the probability is 0: it is always multiplied by a 0 there (LOSS-12)."""
    logs: Array = np.log(np.where(probs > 0.0, probs, 1.0))
    return logs


def as_layers(**arrays: Layers) -> list[list[ArrayLike]]:
    """Every argument as a list of layers: one array is one layer, a list holds one array per layer (LOSS-3)."""
    counts = [len(value) if isinstance(value, list | tuple) else None for value in arrays.values()]
    if len(set(counts)) > 1 or counts[0] == 0:
        got = ", ".join("one array" if count is None else f"a list of {count}" for count in counts)
        rule = f"{', '.join(arrays)} must be one array each, or equally long lists with one array per layer"
        raise ShdError("argument-shape", f"{rule}; got {got}", "LOSS-3")
    return [[*value] if isinstance(value, list | tuple) else [np.asarray(value)] for value in arrays.values()]


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
    # The key head that each query head reads: h // (H_s / H_kv).
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
