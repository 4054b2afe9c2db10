"""The files of a cache by their names in it, such as ``receipts/000123.json`` (CACHE-60 to CACHE-73)."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class PendingFile(abc.ABC):
    """A file that is visible only after ``commit``; leaving the ``with`` block without it discards the bytes."""

    @abc.abstractmethod
    def write(self, data: Any) -> None:
        """Append a bytes-like object."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Wait until the bytes are safe."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Give the file its final name. Call ``sync`` first."""

    def stands(self) -> bool:
        """Whether the committed file still holds these bytes, not a racing writer's; always where there are locks."""
        return True

    def __enter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __exit__(self, *_: object) -> None:
        """Discard what was not committed."""


class RangeFile(abc.ABC):
    """An open file that is read by position; errors are those of ``Storage``."""

    @abc.abstractmethod
    def read(self, start: int, end: int) -> NDArray[np.uint8]:
        """Bytes ``start`` to ``end``, fewer where the file ends before, in memory of the caller's own."""

    def read_into(self, start: int, parts: Sequence[NDArray[np.uint8]]) -> int:
        """Fill these arrays in order with the bytes from ``start`` on; how many there were."""
        data = self.read(start, start + sum(map(len, parts)))
        offset = 0
        for buffer in parts:
            held = data[offset : offset + len(buffer)]
            buffer[: len(held)] = held
            offset += len(buffer)
        return len(data)


class Storage(abc.ABC):
    """The files of one cache. Safe to pickle, to fork and to share between threads.

    An absent file is a FileNotFoundError; what the system or store refuses is a ShdError naming it (CACHE-83).
    ``root`` is the folder (absolute) or the address.
    """

    root: Path | str

    @abc.abstractmethod
    def locate(self, name: str) -> Path | str:
        """Path or address of a file, for messages."""

    @abc.abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file; ``path-unsafe`` for a link or device (CACHE-7)."""

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    @abc.abstractmethod
    def read(self, name: str) -> bytes:
        """A whole file."""

    @abc.abstractmethod
    def open(self, name: str) -> RangeFile:
        """A file to be read by position; some storages find out at the first read that it is absent."""

    @abc.abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Every file below a folder, ascending; none where there is no folder."""

    def links(self) -> list[str]:
        """Names that are links, of which a cache holds none."""
        return []

    def check_place(self, name: str) -> None:  # noqa: B027  (a store has no folders)
        """Refuse a place where a folder is, or a file in a folder's place: ``cache-corrupt`` (CACHE-83)."""

    def prepare(self) -> None:  # noqa: B027  (a prefix needs no making)
        """Make the place ready for its first file; ``cache-exists`` when a file is in its place."""

    def remove_stale(self) -> None:  # noqa: B027  (an upload that was not completed is not an object)
        """Remove what dead writers left behind."""

    def is_leftover(self, name: str) -> bool:
        """Whether a file is a lock or temporary, so that a place that holds only such files is empty."""
        return False

    @abc.abstractmethod
    def pending(self, name: str) -> PendingFile:
        """A new file, invisible until it is committed."""

    @abc.abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write a small file, unless it exists; of racing writers one succeeds and the others do nothing."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Exclude other writers, where the storage can; where it cannot, ``PendingFile.stands`` tells."""
        return contextlib.nullcontext()

    def write_whole(self, name: str, data: bytes) -> None:
        """Write a small file atomically."""
        with self.pending(name) as file:
            file.write(data)
            file.sync()
            file.commit()

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Apply a function that reads files to each item, in order; many at once where reading is mostly waiting."""
        return map(function, items)


def check_path(path: str | os.PathLike[str], argument: str = "the cache") -> str | os.PathLike[str]:
    """The path itself; ``argument-value`` for a NUL, or characters that cannot be encoded."""
    try:
        possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise ShdError("argument-value", f"{argument} must be a path that a file system can have; got {str(path)!a}")
    return path


@contextlib.contextmanager
def write_errors(path: Path | str) -> Iterator[None]:
    """Turn what the operating system or the store refuses into ``write-failed`` naming the file."""
    try:
        yield
    except Exception as error:
        # What safetensors and torch.save make of a full disk.
        is_hidden = type(error).__name__ == "SafetensorError" or "inline_container" in str(error)
        if not (isinstance(error, OSError) or is_hidden):
            raise
        advice = "make room or regain access, then run again"
        if isinstance(error, (NotADirectoryError, IsADirectoryError, FileExistsError)):
            advice = "a file is where a folder is meant (or the reverse): move it away, or choose another place"
        reason = getattr(error, "strerror", None) or error
        message = f"{path} could not be written: {reason}; {advice}"
        raise ShdError("write-failed", message, "CACHE-64") from error
