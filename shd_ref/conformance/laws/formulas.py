"""The formulas of the chapters LOSS, GRAD and TOKEN in float64: what laws over many options compare answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shd_ref.conformance.laws.law import Array


@dataclass(frozen=True)
class Rows:
    """One layer: its distributions P and Q, and what a row's divergence is multiplied by (0 where none counts)."""

    p: Array
    q: Array
    log_q: Array  # 0 where the student may not attend
    may: Array
    mass: Array  # rho (B, H, L)
    weight: Array  # beta over n, and over the maps for the mean (B, H, L)


def loss_of(inputs: Mapping[str, Any]) -> float:
    """The loss (LOSS-2, LOSS-11)."""
    return float(sum((rows.weight * rows.mass * _divergence(rows, inputs)).sum() for rows in layer_rows(inputs)))


def gradient_of(inputs: Mapping[str, Any]) -> list[Array]:
    """dz of every layer (GRAD-1)."""
    temperature = inputs.get("temperature", 1.0)
    return [_slope(rows, inputs) * (rows.weight * rows.mass / temperature)[..., None] for rows in layer_rows(inputs)]


def gradient_qk_of(inputs: Mapping[str, Any]) -> tuple[list[Array], list[Array]]:
    """dq and dk of every layer (GRAD-4, GRAD-5)."""
    scale = inputs["scale"]
    queries, keys = ([a.astype(np.float64) for a in as_list(inputs[name])] for name in ("queries", "keys"))
    read = [np.repeat(k, q.shape[1] // k.shape[1], axis=1) for q, k in zip(queries, keys, strict=True)]
    logits = [scale * np.einsum("bhid,bhjd->bhij", q, k) for q, k in zip(queries, read, strict=True)]
    options = {name: value for name, value in inputs.items() if name not in ("scale", "queries", "keys")}
    slopes = gradient_of({**options, "supervision": as_list(inputs["supervision"]), "student_logits": logits})
    dq = [scale * np.einsum("bhij,bhjd->bhid", dz, k) for dz, k in zip(slopes, read, strict=True)]
    each = [scale * np.einsum("bhij,bhid->bhjd", dz, q) for dz, q in zip(slopes, queries, strict=True)]
    dk = [
        part.reshape(*k.shape[:2], part.shape[1] // k.shape[1], *k.shape[2:]).sum(2)
        for part, k in zip(each, keys, strict=True)
    ]
    return dq, dk


def intersected(inputs: Mapping[str, Any]) -> tuple[Array, Array]:
    """The intersected maps and the mass that was dropped (LOSS-15)."""
    maps = inputs["supervision"].astype(np.float64)
    return _kept(maps, _may_attend(inputs["student_logits"], inputs.get("attn_mask")))


def aligned(inputs: Mapping[str, Any]) -> tuple[Array, Array]:
    """The aligned maps and the mass that was dropped (TOKEN-2)."""
    maps = inputs["attn_probs"].astype(np.float64)
    rows, columns = inputs.get("rows"), inputs.get("columns")
    maps = maps[:, :, list(range(maps.shape[2])) if rows is None else list(rows)]
    columns = list(range(maps.shape[3])) if columns is None else list(columns)
    kept, dropped = _kept(maps, np.isin(np.arange(maps.shape[3]), columns))
    return kept[..., columns], dropped


def layer_rows(inputs: Mapping[str, Any]) -> list[Rows]:
    """Every layer's rows (LOSS-4, -5, -10, -14, -16, -18)."""
    logits = as_list(inputs["student_logits"])
    maps = sum(z.shape[1] for z in logits) if inputs.get("reduction") == "mean" else 1
    found = []
    for given, z in zip(as_list(inputs["supervision"]), logits, strict=True):
        may = _may_attend(z, inputs.get("attn_mask"))
        teacher = given.astype(np.float64)
        if inputs.get("support") == "intersect":
            teacher = _kept(teacher, may)[0]
        counted = teacher.sum(-1) > 0
        if inputs.get("loss_mask") is not None:
            counted &= inputs["loss_mask"][:, None, :]
        teacher = np.where(counted[..., None], teacher, 0.0)
        mass = teacher.sum(-1) if inputs.get("row_sums") == "at_most_one" else counted.astype(np.float64)
        number = np.maximum(counted.sum((0, 2)), 1)[None, :, None]
        log_q = _log_softmax(z.astype(np.float64), may, inputs.get("temperature", 1.0))
        found.append(
            Rows(
                p=teacher / np.where(counted, mass, 1.0)[..., None],
                q=np.where(may, np.exp(log_q), 0.0),
                log_q=log_q,
                may=may,
                mass=mass,
                weight=np.where(counted, inputs.get("beta", 1.0) / (number * maps), 0.0),
            )
        )
    return found


def as_list(value: Any) -> list[Array]:
    """One array is one layer."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _may_attend(logits: Array, mask: Array | None) -> Array:
    may: Array = ~np.isneginf(logits)
    return may if mask is None else may & mask


def _kept(maps: Array, keys: Array) -> tuple[Array, Array]:
    """Mass on these keys, scaled back to what each row had, and the mass elsewhere."""
    kept = np.where(keys, maps, 0.0)
    dropped: Array = np.where(keys, 0.0, maps).sum(-1)
    left = kept.sum(-1)
    factor = np.where(dropped > 0, maps.sum(-1) / np.where(left > 0, left, 1.0), 1.0)
    return kept * factor[..., None], dropped


def _log_softmax(logits: Array, may: Array, temperature: float) -> Array:
    allowed = np.where(may, logits, -np.inf)
    peak = allowed.max(-1, keepdims=True)
    lowered = (allowed - np.where(np.isneginf(peak), 0.0, peak)) / temperature
    total = np.exp(lowered).sum(-1, keepdims=True)
    return np.where(may, lowered - np.log(np.where(total > 0, total, 1.0)), 0.0)


def _log(probs: Array) -> Array:
    """The logarithm, and 0 where a factor of 0 stands before it (LOSS-12)."""
    logarithm: Array = np.log(np.where(probs > 0, probs, 1.0))
    return logarithm


def _divergence(rows: Rows, inputs: Mapping[str, Any]) -> Array:
    p, q, log_p, log_q = rows.p, rows.q, _log(rows.p), rows.log_q
    middle = _log((p + q) / 2)
    terms: Array = {
        "kl": p * (log_p - log_q),
        "reverse_kl": q * (log_q - log_p),
        "js": 0.5 * p * (log_p - middle) + 0.5 * q * (log_q - middle),
        "mse": (p - q) ** 2,
    }[inputs.get("divergence", "kl")]
    return np.asarray(terms.sum(-1))


def _slope(rows: Rows, inputs: Mapping[str, Any]) -> Array:
    p, q = rows.p, rows.q
    divergence = inputs.get("divergence", "kl")
    if divergence == "kl":
        return np.asarray(p.sum(-1, keepdims=True) * q - p)
    r = {
        "reverse_kl": rows.log_q - _log(p),
        "js": (rows.log_q - _log((p + q) / 2)) / 2,
        "mse": 2 * (q - p),
    }[divergence]
    return np.asarray(q * (r - (q * r).sum(-1, keepdims=True)))


def in_words(inputs: Mapping[str, Any]) -> str:
    """The options of a call for a report: numbers and words as they are, arrays by their shapes."""

    def word(value: Any) -> str:
        if isinstance(value, np.ndarray):
            return str(list(value.shape))
        if isinstance(value, Sequence) and value and isinstance(value[0], np.ndarray):
            return f"{len(value)} layers"
        return repr(value) if not isinstance(value, list) else f"a list of {len(value)}"

    return ", ".join(f"{name}={word(value)}" for name, value in inputs.items())
