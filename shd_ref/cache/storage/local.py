"""Local folders: files that appear whole or not at all (CACHE-60 to CACHE-66).

A writer holds an advisory lock on its temporary file until that is renamed, so any host can tell leftovers from work
in progress. Paths below the cache's folder are opened one component at a time, without following links (CACHE-7). A
writer keeps its folder open, so that nothing is written into another folder that replaces it (CACHE-66).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import secrets
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.storage.drafts import sync
from shd_ref.cache.storage.storage import LOCK_NAME, Fill, PendingFile, Storage
from shd_ref.errors import ShdError

TEMP_SUFFIX: Final = ".tmp"
TEMP_FORM: Final = re.compile(
    r"\.(manifest\.json|SEALED\.json|teacher_head\.safetensors|[0-9]{6}\.(json|safetensors))\.[0-9a-f]{16}\.tmp"
)
"""Names of temporary files; nothing else in the folder is ever removed."""

MAX_PARTS: Final = 1024
"""Places that one call may fill, on every system there is."""

FILE_FORM: Final = re.compile(
    r"manifest\.json|SEALED\.json|teacher_head\.safetensors|README\.md|\.gitattributes|[0-9]{6}\.(json|safetensors)"
)
"""Names of a cache's files, on a disk or in a store."""

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without waiting for the other end of a named pipe that lies in a file's place.
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LOCK: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class LocalStorage(Storage):
    """A folder on a file system."""

    root: Path

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._held: int | None = None  # descriptor of the folder, once it is written to

    def locate(self, name: str) -> Path:
        return self.root / name

    def size(self, name: str) -> int:
        with self.reads(name), self._parent(name) as (folder, base):
            return self._check_regular(name, os.stat(base, dir_fd=folder, follow_symlinks=False))

    def open(self, name: str) -> Fill:
        return _LocalFile(self, name)

    def open_regular(self, name: str) -> int:
        """A descriptor of a regular file, to be used and closed below ``reads``."""
        with self._parent(name) as (folder, base):
            descriptor = os.open(base, _READ, dir_fd=folder)
        try:
            self._check_regular(name, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def names(self, folder: str = "") -> list[str]:
        """Every file below a folder, links included, and folders that have the name of a file."""
        paths: list[str] = []
        if self._held is None and not os.path.isdir(self.root):  # noqa: PTH112  (as it never raises)
            return paths
        with self.reads(folder or "."), contextlib.suppress(FileNotFoundError):
            descriptor = self._open_folder(folder.split("/") if folder else [])
            try:
                # A folder that cannot be listed is not an empty one.
                for directory, folders, files, inside in os.fwalk(".", onerror=_raise, dir_fd=descriptor):
                    links = [name for name in folders if _is_link(inside, name)]
                    misnamed = [name for name in folders if FILE_FORM.fullmatch(name) and name not in links]
                    paths += [(Path(folder) / directory / name).as_posix() for name in files + links + misnamed]
            finally:
                os.close(descriptor)
        return sorted(paths)

    def exists(self, name: str) -> bool:
        """Whether there is such a file; none where a file is in the folder's own place."""
        try:
            return super().exists(name)
        except ShdError as error:
            if error.code == "cache-incomplete":
                return False
            raise

    def prepare(self) -> None:
        """Create the folder, and hold it: from now on every file is one of this folder, wherever it is."""
        for path in (self.root, *self.root.parents):
            if path.exists() and not path.is_dir():
                message = f"{path} must be a folder; it is a file: choose another place, or move it away"
                raise ShdError("cache-exists", message, "CACHE-60")
        missing = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in missing:  # so that it survives a power cut
            sync(folder.parent)
        if self._held is None:
            self._held = os.open(self.root, _FOLDER)
            weakref.finalize(self, os.close, self._held)

    def remove_stale(self) -> None:
        """Remove temporary files whose writers are gone; those of living writers are locked and stay."""
        with self.exclusive():
            for name in self.names():
                if TEMP_FORM.fullmatch(name.rpartition("/")[2]):
                    with contextlib.suppress(FileNotFoundError), self._parent(name) as (folder, base):
                        _remove_if_stale(folder, base)

    def is_leftover(self, name: str) -> bool:
        return name == LOCK_NAME or bool(TEMP_FORM.fullmatch(name))

    def pending(self, name: str) -> PendingFile:
        return _LocalPending(self, name)

    def create(self, name: str, data: bytes) -> None:
        with self.pending(name) as file:
            file.write(data)
            file.sync()
            with self.exclusive():
                if not self.exists(name):  # a racing writer may have been first
                    file.commit()

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._parent(name) as (folder, base):
            os.unlink(base, dir_fd=folder)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude other writers of the cache; the system lets go when a process dies."""
        with self._parent(LOCK_NAME) as (folder, base):
            try:
                descriptor = os.open(base, _LOCK, 0o666, dir_fd=folder)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise self._unsafe(LOCK_NAME) from error
                raise
        try:
            self._check_regular(LOCK_NAME, os.fstat(descriptor))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def open_parent(self, name: str) -> tuple[int, str]:
        """A descriptor of the folder in which a file is to be written, made if need be, and the file's name in it."""
        *parts, base = name.split("/")
        return self._open_folder(parts, make=True), base

    @contextlib.contextmanager
    def reads(self, name: str) -> Iterator[None]:
        """Turn what the operating system refuses to read into an error that names the file (CACHE-83)."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._refuse(self.root / name, error) from error

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.root, self._held = state["root"], None

    @contextlib.contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int, str]]:
        *parts, base = name.split("/")
        folder = self._open_folder(parts)
        try:
            yield folder, base
        finally:
            os.close(folder)

    def _open_folder(self, parts: Sequence[str], *, make: bool = False) -> int:
        """A descriptor of a folder of the cache; its parts may not be links (CACHE-7)."""
        folder = os.open(self.root, _FOLDER) if self._held is None else os.dup(self._held)
        for count, name in enumerate(parts, 1):
            try:
                if make:
                    _make_inside(folder, name)
                inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(folder, name):
                    raise self._unsafe("/".join(parts[:count])) from error
                raise
            finally:
                os.close(folder)
            folder = inner
        return folder

    def _check_regular(self, name: str, status: os.stat_result) -> int:
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise self._unsafe(name)
        return status.st_size

    def _unsafe(self, name: str) -> ShdError:
        message = f"{self.root / name} must be a regular file or folder, not a link or a device: move it away"
        return ShdError("path-unsafe", message, "CACHE-7")

    def _refuse(self, path: Path, error: OSError) -> ShdError:
        if error.errno == errno.ELOOP and path.is_symlink():
            return self._unsafe(path.relative_to(self.root).as_posix())
        if isinstance(error, NotADirectoryError):
            if not self.root.is_dir():
                message = f"{self.root} is not a cache folder: name the folder that holds manifest.json"
                return ShdError("cache-incomplete", message, "CACHE-83")
            ancestors = (path, *path.parents)
            blocking = next((place for place in ancestors if place.exists() and not place.is_dir()), path)
            message = f"{blocking} must be a folder; it is a file: move it away, then restore the folder"
            return ShdError("cache-corrupt", message, "CACHE-83")
        if isinstance(error, IsADirectoryError):
            message = f"{path} must be a file; it is a folder: move it away, then restore the file or write it again"
            return ShdError("cache-corrupt", message, "CACHE-83")
        message = f"{path} could not be read: {error.strerror or error}: regain access to it, or restore it"
        return ShdError("read-failed", message, "CACHE-83")


class _LocalPending(PendingFile):
    def __init__(self, storage: LocalStorage, name: str) -> None:
        self._folder, self._name = storage.open_parent(name)
        self._temp = _temporary_name(self._name)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._folder)
            with storage.exclusive():  # covers the moment between creating and locking the file
                self._descriptor = os.open(self._temp, _NEW, 0o666, dir_fd=self._folder)
                undo.callback(os.close, self._descriptor)
                undo.callback(os.unlink, self._temp, dir_fd=self._folder)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            undo.pop_all()

    def write(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def commit(self) -> None:
        os.rename(self._temp, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temp, dir_fd=self._folder)  # already gone after a commit
        os.close(self._descriptor)
        os.close(self._folder)


class _LocalFile:
    """Reads name their position, so processes and threads may share the descriptor."""

    def __init__(self, storage: LocalStorage, name: str) -> None:
        self._reads = functools.partial(storage.reads, name)
        with self._reads():
            self._descriptor = storage.open_regular(name)

    def __call__(self, start: int, parts: Sequence[NDArray[np.uint8]]) -> int:
        rest, offset = [buffer.data for buffer in parts], start
        with self._reads():
            while rest:
                count = os.preadv(self._descriptor, rest[:MAX_PARTS], offset)
                if not count:
                    break
                offset += count
                while rest and count >= len(rest[0]):
                    count -= len(rest.pop(0))
                if count:  # one read may bring less than was asked for
                    rest[0] = rest[0][count:]
        return offset - start

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Not when the cache of open files drops it: another thread may still be reading. A default, as a program
        # that ends on an error clears this module before its files.
        if hasattr(self, "_descriptor"):
            close(self._descriptor)


def _raise(error: OSError) -> None:
    raise error


def _make_inside(folder: int, name: str) -> None:
    """Create a folder inside a folder, unless it is there."""
    try:
        os.mkdir(name, dir_fd=folder)
    except FileExistsError:
        return
    os.fsync(folder)


def _is_link(folder: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _temporary_name(name: str) -> str:
    return f".{name}.{secrets.token_hex(8)}{TEMP_SUFFIX}"


def _remove_if_stale(folder: int, name: str) -> None:
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO):
            return  # its writer has just finished, or it is not a writer's file
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
    except BlockingIOError:
        return  # its writer is at work
    finally:
        os.close(descriptor)
