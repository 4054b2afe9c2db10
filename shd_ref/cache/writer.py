"""Writing a cache: shards in any order, by any number of processes, killed at any moment (CACHE-70 to CACHE-75)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from shd_ref.cache.distortion import CodecError
from shd_ref.cache.documents import checksum_of, regular_size
from shd_ref.cache.format import Manifest
from shd_ref.cache.layout import (
    LOCK_NAME,
    RECEIPTS_NAME,
    SHARDS_NAME,
    manifest_path,
    receipt_path,
    seal_path,
    shard_path,
)
from shd_ref.cache.receipts import Receipt, Skipped
from shd_ref.cache.records import NewRecord
from shd_ref.cache.seal import Seal, check_fingerprint
from shd_ref.cache.shards import write_blobs
from shd_ref.cache.storage import (
    TEMP_FORM,
    PendingFile,
    folder_lock,
    make_folder,
    remove_stale_files,
    write_errors,
    write_whole,
)
from shd_ref.errors import ShdError


class CacheWriter:
    """Creates a cache folder, or resumes one that was made with the same manifest.

    Several writers may work on one folder, also from several hosts if their file system shares ``flock``. Who
    commits a shard first wins; the others' bytes for it are discarded.

    Args:
        folder: the cache; created if absent.
        manifest: what the cache will hold.

    Raises:
        ShdError: ``cache-exists`` (the folder holds something else), ``cache-mismatch`` (a cache with another
            manifest), ``cache-corrupt`` (its manifest is damaged), ``write-failed``.
    """

    def __init__(self, folder: str | os.PathLike[str], manifest: Manifest) -> None:
        self.folder = Path(folder).absolute()
        self.manifest = manifest
        self._refuse_foreign_folder()
        with write_errors(self.folder):
            make_folder(self.folder)
            if not manifest_path(self.folder).exists():
                self._write_manifest()
        self._refuse_other_manifest()
        with write_errors(self.folder):
            make_folder(self.folder / RECEIPTS_NAME)
            make_folder(self.folder / SHARDS_NAME)
            remove_stale_files(self.folder)

    def missing_shards(self) -> list[int]:
        """Shards without a valid receipt of this cache, or whose file has another size than it states."""
        return [shard for shard in range(self.manifest.shards.num_shards) if self._committed(shard) is None]

    def write_shard(
        self,
        shard: int,
        records: Sequence[NewRecord],
        codec_error: CodecError,
        skipped: Sequence[Skipped] = (),
    ) -> Receipt:
        """Commit one shard: its file first, then its receipt (CACHE-71).

        Args:
            shard: its number.
            records: all samples of ``manifest.shard_samples(shard)``, in any order.
            codec_error: measured on these records' rows.
            skipped: samples of the shard without a record, where ``manifest.on_error`` is ``"skip"``.

        Returns:
            The committed receipt: an earlier one if the shard had been committed before.

        Raises:
            ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``,
                ``not-a-distribution`` or ``support-mismatch`` for records that do not fit; ``write-failed``
                when the disk refuses. In every case nothing of this shard becomes visible.
        """
        ordered, left_out = self._ordered(shard, records, skipped)
        if not np.isfinite([codec_error.kl_mean, codec_error.kl_max, codec_error.tv_mean]).all():
            raise ShdError("not-finite", f"shard {shard}: codec_error must be finite; got {codec_error}", "CACHE-63")
        committed = self._committed(shard)
        if committed is not None:
            return committed
        path = shard_path(self.folder, shard)
        with write_errors(path), PendingFile(path, self.folder) as shard_file:
            receipt = write_blobs(shard_file, self.manifest, shard, ordered, codec_error, left_out)
            shard_file.sync()
            with PendingFile(receipt_path(self.folder, shard), self.folder) as receipt_file:
                receipt_file.write(receipt.to_bytes())
                receipt_file.sync()
                with folder_lock(self.folder):
                    return self._commit(shard_file, receipt_file, receipt)

    def seal(self) -> Seal:
        """State that the cache is complete (CACHE-65).

        Raises:
            ShdError: ``cache-incomplete`` naming how many shards are missing; ``cache-mismatch`` when the keys
                are not those of the data set in the manifest; ``write-failed``.
        """
        missing = self.missing_shards()
        if missing:
            raise ShdError(
                "cache-incomplete",
                f"{self.folder} must hold all {self.manifest.shards.num_shards} shards before it is sealed; "
                f"{len(missing)} are missing, first shard {missing[0]}: write them",
                "CACHE-65",
            )
        checksums: list[str] = []
        # One receipt in memory at a time: those of a large cache do not fit together.
        check_fingerprint(self.folder, self.manifest, self._receipts(checksums))
        seal = Seal(
            manifest=self.manifest.id,
            num_samples=self.manifest.dataset.num_samples,
            receipts=tuple(checksums),
        )
        path = seal_path(self.folder)
        with write_errors(path):
            write_whole(path, seal.to_bytes(), self.folder)
        return seal

    def _refuse_foreign_folder(self) -> None:
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise ShdError("cache-exists", f"{self.folder} must be a folder; it is a file", "CACHE-70")
        names = [path.name for path in self.folder.iterdir()]
        foreign = sorted(name for name in names if name != LOCK_NAME and not TEMP_FORM.fullmatch(name))
        # The manifest is looked for after the listing: a racing writer creates it before anything else.
        if foreign and not manifest_path(self.folder).exists():
            message = f"{self.folder} must be empty or a cache; it holds {foreign[0]!r} and no manifest"
            raise ShdError("cache-exists", message + ": choose another folder", "CACHE-70")

    def _write_manifest(self) -> None:
        path = manifest_path(self.folder)
        with PendingFile(path, self.folder) as pending:
            pending.write(self.manifest.to_bytes())
            pending.sync()
            with folder_lock(self.folder):
                if not path.exists():  # a racing writer may have been first
                    pending.commit()

    def _refuse_other_manifest(self) -> None:
        found = Manifest.read(self.folder)
        if found.id != self.manifest.id:
            differences = "; ".join(found.differences(self.manifest))
            raise ShdError(
                "cache-mismatch",
                f"{self.folder} holds a cache made from something else (cache -> this job): {differences}; "
                "choose another folder, or repeat the job as it was",
                "CACHE-23",
            )

    def _receipts(self, checksums: list[str]) -> Iterator[Receipt]:
        for shard in range(self.manifest.shards.num_shards):
            receipt = Receipt.read(self.folder, shard, self.manifest)
            checksums.append(checksum_of(receipt))
            yield receipt

    def _committed(self, shard: int) -> Receipt | None:
        try:
            receipt = Receipt.read(self.folder, shard, self.manifest)
            size = regular_size(shard_path(self.folder, shard))
        except (ShdError, FileNotFoundError):
            return None  # whatever is wrong with it, the cure is to write the shard again
        return receipt if size == receipt.size else None

    def _ordered(
        self, shard: int, records: Sequence[NewRecord], skipped: Sequence[Skipped]
    ) -> tuple[list[NewRecord], list[Skipped]]:
        wanted = self.manifest.shard_samples(shard)
        if skipped and self.manifest.on_error != "skip":
            message = (
                f"skipped must be empty where on_error is {self.manifest.on_error!r}; got {len(skipped)} samples"
            )
            raise ShdError("argument-value", message, "CACHE-58")
        given: list[NewRecord | Skipped] = [*records, *skipped]
        by_index = {sample.index: sample for sample in given}
        if len(by_index) != len(given) or by_index.keys() != set(wanted):
            unknown = sorted(by_index.keys() - set(wanted))[:3]
            absent = sorted(set(wanted) - by_index.keys())[:3]
            raise ShdError(
                "argument-value",
                f"records of shard {shard} must be its {len(wanted)} samples, once each; got {len(records)} records "
                f"(not of this shard: {unknown}; absent: {absent})",
                "CACHE-25",
            )
        ordered = [by_index[index] for index in wanted]
        return (
            [sample for sample in ordered if isinstance(sample, NewRecord)],
            [sample for sample in ordered if isinstance(sample, Skipped)],
        )

    def _commit(self, shard_file: PendingFile, receipt_file: PendingFile, receipt: Receipt) -> Receipt:
        committed = self._committed(receipt.shard)
        if committed is not None:
            return committed
        # A shard that is written again makes a seal and a damaged receipt untrue: they go before it changes.
        seal_path(self.folder).unlink(missing_ok=True)
        receipt_path(self.folder, receipt.shard).unlink(missing_ok=True)
        shard_file.commit()
        receipt_file.commit()
        return receipt
