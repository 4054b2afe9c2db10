"""A teacher's head: what makes logits of its last states (CACHE-190)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

NORMS: Final = ("rms", "layer")
"""Kinds of a final norm."""


@dataclass(frozen=True)
class FinalNorm:
    """The norm between the states that are stored and the head's matrix.

    Attributes:
        kind: ``"rms"`` or ``"layer"``.
        epsilon: added to the mean square.
        bias: whether it has one.
    """

    kind: str
    epsilon: float
    bias: bool


@dataclass(frozen=True, eq=False)
class TeacherHead:
    """A head: ``cap(scale * W norm(h) + bias)``.

    Attributes:
        weight: W ``(V, D)``.
        bias: ``(V,)`` or None, added after the scale.
        scale: factor of the product.
        soft_cap: c of ``c tanh(u / c)``, or None.
        norm: the final norm, where states come before it.
        norm_weight, norm_bias: of that norm, ``(D,)``.
    """

    weight: NDArray[Any]
    bias: NDArray[Any] | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    norm: FinalNorm | None = None
    norm_weight: NDArray[Any] | None = None
    norm_bias: NDArray[Any] | None = None

    def cut(self, size: int) -> TeacherHead:
        """Its first classes."""
        return replace(self, weight=self.weight[:size], bias=None if self.bias is None else self.bias[:size])

    def logits(self, states: NDArray[Any]) -> NDArray[Any]:
        """The logits ``(R, V)`` of states ``(R, D)``, in float64 where these are, else in float32."""
        dtype = np.float64 if states.dtype == np.float64 else np.float32
        hidden = self.normed(states)
        weight: Any = self.weight.astype(dtype, copy=False)
        logits: NDArray[Any] = np.matmul(hidden, weight.T)
        if self.scale != 1.0:
            logits *= dtype(self.scale)
        if self.bias is not None:
            logits += self.bias.astype(dtype)
        return logits if self.soft_cap is None else dtype(self.soft_cap) * np.tanh(logits / dtype(self.soft_cap))

    def normed(self, states: NDArray[Any]) -> NDArray[Any]:
        """What the matrix is multiplied with, ``(R, D)`` in the dtype of ``logits``."""
        dtype = np.float64 if states.dtype == np.float64 else np.float32
        hidden = states.astype(dtype)
        if self.norm is None:
            return hidden
        centred = hidden - hidden.mean(axis=-1, keepdims=True) if self.norm.kind == "layer" else hidden
        deviation = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + dtype(self.norm.epsilon))
        hidden = centred / deviation * np.asarray(self.norm_weight, dtype)
        normed: NDArray[Any] = hidden if self.norm_bias is None else hidden + self.norm_bias.astype(dtype)
        return normed
