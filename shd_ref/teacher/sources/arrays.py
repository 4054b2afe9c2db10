"""What a source of model inputs is, and rows of arrays: in memory, safetensors, numpy.savez."""

from __future__ import annotations

import io
import math
import re
import shutil
import struct
import tempfile
import weakref
import zipfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

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
        weakref.finalize(self, _close, self._file)

    def append(self, sample: Mapping[str, NDArray[Any]]) -> None:
        buffer = io.BytesIO()
        for name, dtype in self._dtypes.items():
            np.lib.format.write_array(buffer, np.asarray(sample[name], dtype), allow_pickle=False)
        data = buffer.getvalue()
        with write_errors(Path(tempfile.gettempdir())):
            self._file.write(data)
        self._starts.append(self._starts[-1] + len(data))

    def read(self, index: int) -> dict[str, NDArray[Any]]:
        self._file.seek(self._starts[index])
        data = io.BytesIO(self._file.read(self._starts[index + 1] - self._starts[index]))
        return {name: np.lib.format.read_array(data, allow_pickle=False) for name in self._dtypes}


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):  # of bytes that a full disk did not take, as was told
        file.close()


Arrays: TypeAlias = Mapping[str, NDArray[Any]]


class ArraySource(IndexedSource):
    """Arrays by column, one row per sample."""

    ragged = False

    def __init__(self, arrays: Arrays, name: str = "in memory") -> None:
        self.name = name
        self.columns = tuple(arrays)
        self._arrays = {column: np.asanyarray(array) for column, array in arrays.items()}
        self._count = common_length(self, {column: array.shape for column, array in self._arrays.items()})

    def __len__(self) -> int:
        return self._count

    def row(self, index: int, columns: Sequence[str]) -> Row:
        return {column: np.asarray(self._arrays[column][index]) for column in columns}


def common_length(source: Source, shapes: Mapping[str, Sequence[int]]) -> int:
    """The number of rows that all arrays share; ``inputs-invalid`` where they do not."""
    counts = {column: shape[0] if len(shape) else 0 for column, shape in shapes.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise source.refuse(f"arrays must share one first axis of at least 1 sample; got {counts}")
    return next(iter(counts.values()))


_TYPES: Final = frozenset(["F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"])


class SafetensorsSource(IndexedSource):
    """The tensors of a safetensors file, all with the same first axis."""

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
            raise inputs_invalid(f"inputs {path} must be a readable .safetensors file: {error}") from error
        self._count = common_length(self, shapes)

    def __len__(self) -> int:
        return self._count

    def row(self, index: int, columns: Sequence[str]) -> Row:
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


_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")  # signature, ..., length of the name, of the extra field
_HEADERS: Final = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def open_npz(path: Path) -> Source:
    """The arrays of an npz file, mapped where they are stored, or in a temporary copy; pickles are refused."""
    arrays: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name in arrays:
                    raise ValueError("two of its arrays have one name")
                with archive.open(info) as stream, path.open("rb") as file, tempfile.TemporaryFile() as copy:
                    if info.compress_type == zipfile.ZIP_STORED:
                        file.seek(info.header_offset)
                        _, *lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                        file.seek(sum(lengths), io.SEEK_CUR)
                        arrays[name] = _map_array(file, info)
                    else:
                        shutil.copyfileobj(stream, copy)
                        copy.seek(0)
                        arrays[name] = _map_array(copy, info)
    except Exception as error:  # zipfile, zlib and numpy's parser of headers raise what they meet
        raise inputs_invalid(
            f"inputs {path} must be a readable .npz file of plain arrays (numpy.savez): {error}"
        ) from error
    return ArraySource(arrays, str(path))


def _map_array(file: IO[bytes], info: zipfile.ZipInfo) -> NDArray[Any]:
    """An array file that begins where a file stands; a mapping outlives its file, open or not."""
    begin = file.tell()
    shape, is_fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
    start = file.tell()
    is_shape = all(type(size) is int and size >= 0 for size in shape)
    if dtype.hasobject or not is_shape or start - begin + math.prod(shape) * dtype.itemsize != info.file_size:
        got = f"{info.file_size} bytes for {str(shape)[:80]} of {dtype}"
        raise ValueError(f"{info.filename} must hold the numbers of its shape; got {got}")
    if 0 in shape or not shape:
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", start, shape, "F" if is_fortran else "C")
