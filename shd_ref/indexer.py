"""The loss of a sparse-attention indexer (spec chapter IDX): a small scorer learns all heads' attention as one.

The target is the merged map of one student head with the mixing 1/H; a scorer of a few heads is its student.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, Mask, as_float, as_mask
from shd_ref.errors import ShdError
from shd_ref.integers import check_integer, check_number, check_option
from shd_ref.loss import Layers, as_layers, log_softmax, safe_log

RESTRICTIONS: tuple[str, ...] = ("renormalised", "mask_first", "unnormalised", "student_all")
INDEXER_REDUCTIONS: tuple[str, ...] = ("sum", "rows", "samples")


class TargetKeywords(TypedDict, total=False):
    """The keywords of ``indexer_target``, which loss and gradient share."""

    teacher_scale: Required[float]
    groups: int
    block_size: int
    attn_mask: ArrayLike | None
    segments: ArrayLike | None
    outside: Layers | None


class IndexerKeywords(TargetKeywords, total=False):
    """The keywords of ``indexer_loss``, which its gradient shares."""

    weights: ArrayLike | None
    relu: bool
    top_k: int | None
    restriction: str
    reduction: str
    loss_mask: ArrayLike | None


@dataclass(frozen=True)
class Teacher:
    """The teacher's layers that one indexer serves, checked, and who may attend to whom in all of them."""

    logits: list[Array]  # (B, H, L, S), -inf where a row may not attend
    outside: list[Array]  # (B, H, L)
    allowed: Mask  # (B, 1, L, S)
    groups: int
    block_size: int


@dataclass(frozen=True)
class IndexerRows:
    """What the loss and its gradient are made of; rows that do not count are zero in p and weight."""

    p: Array  # (B, G, L, C)
    log_q: Array  # 0 where the scorer's distribution has no support (B, G, L, C)
    support: Mask  # of the scorer's distribution (B, G, L, C)
    weight: Array  # (B, G, L)
    products: Array  # q_h . k, before the activation (B, H_i, L, C)
    queries: Array
    keys: Array
    weights: Array  # (B, H_i, L)
    scale: float
    relu: bool


def indexer_target(
    teacher_queries: Layers,
    teacher_keys: Layers,
    *,
    teacher_scale: float,
    groups: int = 1,
    block_size: int = 1,
    attn_mask: ArrayLike | None = None,
    segments: ArrayLike | None = None,
    outside: Layers | None = None,
) -> Array:
    """The attention of all heads as one distribution per group, row and block of keys (IDX-5..9).

    Args:
        teacher_queries: ``(B, H, L, d)`` as the teacher multiplies them, or a list with one array per layer that the
            indexer serves.
        teacher_keys: ``(B, H_kv, S, d)``, or such a list.
        teacher_scale: factor of the teacher's products, usually ``1 / sqrt(d)``.
        groups: G, blocks of heads with a target each; 1 is the mean of all heads.
        block_size: keys of a block.
        attn_mask: boolean, broadcastable to ``(B, 1, L, S)``, True = may attend.
        segments: integers ``(B, L)``, the packed sample of each position.
        outside: ``(B, H, L)``, log-sum-exp of logits in each head's denominator that the indexer does not score (a
            window, a sink), or a list with one array per layer.

    Returns:
        p ``(B, G, L, C)`` with ``C = ceil(S / block_size)``; rows sum to one, or are zero where no key is allowed.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.

    Source: arXiv 2512.02556, Eq. 3.
    """
    numbers = teacher_scale, groups, block_size
    return mean_target(read_teacher(teacher_queries, teacher_keys, *numbers, attn_mask, segments, outside))


def indexer_loss(
    queries: ArrayLike,
    keys: ArrayLike,
    teacher_queries: Layers,
    teacher_keys: Layers,
    *,
    scale: float,
    weights: ArrayLike | None = None,
    relu: bool = True,
    top_k: int | None = None,
    restriction: str = "renormalised",
    reduction: str = "sum",
    loss_mask: ArrayLike | None = None,
    **keywords: Unpack[TargetKeywords],
) -> float:
    """``KL(target || softmax(scores))``, dense or on the scorer's own top-k (IDX-1..16).

    Args:
        queries: the scorer's, ``(B, H_i, L, d_i)``, rotated as they are multiplied.
        keys: ``(B, H_k, C, d_i)``, one for each key or block of keys; H_k divides H_i.
        teacher_queries: as in ``indexer_target``.
        teacher_keys: as in ``indexer_target``.
        scale: factor of the scores.
        weights: of the scorer's heads, ``(B, H_i, L)``; None for ones.
        relu: whether negative products count as 0.
        top_k: blocks that each row selects; None for the dense loss.
        restriction: what the selection does, of ``RESTRICTIONS``.
        reduction: ``"sum"``, or the mean over ``"rows"`` or ``"samples"`` that count.
        loss_mask: boolean ``(B, L)``, True = the row counts.
        **keywords: those of ``indexer_target``.

    Returns:
        The loss in nats.

    Raises:
        ShdError: as ``indexer_target``.

    Source: arXiv 2512.02556, Eq. 1, 3, 4.
    """
    options = weights, relu, top_k, restriction, reduction, loss_mask
    rows = indexer_rows(queries, keys, teacher_queries, teacher_keys, scale, *options, **keywords)
    return float((rows.weight[..., None] * rows.p * (safe_log(rows.p) - rows.log_q)).sum())


def indexer_loss_gradient(
    queries: ArrayLike,
    keys: ArrayLike,
    teacher_queries: Layers,
    teacher_keys: Layers,
    *,
    scale: float,
    **keywords: Unpack[IndexerKeywords],
) -> tuple[Array, Array, Array]:
    """The gradient of ``indexer_loss``, of the same arguments, with respect to the scorer's side (IDX-14).

    Returns:
        ``(dq, dk, dw)``, shaped as queries, keys and weights; dw also where the weights were not given.

    Raises:
        ShdError: as ``indexer_loss``.

    Source: silent.
    """
    rows = indexer_rows(queries, keys, teacher_queries, teacher_keys, scale, **keywords)
    q = np.where(rows.support, np.exp(rows.log_q), 0.0)
    slope = rows.weight[..., None] * (rows.p.sum(axis=-1, keepdims=True) * q - rows.p)  # of the scores
    heads, num_key_heads = rows.queries.shape[1], rows.keys.shape[1]
    slope = rows.scale * np.repeat(slope, heads // slope.shape[1], axis=1)  # (B, H_i, L, C)
    read = np.repeat(rows.keys, heads // num_key_heads, axis=1)
    dw: Array = (slope * activate(rows.products, rows.relu)).sum(axis=-1)
    through = slope * rows.weights[..., None] * ((rows.products > 0) | (not rows.relu))
    dq: Array = through @ read
    by_head = through.swapaxes(-1, -2) @ rows.queries
    dk = by_head.reshape(by_head.shape[0], num_key_heads, -1, *by_head.shape[2:]).sum(axis=2)
    return dq, dk, dw


def mean_target(teacher: Teacher, selected: Mask | None = None) -> Array:
    """p ``(B, G, L, C)``; each head's softmax is restricted to the selected blocks, if given."""
    targets = []
    for logits, outside in zip(teacher.logits, teacher.outside, strict=True):
        batch, heads, rows, keys = logits.shape
        if selected is not None:
            by_key = np.repeat(selected, teacher.block_size, axis=3)[..., :keys]
            logits = np.where(np.repeat(by_key, heads // teacher.groups, axis=1), logits, -np.inf)
        total = _log_sum(logits)  # of each head's keys (B, H, L)
        probs = np.where(np.isneginf(logits), 0.0, np.exp(log_softmax(logits, 1.0)))
        # The logarithm of each head's mass on its keys (IDX-7); its size is divided out, however small.
        mass = np.where(np.isneginf(total), -np.inf, -np.logaddexp(0.0, outside - _zeroed(total)))
        share = mass.reshape(batch, teacher.groups, -1, rows)
        share = np.exp(share - _zeroed(share.max(axis=2, keepdims=True)))
        share /= np.where(share.sum(axis=2, keepdims=True) == 0.0, 1.0, share.sum(axis=2, keepdims=True))
        mixed = (share[..., None] * probs.reshape(batch, teacher.groups, -1, rows, keys)).sum(axis=2)
        targets.append(block_sums(mixed, teacher.block_size))
    mean: Array = sum(targets[1:], targets[0]) / len(targets)
    return mean


def indexer_rows(
    queries: ArrayLike,
    keys: ArrayLike,
    teacher_queries: Layers,
    teacher_keys: Layers,
    scale: float,
    weights: ArrayLike | None = None,
    relu: bool = True,
    top_k: int | None = None,
    restriction: str = "renormalised",
    reduction: str = "sum",
    loss_mask: ArrayLike | None = None,
    **keywords: Unpack[TargetKeywords],
) -> IndexerRows:
    """Every check of the loss, and what its terms are made of."""
    check_option("restriction", restriction, RESTRICTIONS, "IDX-11")
    check_option("reduction", reduction, INDEXER_REDUCTIONS, "IDX-13")
    if not isinstance(relu, bool | np.bool_):
        raise ShdError("argument-value", f"relu must be True or False; got {relu!r}", "IDX-2")
    scale = check_number("scale", scale, "IDX-1")
    k_top = None if top_k is None else check_integer("top_k", top_k, 1, None, "IDX-10")
    teacher = read_teacher(teacher_queries, teacher_keys, **keywords)
    q, k = as_float(queries, "queries", ndim=4), as_float(keys, "keys", ndim=4)
    batch, heads, num_rows, _ = q.shape
    num_blocks = -(-teacher.allowed.shape[3] // teacher.block_size)
    fits = (batch, num_rows) == (teacher.allowed.shape[0], teacher.allowed.shape[2]) and k.shape[0] == batch
    fits = fits and k.shape[1:] == (k.shape[1], num_blocks, q.shape[3]) and k.shape[1] > 0
    if not fits or heads % k.shape[1] or heads % teacher.groups:
        rule = f"queries (B, H_i, L, d_i) and keys (B, H_k, {num_blocks}, d_i) must fit the teacher's B and L, and "
        rule += f"H_k and groups={teacher.groups} divide H_i"
        raise ShdError("argument-shape", f"{rule}; got {q.shape} and {k.shape}", "IDX-1")
    w = np.ones(q.shape[:3]) if weights is None else as_float(weights, "weights", ndim=3)
    if w.shape != q.shape[:3]:
        raise ShdError("argument-shape", f"weights must have shape {q.shape[:3]}; got {w.shape}", "IDX-1")
    counted = (
        np.ones((batch, num_rows), bool) if loss_mask is None else as_mask(loss_mask, "loss_mask", (batch, num_rows))
    )
    products = q @ np.repeat(k, heads // k.shape[1], axis=1).swapaxes(-1, -2)
    by_head = w[..., None] * activate(products, relu)
    scores = scale * by_head.reshape(batch, teacher.groups, -1, num_rows, num_blocks).sum(axis=2)
    open_blocks = np.broadcast_to(block_sums(teacher.allowed, teacher.block_size) > 0, scores.shape)
    chosen = open_blocks if k_top is None else select(scores, open_blocks, k_top)
    p = mean_target(teacher, chosen if restriction == "mask_first" and k_top is not None else None)
    if k_top is not None:
        p = np.where(chosen, p, 0.0)
        mass = p.sum(axis=-1, keepdims=True)
        if restriction != "unnormalised":
            p = p / np.where(mass == 0.0, 1.0, mass)
    support = open_blocks if restriction == "student_all" else chosen
    counts = counted[:, None] & (p.sum(axis=-1) > 0.0)
    segments = keywords.get("segments")
    number = row_divisor(counts, None if segments is None else np.asarray(segments), reduction)
    return IndexerRows(
        p=np.where(counts[..., None], p, 0.0),
        log_q=log_softmax(np.where(support, scores, -np.inf), 1.0),
        support=support,
        weight=np.where(counts, 1.0 / number, 0.0),
        products=products,
        queries=q,
        keys=k,
        weights=w,
        scale=scale,
        relu=bool(relu),
    )


def read_teacher(
    teacher_queries: Layers,
    teacher_keys: Layers,
    teacher_scale: float,
    groups: int = 1,
    block_size: int = 1,
    attn_mask: ArrayLike | None = None,
    segments: ArrayLike | None = None,
    outside: Layers | None = None,
) -> Teacher:
    """The teacher's logits of every layer, after every check of the target."""
    factor = check_number("teacher_scale", teacher_scale, "IDX-6")
    groups = check_integer("groups", groups, 1, None, "IDX-6")
    block_size = check_integer("block_size", block_size, 1, None, "IDX-4")
    named = {"teacher_queries": teacher_queries, "teacher_keys": teacher_keys}
    layers = as_layers(**named, **({} if outside is None else {"outside": outside}))
    allowed: Mask | None = None
    logits, lost = [], []
    for number, arrays in enumerate(zip(*layers, strict=True)):
        q, k = (as_float(array, name, ndim=4, layer=number) for array, name in zip(arrays, named, strict=False))
        batch, heads, rows, width = q.shape
        if k.shape[0] != batch or k.shape[3] != width or not k.shape[1] or heads % k.shape[1] or heads % groups:
            rule = (
                f"teacher_keys must be (B, H_kv, S, d), B={batch}, d={width}, with H_kv and groups={groups} divisors"
            )
            raise ShdError("argument-shape", f"{rule} of {heads} in layer {number}; got {k.shape}", "IDX-6")
        if allowed is None:
            allowed = _who_may(attn_mask, segments, (batch, 1, rows, k.shape[2]))
        if allowed.shape != (batch, 1, rows, k.shape[2]):
            fit = f"the layers of one indexer must agree in B, L and S; got {q.shape} and {k.shape} in layer {number}"
            raise ShdError("argument-shape", fit, "IDX-8")
        outside_layer = np.full((batch, heads, rows), -np.inf)
        if outside is not None:
            outside_layer = as_float(arrays[2], "outside", ndim=3, allow_minus_inf=True, layer=number)
            if outside_layer.shape != (batch, heads, rows):
                message = (
                    f"outside must have shape {(batch, heads, rows)} in layer {number}; got {outside_layer.shape}"
                )
                raise ShdError("argument-shape", message, "IDX-7")
        product = factor * (q @ np.repeat(k, heads // k.shape[1], axis=1).swapaxes(-1, -2))
        logits.append(np.where(allowed, product, -np.inf))
        lost.append(outside_layer)
    assert allowed is not None  # as_layers refuses an empty list
    return Teacher(logits, lost, allowed, groups, block_size)


def select(scores: Array, allowed: Mask, top_k: int) -> Mask:
    """The top_k allowed entries of every row, ties by the smaller position (IDX-10)."""
    order = np.argsort(-np.where(allowed, scores, -np.inf), axis=-1, kind="stable")
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, order[..., :top_k], True, axis=-1)
    return chosen & allowed


def row_divisor(counts: Mask, segments: Any, reduction: str) -> float:
    """What the sum over rows that count is divided by (IDX-13), at least 1."""
    if reduction == "sum":
        return 1.0
    if reduction == "rows":
        return float(max(counts.sum(), 1))
    sample, _, row = np.nonzero(counts)
    piece = np.zeros_like(sample) if segments is None else segments[sample, row]
    return float(max(len(set(zip(sample.tolist(), piece.tolist(), strict=True))), 1))


def activate(products: Array, relu: bool) -> Array:
    """The scorer's activation (IDX-2)."""
    return np.maximum(products, 0.0) if relu else products


def block_sums(maps: Any, block_size: int) -> Any:
    """Sums over blocks of the last axis, of which the last may be shorter (IDX-4)."""
    return np.add.reduceat(maps, range(0, maps.shape[-1], block_size), axis=-1, dtype=np.float64)


def _who_may(attn_mask: ArrayLike | None, segments: ArrayLike | None, shape: Sequence[int]) -> Mask:
    """Which keys each row may attend to, ``(B, 1, L, S)`` (IDX-5)."""
    allowed = np.ones(shape, dtype=bool)
    if attn_mask is not None:
        mask = as_mask(attn_mask, "attn_mask")
        try:
            allowed = np.broadcast_to(mask, shape)
        except ValueError:
            message = f"attn_mask must broadcast to (B, 1, L, S) = {tuple(shape)}; got {mask.shape}"
            raise ShdError("argument-shape", message, "IDX-5") from None
    if segments is not None:
        pieces = np.asarray(segments)
        if pieces.dtype.kind not in "iu":
            raise ShdError("argument-dtype", f"segments must be integers; got dtype {pieces.dtype}", "IDX-5")
        if pieces.shape != (shape[0], shape[2]) or shape[2] != shape[3]:
            rule = f"segments must be (B, L) with B={shape[0]} and L = S, {shape[2]} rows and {shape[3]} keys"
            raise ShdError("argument-shape", f"{rule}; got {pieces.shape}", "IDX-5")
        allowed = allowed & (pieces[:, None, :, None] == pieces[:, None, None, :])
    return allowed


def _log_sum(logits: Array) -> Array:
    peak = _zeroed(logits.max(axis=-1))
    with np.errstate(divide="ignore"):
        total: Array = peak + np.log(np.exp(logits - peak[..., None]).sum(axis=-1))
    return total


def _zeroed(values: Array) -> Array:
    """Minus infinity as 0, so that it is never subtracted from itself."""
    return np.where(np.isneginf(values), 0.0, values)
