"""Factored records: the teacher's queries and keys in place of maps (CACHE-140 to CACHE-153)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.factored import (
    CodedFactors,
    LayerFactors,
    check_coded_factors,
    check_layers,
    decode_factors,
    factored_size,
    pack_factors,
    rebuild_maps,
    unpack_factors,
)
from shd_ref.cache.forms.attention import Attention, blob_name
from shd_ref.cache.forms.form import Extent, SampleRecord, misfit, require
from shd_ref.cache.storage.documents import optional
from shd_ref.errors import ShdError

PADDING: Final = ("behind", "around")


@dataclass(frozen=True, kw_only=True)
class Factors(Attention):
    """Records hold the teacher's queries and keys, from which its maps are computed, and the mixing matrices.

    Attributes:
        form: ``"factored"``.
        factors: each layer's parameters for computing maps from queries and keys (CACHE-141).
        padding: ``"around"`` if records may have leading padding too, else ``"behind"`` (CACHE-145).
    """

    form: str = field(default="factored", init=False)
    factors: tuple[LayerFactors, ...]
    padding: str = optional("behind")

    def __post_init__(self) -> None:
        super().__post_init__()
        count, layers = len(self.factors), len(self.layers)
        require(count == layers, f"factors must be {layers}", count, "CACHE-141")
        problem = check_layers(self.codec, self.factors, self.num_teacher_heads)
        if problem is not None:
            raise ShdError("argument-value", problem, "CACHE-141")
        require(self.alpha_per == "map", "alpha_per must be map where factors are given", self.alpha_per, "CACHE-141")
        require(self.padding in PADDING, f"padding must be one of {PADDING}", self.padding, "CACHE-145")

    @property
    def mixing_is_optional(self) -> bool:
        return False

    @property
    def stated(self) -> frozenset[str]:
        """Padding in front is left out where the manifest says so; maps are square."""
        return frozenset({"first"} if self.padding == "around" else ())

    def blob_sizes(self, extent: Extent) -> tuple[int, ...]:
        length, heads = extent.length - extent.first, self.num_teacher_heads
        return tuple(factored_size(self.codec, heads, layer, length) for layer in self.factors)

    def check_codes(self, record: SampleRecord) -> None:
        length, heads = record.length - record.first, self.num_teacher_heads
        dtype, has_steps = np.dtype(self.codec), self.codec == "int8"
        for factors, name in zip(self.factors, map(blob_name, self.student_layers), strict=True):
            coded = record.parts[name]
            if not isinstance(coded, CodedFactors):
                raise misfit(record, "codes must be queries and keys for factors", coded.shape)
            parts = ((heads, coded.queries, coded.query_steps), (factors.num_key_heads, coded.keys, coded.key_steps))
            for count, codes, steps in parts:
                if codes.shape != (count, length, factors.width):
                    raise misfit(record, f"factors must be ({count}, {length}, {factors.width})", codes.shape)
                if (steps is not None) != has_steps or (steps is not None and steps.shape != (count, length)):
                    steps_shape = None if steps is None else steps.shape
                    raise misfit(record, f"steps must be ({count}, {length}) for int8, else None", steps_shape)
                if codes.dtype != dtype or (steps is not None and steps.dtype != np.float32):
                    message = f"record {record.index}: factors must be {dtype} with float32 steps; got {codes.dtype}"
                    raise ShdError("argument-dtype", message, "CACHE-142")

    def pack(self, record: SampleRecord) -> Iterator[NDArray[np.uint8]]:
        """One blob per layer (CACHE-149); ``not-finite``, ``argument-value``: codes that no encoder makes."""
        for layer in self.student_layers:
            coded = record.parts[blob_name(layer)]
            check_coded_factors(coded)
            yield pack_factors(coded)

    def decode(self, record: SampleRecord, layer: int) -> NDArray[np.float32]:
        queries, keys = self.decode_factors(record, layer)
        column = self.column(layer)
        one, mixing = self.factors[column], record.parts["mixing"][column]
        return rebuild_maps(queries, keys, one.scale, self.support, mixing, window=one.window, first=record.first)

    def decode_factors(self, record: SampleRecord, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Queries ``(H_t, n, d)`` and centred keys ``(H_kv, n, d)``, float32, without padding in front."""
        blob, factors = record.parts[blob_name(layer)], self.factors[self.column(layer)]
        length = record.length - record.first
        return decode_factors(unpack_factors(blob, self.codec, self.num_teacher_heads, factors, length))

    def describe(self) -> list[tuple[str, str]]:
        return [("form", f"queries and keys, {self._describe_merge()}, any temperature"), ("codec", self.codec)]
