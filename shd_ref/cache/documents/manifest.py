"""The manifest: what a cache was made from, and how (CACHE-20 to CACHE-25). Immutable, free of dates."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from shd_ref.cache.codecs.codecs import CODECS
from shd_ref.cache.codecs.compression import COMPRESSIONS
from shd_ref.cache.codecs.factored import LayerFactors, check_layers, factored_size
from shd_ref.cache.codecs.packing import SUPPORTS, packed_size
from shd_ref.cache.documents.members import (
    KINDS,
    Dataset,
    KindLayers,
    LayerPair,
    Matching,
    SampleInputs,
    ShardPlan,
    Teacher,
    require,
    sample_order,
)
from shd_ref.cache.storage.documents import build, encode_document, optional, parse_members, read_document
from shd_ref.cache.storage.layout import MANIFEST_NAME, MAX_LAYERS
from shd_ref.cache.storage.places import Folder, open_storage
from shd_ref.errors import ShdError

FORMAT_VERSION: Final = "5"
"""The newest version of the format. A cache has the lowest that can say what it holds (CACHE-26)."""

SHOWN_CACHES: Final = 8
"""How many are named where a folder of caches was taken for one."""

_VERSIONS: Final = ("1", "2", "3", "4", "5")
_CODECS_OF_VERSION_1: Final = ("float32", "bf16", "sqrt8-row")
ON_ERROR: Final = ("stop", "skip")
ALPHA_PER: Final = ("map", "row")
PADDING: Final = ("behind", "around")
SHAPES: Final = ("length", "own")

Plan: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Manifest:
    """Everything that decides the numbers in a cache (CACHE-20).

    Attributes:
        spec_version: of the specification that the maps follow.
        created_by: name and version of the package.
        num_student_heads: H_s.
        layers: by ascending student layer.
        plan: rounds of pairs of positions in the pool of heads; empty where ``plans`` has them.
        plans: of each layer, where they differ (CACHE-17).
        matching: how the plans were matched on the data, or None.
        strategy: name from the specification, as are alpha_rule and alpha_from; the cache only compares them.
        alpha_per: ``"map"`` or ``"row"``.
        temperature: the attention temperature that the stored maps are bound to, above 0.
        support: ``"full"`` or ``"causal"``.
        codec: one of ``CODECS``, or of ``FACTORED_CODECS`` where factors are given.
        compression: of blobs: ``"none"`` or ``"zstd"``.
        factors: of every layer, where records hold the teacher's queries and keys instead of maps (CACHE-101).
        padding: ``"around"`` where factored records may have padding in front too, else ``"behind"`` (CACHE-113).
        on_error: ``"skip"`` where receipts may name samples that the teacher failed on, else ``"stop"``.
        num_student_layers: L_s, how many attention calls the student was meant to make; None where explicit pairs
            name the layers that are taught, whatever others there are (CACHE-114).
        kinds: where attention of several kinds is told apart: which, and how many calls of each the student was meant
            to make. Student layers are numbered kind after kind (CACHE-115).
        shapes: ``"own"`` where records say how many rows and keys the maps of each layer have, else ``"length"``: n
            and n (CACHE-116).

    Raises:
        ShdError: ``argument-value`` for a number or name outside its range.
    """

    spec_version: str
    created_by: str
    teacher: Teacher
    num_student_heads: int
    layers: tuple[LayerPair, ...]
    plan: Plan
    strategy: str
    alpha_rule: str
    alpha_per: str
    temperature: float
    support: str
    codec: str
    inputs: SampleInputs
    dataset: Dataset
    shards: ShardPlan
    alpha_from: str = "teacher"
    compression: str = optional("none")
    on_error: str = optional("stop")
    plans: tuple[Plan, ...] | None = optional(None)
    matching: Matching | None = optional(None)  # noqa: RUF009  (None, which nobody can change)
    factors: tuple[LayerFactors, ...] | None = optional(None)
    padding: str = optional("behind")
    num_student_layers: int | None = optional(None)
    kinds: tuple[KindLayers, ...] = optional(())
    shapes: str = optional("length")

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", float(self.temperature))  # 1 and 1.0 are the same job
        require(1 <= len(self.layers) <= MAX_LAYERS, f"layers must be 1 to {MAX_LAYERS}", len(self.layers))
        students = self.student_layers
        require(students == sorted(set(students)), "student layers must ascend", students)
        if self.num_student_layers is not None:
            meant, last = self.num_student_layers, students[-1]
            require(last < meant <= MAX_LAYERS, f"num_student_layers must be {last + 1} to {MAX_LAYERS}", meant)
        self._check_kinds()
        require(self.shapes in SHAPES, f"shapes must be one of {SHAPES}", self.shapes)
        own = self.shapes == "own" and (self.factors is not None or self.support == "causal")
        require(not own, "shapes must be length for causal support and where factors are given", self.shapes)
        heads = {layer.num_teacher_heads for layer in self.layers}
        require(len(heads) == 1, "num_teacher_heads must agree in all layers, as one plan serves all", heads)
        limit, wanted_heads = self.num_teacher_heads, self.num_student_heads
        require(1 <= wanted_heads <= limit, f"num_student_heads must be 1 to num_teacher_heads={limit}", wanted_heads)
        for plan in (self.plan, *(self.plans or ())):
            positions = [position for one_round in plan for pair in one_round for position in pair]
            require(all(0 <= p < limit for p in positions), f"plan positions must be below {limit}", plan)
        if self.plans is not None:
            require(len(self.plans) == len(self.layers), f"plans must be {len(self.layers)}", len(self.plans))
            require(not self.plan, "plan must be empty where layers have plans of their own", self.plan)
            require(len(set(self.plans)) > 1, "plans must not all be equal: then plan holds them", self.plans)
            pairs = {_count_pairs(plan) for plan in self.plans}
            require(len(pairs) == 1, "plans must have one number of pairs", sorted(pairs))
        require(self.alpha_per in ALPHA_PER, f"alpha_per must be one of {ALPHA_PER}", self.alpha_per)
        require(0 < self.temperature < math.inf, "temperature must be finite and above 0", self.temperature)
        require(self.support in SUPPORTS, f"support must be one of {SUPPORTS}", self.support)
        if self.factors is None:
            require(self.codec in CODECS, f"codec must be one of {CODECS}", self.codec)
        else:
            self._check_factors(self.factors)
        require(self.padding in PADDING, f"padding must be one of {PADDING}", self.padding)
        around_maps = self.factors is None and self.padding == "around"
        require(not around_maps, "padding must be behind where no factors are given", self.padding)
        require(self.compression in COMPRESSIONS, f"compression must be one of {COMPRESSIONS}", self.compression)
        require(self.on_error in ON_ERROR, f"on_error must be one of {ON_ERROR}", self.on_error)
        shards = -(-self.dataset.num_samples // self.shards.samples_per_shard)
        require(self.shards.num_shards == shards, f"num_shards must be {shards}", self.shards.num_shards)

    @functools.cached_property
    def id(self) -> str:
        """SHA-256 of the manifest file (CACHE-22)."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def format_version(self) -> str:
        """The lowest version that has all that this cache uses (CACHE-26)."""
        if self.num_student_layers is not None or self.inputs.decoder or self.shapes == "own":
            return "5"
        if self.factors is not None:
            windows = any(layer.window is not None for layer in self.factors)
            return "4" if windows or self.padding == "around" else "3"
        plain = (self.compression, self.on_error, self.inputs.seed) == ("none", "stop", None)
        plain = plain and self.plans is None and self.matching is None
        return "1" if plain and self.codec in _CODECS_OF_VERSION_1 else "2"

    @property
    def num_teacher_heads(self) -> int:
        """H_t, the same in every layer."""
        return self.layers[0].num_teacher_heads

    @property
    def student_layers(self) -> list[int]:
        """The student layers that have supervision, ascending."""
        return [layer.student_layer for layer in self.layers]

    @property
    def num_alphas(self) -> int:
        """n: pairs in all rounds of a plan. A strategy without pairwise weights stores none (CACHE-47)."""
        return _count_pairs(self.layer_plans[0])

    @property
    def layer_plans(self) -> tuple[Plan, ...]:
        """The plan of every layer, in the order of ``layers`` (CACHE-17)."""
        return (self.plan,) * len(self.layers) if self.plans is None else self.plans

    def map_shapes(self, length: int, shapes: Sequence[tuple[int, int]] = ()) -> tuple[tuple[int, int], ...]:
        """Rows and keys of each layer's maps in a record: n and n, or as the record says (CACHE-116)."""
        return tuple(shapes) if self.shapes == "own" else ((length, length),) * len(self.layers)

    def blob_sizes(self, length: int, first: int = 0, shapes: Sequence[tuple[int, int]] = ()) -> tuple[int, ...]:
        """Bytes of each layer's blob of a record, before compression (CACHE-40, CACHE-107).

        Args:
            length: n.
            first: positions of padding in front, of which factored records hold nothing.
            shapes: rows and keys of each layer, where they are not n and n.
        """
        if self.factors is None:
            return tuple(
                packed_size(self.codec, self.support, self.num_student_heads, rows, keys)
                for rows, keys in self.map_shapes(length, shapes)
            )
        return tuple(
            factored_size(self.codec, self.num_teacher_heads, layer, length - first) for layer in self.factors
        )

    def to_bytes(self) -> bytes:
        """The manifest file."""
        return encode_document(self, format_version=self.format_version)

    @classmethod
    def from_bytes(cls, data: bytes, source: object = "manifest") -> Manifest:
        """Parse an untrusted manifest file.

        Raises:
            ShdError: ``cache-corrupt``, or ``cache-version`` for a format this release does not read.
        """
        members = parse_members(data, source)
        version = members.pop("format_version", None)
        if isinstance(version, str) and version not in _VERSIONS:
            raise ShdError(
                "cache-version",
                f"{source}: format_version must be one of {_VERSIONS} for this release; got {version[:20]!r}: "
                "install a release of squeezing-heads that reads it",
                "CACHE-24",
            )
        manifest = build(cls, members, source)
        if version != manifest.format_version:
            message = (
                f"{source}: format_version must be {manifest.format_version!r} for what it holds; got {version!r}"
            )
            raise ShdError("cache-corrupt", message, "CACHE-26")
        return manifest

    @classmethod
    def read(cls, folder: Folder) -> Manifest:
        """The manifest of a cache.

        Raises:
            ShdError: as ``from_bytes``; ``cache-incomplete`` when the folder holds none.
        """
        storage = open_storage(folder)
        path = storage.locate(MANIFEST_NAME)
        try:
            data = read_document(storage, MANIFEST_NAME)
        except FileNotFoundError as error:
            message = f"{path} must exist: {storage.root} is no cache{_list_caches(storage.root)}"
            raise ShdError("cache-incomplete", message, "CACHE-1") from error
        return cls.from_bytes(data, path)

    def differences(self, other: Manifest) -> list[str]:
        """The members in which another manifest differs, as ``name: this -> other``."""
        mine, theirs = _flatten(asdict(self)), _flatten(asdict(other))
        return [
            f"{name}: {mine.get(name)!r} -> {theirs.get(name)!r}"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]

    def _check_kinds(self) -> None:
        names = [each.kind for each in self.kinds]
        require(
            names == [kind for kind in KINDS if kind in names], f"kinds must be some of {KINDS} in this order", names
        )
        if self.kinds:
            count = sum(each.num_student_layers for each in self.kinds)
            meant = self.num_student_layers
            require(meant == count, f"num_student_layers must be {count}, the sum of all kinds", meant)

    def _check_factors(self, factors: tuple[LayerFactors, ...]) -> None:
        require(len(factors) == len(self.layers), f"factors must be {len(self.layers)}", len(factors))
        problem = check_layers(self.codec, factors, self.num_teacher_heads)
        if problem is not None:
            raise ShdError("argument-value", problem, "CACHE-101")
        require(self.alpha_per == "map", "alpha_per must be map where factors are given", self.alpha_per)
        require(self.temperature == 1.0, "temperature must be 1 where factors are given", self.temperature)

    def shard_samples(self, shard: int) -> list[int]:
        """Sample indices of one shard, in the order in which it stores them (CACHE-25).

        Raises:
            ShdError: ``argument-value`` for a shard number outside the plan.
        """
        count = self.shards.num_shards
        require(0 <= shard < count, f"shard must be 0 to {count - 1}", shard)
        size = self.shards.samples_per_shard
        order = sample_order(self.dataset.num_samples, self.shards.seed)
        return [int(index) for index in order[shard * size : (shard + 1) * size]]


def _count_pairs(plan: Plan) -> int:
    return sum(len(one_round) for one_round in plan)


def _list_caches(root: Path | str) -> str:
    """Which folders of a local folder are caches, for whoever named the folder that holds them."""
    found = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST_NAME}")) if isinstance(root, Path) else []
    shown = ", ".join(found[:SHOWN_CACHES]) + ", ..." * (len(found) > SHOWN_CACHES)
    return f", but holds some: name one of {shown}" if found else ""


def _flatten(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {
        inner: leaf
        for key, member in value.items()
        for inner, leaf in _flatten(member, f"{name}.{key}" if name else key).items()
    }
