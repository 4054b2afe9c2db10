"""Object stores through fsspec (CACHE-70 to CACHE-73): a PUT is atomic, and there are no locks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.storage.storage import Fill, PendingFile, Storage
from shd_ref.errors import ShdError, import_package

REQUESTS: Final = 16
"""Requests under way at once."""

COMPARED_BYTES: Final = 2**23
"""Bytes of an upload that are read back and compared at once."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class RemoteStorage(Storage):
    """A prefix of an object store; credentials and endpoints are fsspec's business, never the address's."""

    root: str

    def __init__(self, root: str) -> None:
        if not root.rpartition("://")[2].strip("/"):
            raise ShdError("argument-value", f"a cache's address must name a bucket or folder; got {root!r}")
        self.root = root.rstrip("/")
        self._connections: dict[int, tuple[Any, str]] = {}
        self._connect()

    def locate(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def size(self, name: str) -> int:
        filesystem, path = self._connect(name)
        with self._read_errors(name):
            filesystem.invalidate_cache(path)
            return int(filesystem.info(path)["size"])

    def open(self, name: str) -> Fill:
        return functools.partial(self._fill, name)

    def _fill(self, name: str, start: int, parts: Sequence[NDArray[np.uint8]]) -> int:
        data = self.read_range(name, start, start + sum(map(len, parts)))
        rest = np.frombuffer(data, dtype=np.uint8)
        for buffer in parts:
            piece, rest = rest[: len(buffer)], rest[len(buffer) :]
            buffer[: len(piece)] = piece
        return len(data)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes of an object, fewer where it ends before."""
        if end <= start:
            return b""
        filesystem, path = self._connect(name)
        try:
            with self._read_errors(name):
                return bytes(filesystem.cat_file(path, start=start, end=end))
        except ShdError:
            if self.size(name) > start:
                raise
            return b""  # stores refuse a range that begins beyond the end

    def names(self, folder: str = "") -> list[str]:
        filesystem, prefix = self._connect()
        try:
            with self._read_errors(folder):
                paths = filesystem.find(self._connect(folder)[1], withdirs=False)
        except FileNotFoundError:
            return []
        return sorted(str(path)[len(prefix) :].lstrip("/") for path in paths if len(str(path)) > len(prefix))

    def pending(self, name: str) -> PendingFile:
        """A local temporary file, uploaded on commit."""
        return _RemotePending(self, name)

    def create(self, name: str, data: bytes) -> None:
        """Put an object unless it exists: atomically where the store has conditional writes (CACHE-72)."""
        filesystem, path = self._connect(name)
        with contextlib.suppress(FileExistsError), _store_errors():
            if not filesystem.exists(path):
                filesystem.pipe_file(path, data, mode="create")

    def remove(self, name: str) -> None:
        filesystem, path = self._connect(name)
        with contextlib.suppress(FileNotFoundError), _store_errors():
            filesystem.rm_file(path)

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """In threads, a few at a time, so that not all results wait in memory."""
        waiting = iter(items)
        with ThreadPoolExecutor(REQUESTS) as pool:
            while batch := list(itertools.islice(waiting, REQUESTS)):
                yield from pool.map(function, batch)

    def upload(self, name: str, path: str) -> None:
        filesystem, target = self._connect(name)
        with _store_errors():
            filesystem.put_file(path, target)

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.root, self._connections = state["root"], {}

    def _connect(self, name: str = "") -> tuple[Any, str]:
        """The filesystem of this process and a file's path in it: connections do not survive a fork."""
        process = os.getpid()
        if process not in self._connections:
            self._connections = {process: _open_filesystem(self.root)}
        filesystem, prefix = self._connections[process]
        return filesystem, f"{prefix}/{name}" if name else prefix

    @contextlib.contextmanager
    def _read_errors(self, name: str) -> Iterator[None]:
        """Errors of a store as ``read-failed``; that a file is absent stays a FileNotFoundError."""
        try:
            with _store_errors():
                yield
        except FileNotFoundError:
            raise
        except OSError as error:
            advice = "check the address, the credentials and the network"
            message = f"{self.locate(name)} could not be read: {error}; {advice}"
            raise ShdError("read-failed", message, "CACHE-73") from error


class _RemotePending(PendingFile):
    def __init__(self, storage: RemoteStorage, name: str) -> None:
        self._storage, self._name = storage, name
        self._file = tempfile.NamedTemporaryFile(prefix="shd-upload-")  # noqa: SIM115 (closed by __exit__)

    def write(self, data: Any) -> None:
        self._file.write(data)

    def sync(self) -> None:
        self._file.flush()

    def commit(self) -> None:
        self._storage.upload(self._name, self._file.name)

    def stands(self) -> bool:
        size = os.path.getsize(self._file.name)  # noqa: PTH202 (a name of tempfile's)
        with contextlib.suppress(FileNotFoundError), open(self._file.name, "rb") as file:  # noqa: PTH123 (as above)
            spans = [(start, min(start + COMPARED_BYTES, size)) for start in range(0, size, COMPARED_BYTES)]
            return self._storage.size(self._name) == size and all(
                file.read(end - start) == self._storage.read_range(self._name, start, end) for start, end in spans
            )
        return False

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _open_filesystem(root: str) -> tuple[Any, str]:
    remedy = "pip install '.[remote]' (in a checkout) for s3://, or the package that fsspec names"
    fsspec = import_package("fsspec.core", f"{root} needs the package fsspec; {remedy}")
    try:
        filesystem, prefix = fsspec.url_to_fs(root, use_listings_cache=False)
    except ImportError as error:
        raise ShdError("dependency-missing", f"{root} needs a package: {error}; {remedy}") from error
    except ValueError as error:
        message = f"a cache must be a folder or an address that fsspec supports: {error}"
        raise ShdError("argument-value", message) from error
    return filesystem, str(prefix).rstrip("/")


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Errors of a store's package as the operating system's."""
    try:
        yield
    except (OSError, ShdError):
        raise
    except Exception as error:  # each store has its own classes, of packages that need not be here
        raise OSError(f"{type(error).__name__}: {error}") from error
