"""What a cache holds, finished or not: read from its manifest and receipts, never from its maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shd_ref.cache.documents.manifest import FORMAT_VERSION, Manifest
from shd_ref.cache.documents.receipts import Errors, Receipt, Seal
from shd_ref.cache.forms.form import Form
from shd_ref.cache.shards import read_committed
from shd_ref.cache.storage.storage import (
    RECEIPTS_NAME,
    SEAL_NAME,
    Folder,
    committed_shards,
    open_storage,
    receipt_name,
)
from shd_ref.errors import ShdError


@dataclass(frozen=True)
class CacheListing:
    """What a cache holds.

    Attributes:
        folder: path or address.
        manifest: what it was made from.
        sealed: whether it is marked as complete.
        written: shards that are committed, ascending.
        damaged: problems of existing but unusable files; their shards count as missing.
        samples: with a record; ``skipped`` are those without, because the teacher failed on them.
        shard_bytes: of all committed shard files.
        coded_by_form: coded bytes, by form; ``float32_by_form`` is the size of the supervision as float32.
        rows_by_form: number of ``unit``s of each form, such as positions; a decoder's are counted separately.
        positions: summed lengths of all records.
        errors: coding errors, over the measured rows.
    """

    folder: Path | str
    manifest: Manifest
    sealed: bool
    written: tuple[int, ...]
    damaged: tuple[str, ...]
    samples: int
    skipped: int
    shard_bytes: int
    coded_by_form: Counter[str]
    float32_by_form: Counter[str]
    rows_by_form: Counter[str]
    positions: int
    errors: Errors

    @property
    def coded_bytes(self) -> int:
        return self.coded_by_form.total()

    @property
    def float32_bytes(self) -> int:
        return self.float32_by_form.total()

    def bytes_a_row(self, form: Form) -> float:
        """Coded bytes of a form per ``unit``; 0 if nothing is written."""
        return self.coded_by_form[form.SUBJECT] / max(self.rows_by_form[form.SUBJECT], 1)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.manifest.shards.num_shards)) - set(self.written)))

    def to_json(self) -> dict[str, Any]:
        """The stable form of ``shd ls --json``; missing shards are a list of [first, last]."""
        manifest = self.manifest
        forms = {
            form.SUBJECT: {
                "coded": self.coded_by_form[form.SUBJECT],
                "as_float32": self.float32_by_form[form.SUBJECT],
                "rows": self.rows_by_form[form.SUBJECT],
                "row_of": form.unit,
            }
            for form in manifest.forms
        }
        return {
            "folder": str(self.folder),
            "id": manifest.id,
            "format_version": FORMAT_VERSION,
            "spec_version": manifest.spec_version,
            "sealed": self.sealed,
            "teacher": asdict(manifest.teacher),
            **{form.SUBJECT: asdict(form) for form in manifest.forms},
            "samples": {
                "total": manifest.dataset.num_samples,
                "written": self.samples,
                "skipped": self.skipped,
                "positions": self.positions,
            },
            "shards": {
                "total": manifest.shards.num_shards,
                "written": len(self.written),
                "missing": [list(span) for span in spans(self.missing)],
            },
            "damaged": list(self.damaged),
            "bytes": {
                "shards": self.shard_bytes,
                "coded": self.coded_bytes,
                "as_float32": self.float32_bytes,
                "forms": forms,
            },
            "errors": {name: vars(error) for name, error in self.errors.items()},
        }


def list_cache(folder: Folder) -> CacheListing:
    """List a cache that may be incomplete or still being written.

    Reads the receipts, one in memory at a time, and the size of every shard file; ``verify_cache`` reads the rest.
    Raises ``cache-incomplete`` where there is no manifest, ``cache-corrupt`` or ``cache-version`` where it cannot be
    read.
    """
    storage = open_storage(folder)
    manifest = Manifest.read(storage)
    damaged: list[str] = []
    sealed = False
    try:
        sealed = Seal.read(storage, manifest) is not None
    except ShdError as error:
        damaged.append(f"{SEAL_NAME}: {error}")
    committed = [n for n in committed_shards(storage.names(RECEIPTS_NAME)) if n < manifest.shards.num_shards]

    def read(shard: int) -> Receipt | ShdError:
        try:
            return read_committed(storage, shard, manifest)
        except ShdError as error:
            return error

    written: list[int] = []
    errors: list[Errors] = []
    counts = dict.fromkeys(("samples", "skipped", "shard_bytes", "positions"), 0)
    by_form = (Counter[str](), Counter[str](), Counter[str]())
    for shard, receipt in zip(committed, storage.map(read, committed), strict=True):
        if isinstance(receipt, ShdError):
            damaged.append(f"{receipt_name(shard)}: {receipt}")
            continue
        written.append(shard)
        errors.append(receipt.errors)
        counts["samples"] += len(receipt.records)
        counts["skipped"] += len(receipt.skipped)
        counts["shard_bytes"] += receipt.size
        counts["positions"] += sum(record.length for record in receipt.records)
        for total, more in zip(by_form, receipt.sizes(manifest), strict=True):
            total.update(more)
    return CacheListing(
        folder=storage.root,
        manifest=manifest,
        sealed=sealed,
        written=tuple(written),
        damaged=tuple(damaged),
        coded_by_form=by_form[0],
        float32_by_form=by_form[1],
        rows_by_form=by_form[2],
        errors=Errors.merged(errors),
        **counts,
    )


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs, first and last: 1, 2, 3, 7 are (1, 3) and (7, 7)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
