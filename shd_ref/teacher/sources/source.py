"""A data set of rows, one per sample, in any file or library; a spool for those that can only be read in order."""

from __future__ import annotations

import io
import re
import tempfile
import weakref
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref import errors
from shd_ref.cache.storage.storage import write_errors
from shd_ref.errors import ShdError, inputs_invalid

Row: TypeAlias = dict[str, Any]
"""One sample by column: arrays without a batch axis, or text."""


@contextmanager
def named_inputs(argument: str) -> Iterator[None]:
    """Let errors about inputs name the argument that they were given as."""
    try:
        yield
    except ShdError as error:
        error.args = (re.sub(r"^inputs\b", argument, str(error)),)
        raise


class Source(ABC):
    """A data set that can be read from its beginning, with one row (or block of rows) in memory at a time.

    ``name`` is for messages, such as the path; ``columns`` are what a row can hold; rows of one column of a
    ``ragged`` source may differ in length, because none is padded; ``made_from`` are columns that others say again.
    """

    name: str
    columns: tuple[str, ...]
    ragged: bool = True
    made_from: tuple[str, ...] = ()

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
        return inputs_invalid(f"inputs {self.name}{'' if index is None else f', row {index}'}: {problem}")


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
    remedy = f"reading these inputs needs the package {name.split('.')[0]}: pip install '.[inputs]' (in a checkout)"
    return errors.import_package(name, remedy)


class Spool:
    """Samples appended to a nameless temporary file and read back by number; 8 bytes of each stay in memory."""

    def __init__(self, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        self._dtypes = dict(dtypes)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the spool lives)
        self._starts = array("q", [0])
        weakref.finalize(self, self._file.close)

    def append(self, sample: Mapping[str, NDArray[Any]]) -> None:
        """Keep one more sample."""
        buffer = io.BytesIO()
        for name, dtype in self._dtypes.items():
            np.lib.format.write_array(buffer, np.asarray(sample[name], dtype), allow_pickle=False)
        data = buffer.getvalue()
        with write_errors(Path(tempfile.gettempdir())):
            self._file.write(data)
        self._starts.append(self._starts[-1] + len(data))

    def read(self, index: int) -> dict[str, NDArray[Any]]:
        """A sample by its number."""
        self._file.seek(self._starts[index])
        data = io.BytesIO(self._file.read(self._starts[index + 1] - self._starts[index]))
        return {name: np.lib.format.read_array(data, allow_pickle=False) for name in self._dtypes}
