"""Rows of arrays: in memory, or mapped from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.sources.source import IndexedSource, Row

Arrays: TypeAlias = Mapping[str, NDArray[Any]]


class ArraySource(IndexedSource):
    """Arrays by column, one row a sample.

    Args:
        arrays: all with the same first axis of at least one sample.
        name: for messages.

    Raises:
        ShdError: ``inputs-invalid``.
    """

    ragged = False

    def __init__(self, arrays: Arrays, name: str = "in memory") -> None:
        self.name = name
        self.columns = tuple(arrays)
        self._arrays = {column: np.asanyarray(array) for column, array in arrays.items()}
        self._count = common_length(self, {column: array.shape for column, array in self._arrays.items()})

    def __len__(self) -> int:
        return self._count

    def row(self, index: int, columns: Sequence[str]) -> Row:
        """One row of every array."""
        return {column: np.asarray(self._arrays[column][index]) for column in columns}


def common_length(source: IndexedSource, shapes: Mapping[str, Sequence[int]]) -> int:
    """The number of rows that all arrays share; ``inputs-invalid`` where they do not."""
    counts = {column: shape[0] if len(shape) else 0 for column, shape in shapes.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise source.refuse(f"arrays must share one first axis of at least 1 sample; got {counts}")
    return next(iter(counts.values()))
