"""Logits: a teacher's rows over its vocabulary or its classes (CACHE-164 to CACHE-171)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import largest_move, to_float16
from shd_ref.cache.codecs.distortion import LogitsError, RowError
from shd_ref.cache.codecs.logits import (
    LOGITS_CODECS,
    check_padding,
    check_row_numbers,
    decode_rows,
    head_moves,
    logits_error,
    pick_classes,
    rows_moved,
)
from shd_ref.cache.forms.form import SHA256, U8, Extent, Part, SampleRecord, require
from shd_ref.cache.forms.rows import Counted, Reals, Rows, as_rows, counted_rows
from shd_ref.cache.storage.documents import optional
from shd_ref.errors import ShdError
from shd_ref.kd.codes import MAX_VOCABULARY, RowCode, TopkTargets

MAX_CLASSES: Final = 1 << 16
"""Of a head: decoding makes a number of every bit, so a forged row of more would take gigabytes."""


@dataclass(frozen=True)
class AveragedTeacher:
    """A teacher whose logits are averaged with those of the manifest's ``teacher`` (CACHE-163).

    Attributes:
        sha256: of its file, as the teacher's.
        name: for people.
        dtype: as the teacher's.
        tensor: name of its graph's tensor.
        padded_vocab_size: number of its classes, if the last ones only pad the vocabulary; else None.
    """

    sha256: str
    name: str
    dtype: str
    tensor: str
    padded_vocab_size: int | None = optional(None)

    def __post_init__(self) -> None:
        _require(bool(SHA256.fullmatch(self.sha256)), "with_teachers.sha256 must be 64 hex digits", self.sha256)


@dataclass(frozen=True, kw_only=True)
class Logits(Rows):
    """Records hold rows of logits: their likeliest classes, or all.

    Attributes:
        codec: ``"topk"``: ``head`` classes and the mass of all others; ``"float16"``: all logits.
        rows: ``"positions"`` for a language model, ``"sample"`` for a classifier.
        tensor: name of the graph's tensor.
        vocab_size: V, classes that are stored.
        padded_vocab_size: how many the teacher gives, where the last ones only pad the vocabulary; else None.
        temperature: T of the record; None for ``float16``, which works at any.
        head: classes with a probability each.
        value_bits: of a head's probability, 4 to 16; 0 for ``float16``.
        with_teachers: further teachers, in their order; rows are those of the mean of all logits.

    Raises:
        ShdError: ``argument-value`` for a number or name outside its range.
    """

    SUBJECT: ClassVar[str] = "logits"
    ERROR: ClassVar[type[RowError]] = LogitsError
    CHOICE: ClassVar[str] = "logits"

    tensor: str
    vocab_size: int
    padded_vocab_size: int | None = optional(None)
    temperature: float | None = optional(None)
    head: int = optional(0)
    value_bits: int = optional(0)
    with_teachers: tuple[AveragedTeacher, ...] = optional(())

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.codec in LOGITS_CODECS, f"logits.codec must be one of {LOGITS_CODECS}", self.codec, "CACHE-164")
        size = self.vocab_size
        _require(1 <= size <= MAX_VOCABULARY, f"vocab_size must be 1 to {MAX_VOCABULARY}", size)
        for padded in (self.padded_vocab_size, *(teacher.padded_vocab_size for teacher in self.with_teachers)):
            fits = padded is None or size < padded <= MAX_VOCABULARY
            _require(fits, f"padded_vocab_size must be None, or above vocab_size, at most {MAX_VOCABULARY}", padded)
        hashes = [teacher.sha256 for teacher in self.with_teachers]
        _require(len(set(hashes)) == len(hashes), "with_teachers must be different teachers", hashes)
        if self.codec == "float16":
            unused = (self.temperature, self.head, self.value_bits)
            _require(unused == (None, 0, 0), "temperature, head and value_bits must be left out for float16", unused)
            return
        if self.temperature is not None:
            object.__setattr__(self, "temperature", float(self.temperature))  # 1 and 1.0 are the same job
        warm = self.temperature is not None and 0 < self.temperature < math.inf
        _require(warm, "temperature must be finite and above 0", self.temperature)
        _require(self.head <= MAX_CLASSES, f"head must be at most {MAX_CLASSES}", self.head)
        _ = self.code  # which checks head and value_bits

    def check_manifest(self, teacher: str, *, has_decoder: bool) -> None:
        super().check_manifest(teacher, has_decoder=has_decoder)
        own = teacher not in [other.sha256 for other in self.with_teachers]
        require(own, "logits.with_teachers must be other teachers than the first", teacher, "CACHE-163")

    @property
    def code(self) -> RowCode:
        """How rows of ``topk`` are coded."""
        return RowCode(self.vocab_size, self.head, self.value_bits)

    @property
    def given_classes(self) -> int:
        """Number of classes of the coded rows: several teachers' rows are cut before averaging."""
        return self.vocab_size if self.with_teachers else self.padded_vocab_size or self.vocab_size

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return 2 * self.vocab_size if self.codec == "float16" else self.code.row_bytes

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return (self.row_bytes,)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("logits", U8, self.SUBJECT),)

    def pack(self, record: SampleRecord) -> Iterator[NDArray[np.uint8]]:
        """The rows, one after another; ``not-finite``, ``argument-value``: numbers that no encoder makes."""
        rows = np.ascontiguousarray(record.parts["logits"])
        if self.codec != "float16":
            check_row_numbers(rows)
        elif not np.isfinite(rows.view("<f2")).all():
            raise ShdError("not-finite", f"record {record.index}: logits must be finite; got NaN", "CACHE-169")
        yield rows.reshape(-1)

    def plain_size(self, extent: Extent) -> int:
        return 4 * self.vocab_size * self.num_rows(extent)

    def encode(self, rows: Reals, counted: Counted = None) -> NDArray[np.uint8]:
        """A sample's logits ``(R, V)``, or with the classes that pad the vocabulary, as bytes ``(R, row_bytes)``.

        Of several teachers rows are those of the mean. Where ``counted`` ``(R,)`` is False, a row is coded as zeros.
        Raises ``argument-shape``, ``argument-dtype``, ``not-finite``, and ``argument-value`` for padding that has
        mass (CACHE-168) and for a number that float16 cannot hold.
        """
        logits = self._cut(rows, counted)
        if self.codec == "float16":
            halves = to_float16("logits", logits, remedy="use topk")
            return np.ascontiguousarray(halves, dtype="<f2").view(np.uint8)
        assert self.temperature is not None  # of float16 alone
        return self.code.encode(*pick_classes(logits, self.head, self.temperature))

    def measure(self, rows: Reals, codes: NDArray[np.uint8], counted: Counted = None) -> LogitsError:
        """Coding error over counted rows (CACHE-170): arguments and result of ``encode``, at T or at 1."""
        logits = self._cut(rows, counted)
        if counted is not None:
            logits, codes = logits[counted], codes[counted]
        return logits_error(logits, self.temperature or 1.0, lambda some: self._decode(codes[some]))

    def decode(self, record: SampleRecord) -> TopkTargets | NDArray[np.float32]:
        """A record's rows, as ``shd_torch.kd`` takes them: R rows of classes, or logits ``(R, V)``.

        Raises ``argument-value`` where the record was read without; ``cache-corrupt`` for rows that no encoder
        writes.
        """
        decoded = self._decode(self.read_rows(record, self.parts[0], self.row_bytes))
        if isinstance(decoded, np.ndarray):
            return decoded
        assert self.temperature is not None  # of float16 alone
        ids, log_probs, log_tail = decoded
        return TopkTargets(ids, log_probs, log_tail, self.temperature, self.vocab_size)

    def compare(self, record: SampleRecord, rows: Reals) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Total variation ``(R,)`` of a record from the teacher's current rows, and its bound due to coding.

        Over the classes that the record tells apart (CACHE-91, CACHE-171). Raises as ``decode``, and
        ``argument-shape`` for another number of rows.
        """
        codes, temperature = self.read_rows(record, self.parts[0], self.row_bytes), self.temperature or 1.0
        logits = as_rows("logits", rows, self.given_classes)[:, : self.vocab_size]
        if len(logits) != len(codes):
            raise ShdError("argument-shape", f"rows must be {len(codes)}; got {len(logits)}", "CACHE-160")
        moved = rows_moved(logits, temperature, lambda some: self._decode(codes[some]))
        if self.codec == "float16":
            return moved, largest_move("float16", logits) / temperature / 2
        # Of a tail, whose logarithm x is rounded: exp(x) |x| 2^-11 is less than half of 2^-11.
        return moved, (head_moves(self.code, codes) + 2.0**-11) / 2

    def describe(self) -> list[tuple[str, str]]:
        padding = "" if self.padded_vocab_size is None else f" of {self.padded_vocab_size}, the rest is padding"
        classes = f"the {self.head} likeliest classes and their rest" if self.head else "all classes"
        bound = "any temperature" if self.temperature is None else f"temperature {self.temperature:g}"
        others = ", ".join(teacher.name for teacher in self.with_teachers)
        mean = f"; mean with {others}" if others else ""
        rows = f"{classes}; {self.vocab_size} classes{padding}; {bound}{mean}"
        return [("logits", rows), ("logits codec", f"{self.codec}, {self.row_bytes} bytes per {self.unit}")]

    def _cut(self, rows: Reals, counted: Counted) -> Reals:
        """The classes that are stored, with zeros in rows that do not count."""
        rows = as_rows("logits", rows, self.given_classes)
        kept = counted_rows(rows[:, : self.vocab_size], counted)
        if not np.isfinite(kept).all():
            raise ShdError("not-finite", "logits must be finite; got NaN or infinity", "CACHE-165")
        check_padding(rows if counted is None else rows[counted], self.vocab_size, self.temperature or 1.0)
        return kept

    def _decode(self, rows: NDArray[np.uint8]) -> Any:
        """``DecodedRows``, or logits."""
        if self.codec != "float16":
            return decode_rows(self.code, rows)
        logits = np.ascontiguousarray(rows).view("<f2").astype(np.float32)
        if not np.isfinite(logits).all():
            raise ShdError("cache-corrupt", "logits must be finite; got NaN or infinity", "CACHE-169")
        return logits


def _require(holds: bool, rule: str, value: object) -> None:
    require(holds, f"logits.{rule}", value, "CACHE-165")
