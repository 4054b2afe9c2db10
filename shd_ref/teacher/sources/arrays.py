"""What a source of model inputs is, and rows of arrays: in memory, safetensors, numpy.savez.

They are mapped where they are stored as they are, else streamed.
"""

from __future__ import annotations

import io
import math
import re
import struct
import tempfile
import weakref
import zipfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple, TypeAlias

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
_SUFFIX: Final = ".npy"


class _Member(NamedTuple):
    info: zipfile.ZipInfo
    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]
    offset: int  # of the values, after the member's own header


def open_npz(path: Path) -> Source:
    """The rows of an npz file; pickled objects are refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {
                info.filename.removesuffix(_SUFFIX): _read_member(archive, info) for info in archive.infolist()
            }
            if len(members) < len(archive.infolist()):
                raise ValueError("two of its arrays have one name")
    except Exception as error:  # zipfile, zlib and numpy's parser of headers raise what they meet
        raise inputs_invalid(
            f"inputs {path} must be a readable .npz file of plain arrays (numpy.savez): {error}"
        ) from error
    if any(member.info.compress_type != zipfile.ZIP_STORED for member in members.values()):
        return _CompressedNpz(path, members)
    return ArraySource({name: _map_member(path, member) for name, member in members.items()}, str(path))


class _CompressedNpz(Source):
    """An archive of numpy.savez_compressed, decompressed row by row."""

    ragged = False

    def __init__(self, path: Path, members: dict[str, _Member]) -> None:
        self.name = str(path)
        self.columns = tuple(members)
        self._path = path
        self._members = members
        self._count = common_length(self, {name: member.shape for name, member in members.items()})
        for name, member in members.items():
            if member.fortran_order and len(member.shape) > 1:
                raise self.refuse(f"{name} must be in C order where it is compressed: save it with numpy.savez")

    def __len__(self) -> int:
        return self._count

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        with zipfile.ZipFile(self._path) as archive:
            streams = {name: archive.open(self._members[name].info) for name in columns}
            for name, stream in streams.items():
                stream.read(self._members[name].offset)
            for index in range(len(self)):
                yield {name: self._next_row(stream, self._members[name], index) for name, stream in streams.items()}

    def _next_row(self, stream: IO[bytes], member: _Member, index: int) -> NDArray[Any]:
        shape = member.shape[1:]
        try:
            data = stream.read(math.prod(shape) * member.dtype.itemsize)
            return np.frombuffer(data, dtype=member.dtype).reshape(shape)
        except Exception as error:  # a damaged stream; zlib.error is no OSError
            raise self.refuse(f"{member.info.filename} must be what its header says: {error}", index) from error


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    with archive.open(info) as stream:
        shape, fortran_order, dtype = _read_header(stream, info.filename)
        header_size = stream.tell()
    count = math.prod(shape) * dtype.itemsize
    # Checked before anything is allocated by it; a member's size is the archive's own word.
    if not all(type(size) is int and size >= 0 for size in shape) or header_size + count != info.file_size:
        raise ValueError(
            f"{info.filename} must hold the numbers of its shape {str(shape)[:80]}, {count} bytes; "
            f"got {info.file_size - header_size}"
        )
    return _Member(info, shape, fortran_order, dtype, header_size)


def _read_header(stream: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"{name} has npy format {version}")
    shape, fortran_order, dtype = readers[version](stream)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects")
    return shape, fortran_order, dtype


def _map_member(path: Path, member: _Member) -> NDArray[Any]:
    with path.open("rb") as file:
        file.seek(member.info.header_offset)
        _, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = member.info.header_offset + _LOCAL_HEADER.size + name_length + extra_length + member.offset
    if 0 in member.shape or not member.shape:
        return np.empty(member.shape, member.dtype)
    order: Literal["F", "C"] = "F" if member.fortran_order else "C"
    try:
        mapped: NDArray[Any] = np.memmap(path, member.dtype, "r", start, member.shape, order)
    except (OSError, ValueError) as error:
        raise inputs_invalid(f"inputs {path}: {member.info.filename} ends too early: {error}") from error
    return mapped
