"""Embeddings: one vector a text, pooled from what a teacher's last block puts out (CACHE-181 to CACHE-185)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.forms.form import U8, Part, SampleRecord, require
from shd_ref.cache.forms.vectors import SingleVectors
from shd_ref.cache.storage.documents import optional

POOLINGS: Final = ("mean", "cls", "max", "last")
"""How the states of a text become one vector (CACHE-182)."""


@dataclass(frozen=True, kw_only=True)
class Embeddings(SingleVectors):
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
    SPEC_ID: ClassVar[str] = "CACHE-181"
    PART: ClassVar[Part] = Part("embedding", U8, SUBJECT)
    rows: str = optional("sample")
    pooling: str
    normalize: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rows == "sample", "embeddings.rows must be left out", self.rows, "CACHE-181")
        require(self.pooling in POOLINGS, f"embeddings.pooling must be one of {POOLINGS}", self.pooling, "CACHE-181")

    def decode(self, record: SampleRecord) -> NDArray[np.float32]:
        """A record's embedding ``(width,)``; ``argument-value`` where it was not read, ``cache-corrupt``."""
        embedding: NDArray[np.float32] = super().decode(record)[0]
        return embedding

    def describe(self) -> list[tuple[str, str]]:
        pooled = f"width {self.width}, pooling {self.pooling}{', normalized' if self.normalize else ''}"
        codec = f"{self.codec}, {self.row_sizes[0]} bytes per {self.unit}"
        return [("embeddings", pooled), ("embedding codec", codec)]
