"""Byte ranges of shard files (CACHE-80)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.documents.receipts import Receipt
from shd_ref.cache.storage.layout import shard_name
from shd_ref.cache.storage.places import Folder, open_storage
from shd_ref.errors import ShdError


class ShardFile:
    """An open shard. Reads name their position, so processes and threads may share it.

    Args:
        folder: the cache.
        shard: its number.

    Attributes:
        path: path or address of the file.

    Raises:
        ShdError: ``cache-incomplete`` when there is no such file; an object store tells at the first read.
    """

    def __init__(self, folder: Folder, shard: int) -> None:
        storage = open_storage(folder)
        self.path = storage.locate(shard_name(shard))
        try:
            self._file = storage.open(shard_name(shard))
        except FileNotFoundError as error:
            raise _incomplete(self.path, "it does not exist") from error

    def read(self, start: int, end: int) -> NDArray[np.uint8]:
        """Bytes ``start`` to ``end``, in memory of the caller's own.

        Raises:
            ShdError: ``cache-incomplete`` when the file ends before that, or vanished.
        """
        with self._found():
            data = self._file.read(start, end)
        self._check_length(start, len(data), end - start)
        return data

    def read_into(self, start: int, parts: Sequence[NDArray[np.uint8]]) -> None:
        """Fill these arrays, one after another, with the bytes from ``start`` on.

        Raises:
            ShdError: as ``read``.
        """
        with self._found():
            count = self._file.read_into(start, parts)
        self._check_length(start, count, sum(map(len, parts)))

    @contextlib.contextmanager
    def _found(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise _incomplete(self.path, "it does not exist") from error

    def _check_length(self, start: int, count: int, wanted: int) -> None:
        if count < wanted:
            raise _incomplete(self.path, f"it ends at byte {start + count} of at least {start + wanted}")


def check_shard_size(folder: Folder, receipt: Receipt) -> None:
    """Refuse a shard file that is absent or has another size than its receipt states (CACHE-80)."""
    storage = open_storage(folder)
    path = storage.locate(shard_name(receipt.shard))
    try:
        size = storage.size(shard_name(receipt.shard))
    except FileNotFoundError as error:
        raise _incomplete(path, "it does not exist") from error
    if size != receipt.size:
        raise _incomplete(path, f"it must have {receipt.size} bytes and has {size}")


def _incomplete(path: object, problem: str) -> ShdError:
    return ShdError("cache-incomplete", f"{path}: {problem}: restore it, or write the shard again", "CACHE-80")
