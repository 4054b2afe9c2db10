"""The documents of a cache: manifest, receipts and the seal.

The manifest says what a cache was made from, and how (CACHE-20 to CACHE-26), and never changes; receipts and the seal
say what has been committed, and that nothing is missing (CACHE-50 to CACHE-56). None holds a date.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import RowError, merge_errors
from shd_ref.cache.forms import Held, error_kinds, kind_of, subjects
from shd_ref.cache.forms.form import F32, SHA256, U8, Extent, Form, FormFile, Part, require, require_ranges
from shd_ref.cache.storage.documents import (
    MAX_INTEGER,
    build,
    check_members,
    convert,
    encode_document,
    fields_of,
    optional,
    parse_members,
    read_document,
    refusing,
)
from shd_ref.cache.storage.keys import check_key, dataset_fingerprint
from shd_ref.cache.storage.storage import (
    MANIFEST_NAME,
    MAX_SAMPLES,
    MAX_SHARDS,
    SEAL_NAME,
    Folder,
    open_storage,
    receipt_name,
    xxh3_64,
)
from shd_ref.errors import ShdError

_require: Final = functools.partial(require, spec_id="CACHE-22")
_XXH3_64: Final = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Teacher:
    """The model that was squeezed."""

    sha256: str  # of its file, 64 hex digits
    name: str  # for people
    provider: str  # of onnxruntime, such as CPUExecutionProvider
    dtype: str  # of its attention, such as float32
    session: str = optional("")  # other settings that decide how it rounds, where it is quantised (CACHE-27)

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


@dataclass(frozen=True, kw_only=True)
class _Members:
    """Of a manifest, without its forms."""

    spec_version: str  # of the specification
    created_by: str  # name and version of the package
    teacher: Teacher  # the model that was run
    inputs: SampleInputs  # inputs that sample keys are made of
    dataset: Dataset  # which samples
    shards: ShardPlan  # assignment of samples to shards
    on_error: str = optional("stop")  # or "skip": receipts may name samples that the teacher failed on


@dataclass(frozen=True, kw_only=True)
class Manifest(_Members, Held):
    """Everything that decides the numbers in a cache (CACHE-20).

    ``forms`` are what a record holds, at least one; each is the member of the file that its ``SUBJECT`` names. See
    also ``attention``, ``logits`` and ``hidden``, and ``find``.
    """

    forms: tuple[Form, ...]

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
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def has_decoder_rows(self) -> bool:
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
            manifest = cls(forms=tuple(forms), **vars(convert(members, _Members)))
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


class Blob(NamedTuple):
    """Bytes ``start`` to ``end`` of a shard file, and their XXH3-64 in 16 hex digits."""

    start: int
    end: int
    xxh3_64: str


class Errors(dict[str, RowError]):
    """Errors of coding, measured by the writer on its own rows, by ``SUBJECT`` of the manifest's forms."""

    @classmethod
    def from_members(cls, members: Any) -> Errors:
        """Of a receipt; ValueError."""
        kinds = error_kinds()
        if type(members) is not dict or not members.keys() <= kinds.keys():
            raise ValueError(f"errors must have members of {sorted(kinds)}; got {str(members)[:80]}")
        return cls({name: convert(error, kinds[name]) for name, error in members.items()})

    @classmethod
    def merged(cls, parts: Iterable[Errors]) -> Errors:
        parts = list(parts)
        measured = {name: [by_kind[name] for by_kind in parts if name in by_kind] for name in error_kinds()}
        return cls({name: merge_errors(type(errors[0]), errors) for name, errors in measured.items() if errors})

    def problems(self, manifest: Manifest) -> Iterator[str]:
        """Values that no measurement gives, and members that are not those of the manifest's forms."""
        subjects = {form.SUBJECT for form in manifest.forms}
        if self.keys() != subjects:
            yield f"errors must have the members {sorted(subjects)}, as the manifest's forms; got {sorted(self)}"
        for name, error in self.items():
            if not all(0 <= number < math.inf for number in vars(error).values()):
                yield f"errors.{name} must be finite and not negative; got {error}"


@dataclass(frozen=True)
class Record:
    """The position of one sample in its shard; ``length`` to ``decoder`` are its ``Extent``."""

    index: int  # position in the data set
    key: str  # sample_key of its inputs
    length: int
    blobs: tuple[Blob | None, ...]  # of each part of the manifest; None for a missing one
    seed: int | None = optional(None)  # of its augmentation
    first: int = optional(0)
    shapes: tuple[tuple[int, int], ...] = optional(())
    decoder: int = optional(0)

    @property
    def extent(self) -> Extent:
        return Extent(self.length, self.first, self.shapes, self.decoder)


@dataclass(frozen=True)
class Skipped:
    """A sample without a record because the teacher failed on it, and the reason, for people."""

    index: int
    key: str
    reason: str
    seed: int | None = optional(None)


@dataclass(frozen=True)
class Receipt:
    """The commit point of one shard (CACHE-50): a shard without its receipt does not exist."""

    manifest: str  # id of the cache that it belongs to
    shard: int
    size: int  # bytes of the shard file
    xxh3_128: str  # of the whole shard file
    errors: Errors  # of coding, on the rows of this shard
    records: tuple[Record, ...]  # in stored order
    skipped: tuple[Skipped, ...] = optional(())  # samples of this shard without a record, in the same order

    @classmethod
    def read(cls, folder: Folder, shard: int, manifest: Manifest) -> Receipt:
        """Parse one receipt and check it against the manifest.

        Raises ``cache-incomplete`` (no receipt), ``cache-corrupt``, ``cache-mismatch`` (another cache's).
        """
        storage = open_storage(folder)
        path = storage.locate(receipt_name(shard))
        try:
            data = read_document(storage, receipt_name(shard))
        except FileNotFoundError as error:
            message = f"{path} must exist: shard {shard} was never committed; write it"
            raise ShdError("cache-incomplete", message, "CACHE-50") from error
        return cls.from_bytes(data, shard, manifest, path)

    @classmethod
    def from_bytes(cls, data: bytes, shard: int, manifest: Manifest, source: object = "receipt") -> Receipt:
        receipt = build(cls, parse_members(data, source), source)
        _check_manifest(receipt, manifest, source)
        for problem in receipt._problems(shard, manifest):
            raise ShdError("cache-corrupt", f"{source}: {problem}", "CACHE-53")
        return receipt

    @property
    def samples(self) -> tuple[Record | Skipped, ...]:
        """Records, and skipped samples after them."""
        return (*self.records, *self.skipped)

    def stored_parts(self, manifest: Manifest) -> Iterator[tuple[Record, Part, Blob]]:
        """All blobs in stored order: the float32 ones of every record, then the coded ones (CACHE-40)."""
        for dtype in (F32, U8):
            places = [(number, part) for number, part in enumerate(manifest.parts) if part.dtype == dtype]
            for record in self.records:
                for number, part in places:
                    blob = record.blobs[number]
                    if blob is not None:
                        yield record, part, blob

    def sizes(self, manifest: Manifest) -> tuple[Counter[str], Counter[str], Counter[str]]:
        """By ``SUBJECT``: stored bytes of coded parts, bytes of what it teaches in float32, and ``Form.num_rows``."""
        coded, plain, rows = Counter[str](), Counter[str](), Counter[str]()
        for _, part, blob in self.stored_parts(manifest):
            coded[part.subject] += (blob.end - blob.start) * (part.dtype == U8)
        for record in self.records:
            for form in manifest.forms:
                plain[form.SUBJECT] += form.plain_size(record.extent)
                rows[form.SUBJECT] += form.num_rows(record.extent)
        return coded, plain, rows

    def _problems(self, shard: int, manifest: Manifest) -> Iterator[str]:
        samples, size = manifest.dataset.num_samples, manifest.shards.samples_per_shard
        if self.shard != shard or shard >= manifest.shards.num_shards:
            yield f"shard must be {shard}, as its name says, below {manifest.shards.num_shards}; got {self.shard}"
        total = len(self.records) + len(self.skipped)
        if total != min(size, samples - shard * size):
            yield f"records must be {min(size, samples - shard * size)}, by the shard plan; got {total}"
        if self.skipped and manifest.on_error != "skip":
            yield f"skipped must be empty where the manifest does not allow it; got {len(self.skipped)}"
        for skipped in self.skipped:
            if skipped.index >= samples:
                yield f"skipped index must be below {samples}; got {skipped.index}"
            for problem in _sample_problems(skipped, manifest):
                yield f"skipped sample {skipped.index}: {problem}"
        yield from self.errors.problems(manifest)
        count, shapes_of = len(manifest.parts), functools.cache(manifest.part_shapes)
        for record in self.records:
            if len(record.blobs) != count:
                yield f"record {record.index}: blobs must be {count}, one for each part; got {len(record.blobs)}"
                return
            for problem in _record_problems(record, manifest, shapes_of):
                yield f"record {record.index}: {problem}"
        position = None
        for _, _, blob in self.stored_parts(manifest):
            if blob.start != (blob.start if position is None else position) or blob.end < blob.start:
                yield f"blobs must follow each other without gaps; got one at {blob.start} to {blob.end}"
            position = blob.end
        if position != self.size and self.records:
            yield f"the last blob must end at the shard's size {self.size}; got {position}"


def _record_problems(
    record: Record, manifest: Manifest, shapes_of: Callable[[Extent], tuple[tuple[int, ...], ...]]
) -> Iterator[str]:
    yield from _sample_problems(record, manifest)
    if record.index >= manifest.dataset.num_samples or record.length < 1:
        yield f"index must be below {manifest.dataset.num_samples} and length at least 1; got length {record.length}"
    wrong = list(manifest.extent_problems(record.extent))
    if wrong:
        yield from wrong
        return  # the sizes would follow from nonsense
    for part, blob, shape in zip(manifest.parts, record.blobs, shapes_of(record.extent), strict=True):
        size = math.prod(shape) * (4 if part.dtype == F32 else 1)
        if blob is None:
            if not part.optional:
                yield f"{part.name} must be there"
            continue
        if blob.end - blob.start != size:
            yield f"{part.name} must hold {size} bytes; got {blob.end - blob.start}"
        if not _XXH3_64.fullmatch(blob.xxh3_64):
            yield f"xxh3_64 must be 16 hex digits; got {blob.xxh3_64[:20]!r}"


def _sample_problems(sample: Record | Skipped, manifest: Manifest) -> Iterator[str]:
    try:
        check_key(sample.key)
    except ShdError as error:
        yield str(error)
    if (sample.seed is None) != (manifest.inputs.seed is None):
        yield f"seed must be there where the manifest names a column of seeds, and only there; got {sample.seed}"


@dataclass(frozen=True)
class Seal:
    """States that every shard is committed (CACHE-55)."""

    manifest: str  # id of the cache
    num_samples: int  # in all shards
    receipts: tuple[str, ...]  # the checksum of each, by shard number

    @classmethod
    def read(cls, folder: Folder, manifest: Manifest) -> Seal | None:
        """The seal of a cache, or None: ``cache-corrupt``, ``cache-mismatch``."""
        storage = open_storage(folder)
        path = storage.locate(SEAL_NAME)
        try:
            data = read_document(storage, SEAL_NAME)
        except FileNotFoundError:
            return None
        seal = build(cls, parse_members(data, path), path)
        _check_manifest(seal, manifest, path)
        samples, shards = manifest.dataset.num_samples, manifest.shards.num_shards
        if (seal.num_samples, len(seal.receipts)) != (samples, shards):
            raise ShdError("cache-corrupt", f"{path} must count {samples} samples in {shards} shards", "CACHE-55")
        return seal


def _check_manifest(document: Receipt | Seal, manifest: Manifest, source: object) -> None:
    if document.manifest != manifest.id:
        message = f"{source} must belong to manifest {manifest.id}; got {document.manifest}"
        raise ShdError("cache-mismatch", message + ": it was copied from another cache", "CACHE-52")


def check_fingerprint(folder: object, manifest: Manifest, receipts: Iterable[Receipt]) -> None:
    """Refuse a set of receipts whose keys, by sample index, are not the data set's (CACHE-37)."""
    keys = np.zeros((manifest.dataset.num_samples, 16), dtype=np.uint8)
    present = np.zeros(len(keys), dtype=np.bool_)
    for receipt in receipts:
        for sample in receipt.samples:
            keys[sample.index] = np.frombuffer(bytes.fromhex(sample.key), dtype=np.uint8)
            present[sample.index] = True
    fingerprint = dataset_fingerprint(key.tobytes().hex() for key in keys)
    expected = manifest.dataset.fingerprint
    if fingerprint != expected or not present.all():
        rule = f"{folder}: the fingerprint of its {present.sum()} sample keys must be {expected}, as in the manifest"
        remedy = "the data set or the tokenizer changed while the cache was written; start over in another folder"
        raise ShdError("cache-mismatch", f"{rule}; got {fingerprint}: {remedy}", "CACHE-37")
