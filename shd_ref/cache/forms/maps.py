"""Merged maps, coded (CACHE-110 to CACHE-130)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import CODECS, check_codes, code_dtype, decode, pack, packed_size, unpack
from shd_ref.cache.forms.attention import Attention, blob_name
from shd_ref.cache.forms.form import Extent, SampleRecord, misfit, require
from shd_ref.cache.storage.documents import optional
from shd_ref.errors import ShdError

SHAPES: Final = ("length", "own")


@dataclass(frozen=True, kw_only=True)
class Maps(Attention):
    """Records hold the student's merged maps.

    Attributes:
        form: ``"maps"``.
        temperature: the attention temperature of the maps, above 0.
        shapes: ``"own"`` if each record gives the rows and keys of every layer's maps, else ``"length"``: n and n
            (CACHE-128).
    """

    form: str = field(default="maps", init=False)
    temperature: float
    shapes: str = optional("length")

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", float(self.temperature))  # 1 and 1.0 are the same job
        super().__post_init__()
        require(self.codec in CODECS, f"codec must be one of {CODECS}", self.codec, "CACHE-110")
        require(0 < self.temperature < math.inf, "temperature must be finite and above 0", self.temperature)
        require(self.shapes in SHAPES, f"shapes must be one of {SHAPES}", self.shapes, "CACHE-128")
        own = self.shapes == "own" and self.support == "causal"
        require(not own, "shapes must be length for causal support", self.shapes, "CACHE-128")

    @property
    def bound_temperature(self) -> float:
        """Maps are softened before they are merged."""
        return self.temperature

    @property
    def stated(self) -> frozenset[str]:
        """Padding in front is stored, as rows of zeros; shapes are there where the manifest says so."""
        return frozenset({"shapes"} if self.shapes == "own" else ())

    def extent_problems(self, extent: Extent) -> Iterator[str]:
        count, sizes = len(self.layers), [size for shape in extent.shapes for size in shape]
        if self.shapes == "own" and (len(extent.shapes) != count or not all(1 <= size < 2**31 for size in sizes)):
            yield f"shapes must be rows and keys, at least 1, of {count} layers; got {str(extent.shapes)[:80]}"

    def blob_sizes(self, extent: Extent) -> tuple[int, ...]:
        heads = self.num_student_heads
        return tuple(packed_size(self.codec, self.support, heads, *shape) for shape in self.map_shapes(extent))

    def held_size(self, extent: Extent) -> int:
        """One code per entry, including those above the diagonal."""
        return self.plain_size(extent) // 4 * code_dtype(self.codec).itemsize

    def check_codes(self, record: SampleRecord) -> None:
        heads, shapes = self.num_student_heads, self.map_shapes(record.extent)
        for layer, (rows, keys) in zip(self.student_layers, shapes, strict=True):
            shape: tuple[int, ...] = getattr(record.parts[blob_name(layer)], "shape", ())  # factors have none
            square = bool(record.shapes) or shape[1:] == shape[1:2] * 2
            if not (len(shape) == 3 and shape[0] == heads and shape[1] >= rows and shape[2] >= keys and square):
                sizes = f"L, L) with L >= {rows}" if rows == keys else f"L, S) with L >= {rows}, S >= {keys}"
                raise misfit(record, f"codes of layer {layer} must be ({heads}, {sizes}", shape)

    def pack(self, record: SampleRecord) -> Iterator[NDArray[np.uint8]]:
        """One blob per layer (CACHE-126); ``support-mismatch`` when a counted row has mass on padding."""
        shapes = self.map_shapes(record.extent)
        for layer, (num_rows, num_keys) in zip(self.student_layers, shapes, strict=True):
            codes = record.parts[blob_name(layer)]
            counted = cut_map(codes, num_rows, num_keys, f"record {record.index} layer {layer}")
            check_codes(self.codec, counted)
            yield pack(counted, self.support, self.codec)

    def decode(self, record: SampleRecord, layer: int) -> NDArray[np.float32]:
        """``(H_s, rows, keys)`` float32; rows sum to one or are zero."""
        num_rows, num_keys = self.map_shapes(record.extent)[self.column(layer)]
        heads = self.num_student_heads
        codes = unpack(record.parts[blob_name(layer)], self.codec, self.support, heads, num_rows, num_keys)
        return decode(self.codec, codes)

    def describe(self) -> list[tuple[str, str]]:
        return [("form", f"maps, {self._describe_merge()}, temperature {self.temperature:g}"), ("codec", self.codec)]


def cut_map(codes: NDArray[Any], num_rows: int, num_keys: int, where: str) -> NDArray[Any]:
    """The counted rows and keys of ``(H_s, L, S)``; ``support-mismatch`` where a counted row has mass on padding."""
    rows = codes[:, :num_rows]
    if rows[:, :, num_keys:].any():
        message = f"{where}: keys from {num_keys} on must have no probability: the teacher attends to padding"
        raise ShdError("support-mismatch", message, "CACHE-127")
    return rows[:, :, :num_keys]
