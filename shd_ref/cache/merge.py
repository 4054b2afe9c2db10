"""Merging caches: shards of one job that were made in several places become one cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shd_ref.cache.documents.manifest import Manifest
from shd_ref.cache.documents.receipts import Receipt
from shd_ref.cache.forms.form import FormFile
from shd_ref.cache.shards import ShardFile, check_file_size, read_committed, read_pieces
from shd_ref.cache.storage.documents import checksum_of
from shd_ref.cache.storage.storage import (
    RECEIPTS_NAME,
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
from shd_ref.cache.writer import CacheWriter
from shd_ref.errors import ShdError

CHUNK_BYTES: Final = 2**23


@dataclass(frozen=True)
class MergeSummary:
    """What ``merge_caches`` did.

    Attributes:
        folder: the merged cache.
        copied: shards copied by this call.
        present: shards that were there already.
        missing: shards that no source holds, ascending.
        bytes: of the copied shards.
        sealed: whether the cache is complete, and was sealed.
    """

    folder: Path | str
    copied: int
    present: int
    missing: tuple[int, ...]
    bytes: int
    sealed: bool


def merge_caches(
    sources: Sequence[Folder], out: Folder, *, on_progress: Callable[[int, int], None] | None = None
) -> MergeSummary:
    """Merge the shards of one job, and seal the result if it is complete.

    Every copied byte is checked against its receipt. The sources are not changed. If stopped at any moment, the same
    call resumes.

    Args:
        sources: caches with the same manifest, complete or not.
        out: the merged cache, new or with the same manifest.
        on_progress: called after every shard with the numbers of copied shards and of shards to copy.

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
        check_file_size(source, file)
        writer.write_file(file, read_pieces(source, file))
        return file.size

    def take_shard(shard: int, source: Storage) -> int:
        receipt = read_committed(source, shard, manifest)
        with write_errors(target.locate(shard_name(shard))), target.pending(shard_name(shard)) as copy:
            _copy_bytes(source, receipt, copy)
            writer.commit_file(copy, receipt)
        return receipt.size

    for kept in manifest.files:
        _from_first(storages, functools.partial(take_file, kept))
    written, done = 0, 0
    for shard in sorted(offers):
        written += _from_first(offers[shard], functools.partial(take_shard, shard))
        done += 1
        if on_progress is not None:
            on_progress(done, len(offers))
    left = tuple(shard for shard in missing if shard not in offers)
    if not left:
        writer.seal()
    return MergeSummary(
        folder=target.root,
        copied=done,
        present=manifest.shards.num_shards - len(missing),
        missing=left,
        bytes=written,
        sealed=not left,
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
                    places = " and ".join(str(one.locate(receipt_name(shard))) for one in (holder, source))
                    message = f"shard {shard} must be the same wherever it is held; {places} differ"
                    remedy = "it was made twice, so remove one of the two receipts with its shard"
                    raise ShdError("cache-mismatch", f"{message}: {remedy}", "CACHE-63")
            if shard in missing:
                offers.setdefault(shard, []).append(source)
    return offers


def _from_first(sources: Sequence[Storage], copy: Callable[[Storage], int]) -> int:
    """What a copy gives from the first source whose bytes are right."""
    problems: list[ShdError] = []
    for source in sources:
        try:
            return copy(source)
        except ShdError as error:
            if error.code not in ("cache-corrupt", "cache-incomplete"):
                raise
            problems.append(error)
    raise problems[0]


def _copy_bytes(source: Storage, receipt: Receipt, copy: PendingFile) -> None:
    file, whole = ShardFile(source, receipt.shard), RunningHash()
    for start in range(0, receipt.size, CHUNK_BYTES):
        data = file.read(start, min(start + CHUNK_BYTES, receipt.size))
        whole.update(data)
        copy.write(data)
    if whole.hexdigest() != receipt.xxh3_128:
        message = f"{file.path}: XXH3-128 of the file must be {receipt.xxh3_128}; got {whole.hexdigest()}"
        remedy = f"restore the file, or delete {source.locate(receipt_name(receipt.shard))} and write the shard again"
        raise ShdError("cache-corrupt", f"{message}: {remedy}", "CACHE-90")
    copy.sync()
