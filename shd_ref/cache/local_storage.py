"""Local folders: files that appear whole or not at all (CACHE-70 to CACHE-75).

A file is written under a temporary name, synchronised and renamed. Its writer holds an advisory lock on it
all the while, so another process can tell a dead writer's leftovers from work in progress, on any host that
shares the file system and whatever the process ids are.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.layout import LOCK_NAME
from shd_ref.cache.storage import PendingFile, RangeFile, Storage
from shd_ref.errors import ShdError

TEMP_SUFFIX: Final = ".tmp"
TEMP_FORM: Final = re.compile(r"\.(manifest\.json|SEALED\.json|[0-9]{6}\.(json|safetensors))\.[0-9a-f]{16}\.tmp")
"""Names of temporary files; nothing else in the folder is ever removed."""

MAX_PARTS: Final = 1024
"""Places that one call may fill, on every system there is."""

FILE_FORM: Final = re.compile(r"manifest\.json|SEALED\.json|[0-9]{6}\.(json|safetensors)")
"""Names of a cache's files, wherever they lie."""


class LocalStorage(Storage):
    """A folder on a file system.

    Args:
        root: its path.
    """

    root: Path

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def locate(self, name: str) -> Path:
        """The file's path."""
        return self.root / name

    def size(self, name: str) -> int:
        """Size of a regular file, refusing links and devices (CACHE-8)."""
        with self.reads(name):
            status = os.lstat(self.root / name)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError
        if not stat.S_ISREG(status.st_mode):
            message = f"{self.root / name} must be a regular file, not a link or a device"
            raise ShdError("path-unsafe", message, "CACHE-8")
        return status.st_size

    def read(self, name: str) -> bytes:
        """A whole file."""
        with self.reads(name):
            return (self.root / name).read_bytes()

    def open(self, name: str) -> RangeFile:
        """The file's descriptor."""
        return _LocalFile(self, name)

    def names(self, folder: str = "") -> list[str]:
        """Every file below a folder, links included, and folders that have the name of a file."""
        found: list[str] = []
        if not self.root.is_dir():
            return found
        with self.reads(folder or "."), contextlib.suppress(FileNotFoundError):
            for place, folders, files in os.walk(self.root / folder, onerror=_raise):
                links = [name for name in folders if (Path(place) / name).is_symlink()]
                misnamed = [name for name in folders if FILE_FORM.fullmatch(name) and name not in links]
                found += [(Path(place) / name).relative_to(self.root).as_posix() for name in files + links + misnamed]
        return sorted(found)

    def exists(self, name: str) -> bool:
        """Whether there is such a file; none where a file is in the folder's own place."""
        return self.root.is_dir() and super().exists(name)

    def check_place(self, name: str) -> None:
        """Refuse a folder in the file's place, and files in its folders' places."""
        with contextlib.suppress(FileNotFoundError), self.reads(name):
            if stat.S_ISDIR(os.lstat(self.root / name).st_mode):
                raise IsADirectoryError

    def links(self) -> list[str]:
        """Names that are links."""
        return [name for name in self.names() if (self.root / name).is_symlink()]

    def prepare(self) -> None:
        """Create the folder."""
        for path in (self.root, *self.root.parents):
            if path.exists() and not path.is_dir():
                message = f"{path} must be a folder; it is a file: choose another place, or move it away"
                raise ShdError("cache-exists", message, "CACHE-70")
        _make_folder(self.root)

    def remove_stale(self) -> None:
        """Remove temporary files whose writers are gone; those of living writers are locked and stay."""
        with self.exclusive():
            for path in self.root.rglob(f".*{TEMP_SUFFIX}"):
                if TEMP_FORM.fullmatch(path.name):
                    _remove_if_stale(path)

    def is_leftover(self, name: str) -> bool:
        """The lock and temporary files."""
        return name == LOCK_NAME or bool(TEMP_FORM.fullmatch(name))

    def pending(self, name: str) -> PendingFile:
        """A temporary file beside the final one."""
        return _LocalPending(self.root / name, self)

    def create(self, name: str, data: bytes) -> None:
        """Write a file under the lock, unless it exists."""
        with self.pending(name) as file:
            file.write(data)
            file.sync()
            with self.exclusive():
                if not (self.root / name).exists():  # a racing writer may have been first
                    file.commit()

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        (self.root / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude other writers of the cache; the system lets go when a process dies."""
        descriptor = os.open(self.root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def reads(self, name: str) -> Iterator[None]:
        """Turn what the operating system refuses to read into an error that names the file (CACHE-85)."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._refuse(self.root / name, error) from error

    def _refuse(self, path: Path, error: OSError) -> ShdError:
        if isinstance(error, NotADirectoryError):
            if not self.root.is_dir():
                message = f"{self.root} must be a folder that holds a cache; it is none: name the cache's folder"
                return ShdError("cache-incomplete", message, "CACHE-85")
            blocking = next(part for part in (path, *path.parents) if part.exists() and not part.is_dir())
            message = f"{blocking} must be a folder; it is a file: move it away, then restore the folder"
            return ShdError("cache-corrupt", message, "CACHE-85")
        if isinstance(error, IsADirectoryError):
            message = f"{path} must be a file; it is a folder: move it away, then restore the file or write it anew"
            return ShdError("cache-corrupt", message, "CACHE-85")
        message = f"{path} could not be read: {error.strerror or error}: regain access to it, or restore it"
        return ShdError("read-failed", message, "CACHE-85")


class _LocalPending(PendingFile):
    def __init__(self, path: Path, storage: LocalStorage) -> None:
        self._path = path
        self._temp = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMP_SUFFIX}")
        _make_folder(path.parent)
        with storage.exclusive():  # covers the moment between creating and locking the file
            self._descriptor = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def write(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def commit(self) -> None:
        self._temp.rename(self._path)
        _sync_folder(self._path.parent)

    def stands(self) -> bool:
        return True  # commits are made under the lock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._temp.unlink(missing_ok=True)  # already gone after a commit
        os.close(self._descriptor)


class _LocalFile(RangeFile):
    """Reads name their position, so processes and threads may share the descriptor."""

    def __init__(self, storage: LocalStorage, name: str) -> None:
        self._reads = functools.partial(storage.reads, name)
        with self._reads():
            self._descriptor = os.open(storage.locate(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def read(self, start: int, end: int) -> NDArray[np.uint8]:
        data = np.empty(end - start, dtype=np.uint8)
        return data[: self.read_into(start, [data])]

    def read_into(self, start: int, parts: Sequence[NDArray[np.uint8]]) -> int:
        rest, place = [part.data for part in parts], start
        with self._reads():
            while rest:
                count = os.preadv(self._descriptor, rest[:MAX_PARTS], place)
                if not count:
                    break
                place += count
                while rest and count >= len(rest[0]):
                    count -= len(rest.pop(0))
                if count:  # one read may bring less than was asked for
                    rest[0] = rest[0][count:]
        return place - start

    def __del__(self) -> None:
        # Not when the cache of open files drops it: another thread may still be reading.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def _raise(error: OSError) -> None:
    """What cannot be listed is no empty folder."""
    raise error


def _make_folder(path: Path) -> None:
    """Create a folder (and its parents), and make it survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync_folder(folder.parent)


def _sync_folder(path: Path) -> None:
    """Make renames and removals in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_stale(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # its writer has just finished
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return  # its writer is at work
    finally:
        os.close(descriptor)
