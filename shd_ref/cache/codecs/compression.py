"""Compressed blobs (CACHE-43 to CACHE-45): Zstandard, one frame a blob, never larger than the blob itself."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, import_package

COMPRESSIONS: Final = ("none", "zstd")
_MOST_EXPANSION: Final = 2**15
"""A frame of n bytes cannot hold more than n times as many: a block takes four, and holds at most 2^17."""

_LEVEL: Final = 1  # codes hold little that a slower search would find


@functools.cache
def _zstandard() -> Any:
    message = "compressed caches need the package zstandard: pip install '.[zstd]' (in a checkout)"
    return import_package("zstandard", message)


def check_compression(compression: str) -> None:
    """Refuse a compression whose package is missing: ``dependency-missing``."""
    if compression != "none":
        _zstandard()


def compress_blob(blob: NDArray[np.uint8], compression: str) -> NDArray[np.uint8]:
    """The bytes to store: a frame where that is smaller, else the blob itself (CACHE-43)."""
    if compression == "none":
        return blob
    frame = _zstandard().ZstdCompressor(level=_LEVEL).compress(blob)
    return np.frombuffer(frame, dtype=np.uint8) if len(frame) < len(blob) else blob


def expand_blob(stored: NDArray[np.uint8], size: int, source: str) -> NDArray[np.uint8]:
    """The blob of ``size`` bytes from what is stored; memory is only ever taken for ``size`` (CACHE-44)."""
    if len(stored) == size:
        return stored
    library = _zstandard()
    data = stored.tobytes()
    try:
        # The frame's own claim is compared before anything is allocated for it. Where the record's length was forged
        # as well, both agree, on more than these bytes can hold.
        claimed = library.get_frame_parameters(data).content_size
        possible = claimed == size <= _MOST_EXPANSION * len(data)
        blob = library.ZstdDecompressor().decompress(data, allow_extra_data=False) if possible else b""
    except MemoryError as error:
        message = f"{source}: must fit the memory; {len(data)} bytes expand to {size}: read it where there is more"
        raise ShdError("cache-corrupt", message, "CACHE-44") from error
    except library.ZstdError as error:
        raise ShdError("cache-corrupt", f"{source}: must be a Zstandard frame: {error}", "CACHE-44") from error
    if len(blob) != size:
        raise ShdError("cache-corrupt", f"{source}: must expand to {size} bytes; it claims {claimed}", "CACHE-44")
    return np.frombuffer(bytearray(blob), dtype=np.uint8)
