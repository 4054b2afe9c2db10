"""Which layers, axes and channels a smaller student keeps.

A norm that the stream itself passes through has no place to fold its scale into: such a stream keeps channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, as_float, check_option
from shd_ref.errors import ShdError
from shd_ref.integers import as_index, check_integer
from shd_ref.shrink.heads import leading_phases
from shd_ref.tolerances import degenerate_threshold, tie_width


def kept_layers(num_teacher_layers: int, layers: int | Iterable[int]) -> tuple[int, ...]:
    """The teacher layers that a student's are copies of, in order.

    Args:
        num_teacher_layers: L_t, at least 1.
        layers: how many are kept, layer ``floor(i (L_t - 1) / (L_s - 1) + 1/2)`` for each i (of one the last); or the
            rising list itself.

    Raises:
        ShdError: ``layers-invalid``.
    """
    teacher = 0
    try:
        teacher = as_index(num_teacher_layers)
        if isinstance(layers, Iterable):
            numbers = tuple(as_index(layer) for layer in layers)
        else:
            numbers = _spread(teacher, as_index(layers))
    except TypeError:
        numbers = ()
    if not numbers or list(numbers) != sorted(set(numbers)) or numbers[0] < 0 or numbers[-1] >= teacher:
        rule = f"a number of 1..{num_teacher_layers}, or a rising list of teacher layers 0..{teacher - 1}"
        raise ShdError("layers-invalid", f"layers must be {rule}; got {layers!r}")
    return numbers


def _spread(teacher: int, student: int) -> tuple[int, ...]:
    if not 1 <= student <= teacher:
        return ()
    if student == 1:
        return (teacher - 1,)
    steps = student - 1
    return tuple((2 * i * (teacher - 1) + steps) // (2 * steps) for i in range(student))


NORMS: tuple[str, ...] = ("rms", "layer")


class Axes(NamedTuple):
    """The kept axes of a stream."""

    basis: Array  # (D, width); the stream x becomes x @ basis
    energy: float  # share of the moment's trace that the kept axes hold, in [0, 1]


def fold_norm(
    matrix: ArrayLike, scale: ArrayLike, shift: ArrayLike | None = None, bias: ArrayLike | None = None
) -> tuple[Array, Array | None]:
    """A projection that reads ``norm(x) * scale + shift``, as one that reads ``norm(x)``.

    After folding, an orthogonal rotation of the stream changes nothing, if every norm reads it and none lies on it.

    Args:
        matrix: W ``(D, E)``, read as ``y @ W``.
        scale: of the norm ``(D,)``.
        shift: of the norm ``(D,)``, or None.
        bias: of the projection ``(E,)``, or None.

    Returns:
        ``diag(scale) W`` and ``shift W + bias``, None where shift and bias both are.
    """
    w = as_float(matrix, "matrix", ndim=2)
    vectors = {}
    for name, vector, size in (("scale", scale, len(w)), ("shift", shift, len(w)), ("bias", bias, w.shape[1])):
        if vector is not None:
            vectors[name] = as_float(vector, name, ndim=1)
            if len(vectors[name]) != size:
                got = len(vectors[name])
                raise ShdError("argument-shape", f"{name} must have {size} entries; got {got}")
    terms = ([vectors["shift"] @ w] if shift is not None else []) + ([vectors["bias"]] if bias is not None else [])
    return vectors["scale"][:, None] * w, np.sum(terms, axis=0) if terms else None


def principal_axes(moment: ArrayLike, width: int, norm: str = "rms") -> Axes:
    """The axes that hold most of a stream's second moment.

    Args:
        moment: ``(D, D)``: the mean of ``y^T y`` over calibration rows y of the normalised stream.
        width: how many channels the student has, from 1 (``"layer"``: 2) to D.
        norm: ``"rms"``; ``"layer"`` keeps ``width - 1`` axes orthogonal to the vector of ones, laid out over
            ``width`` channels whose mean is zero, so that a LayerNorm finds nothing to subtract.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.

    Source: SliceGPT's rotation (arXiv 2401.15024), with one rotation for all layers.
    """
    check_option("norm", norm, NORMS)
    s = as_float(moment, "moment", ndim=2)
    channels = len(s)
    if s.shape != (channels, channels):
        raise ShdError("argument-shape", f"moment must be (D, D); got {s.shape}")
    width = check_integer("width", width, 1 if norm == "rms" else 2, channels)
    turn = np.eye(channels) if norm == "rms" else _zero_mean_axes(channels)
    values, vectors = np.linalg.eigh(turn.T @ ((s + s.T) / 2) @ turn)
    order = np.argsort(-values, kind="stable")[: width if norm == "rms" else width - 1]
    basis = turn @ vectors[:, order]
    basis = basis * leading_phases(basis)
    if norm == "layer":
        basis = basis @ _zero_mean_axes(width).T
    total = float(np.trace(turn.T @ s @ turn))
    return Axes(basis, float(np.clip(values[order].sum() / total, 0.0, 1.0)) if total > 0.0 else 1.0)


def predictive_channels(moment: ArrayLike, width: int, norm: str = "layer") -> Axes:
    """The channels from which the others are predicted best, chosen one after the other.

    Args:
        moment: ``(D, D)``: the second moment of rows, less their mean.
        width: how many channels stay, from 1 to D.
        norm: ``"layer"`` or ``"rms"``, which changes nothing: another channel would do as well to a norm.

    Returns:
        A basis of zeros and ones, rising, and the share of the trace that linear prediction from them explains.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    check_option("norm", norm, NORMS)
    s = as_float(moment, "moment", ndim=2)
    if s.shape != (len(s), len(s)):
        raise ShdError("argument-shape", f"moment must be (D, D); got {s.shape}")
    width = check_integer("width", width, 1, len(s))
    left = (s + s.T) / 2
    total = float(np.trace(left))
    least = degenerate_threshold() * total / len(s)
    kept: list[int] = []
    for _ in range(width):
        size = left.diagonal()
        explained = np.where(size > least, (left**2).sum(axis=0) / np.maximum(size, least or 1.0), 0.0)
        explained[kept] = -1.0
        best = int(np.argmax(explained >= explained.max() * (1.0 - tie_width())))
        if size[best] > least:
            left = left - np.outer(left[:, best], left[best]) / size[best]
        kept.append(best)
    energy = 1.0 - float(np.trace(left)) / total if total > 0.0 else 1.0
    return Axes(np.eye(len(s))[:, sorted(kept)], float(np.clip(energy, 0.0, 1.0)))


def kept_scale(moment: ArrayLike, basis: ArrayLike) -> float:
    """The scale that a norm needs after the cut: ``sqrt(energy D / width)``.

    A norm divides by the root mean square over its channels. After the cut these are ``width`` in place of D and
    hold, on average, the share ``energy`` of the squared length: the result misses this factor.

    Args:
        moment: ``(D, D)`` of the rows that this norm gives, before the cut and before its scale.
        basis: ``(D, width)``, from ``principal_axes``.
    """
    s, axes = as_float(moment, "moment", ndim=2), as_float(basis, "basis", ndim=2)
    if s.shape != (len(axes), len(axes)):
        raise ShdError("argument-shape", f"moment must be (D, D) with D={len(axes)}; got {s.shape}")
    total = float(np.trace(s))
    energy = max(float((axes * (s @ axes)).sum()) / total, 0.0) if total > 0.0 else 1.0
    return float(np.sqrt(energy * axes.shape[0] / axes.shape[1]))


def _zero_mean_axes(size: int) -> Array:
    """``(size, size - 1)``: an orthonormal basis of what is orthogonal to the ones (Helmert's contrasts)."""
    axes = np.zeros((size, size - 1))
    for k in range(1, size):
        axes[:k, k - 1], axes[k, k - 1] = 1.0, -k
        axes[:, k - 1] /= np.sqrt(k * (k + 1))
    return axes
