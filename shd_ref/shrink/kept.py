"""Which layers, axes and neurons a smaller student keeps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shd_ref.attention import Array
from shd_ref.errors import need
from shd_ref.integers import as_index
from shd_ref.shrink.heads import leading_phases
from shd_ref.tolerances import tie_width


def kept_layers(num_teacher_layers: int, layers: int | Iterable[int]) -> tuple[int, ...]:
    """The teacher layers that a student's are copies of, in order.

    Args:
        num_teacher_layers: L_t, at least 1.
        layers: how many are kept, layer ``floor(i (L_t - 1) / (L_s - 1) + 1/2)`` for each i (of one the last); or the
            rising list itself.

    Raises:
        ShdError: ``layers-invalid``.
    """
    numbers: tuple[int, ...] = ()
    try:
        if isinstance(layers, Iterable):
            numbers = tuple(as_index(layer) for layer in layers)
        elif (count := as_index(layers)) == 1:
            numbers = (num_teacher_layers - 1,)
        elif 1 < count <= num_teacher_layers:
            steps = count - 1
            numbers = tuple((2 * i * (num_teacher_layers - 1) + steps) // (2 * steps) for i in range(count))
    except TypeError:
        numbers = ()
    rising = bool(numbers) and list(numbers) == sorted(set(numbers))
    fits = rising and numbers[0] >= 0 and numbers[-1] < num_teacher_layers
    rule = f"be a number of 1..{num_teacher_layers}, or a rising list of teacher layers 0..{num_teacher_layers - 1}"
    need(fits, "layers-invalid", "layers", rule, repr(layers))
    return numbers


def principal_axes(moment: Array, width: int, norm: str = "rms") -> Array:
    """The axes B ``(D, width)`` that hold most of a stream's second moment ``(D, D)``; the stream x becomes ``x B``.

    The moment is the mean of ``y^T y`` over normalised rows y. ``"layer"`` keeps ``width - 1`` axes orthogonal to the
    vector of ones, laid out over ``width`` channels whose mean is zero: a LayerNorm finds nothing to subtract.

    Source: SliceGPT's rotation (arXiv 2401.15024), with one rotation for all layers.
    """
    subspace = np.eye(len(moment)) if norm == "rms" else _zero_mean_axes(len(moment))
    values, vectors = np.linalg.eigh(subspace.T @ ((moment + moment.T) / 2) @ subspace)
    vectors = subspace @ vectors[:, np.argsort(-values, kind="stable")[: width if norm == "rms" else width - 1]]
    basis: Array = vectors * np.real(leading_phases(vectors))
    return basis if norm == "rms" else basis @ _zero_mean_axes(width).T


def kept_scale(moment: Array, basis: Array) -> float:
    """The scale that a norm needs after the cut: ``sqrt(energy D / width)``.

    A norm divides by the root mean square over its channels. After the cut these are ``width`` in place of D and
    hold, on average, the share ``energy`` of the squared length: the result misses this factor. ``moment`` ``(D, D)``
    is of the rows that this norm gives before its scale.
    """
    total = float(np.trace(moment))
    energy = max(float((basis * (moment @ basis)).sum()) / total, 0.0) if total > 0.0 else 1.0
    return float(np.sqrt(energy * basis.shape[0] / basis.shape[1]))


def _zero_mean_axes(size: int) -> Array:
    """``(size, size - 1)``: an orthonormal basis of what is orthogonal to the ones (Helmert's contrasts)."""
    axes = np.zeros((size, size - 1))
    for k in range(1, size):
        axes[:k, k - 1], axes[k, k - 1] = 1.0, -k
        axes[:, k - 1] /= np.sqrt(k * (k + 1))
    return axes


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
    chosen = np.flatnonzero(above | (near & (np.cumsum(near) <= count - above.sum())))
    return tuple(int(number) for number in chosen)
