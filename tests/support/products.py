"""Products of an answer's factors: what is compared where factors themselves are not unique (``specs/shrink.md``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance.adapter import BrokenError, take_output
from shd_ref.conformance.compare import as_numbers

Array = NDArray[np.float64]
Layer = dict[str, Array]
LAYER = ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias", "output_bias")


def make_product(name: str, answer: Any, inputs: Mapping[str, Any]) -> Any:
    """One product of an answer.

    Args:
        name: a key of ``PRODUCTS``.
        answer: of the implementation.
        inputs: of the call, which say how entries of rotated pairs lie.

    Raises:
        BrokenError: the answer lacks a factor, or its factors do not fit.
    """
    try:
        return PRODUCTS[name](answer, inputs)
    except (ValueError, IndexError, TypeError, ZeroDivisionError) as error:
        raise BrokenError(f"answered factors that do not fit each other: {error}") from error


def read_layer(answer: Any) -> tuple[Layer, float]:
    """A layer's weights as float64, missing biases as zeros, and the scale of its logits.

    Raises:
        BrokenError: one of them is missing, or is not numbers.
    """
    layer: Layer = {}
    for name in LAYER:
        absent = isinstance(answer, Mapping) and answer.get(name) is None
        value = None if absent and name.endswith("_bias") else take_output(answer, name, LAYER)
        if value is None and name.endswith("_bias"):
            like = layer[name.removesuffix("_bias")]
            layer[name] = np.zeros(like.shape[2:] if name == "output_bias" else (len(like), like.shape[2]))
            continue
        numbers = as_numbers(value)
        if numbers is None or numbers.ndim != (
            3 if not name.endswith("_bias") else 1 if name == "output_bias" else 2
        ):
            raise BrokenError(f"must answer with {name} as an array of the layer's shape; got {type(value).__name__}")
        layer[name] = numbers
    scale = answer.get("scale") if isinstance(answer, Mapping) else getattr(answer, "scale", None)
    return layer, layer["query"].shape[2] ** -0.5 if scale is None else float(scale)


def key_heads(layer: Layer) -> list[int]:
    """Which key and value head each query head reads (MAP-6)."""
    heads, kv_heads = len(layer["query"]), len(layer["key"])
    return [head // (heads // kv_heads) for head in range(heads)]


def pair_entries(rotary: Mapping[str, Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Positions of each rotated pair's entries in a head (HEAD-14)."""
    pairs = np.arange(len(rotary["frequencies"]))
    return (2 * pairs, 2 * pairs + 1) if rotary.get("layout") == "adjacent" else (pairs, pairs + len(pairs))


def _with_bias(matrix: Array, bias: Array) -> Array:
    return np.concatenate([matrix, bias[:, None]], axis=1)


def _sides(answer: Any) -> tuple[Array, Array, float]:
    """``[W_Q; b_Q]`` and ``[W_K; b_K]`` of every query head."""
    layer, scale = read_layer(answer)
    query, key = _with_bias(layer["query"], layer["query_bias"]), _with_bias(layer["key"], layer["key_bias"])
    return query, key[key_heads(layer)], scale


def _logits(answer: Any, _: Mapping[str, Any]) -> Array:
    query, key, scale = _sides(answer)
    product: Array = scale * query @ key[:, :-1].swapaxes(1, 2)
    return product


def _pairs(answer: Any, inputs: Mapping[str, Any]) -> Array:
    query, key, scale = _sides(answer)
    first, second = pair_entries(inputs["rotary"])
    slow = inputs["rotary"].get("slow")
    fast = slice(None) if slow is None else ~np.asarray(slow)
    q, k = (part[..., first[fast]] + 1j * part[..., second[fast]] for part in (query, key))
    product = scale * np.einsum("hif,hjf->hfij", q, k.conj())
    return np.stack([product.real, product.imag], axis=2)


def _still(answer: Any, inputs: Mapping[str, Any]) -> Array:
    query, key, scale = _sides(answer)
    first, second = pair_entries(inputs["rotary"])
    slow = inputs["rotary"].get("slow")
    turning = np.zeros(query.shape[2], np.bool_)
    fast = slice(None) if slow is None else ~np.asarray(slow)
    turning[first[fast]] = turning[second[fast]] = True
    product: Array = scale * query[..., ~turning] @ key[..., ~turning].swapaxes(1, 2)
    return product


def _values(answer: Any, _: Mapping[str, Any]) -> Array:
    layer, _scale = read_layer(answer)
    product: Array = layer["value"][key_heads(layer)] @ layer["output"]
    return product


def _constant(answer: Any, _: Mapping[str, Any]) -> Array:
    layer, _scale = read_layer(answer)
    given: Array = np.einsum("hv,hvd->d", layer["value_bias"][key_heads(layer)], layer["output"])
    return given + layer["output_bias"]


def _projector(answer: Any, _: Mapping[str, Any]) -> Array:
    basis = as_numbers(take_output(answer, "basis", ("basis",)))
    if basis is None or basis.ndim != 2:
        raise BrokenError("must answer with basis as an array of two axes")
    product: Array = basis @ basis.T
    return product


PRODUCTS: dict[str, Callable[[Any, Mapping[str, Any]], Array]] = {
    "logit_forms": _logits,
    "pair_forms": _pairs,
    "still_forms": _still,
    "value_forms": _values,
    "constant": _constant,
    "projector": _projector,
}
"""Names of products, as ``expected`` of a vector file holds them in place of the factors."""
