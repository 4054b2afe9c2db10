"""Layers of attention for laws: drawn weights, merges, and attention as HEAD-2 says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shd_ref.conformance.laws.law import Array, Trial
from shd_ref.conformance.products import key_heads, pair_entries, read_layer

WIDTH = 6
Record = dict[str, Any]


def draw_layer(trial: Trial, seed: int, heads: int, kv_heads: int, biases: str = "", dim: int = 4) -> Record:
    """Weights of a layer; ``biases`` holds the first letters of those that it has."""

    def draw(number: int, *shape: int) -> Array:
        return trial.numbers(seed + number, *shape, low=-8, high=8, shift=4)

    shapes = {
        "query": (heads, WIDTH, dim),
        "key": (kv_heads, WIDTH, dim),
        "value": (kv_heads, WIDTH, dim),
        "output": (heads, dim, WIDTH),
        "query_bias": (heads, dim),
        "key_bias": (kv_heads, dim),
        "value_bias": (kv_heads, dim),
        "output_bias": (WIDTH,),
    }
    return {
        name: draw(number, *shape)
        for number, (name, shape) in enumerate(shapes.items())
        if not name.endswith("_bias") or name[0] in biases
    }


def draw_merge(trial: Trial, groups: Sequence[Sequence[int]]) -> Record:
    """Groups with weights of sixteenths."""
    mixing = np.zeros((len(groups), sum(map(len, groups))))
    for head, group in enumerate(groups):
        mixing[head, list(group)] = trial.probs(6000 + head, 1, len(group), bits=4)[0]
    return {"mixing": trial.rounded(mixing), "groups": [list(group) for group in groups]}


def draw_inputs(trial: Trial, seed: int, batch: int = 2, length: int = 5) -> Array:
    """Rows whose mean is not 0."""
    return trial.numbers(seed, batch, length, WIDTH, low=-6, high=10, shift=3)


def moments_of(rows: Array) -> tuple[Array, Array]:
    """The second moment of ``[x, 1]`` over samples ``(B, L, D)``, and that of x less its mean over the sample."""
    x = rows.astype(np.float64)
    ones = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2).reshape(-1, x.shape[2] + 1)
    away = (x - x.mean(axis=1, keepdims=True)).reshape(-1, x.shape[2])
    return ones.T @ ones / len(ones), away.T @ away / len(away)


def run_layer(
    inputs: Array,
    answer: Any,
    *,
    merge: Mapping[str, Any] | None = None,
    mask: Array | None = None,
    rotary: Mapping[str, Any] | None = None,
) -> Array:
    """What a layer gives, in float64; with ``merge`` the merged attention of HEAD-2."""
    layer, scale = read_layer(answer)
    reads = key_heads(layer)
    x = inputs.astype(np.float64)[:, None]
    query, key, value = (x @ layer[name] + layer[f"{name}_bias"][:, None] for name in ("query", "key", "value"))
    if rotary is not None:
        query, key = _turn(query, rotary), _turn(key, rotary)
    logits = scale * query @ key[:, reads].swapaxes(2, 3)
    if merge is not None:
        mixing = np.asarray(merge["mixing"], dtype=np.float64)
        home = [next(h for h, group in enumerate(merge["groups"]) if t in group) for t in range(mixing.shape[1])]
        logits = np.einsum("ht,btls->bhls", mixing, logits)[:, home]
    if mask is not None:
        logits = np.where(mask, logits, -np.inf)
    probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    outputs: Array = (probs @ value[:, reads] @ layer["output"]).sum(axis=1) + layer["output_bias"]
    return outputs


def _turn(rows: Array, rotary: Mapping[str, Any]) -> Array:
    first, second = pair_entries(rotary)
    angles = np.arange(rows.shape[2])[:, None] * np.asarray(rotary["frequencies"], dtype=np.float64)
    turned = rows.copy()
    turned[..., first] = rows[..., first] * np.cos(angles) - rows[..., second] * np.sin(angles)
    turned[..., second] = rows[..., first] * np.sin(angles) + rows[..., second] * np.cos(angles)
    return turned
