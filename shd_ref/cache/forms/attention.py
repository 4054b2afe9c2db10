"""Attention, as merged maps (CACHE-110 to CACHE-130) or as queries and keys (CACHE-140 to CACHE-153).

Both forms share the squeeze: who teaches whom, by which plan, with which weights (CACHE-100 to CACHE-108).
"""

from __future__ import annotations

import functools
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import (
    CODECS,
    SUPPORTS,
    CodecError,
    RowError,
    check_codes,
    decode,
    pack,
    packed_size,
    unpack,
)
from shd_ref.cache.codecs.factored import (
    FACTORED_CODECS,
    MAX_SCALE,
    LayerFactors,
    check_coded_factors,
    decode_factors,
    factored_size,
    pack_factors,
    rebuild_maps,
    unpack_factors,
)
from shd_ref.cache.forms.form import F32, U8, Extent, Form, Part, SampleRecord, misfit, require, require_ranges
from shd_ref.cache.storage.documents import MAX_INTEGER, optional
from shd_ref.cache.storage.storage import MAX_LAYERS
from shd_ref.errors import ShdError

MAX_HEADS: Final = 10_000
KINDS: Final = ("encoder", "decoder", "cross")
"""Attention of one model that is told apart, in the order in which student layers are numbered (CACHE-105)."""
SHAPES: Final = ("length", "own")
PADDING: Final = ("behind", "around")

_GRID: Final = r"[1-9][0-9]{0,4}(?:x[1-9][0-9]{0,4}){0,3}"
_GROUPS: Final = re.compile(rf"patches:({_GRID}):({_GRID})(?::([1-9][0-9]{{0,4}}))?|(ids|weights):([ -~]{{1,200}})")

Plan: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class LayerPair:
    """A student layer and the teacher's attention site that supervises it."""

    student_layer: int
    teacher_layer: int
    site: str
    num_teacher_heads: int

    def __post_init__(self) -> None:
        require_ranges(self, teacher_layer=(0, MAX_INTEGER), student_layer=(0, MAX_LAYERS - 1))
        require_ranges(self, num_teacher_heads=(1, MAX_HEADS))


@dataclass(frozen=True)
class KindLayers:
    """The student's number of attention calls of one kind (CACHE-105)."""

    kind: str
    num_student_layers: int

    def __post_init__(self) -> None:
        require(self.kind in KINDS, f"kind must be one of {KINDS}", self.kind, "CACHE-105")
        require_ranges(self, "CACHE-105", num_student_layers=(1, MAX_LAYERS))


@dataclass(frozen=True)
class Matching:
    """How the plans were chosen on the data set itself (CACHE-103)."""

    by: str  # "residual" or "similarity"; the cache only compares it
    samples: int  # for choosing the pairs
    seed: int  # for choosing these samples

    def __post_init__(self) -> None:
        require_ranges(self, of="matching.", samples=(1, MAX_INTEGER), seed=(0, MAX_INTEGER))


@dataclass(frozen=True, kw_only=True)
class Attention(Form):
    """The squeeze that made the supervision of attention, in every form that stores it."""

    SUBJECT: ClassVar[str] = "attention"
    ERROR: ClassVar[type[RowError]] = CodecError
    CHOICE: ClassVar[str] = "layers"
    MIXING_IS_OPTIONAL: ClassVar[bool] = True

    num_student_heads: int  # H_s
    layers: tuple[LayerPair, ...]  # by ascending student layer
    plan: Plan  # rounds of pairs of positions in the pool of heads; empty where plans has them
    plans: tuple[Plan, ...] | None = optional(None)  # of each layer, where they differ (CACHE-102)
    matching: Matching | None = optional(None)  # noqa: RUF009  (how the plans were matched on the data; immutable)
    strategy: str  # name from the specification, as are alpha_rule and alpha_from; the cache only compares them
    alpha_rule: str
    alpha_from: str = "teacher"
    alpha_per: str = "map"  # always: one weight per map
    support: str  # "full" or "causal"
    # L_s, attention calls of the student; None where explicit pairs name the supervised layers, in which case the
    # student may have others (CACHE-104). Of several kinds of attention their calls; layers are numbered kind after
    # kind (CACHE-105).
    num_student_layers: int | None = optional(None)
    kinds: tuple[KindLayers, ...] = optional(())

    def __post_init__(self) -> None:
        require(1 <= len(self.layers) <= MAX_LAYERS, f"layers must be 1 to {MAX_LAYERS}", len(self.layers))
        students = self.student_layers
        require(students == sorted(set(students)), "student layers must ascend", students)
        if self.num_student_layers is not None:
            require_ranges(self, num_student_layers=(students[-1] + 1, MAX_LAYERS))
        names = [entry.kind for entry in self.kinds]
        expected = [kind for kind in KINDS if kind in names]
        require(names == expected, f"kinds must be some of {KINDS} in this order", names, "CACHE-105")
        total, count = sum(entry.num_student_layers for entry in self.kinds), self.num_student_layers
        fits = count == total or not self.kinds
        require(fits, f"num_student_layers must be {total}, the sum of all kinds", count, "CACHE-105")
        heads = {layer.num_teacher_heads for layer in self.layers}
        require(len(heads) == 1, "num_teacher_heads must agree in all layers, as one plan serves all", heads)
        limit, count = self.num_teacher_heads, self.num_student_heads
        require(1 <= count <= limit, f"num_student_heads must be 1 to num_teacher_heads={limit}", count)
        self._check_plans()
        require(self.alpha_per == "map", "alpha_per must be map", self.alpha_per)
        require(self.support in SUPPORTS, f"support must be one of {SUPPORTS}", self.support)

    @property
    def num_teacher_heads(self) -> int:
        return self.layers[0].num_teacher_heads

    @property
    def student_layers(self) -> list[int]:
        return [layer.student_layer for layer in self.layers]

    @property
    def num_alphas(self) -> int:
        """Number of pairs in all rounds of a plan. A strategy without pairwise weights stores none (CACHE-107)."""
        return _count_pairs(self.layer_plans[0])

    @property
    def layer_plans(self) -> tuple[Plan, ...]:
        """The plan of every layer, in the order of ``layers`` (CACHE-102)."""
        return (self.plan,) * len(self.layers) if self.plans is None else self.plans

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """Weights and mixing matrices of all layers, then a blob per layer (CACHE-40)."""
        name = self.SUBJECT
        blobs = (Part(blob_name(layer), U8, name, layer, called=f"layer {layer}") for layer in self.student_layers)
        mixing = Part("mixing", F32, name, optional=self.MIXING_IS_OPTIONAL)
        return Part("alphas", F32, name, optional=True), mixing, *blobs

    def part_shapes(self, extent: Extent) -> tuple[tuple[int, ...], ...]:
        """``(layers, n_pairs)`` and ``(layers, H_s, H_t)``, and the size of each blob."""
        layers = len(self.layers)
        mixing = (layers, self.num_student_heads, self.num_teacher_heads)
        return (layers, self.num_alphas), mixing, *((size,) for size in self.blob_sizes(extent))

    def num_rows(self, extent: Extent) -> int:
        """Rows of the layer with the most rows, without leading padding; a decoder's rows are its positions."""
        return extent.num_rows - extent.first

    def plain_size(self, extent: Extent) -> int:
        return 4 * self.num_student_heads * sum(rows * keys for rows, keys in self.map_shapes(extent))

    def alphas(self, record: SampleRecord) -> NDArray[np.float32]:
        """Weights ``(layers, n_pairs)``; ``n_pairs`` is 0 where none are stored."""
        weights: NDArray[np.float32] = record.parts.get("alphas", np.empty((len(self.layers), 0), np.float32))
        return weights

    def tally(self, record: SampleRecord) -> tuple[int, ...]:
        alphas = self.alphas(record)
        return int(((alphas < 0) | (alphas > 1)).sum()), alphas.size

    def map_shapes(self, extent: Extent) -> tuple[tuple[int, int], ...]:
        """Rows and keys of each layer's maps in a record: n and n, unless the record says otherwise (CACHE-128)."""
        return extent.shapes or ((extent.length, extent.length),) * len(self.layers)

    def column(self, layer: int) -> int:
        return self.student_layers.index(layer)

    @property
    def bound_temperature(self) -> float | None:
        """The attention temperature of maps, which are softened before they are merged; None where any will do."""
        return getattr(self, "temperature", None)

    @abstractmethod
    def blob_sizes(self, extent: Extent) -> tuple[int, ...]:
        """Bytes of each layer's blob."""

    def decode(self, record: SampleRecord, layer: int) -> NDArray[np.float32]:
        """The merged maps of one student layer, ``(H_s, rows, keys)``; rows sum to one or are zero."""
        num_rows, _ = self.map_shapes(record.extent)[self.column(layer)]
        return self.decode_rows(record, layer)(slice(0, num_rows))

    @abstractmethod
    def decode_rows(self, record: SampleRecord, layer: int) -> Callable[[slice], NDArray[np.float32]]:
        """The same of some rows at a time, by where they begin and end, as whole maps may be large."""

    def _check_plans(self) -> None:
        limit = self.num_teacher_heads
        for plan in (self.plan, *(self.plans or ())):
            positions = [position for one_round in plan for pair in one_round for position in pair]
            require(all(0 <= p < limit for p in positions), f"plan positions must be below {limit}", plan)
        if self.plans is None:
            return
        layers, different = len(self.layers), len(set(self.plans)) > 1
        require(len(self.plans) == layers, f"plans must be {layers}", len(self.plans), "CACHE-102")
        require(not self.plan, "plan must be empty where plans holds one for each layer", self.plan, "CACHE-102")
        require(different, "plans must not all be equal: then plan holds them", self.plans, "CACHE-102")
        pairs = {_count_pairs(plan) for plan in self.plans}
        require(len(pairs) == 1, "plans must have one number of pairs", sorted(pairs), "CACHE-102")


def blob_name(layer: int) -> str:
    """The name of the part that holds a student layer's codes (CACHE-3)."""
    return f"L{layer:02d}"


def _count_pairs(plan: Plan) -> int:
    return sum(len(one_round) for one_round in plan)


@dataclass(frozen=True)
class TokenGroups:
    """Groups of tokens, by their name in options and manifests."""

    teacher_grid: tuple[int, ...] = ()  # of patches, row-major; empty where each sample has its own groups
    student_grid: tuple[int, ...] = ()
    extra: int = 0  # tokens in front of the patches that both sides have
    # Of the column with a sample's groups: "ids", the group of each teacher token (L,), below 0 for none, or
    # "weights" of each teacher token in each student token (L, l); empty for patches.
    kind: str = ""
    column: str = ""  # its name, an input of the sample's key

    @classmethod
    def parse(cls, text: str) -> TokenGroups:
        """``argument-value`` for anything but ``patches:14x14:7x7``, ``patches:14x14:7x7:1`` and ``ids:COLUMN``."""
        match = _GROUPS.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            rule = (
                "groups must be patches:14x14:7x7 (the teacher's grid, the student's), the same with :1 for a class"
            )
            message = f"{rule} token in front, ids:COLUMN or weights:COLUMN; got {text!r}"
            raise ShdError("argument-value", message, "CACHE-131")
        large, small, extra, kind, column = match.groups()
        if kind:
            return cls(kind=kind, column=column)
        teacher, student = (tuple(map(int, grid.split("x"))) for grid in (large, small))
        rule = "grids of groups must have as many axes, and at most 65,536 patches"
        fits = len(teacher) == len(student) and max(math.prod(teacher), math.prod(student)) <= 65_536
        require(fits, rule, text, "CACHE-131")
        return cls(teacher, student, int(extra or 0))

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Tokens of the teacher and of the student; None where they are a sample's own."""
        if self.column:
            return None
        return math.prod(self.teacher_grid) + self.extra, math.prod(self.student_grid) + self.extra


@dataclass(frozen=True, kw_only=True)
class Maps(Attention):
    """Records hold the student's merged maps."""

    form: str = field(default="maps", init=False)
    temperature: float  # the attention temperature of the maps, above 0
    shapes: str = optional("length")  # n and n, or "own": each record gives those of every layer (CACHE-128)
    groups: str | None = optional(None)  # of which teacher tokens a student token is made, where pooled (CACHE-131)

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", float(self.temperature))  # 1 and 1.0 are the same job
        super().__post_init__()
        require(self.codec in CODECS, f"codec must be one of {CODECS}", self.codec, "CACHE-110")
        require(0 < self.temperature < math.inf, "temperature must be finite and above 0", self.temperature)
        require(self.shapes in SHAPES, f"shapes must be one of {SHAPES}", self.shapes, "CACHE-128")
        square = self.shapes == "length" or self.support == "full"
        require(square, "shapes must be length for causal support", self.shapes, "CACHE-128")
        if self.groups is not None:
            TokenGroups.parse(self.groups)
            require(self.shapes == "own", "shapes must be own where maps are pooled", self.shapes, "CACHE-131")
            require(not self.kinds, "groups must be of one sequence, without kinds", self.groups, "CACHE-131")

    @property
    def stated(self) -> frozenset[str]:
        """Padding in front is stored, as rows of zeros; shapes are there where the manifest says so."""
        return frozenset({"shapes"} if self.shapes == "own" else ())

    def extent_problems(self, extent: Extent) -> Iterator[str]:
        count, sizes = len(self.layers), [size for shape in extent.shapes for size in shape]
        if self.shapes == "own" and (len(extent.shapes) != count or not all(1 <= size < 2**31 for size in sizes)):
            yield f"shapes must be rows and keys, at least 1, of {count} layers; got {str(extent.shapes)[:80]}"
        sizes_of = None if self.groups is None else TokenGroups.parse(self.groups).sizes
        if sizes_of is not None and {*sizes} != {sizes_of[1]}:
            yield f"shapes must be {sizes_of[1]} rows and keys, as groups {self.groups} say; got {extent.shapes[:2]}"

    def blob_sizes(self, extent: Extent) -> tuple[int, ...]:
        heads = self.num_student_heads
        return tuple(packed_size(self.codec, self.support, heads, *shape) for shape in self.map_shapes(extent))

    def pack(self, record: SampleRecord) -> Iterator[NDArray[np.uint8]]:
        """One blob per layer (CACHE-126); ``support-mismatch`` when a counted row has mass on padding."""
        for layer, shape in zip(self.student_layers, self.map_shapes(record.extent), strict=True):
            codes = record.parts[blob_name(layer)]
            if codes[:, : shape[0], : shape[1]].shape != (self.num_student_heads, *shape):
                rule = f"codes of layer {layer} must have {self.num_student_heads} heads and at least {shape} entries"
                raise misfit(record, rule, codes.shape)
            counted = cut_map(codes, *shape, f"record {record.index} layer {layer}")
            check_codes(self.codec, counted)
            yield pack(counted, self.support, self.codec)

    def decode_rows(self, record: SampleRecord, layer: int) -> Callable[[slice], NDArray[np.float32]]:
        shape = self.map_shapes(record.extent)[self.column(layer)]
        codes = unpack(record.parts[blob_name(layer)], self.codec, self.support, self.num_student_heads, *shape)
        return lambda rows: decode(self.codec, codes[:, rows])

    def describe(self) -> list[tuple[str, str]]:
        lines = [("form", f"maps, {self.support} support, temperature {self.temperature:g}"), ("codec", self.codec)]
        return lines + ([] if self.groups is None else [("groups", self.groups)])


def cut_map(codes: NDArray[Any], num_rows: int, num_keys: int, where: str) -> NDArray[Any]:
    """The counted rows and keys of ``(H_s, L, S)``; ``support-mismatch`` where a counted row has mass on padding."""
    rows = codes[:, :num_rows]
    if rows[:, :, num_keys:].any():
        rule = f"{where}: keys from {num_keys} on must have no probability: the teacher attends to padding"
        remedy = "as where quantisation rounds its mask: run samples alone (--batch-size 1)"
        raise ShdError("support-mismatch", f"{rule}, {remedy}", "CACHE-127")
    return rows[:, :, :num_keys]


@dataclass(frozen=True, kw_only=True)
class Factors(Attention):
    """Records hold the teacher's queries and keys, from which its maps are computed, and the mixing matrices."""

    form: str = field(default="factored", init=False)
    factors: tuple[LayerFactors, ...]  # of each layer (CACHE-141)
    padding: str = optional("behind")  # or "around": records may have leading padding too (CACHE-145)

    def __post_init__(self) -> None:
        super().__post_init__()
        count, layers, limit = len(self.factors), len(self.layers), self.num_teacher_heads
        require(count == layers, f"factors must be {layers}", count, "CACHE-141")
        rule = f"codec must be one of {FACTORED_CODECS} where factors are given"
        require(self.codec in FACTORED_CODECS, rule, self.codec, "CACHE-141")
        for layer in self.factors:
            heads = layer.num_key_heads
            divides = heads >= 1 and limit % heads == 0
            require(divides, f"num_key_heads must be a divisor of num_teacher_heads={limit}", heads, "CACHE-141")
            require_ranges(layer, "CACHE-141", width=(1, 10_000))
            require(0 < layer.scale < MAX_SCALE, "scale must be above 0 and below 2^128", layer.scale, "CACHE-141")
            if layer.window is not None:
                require_ranges(layer, "CACHE-144", window=(1, MAX_INTEGER))
        require(self.padding in PADDING, f"padding must be one of {PADDING}", self.padding, "CACHE-145")

    MIXING_IS_OPTIONAL: ClassVar[bool] = False  # maps are computed with it

    @property
    def stated(self) -> frozenset[str]:
        """Padding in front is left out where the manifest says so; maps are square."""
        return frozenset({"first"} if self.padding == "around" else ())

    def blob_sizes(self, extent: Extent) -> tuple[int, ...]:
        length, heads = extent.length - extent.first, self.num_teacher_heads
        return tuple(factored_size(self.codec, heads, layer, length) for layer in self.factors)

    def pack(self, record: SampleRecord) -> Iterator[NDArray[np.uint8]]:
        """One blob per layer (CACHE-149); ``not-finite``, ``argument-value``: codes that no encoder makes."""
        for layer in self.student_layers:
            coded = record.parts[blob_name(layer)]
            check_coded_factors(coded)
            yield pack_factors(coded)

    def decode_rows(self, record: SampleRecord, layer: int) -> Callable[[slice], NDArray[np.float32]]:
        queries, keys = self.decode_factors(record, layer)
        column, first = self.column(layer), record.first
        factors, mixing = self.factors[column], record.parts["mixing"][column]

        def decode_some(rows: slice) -> NDArray[np.float32]:
            counted = slice(max(rows.start - first, 0), max(rows.stop - first, 0))
            span: dict[str, Any] = {"window": factors.window, "rows": counted}
            maps = rebuild_maps(queries, keys, factors.scale, self.support, mixing, **span)
            return np.pad(maps, ((0, 0), (rows.stop - rows.start - maps.shape[1], 0), (first, 0)))

        return decode_some

    def decode_factors(self, record: SampleRecord, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Queries ``(H_t, n, d)`` and centred keys ``(H_kv, n, d)``, float32, without padding in front."""
        blob, factors = record.parts[blob_name(layer)], self.factors[self.column(layer)]
        length = record.length - record.first
        return decode_factors(unpack_factors(blob, self.codec, self.num_teacher_heads, factors, length))

    def describe(self) -> list[tuple[str, str]]:
        return [("form", f"queries and keys, {self.support} support, any temperature"), ("codec", self.codec)]
