"""The contents of a cache, finished or not, and whether every byte of it is right (CACHE-90)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shd_ref.cache.documents import FORMAT_VERSION, Errors, Manifest, Receipt, Seal, check_fingerprint
from shd_ref.cache.forms.form import Form
from shd_ref.cache.shards import StoredFile, check_file, check_size, read_committed, shard_header
from shd_ref.cache.storage.documents import checksum_of
from shd_ref.cache.storage.storage import (
    HUB_NAMES,
    LOCK_NAME,
    MANIFEST_NAME,
    RECEIPTS_NAME,
    SEAL_NAME,
    Folder,
    RunningHash,
    Storage,
    committed_shards,
    hex_64,
    open_storage,
    receipt_name,
    shard_name,
    xxh3_64,
)
from shd_ref.errors import ShdError


@dataclass(frozen=True)
class CacheListing:
    """The contents of a cache by its manifest and receipts; its maps are not read."""

    folder: Path | str
    manifest: Manifest
    sealed: bool  # whether it is marked as complete
    written: tuple[int, ...]  # shards that are committed, ascending
    damaged: tuple[str, ...]  # problems of existing but unusable files; their shards count as missing
    errors: Errors  # of coding, over the measured rows
    coded_by_form: Counter[str]  # coded bytes
    float32_by_form: Counter[str]  # size of the supervision as float32
    rows_by_form: Counter[str]  # units of each form, such as positions; a decoder's are counted separately
    samples: int  # with a record
    skipped: int  # without, because the teacher failed on them
    shard_bytes: int  # of all committed shard files
    positions: int  # summed lengths of all records

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
        manifest, forms = self.manifest, {form.SUBJECT: form for form in self.manifest.forms}
        samples = {"total": manifest.dataset.num_samples, "written": self.samples, "skipped": self.skipped}
        missing = [list(span) for span in spans(self.missing)]
        coded, plain, rows = self.coded_by_form, self.float32_by_form, self.rows_by_form
        by_form = {
            name: {"coded": coded[name], "as_float32": plain[name], "rows": rows[name], "row_of": form.unit}
            for name, form in forms.items()
        }
        totals = {"shards": self.shard_bytes, "coded": self.coded_bytes, "as_float32": self.float32_bytes}
        return {
            "folder": str(self.folder),
            "id": manifest.id,
            "format_version": FORMAT_VERSION,
            "spec_version": manifest.spec_version,
            "sealed": self.sealed,
            "teacher": asdict(manifest.teacher),
            **{name: asdict(form) for name, form in forms.items()},
            "samples": samples | {"positions": self.positions},
            "shards": {"total": manifest.shards.num_shards, "written": len(self.written), "missing": missing},
            "damaged": list(self.damaged),
            "bytes": totals | {"forms": by_form},
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
    counts = Counter(samples=0, skipped=0, shard_bytes=0, positions=0)
    by_form = Counter[str](), Counter[str](), Counter[str]()
    for shard, receipt in zip(committed, storage.map(read, committed), strict=True):
        if isinstance(receipt, ShdError):
            damaged.append(f"{receipt_name(shard)}: {receipt}")
            continue
        written.append(shard)
        errors.append(receipt.errors)
        counts.update(samples=len(receipt.records), skipped=len(receipt.skipped), shard_bytes=receipt.size)
        counts.update(positions=sum(record.length for record in receipt.records))
        for total, more in zip(by_form, receipt.sizes(manifest), strict=True):
            total.update(more)
    documents = tuple(written), tuple(damaged), Errors.merged(errors)
    sums = counts["samples"], counts["skipped"], counts["shard_bytes"], counts["positions"]
    return CacheListing(storage.root, manifest, sealed, *documents, *by_form, *sums)


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs, first and last: 1, 2, 3, 7 are (1, 3) and (7, 7)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


@dataclass(frozen=True)
class Problem:
    """Something wrong with a cache."""

    code: str  # an error code, such as cache-corrupt
    path: str  # the file, relative to the cache folder
    record: int | None  # sample index, where one record is concerned
    message: str  # for people

    def __str__(self) -> str:
        named = self.path in self.message  # as in the messages of errors
        return f"{self.code}: {self.message}" if named else f"{self.code}: {self.path}: {self.message}"


@dataclass
class VerifyReport:
    """The problems that a verification found. ``ok`` means a complete cache without a single problem."""

    sealed: bool = False
    shards: int = 0
    records: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_cache(folder: Folder, *, on_progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Check a whole cache, continuing after each problem (CACHE-90); only what is intact is counted.

    ``on_progress`` is called after every committed shard with the numbers of finished and of all shards.
    """
    check = _Verification(open_storage(folder))
    check.run(on_progress)
    return check.report


class _Verification:
    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.report = VerifyReport()

    def run(self, on_progress: Callable[[int, int], None] | None) -> None:
        with self._noting(MANIFEST_NAME):  # without it nothing else can be judged
            manifest, seal = Manifest.read(self.storage), None
            with self._noting(SEAL_NAME):
                seal = Seal.read(self.storage, manifest)
                self.report.sealed = seal is not None
                if seal is None:
                    raise ShdError("cache-incomplete", "it does not exist: the cache is partial")
            committed, total = committed_shards(self._list_names(RECEIPTS_NAME)), manifest.shards.num_shards
            if len(committed) < total:
                first = next(shard for shard, number in enumerate([*committed, -1]) if shard != number)
                message = f"{total - len(committed)} of {total} shards have no receipt, first shard {first}"
                self._note("cache-incomplete", receipt_name(first), message)
            receipts = []
            for done, shard in enumerate(committed, start=1):
                receipts += self._check_shard(shard, manifest, seal)
                if on_progress is not None:
                    on_progress(done, len(committed))
            for file in manifest.files:
                with self._noting(file.name):
                    check_file(self.storage, file)
            self._report_strays(committed, {file.name for file in manifest.files})
            if len(receipts) == total:
                check_fingerprint(self.storage.root, manifest, receipts)

    def _check_shard(self, shard: int, manifest: Manifest, seal: Seal | None) -> list[Receipt]:
        """The receipt, where it can be read."""
        path = receipt_name(shard)
        with self._noting(path):
            receipt = Receipt.read(self.storage, shard, manifest)
            if seal is not None and seal.receipts[shard] != checksum_of(receipt):
                message = f"its checksum must be {seal.receipts[shard]}, as the seal states"
                self._note("cache-corrupt", path, message)
            planned, left_out = manifest.shard_samples(shard), {sample.index for sample in receipt.skipped}
            indices = [record.index for record in receipt.records]
            if indices != [i for i in planned if i not in left_out] or not left_out <= set(planned):
                self._note("cache-corrupt", path, "its records are not the samples of this shard, in order")
            known = len(self.report.problems)
            with self._noting(shard_name(shard)):
                check_size(self.storage, shard_name(shard), receipt.size)
                self._check_bytes(receipt, manifest)
            if len(self.report.problems) == known:
                self.report.shards += 1
                self.report.records += len(receipt.records)
                self.report.bytes += receipt.size
            return [receipt]
        return []

    def _check_bytes(self, receipt: Receipt, manifest: Manifest) -> None:
        path = shard_name(receipt.shard)
        header = shard_header(manifest, receipt.shard, receipt.records)
        blobs = list(receipt.stored_parts(manifest))
        whole = RunningHash()
        # In large pieces, as every request to an object store costs a round trip, and memory is bounded.
        pieces, piece = StoredFile(self.storage, path).pieces(receipt.size), np.empty(0, np.uint8)
        start = blobs[0][2].start if blobs else receipt.size

        def digest(count: int) -> str:
            """XXH3-64 of the next bytes, which the whole file's hash takes in too."""
            nonlocal piece
            running = RunningHash(64)
            while count:
                piece = piece if len(piece) else next(pieces)  # blobs end where the file does
                some, piece = piece[:count], piece[count:]
                count -= len(some)
                whole.update(some)
                running.update(some)
            return running.hexdigest()

        if digest(start) != hex_64(xxh3_64(header)) or len(header) != start:
            self._note("cache-corrupt", path, "its header must be the one that manifest and receipt imply")
        for record, part, blob in blobs:
            actual = digest(blob.end - blob.start)
            if actual != blob.xxh3_64:
                message = f"record {record.index} {part.title}: XXH3-64 must be {blob.xxh3_64}; got {actual}"
                self._note("cache-corrupt", path, message, record.index)
        if whole.hexdigest() != receipt.xxh3_128:
            message = f"XXH3-128 of the file must be {receipt.xxh3_128}; got {whole.hexdigest()}"
            self._note("cache-corrupt", path, message)

    def _report_strays(self, committed: list[int], files: set[str]) -> None:
        known = {MANIFEST_NAME, SEAL_NAME, *files}
        known |= {name(shard) for shard in committed for name in (shard_name, receipt_name)}
        for name in self._list_names():
            # A link or a folder is no file; a moment ago there was one.
            with suppress(FileNotFoundError), self._noting(name):
                size = self.storage.size(name)
                if not (name in known or name in HUB_NAMES or (name == LOCK_NAME and not size)):
                    message = "no receipt names this file: a writer died or is at work, or it is foreign"
                    raise ShdError("cache-corrupt", message)

    def _list_names(self, folder: str = "") -> list[str]:
        names: list[str] = []
        with self._noting(folder or "."):
            names = self.storage.names(folder)
        return names

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """Go on after an error, and report it of this file."""
        try:
            yield
        except ShdError as error:
            self._note(error.code, name, str(error))

    def _note(self, code: str, name: str, message: str, record: int | None = None) -> None:
        self.report.problems.append(Problem(code, name, record, message))
