"""Targets that are rows, each coded alone: logits, hidden states and embeddings (CACHE-160 to CACHE-185).

A form of rows is a list of parts, each with the ``RowCodec`` that turns its numbers into bytes and back; writing,
reading, measuring and comparing are then one for all of them. The states that a teacher's head reads are in
``exact.py``, with the head.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import (
    INT8_LEVELS,
    VECTOR_CODECS,
    HiddenError,
    LogitsError,
    RowError,
    check_blob,
    check_finite,
    largest_move,
    to_float16,
    to_int8,
)
from shd_ref.cache.codecs.logits import (
    LOGITS_CODECS,
    MAX_VOCABULARY,
    RowCode,
    TopkTargets,
    check_padding,
    check_row_numbers,
    logits_error,
    pick_classes,
    rows_moved,
)
from shd_ref.cache.forms.form import SHA256, U8, Extent, Form, Part, SampleRecord, require, require_ranges
from shd_ref.cache.storage.documents import optional
from shd_ref.cache.storage.storage import MAX_LAYERS
from shd_ref.errors import ShdError, need

Reals: TypeAlias = NDArray[np.floating[Any]]
Counted: TypeAlias = NDArray[np.bool_] | None
Moves: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]

ROWS: Final = {"positions": "position", "decoder": "position of the decoder", "sample": "sample"}
"""Values of ``rows``, and for each the unit that has a row."""

MAX_CLASSES: Final = 1 << 16
"""Of a head: decoding makes a number of every bit, so a forged row of more would take gigabytes."""

MAX_WIDTH: Final = 1 << 20

POOLINGS: Final = ("mean", "cls", "max", "last")
"""How the states of a text become one vector (CACHE-182)."""

_FLOATS: Final = {"float32": "<f4", "float16": "<f2"}


class RowCodec(ABC):
    """How the rows of one part are coded, one by one."""

    width: int  # numbers of a row as the teacher gives it

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of a coded row."""

    @property
    def stored(self) -> int:
        """Numbers of a row that are stored; those after them are padding."""
        return self.width

    def take(self, name: str, rows: Reals, counted: Counted) -> Reals:
        """The numbers to code, with zeros in rows that do not count (CACHE-162)."""
        fits = rows.ndim == 2 and rows.shape[1] == self.width
        need(fits, "argument-shape", name, f"be (R, {self.width})", rows.shape, spec_id="CACHE-161")
        need(rows.dtype.kind == "f", "argument-dtype", name, "be floating", rows.dtype, spec_id="CACHE-161")
        numbers = rows[:, : self.stored]
        if counted is None:
            return numbers
        shape = rows.shape[:1]
        need(counted.shape == shape, "argument-shape", "counted", f"be {shape}", counted.shape, spec_id="CACHE-162")
        need(counted.dtype == bool, "argument-dtype", "counted", "be boolean", counted.dtype, spec_id="CACHE-162")
        return numbers if counted.all() else np.where(counted[:, None], numbers, numbers.dtype.type(0))

    @abstractmethod
    def encode(self, name: str, values: Reals) -> NDArray[np.uint8]:
        """Bytes ``(R, size)`` of numbers that were taken."""

    def check(self, where: str, rows: NDArray[np.uint8]) -> None:  # noqa: B027  (a codec may take any bytes)
        """Refuse contiguous bytes that no encoder makes: ``not-finite``, ``argument-value``."""

    @abstractmethod
    def decode(self, name: str, rows: NDArray[np.uint8]) -> Any:
        """The numbers of bytes ``(R, size)``; ``cache-corrupt`` for NaN and infinity."""

    @abstractmethod
    def error(self, values: Reals, rows: NDArray[np.uint8]) -> Any:
        """The error of coding numbers, all of rows that count: a ``RowError``."""

    @abstractmethod
    def compare(self, name: str, values: Reals, rows: NDArray[np.uint8]) -> Moves:
        """How far coded rows are from a teacher's current ones ``(R,)``, and how far coding alone may move them."""


@dataclass(frozen=True)
class VectorCodec(RowCodec):
    """Binary32 or binary16 numbers, or a step in binary32 followed by int8 codes (CACHE-177, CACHE-183)."""

    codec: str
    width: int

    @property
    def size(self) -> int:
        return np.dtype(_FLOATS[self.codec]).itemsize * self.width if self.codec in _FLOATS else 4 + self.width

    def take(self, name: str, rows: Reals, counted: Counted) -> NDArray[np.float32]:
        values = super().take(name, rows, counted).astype(np.float32)
        check_finite(name, values, "CACHE-177")
        return values

    def encode(self, name: str, values: Reals) -> NDArray[np.uint8]:
        if self.codec in _FLOATS:
            numbers = to_float16(name, values) if self.codec == "float16" else values
            return np.ascontiguousarray(numbers, dtype=_FLOATS[self.codec]).view(np.uint8)
        codes, steps = to_int8(values.astype(np.float32, copy=False))
        return np.concatenate((steps.astype("<f4")[:, None].view(np.uint8), codes.view(np.uint8)), axis=1)

    def check(self, where: str, rows: NDArray[np.uint8]) -> None:
        steps, codes = self._split(rows)
        check_finite(where, codes if steps is None else steps, "CACHE-177")
        if steps is not None and ((steps < 0).any() or (codes < -INT8_LEVELS).any()):
            raise ShdError("argument-value", f"{where} must have no negative step and no code -128", "CACHE-177")

    def decode(self, name: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        steps, codes = self._split(rows)
        values = codes.astype(np.float32)
        values = values if steps is None else values * steps
        check_finite(name, values, "CACHE-177", "cache-corrupt")
        return values

    def error(self, values: Reals, rows: NDArray[np.uint8]) -> HiddenError:
        """As shares of the rows' norms (CACHE-178, CACHE-184)."""
        moved = self.compare("rows", values, rows)[0]
        return HiddenError(float(moved.mean()) if len(moved) else 0.0, float(moved.max(initial=0.0)), len(moved))

    def bound(self, values: Reals) -> NDArray[np.float64]:
        """Largest coding error of a number in each row of ``(R, width)``: ``(R,)`` (CACHE-179, CACHE-185)."""
        return np.zeros(len(values)) if self.codec == "float32" else largest_move(self.codec, values)

    def compare(self, name: str, values: Reals, rows: NDArray[np.uint8]) -> Moves:
        norms = np.linalg.norm(values.astype(np.float64), axis=-1)
        norms[norms == 0] = 1.0
        moved = np.linalg.norm(self.decode(name, rows).astype(np.float64) - values, axis=-1) / norms
        return moved, np.sqrt(self.width) * self.bound(values) / norms

    def _split(self, rows: NDArray[np.uint8]) -> tuple[NDArray[np.float32] | None, NDArray[Any]]:
        """Steps ``(R, 1)``, if there are any, and codes ``(R, width)``."""
        rows = np.ascontiguousarray(rows)
        if self.codec in _FLOATS:
            return None, rows.view(_FLOATS[self.codec])
        steps = np.ascontiguousarray(rows[:, :4]).view("<f4").astype(np.float32, copy=False)
        return steps, rows[:, 4:].view(np.int8)


@dataclass(frozen=True, kw_only=True)
class Rows(Form):
    """A form whose parts are rows: of positions ``first`` to n - 1, of decoder positions, or of a sample."""

    rows: str

    def __post_init__(self) -> None:
        require(self.rows in ROWS, f"{self.SUBJECT}.rows must be one of {tuple(ROWS)}", self.rows, "CACHE-160")

    @property
    @abstractmethod
    def coded(self) -> tuple[tuple[Part, RowCodec], ...]:
        """Each part with the codec of its rows, in stored order."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part, _ in self.coded)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return tuple(codec.size for _, codec in self.coded)

    def encode(self, rows: Reals, counted: Counted = None, layer: int | None = None) -> NDArray[np.uint8]:
        """A sample's rows ``(R, width)`` as bytes ``(R, size)``; of an embedding R is 1.

        Args:
            rows: as the teacher gives them: of logits with the classes that pad the vocabulary.
            counted: ``(R,)``; where it is False, a row is coded as zeros, whatever it holds.
            layer: of hidden states, the teacher's.

        Raises:
            ShdError: ``argument-shape``, ``argument-dtype``, ``not-finite``; ``argument-value`` for a layer that is
                not stored, a number that float16 cannot hold, and padding that has mass (CACHE-168).
        """
        part, codec = self._find(layer)
        return codec.encode(part.title, codec.take(part.title, rows, counted))

    def measure(
        self, rows: Reals, codes: NDArray[np.uint8], counted: Counted = None, layer: int | None = None
    ) -> RowError:
        """Coding error over counted rows (CACHE-170, CACHE-178): arguments and result of ``encode``."""
        part, codec = self._find(layer)
        chosen = slice(None) if counted is None else counted
        error: RowError = codec.error(codec.take(part.title, rows, counted)[chosen], codes[chosen])
        return error

    def decode(self, record: SampleRecord, layer: int | None = None) -> Any:
        """A record's rows ``(R, width)``: of logits as ``shd_torch.kd`` takes them, of an embedding one vector.

        Raises:
            ShdError: ``argument-value`` where the rows, or this layer, were not read or are not stored;
                ``cache-corrupt`` for bytes that no encoder writes.
        """
        return self.decode_rows(self._read(record, *self._find(layer)), layer)

    def decode_rows(self, rows: NDArray[np.uint8], layer: int | None = None) -> Any:
        """The same of bytes ``(R, size)``, as ``encode`` gives them."""
        part, codec = self._find(layer)
        return codec.decode(part.title, rows)

    def compare(self, record: SampleRecord, rows: Reals, layer: int | None = None) -> Moves:
        """How far a record's rows are from the teacher's current ones ``(R,)``, and the bound for coding (CACHE-91).

        Total variations of logits, over the classes that the record tells apart (CACHE-171); of vectors distances as
        shares of their norms. Raises as ``decode``, and ``argument-shape`` for another number of rows.
        """
        part, codec = self._find(layer)
        codes = self._read(record, part, codec)
        need(len(rows) == len(codes), "argument-shape", "rows", f"be {len(codes)}", len(rows), spec_id="CACHE-160")
        return codec.compare(part.title, RowCodec.take(codec, part.title, rows, None), codes)

    def check_manifest(self, teacher: str, *, has_decoder: bool) -> None:
        rule = f"{self.SUBJECT}.rows must be 'positions' or 'sample' without a second sequence"
        require(self.rows != "decoder" or has_decoder, rule, "decoder", "CACHE-160")

    @property
    def averaged(self) -> tuple[AveragedTeacher, ...]:
        """Further teachers whose mean with the first is stored."""
        return ()

    @property
    def unit(self) -> str:
        return ROWS[self.rows]

    def num_rows(self, extent: Extent) -> int:
        return {"positions": extent.length - extent.first, "decoder": extent.decoder, "sample": 1}[self.rows]

    def part_shapes(self, extent: Extent) -> tuple[tuple[int, ...], ...]:
        return tuple((self.num_rows(extent) * size,) for size in self.row_sizes)

    def plain_size(self, extent: Extent) -> int:
        return 4 * sum(codec.stored for _, codec in self.coded) * self.num_rows(extent)

    @property
    def stated(self) -> frozenset[str]:
        """Padding in front is left out; the second sequence counts where rows are its positions."""
        return frozenset({"first", "decoder"} if self.rows == "decoder" else {"first"})

    def extent_problems(self, extent: Extent) -> Iterator[str]:
        if self.rows == "decoder" and extent.decoder < 1:
            yield f"decoder must be at least 1 where {self.SUBJECT} have its rows; got {extent.decoder}"

    def pack(self, record: SampleRecord) -> Iterator[NDArray[np.uint8]]:
        for part, codec in self.coded:
            rows = self._read(record, part, codec)
            codec.check(f"record {record.index}: {part.title}", rows)
            yield rows.reshape(-1)

    def _find(self, layer: int | None) -> tuple[Part, RowCodec]:
        for part, codec in self.coded:
            if part.layer == layer:
                return part, codec
        layers = [part.layer for part in self.parts]
        raise ShdError("argument-value", f"layer must be one of the teacher's {layers}; got {layer}", "CACHE-176")

    def _read(self, record: SampleRecord, part: Part, codec: RowCodec) -> NDArray[np.uint8]:
        """A part as contiguous rows ``(R, size)``; ``argument-shape`` for other bytes."""
        if part.name not in record.parts:
            message = f"record {record.index} must be read with {part.title} to decode it; got {sorted(record.parts)}"
            raise ShdError("argument-value", message, "CACHE-161")
        blob, count = np.ascontiguousarray(record.parts[part.name]).reshape(-1), self.num_rows(record.extent)
        check_blob(part.title, blob, count * codec.size, f"{count} rows of {codec.size} bytes", "CACHE-161")
        rows: NDArray[np.uint8] = blob.reshape(count, codec.size)
        return rows


@dataclass(frozen=True)
class AveragedTeacher:
    """A teacher whose logits are averaged with those of the manifest's ``teacher`` (CACHE-163)."""

    sha256: str  # of its file, as the teacher's
    name: str  # for people
    dtype: str  # as the teacher's
    tensor: str  # name of its graph's tensor
    padded_vocab_size: int | None = optional(None)  # its classes, where the last ones only pad the vocabulary

    def __post_init__(self) -> None:
        _of_logits(bool(SHA256.fullmatch(self.sha256)), "with_teachers.sha256 must be 64 hex digits", self.sha256)


@dataclass(frozen=True, kw_only=True)
class Logits(Rows):
    """Records hold rows of logits: their likeliest classes, or all (CACHE-164 to CACHE-171).

    Codec ``"topk"`` has ``head`` classes and the mass of all others, ``"float16"`` all logits. Rows are
    ``"positions"`` of a language model, or ``"sample"`` of a classifier.
    """

    SUBJECT: ClassVar[str] = "logits"
    ERROR: ClassVar[type[RowError]] = LogitsError
    CHOICE: ClassVar[str] = "logits"

    tensor: str  # name of the graph's tensor
    vocab_size: int  # V, classes that are stored
    padded_vocab_size: int | None = optional(None)  # the teacher's, where the last ones only pad the vocabulary
    temperature: float | None = optional(None)  # T of the record; None for float16, which works at any
    head: int = optional(0)  # classes with a probability each
    value_bits: int = optional(0)  # of a head's probability, 4 to 16; 0 for float16
    with_teachers: tuple[AveragedTeacher, ...] = optional(())  # further ones, whose mean with the first is stored

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.codec in LOGITS_CODECS, f"logits.codec must be one of {LOGITS_CODECS}", self.codec, "CACHE-164")
        size = self.vocab_size
        require_ranges(self, "CACHE-165", "logits.", vocab_size=(1, MAX_VOCABULARY), head=(0, MAX_CLASSES))
        for padded in (self.padded_vocab_size, *(teacher.padded_vocab_size for teacher in self.with_teachers)):
            fits = padded is None or size < padded <= MAX_VOCABULARY
            _of_logits(fits, f"padded_vocab_size must be None, or above vocab_size, at most {MAX_VOCABULARY}", padded)
        hashes = [teacher.sha256 for teacher in self.with_teachers]
        _of_logits(len(set(hashes)) == len(hashes), "with_teachers must be different teachers", hashes)
        if self.codec == "float16":
            unused = (self.temperature, self.head, self.value_bits)
            rule = "temperature, head and value_bits must be left out for float16"
            _of_logits(unused == (None, 0, 0), rule, unused)
            return
        if self.temperature is not None:
            object.__setattr__(self, "temperature", float(self.temperature))  # 1 and 1.0 are the same job
        warm = self.temperature is not None and 0 < self.temperature < math.inf
        _of_logits(warm, "temperature must be finite and above 0", self.temperature)
        _ = self.code  # which checks head and value_bits

    def check_manifest(self, teacher: str, *, has_decoder: bool) -> None:
        super().check_manifest(teacher, has_decoder=has_decoder)
        is_other = teacher not in [other.sha256 for other in self.with_teachers]
        require(is_other, "logits.with_teachers must be other teachers than the first", teacher, "CACHE-163")

    @property
    def averaged(self) -> tuple[AveragedTeacher, ...]:
        return self.with_teachers

    @property
    def code(self) -> RowCode:
        return RowCode(self.vocab_size, self.head, self.value_bits)

    @functools.cached_property
    def coded(self) -> tuple[tuple[Part, RowCodec], ...]:
        """The classes that the coded rows have: several teachers' rows are cut before averaging."""
        width = self.vocab_size if self.with_teachers else self.padded_vocab_size or self.vocab_size
        code = None if self.codec == "float16" else self.code
        codec = LogitsCodec(width, self.vocab_size, self.temperature or 1.0, code)
        return ((Part("logits", U8, self.SUBJECT), codec),)

    def describe(self) -> list[tuple[str, str]]:
        padding = "" if self.padded_vocab_size is None else f" of {self.padded_vocab_size}, the rest is padding"
        classes = f"the {self.head} likeliest classes and their rest" if self.head else "all classes"
        bound = "any temperature" if self.temperature is None else f"temperature {self.temperature:g}"
        others = ", ".join(teacher.name for teacher in self.with_teachers)
        mean = f"; mean with {others}" if others else ""
        rows = f"{classes}; {self.vocab_size} classes{padding}; {bound}{mean}"
        return [("logits", rows), ("logits codec", f"{self.codec}, {self.row_sizes[0]} bytes per {self.unit}")]


@dataclass(frozen=True)
class LogitsCodec(RowCodec):
    """All logits in binary16, or by ``code`` the likeliest classes of each row at a temperature and their rest."""

    width: int
    vocab_size: int
    temperature: float
    code: RowCode | None

    @property
    def stored(self) -> int:
        return self.vocab_size

    @property
    def size(self) -> int:
        return 2 * self.vocab_size if self.code is None else self.code.row_bytes

    def take(self, name: str, rows: Reals, counted: Counted) -> Reals:
        logits = super().take(name, rows, counted)
        check_finite(name, logits, "CACHE-165")
        check_padding(rows if counted is None else rows[counted], self.vocab_size, self.temperature)
        return logits

    def encode(self, name: str, values: Reals) -> NDArray[np.uint8]:
        if self.code is None:
            halves = to_float16(name, values, remedy="use topk")
            return np.ascontiguousarray(halves, dtype="<f2").view(np.uint8)
        return self.code.encode(*pick_classes(values, self.code.head, self.temperature))

    def check(self, where: str, rows: NDArray[np.uint8]) -> None:
        if self.code is not None:
            return check_row_numbers(rows)
        check_finite(where, rows.view("<f2"), "CACHE-169")

    def decode(self, name: str, rows: NDArray[np.uint8]) -> TopkTargets | NDArray[np.float32]:
        decoded = self._decode(rows)
        if isinstance(decoded, np.ndarray):
            return decoded
        ids, log_probs, log_tail = decoded
        return TopkTargets(ids, log_probs, log_tail, self.temperature, self.vocab_size)

    def error(self, values: Reals, rows: NDArray[np.uint8]) -> LogitsError:
        return logits_error(values, self.temperature, lambda some: self._decode(rows[some]))

    def compare(self, name: str, values: Reals, rows: NDArray[np.uint8]) -> Moves:
        moved = rows_moved(values, self.temperature, lambda some: self._decode(rows[some]))
        if self.code is None:
            return moved, largest_move("float16", values) / self.temperature / 2
        # Of a tail, whose logarithm x is rounded: exp(x) |x| 2^-11 is less than half of 2^-11.
        return moved, (self.code.head_moves(rows) + 2.0**-11) / 2

    def _decode(self, rows: NDArray[np.uint8]) -> Any:
        if self.code is not None:
            return self.code.decode(rows)
        logits = np.ascontiguousarray(rows).view("<f2").astype(np.float32)
        check_finite("logits", logits, "CACHE-169", "cache-corrupt")
        return logits


@dataclass(frozen=True)
class HiddenLayer:
    """One layer of the teacher.

    k is as in Hugging Face's ``hidden_states[k]``: after the teacher's block k, 0 for the embeddings. In an
    encoder-decoder it counts the decoder's blocks: ``decoder_hidden_states[k]``.
    """

    layer: int  # k
    tensor: str  # name of the graph's tensor
    width: int  # D

    def __post_init__(self) -> None:
        require_ranges(self, "CACHE-176", "hidden ", layer=(0, MAX_LAYERS), width=(1, MAX_WIDTH))


@dataclass(frozen=True, kw_only=True)
class Hidden(Rows):
    """Records hold hidden states of some of the teacher's layers (CACHE-175 to CACHE-179).

    Codecs are ``"float32"``, ``"float16"``, and ``"int8"`` with a step in binary32 for each row; rows are
    ``"positions"``, or ``"decoder"`` for the decoder of an encoder-decoder.
    """

    SUBJECT: ClassVar[str] = "hidden"
    ERROR: ClassVar[type[RowError]] = HiddenError
    CHOICE: ClassVar[str] = "hidden"
    layers: tuple[HiddenLayer, ...]  # ascending

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rows != "sample", "hidden.rows must be 'positions' or 'decoder'", self.rows, "CACHE-175")
        require(self.codec in VECTOR_CODECS, f"hidden.codec must be one of {VECTOR_CODECS}", self.codec, "CACHE-177")
        names = self.teacher_layers
        ascending = bool(names) and names == sorted(set(names))
        require(ascending, "hidden.layers must be at least one, ascending", names, "CACHE-176")

    @property
    def teacher_layers(self) -> list[int]:
        return [layer.layer for layer in self.layers]

    @functools.cached_property
    def coded(self) -> tuple[tuple[Part, RowCodec], ...]:
        codecs = [VectorCodec(self.codec, layer.width) for layer in self.layers]
        parts = [Part(f"H{k:02d}", U8, self.SUBJECT, k, called=f"hidden layer {k}") for k in self.teacher_layers]
        return tuple(zip(parts, codecs, strict=True))

    def describe(self) -> list[tuple[str, str]]:
        names, widths = ", ".join(map(str, self.teacher_layers)), sorted({layer.width for layer in self.layers})
        states = f"teacher layers {names}, width {', '.join(map(str, widths))}"
        codec = f"{self.codec}, {sum(self.row_sizes)} bytes per {self.unit}"
        return [("hidden states", states), ("hidden codec", codec)]


@dataclass(frozen=True, kw_only=True)
class Vectors(Rows):
    """Vectors of one tensor of the graph: ``PART`` of each record. Codecs are those of ``Hidden``."""

    ERROR: ClassVar[type[RowError]] = HiddenError
    PART: ClassVar[Part]
    SPEC_ID: ClassVar[str]
    tensor: str  # its name
    width: int  # D

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"{self.SUBJECT}.codec must be one of {VECTOR_CODECS}"
        require(self.codec in VECTOR_CODECS, rule, self.codec, self.SPEC_ID)
        require_ranges(self, self.SPEC_ID, f"{self.SUBJECT}.", width=(1, MAX_WIDTH))

    @functools.cached_property
    def coded(self) -> tuple[tuple[Part, RowCodec], ...]:
        return ((self.PART, VectorCodec(self.codec, self.width)),)


@dataclass(frozen=True, kw_only=True)
class Embeddings(Vectors):
    """Records hold an embedding of their text, pooled from the states of a block (CACHE-181 to CACHE-185)."""

    SUBJECT: ClassVar[str] = "embeddings"
    CHOICE: ClassVar[str] = "embeddings"
    SPEC_ID: ClassVar[str] = "CACHE-181"
    PART: ClassVar[Part] = Part("embedding", U8, SUBJECT)
    rows: str = optional("sample")
    pooling: str  # one of POOLINGS
    normalize: bool  # whether it was divided by its norm

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rows == "sample", "embeddings.rows must be left out", self.rows, "CACHE-181")
        require(self.pooling in POOLINGS, f"embeddings.pooling must be one of {POOLINGS}", self.pooling, "CACHE-181")

    def decode(self, record: SampleRecord, layer: int | None = None) -> NDArray[np.float32]:
        embedding: NDArray[np.float32] = super().decode(record, layer)[0]
        return embedding

    def describe(self) -> list[tuple[str, str]]:
        pooled = f"width {self.width}, pooling {self.pooling}{', normalized' if self.normalize else ''}"
        codec = f"{self.codec}, {self.row_sizes[0]} bytes per {self.unit}"
        return [("embeddings", pooled), ("embedding codec", codec)]


def _of_logits(holds: bool, rule: str, value: object) -> None:
    require(holds, f"logits.{rule}", value, "CACHE-165")
