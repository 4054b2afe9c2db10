"""Sources of model inputs: rows of arrays, JSON lines, Arrow and Parquet, one at a time in memory."""

from __future__ import annotations

import bisect
import codecs
import functools
import io
import itertools
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
from shd_ref.cache.storage.documents import MAX_JSON_BYTES, parse_json, read_json
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

    ``name`` is for messages, such as the path; ``columns`` are those that a row can have; rows of one column of a
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
        """A note for the user about the last pass over the rows, if any."""
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
    with suppress(OSError):  # of bytes that a full disk did not take; the error is already raised
        file.close()


Arrays: TypeAlias = Mapping[str, NDArray[Any]]


class ArraySource(IndexedSource):
    """Arrays by column, one row per sample."""

    ragged = False

    def __init__(self, arrays: Arrays, name: str = "in memory") -> None:
        self.name = name
        self.columns = tuple(arrays)
        self._arrays = {column: np.asanyarray(array) for column, array in arrays.items()}
        counts = {column: array.shape[0] if array.ndim else 0 for column, array in self._arrays.items()}
        if len(set(counts.values())) != 1 or 0 in counts.values():
            raise self.refuse(f"arrays must share one first axis of at least 1 sample; got {counts}")
        self._count = next(iter(counts.values()))

    def __len__(self) -> int:
        return self._count

    def row(self, index: int, columns: Sequence[str]) -> Row:
        return {column: np.asarray(self._arrays[column][index]) for column in columns}


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


class JsonLinesSource(Source):
    """A file of JSON lines; blank lines are passed over."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        try:
            first = next(self._objects(), None)
        except OSError as error:
            raise inputs_invalid(f"inputs {path} must be a readable file: {error}") from error
        if first is None:
            raise self.refuse("must hold at least 1 sample")
        self.columns = tuple(first)

    def __len__(self) -> int:
        return self._count

    @functools.cached_property
    def _count(self) -> int:
        with _open_lines(self._path) as file:
            lines = iter(functools.partial(file.readline, MAX_JSON_BYTES + 1), b"")
            return sum(1 for line in lines if line.strip())

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        for index, members in enumerate(self._objects()):
            absent = [name for name in columns if name not in members]
            if absent:
                raise self.refuse(f"must hold {', '.join(absent)}; got {', '.join(members) or 'nothing'}", index)
            yield {name: self._value_of(members[name], name, index) for name in columns}

    def _objects(self) -> Iterator[dict[str, Any]]:
        with _open_lines(self._path) as file:
            for number in itertools.count(1):
                line = file.readline(MAX_JSON_BYTES + 1)
                if not line:
                    return
                if not line.strip():
                    continue
                try:
                    members = parse_json(line)
                except ValueError as error:
                    rule = "JSON in UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
                    raise self.refuse(f"line {number} must be {rule}: {error}") from error
                if not isinstance(members, dict):
                    raise self.refuse(f"line {number} must be a JSON object; got {str(members)[:80]}")
                yield members

    def _value_of(self, value: Any, name: str, index: int) -> Any:
        if isinstance(value, str):
            return value
        try:
            array = np.asarray(value)
            if array.dtype.kind not in "iufb":
                raise ValueError(f"got {str(value)[:80]}")
        except ValueError as error:  # also lists of different lengths
            raise self.refuse(f"{name} must be numbers, even lists of numbers, or text; {error}", index) from error
        return array


def _open_lines(path: Path) -> IO[bytes]:
    """A file from its first line on: Windows' editors put a byte order mark before it."""
    file = path.open("rb")
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    return file


STATE_NAME: Final = "state.json"
"""Lists the Arrow files of a data set that ``save_to_disk`` wrote, in order; in the same folder."""

_BLOCK_ROWS: Final = 256  # of Parquet, decoded at a time


class ArrowSource(IndexedSource):
    """Arrow files, memory-mapped, in the order given."""

    def __init__(self, paths: Sequence[Path], name: str) -> None:
        self.name = name
        pa = import_package("pyarrow")
        import_package("pyarrow.ipc")
        try:
            # Mapped tables own no memory but their batches' descriptions.
            batches = [batch for path in paths for batch in _map_table(pa, path).to_batches()]
        except (OSError, ValueError, pa.ArrowException) as error:  # a name that is not text is a ValueError
            raise self.refuse(f"must be readable Arrow files: {error}") from error
        self._batches = [batch for batch in batches if batch.num_rows]
        if not self._batches:
            raise self.refuse("must hold at least 1 sample")
        self.columns = tuple(self._batches[0].schema.names)
        self._valid: set[tuple[int, str]] = set()  # columns of batches
        self._ends = list(itertools.accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def row(self, index: int, columns: Sequence[str]) -> Row:
        """One row, found by its position among all batches."""
        number = bisect.bisect_right(self._ends, index)
        batch = self._batches[number]
        for name in columns:
            if (number, name) not in self._valid and name in batch.schema.names:
                try:
                    batch.column(name).validate(full=True)  # an offset beyond the data would end the process
                except ValueError as error:
                    raise self.refuse(f"must be readable Arrow files: {error}", index) from error
                self._valid.add((number, name))
        return _row_of(self, batch, index - (self._ends[number] - batch.num_rows), index, columns)


class ParquetSource(Source):
    """Parquet files in the order given, decoded a block of rows at a time."""

    def __init__(self, paths: Sequence[Path], name: str) -> None:
        self.name = name
        self._pa, self._library = import_package("pyarrow"), import_package("pyarrow.parquet")
        self._paths = paths
        try:
            metadata = [self._library.read_metadata(path) for path in paths]
            self.columns = tuple(self._library.read_schema(paths[0]).names)
        except (OSError, self._pa.ArrowException) as error:
            raise self.refuse(f"must be readable Parquet files: {error}") from error
        self._count = int(sum(footer.num_rows for footer in metadata))
        if not self._count:
            raise self.refuse("must hold at least 1 sample")

    def __len__(self) -> int:
        return self._count

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """All rows in order; only these columns are read."""
        index = 0
        try:
            for path in self._paths:
                with self._library.ParquetFile(path) as file:
                    for batch in file.iter_batches(_BLOCK_ROWS, columns=list(columns)):
                        for number in range(batch.num_rows):
                            yield _row_of(self, batch, number, index, columns)
                            index += 1
        except (OSError, self._pa.ArrowException) as error:
            raise self.refuse(f"must be readable Parquet files: {error}", index) from error


def open_folder(path: Path) -> Source:
    """A data set of ``save_to_disk``, or a folder of Parquet or Arrow files in order of their names."""
    if (path / STATE_NAME).exists():
        return ArrowSource([path / name for name in _listed_files(path / STATE_NAME)], str(path))
    splits = sorted(state.parent.name for state in path.glob(f"*/{STATE_NAME}"))
    if splits:
        raise inputs_invalid(f"inputs {path} hold the splits {', '.join(splits)}: name one of them")
    for pattern, kind in (("*.parquet", ParquetSource), ("*.arrow", ArrowSource)):
        files = sorted(path.rglob(pattern))
        if files:
            return kind(files, str(path))
    raise inputs_invalid(f"inputs {path} must be a data set of save_to_disk, or hold .parquet or .arrow files")


def _listed_files(state: Path) -> list[str]:
    """The file names in ``state.json``, which comes from elsewhere and must not lead out of its folder."""
    try:
        names = [entry["filename"] for entry in read_json(state)["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise inputs_invalid(f"inputs {state} must list the files of a data set: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise ShdError("path-unsafe", f"{state} must name files of its own folder; got {str(name)[:80]!r}")
    return names


def _map_table(pa: Any, path: Path) -> Any:
    mapped = pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(mapped).read_all()  # what datasets writes
    except pa.ArrowInvalid:
        return pa.ipc.open_file(mapped).read_all()


def _row_of(source: Source, batch: Any, number: int, index: int, columns: Sequence[str]) -> Row:
    try:
        return {name: _value_of(batch.column(name)[number]) for name in columns}
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:  # the last of types that numpy lacks
        raise source.refuse(f"columns must hold numbers, lists of numbers or text: {error}", index) from error


_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64", "bool": "bool"} | {
    f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
"""Arrow's names of number types, and NumPy's."""


def _value_of(scalar: Any) -> str | NDArray[Any]:
    if hasattr(scalar.type, "storage_type"):  # the array types of datasets, where that library is loaded
        scalar = scalar.value
    if not scalar.is_valid:
        raise ValueError("a value is missing (null)")
    kind = scalar.type
    if hasattr(kind, "index_type") or hasattr(kind, "run_end_type"):  # categories and runs hold plain values
        kind = kind.value_type
    elif hasattr(kind, "value_type"):
        return _array_of(scalar.values)
    value = scalar.as_py()
    if isinstance(value, str):
        return value
    # Not kind.to_pandas_dtype(), which needs pandas in older releases of pyarrow.
    name = str(kind)
    if name not in _DTYPES:
        raise TypeError(f"got {kind}")
    return np.asarray(value, dtype=_DTYPES[name])


def _array_of(items: Any) -> NDArray[Any]:
    if items.null_count:
        raise ValueError("a value in a list is missing (null)")
    if hasattr(items.type, "index_type"):
        return _array_of(items.dictionary_decode())
    if hasattr(items.type, "value_type"):
        return np.stack([_array_of(item.values) for item in items])
    array: NDArray[Any] = items.to_numpy(zero_copy_only=False)
    if array.dtype.kind not in "iufb":
        raise TypeError(f"got {items.type}")
    return array
