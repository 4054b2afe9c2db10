"""What hidden states, embeddings and last states share: rows that are vectors of real numbers, each coded alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import INT8_LEVELS, VECTOR_CODECS, largest_move, to_float16, to_int8
from shd_ref.cache.codecs.distortion import HiddenError, RowError
from shd_ref.cache.forms.form import Extent, Part, SampleRecord, require
from shd_ref.cache.forms.rows import Counted, Reals, Rows, as_rows, counted_rows
from shd_ref.errors import ShdError

MAX_WIDTH: Final = 1 << 20
_FLOATS: Final = {"float32": "<f4", "float16": "<f2"}


@dataclass(frozen=True, kw_only=True)
class Vectors(Rows):
    """Rows of binary32 or binary16 numbers, or a step in binary32 followed by int8 codes (CACHE-177, CACHE-183)."""

    ERROR: ClassVar[type[RowError]] = HiddenError

    def bound(self, rows: Reals) -> NDArray[np.float64]:
        """Largest coding error of a number in each row of ``(R, width)``: ``(R,)`` (CACHE-179, CACHE-185)."""
        return np.zeros(len(rows)) if self.codec == "float32" else largest_move(self.codec, rows)

    def _size(self, width: int) -> int:
        """Bytes of a row."""
        return np.dtype(_FLOATS[self.codec]).itemsize * width if self.codec in _FLOATS else 4 + width

    def _values(self, name: str, rows: Reals, width: int, counted: Counted = None) -> NDArray[np.float32]:
        values = counted_rows(as_rows(name, rows, width), counted).astype(np.float32)
        if not np.isfinite(values).all():
            raise ShdError("not-finite", f"{name} must be finite; got NaN or infinity", "CACHE-177")
        return values

    def _encode(self, name: str, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Rows of ``_values`` as bytes, ``(R, size)``."""
        if self.codec in _FLOATS:
            numbers = to_float16(name, values) if self.codec == "float16" else values
            return np.ascontiguousarray(numbers, dtype=_FLOATS[self.codec]).view(np.uint8)
        codes, steps = to_int8(values)
        return np.concatenate((steps.astype("<f4")[:, None].view(np.uint8), codes.view(np.uint8)), axis=1)

    def _measure(self, values: NDArray[np.float32], codes: NDArray[np.uint8], counted: Counted = None) -> HiddenError:
        """Coding error over counted rows (CACHE-178)."""
        exact = values.astype(np.float64)
        moved = self.decode_rows(codes) - exact
        if counted is not None:
            exact, moved = exact[counted], moved[counted]
        if not len(exact):
            return HiddenError(0.0, 0.0, 0)
        norms = np.linalg.norm(exact, axis=-1)
        relative = np.linalg.norm(moved, axis=-1) / np.where(norms > 0, norms, 1.0)
        return HiddenError(float(relative.mean()), float(relative.max()), len(relative))

    def _check_bytes(self, where: str, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Contiguous rows of bytes; ``not-finite``, ``argument-value``: codes that no encoder makes."""
        rows = np.ascontiguousarray(rows)
        steps, codes = self._split(rows)
        if not np.isfinite(codes if steps is None else steps).all():
            raise ShdError("not-finite", f"{where} must be finite; got NaN or infinity", "CACHE-177")
        if steps is not None and ((steps < 0).any() or (codes < -INT8_LEVELS).any()):
            raise ShdError("argument-value", f"{where} must have no negative step and no code -128", "CACHE-177")
        return rows

    def _decode_part(self, record: SampleRecord, part: Part, name: str, width: int) -> NDArray[np.float32]:
        """A part of a record ``(R, width)``; ``cache-corrupt`` for NaN and infinity."""
        values = self.decode_rows(self.read_rows(record, part, self._size(width)))
        if not np.isfinite(values).all():
            raise ShdError("cache-corrupt", f"{name} must be finite; got NaN or infinity", "CACHE-177")
        return values

    def decode_rows(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The numbers ``(R, D)`` that rows of bytes hold, NaN and infinity included."""
        steps, codes = self._split(np.ascontiguousarray(rows))
        values = codes.astype(np.float32)
        return values if steps is None else values * steps

    def _split(self, rows: NDArray[np.uint8]) -> tuple[NDArray[np.float32] | None, NDArray[Any]]:
        """Steps ``(R, 1)`` and codes ``(R, width)`` of contiguous rows."""
        if self.codec in _FLOATS:
            return None, rows.view(_FLOATS[self.codec])
        steps = np.ascontiguousarray(rows[:, :4]).view("<f4").astype(np.float32, copy=False)
        return steps, rows[:, 4:].view(np.int8)


@dataclass(frozen=True, kw_only=True)
class SingleVectors(Vectors):
    """Vectors of one tensor of the graph: ``PART`` of each record."""

    PART: ClassVar[Part]
    SPEC_ID: ClassVar[str]
    tensor: str
    width: int

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"{self.SUBJECT}.codec must be one of {VECTOR_CODECS}"
        require(self.codec in VECTOR_CODECS, rule, self.codec, self.SPEC_ID)
        rule = f"{self.SUBJECT}.width must be 1 to {MAX_WIDTH}"
        require(1 <= self.width <= MAX_WIDTH, rule, self.width, self.SPEC_ID)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return (self._size(self.width),)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.PART,)

    def pack(self, record: SampleRecord) -> Iterator[NDArray[np.uint8]]:
        """The rows; ``not-finite``, ``argument-value``: codes that no encoder makes."""
        yield self._check_bytes(f"record {record.index}: {self.PART.title}", record.parts[self.PART.name]).reshape(-1)

    def plain_size(self, extent: Extent) -> int:
        return 4 * self.width * self.num_rows(extent)

    def encode(self, rows: Reals, counted: Counted = None) -> NDArray[np.uint8]:
        """A sample's rows ``(R, width)`` as bytes ``(R, row_bytes)``; of an embedding R is 1.

        Where ``counted`` ``(R,)`` is False, a row is coded as zeros. Raises ``argument-value`` (a number that float16
        cannot hold), ``argument-shape``, ``argument-dtype``, ``not-finite``.
        """
        return self._encode(self.PART.title, self._values(self.PART.title, rows, self.width, counted))

    def measure(self, rows: Reals, codes: NDArray[np.uint8], counted: Counted = None) -> HiddenError:
        """Coding error over counted rows (CACHE-178, CACHE-184): arguments and result of ``encode``."""
        return self._measure(self._values(self.PART.title, rows, self.width, counted), codes, counted)

    def decode(self, record: SampleRecord) -> NDArray[np.float32]:
        """A record's rows ``(R, width)``; ``argument-value`` where they were not read, ``cache-corrupt``."""
        return self._decode_part(record, self.PART, self.PART.title, self.width)
