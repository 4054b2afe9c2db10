"""Receipts: what has been committed (CACHE-60 to CACHE-63)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shd_ref.cache.codecs.distortion import CodecError
from shd_ref.cache.documents.keys import check_key
from shd_ref.cache.documents.manifest import Manifest
from shd_ref.cache.storage.documents import build, encode_document, optional, parse_members, read_document
from shd_ref.cache.storage.layout import receipt_name
from shd_ref.cache.storage.places import Folder, open_storage
from shd_ref.errors import ShdError

_XXH3_64: Final = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class RecordShape:
    """What decides the header entries of one record; ``num_alphas`` is 0 where the strategy has none.

    ``num_rows`` is that of the layer with most rows.
    """

    index: int
    num_rows: int
    num_alphas: int
    has_mixing: bool
    layer_sizes: tuple[int, ...]


class Blob(NamedTuple):
    """Bytes ``start`` to ``end`` of a shard file, and their XXH3-64 in 16 hex digits."""

    start: int
    end: int
    xxh3_64: str


@dataclass(frozen=True)
class Record:
    """Where one sample lies in its shard.

    Attributes:
        index: position in the data set.
        key: 32 hex digits, ``sample_key`` of its inputs.
        length: n, counted positions.
        layers: a blob per layer of the manifest, in its order.
        alphas: float32 merge coefficients.
        mixing: float32 mixing matrices, or None.
        seed: of the sample's augmentation, or None.
        first: positions of padding in front (CACHE-113).
        shapes: rows and keys of each layer's maps; empty unless the manifest has shapes ``own`` (CACHE-116).
    """

    index: int
    key: str
    length: int
    layers: tuple[Blob, ...]
    alphas: Blob
    mixing: Blob | None
    seed: int | None = optional(None)
    first: int = optional(0)
    shapes: tuple[tuple[int, int], ...] = optional(())

    @property
    def num_rows(self) -> int:
        """Of the layer that has most: the last axis of weights by row."""
        return count_rows(self.length, self.shapes)


@dataclass(frozen=True)
class Skipped:
    """A sample that has no record, because the teacher failed on it.

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
    """The commit point of one shard (CACHE-60): a shard without its receipt does not exist.

    Attributes:
        manifest: id of the cache it belongs to.
        shard: its number.
        size: bytes of the shard file.
        xxh3_128: of the whole shard file.
        codec_error: measured on this shard's own rows.
        records: in stored order.
        skipped: samples of this shard without a record, in the same order.
    """

    manifest: str
    shard: int
    size: int
    xxh3_128: str
    codec_error: CodecError
    records: tuple[Record, ...]
    skipped: tuple[Skipped, ...] = optional(())

    @classmethod
    def read(cls, folder: Folder, shard: int, manifest: Manifest) -> Receipt:
        """Parse one receipt and check it against the manifest.

        Raises:
            ShdError: ``cache-incomplete`` (no receipt), ``cache-corrupt``, ``cache-mismatch`` (another cache's).
        """
        storage = open_storage(folder)
        path = storage.locate(receipt_name(shard))
        try:
            data = read_document(storage, receipt_name(shard))
        except FileNotFoundError as error:
            message = f"{path} must exist: shard {shard} was never committed; write it"
            raise ShdError("cache-incomplete", message, "CACHE-60") from error
        return cls.from_bytes(data, shard, manifest, path)

    @classmethod
    def from_bytes(cls, data: bytes, shard: int, manifest: Manifest, source: object = "receipt") -> Receipt:
        """As ``read``, from bytes."""
        receipt = build(cls, parse_members(data, source), source)
        if receipt.manifest != manifest.id:
            message = f"{source} must belong to manifest {manifest.id}; got {receipt.manifest}"
            raise ShdError("cache-mismatch", message + ": it was copied from another cache", "CACHE-61")
        for problem in receipt._problems(shard, manifest):
            raise ShdError("cache-corrupt", f"{source}: {problem}", "CACHE-62")
        return receipt

    def to_bytes(self) -> bytes:
        """The receipt file."""
        return encode_document(self)

    def shapes(self, manifest: Manifest) -> list[RecordShape]:
        """What the sizes of the blobs say about each record."""
        return [
            RecordShape(
                record.index,
                record.num_rows,
                manifest.num_alphas if record.alphas.end > record.alphas.start else 0,
                record.mixing is not None,
                tuple(blob.end - blob.start for blob in record.layers),
            )
            for record in self.records
        ]

    def sample_keys(self) -> dict[int, str]:
        """The key of every sample of the shard, skipped ones included, by index."""
        samples: tuple[Record | Skipped, ...] = (*self.records, *self.skipped)
        return {sample.index: sample.key for sample in samples}

    def sample_seeds(self) -> dict[int, int]:
        """The seed of every sample that has one, skipped ones included, by index."""
        samples: tuple[Record | Skipped, ...] = (*self.records, *self.skipped)
        return {sample.index: sample.seed for sample in samples if sample.seed is not None}

    def stored_order(self) -> Iterator[Blob]:
        """All blobs as they lie in the shard: float32 ones of every record, then the codes (CACHE-44)."""
        for record in self.records:
            yield record.alphas
            if record.mixing is not None:
                yield record.mixing
        for record in self.records:
            yield from record.layers

    def _problems(self, shard: int, manifest: Manifest) -> Iterator[str]:
        samples, size = manifest.dataset.num_samples, manifest.shards.samples_per_shard
        if self.shard != shard or shard >= manifest.shards.num_shards:
            yield f"shard must be {shard}, as its name says, below {manifest.shards.num_shards}; got {self.shard}"
        found = len(self.records) + len(self.skipped)
        if found != min(size, samples - shard * size):
            yield f"records must be {min(size, samples - shard * size)}, by the shard plan; got {found}"
        if self.skipped and manifest.on_error != "skip":
            yield f"skipped must be empty where the manifest does not allow it; got {len(self.skipped)}"
        for skipped in self.skipped:
            if skipped.index >= samples:
                yield f"skipped index must be below {samples}; got {skipped.index}"
            problems = (*_key_problems(skipped.key), *_seed_problems(skipped.seed, manifest))
            yield from (f"skipped sample {skipped.index}: {problem}" for problem in problems)
        if min(self.codec_error.kl_mean, self.codec_error.kl_max, self.codec_error.tv_mean) < 0:
            yield f"codec_error must not be negative; got {self.codec_error}"
        for record in self.records:
            yield from (f"record {record.index}: {problem}" for problem in _record_problems(record, manifest))
        position = None
        for blob in self.stored_order():
            if blob.start != (blob.start if position is None else position) or blob.end < blob.start:
                yield f"blobs must follow each other without gaps; got one at {blob.start} to {blob.end}"
            position = blob.end
        if position != self.size and self.records:
            yield f"the last blob must end at the shard's size {self.size}; got {position}"


def count_rows(length: int, shapes: Sequence[tuple[int, int]]) -> int:
    """Rows of the layer that has most."""
    return max((rows for rows, _ in shapes), default=length)


def alphas_shape(manifest: Manifest, length: int, num_alphas: int) -> tuple[int, ...]:
    """``(num_layers, n)``, or ``(num_layers, n, length)`` where every row has its own (CACHE-47)."""
    rows = (length,) if manifest.alpha_per == "row" else ()
    return (len(manifest.layers), num_alphas, *rows)


def mixing_shape(manifest: Manifest, length: int) -> tuple[int, ...]:
    """``(num_layers, H_s, H_t)``, or with a last axis ``length`` where every row has its own (CACHE-48)."""
    rows = (length,) if manifest.alpha_per == "row" else ()
    return (len(manifest.layers), manifest.num_student_heads, manifest.num_teacher_heads, *rows)


def _record_problems(record: Record, manifest: Manifest) -> Iterator[str]:
    yield from _key_problems(record.key)
    yield from _seed_problems(record.seed, manifest)
    if record.index >= manifest.dataset.num_samples or record.length < 1:
        yield f"index must be below {manifest.dataset.num_samples} and length at least 1; got length {record.length}"
    if record.first and (manifest.padding == "behind" or record.first >= record.length):
        yield f"first must be 0, or below length {record.length} where padding is around; got {record.first}"
        return
    if len(record.layers) != len(manifest.layers):
        yield f"layers must be {len(manifest.layers)}; got {len(record.layers)}"
    wanted = len(manifest.layers) if manifest.shapes == "own" else 0
    if len(record.shapes) != wanted or not all(1 <= size < 2**31 for shape in record.shapes for size in shape):
        yield f"shapes must be rows and keys, at least 1, of {wanted} layers; got {str(record.shapes)[:80]}"
        return
    full = 4 * math.prod(alphas_shape(manifest, record.num_rows, manifest.num_alphas))
    allowed: list[tuple[Blob, Sequence[int]]] = [
        (blob, (size,) if manifest.compression == "none" else range(1, size + 1))
        for blob, size in zip(
            record.layers, manifest.blob_sizes(record.length, record.first, record.shapes), strict=False
        )
    ]
    allowed.append((record.alphas, (0, full)))
    if record.mixing is None and manifest.factors is not None:
        yield "mixing must be there where the manifest has factors"
    if record.mixing is not None:
        allowed.append((record.mixing, (4 * math.prod(mixing_shape(manifest, record.num_rows)),)))
    for blob, sizes in allowed:
        if blob.end - blob.start not in sizes:
            yield f"a blob must hold {max(sizes)} bytes; got {blob.end - blob.start}"
        if not _XXH3_64.fullmatch(blob.xxh3_64):
            yield f"xxh3_64 must be 16 hex digits; got {blob.xxh3_64[:20]!r}"


def _key_problems(key: str) -> Iterator[str]:
    try:
        check_key(key)
    except ShdError as error:
        yield str(error)


def _seed_problems(seed: int | None, manifest: Manifest) -> Iterator[str]:
    if (seed is None) != (manifest.inputs.seed is None):
        yield f"seed must be there where the manifest names a column of seeds, and only there; got {seed}"
