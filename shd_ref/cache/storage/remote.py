"""Object stores through fsspec (CACHE-70 to CACHE-73): a PUT is atomic, and there are no locks."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.storage.storage import PendingFile, RangeFile, Storage
from shd_ref.errors import ShdError

REQUESTS: Final = 16
"""Requests under way at once while a cache is opened or checked."""

COMPARED_BYTES: Final = 2**23
"""Bytes of an upload read back at once."""

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
        """The file's address."""
        return f"{self.root}/{name}" if name else self.root

    def size(self, name: str) -> int:
        """Size of an object; a store has neither links nor devices."""
        return int(self._info(name)["size"])

    def read(self, name: str) -> bytes:
        """A whole object."""
        return self._read(name, None, None)

    def open(self, name: str) -> RangeFile:
        """Ranges of an object, each a request."""
        return _RemoteFile(self, name)

    def names(self, folder: str = "") -> list[str]:
        """Every object below a prefix."""
        filesystem, prefix = self._connect()
        base = f"{prefix}/{folder}" if folder else prefix
        try:
            with self._reads(folder):
                paths = filesystem.find(base, withdirs=False)
        except FileNotFoundError:
            return []
        return sorted(str(path)[len(prefix) :].lstrip("/") for path in paths if len(str(path)) > len(prefix))

    def prepare(self) -> None:
        """Nothing: a prefix needs no making."""

    def remove_stale(self) -> None:
        """Nothing: an upload that was not completed is not an object. The store's own rules expire its parts."""

    def is_leftover(self, name: str) -> bool:
        """Nothing is."""
        return False

    def pending(self, name: str) -> PendingFile:
        """A local temporary file, uploaded on commit."""
        return _RemotePending(self, name)

    def create(self, name: str, data: bytes) -> None:
        """Put an object unless it exists: atomically where the store has conditional writes (CACHE-72)."""
        filesystem, prefix = self._connect()
        with contextlib.suppress(FileExistsError), _store_errors():
            if not filesystem.exists(f"{prefix}/{name}"):
                filesystem.pipe_file(f"{prefix}/{name}", data, mode="create")

    def remove(self, name: str) -> None:
        """Delete an object, if it exists."""
        filesystem, prefix = self._connect()
        with contextlib.suppress(FileNotFoundError), _store_errors():
            filesystem.rm_file(f"{prefix}/{name}")

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: a store has no locks."""
        return contextlib.nullcontext()

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """In threads, a few at a time, so that not all results wait in memory."""
        waiting = iter(items)
        with ThreadPoolExecutor(REQUESTS) as pool:
            while some := list(itertools.islice(waiting, REQUESTS)):
                yield from pool.map(function, some)

    def upload(self, name: str, path: str) -> None:
        """Put a local file as an object."""
        filesystem, prefix = self._connect()
        with _store_errors():
            filesystem.put_file(path, f"{prefix}/{name}")

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes of an object, fewer where it ends before."""
        if end <= start:
            return b""
        try:
            return self._read(name, start, end)
        except ShdError:
            if self.size(name) > start:
                raise
            return b""  # stores refuse a range that begins beyond the end

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.root = state["root"]
        self._connections = {}

    def _connect(self) -> tuple[Any, str]:
        """The filesystem of this process and the prefix in it: connections do not survive a fork."""
        process = os.getpid()
        if process not in self._connections:
            self._connections = {process: _open_filesystem(self.root)}
        return self._connections[process]

    def _info(self, name: str) -> Any:
        filesystem, prefix = self._connect()
        with self._reads(name):
            filesystem.invalidate_cache(f"{prefix}/{name}")
            return filesystem.info(f"{prefix}/{name}")

    def _read(self, name: str, start: int | None, end: int | None) -> bytes:
        filesystem, prefix = self._connect()
        with self._reads(name):
            data: bytes = filesystem.cat_file(f"{prefix}/{name}", start=start, end=end)
        return data

    @contextlib.contextmanager
    def _reads(self, name: str) -> Iterator[None]:
        try:
            with _store_errors():
                yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ShdError(
                "read-failed",
                f"{self.locate(name)} could not be read: {error}; check the address, the credentials and the network",
                "CACHE-73",
            ) from error


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
        try:
            return self._equals_object()
        except FileNotFoundError:
            return False

    def _equals_object(self) -> bool:
        """Whether the object holds these bytes, by reading all of it back."""
        size = os.path.getsize(self._file.name)  # noqa: PTH202 (a name of tempfile's)
        if self._storage.size(self._name) != size:
            return False
        with open(self._file.name, "rb") as file:  # noqa: PTH123 (as above)
            for start in range(0, size, COMPARED_BYTES):
                piece = file.read(COMPARED_BYTES)
                if self._storage.read_range(self._name, start, start + len(piece)) != piece:
                    return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class _RemoteFile(RangeFile):
    def __init__(self, storage: RemoteStorage, name: str) -> None:
        self._storage, self._name = storage, name

    def read(self, start: int, end: int) -> NDArray[np.uint8]:
        return np.frombuffer(bytearray(self._storage.read_range(self._name, start, end)), dtype=np.uint8)


def _open_filesystem(root: str) -> tuple[Any, str]:
    remedy = "pip install 'squeezing-heads[remote]' (s3://), or the package that fsspec names"
    try:
        fsspec = importlib.import_module("fsspec.core")
        filesystem, prefix = fsspec.url_to_fs(root, use_listings_cache=False)
    except ImportError as error:
        raise ShdError("dependency-missing", f"{root} needs a package: {error}; {remedy}") from error
    except ValueError as error:
        raise ShdError(
            "argument-value", f"a cache must be a folder or an address that fsspec knows: {error}"
        ) from error
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
