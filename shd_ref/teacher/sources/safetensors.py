"""Safetensors files: one tensor a column, mapped by the safetensors library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from shd_ref.errors import ShdError
from shd_ref.teacher.sources.arrays import common_length
from shd_ref.teacher.sources.packages import import_package
from shd_ref.teacher.sources.source import IndexedSource, Row

_TYPES: Final = frozenset(["F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"])


class SafetensorsSource(IndexedSource):
    """The tensors of a safetensors file, all with the same first axis.

    Raises:
        ShdError: ``inputs-invalid``, ``dependency-missing``.
    """

    ragged = False

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        library = import_package("safetensors")
        self._errors = OSError, library.SafetensorError
        try:
            self._file = library.safe_open(path, framework="numpy")
            self.columns = tuple(self._file.keys())
            self._slices = {column: self._file.get_slice(column) for column in self.columns}
            shapes = {column: piece.get_shape() for column, piece in self._slices.items()}
        except self._errors as error:
            raise ShdError(
                "inputs-invalid", f"inputs {path} must be a readable .safetensors file: {error}"
            ) from error
        self._count = common_length(self, shapes)

    def __len__(self) -> int:
        return self._count

    def row(self, index: int, columns: Sequence[str]) -> Row:
        """One row of every tensor."""
        for column in columns:
            kind = self._slices[column].get_dtype()
            if kind not in _TYPES:
                raise self.refuse(
                    f"tensors must have a type that NumPy has; got {column} in {kind}: save it as float32", index
                )
        try:
            return {column: np.asarray(self._slices[column][index]) for column in columns}
        except self._errors as error:  # a file that was cut in the meantime
            raise self.refuse(f"tensors must be readable: {error}", index) from error
