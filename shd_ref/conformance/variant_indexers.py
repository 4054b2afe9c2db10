"""The operations of chapter IDX in small, right or with one well-known mistake by its name; see ``variants.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MISTAKES: tuple[str, ...] = (
    "mean-over-rows", "mean-over-samples", "mean-over-all-rows", "padding-counts", "segments-ignored",
    "mask-after-softmax", "logits-averaged", "heads-summed", "heads-interleaved", "one-layer", "block-maximum",
    "outside-ignored", "outside-not-renormalised", "mask-first", "not-renormalised", "student-over-all",
    "ties-to-the-last", "relu-swapped", "scale-ignored", "weights-ignored", "kl-reversed", "cross-entropy",
    "gradient-sign", "gradient-through-relu",
)  # fmt: skip
"""Each is ``indexer-NAME`` in ``specs/mistakes.json``."""

_OF_TARGETS = MISTAKES[4:13]
_OF_GRADIENTS = MISTAKES[-2:]


def mistakes_of(operation: str) -> tuple[str, ...]:
    """The names of mistakes that show in an operation of the chapter."""
    if operation == "indexer_target":
        return _OF_TARGETS
    return tuple(name for name in MISTAKES if name not in (_OF_GRADIENTS if operation == "indexer_loss" else ()))


def operations(wrong: str) -> Mapping[str, Callable[..., Any]]:
    """The chapter's operations with this mistake; right ones where the name is empty."""

    def target(**inputs: Any) -> Array:
        return _target(wrong, None, **inputs)

    def loss(**inputs: Any) -> float:
        return float(_terms(wrong, **inputs)[0])

    def gradient(**inputs: Any) -> tuple[Array, ...]:
        return _terms(wrong, **inputs)[1:]

    return {"indexer_target": target, "indexer_loss": loss, "indexer_loss_gradient": gradient}


def _layers(value: Any) -> list[Array]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _who_may(shape: tuple[int, ...], attn_mask: Any, segments: Any) -> Array:
    may = np.ones(shape, bool) if attn_mask is None else np.broadcast_to(attn_mask, shape)
    return may if segments is None else may & (segments[:, None, :, None] == segments[:, None, None, :])


def _in_blocks(maps: Array, size: int, best: bool = False) -> Array:
    starts = np.arange(0, maps.shape[-1], size)
    reduced: Array = (np.maximum if best else np.add).reduceat(maps, starts, axis=-1)
    return reduced


def _target(
    wrong: str,
    chosen: Array | None,
    teacher_queries: Any,
    teacher_keys: Any,
    teacher_scale: float,
    groups: int = 1,
    block_size: int = 1,
    attn_mask: Any = None,
    segments: Any = None,
    outside: Any = None,
) -> Array:
    """IDX-5 to -9; of ``chosen`` blocks ``(B, G, L, C)`` alone where they are given."""
    total = []
    for number, (q, k) in enumerate(zip(_layers(teacher_queries), _layers(teacher_keys), strict=True)):
        batch, heads, rows, _ = q.shape
        keys, share = k.shape[2], heads // groups
        z = np.einsum("bhid,bhjd->bhij", q, k[:, np.arange(heads) // (heads // k.shape[1])]) * teacher_scale
        may = _who_may((batch, 1, rows, keys), attn_mask, None if wrong == "segments-ignored" else segments)
        may = np.broadcast_to(may, z.shape)
        owner = np.arange(heads) % groups if wrong == "heads-interleaved" else np.arange(heads) // share
        if chosen is not None:
            may = may & np.repeat(chosen, block_size, axis=-1)[..., :keys][:, owner]
        if wrong == "logits-averaged":
            z = np.stack([z[:, owner == g].mean(1) for g in owner], axis=1)
        rest = np.full(z.shape[:3], -np.inf)
        if outside is not None and wrong != "outside-ignored":
            rest = np.asarray(_layers(outside)[number], np.float64)
        inside = np.ones_like(may) if wrong == "mask-after-softmax" else may
        # From here on relative to each head's largest logit; a head's mass on its keys is a logarithm.
        peak = np.where(inside.any(-1), np.where(inside, z, -np.inf).max(-1), 0.0)
        exps = np.exp(np.where(inside, z - peak[..., None], -np.inf))
        own = np.log(exps.sum(-1)) + peak
        log_mass = np.where(np.isneginf(own), -np.inf, own - np.logaddexp(own, rest))
        maps = np.where(may, exps, 0.0) / np.maximum(exps.sum(-1, keepdims=True), 1e-300)
        mixed = []
        for g in range(groups):
            mass = log_mass[:, owner == g]
            top = mass.max(1, keepdims=True)
            part = np.exp(mass - np.where(np.isneginf(top), 0.0, top))
            if wrong == "outside-not-renormalised":
                part, whole = np.exp(mass), np.full_like(top, float(share))
            else:
                whole = part.sum(1, keepdims=True)
            whole = np.ones_like(top) if wrong == "heads-summed" else np.where(whole > 0, whole, 1.0)
            mixed.append(((part / whole)[..., None] * maps[:, owner == g]).sum(1))
        p = np.stack(mixed, 1)
        if wrong == "mask-after-softmax":
            p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
        total.append(_in_blocks(p, block_size, wrong == "block-maximum"))
    mean: Array = total[0] if wrong == "one-layer" else sum(total[1:], total[0]) / len(total)
    return mean


def _terms(
    wrong: str,
    queries: Array,
    keys: Array,
    *,
    scale: float,
    weights: Array | None = None,
    relu: bool = True,
    top_k: int | None = None,
    restriction: str = "renormalised",
    reduction: str = "sum",
    loss_mask: Array | None = None,
    **taught: Any,
) -> tuple[Any, ...]:
    """Loss, dq, dk, dw (IDX-10 to -14)."""
    relu = relu != (wrong == "relu-swapped")
    scale = 1.0 if wrong == "scale-ignored" else scale
    w = np.ones(queries.shape[:3]) if weights is None or wrong == "weights-ignored" else weights
    batch, heads, rows, _ = queries.shape
    groups, size = taught.get("groups", 1), taught.get("block_size", 1)
    reads = np.arange(heads) // (heads // keys.shape[1])
    x = np.einsum("bhid,bhjd->bhij", queries, keys[:, reads])
    f = np.where(x > 0, x, 0.0) if relu else x
    scores = np.stack(np.split(scale * w[..., None] * f, groups, axis=1), 1).sum(2)
    segments = None if wrong == "segments-ignored" else taught.get("segments")
    num_keys = _layers(taught["teacher_keys"])[0].shape[2]
    may = _in_blocks(_who_may((batch, 1, rows, num_keys), taught.get("attn_mask"), segments).astype(int), size) > 0
    may = np.broadcast_to(may, scores.shape)
    chosen = may.copy()
    if top_k is not None:
        back = -1 if wrong == "ties-to-the-last" else 1
        for place in np.ndindex(*scores.shape[:3]):
            order = sorted(np.flatnonzero(may[place]), key=lambda c, at=place: (-scores[at][c], back * c))  # type: ignore[misc]
            chosen[place] = np.isin(np.arange(scores.shape[3]), order[:top_k])
    ways = {"mask-first": "mask_first", "not-renormalised": "unnormalised", "student-over-all": "student_all"}
    way = ways.get(wrong, restriction) if top_k is not None else "dense"
    p = np.where(chosen, _target(wrong, chosen if way == "mask_first" else None, **taught), 0.0)
    if way in ("renormalised", "student_all"):
        p = p / np.where(p.sum(-1, keepdims=True) > 0, p.sum(-1, keepdims=True), 1.0)
    support = may if way == "student_all" else chosen
    masked = np.where(support, scores, -np.inf)
    peak = np.where(support.any(-1), masked.max(-1), 0.0)[..., None]
    log_q = masked - peak - np.log(np.maximum(np.exp(masked - peak).sum(-1, keepdims=True), 1e-300))
    q = np.exp(log_q)
    counted = p.sum(-1) > 0
    if loss_mask is not None and wrong != "padding-counts":
        counted = counted & loss_mask[:, None]
    pieces = np.zeros((batch, rows), int) if segments is None else np.asarray(segments)
    samples = {(b, int(pieces[b, i])) for b, _, i in zip(*np.nonzero(counted), strict=True)}
    of_rows = float(counted.size if wrong == "mean-over-all-rows" else counted.sum())
    number = {"sum": 1.0, "rows": of_rows, "samples": float(len(samples))}
    reduction = {"mean-over-rows": "rows", "mean-over-samples": "samples"}.get(wrong, reduction)
    weight = counted / max(number[reduction], 1.0)
    held = np.where(support, log_q, 0.0)
    terms = np.where(p > 0, p * (np.log(np.where(p > 0, p, 1.0)) - held), 0.0)
    if wrong == "cross-entropy":
        terms = -p * held
    if wrong == "kl-reversed":
        terms = np.where(q > 0, q * (held - np.log(p)), 0.0)
    loss = float((weight * terms.sum(-1)).sum())
    slope = weight[..., None] * np.where(support, p.sum(-1, keepdims=True) * q - p, 0.0)
    if wrong == "gradient-sign":
        slope = -slope
    by_head = scale * slope[:, np.arange(heads) // (heads // groups)]
    through = (
        by_head * w[..., None] * (np.where(x > 0, 1.0, 0.0) if relu and wrong != "gradient-through-relu" else 1.0)
    )
    dq = np.einsum("bhij,bhjd->bhid", through, keys[:, reads])
    dk = np.zeros(keys.shape)
    for head in range(heads):
        dk[:, reads[head]] += np.einsum("bij,bid->bjd", through[:, head], queries[:, head])
    return loss, dq, dk, (by_head * f).sum(-1)
