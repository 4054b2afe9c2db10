"""Receipts and the seal: what has been committed, and that nothing is missing (CACHE-50 to CACHE-56)."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from shd_ref.cache.codecs.codecs import RowError, merge_errors
from shd_ref.cache.documents.keys import check_key, dataset_fingerprint
from shd_ref.cache.documents.manifest import Manifest
from shd_ref.cache.forms import error_kinds
from shd_ref.cache.forms.form import F32, U8, Extent, Part
from shd_ref.cache.storage.documents import build, convert, encode_document, optional, parse_members, read_document
from shd_ref.cache.storage.storage import SEAL_NAME, Folder, open_storage, receipt_name
from shd_ref.errors import ShdError

_XXH3_64: Final = re.compile(r"[0-9a-f]{16}")


class Blob(NamedTuple):
    """Bytes ``start`` to ``end`` of a shard file, and their XXH3-64 in 16 hex digits."""

    start: int
    end: int
    xxh3_64: str


class Errors(dict[str, RowError]):
    """What coding cost, measured by the writer on its own rows, by ``SUBJECT`` of the manifest's forms."""

    @classmethod
    def from_members(cls, members: Any) -> Errors:
        """Of a receipt; ValueError."""
        kinds = error_kinds()
        if type(members) is not dict or not members.keys() <= kinds.keys():
            raise ValueError(f"errors must have members of {sorted(kinds)}; got {str(members)[:80]}")
        return cls({name: convert(error, kinds[name]) for name, error in members.items()})

    @classmethod
    def unmeasured(cls, manifest: Manifest) -> Errors:
        """Of no row, with the members that the manifest's forms want."""
        return cls({form.SUBJECT: merge_errors(form.ERROR, ()) for form in manifest.forms})

    @classmethod
    def merged(cls, parts: Iterable[Errors]) -> Errors:
        parts = list(parts)
        measured = {name: [by_kind[name] for by_kind in parts if name in by_kind] for name in error_kinds()}
        return cls({name: merge_errors(type(errors[0]), errors) for name, errors in measured.items() if errors})

    def problems(self, manifest: Manifest) -> Iterator[str]:
        """What no measurement gives, and members that are not those of the manifest's forms."""
        subjects = {form.SUBJECT for form in manifest.forms}
        if self.keys() != subjects:
            yield f"errors must have the members {sorted(subjects)}, as the manifest's forms; got {sorted(self)}"
        for name, error in self.items():
            if not all(0 <= number < math.inf for number in vars(error).values()):
                yield f"errors.{name} must be finite and not negative; got {error}"


@dataclass(frozen=True)
class Record:
    """The position of one sample in its shard.

    Attributes:
        index: position in the data set.
        key: 32 hex digits, ``sample_key`` of its inputs.
        length: n, counted positions.
        blobs: the position of each part of the manifest; None for a missing part.
        seed: of the sample's augmentation, or None.
        first: positions of padding in front (CACHE-145).
        shapes: rows and keys of each layer's maps; empty unless the manifest has shapes ``own`` (CACHE-128).
        decoder: positions of the second sequence; 0 unless a form has a row for each (CACHE-160).
    """

    index: int
    key: str
    length: int
    blobs: tuple[Blob | None, ...]
    seed: int | None = optional(None)
    first: int = optional(0)
    shapes: tuple[tuple[int, int], ...] = optional(())
    decoder: int = optional(0)

    @property
    def extent(self) -> Extent:
        return Extent(self.length, self.first, self.shapes, self.decoder)


@dataclass(frozen=True)
class Skipped:
    """A sample without a record because the teacher failed on it.

    Attributes:
        index: position in the data set.
        key: ``sample_key`` of its inputs.
        reason: for people.
        seed: of the sample's augmentation, or None.
    """

    index: int
    key: str
    reason: str
    seed: int | None = optional(None)


@dataclass(frozen=True)
class Receipt:
    """The commit point of one shard (CACHE-50): a shard without its receipt does not exist.

    Attributes:
        manifest: id of the cache it belongs to.
        shard: its number.
        size: bytes of the shard file.
        xxh3_128: of the whole shard file.
        errors: coding errors on the rows of this shard.
        records: in stored order.
        skipped: samples of this shard without a record, in the same order.
    """

    manifest: str
    shard: int
    size: int
    xxh3_128: str
    errors: Errors
    records: tuple[Record, ...]
    skipped: tuple[Skipped, ...] = optional(())

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

    def to_bytes(self) -> bytes:
        return encode_document(self)

    @property
    def samples(self) -> tuple[Record | Skipped, ...]:
        """Records, and skipped samples after them."""
        return (*self.records, *self.skipped)

    def sample_keys(self) -> dict[int, str]:
        """The key of every sample of the shard, skipped ones included, by index."""
        return {sample.index: sample.key for sample in self.samples}

    def sample_seeds(self) -> dict[int, int]:
        """The seed of every sample that has one, skipped ones included, by index."""
        return {sample.index: sample.seed for sample in self.samples if sample.seed is not None}

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
    """States that every shard is committed (CACHE-55).

    Attributes:
        manifest: id of the cache.
        num_samples: samples in all shards.
        receipts: the checksum member of every receipt, by shard number.
    """

    manifest: str
    num_samples: int
    receipts: tuple[str, ...]

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

    def to_bytes(self) -> bytes:
        return encode_document(self)


def _check_manifest(document: Receipt | Seal, manifest: Manifest, source: object) -> None:
    if document.manifest != manifest.id:
        message = f"{source} must belong to manifest {manifest.id}; got {document.manifest}"
        raise ShdError("cache-mismatch", message + ": it was copied from another cache", "CACHE-52")


def check_fingerprint(folder: object, manifest: Manifest, receipts: Iterable[Receipt]) -> None:
    """Refuse a set of receipts whose keys, by sample index, are not the data set's (CACHE-37)."""
    keys = np.zeros((manifest.dataset.num_samples, 16), dtype=np.uint8)
    held = np.zeros(len(keys), dtype=np.bool_)
    for receipt in receipts:
        for index, key in receipt.sample_keys().items():
            keys[index] = np.frombuffer(bytes.fromhex(key), dtype=np.uint8)
            held[index] = True
    fingerprint = dataset_fingerprint(key.tobytes().hex() for key in keys)
    expected = manifest.dataset.fingerprint
    if fingerprint != expected or not held.all():
        rule = f"{folder}: the fingerprint of its {held.sum()} sample keys must be {expected}, as in the manifest"
        remedy = "the data set or the tokenizer changed while the cache was written; start over in another folder"
        raise ShdError("cache-mismatch", f"{rule}; got {fingerprint}: {remedy}", "CACHE-37")
