"""Exporting a cache as WebDataset tar files, which any language reads without this package.

The output folder holds ``manifest.json`` as in the cache, and one tar file per shard, ``000123.tar``, with its
samples in stored order. A sample is these members, whose names begin with its index and key joined by ``-``::

    <index>-<key>.L00.npy      merged maps of student layer 0, (H_s, n, n) float32, decoded
    <index>-<key>.alphas.npy   (layers, n_pairs) float32, with a last axis n where every row has its own
    <index>-<key>.mixing.npy   (layers, H_s, H_t) float32, with a last axis n by row; only where the cache has it
    <index>-<key>.logits.npy   all logits, (R, V) float32; or, where the cache holds some classes of each row,
                               logits_ids (int32), logits_log_probs and logits_log_tail (float32)
    <index>-<key>.H03.npy      hidden states of the teacher's layer 3, (R, width) float32
    <index>-<key>.last.npy     what the teacher's head reads, (R, width) float32; the head's file is copied
    <index>-<key>.json         {"index": ..., "key": ..., "length": n, "seed": ... or null}
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shd_ref.cache.documents.manifest import Manifest
from shd_ref.cache.documents.receipts import Receipt, Record
from shd_ref.cache.reader import CacheReader
from shd_ref.cache.storage.drafts import DraftFolder, drafting, output_path, part_folder
from shd_ref.cache.storage.places import MANIFEST_NAME, RECEIPTS_NAME, Folder
from shd_ref.cache.storage.storage import write_errors
from shd_ref.errors import ShdError


@dataclass(frozen=True)
class ExportSummary:
    """Result of ``export_webdataset``: samples and bytes of the written tar files, and the number of existing
    ones."""

    written: int
    present: int
    samples: int
    bytes: int


def export_webdataset(
    cache: Folder, out: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None
) -> ExportSummary:
    """Write the samples of a sealed cache as WebDataset tar files, one per shard.

    Equal caches give equal files. Files are written atomically; complete files are kept, so a stopped export resumes.

    Args:
        cache: a sealed cache; every blob is checked as it is read.
        out: a folder on this machine, new or with an export of the same cache begun.
        on_progress: called after every shard with the numbers of finished and of all shards.

    Raises:
        ShdError: as ``CacheReader``; ``argument-value`` for an address or a place in the cache, ``cache-exists``
            for a folder that holds something else, ``cache-mismatch`` for an export of another cache,
            ``write-failed``.
    """
    reader, folder = CacheReader(cache), output_path(out, cache=cache)
    drafts = part_folder(folder / "export")  # inside, as nothing else need be writable
    _check_folder(folder, reader.manifest, drafts)
    written = present = samples = size = 0
    draft_path = drafts / "file"
    shards = reader.manifest.shards.num_shards
    with DraftFolder(drafts):
        if not (folder / MANIFEST_NAME).exists():
            with drafting(folder / MANIFEST_NAME, draft_path) as draft:
                draft.write_bytes(reader.manifest.to_bytes())
        for file in reader.manifest.files:
            if not (folder / file.name).exists():
                with drafting(folder / file.name, draft_path) as draft:
                    draft.write_bytes(reader.read_file(file).tobytes())
        for shard in range(shards):
            path = folder / f"{shard:06d}.tar"
            records = Receipt.read(reader.folder, shard, reader.manifest).records
            if _is_whole(path, records):
                present += 1
            else:
                with (
                    drafting(path, draft_path) as draft,
                    tarfile.open(draft, "x:", format=tarfile.USTAR_FORMAT) as tar,
                ):
                    for record in records:
                        _add_record(tar, reader, record)
                samples += len(records)
                written, size = written + 1, size + path.stat().st_size
            if on_progress is not None:
                on_progress(shard + 1, shards)
    return ExportSummary(written, present, samples, size)


def _check_folder(folder: Path, manifest: Manifest, drafts: Path) -> None:
    """Refuse a folder that is no export of this cache; its manifest comes first."""
    path = folder / MANIFEST_NAME
    if path.exists() and not (folder / RECEIPTS_NAME).exists():  # a cache has the same manifest, and is not an export
        existing = Manifest.read(folder)
        if existing.id != manifest.id:
            differences = "; ".join(existing.differences(manifest))
            message = f"{folder} holds the export of another cache (export -> cache): {differences}"
            raise ShdError("cache-mismatch", message + ": choose another folder (--out)", "CACHE-24")
        return
    with write_errors(folder):
        is_taken = folder.exists() and (not folder.is_dir() or any(child != drafts for child in folder.iterdir()))
    if is_taken:
        message = f"{folder} must be empty or an export begun; it holds something else: choose another folder (--out)"
        raise ShdError("cache-exists", message, "CACHE-60")


def _is_whole(path: Path, records: Sequence[Record]) -> bool:
    """Whether a tar file ends where it says, with a member for each of these records."""
    try:
        with tarfile.open(path, "r:") as tar:
            members = tar.getmembers()
            end = tar.offset + 2 * tarfile.BLOCKSIZE  # two empty blocks, then zeros up to a whole record
        length = path.stat().st_size
    except (OSError, tarfile.TarError):
        return False
    names = [member.name for member in members if member.name.endswith(".json")]
    expected = [f"{record.index:08d}-{record.key}.json" for record in records]
    return names == expected and length == -(-end // tarfile.RECORDSIZE) * tarfile.RECORDSIZE


def _add_record(tar: tarfile.TarFile, reader: CacheReader, record: Record) -> None:
    name = f"{record.index:08d}-{record.key}"
    stored = reader.read(record.key)  # equal samples share a key: this is the record of the first
    for form in reader.manifest.forms:
        for array_name, array in form.arrays(stored):
            buffer = io.BytesIO()
            np.save(buffer, np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")), allow_pickle=False)
            _add_file(tar, f"{name}.{array_name}.npy", buffer.getvalue())
    about = {"index": record.index, "key": record.key, "length": record.length, "seed": record.seed}
    _add_file(tar, f"{name}.json", json.dumps(about).encode())


def _add_file(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # no date, no owner: equal caches give equal files
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
