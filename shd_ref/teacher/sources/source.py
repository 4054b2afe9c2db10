"""A data set of rows, one a sample, in any file or library; a spool for those that can only be read in order."""

from __future__ import annotations

import importlib
import struct
import tempfile
import weakref
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.storage.storage import write_errors
from shd_ref.errors import ShdError

Row: TypeAlias = dict[str, Any]
"""One sample by column: arrays without a batch axis, or text."""


class Source(ABC):
    """A data set that can be read from its beginning, with one row (or block of rows) in memory at a time.

    Attributes:
        name: for messages, such as the path.
        columns: what a row can hold.
        ragged: rows of one column may differ in length, because none is padded.
    """

    name: str
    columns: tuple[str, ...]
    ragged: bool = True

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows; cheap next to reading them."""

    @abstractmethod
    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """All rows in order, with these columns."""

    @property
    def remark(self) -> str | None:
        """What a user should know about the last pass over the rows, if anything."""
        return None

    def refuse(self, problem: str, index: int | None = None) -> ShdError:
        """The error ``inputs-invalid`` that names this source, and the row."""
        return ShdError("inputs-invalid", f"inputs {self.name}{'' if index is None else f', row {index}'}: {problem}")


class IndexedSource(Source):
    """A data set that gives any row at about the cost of its bytes."""

    @abstractmethod
    def row(self, index: int, columns: Sequence[str]) -> Row:
        """One row, with these columns."""

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """All rows in order, with these columns."""
        return (self.row(index, columns) for index in range(len(self)))


def import_package(name: str) -> Any:
    """An optional module of the extra ``inputs``."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ShdError(
            "dependency-missing",
            f"reading these inputs needs the package {name.split('.')[0]}: pip install 'squeezing-heads[inputs]'",
        ) from error


_AXES: Final = struct.Struct("<B")


class Spool:
    """Samples appended one after another and read back by number.

    The file has no name and goes with its process, however that ends. It lies where Python puts temporary files
    (``TMPDIR``); 8 bytes a sample stay in memory.
    """

    def __init__(self, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        self._dtypes = dict(dtypes)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the spool lives)
        self._starts = array("q", [0])
        weakref.finalize(self, self._file.close)

    def append(self, sample: Mapping[str, NDArray[Any]]) -> None:
        """Keep one more sample."""
        parts = []
        for name, dtype in self._dtypes.items():
            values = np.ascontiguousarray(sample[name], dtype)
            parts += [_AXES.pack(values.ndim), struct.pack(f"<{values.ndim}q", *values.shape), values.tobytes()]
        data = b"".join(parts)
        with write_errors(Path(tempfile.gettempdir())):
            self._file.write(data)
        self._starts.append(self._starts[-1] + len(data))

    def read(self, index: int) -> dict[str, NDArray[Any]]:
        """A sample by its number."""
        self._file.seek(self._starts[index])
        data = self._file.read(self._starts[index + 1] - self._starts[index])
        sample, position = {}, 0
        for name, dtype in self._dtypes.items():
            (axes,) = _AXES.unpack_from(data, position)
            shape: Sequence[int] = struct.unpack_from(f"<{axes}q", data, position + 1)
            start = position + 1 + 8 * axes
            count = int(np.prod(shape, dtype=np.int64))
            sample[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
            position = start + count * dtype.itemsize
        return sample
