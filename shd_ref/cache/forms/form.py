"""The interface of forms, and the sample that they store."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import RowError
from shd_ref.errors import ShdError

SHA256: Final = re.compile(r"[0-9a-f]{64}")
"""Of a teacher."""

F32 = "F32"
"""Stored as it is: binary32, aligned."""
U8 = "U8"
"""Coded."""


class Part(NamedTuple):
    """One tensor of a record."""

    name: str  # the part of a tensor's name after the sample's number (CACHE-3)
    dtype: str  # F32 or U8
    subject: str  # SUBJECT of its form
    layer: int | None = None  # the student's for attention, the teacher's for hidden states
    optional: bool = False  # whether a record may lack it
    called: str = ""  # in messages, where it is not the name

    @property
    def title(self) -> str:
        return self.called or self.name


class FormFile(NamedTuple):
    """A file that a form keeps once per cache: its name, its bytes, and their XXH3-128."""

    name: str
    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Extent:
    """All that determines the sizes of a record's tensors."""

    length: int  # n, counted positions
    first: int = 0  # positions of padding in front, where all forms leave them out (CACHE-145)
    shapes: tuple[tuple[int, int], ...] = ()  # rows and keys of each layer's maps, where not n and n (CACHE-128)
    decoder: int = 0  # m, positions of the second sequence, where a form has a row for each (CACHE-160)

    @property
    def num_rows(self) -> int:
        return max((rows for rows, _ in self.shapes), default=self.length)


@dataclass(frozen=True, eq=False)
class SampleRecord:
    """A sample with its tensors by the names of its forms' ``parts``, to be written, or as read and checked.

    To be written, padding after ``length`` is cut off; it must carry no probability. ``alphas`` are float32
    ``(num_layers, n_pairs)`` and ``mixing`` is ``(num_layers, H_s, H_t)``; ``L<layer>`` are codes ``(H_s, L, L)``
    with L >= n of maps, or the ``CodedFactors`` of positions ``first`` to n - 1; ``logits`` and ``H<layer>`` are
    uint8 ``(R, bytes)`` as ``Rows.encode`` gives them. As read, ``alphas`` and ``mixing`` are there where they are
    stored; all others are uint8 ``(bytes,)``, those that were asked for: see ``CacheReader.decode``,
    ``decode_logits`` and ``decode_hidden``.
    """

    index: int  # position in the data set
    key: str  # sample_key of its inputs
    length: int
    parts: Mapping[str, Any]  # by Part.name
    seed: int | None = None  # of its augmentation, where the manifest names a column of seeds
    first: int = 0  # this, length and the rest are its extent
    shapes: Sequence[tuple[int, int]] = ()
    decoder: int = 0

    @property
    def extent(self) -> Extent:
        shapes = tuple((rows, keys) for rows, keys in self.shapes)
        return Extent(self.length, self.first, shapes, self.decoder)


@dataclass(frozen=True, kw_only=True)
class Form(ABC):
    """One form of supervision, as the manifest describes it; ``argument-value`` for what no form can have."""

    SUBJECT: ClassVar[str]  # of what it is supervision: the manifest's member, and the error in receipts
    ERROR: ClassVar[type[RowError]]  # of its coding error
    CHOICE: ClassVar[str]  # the keyword by which a reader is told what to read of it
    codec: str

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The tensors of every record, in stored order."""

    @property
    def files(self) -> tuple[FormFile, ...]:
        """Files outside the shards that all records share."""
        return ()

    @abstractmethod
    def part_shapes(self, extent: Extent) -> tuple[tuple[int, ...], ...]:
        """The shape of each of ``parts`` in a record; of ``U8`` the bytes."""

    @property
    @abstractmethod
    def stated(self) -> frozenset[str]:
        """Which of ``first``, ``shapes`` and ``decoder`` its records state: ``first`` counts where all forms do."""

    def check_manifest(self, teacher: str, *, has_decoder: bool) -> None:  # noqa: B027  (most have nothing to refuse)
        """Refuse a manifest that this form does not suit, by its first teacher's SHA-256: ``argument-value``."""

    def extent_problems(self, extent: Extent) -> Iterator[str]:
        """Reasons why no record has this extent."""
        return iter(())

    @abstractmethod
    def num_rows(self, extent: Extent) -> int:
        """Number of ``unit``s of a record, for bytes per unit in a listing."""

    @property
    def unit(self) -> str:
        """The unit that has a row, for a listing."""
        return "position"

    @abstractmethod
    def pack(self, record: SampleRecord) -> Iterator[NDArray[np.uint8]]:
        """The ``U8`` parts of a record, padding cut off; refuses codes that no encoder makes."""

    def coded_size(self, extent: Extent) -> int:
        shapes = zip(self.parts, self.part_shapes(extent), strict=True)
        return sum(math.prod(shape) for part, shape in shapes if part.dtype == U8)

    @abstractmethod
    def plain_size(self, extent: Extent) -> int:
        """Size of a record's supervision as float32, in bytes."""

    def tally(self, record: SampleRecord) -> tuple[int, ...]:
        """Counts of a record that a training logs."""
        return ()

    @abstractmethod
    def describe(self) -> list[tuple[str, str]]:
        """Names and values for a listing and a report."""


def require(holds: bool, rule: str, value: object, spec_id: str = "CACHE-101") -> None:
    """Refuse a value: ``argument-value`` unless the rule holds."""
    if not holds:
        raise ShdError("argument-value", f"{rule}; got {value!r}", spec_id)


def require_ranges(owner: object, spec_id: str = "CACHE-101", of: str = "", **ranges: tuple[int, int]) -> None:
    """Refuse numbers of ``owner`` that are not from the first to the second: ``argument-value``."""
    for name, (low, high) in ranges.items():
        value = getattr(owner, name)
        require(low <= value <= high, f"{of}{name} must be {low} to {high}", value, spec_id)


def misfit(record: SampleRecord, rule: str, value: object, spec_id: str = "CACHE-40") -> ShdError:
    """The error for a record that is not as the manifest says: ``argument-shape``."""
    return ShdError("argument-shape", f"record {record.index}: {rule}; got {value}", spec_id)
