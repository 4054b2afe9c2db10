"""Reading a cache: byte ranges, each checked against its checksum every time (CACHE-80 to CACHE-82)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.logits import TopkTargets
from shd_ref.cache.documents import Blob, Errors, Manifest, Receipt, Record, Seal
from shd_ref.cache.forms import FORMS
from shd_ref.cache.forms.exact import Exact, TeacherHead
from shd_ref.cache.forms.form import F32, U8, Extent, FormFile, SampleRecord
from shd_ref.cache.forms.rows import Embeddings, Hidden, Logits
from shd_ref.cache.shards import StoredFile, check_file, check_size, read_committed
from shd_ref.cache.storage.documents import checksum_of
from shd_ref.cache.storage.storage import (
    RECEIPTS_NAME,
    SEAL_NAME,
    Folder,
    committed_shards,
    hex_64,
    open_storage,
    receipt_name,
    shard_name,
    xxh3_64,
)
from shd_ref.errors import ShdError

Choice: TypeAlias = Iterable[int] | bool | None
"""The part of a form to read: some of its layers, all of it (None and True), or nothing."""

Spans: TypeAlias = list[tuple[int, int, int]]
"""Start, end and XXH3-64 of each part of a record."""

OPEN_SHARDS: Final = 32
"""Shard files that a reader keeps open."""

_EXTENTS: Final = 4096  # distinct extents whose part sizes a reader remembers


def _allocate(size: int) -> NDArray[np.uint8]:
    return np.empty(size, dtype=np.uint8)


class CacheReader:
    """The samples of a cache by key. Safe to pickle, to fork and to share between threads.

    Opening it reads every receipt and compares the size of every shard; the bytes of a record are read and checked on
    access. Shards committed afterwards are not seen.

    Args:
        folder: the cache: a path, or an address such as ``s3://bucket/cache``.
        allow_partial: also open a cache that is not sealed, with the shards committed so far.

    Attributes:
        folder: its absolute path, or its address.
        manifest: of the cache.
        sealed: whether it is complete.
        errors: merged over all receipts and the rows they measured.
        skipped: key -> reason, for samples without a record because the teacher failed on them.

    Raises:
        ShdError: ``cache-incomplete`` (not sealed, or a shard file absent or cut short), ``cache-corrupt``,
            ``cache-version``, ``cache-mismatch`` (a receipt of another cache), ``path-unsafe``.
    """

    def __init__(self, folder: Folder, *, allow_partial: bool = False) -> None:
        self._storage = open_storage(folder)
        self.folder = self._storage.root
        self.manifest = Manifest.read(self._storage)
        seal = Seal.read(self._storage, self.manifest)
        self.sealed = seal is not None
        committed = [] if seal is not None else committed_shards(self._storage.names(RECEIPTS_NAME))
        if seal is None and not allow_partial:
            total = self.manifest.shards.num_shards
            raise ShdError(
                "cache-incomplete",
                f"{self._storage.locate(SEAL_NAME)} must exist: {len(committed)} of {total} shards are committed; "
                "give the same shd precompute again, or read what there is with allow_partial=True",
                "CACHE-56",
            )
        shards = committed if seal is None else range(self.manifest.shards.num_shards)
        for file in self.manifest.files if self.sealed else ():
            check_size(self._storage, file.name, file.size)
        self._load(self._storage.map(functools.partial(self._open_receipt, seal=seal), shards))
        self._make_memos()

    def __len__(self) -> int:
        """Samples held, equal ones included."""
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._positions

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def keys(self) -> list[str]:
        """The key of every sample in stored order, in which reads are sequential; equal samples have equal keys."""
        return list(self._keys)

    def seeds(self) -> dict[int, int]:
        """The augmentation seed of every sample by its index, skipped ones too; empty without seeds (CACHE-35)."""
        return dict(self._seeds)

    def read(self, key: str, layers: Iterable[int] | None = None, **choices: Choice) -> SampleRecord:
        """Read one sample and check every byte (CACHE-81).

        Args:
            key: ``sample_key`` of its inputs. Of equal samples the one with the lowest index is read.
            layers: student layers whose attention to read; all by default.
            **choices: the parts of other forms to read, by default all that the cache has: ``logits`` True or False,
                ``hidden`` the teacher layers, ``embeddings`` and ``exact`` True or False.

        Raises:
            ShdError: ``sample-missing``; ``argument-value`` (layers, choices); ``cache-incomplete`` for a shard that
                vanished or was cut short; ``cache-corrupt`` naming file, record and layer.
        """
        return self.read_batch([key], layers, allocate=_allocate, **choices)[0]

    def read_batch(
        self,
        keys: Sequence[str],
        layers: Iterable[int] | None = None,
        *,
        allocate: Callable[[int], NDArray[np.uint8]] = _allocate,
        **choices: Choice,
    ) -> list[SampleRecord]:
        """Read several samples, their bytes into one buffer, without copies; arguments as of ``read``.

        They are read in the order in which they lie in their shards, and from an object store many at once.
        ``allocate`` gives memory for a number of bytes, which takes all blobs: form by form (attention, logits, ...),
        in each layer by layer, in each of these sample by sample.
        """
        names, choices = dict.fromkeys(form.CHOICE for form in FORMS), {"layers": layers, **choices}
        if unknown := sorted(choices.keys() - names.keys()):
            raise ShdError("argument-value", f"a form must be one of {', '.join(names)}; got {unknown}", "CACHE-81")
        coded = [number for name in names for number in self._parts_of(name, choices.get(name))]
        positions = [self._find(key) for key in keys]
        starts, stops, _ = self._spans[positions][:, coded].T.astype(np.int64)  # each (parts, keys)
        ends = list(accumulate((stops - starts).ravel().tolist(), initial=0))
        buffer = allocate(ends[-1])
        slots = [buffer[start:end] for start, end in pairwise(ends)]
        order = sorted(range(len(keys)), key=positions.__getitem__)  # by shard, and in stored order

        def read(number: int) -> SampleRecord:
            parts = dict(zip(coded, slots[number :: len(keys)], strict=True))
            return self._read(keys[number], positions[number], parts)

        by_number = dict(zip(order, self._storage.map(read, order), strict=True))
        return [by_number[number] for number in range(len(keys))]

    def decode(self, record: SampleRecord, layer: int) -> NDArray[np.float32]:
        """The merged maps of one student layer, float32 ``(H_s, rows, keys)``: rows sum to one, or are zero.

        Of factored records they are computed from queries and keys (CACHE-152).
        """
        return self.manifest.attention.decode(record, layer)

    def decode_logits(self, record: SampleRecord) -> TopkTargets | NDArray[np.float32]:
        """The teacher's logits of one sample: classes of R rows, or ``(R, V)`` float32 if all are stored.

        Row r belongs to position ``first + r``; a classifier has a single row (CACHE-160). This and the methods below
        raise ``argument-value`` where the cache, or the record as it was read, lacks them, and ``cache-corrupt``.
        """
        rows: TopkTargets | NDArray[np.float32] = self.manifest.need(Logits, "logits").decode(record)
        return rows

    def decode_hidden(self, record: SampleRecord, layer: int) -> NDArray[np.float32]:
        """The teacher's hidden states of one of its layers, ``(R, width)`` float32; row r as for logits."""
        states: NDArray[np.float32] = self.manifest.need(Hidden, "hidden states").decode(record, layer)
        return states

    def decode_embedding(self, record: SampleRecord) -> NDArray[np.float32]:
        """The teacher's embedding of one text, ``(width,)`` float32, pooled as the manifest says."""
        return self.manifest.need(Embeddings, "embeddings").decode(record)

    def decode_last(self, record: SampleRecord) -> NDArray[np.float32]:
        """The states that the teacher's head reads for one sample, ``(R, width)`` float32; row r as for logits."""
        states: NDArray[np.float32] = self.manifest.need(Exact, "exact targets").decode(record)
        return states

    def read_head(self) -> TeacherHead:
        """The teacher's head, which makes logits of last states; every byte is checked."""
        form = self.manifest.need(Exact, "exact targets")
        return form.read_head(self.read_file(form.files[0]))

    def read_file(self, file: FormFile) -> NDArray[np.uint8]:
        """One of ``manifest.files``, checked: ``cache-incomplete``, ``cache-corrupt``."""
        check_size(self._storage, file.name, file.size)
        data = StoredFile(self._storage, file.name).read(0, file.size)
        check_file(self._storage, file, data)
        return data

    def _open_receipt(self, shard: int, seal: Seal | None) -> Receipt:
        receipt = read_committed(self._storage, shard, self.manifest)
        checksum = checksum_of(receipt)
        if seal is not None and seal.receipts[shard] != checksum:
            path = self._storage.locate(receipt_name(shard))
            message = f"{path} must have checksum {seal.receipts[shard]}; got {checksum}"
            raise ShdError("cache-corrupt", message + ": it changed after the cache was sealed", "CACHE-55")
        return receipt

    def _load(self, receipts: Iterable[Receipt]) -> None:
        # Arrays instead of objects: a big cache has millions of blobs, and every worker holds this table.
        self._keys: list[str] = []
        self._seeds: dict[int, int] = {}
        self.skipped: dict[str, str] = {}
        self._positions: dict[str, int] = {}
        errors: list[Errors] = []
        where = [np.empty((0, 5), np.int64)]  # by record: shard, index, length, first, decoder
        spans = [np.empty((0, len(self.manifest.parts), 3), np.uint64)]  # by record and part: see Spans
        shapes: list[NDArray[np.int64]] = []
        for receipt in receipts:
            errors.append(receipt.errors)
            records = receipt.records
            self._keys += [record.key for record in records]
            self._seeds |= {sample.index: sample.seed for sample in receipt.samples if sample.seed is not None}
            self.skipped |= {sample.key: sample.reason for sample in receipt.skipped}
            if records:
                places = [(receipt.shard, r.index, r.length, r.first, r.decoder) for r in records]
                where.append(np.array(places, np.int64))
                spans.append(np.array([_spans(record) for record in records], np.uint64))
                shapes.append(np.array([record.shapes for record in records], np.int64))
        self.errors = Errors.merged(errors)
        self._where, self._spans = np.concatenate(where), np.concatenate(spans)
        self._shapes = np.concatenate(shapes) if shapes else np.empty((0, 0), np.int64)
        for position, key in enumerate(self._keys):
            first = self._positions.setdefault(key, position)
            if self._where[position, 1] < self._where[first, 1]:  # of equal samples the lowest index
                self._positions[key] = position

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_open", "_part_shapes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_memos()

    def _make_memos(self) -> None:
        """Open shard files, and sizes by extent: remembered in this process, and not pickled."""
        storage = self._storage  # the function holds no reader, which is freed with its open files
        self._open = functools.lru_cache(OPEN_SHARDS)(lambda shard: StoredFile(storage, shard_name(shard)))
        self._part_shapes = functools.lru_cache(maxsize=_EXTENTS)(self.manifest.part_shapes)

    def _parts_of(self, name: str, choice: Choice) -> list[int]:
        """Numbers of the coded parts of a form that are to be read, by the keyword of its choice."""
        subjects = {form.SUBJECT for form in self.manifest.forms if name == form.CHOICE}
        parts = [(number, part) for number, part in enumerate(self.manifest.parts) if part.subject in subjects]
        numbers = {part.layer: number for number, part in parts if part.dtype == U8}
        if choice is None or isinstance(choice, bool):
            return [] if choice is False else list(numbers.values())
        for layer in choice:
            if layer not in numbers:
                raise ShdError("argument-value", f"{name} must be among {list(numbers)}; got {layer}", "CACHE-81")
        return [numbers[layer] for layer in dict.fromkeys(choice)]

    def _find(self, key: str) -> int:
        position = self._positions.get(key)
        if position is not None:
            return position
        advice = "its inputs changed, or it was never written"
        if key in self.skipped:
            advice = f"it was skipped, as {self.skipped[key]}"
        elif not self.sealed:
            advice = "the cache is partial: write the rest"
        raise ShdError("sample-missing", f"{self.folder} must hold sample {key}; it does not: {advice}", "CACHE-82")

    def _read(self, key: str, position: int, coded: dict[int, NDArray[np.uint8]]) -> SampleRecord:
        """A record; its coded parts, by their numbers, fill the memory that is given for them."""
        parts, spans = self.manifest.parts, self._spans[position].tolist()
        shard, index, length, first, decoder = self._where[position].tolist()
        shapes = tuple((rows, keys) for rows, keys in self._shapes[position].tolist())
        part_shapes = self._part_shapes(Extent(length, first, shapes, decoder))
        floats = {
            number: np.empty(spans[number][1] - spans[number][0], np.uint8)
            for number, part in enumerate(parts)
            if part.dtype == F32 and spans[number][1]
        }
        stored = floats | coded
        self._read_blobs(shard, index, stored, spans)
        values: dict[str, NDArray[Any]] = {}
        for number, data in floats.items():
            numbers = data.view("<f4").astype(np.float32, copy=False)
            values[parts[number].name] = numbers.reshape(part_shapes[number])
        values |= {parts[number].name: blob for number, blob in coded.items()}
        return SampleRecord(index, key, length, values, self._seeds.get(index), first, shapes, decoder)

    def _read_blobs(self, shard: int, index: int, stored: dict[int, NDArray[np.uint8]], spans: Spans) -> None:
        """Blobs of one record; those that lie side by side are fetched at once, to save requests."""
        file, rest = self._open(shard), list(stored)
        while rest:
            count = 1
            while count < len(rest) and spans[rest[count]][0] == spans[rest[count - 1]][1]:
                count += 1
            run, rest = rest[:count], rest[count:]
            file.read_into(spans[run[0]][0], [stored[number] for number in run])
            for number in run:
                (start, end, expected), digest = spans[number], xxh3_64(stored[number])
                if digest != expected:
                    where = f"{file.path}: record {index} {self.manifest.parts[number].title}: bytes {start} to {end}"
                    receipt = self._storage.locate(receipt_name(shard))
                    raise ShdError(
                        "cache-corrupt",
                        f"{where} must have XXH3-64 {hex_64(expected)}; got {hex_64(digest)}: restore the file, or "
                        f"delete {receipt} and write the shard again",
                        "CACHE-81",
                    )


def _spans(record: Record) -> Spans:
    blobs = (blob or Blob(0, 0, "0") for blob in record.blobs)
    return [(blob.start, blob.end, int(blob.xxh3_64, 16)) for blob in blobs]
