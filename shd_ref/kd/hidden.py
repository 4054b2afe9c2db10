"""The loss on hidden states (``specs/kd.md``, chapter HID) and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, Mask, as_float, as_mask, check_option
from shd_ref.errors import ShdError
from shd_ref.loss import Layers, as_layers

DISTANCES: tuple[str, ...] = ("mse", "cosine", "normalized_mse")
REDUCTIONS: tuple[str, ...] = ("sum", "mean")


class HiddenKeywords(TypedDict, total=False):
    """The keywords of ``hidden_loss``, which its gradient shares."""

    distance: str
    loss_mask: ArrayLike | None
    reduction: str


@dataclass(frozen=True)
class HiddenRows:
    """One layer: both sides, which rows count, and the weight of a row in the loss."""

    student: Array  # (..., D)
    teacher: Array  # (..., D)
    counted: Mask  # (...)
    weight: float


def hidden_loss(student_hidden: Layers, teacher_hidden: Layers, **keywords: Unpack[HiddenKeywords]) -> float:
    """The distance between hidden states: the mean over counted rows, the sum over layers (HID-1 to HID-5).

    Args:
        student_hidden: ``(..., D)``, or a list with one a layer; a projection to the teacher's width is the caller's.
        teacher_hidden: the same shape(s).
        **keywords:
            distance: ``"mse"`` (mean over features), ``"cosine"`` (one less the cosine), or ``"normalized_mse"``
                (squared distance of the unit vectors).
            loss_mask: boolean, the shape of the rows, for all layers; True = counts.
            reduction: ``"sum"`` over layers or ``"mean"``.

    Returns:
        The loss; 0 where no row counts.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    distance = keywords.get("distance", "mse")
    layers = _check_layers(student_hidden, teacher_hidden, **keywords)
    terms = [layer.weight * _terms(layer, distance)[layer.counted].sum() for layer in layers]
    return float(sum(terms))


def hidden_loss_gradient(
    student_hidden: Layers, teacher_hidden: Layers, **keywords: Unpack[HiddenKeywords]
) -> Array | list[Array]:
    """The gradient of ``hidden_loss`` with respect to the student's hidden states (HID-6 to HID-8).

    Args:
        student_hidden: those of ``hidden_loss``.
        teacher_hidden: those of ``hidden_loss``.
        **keywords: those of ``hidden_loss``, with its defaults.

    Returns:
        One array, or a list with one array a layer, shaped as the student's; 0 on rows that do not count.

    Raises:
        ShdError: as ``hidden_loss``.
    """
    distance = keywords.get("distance", "mse")
    gradients = []
    for layer in _check_layers(student_hidden, teacher_hidden, **keywords):
        if distance == "mse":
            slope = 2.0 * (layer.student - layer.teacher) / layer.student.shape[-1]
        else:
            (student, norm), (teacher, _) = _unit(layer.student), _unit(layer.teacher)
            cosine = (student * teacher).sum(axis=-1, keepdims=True)
            slope = (cosine * student - teacher) / np.where(norm == 0.0, np.inf, norm)
            slope *= 2.0 if distance == "normalized_mse" else 1.0
        gradients.append(np.where(layer.counted[..., None], layer.weight * slope, 0.0))
    return gradients if isinstance(student_hidden, list | tuple) else gradients[0]


def _terms(layer: HiddenRows, distance: str) -> Array:
    """The term of every row (HID-3)."""
    if distance == "mse":
        terms: Array = ((layer.student - layer.teacher) ** 2).mean(axis=-1)
        return terms
    student, teacher = _unit(layer.student)[0], _unit(layer.teacher)[0]
    if distance == "cosine":
        cosines: Array = np.maximum(1.0 - (student * teacher).sum(axis=-1), 0.0)  # rounding can leave -1e-16
        return cosines
    squares: Array = ((student - teacher) ** 2).sum(axis=-1)
    return squares


def _unit(vectors: Array) -> tuple[Array, Array]:
    """Unit vectors and norms ``(..., 1)``; zero vectors stay zero. No square over- or underflows (HID-9)."""
    largest = np.abs(vectors).max(axis=-1, keepdims=True, initial=0.0)
    scaled = vectors / np.where(largest == 0.0, 1.0, largest)
    length = np.sqrt((scaled**2).sum(axis=-1, keepdims=True))
    return scaled / np.where(length == 0.0, 1.0, length), largest * length


def _check_layers(
    student_hidden: Layers,
    teacher_hidden: Layers,
    *,
    distance: str = "mse",
    loss_mask: ArrayLike | None = None,
    reduction: str = "sum",
) -> list[HiddenRows]:
    check_option("distance", distance, DISTANCES, "HID-3")
    check_option("reduction", reduction, REDUCTIONS, "HID-4")
    students, teachers = as_layers(student_hidden=student_hidden, teacher_hidden=teacher_hidden)
    layers = []
    for number, (given, wanted) in enumerate(zip(students, teachers, strict=True)):
        student = as_float(given, "student_hidden", layer=number)
        teacher = as_float(wanted, "teacher_hidden", layer=number)
        if student.ndim < 2 or student.shape != teacher.shape:
            raise ShdError(
                "argument-shape",
                f"student_hidden and teacher_hidden must share one shape (..., D) in layer {number}; "
                f"got {student.shape} and {teacher.shape}: project the student's where widths differ",
                "HID-1",
            )
        rows = student.shape[:-1]
        counted = np.ones(rows, np.bool_) if loss_mask is None else as_mask(loss_mask, "loss_mask", rows)
        scale = len(students) if reduction == "mean" else 1
        layers.append(HiddenRows(student, teacher, counted, 1.0 / (max(int(counted.sum()), 1) * scale)))
    return layers
