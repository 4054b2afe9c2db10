"""The vector files' inputs: what ``specs/vectors`` spells out or names by a recipe.

Recipes name large arrays instead of spelling them out (``specs/vectors/README.md``): every entry is an integer over a
power of two, so that any language writes the same bits.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from shd_ref.attention import Array
from shd_ref.conformance.generator import OwnDtype, round_to

MULTIPLIER, INCREMENT, MODULUS = 1664525, 1013904223, 2**32
_NUMPY_DTYPES = {"bool": np.bool_, "int64": np.int64, "complex128": np.complex128}


def decode_input(value: Any, dtype: str) -> Any:
    """An argument: an array of this dtype, a special number, a list of arguments, or a plain value."""
    if isinstance(value, list):
        return [decode_input(item, dtype) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "number" in value:
        return float(value["number"])
    if "recipe" in value:
        array = make_array(value["shape"], value["recipe"])
        return array if array.dtype == np.bool_ else round_to(array, dtype)
    kind = value.get("dtype", "float")
    if kind in _NUMPY_DTYPES:
        return np.array(value["data"], dtype=_NUMPY_DTYPES[kind]).reshape(value["shape"])
    data = np.array([float(item) for item in value["data"]], dtype=np.float64).reshape(value["shape"])
    return round_to(data, dtype) if kind == "float" else data.astype(kind).view(OwnDtype)


def draw_integers(seed: int, count: int) -> Any:
    """``count`` draws of the 32-bit generator, each in 0..65535."""
    states, state = np.empty(count, dtype=np.int64), seed % MODULUS
    for number in range(count):
        state = (MULTIPLIER * state + INCREMENT) % MODULUS
        states[number] = state
    return np.asarray(states >> 16)


def make_array(shape: Sequence[int], recipe: Mapping[str, Any]) -> Array:
    """The array of a recipe: float64, or boolean for masks; the last two axes are rows and keys."""
    kind = recipe["kind"]
    if kind == "lengths":
        return np.asarray(np.arange(shape[1])[None, :] < np.asarray(recipe["lengths"])[:, None])
    draws = draw_integers(recipe["seed"], prod(shape)).reshape(tuple(shape))
    future = np.arange(shape[-1])[None, :] > np.arange(shape[-2] if len(shape) > 1 else 1)[:, None]
    if kind == "mask":
        return np.asarray(draws % recipe["of"] < recipe["true"])
    if kind == "numbers":
        low, high = recipe["low"], recipe["high"]
        numbers = (low + draws % (high - low + 1)) / 2.0 ** recipe["shift"]
        return np.where(future, -np.inf, numbers) if recipe.get("causal") else numbers
    if kind != "probs":
        raise ValueError(f"recipe kind must be one of numbers, probs, mask, lengths; got {kind!r}")
    weights = (draws % recipe["levels"]) ** recipe["power"]
    weights = np.where(future, 0, weights) if recipe.get("causal") else weights
    weights[..., 0] += weights.sum(axis=-1) == 0
    units = 2 ** recipe["bits"]
    counts = weights * units // weights.sum(axis=-1, keepdims=True)
    missing = units - counts.sum(axis=-1, keepdims=True)
    # Fewer units are missing than keys have weight, so one each to the first of those is enough.
    counts += (weights > 0) & (np.cumsum(weights > 0, axis=-1) <= missing)
    counts[..., list(recipe.get("zero_rows", ())), :] = 0
    return np.asarray(counts / units)
