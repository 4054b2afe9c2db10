"""What logits and hidden states share: rows of equally many bytes, one after another (CACHE-160 to CACHE-163)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.forms.form import Extent, Form, NewRecord, misfit, require
from shd_ref.errors import ShdError

ROWS: Final = {"positions": "position", "decoder": "position of the decoder", "sample": "sample"}
"""What ``rows`` may be, and what a row then belongs to."""


@dataclass(frozen=True, kw_only=True)
class Rows(Form):
    """A form whose parts are rows.

    Attributes:
        rows: ``"positions"``: a row for each position from ``first`` to n - 1 of the sample; ``"decoder"``: a row for
            each of its second sequence; ``"sample"``: one row.
    """

    rows: str

    def __post_init__(self) -> None:
        require(self.rows in ROWS, f"{self.SUBJECT}.rows must be one of {tuple(ROWS)}", self.rows, "CACHE-160")

    @property
    @abstractmethod
    def row_sizes(self) -> tuple[int, ...]:
        """Bytes of a row of each part."""

    @property
    def unit(self) -> str:
        """What a row belongs to."""
        return ROWS[self.rows]

    def num_rows(self, extent: Extent) -> int:
        """R: rows of each part of a record."""
        return {"positions": extent.length - extent.first, "decoder": extent.decoder, "sample": 1}[self.rows]

    def part_shapes(self, extent: Extent) -> tuple[tuple[int, ...], ...]:
        """The bytes of each part."""
        return tuple((self.num_rows(extent) * size,) for size in self.row_sizes)

    def extent_problems(self, extent: Extent) -> Iterator[str]:
        """Rows of the second sequence must be at least one; attention decides about padding in front."""
        if self.rows == "decoder" and extent.decoder < 1:
            yield f"decoder must be at least 1 where {self.SUBJECT} have its rows; got {extent.decoder}"

    def floats(self, record: NewRecord) -> Iterator[NDArray[np.float32] | None]:
        """None: all is coded."""
        return iter(())

    def held_size(self, extent: Extent) -> int:
        """Codes are packed as they are made."""
        return self.num_rows(extent) * sum(self.row_sizes)

    def check_rows(self, record: NewRecord, name: str, given: object, size: int) -> None:
        """Refuse rows that are not ``(R, size)`` bytes: ``argument-shape``, ``argument-dtype``."""
        wanted = (self.num_rows(record.extent), size)
        if not isinstance(given, np.ndarray) or given.shape != wanted:
            found = getattr(given, "shape", given)
            raise misfit(record, f"{name} must be {wanted}, rows of bytes", found, "CACHE-161")
        if given.dtype != np.uint8:
            message = f"record {record.index}: {name} must be uint8; got {given.dtype}"
            raise ShdError("argument-dtype", message, "CACHE-161")

    def split_rows(self, blob: NDArray[np.uint8], size: int, extent: Extent, name: str) -> NDArray[np.uint8]:
        """A part as rows ``(R, size)``, without a copy.

        Raises:
            ShdError: ``argument-shape`` for a blob of another size.
        """
        wanted = (self.num_rows(extent), size)
        if blob.dtype != np.uint8 or blob.shape != (wanted[0] * size,):
            raise ShdError(
                "argument-shape",
                f"{name} must be ({wanted[0] * size},) uint8, {wanted[0]} rows of {size} bytes; got {blob.shape} "
                f"{blob.dtype}",
                "CACHE-161",
            )
        return blob.reshape(wanted)


def as_rows(name: str, rows: NDArray[np.floating], width: int) -> NDArray[np.floating]:
    """The rows themselves, if they are real numbers ``(R, width)``.

    Raises:
        ShdError: ``argument-shape``, ``argument-dtype``.
    """
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ShdError("argument-shape", f"{name} must be (R, {width}); got {rows.shape}", "CACHE-161")
    if rows.dtype.kind != "f":
        raise ShdError("argument-dtype", f"{name} must be floating; got {rows.dtype}", "CACHE-161")
    return rows


def counted_rows(rows: NDArray[np.floating], counted: NDArray[np.bool_] | None) -> NDArray[np.floating]:
    """The rows, with zeros in place of those that do not count (CACHE-162).

    Raises:
        ShdError: ``argument-shape`` or ``argument-dtype`` for a mask that does not fit.
    """
    if counted is None:
        return rows
    if counted.shape != rows.shape[:1]:
        raise ShdError("argument-shape", f"counted must be {rows.shape[:1]}; got {counted.shape}", "CACHE-162")
    if counted.dtype != np.bool_:
        raise ShdError("argument-dtype", f"counted must be boolean; got {counted.dtype}", "CACHE-162")
    return rows if counted.all() else np.where(counted[:, None], rows, rows.dtype.type(0))
