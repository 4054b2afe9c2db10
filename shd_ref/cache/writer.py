"""Writing a cache: shards in any order, by any number of processes, killed at any moment (CACHE-60 to CACHE-65).

``CacheWriter`` commits shards and seals; ``merge_caches`` joins shards of one job that were made in several places.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shd_ref.cache.documents import Errors, Manifest, Receipt, Seal, Skipped, check_fingerprint
from shd_ref.cache.forms.form import FormFile, SampleRecord
from shd_ref.cache.shards import StoredFile, check_file, check_size, check_sum, read_committed, write_blobs
from shd_ref.cache.storage.documents import checksum_of, encode_document
from shd_ref.cache.storage.storage import (
    MANIFEST_NAME,
    RECEIPTS_NAME,
    SEAL_NAME,
    Folder,
    PendingFile,
    RunningHash,
    Storage,
    committed_shards,
    open_storage,
    receipt_name,
    shard_name,
    write_errors,
)
from shd_ref.errors import ShdError

ATTEMPTS: Final = 5
"""How often a shard is uploaded again where a concurrent writer replaced it (object stores only)."""


def check_free(storage: Storage) -> None:
    """Refuse a place that holds files and no manifest: ``cache-exists`` (CACHE-60)."""
    if storage.exists(MANIFEST_NAME):
        return  # and a large cache is not listed
    foreign = [name for name in storage.names() if not storage.is_leftover(name)]
    # The manifest is looked for again after the listing: a racing writer creates it before anything else.
    if foreign and not storage.exists(MANIFEST_NAME):
        message = f"{storage.root} must be empty or a cache; it holds {foreign[0]!r} and no manifest"
        raise ShdError("cache-exists", message + ": choose another folder (--out)", "CACHE-60")


class CacheWriter:
    """Creates a cache folder, or resumes one with the same manifest.

    Several writers may work on one folder, also from several hosts if their file system shares ``flock``. The first
    to commit a shard wins; the others' bytes are discarded. An object store has no locks: there, the last upload wins
    (CACHE-71).

    Args:
        folder: the cache, a path or an address such as ``s3://bucket/cache``; created if absent.
        manifest: of the new cache.

    Raises:
        ShdError: ``cache-exists`` (the folder holds something else), ``cache-mismatch`` (a cache with another
            manifest), ``cache-corrupt`` (its manifest is damaged), ``write-failed``.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.storage = open_storage(folder)
        self.folder = self.storage.root
        self.manifest = manifest
        self.written: set[int] = set()  # shards that this writer committed: others were first elsewhere
        check_free(self.storage)
        with write_errors(self.folder):
            self.storage.prepare()
            self.storage.create(MANIFEST_NAME, manifest.to_bytes())
        # Read back: of two jobs that start together, one created the manifest, and the other must stop.
        stored = Manifest.read(self.storage)
        if stored.id != manifest.id:
            differences = "; ".join(stored.differences(manifest))
            message = f"{self.folder} holds a cache made from something else (cache -> this job): {differences}"
            remedy = "choose another folder (--out), or repeat the job as it was"
            raise ShdError("cache-mismatch", f"{message}; {remedy}", "CACHE-24")
        with write_errors(self.folder):
            self.storage.remove_stale()

    def missing_shards(self, shards: Sequence[int] | None = None) -> list[int]:
        """Those of some shards, by default all, without a valid receipt, or whose file size differs from it."""
        shards = range(self.manifest.shards.num_shards) if shards is None else shards
        committed = self.storage.map(lambda shard: self._committed(shard) is not None, shards)
        return [shard for shard, is_committed in zip(shards, committed, strict=True) if not is_committed]

    def write_shard(
        self, shard: int, records: Sequence[SampleRecord], errors: Errors, skipped: Sequence[Skipped] = ()
    ) -> Receipt:
        """Commit one shard: its file first, then its receipt, or give an earlier receipt (CACHE-61).

        Args:
            records: all samples of ``manifest.shard_samples(shard)``, in any order.
            errors: coding errors, measured on the rows of these records.
            skipped: samples of the shard without a record, where ``manifest.on_error`` is ``"skip"``.

        Raises:
            ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``,
                ``not-a-distribution`` or ``support-mismatch`` for records that do not fit; ``write-failed``
                when the disk refuses. In every case nothing of this shard becomes visible.
        """
        ordered, left_out = self._ordered(shard, records, skipped)
        for problem in errors.problems(self.manifest):
            raise ShdError("not-finite", f"shard {shard}: {problem}", "CACHE-54")
        committed = self._committed(shard)
        if committed is not None:
            return committed
        name = shard_name(shard)
        with write_errors(self.storage.locate(name)), self.storage.pending(name) as shard_file:
            receipt = write_blobs(shard_file, self.manifest, shard, ordered, errors, left_out)
            shard_file.sync()  # before its receipt exists: a receipt vouches for bytes that a crash cannot lose
            return self.commit_file(shard_file, receipt)

    def commit_file(self, shard_file: PendingFile, receipt: Receipt) -> Receipt:
        """Commit a shard whose bytes are written, synchronised and known to be those of its receipt.

        Returns the committed receipt: an earlier one if the shard had been committed before. Raises ``write-failed``.
        """
        name = receipt_name(receipt.shard)
        with write_errors(self.storage.locate(name)), self.storage.pending(name) as receipt_file:
            receipt_file.write(encode_document(receipt))
            receipt_file.sync()
            with self.storage.exclusive():
                return self._commit(shard_file, receipt_file, receipt)

    def write_file(self, file: FormFile, pieces: Iterable[Any]) -> None:
        """Write one of ``manifest.files`` unless it is there (CACHE-192); ``cache-corrupt`` for other bytes."""
        with contextlib.suppress(ShdError, FileNotFoundError):
            return check_file(self.storage, file)
        checksum = RunningHash()
        with write_errors(self.storage.locate(file.name)), self.storage.pending(file.name) as pending:
            for piece in pieces:
                checksum.update(piece)
                pending.write(piece)
            check_sum(self.storage.locate(file.name), checksum, file.xxh3_128)
            pending.sync()
            with self.storage.exclusive():
                pending.commit()

    def seal(self) -> Seal:
        """Mark the cache as complete (CACHE-55).

        Raises ``cache-incomplete`` naming how many shards are missing, ``cache-mismatch`` when the keys are not those
        of the data set in the manifest, and ``write-failed``.
        """
        checksums: list[str] = []
        for file in self.manifest.files:
            check_size(self.storage, file.name, file.size)
        with write_errors(self.storage.locate(SEAL_NAME)):
            # Few receipts in memory at a time: those of a large cache do not fit together.
            check_fingerprint(self.folder, self.manifest, self._receipts(checksums))
            seal = Seal(self.manifest.id, self.manifest.dataset.num_samples, tuple(checksums))
            with self.storage.pending(SEAL_NAME) as pending:
                pending.write(encode_document(seal))
                pending.sync()
                pending.commit()
        return seal

    def _receipts(self, checksums: list[str]) -> Iterator[Receipt]:
        shards = range(self.manifest.shards.num_shards)
        for shard, receipt in zip(shards, self.storage.map(self._committed, shards), strict=True):
            if receipt is None:
                missing = self.missing_shards(shards[shard:])
                rule = f"{self.folder} must hold all {len(shards)} shards before it is sealed"
                remedy = "run the same shd precompute again, or shd merge the parts"
                message = f"{rule}; {len(missing)} are missing, first shard {shard}: {remedy}"
                raise ShdError("cache-incomplete", message, "CACHE-55")
            checksums.append(checksum_of(receipt))
            yield receipt

    def _committed(self, shard: int) -> Receipt | None:
        try:
            return read_committed(self.storage, shard, self.manifest)
        except ShdError as error:
            if error.code == "read-failed":
                raise  # nothing is known of the shard
            # Absent, or damaged in any way: the cure is to write the shard again.
        return None

    def _ordered(
        self, shard: int, records: Sequence[SampleRecord], skipped: Sequence[Skipped]
    ) -> tuple[list[SampleRecord], list[Skipped]]:
        """Both in stored order: ``argument-value`` unless they are the shard's samples, once each."""
        indices = self.manifest.shard_samples(shard)
        if skipped and self.manifest.on_error != "skip":
            message = f"skipped must be empty where on_error is {self.manifest.on_error!r}; got {len(skipped)}"
            raise ShdError("argument-value", message, "CACHE-51")
        samples: list[SampleRecord | Skipped] = [*records, *skipped]
        by_index = {sample.index: sample for sample in samples}
        if len(by_index) != len(samples) or by_index.keys() != set(indices):
            rule = f"records of shard {shard} must be its {len(indices)} samples, once each"
            message = f"{rule}; got {len(records)}, others or absent: {sorted(by_index.keys() ^ set(indices))[:3]}"
            raise ShdError("argument-value", message, "CACHE-26")
        ordered = [by_index[index] for index in indices]
        left_out = [sample for sample in ordered if isinstance(sample, Skipped)]
        return [sample for sample in ordered if isinstance(sample, SampleRecord)], left_out

    def _commit(self, shard_file: PendingFile, receipt_file: PendingFile, receipt: Receipt) -> Receipt:
        committed = self._committed(receipt.shard)
        if committed is not None:
            return committed
        for attempt in range(ATTEMPTS):
            if attempt:  # writers in step would replace each other for ever
                time.sleep(random.uniform(0.0, 0.05 * 2**attempt))
            # A shard that is written again makes a seal and a damaged receipt untrue: they go before it changes.
            self.storage.remove(SEAL_NAME)
            self.storage.remove(receipt_name(receipt.shard))
            shard_file.commit()
            receipt_file.commit()
            # Where there are no locks, a racing writer may have put its own shard between the two (CACHE-71).
            if shard_file.stands():
                self.written.add(receipt.shard)
                return receipt
            self.storage.remove(receipt_name(receipt.shard))  # no reader takes it for that of the other's shard
        message = f"other writers replaced it {ATTEMPTS} times: let each process write its own shards (--shards i/n)"
        raise ShdError("write-failed", f"{self.storage.locate(shard_name(receipt.shard))}: {message}", "CACHE-71")


@dataclass(frozen=True)
class MergeSummary:
    """The result of ``merge_caches``."""

    folder: Path | str  # the merged cache
    copied: int  # shards copied by this call
    present: int  # shards that were there already
    missing: tuple[int, ...]  # shards that no source holds, ascending
    bytes: int  # of the copied shards
    sealed: bool  # whether the cache is complete, and was sealed


def merge_caches(
    sources: Sequence[Folder], out: Folder, *, on_progress: Callable[[int, int], None] | None = None
) -> MergeSummary:
    """Merge the shards of one job into ``out``, new or with the same manifest, and seal it if it is complete.

    Every copied byte is checked against its receipt. The sources are not changed. If stopped at any moment, the same
    call resumes. ``on_progress`` is called after every shard with the numbers of copied shards and of shards to copy.

    Raises:
        ShdError: ``cache-mismatch`` for sources of another job, or a shard that two of them hold with different
            content; ``cache-corrupt`` or ``cache-incomplete`` for a damaged shard of which no source has an intact
            copy; ``cache-exists``, ``write-failed``, ``argument-value``.
    """
    storages = [open_storage(source) for source in sources]
    manifest = _common_manifest(storages)
    writer = CacheWriter(out, manifest)
    target = writer.storage
    if any(storage.root == target.root for storage in storages):
        raise ShdError("argument-value", f"out must be none of the sources; got {target.root}: leave it out of them")
    missing = writer.missing_shards()
    offers = _find_offers(storages, target, manifest, set(missing))

    def take_file(file: FormFile, source: Storage) -> int:
        check_size(source, file.name, file.size)
        writer.write_file(file, StoredFile(source, file.name).pieces(file.size))
        return file.size

    def take_shard(shard: int, source: Storage) -> int:
        receipt = read_committed(source, shard, manifest)
        with write_errors(target.locate(shard_name(shard))), target.pending(shard_name(shard)) as copy:
            file, whole = StoredFile(source, shard_name(shard)), RunningHash()
            for data in file.pieces(receipt.size):
                whole.update(data)
                copy.write(data)
            check_sum(file.path, whole, receipt.xxh3_128, "CACHE-90")
            copy.sync()
            writer.commit_file(copy, receipt)
        return receipt.size

    for file_of_form in manifest.files:
        _from_first(storages, functools.partial(take_file, file_of_form))
    written = 0
    for done, shard in enumerate(sorted(offers), start=1):
        written += _from_first(offers[shard], functools.partial(take_shard, shard))
        if on_progress is not None:
            on_progress(done, len(offers))
    absent = tuple(shard for shard in missing if shard not in offers)
    if not absent:
        writer.seal()
    return MergeSummary(
        folder=target.root,
        copied=len(offers),
        present=manifest.shards.num_shards - len(missing),
        missing=absent,
        bytes=written,
        sealed=not absent,
    )


def _common_manifest(sources: Sequence[Storage]) -> Manifest:
    if not sources:
        raise ShdError("argument-value", "sources must be at least one cache; got none")
    first, *others = [Manifest.read(source) for source in sources]
    for source, manifest in zip(sources[1:], others, strict=True):
        if manifest.id != first.id:
            differences = f"they differ in (first -> this): {'; '.join(first.differences(manifest))}"
            message = f"{source.root} must be of the same job as {sources[0].root}; {differences}"
            raise ShdError("cache-mismatch", message + ": merge only caches with one manifest", "CACHE-52")
    return first


def _find_offers(
    sources: Sequence[Storage], target: Storage, manifest: Manifest, missing: set[int]
) -> dict[int, list[Storage]]:
    """The sources that have each missing shard; refuses shards that differ before a byte is copied."""
    offers: dict[int, list[Storage]] = {}
    first_seen: dict[int, tuple[str, Storage]] = {}
    for source in (target, *sources):
        for shard in committed_shards(source.names(RECEIPTS_NAME)):
            if shard >= manifest.shards.num_shards or (source is target and shard in missing):
                continue
            try:
                checksum = checksum_of(Receipt.read(source, shard, manifest))
            except ShdError as error:
                if error.code != "cache-corrupt":
                    raise
                checksum = None  # judged again when no other source has the shard
            if checksum is not None:
                expected, holder = first_seen.setdefault(shard, (checksum, source))
                if checksum != expected:
                    places = " and ".join(str(storage.locate(receipt_name(shard))) for storage in (holder, source))
                    message = f"shard {shard} must be the same wherever it is held; {places} differ"
                    remedy = "it was made twice, so remove one of the two receipts with its shard"
                    raise ShdError("cache-mismatch", f"{message}: {remedy}", "CACHE-63")
            if shard in missing:
                offers.setdefault(shard, []).append(source)
    return offers


def _from_first(sources: Sequence[Storage], copy: Callable[[Storage], int]) -> int:
    """The size of a copy from the first source whose bytes are right; the first problem where none has them."""
    problems: list[ShdError] = []
    for source in sources:
        try:
            return copy(source)
        except ShdError as error:
            if error.code not in ("cache-corrupt", "cache-incomplete"):
                raise
            problems.append(error)
    raise problems[0]
