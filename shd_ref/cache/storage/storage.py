"""Where a cache lies, a folder or an address in an object store, and its files (CACHE-1 to 7, CACHE-60 to 73)."""

from __future__ import annotations

import abc
import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, import_package

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


Fill: TypeAlias = Callable[[int, Sequence[NDArray[np.uint8]]], int]
"""Fills arrays in order with the bytes of an open file from a position on, and says how many there were."""


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
    def open(self, name: str) -> Fill:
        """A file to be read by position; some storages find out at the first read that it is absent."""

    @abc.abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Every file below a folder, ascending; none where there is no folder."""

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


_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")  # two letters at least: C:// is a drive


Folder = str | os.PathLike[str] | Storage
"""A cache: path of a local folder, address such as ``s3://bucket/cache``, or an open storage."""


def is_address(folder: Folder) -> bool:
    """Whether this is an address (``s3://...``), not a path."""
    return isinstance(folder, str) and bool(_URL.match(folder))


def subfolder(folder: str | os.PathLike[str], name: str) -> Path | str:
    """A folder inside a folder, or an address below an address."""
    if isinstance(folder, str) and is_address(folder):
        return f"{folder.rstrip('/')}/{name}"
    return Path(folder) / name


def open_storage(folder: Folder) -> Storage:
    """The storage behind a path or an address (``file://`` is a path): ``dependency-missing``, ``argument-value``."""
    if isinstance(folder, Storage):
        return folder
    if isinstance(folder, str) and folder.startswith("file://"):
        folder = unquote(urlsplit(folder).path)
    if isinstance(folder, str) and is_address(folder):
        from shd_ref.cache.storage.remote import RemoteStorage

        return RemoteStorage(folder)
    from shd_ref.cache.storage.local import LocalStorage

    return LocalStorage(Path(check_path(folder)))


MANIFEST_NAME: Final = "manifest.json"
SEAL_NAME: Final = "SEALED.json"
RECEIPTS_NAME: Final = "receipts"
SHARDS_NAME: Final = "shards"
LOCK_NAME: Final = ".lock"
HUB_NAMES: Final = ("README.md", ".gitattributes")
"""Files of a cache on a hub, for people and for the hub: never read here (CACHE-180)."""

MAX_SAMPLES: Final = 10**8
MAX_SHARDS: Final = 10**6
MAX_LAYERS: Final = 1000

_RECEIPT_FORM: Final = re.compile(r"receipts/([0-9]{6})\.json")


def shard_name(shard: int) -> str:
    """``shards/23/000123.safetensors``: the last two digits spread the files over a hundred folders."""
    return f"{SHARDS_NAME}/{shard % 100:02d}/{shard:06d}.safetensors"


def receipt_name(shard: int) -> str:
    """``receipts/000123.json``."""
    return f"{RECEIPTS_NAME}/{shard:06d}.json"


def committed_shards(names: Iterable[str]) -> list[int]:
    """Shards whose receipts are among these names, ascending; other names (temporary files) are passed over."""
    matches = [_RECEIPT_FORM.fullmatch(name) for name in names]
    return sorted(int(name[1]) for name in matches if name)


def tensor_name(index: int, part: str) -> str:
    """``00001234/L03``: a part of one sample's record."""
    return f"{index:08d}/{part}"


NEEDS: Final = "the supervision cache must have xxhash and msgspec; pip install '.[cache]' (in a checkout)"
"""Both are imported late: maps are coded with numpy alone."""


@functools.cache
def _xxhash() -> Any:
    return import_package("xxhash", NEEDS)  # XXH3 (CACHE-5) guards against accidents, not against forgery


def xxh3_64(data: Any, seed: int = 0) -> int:
    """XXH3-64 of a bytes-like object, as a number."""
    digest: int = _xxhash().xxh3_64_intdigest(data, seed)
    return digest


def hex_64(number: int) -> str:
    """An XXH3-64 as 16 hex digits."""
    return f"{number:016x}"


def xxh3_128(data: Any) -> str:
    """XXH3-128 of a bytes-like object: 32 hex digits."""
    digest: str = _xxhash().xxh3_128_hexdigest(data)
    return digest


class RunningHash:
    """XXH3-128 (or XXH3-64) of something that is read or written piece by piece."""

    def __init__(self, bits: int = 128) -> None:
        self._state = _xxhash().xxh3_128() if bits == 128 else _xxhash().xxh3_64()

    def update(self, data: Any) -> None:
        self._state.update(data)

    def hexdigest(self) -> str:
        digest: str = self._state.hexdigest()
        return digest
