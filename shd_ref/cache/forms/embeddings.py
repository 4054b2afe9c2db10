"""Embeddings: one vector a text, pooled from what a teacher's last block puts out (CACHE-181 to CACHE-185)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import VECTOR_CODECS
from shd_ref.cache.codecs.distortion import HiddenError
from shd_ref.cache.forms.form import U8, Extent, Part, SampleRecord, require
from shd_ref.cache.forms.rows import Reals
from shd_ref.cache.forms.vectors import MAX_WIDTH, Vectors
from shd_ref.cache.storage.documents import optional

POOLINGS: Final = ("mean", "cls", "max", "last")
"""How the states of a text become one vector (CACHE-182)."""

_NAME: Final = "embedding"


@dataclass(frozen=True, kw_only=True)
class Embeddings(Vectors):
    """Records hold an embedding of their text.

    Attributes:
        codec: one of ``VECTOR_CODECS``.
        pooling: one of ``POOLINGS``.
        normalize: whether it was divided by its norm.
        tensor: name of the graph's tensor that was pooled.
        width: D.

    Raises:
        ShdError: ``argument-value`` for a number or name outside its range.
    """

    SUBJECT: ClassVar[str] = "embeddings"
    CHOICE: ClassVar[str] = "embeddings"
    rows: str = optional("sample")
    pooling: str
    normalize: bool
    tensor: str
    width: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rows == "sample", "embeddings.rows must be left out", self.rows, "CACHE-181")
        rule = f"embeddings.codec must be one of {VECTOR_CODECS}"
        require(self.codec in VECTOR_CODECS, rule, self.codec, "CACHE-181")
        require(self.pooling in POOLINGS, f"embeddings.pooling must be one of {POOLINGS}", self.pooling, "CACHE-181")
        require(1 <= self.width <= MAX_WIDTH, f"embeddings.width must be 1 to {MAX_WIDTH}", self.width, "CACHE-181")

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return (self._size(self.width),)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(_NAME, U8, self.SUBJECT),)

    def pack(self, record: SampleRecord) -> Iterator[NDArray[np.uint8]]:
        """The row; ``not-finite``, ``argument-value``: codes that no encoder makes."""
        yield self._check_bytes(f"record {record.index}: {_NAME}", record.parts[_NAME]).reshape(-1)

    def plain_size(self, extent: Extent) -> int:
        return 4 * self.width

    def encode(self, rows: Reals) -> NDArray[np.uint8]:
        """Embeddings ``(R, width)`` as bytes, ``(R, row_bytes)``; of a record R is 1.

        Raises ``argument-value`` (a number that float16 cannot hold), ``argument-shape``, ``argument-dtype``,
        ``not-finite``.
        """
        return self._encode(_NAME, self._values(_NAME, rows, self.width))

    def measure(self, rows: Reals, codes: NDArray[np.uint8]) -> HiddenError:
        """Coding error (CACHE-184): argument and result of ``encode``."""
        return self._measure(self._values(_NAME, rows, self.width), codes)

    def decode(self, record: SampleRecord) -> NDArray[np.float32]:
        """A record's embedding ``(width,)``; ``argument-value`` where it was not read, ``cache-corrupt``."""
        embedding: NDArray[np.float32] = self._decode_part(record, self.parts[0], _NAME, self.width)[0]
        return embedding

    def arrays(self, record: SampleRecord) -> Iterator[tuple[str, NDArray[Any]]]:
        yield _NAME, self.decode(record)

    def describe(self) -> list[tuple[str, str]]:
        pooled = f"width {self.width}, pooling {self.pooling}{', normalized' if self.normalize else ''}"
        codec = f"{self.codec}, {self.row_sizes[0]} bytes per {self.unit}"
        return [("embeddings", pooled), ("embedding codec", codec)]
