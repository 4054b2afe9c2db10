"""XXH3 checksums (CACHE-5), in lower-case hex digits: a guard against accidents, not against forgery."""

from __future__ import annotations

import functools
from typing import Any

from shd_ref.errors import import_package


@functools.cache
def _xxhash() -> Any:
    # Imported late, so that coding and decoding maps works where only numpy is installed.
    message = "the supervision cache must have xxhash for its checksums; pip install '.[cache]' (in a checkout)"
    return import_package("xxhash", message)


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
