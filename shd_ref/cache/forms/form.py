"""The interface: what a cache asks of a form, and the sample that forms store."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.factored import CodedFactors
from shd_ref.errors import ShdError

SHA256: Final = re.compile(r"[0-9a-f]{64}")
"""Of a teacher."""

F32 = "F32"
"""Stored as it is: binary32, aligned."""
U8 = "U8"
"""Coded, and compressed where the cache is."""


class _NoAttention:
    """Stands in the place of a form of attention, and of its error, in a cache that has none (CACHE-160).

    Every use is an error that says so: what asks for maps need not ask first whether there are any.
    """

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # how Python asks what an object can do
        raise ShdError(
            "argument-value",
            f"the cache must contain attention for this; it has none ({name}): precompute it with attention, or use "
            "logits and hidden states alone",
            "CACHE-160",
        )

    def __repr__(self) -> str:
        return "no attention"

    def __reduce__(self) -> str:
        return "NO_ATTENTION"  # also of a copy: there is one such object


NO_ATTENTION: Final[Any] = _NoAttention()
"""``Manifest.attention`` and ``Errors.attention`` where a cache has none."""


class Part(NamedTuple):
    """One tensor of a record.

    Attributes:
        name: what follows the sample's number in its name (CACHE-3).
        dtype: ``F32`` or ``U8``.
        optional: whether a record may lack it.
        layer: the layer that it belongs to, or None: the student's for attention, the teacher's for hidden states.
        subject: ``SUBJECT`` of its form.
    """

    name: str
    dtype: str
    optional: bool = False
    layer: int | None = None
    subject: str = "attention"

    @property
    def title(self) -> str:
        """For messages."""
        if self.layer is None:
            return self.name
        return f"layer {self.layer}" if self.subject == "attention" else f"{self.subject} layer {self.layer}"


@dataclass(frozen=True)
class Extent:
    """The quantities that determine the sizes of a record's tensors.

    Attributes:
        length: n.
        first: positions of padding in front (CACHE-145).
        shapes: rows and keys of each layer's maps, where they are not n and n (CACHE-128).
        decoder: m, positions of the second sequence, where a form has a row for each; else 0 (CACHE-160).
    """

    length: int
    first: int = 0
    shapes: tuple[tuple[int, int], ...] = ()
    decoder: int = 0

    @property
    def num_rows(self) -> int:
        """Of the layer that has most: the last axis of weights by row."""
        return max((rows for rows, _ in self.shapes), default=self.length)


def no_alphas() -> NDArray[np.float32]:
    """Those of a record without attention, ``(0, 0)``."""
    return np.empty((0, 0), np.float32)


@dataclass(frozen=True, eq=False)
class NewRecord:
    """A sample to write. Padding after ``length`` is cut off; it must have no probability.

    Attributes:
        index: position in the data set.
        key: ``sample_key`` of its inputs.
        length: n, counted positions, at least 1.
        codes: per layer of the manifest: for maps ``(H_s, L, L)`` codes with L >= n, for factors the queries and keys
            of positions ``first`` to n - 1. Empty where the manifest has no attention, as are alphas.
        alphas: float32 ``(num_layers, n_pairs)``, or ``(num_layers, n_pairs, L)`` where every row has its own; rounds
            follow each other. ``n_pairs`` is 0 for strategies that have none.
        mixing: float32 ``(num_layers, H_s, H_t)``, with a last axis L where every row has its own; or None.
        seed: of the sample's augmentation, where the manifest names a column of seeds.
        first: positions of padding in front, where the form leaves them out.
        shapes: rows and keys of each layer's maps, where the manifest has shapes ``own`` (CACHE-128).
        logits: uint8 ``(R, row_bytes)`` as ``Logits.encode`` gives them, where the manifest has logits; else None.
        hidden: teacher layer -> uint8 ``(R, row_bytes)`` as ``Hidden.encode`` gives them, for each layer that the
            manifest names.
        decoder: m, counted positions of the second sequence, where a form has a row for each; else 0.
    """

    index: int
    key: str
    length: int
    codes: Sequence[NDArray[Any] | CodedFactors] = ()
    alphas: NDArray[np.float32] = field(default_factory=no_alphas)
    mixing: NDArray[np.float32] | None = None
    seed: int | None = None
    first: int = 0
    shapes: Sequence[tuple[int, int]] = ()
    logits: NDArray[np.uint8] | None = None
    hidden: Mapping[int, NDArray[np.uint8]] = field(default_factory=dict)
    decoder: int = 0

    @property
    def extent(self) -> Extent:
        """The extent, which determines the sizes of its tensors."""
        shapes = tuple((rows, keys) for rows, keys in self.shapes)
        return Extent(self.length, self.first, shapes, self.decoder)


@dataclass(frozen=True, eq=False)
class StoredRecord:
    """A stored sample with verified checksums.

    Attributes:
        index: position in the data set.
        key: of the sample.
        length: n.
        blobs: student layer -> packed codes, uint8; see ``CacheReader.decode``.
        alphas: float32 ``(num_layers, n_pairs)`` or ``(num_layers, n_pairs, n)``; ``n_pairs`` is 0 if none. Of a
            cache without attention ``(0, 0)``.
        mixing: float32 ``(num_layers, H_s, H_t)`` or ``(num_layers, H_s, H_t, n)``, or None if not stored.
        seed: of the sample's augmentation, or None.
        first: positions of padding in front, which the blobs leave out.
        shapes: rows and keys of each layer of the manifest, where it has shapes ``own``; else empty.
        logits: bytes of all rows, one after another, uint8; see ``CacheReader.decode_logits``. None if the cache has
            none, or they were not requested.
        hidden: teacher layer -> the same of hidden states; see ``CacheReader.decode_hidden``.
        decoder: m, positions of the second sequence, where a form has a row for each; else 0.
    """

    index: int
    key: str
    length: int
    blobs: dict[int, NDArray[np.uint8]]
    alphas: NDArray[np.float32]
    mixing: NDArray[np.float32] | None
    seed: int | None = None
    first: int = 0
    shapes: tuple[tuple[int, int], ...] = ()
    logits: NDArray[np.uint8] | None = None
    hidden: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    decoder: int = 0

    @property
    def extent(self) -> Extent:
        """The extent, which determines the sizes of its tensors."""
        return Extent(self.length, self.first, self.shapes, self.decoder)


@dataclass(frozen=True, kw_only=True)
class Form(ABC):
    """One form of supervision, as the manifest describes it.

    Attributes:
        SUBJECT: the target of the supervision; the name of the manifest's member.
        codec: how it is coded.
    """

    SUBJECT: ClassVar[str]
    codec: str

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The tensors of every record, in stored order."""

    @abstractmethod
    def part_shapes(self, extent: Extent) -> tuple[tuple[int, ...], ...]:
        """The shape of each of ``parts`` in a record; of ``U8`` the bytes before compression."""

    @abstractmethod
    def extent_problems(self, extent: Extent) -> Iterator[str]:
        """What keeps a record from being of this extent."""

    @abstractmethod
    def num_rows(self, extent: Extent) -> int:
        """Number of ``unit``s of a record, for bytes per unit in a listing."""

    @property
    def unit(self) -> str:
        """What a row of it belongs to, for a listing."""
        return "position"

    @abstractmethod
    def check(self, record: NewRecord) -> None:
        """Refuse a record that does not fit: ``argument-shape``, ``argument-dtype``, ``not-finite``."""

    @abstractmethod
    def floats(self, record: NewRecord) -> Iterator[NDArray[np.float32] | None]:
        """The ``F32`` parts of a record that was checked, padding cut off; None for one that it lacks."""

    @abstractmethod
    def pack(self, record: NewRecord) -> Iterator[NDArray[np.uint8]]:
        """The ``U8`` parts of a record that was checked, padding cut off, before compression.

        Raises:
            ShdError: for codes that no encoder makes, or that would be lost.
        """

    @abstractmethod
    def held_size(self, extent: Extent) -> int:
        """Memory of a sample's codes before packing, in bytes."""

    @abstractmethod
    def plain_size(self, extent: Extent) -> int:
        """Size of a record's supervision as float32, in bytes."""

    @abstractmethod
    def arrays(self, record: StoredRecord) -> Iterator[tuple[str, NDArray[Any]]]:
        """A decoded record as float32 or int32 arrays by name, as in an export."""

    @abstractmethod
    def describe(self) -> list[tuple[str, str]]:
        """Names and values for a listing and a report."""


def require(holds: bool, rule: str, value: object, spec_id: str = "CACHE-101") -> None:
    """Refuse a value: ``argument-value`` unless the rule holds."""
    if not holds:
        raise ShdError("argument-value", f"{rule}; got {value!r}", spec_id)


def misfit(record: NewRecord, rule: str, value: object, spec_id: str = "CACHE-40") -> ShdError:
    """The error for a record that is not as the manifest says: ``argument-shape``."""
    return ShdError("argument-shape", f"record {record.index}: {rule}; got {value}", spec_id)
