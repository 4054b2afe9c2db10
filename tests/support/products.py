"""Products of an answer's factors: what is compared where factors themselves are not unique."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _by_head(answer: Any, name: str) -> Array:
    """A weight for every query head, which reads its group's key and value head (MAP-6)."""
    weight = np.asarray(getattr(answer, name))
    return weight[np.arange(len(answer.query)) // (len(answer.query) // len(weight))]


def _bias(answer: Any, name: str) -> Array:
    weight = _by_head(answer, name)
    return (
        np.zeros((len(weight), weight.shape[2]))
        if getattr(answer, f"{name}_bias") is None
        else _by_head(answer, f"{name}_bias")
    )


def _sides(answer: Any) -> tuple[Array, Array]:
    """``[W_Q; b_Q]``, scaled, and ``[W_K; b_K]`` of every query head."""
    query, key = (
        np.concatenate([_by_head(answer, name), _bias(answer, name)[:, None]], axis=1) for name in ("query", "key")
    )
    scale = query.shape[2] ** -0.5 if answer.scale is None else answer.scale
    return scale * query, key


def _turning(rotary: Mapping[str, Any]) -> tuple[Array, Array]:
    """Positions of the entries of each pair that is rotated, but for slow ones."""
    pairs = np.arange(len(rotary["frequencies"]))
    first, second = (2 * pairs, 2 * pairs + 1) if rotary.get("layout") == "adjacent" else (pairs, pairs + len(pairs))
    fast = slice(None) if rotary.get("slow") is None else ~np.asarray(rotary["slow"])
    return first[fast], second[fast]


def _logits(answer: Any, _: Mapping[str, Any]) -> Any:
    query, key = _sides(answer)
    return query @ key[:, :-1].swapaxes(1, 2)


def _pairs(answer: Any, inputs: Mapping[str, Any]) -> Any:
    first, second = _turning(inputs["rotary"])
    q, k = (side[..., first] + 1j * side[..., second] for side in _sides(answer))
    product = np.einsum("hif,hjf->hfij", q, k.conj())
    return np.stack([product.real, product.imag], axis=2)


def _still(answer: Any, inputs: Mapping[str, Any]) -> Any:
    q, k = (np.delete(side, np.concatenate(_turning(inputs["rotary"])), axis=2) for side in _sides(answer))
    return q @ k.swapaxes(1, 2)


def _constant(answer: Any, _: Mapping[str, Any]) -> Any:
    own = 0.0 if answer.output_bias is None else answer.output_bias
    return np.einsum("hv,hvd->d", _bias(answer, "value"), answer.output) + own


PRODUCTS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "logit_forms": _logits,
    "pair_forms": _pairs,
    "still_forms": _still,
    "value_forms": lambda answer, _: _by_head(answer, "value") @ answer.output,
    "constant": _constant,
    "projector": lambda answer, _: answer @ answer.T,
}
"""Names of products, as ``expected`` of a golden holds them instead of the factors, from an answer and its inputs."""
