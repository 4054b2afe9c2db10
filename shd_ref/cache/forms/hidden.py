"""Hidden states: what a teacher's blocks put out (CACHE-175 to CACHE-179)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import INT8_LEVELS, VECTOR_CODECS, largest_move, to_float16, to_int8
from shd_ref.cache.codecs.distortion import HiddenError, RowError
from shd_ref.cache.forms.form import U8, Extent, Part, SampleRecord, require
from shd_ref.cache.forms.rows import Counted, Reals, Rows, as_rows, counted_rows
from shd_ref.cache.storage.places import MAX_LAYERS
from shd_ref.errors import ShdError

MAX_WIDTH: Final = 1 << 20


@dataclass(frozen=True)
class HiddenLayer:
    """One layer of the teacher.

    Attributes:
        layer: k as in Hugging Face's ``hidden_states[k]``: after the teacher's block k, 0 for the embeddings. In an
            encoder-decoder k counts the decoder's blocks: ``decoder_hidden_states[k]``.
        tensor: name of the graph's tensor.
        width: D.
    """

    layer: int
    tensor: str
    width: int

    def __post_init__(self) -> None:
        require(0 <= self.layer <= MAX_LAYERS, f"hidden layer must be 0 to {MAX_LAYERS}", self.layer, "CACHE-176")
        require(1 <= self.width <= MAX_WIDTH, f"hidden width must be 1 to {MAX_WIDTH}", self.width, "CACHE-176")


@dataclass(frozen=True, kw_only=True)
class Hidden(Rows):
    """Records hold hidden states of some of the teacher's layers.

    Attributes:
        codec: ``"float16"``, or ``"int8"`` with a step in binary32 for each row.
        rows: ``"positions"``, or ``"decoder"`` for the decoder of an encoder-decoder.
        layers: ascending.

    Raises:
        ShdError: ``argument-value`` for a number or name outside its range.
    """

    SUBJECT: ClassVar[str] = "hidden"
    ERROR: ClassVar[type[RowError]] = HiddenError
    CHOICE: ClassVar[str] = "hidden"
    layers: tuple[HiddenLayer, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rows != "sample", "hidden.rows must be 'positions' or 'decoder'", self.rows, "CACHE-175")
        require(self.codec in VECTOR_CODECS, f"hidden.codec must be one of {VECTOR_CODECS}", self.codec, "CACHE-177")
        names = [layer.layer for layer in self.layers]
        ascending = bool(names) and names == sorted(set(names))
        require(ascending, "hidden.layers must be at least one, ascending", names, "CACHE-176")

    @property
    def teacher_layers(self) -> list[int]:
        """Their numbers, ascending."""
        return [layer.layer for layer in self.layers]

    def row_bytes(self, layer: int) -> int:
        """Bytes of a row of a layer; ``argument-value`` for one that is not stored."""
        return self._size(self._layer(layer).width)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return tuple(self._size(layer.width) for layer in self.layers)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._part(layer) for layer in self.teacher_layers)

    def pack(self, record: SampleRecord) -> Iterator[NDArray[np.uint8]]:
        """The rows of each layer in turn; ``not-finite``, ``argument-value``: codes that no encoder makes."""
        for layer in self.layers:
            rows = np.ascontiguousarray(record.parts[self._part(layer.layer).name])
            steps, codes = self._split(rows)
            where = f"record {record.index}: hidden[{layer.layer}]"
            if not np.isfinite(codes if steps is None else steps).all():
                raise ShdError("not-finite", f"{where} must be finite; got NaN or infinity", "CACHE-177")
            if steps is not None and ((steps < 0).any() or (codes < -INT8_LEVELS).any()):
                raise ShdError("argument-value", f"{where} must have no negative step and no code -128", "CACHE-177")
            yield rows.reshape(-1)

    def plain_size(self, extent: Extent) -> int:
        return 4 * sum(layer.width for layer in self.layers) * self.num_rows(extent)

    def encode(self, layer: int, rows: Reals, counted: Counted = None) -> NDArray[np.uint8]:
        """A sample's hidden states of one layer ``(R, width)`` as its part of a record, ``(R, row_bytes)`` bytes.

        Where ``counted`` ``(R,)`` is False, a row is coded as zeros. Raises ``argument-value`` (layer, a number that
        float16 cannot hold), ``argument-shape``, ``argument-dtype``, ``not-finite``.
        """
        values = self._values(layer, rows, counted)
        if self.codec == "float16":
            halves = to_float16(f"hidden[{layer}]", values)
            return np.ascontiguousarray(halves, dtype="<f2").view(np.uint8)
        codes, steps = to_int8(values)
        return np.concatenate((steps.astype("<f4")[:, None].view(np.uint8), codes.view(np.uint8)), axis=1)

    def measure(self, layer: int, rows: Reals, codes: NDArray[np.uint8], counted: Counted = None) -> HiddenError:
        """Coding error over counted rows (CACHE-178): arguments and result of ``encode``."""
        values = self._values(layer, rows, counted).astype(np.float64)
        moved = self._decode(codes) - values
        if counted is not None:
            values, moved = values[counted], moved[counted]
        if not len(values):
            return HiddenError(0.0, 0.0, 0)
        norms = np.linalg.norm(values, axis=-1)
        relative = np.linalg.norm(moved, axis=-1) / np.where(norms > 0, norms, 1.0)
        return HiddenError(float(relative.mean()), float(relative.max()), len(relative))

    def bound(self, rows: Reals) -> NDArray[np.float64]:
        """Largest coding error of a number in each row of ``(R, width)``: ``(R,)`` (CACHE-179)."""
        return largest_move(self.codec, rows)

    def decode(self, record: SampleRecord, layer: int) -> NDArray[np.float32]:
        """A record's rows of one layer ``(R, width)``.

        Raises ``argument-value`` for a layer that is not stored or was not read; ``cache-corrupt`` for NaN and
        infinity.
        """
        values = self._decode(self.read_rows(record, self._part(layer), self.row_bytes(layer)))
        if not np.isfinite(values).all():
            raise ShdError("cache-corrupt", f"hidden[{layer}] must be finite; got NaN or infinity", "CACHE-177")
        return values

    def arrays(self, record: SampleRecord) -> Iterator[tuple[str, NDArray[Any]]]:
        for part in self.parts:
            assert part.layer is not None
            yield part.name, self.decode(record, part.layer)

    def describe(self) -> list[tuple[str, str]]:
        names, widths = ", ".join(map(str, self.teacher_layers)), sorted({layer.width for layer in self.layers})
        states = f"teacher layers {names}, width {', '.join(map(str, widths))}"
        codec = f"{self.codec}, {sum(self.row_sizes)} bytes per {self.unit}"
        return [("hidden states", states), ("hidden codec", codec)]

    def _values(self, layer: int, rows: Reals, counted: Counted) -> NDArray[np.float32]:
        name = f"hidden[{layer}]"
        values = counted_rows(as_rows(name, rows, self._layer(layer).width), counted).astype(np.float32)
        if not np.isfinite(values).all():
            raise ShdError("not-finite", f"{name} must be finite; got NaN or infinity", "CACHE-177")
        return values

    def _decode(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        steps, codes = self._split(np.ascontiguousarray(rows))
        values = codes.astype(np.float32)
        return values if steps is None else values * steps

    def _split(self, rows: NDArray[np.uint8]) -> tuple[NDArray[np.float32] | None, NDArray[Any]]:
        """Steps ``(R, 1)`` and codes ``(R, width)`` of contiguous rows."""
        if self.codec == "float16":
            return None, rows.view("<f2")
        steps = np.ascontiguousarray(rows[:, :4]).view("<f4").astype(np.float32, copy=False)
        return steps, rows[:, 4:].view(np.int8)

    def _part(self, layer: int) -> Part:
        return Part(f"H{layer:02d}", U8, self.SUBJECT, layer, called=f"hidden layer {layer}")

    def _size(self, width: int) -> int:
        return 2 * width if self.codec == "float16" else 4 + width

    def _layer(self, layer: int) -> HiddenLayer:
        for entry in self.layers:
            if entry.layer == layer:
                return entry
        message = f"layer must be one of the teacher's {self.teacher_layers}; got {layer}"
        raise ShdError("argument-value", message, "CACHE-176")
