"""Byte ranges of shard files (CACHE-81)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.documents import regular_size
from shd_ref.cache.layout import shard_path
from shd_ref.cache.receipts import Receipt
from shd_ref.errors import ShdError


class ShardFile:
    """An open shard. Reads name their position, so processes and threads may share the descriptor.

    Args:
        folder: the cache.
        shard: its number.

    Raises:
        ShdError: ``cache-incomplete`` when there is no such file.
    """

    def __init__(self, folder: Path, shard: int) -> None:
        self.path = shard_path(folder, shard)
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise _incomplete(self.path, "it does not exist") from error

    def read(self, start: int, end: int) -> NDArray[np.uint8]:
        """Bytes ``start`` to ``end``, in memory of the caller's own.

        Raises:
            ShdError: ``cache-incomplete`` when the file ends before that.
        """
        data = bytearray()
        while len(data) < end - start:  # one read may bring less than was asked for
            part = os.pread(self._descriptor, end - start - len(data), start + len(data))
            if not part:
                raise _incomplete(self.path, f"it ends at byte {start + len(data)} of at least {end}")
            data += part
        return np.frombuffer(data, dtype=np.uint8)

    def __del__(self) -> None:
        # Not when the cache of open files drops it: another thread may still be reading.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def check_shard_size(folder: Path, receipt: Receipt) -> None:
    """Refuse a shard file that is absent or has another size than its receipt states (CACHE-81)."""
    path = shard_path(folder, receipt.shard)
    try:
        size = regular_size(path)
    except FileNotFoundError as error:
        raise _incomplete(path, "it does not exist") from error
    if size != receipt.size:
        raise _incomplete(path, f"it must have {receipt.size} bytes and has {size}")


def _incomplete(path: Path, problem: str) -> ShdError:
    return ShdError("cache-incomplete", f"{path}: {problem}: restore it, or write the shard again", "CACHE-81")
