"""What labels say, and the rows that count with them (REC-4 to REC-6)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.attention import Array, Mask, as_float, dtype_name
from shd_ref.errors import ShdError
from shd_ref.tolerances import row_sum_tolerance

IGNORED = -100
"""The hard label of a row that does not count (REC-4)."""


class Labels(NamedTuple):
    """Labels of rows ``(...)`` of C classes."""

    classes: NDArray[np.int64]  # (...), the class of each row; of soft labels the first of the largest
    soft: Array | None  # (..., C)
    counted: Mask  # (...)


def as_labels(labels: ArrayLike, shape: tuple[int, ...], *, shift: bool = False) -> Labels:
    """Checked labels for logits of this shape ``(..., C)``, moved to the rows that predict them with ``shift``."""
    given = np.asarray(labels)
    if given.shape == shape and given.dtype.kind not in "iu":
        if shift:
            raise ShdError("argument-shape", "labels must be hard, (B, L), to be shifted; got soft ones", "REC-6")
        return _soft(given)
    if given.dtype.kind not in "iu":
        raise ShdError(
            "argument-dtype", f"labels must be integers, or floats {shape}; got dtype {given.dtype}", "REC-4"
        )
    if given.shape != shape[:-1]:
        raise ShdError(
            "argument-shape", f"labels must have the shape of the rows {shape[:-1]}; got {given.shape}", "REC-4"
        )
    outside = (given != IGNORED) & ((given < 0) | (given >= shape[-1]))
    if outside.any():
        raise ShdError(
            "argument-value",
            f"labels must be 0 to {shape[-1] - 1}, or {IGNORED} where a row does not count; got {given[outside][0]}",
            "REC-4",
        )
    classes = given.astype(np.int64)
    if shift:
        if classes.ndim != 2:
            raise ShdError("argument-shape", f"labels must be (B, L) to be shifted; got {classes.shape}", "REC-6")
        classes = np.concatenate((classes[:, 1:], np.full_like(classes[:, :1], IGNORED)), axis=1)
    counted = classes != IGNORED
    return Labels(np.where(counted, classes, 0), None, counted)


def check_all_count(labels: Labels, recipe: str) -> None:
    """A recipe for images has no rows to leave out (REC-4)."""
    if not labels.counted.all():
        raise ShdError(
            "argument-value", f"labels must be classes, as every row of {recipe} counts; got {IGNORED}", "REC-4"
        )


def _soft(given: NDArray[Any]) -> Labels:
    soft = as_float(given, "labels")
    sums, bound = soft.sum(axis=-1), row_sum_tolerance(dtype_name(given))
    if (soft < 0).any() or (np.abs(sums - 1) > bound).any():
        raise ShdError(
            "not-a-distribution", f"labels must be at least 0 and sum to 1 within {bound:g} in every row", "REC-5"
        )
    return Labels(soft.argmax(axis=-1), soft, np.ones(soft.shape[:-1], dtype=np.bool_))
