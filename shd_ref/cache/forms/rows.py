"""What logits and hidden states share: rows of equally many bytes, one after another (CACHE-160 to CACHE-163)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.forms.form import Extent, Form, Part, SampleRecord, misfit, require
from shd_ref.errors import ShdError

Reals: TypeAlias = NDArray[np.floating[Any]]
Counted: TypeAlias = NDArray[np.bool_] | None

ROWS: Final = {"positions": "position", "decoder": "position of the decoder", "sample": "sample"}
"""What ``rows`` may be, and what a row then belongs to."""


@dataclass(frozen=True, kw_only=True)
class Rows(Form):
    """A form whose parts are rows: of positions ``first`` to n - 1, of decoder positions, or of a sample."""

    rows: str

    def __post_init__(self) -> None:
        require(self.rows in ROWS, f"{self.SUBJECT}.rows must be one of {tuple(ROWS)}", self.rows, "CACHE-160")

    def check_manifest(self, teacher: str, *, has_decoder: bool) -> None:
        rule = f"{self.SUBJECT}.rows must be 'positions' or 'sample' without a second sequence"
        require(self.rows != "decoder" or has_decoder, rule, "decoder", "CACHE-160")

    @property
    @abstractmethod
    def row_sizes(self) -> tuple[int, ...]:
        """Bytes of a row of each part."""

    @property
    def unit(self) -> str:
        return ROWS[self.rows]

    def num_rows(self, extent: Extent) -> int:
        return {"positions": extent.length - extent.first, "decoder": extent.decoder, "sample": 1}[self.rows]

    def part_shapes(self, extent: Extent) -> tuple[tuple[int, ...], ...]:
        return tuple((self.num_rows(extent) * size,) for size in self.row_sizes)

    @property
    def stated(self) -> frozenset[str]:
        """Padding in front is left out; the second sequence counts where rows are its positions."""
        return frozenset({"first", "decoder"} if self.rows == "decoder" else {"first"})

    def extent_problems(self, extent: Extent) -> Iterator[str]:
        if self.rows == "decoder" and extent.decoder < 1:
            yield f"decoder must be at least 1 where {self.SUBJECT} have its rows; got {extent.decoder}"

    def check(self, record: SampleRecord) -> None:
        for part, size in zip(self.parts, self.row_sizes, strict=True):
            rows, shape = record.parts[part.name], (self.num_rows(record.extent), size)
            if not isinstance(rows, np.ndarray) or rows.shape != shape:
                actual = getattr(rows, "shape", rows)
                raise misfit(record, f"{part.title} must be {shape}, rows of bytes", actual, "CACHE-161")
            if rows.dtype != np.uint8:
                message = f"record {record.index}: {part.title} must be uint8; got {rows.dtype}"
                raise ShdError("argument-dtype", message, "CACHE-161")

    def read_rows(self, record: SampleRecord, part: Part, size: int) -> NDArray[np.uint8]:
        """A part as rows ``(R, size)``, without a copy; ``argument-value`` where it was not read."""
        if part.name not in record.parts:
            message = f"record {record.index} must be read with {part.title} to decode it; got {sorted(record.parts)}"
            raise ShdError("argument-value", message, "CACHE-161")
        blob, count = record.parts[part.name], self.num_rows(record.extent)
        if blob.dtype != np.uint8 or blob.shape != (count * size,):
            rule = f"{part.title} must be ({count * size},) uint8, {count} rows of {size} bytes"
            raise ShdError("argument-shape", f"{rule}; got {blob.shape} {blob.dtype}", "CACHE-161")
        rows: NDArray[np.uint8] = blob.reshape(count, size)
        return rows


def as_rows(name: str, rows: Reals, width: int) -> Reals:
    """The rows themselves, if they are real numbers ``(R, width)``: ``argument-shape``, ``argument-dtype``."""
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ShdError("argument-shape", f"{name} must be (R, {width}); got {rows.shape}", "CACHE-161")
    if rows.dtype.kind != "f":
        raise ShdError("argument-dtype", f"{name} must be floating; got {rows.dtype}", "CACHE-161")
    return rows


def counted_rows(rows: Reals, counted: Counted) -> Reals:
    """The rows, with zeros in place of those that do not count (CACHE-162)."""
    if counted is None:
        return rows
    if counted.shape != rows.shape[:1]:
        raise ShdError("argument-shape", f"counted must be {rows.shape[:1]}; got {counted.shape}", "CACHE-162")
    if counted.dtype != np.bool_:
        raise ShdError("argument-dtype", f"counted must be boolean; got {counted.dtype}", "CACHE-162")
    return rows if counted.all() else np.where(counted[:, None], rows, rows.dtype.type(0))
