"""A data set of rows, one a sample, in any file or library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from shd_ref.errors import ShdError

Row: TypeAlias = dict[str, Any]
"""One sample by column: arrays without a batch axis, or text."""


class Source(ABC):
    """A data set that can be read from its beginning, with one row (or block of rows) in memory at a time.

    Attributes:
        name: for messages, such as the path.
        columns: what a row can hold.
        ragged: rows of one column may differ in length, because none is padded.
    """

    name: str
    columns: tuple[str, ...]
    ragged: bool = True

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows; cheap next to reading them."""

    @abstractmethod
    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """All rows in order, with these columns."""

    @property
    def remark(self) -> str | None:
        """What a user should know about the last pass over the rows, if anything."""
        return None

    def refuse(self, problem: str, index: int | None = None) -> ShdError:
        """The error ``inputs-invalid`` that names this source, and the row."""
        return ShdError("inputs-invalid", f"inputs {self.name}{'' if index is None else f', row {index}'}: {problem}")


class IndexedSource(Source):
    """A data set that gives any row at about the cost of its bytes."""

    @abstractmethod
    def row(self, index: int, columns: Sequence[str]) -> Row:
        """One row, with these columns."""

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """All rows in order, with these columns."""
        return (self.row(index, columns) for index in range(len(self)))
