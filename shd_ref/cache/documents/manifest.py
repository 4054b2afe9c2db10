"""The manifest: what a cache was made from, and how (CACHE-20 to CACHE-26). Immutable, free of dates."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Final, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.documents.keys import check_key
from shd_ref.cache.forms import Held, kind_of, subjects
from shd_ref.cache.forms.form import SHA256, Extent, Form, FormFile, Part, require, require_ranges
from shd_ref.cache.storage.documents import (
    MAX_INTEGER,
    check_members,
    convert,
    encode_document,
    fields_of,
    optional,
    parse_members,
    read_document,
    refusing,
)
from shd_ref.cache.storage.storage import MANIFEST_NAME, MAX_SAMPLES, MAX_SHARDS, Folder, open_storage, xxh3_64
from shd_ref.errors import ShdError

_require: Final = functools.partial(require, spec_id="CACHE-22")


@dataclass(frozen=True)
class Teacher:
    """The model that was squeezed.

    Attributes:
        sha256: of the teacher's file, 64 hex digits.
        name: for people.
        provider: the onnxruntime provider, such as ``CPUExecutionProvider``.
        dtype: of its attention, such as ``float32``.
        session: what else decides how it rounds, where it is quantised (CACHE-27).
    """

    sha256: str
    name: str
    provider: str
    dtype: str
    session: str = optional("")

    def __post_init__(self) -> None:
        _require(bool(SHA256.fullmatch(self.sha256)), "teacher.sha256 must be 64 hex digits", self.sha256)


@dataclass(frozen=True)
class SampleInputs:
    """The inputs of a sample key: names in alphabetical order, and the name of the mask, if any.

    ``seed`` names the column that holds each sample's augmentation seed, if any; it is not part of the key.
    ``decoder`` names the inputs of the sequence whose positions are the query rows of decoder and cross attention,
    and ``decoder_mask`` their mask, if any: they are cut by it, and all others by ``mask`` (CACHE-33).
    """

    names: tuple[str, ...]
    mask: str | None
    seed: str | None = optional(None)
    decoder: tuple[str, ...] = optional(())
    decoder_mask: str | None = optional(None)

    def __post_init__(self) -> None:
        names, decoder = list(self.names), list(self.decoder)
        valid = decoder == sorted(set(decoder)) and set(decoder) <= set(names) and self.mask not in decoder
        _require(valid, f"inputs.decoder must be some of {names}, sorted, without the mask", decoder)
        fits = self.decoder_mask in (*decoder, None)
        _require(fits, f"inputs.decoder_mask must be one of {decoder}", self.decoder_mask)
        _require(bool(names) and names == sorted(set(names)), "inputs.names must be sorted and distinct", names)
        _require(self.mask in (*names, None), f"inputs.mask must be one of {names} or None", self.mask)


@dataclass(frozen=True)
class Dataset:
    """The samples in order: ``dataset_fingerprint`` of their keys, and how many."""

    fingerprint: str
    num_samples: int

    def __post_init__(self) -> None:
        check_key(self.fingerprint)
        require_ranges(self, "CACHE-22", num_samples=(1, MAX_SAMPLES))


@dataclass(frozen=True)
class ShardPlan:
    """Assignment of samples to shards; ``num_shards`` is ``ceil(num_samples / samples_per_shard)``."""

    samples_per_shard: int
    seed: int
    num_shards: int

    def __post_init__(self) -> None:
        require_ranges(self, "CACHE-22", samples_per_shard=(1, MAX_INTEGER), seed=(0, MAX_INTEGER))
        require_ranges(self, "CACHE-22", num_shards=(1, MAX_SHARDS))


@functools.lru_cache(maxsize=2)
def sample_order(num_samples: int, seed: int) -> NDArray[np.int64]:
    """Indices sorted by their seeded XXH3-64: a library's shuffle may change from release to release (CACHE-26)."""
    hashes = (xxh3_64(struct.pack("<Q", index), seed) for index in range(num_samples))
    return np.argsort(np.fromiter(hashes, dtype=np.uint64, count=num_samples), kind="stable")


FORMAT_VERSION: Final = "1"
"""The version of the format; another one is refused (CACHE-25). Open until release 0.1.0 (CACHE-95)."""

SHOWN: Final = 8
"""How many caches are named where a folder of them was taken for one, and differences of two manifests."""

ON_ERROR: Final = ("stop", "skip")


class _Members(TypedDict):
    """Of a manifest beside its forms."""

    spec_version: str
    created_by: str
    teacher: Teacher
    inputs: SampleInputs
    dataset: Dataset
    shards: ShardPlan
    on_error: NotRequired[str]


@dataclass(frozen=True, kw_only=True)
class Manifest(Held):
    """Everything that decides the numbers in a cache (CACHE-20).

    Attributes:
        spec_version: of the specification.
        created_by: name and version of the package.
        teacher: what was run.
        forms: what a record holds, at least one; each is the member of the file that its ``SUBJECT`` names. See
            also ``attention``, ``logits`` and ``hidden``, and ``find``.
        inputs: what a sample key is made of.
        dataset: which samples.
        shards: assignment of samples to shards.
        on_error: ``"skip"`` where receipts may name samples that the teacher failed on, else ``"stop"``.

    Raises:
        ShdError: ``argument-value`` for a number or name outside its range.
    """

    spec_version: str
    created_by: str
    teacher: Teacher
    forms: tuple[Form, ...]
    inputs: SampleInputs
    dataset: Dataset
    shards: ShardPlan
    on_error: str = optional("stop")

    def __post_init__(self) -> None:
        names = [form.SUBJECT for form in self.forms]
        order = [name for name in subjects() if name in names]
        known = bool(names) and sorted(names) == sorted(order)
        require(known, f"a cache must hold some of {list(subjects())}", names, "CACHE-160")
        object.__setattr__(self, "forms", tuple(sorted(self.forms, key=lambda form: order.index(form.SUBJECT))))
        for form in self.forms:
            form.check_manifest(self.teacher.sha256, has_decoder=bool(self.inputs.decoder))
        require(self.on_error in ON_ERROR, f"on_error must be one of {ON_ERROR}", self.on_error, "CACHE-51")
        shards = -(-self.dataset.num_samples // self.shards.samples_per_shard)
        require(self.shards.num_shards == shards, f"num_shards must be {shards}", self.shards.num_shards, "CACHE-22")

    @functools.cached_property
    def id(self) -> str:
        """SHA-256 of the manifest file (CACHE-23)."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def has_decoder_rows(self) -> bool:
        """Whether a form has a row for each position of the second sequence."""
        return any("decoder" in form.stated for form in self.forms)

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for form in self.forms for part in form.parts)

    def part_shapes(self, extent: Extent) -> tuple[tuple[int, ...], ...]:
        """The shape of each of ``parts``, see ``Form.part_shapes``."""
        return tuple(shape for form in self.forms for shape in form.part_shapes(extent))

    @property
    def files(self) -> tuple[FormFile, ...]:
        return tuple(file for form in self.forms for file in form.files)

    @property
    def members(self) -> dict[str, Any]:
        """The members of the file, each form under its ``SUBJECT``."""
        members = fields_of(self)
        return {form.SUBJECT: form for form in members.pop("forms")} | members

    def to_bytes(self) -> bytes:
        return encode_document(self.members, format_version=FORMAT_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes, source: object = "manifest") -> Manifest:
        """Parse an untrusted manifest file: ``cache-corrupt``, or ``cache-version`` for another format."""
        members = parse_members(data, source)
        version = members.pop("format_version", None)
        if not isinstance(version, str):
            raise ShdError("cache-corrupt", f"{source}: format_version must be a string; got {version!r}", "CACHE-15")
        if version != FORMAT_VERSION:
            rule = f"{source}: format_version must be {FORMAT_VERSION!r} for this release; got {version[:20]!r}"
            remedy = "install a release of squeezing-heads that reads it, or precompute the cache again"
            raise ShdError("cache-version", f"{rule}: {remedy}", "CACHE-25")
        forms: list[Form] = []
        for name in subjects():
            if name in members:
                with refusing(f"{source}: {name}"):
                    forms.append(convert(members[name], kind_of(name, members[name])))
        with refusing(source):
            manifest = cls(forms=tuple(forms), **convert(members, _Members))
        check_members(manifest.members, members, source)
        return manifest

    @classmethod
    def read(cls, folder: Folder) -> Manifest:
        """The manifest of a cache; raises as ``from_bytes``, and ``cache-incomplete`` where there is none."""
        storage = open_storage(folder)
        path = storage.locate(MANIFEST_NAME)
        try:
            data = read_document(storage, MANIFEST_NAME)
        except FileNotFoundError as error:
            message = f"{path} must exist: {storage.root} is not a cache{_list_caches(storage.root)}"
            raise ShdError("cache-incomplete", message, "CACHE-1") from error
        return cls.from_bytes(data, path)

    def differences(self, other: Manifest) -> list[str]:
        """The members in which another manifest differs, as ``name: this -> other``, and how many more than a few."""
        mine, theirs = dict(_leaves("", self.members)), dict(_leaves("", other.members))
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        names.sort(key=lambda name: "[" in name)  # a dozen layers last
        shown = [f"{name}: {mine.get(name)!r} -> {theirs.get(name)!r}" for name in names[:SHOWN]]
        return shown + [f"{len(names) - SHOWN} more"] * (len(names) > SHOWN)

    def shard_samples(self, shard: int) -> list[int]:
        """Indices of a shard's samples in stored order (CACHE-26); ``argument-value`` outside the plan."""
        count = self.shards.num_shards
        require(0 <= shard < count, f"shard must be 0 to {count - 1}", shard, "CACHE-26")
        size = self.shards.samples_per_shard
        order = sample_order(self.dataset.num_samples, self.shards.seed)
        return [int(index) for index in order[shard * size : (shard + 1) * size]]


def _list_caches(root: Path | str) -> str:
    """Where a folder of caches was named instead of a cache: the names of some of them."""
    names = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST_NAME}")) if isinstance(root, Path) else []
    shown = ", ".join(names[:SHOWN]) + ", ..." * (len(names) > SHOWN)
    return f", but holds some: name one of {shown}" if names else ""


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every number and name of a manifest with its place in it."""
    if is_dataclass(value) or isinstance(value, dict):
        for key, inner in sorted(fields_of(value).items()):
            yield from _leaves(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, tuple) and any(map(is_dataclass, value)):
        for number, inner in enumerate(value):
            yield from _leaves(f"{name}[{number}]", inner)
    else:
        yield name, value
