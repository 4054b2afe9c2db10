"""Files that appear whole or not at all (CACHE-70 to CACHE-75).

A file is written under a temporary name, synchronised and renamed. Its writer holds an advisory lock on it
all the while, so another process can tell a dead writer's leftovers from work in progress, on any host that
shares the file system and whatever the process ids are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from shd_ref.cache.layout import LOCK_NAME
from shd_ref.errors import ShdError

TEMP_SUFFIX: Final = ".tmp"
TEMP_FORM: Final = re.compile(r"\.(manifest\.json|SEALED\.json|[0-9]{6}\.(json|safetensors))\.[0-9a-f]{16}\.tmp")
"""Names of temporary files; nothing else in the folder is ever removed."""


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into ``write-failed`` naming the file."""
    try:
        yield
    except OSError as error:
        raise ShdError(
            "write-failed",
            f"{path} could not be written: {error.strerror or error}; everything committed is intact: "
            "make room or regain access, then run again to resume",
            "CACHE-74",
        ) from error


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Exclude other writers of the cache; the system lets go when a process dies."""
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder (and its parents), and make it survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make renames and removals in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class PendingFile:
    """A file that is visible only after ``commit``; leaving the ``with`` block without it discards the bytes.

    Args:
        path: its final path.
        root: the cache folder, whose lock covers the moment between creating and locking the file.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self._temp = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMP_SUFFIX}")
        make_folder(path.parent)
        with folder_lock(root):
            self._descriptor = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def write(self, data: Any) -> None:
        """Append a bytes-like object."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Wait until the bytes are on the disk."""
        os.fsync(self._descriptor)

    def commit(self) -> None:
        """Give the file its final name. Call ``sync`` first."""
        self._temp.rename(self.path)
        sync_folder(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._temp.unlink(missing_ok=True)  # already gone after a commit
        os.close(self._descriptor)


def write_whole(path: Path, data: bytes, root: Path) -> None:
    """Write a small file atomically."""
    with PendingFile(path, root) as pending:
        pending.write(data)
        pending.sync()
        pending.commit()


def remove_stale_files(root: Path) -> None:
    """Remove temporary files whose writers are gone; those of living writers are locked and stay."""
    with folder_lock(root):
        for path in root.rglob(f".*{TEMP_SUFFIX}"):
            if TEMP_FORM.fullmatch(path.name):
                _remove_if_stale(path)


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
