"""Integer-generator recipes: large or ugly arrays that a vector file names instead of spelling out.

The words of ``specs/conformance.md`` ("Recipes") in code. Every entry is an integer over a power of two, so
that any language writes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

MULTIPLIER, INCREMENT, MODULUS = 1664525, 1013904223, 2**32


def draw_integers(seed: int, count: int) -> NDArray[np.int64]:
    """``count`` draws of the 32-bit generator, each in 0..65535."""
    powers, sums = _coefficients(1 << max(count - 1, 1).bit_length())
    states = powers[:count] * np.uint32(seed % MODULUS) + sums[:count]
    draws: NDArray[np.int64] = np.right_shift(states, np.uint32(16)).astype(np.int64)
    return draws


@cache
def _coefficients(count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """state_k = M^k seed + (1 + M + ... + M^(k-1)) I: the factors and the sums; uint32 is modulo 2^32."""
    powers = np.full(count, MULTIPLIER, dtype=np.uint32).cumprod(dtype=np.uint32)  # M^1 .. M^count
    sums = np.concatenate((np.ones(1, dtype=np.uint32), powers[:-1])).cumsum(dtype=np.uint32)
    return powers, sums * np.uint32(INCREMENT)


def make_array(shape: Sequence[int], recipe: Mapping[str, Any]) -> NDArray[Any]:
    """The array of a recipe: float64, or boolean for masks.

    Args:
        shape: of the array; the last two axes are rows and keys.
        recipe: ``{"kind": ...}`` with the fields of that kind.

    Raises:
        ValueError: an unknown kind.
    """
    kind = recipe["kind"]
    if kind == "lengths":
        counted: NDArray[np.bool_] = np.arange(shape[1])[None, :] < np.asarray(recipe["lengths"])[:, None]
        return counted
    draws = draw_integers(recipe["seed"], prod(shape)).reshape(tuple(shape))
    if kind == "mask":
        chosen: NDArray[np.bool_] = draws % recipe["of"] < recipe["true"]
        return chosen
    if kind == "numbers":
        low, high = recipe["low"], recipe["high"]
        numbers = (low + draws % (high - low + 1)) / 2.0 ** recipe["shift"]
        return np.where(_future(shape), -np.inf, numbers) if recipe.get("causal") else numbers
    if kind == "probs":
        return _make_probs(draws, recipe)
    raise ValueError(f"recipe kind must be one of numbers, probs, mask, lengths; got {kind!r}")


def _make_probs(draws: NDArray[np.int64], recipe: Mapping[str, Any]) -> NDArray[np.float64]:
    weights = (draws % recipe["levels"]) ** recipe["power"]
    if recipe.get("causal"):
        weights = np.where(_future(draws.shape), 0, weights)
    weights[..., 0] += weights.sum(axis=-1) == 0
    units = 2 ** recipe["bits"]
    counts = weights * units // weights.sum(axis=-1, keepdims=True)
    missing = units - counts.sum(axis=-1, keepdims=True)
    # Fewer units are missing than keys have weight, so one each to the first of those is enough.
    rank = np.cumsum(weights > 0, axis=-1)
    counts += (weights > 0) & (rank <= missing)
    for row in recipe.get("zero_rows", ()):
        counts[..., row, :] = 0
    probs: NDArray[np.float64] = counts / units
    return probs


def _future(shape: Sequence[int]) -> NDArray[np.bool_]:
    rows, keys = shape[-2:]
    return np.arange(keys)[None, :] > np.arange(rows)[:, None]
