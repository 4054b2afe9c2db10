"""Feed-forward layers: one linear map where the activation goes, fewer neurons where it stays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, as_float
from shd_ref.errors import ShdError
from shd_ref.tolerances import tie_width


class Linear(NamedTuple):
    """``y = W x + b``, as ``torch.nn.Linear`` stores it: weight ``(out, in)``, bias ``(out)`` or None."""

    weight: Array
    bias: Array | None


def merge_linear(
    first: ArrayLike,
    second: ArrayLike,
    first_bias: ArrayLike | None = None,
    second_bias: ArrayLike | None = None,
    *,
    gate: ArrayLike | None = None,
) -> Linear:
    """``W2 (W1 x + b1) + b2`` as one layer, exactly: ``W = W2 W1``, ``b = W2 b1 + b2``.

    Args:
        first: W1 ``(F, D)``.
        second: W2 ``(E, F)``.
        first_bias: b1 ``(F)``, or None where there is none.
        second_bias: b2 ``(E)``, or None.
        gate: the gate's matrix of a gated FFN, which has no such map: anything but None is refused.

    Returns:
        W ``(E, D)``, and b ``(E)``, None where both biases are.

    Raises:
        ShdError: ``shrink-unsupported`` for a gate, ``argument-shape``, ``argument-dtype``, ``not-finite``.

    Source: the second source's exact merge of what is left without an activation.
    """
    if gate is not None:
        why = "a gated FFN multiplies two functions of its input: without the activation it is quadratic"
        message = f"{why}, and no linear map equals it; keep its activation"
        raise ShdError("shrink-unsupported", message)
    w1, w2 = as_float(first, "first", ndim=2), as_float(second, "second", ndim=2)
    b1, b2 = _bias(first_bias, "first_bias", len(w1)), _bias(second_bias, "second_bias", len(w2))
    if w2.shape[1] != len(w1):
        message = f"second must have a column a row of first; got {w2.shape} and {w1.shape}"
        raise ShdError("argument-shape", message)
    terms = [term for term in (None if b1 is None else w2 @ b1, b2) if term is not None]
    return Linear(w2 @ w1, None if not terms else np.sum(terms, axis=0))


def score_neurons(squares: Array, second: Array) -> Array:
    """Importance ``(F,)``: the root of the mean square of what W2 ``(E, F)`` reads, times the norm of its column."""
    importance: Array = np.sqrt(squares) * np.linalg.norm(second, axis=0)
    return importance


def most_important(scores: Array, count: int) -> tuple[int, ...]:
    """The numbers of the ``count`` largest scores, rising; of those that rounding tells apart the first."""
    if not count:
        return ()
    last = np.sort(scores)[-count]
    near = np.abs(scores - last) <= tie_width() * np.abs(last)
    above = (scores > last) & ~near
    kept = np.flatnonzero(above | (near & (np.cumsum(near) <= count - above.sum())))
    return tuple(int(number) for number in kept)


def _bias(value: ArrayLike | None, name: str, size: int) -> Array | None:
    if value is None:
        return None
    bias = as_float(value, name, ndim=1)
    if len(bias) != size:
        raise ShdError("argument-shape", f"{name} must have {size} entries; got {len(bias)}")
    return bias
