"""Hidden states: what a teacher's blocks put out (CACHE-175 to CACHE-179)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import VECTOR_CODECS
from shd_ref.cache.codecs.distortion import HiddenError
from shd_ref.cache.forms.form import U8, Extent, Part, SampleRecord, require
from shd_ref.cache.forms.rows import Counted, Reals
from shd_ref.cache.forms.vectors import MAX_WIDTH, Vectors
from shd_ref.cache.storage.places import MAX_LAYERS
from shd_ref.errors import ShdError


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
class Hidden(Vectors):
    """Records hold hidden states of some of the teacher's layers.

    Attributes:
        codec: ``"float32"``, ``"float16"``, or ``"int8"`` with a step in binary32 for each row.
        rows: ``"positions"``, or ``"decoder"`` for the decoder of an encoder-decoder.
        layers: ascending.

    Raises:
        ShdError: ``argument-value`` for a number or name outside its range.
    """

    SUBJECT: ClassVar[str] = "hidden"
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
            where = f"record {record.index}: hidden[{layer.layer}]"
            yield self._check_bytes(where, record.parts[self._part(layer.layer).name]).reshape(-1)

    def plain_size(self, extent: Extent) -> int:
        return 4 * sum(layer.width for layer in self.layers) * self.num_rows(extent)

    def encode(self, layer: int, rows: Reals, counted: Counted = None) -> NDArray[np.uint8]:
        """A sample's hidden states of one layer ``(R, width)`` as its part of a record, ``(R, row_bytes)`` bytes.

        Where ``counted`` ``(R,)`` is False, a row is coded as zeros. Raises ``argument-value`` (layer, a number that
        float16 cannot hold), ``argument-shape``, ``argument-dtype``, ``not-finite``.
        """
        return self._encode(f"hidden[{layer}]", self._of_layer(layer, rows, counted))

    def measure(self, layer: int, rows: Reals, codes: NDArray[np.uint8], counted: Counted = None) -> HiddenError:
        """Coding error over counted rows (CACHE-178): arguments and result of ``encode``."""
        return self._measure(self._of_layer(layer, rows, counted), codes, counted)

    def decode(self, record: SampleRecord, layer: int) -> NDArray[np.float32]:
        """A record's rows of one layer ``(R, width)``.

        Raises ``argument-value`` for a layer that is not stored or was not read; ``cache-corrupt`` for NaN and
        infinity.
        """
        return self._decode_part(record, self._part(layer), f"hidden[{layer}]", self._layer(layer).width)

    def describe(self) -> list[tuple[str, str]]:
        names, widths = ", ".join(map(str, self.teacher_layers)), sorted({layer.width for layer in self.layers})
        states = f"teacher layers {names}, width {', '.join(map(str, widths))}"
        codec = f"{self.codec}, {sum(self.row_sizes)} bytes per {self.unit}"
        return [("hidden states", states), ("hidden codec", codec)]

    def _of_layer(self, layer: int, rows: Reals, counted: Counted) -> NDArray[np.float32]:
        return self._values(f"hidden[{layer}]", rows, self._layer(layer).width, counted)

    def _part(self, layer: int) -> Part:
        return Part(f"H{layer:02d}", U8, self.SUBJECT, layer, called=f"hidden layer {layer}")

    def _layer(self, layer: int) -> HiddenLayer:
        for entry in self.layers:
            if entry.layer == layer:
                return entry
        message = f"layer must be one of the teacher's {self.teacher_layers}; got {layer}"
        raise ShdError("argument-value", message, "CACHE-176")
