"""Run a teacher over a data set and fill a cache, resumably; ``PrecomputeJob`` says what happens in which order."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import shd_ref
from shd_ref.cache import (
    Attention,
    CacheWriter,
    Dataset,
    Errors,
    Extent,
    Manifest,
    Receipt,
    SampleInputs,
    SampleRecord,
    ShardPlan,
    Skipped,
    dataset_fingerprint,
    list_cache,
)
from shd_ref.cache.storage.storage import MANIFEST_NAME, Folder, is_address, open_storage, write_errors
from shd_ref.cache.writer import check_free
from shd_ref.errors import ShdError, need
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.compare import Comparison, compare_layers
from shd_ref.teacher.precompute.forms import (
    MAKERS,
    check_company,
    describe_forms,
    make_records,
    maker_of,
    measure_errors,
)
from shd_ref.teacher.precompute.forms.attention import matching_of
from shd_ref.teacher.run.inputs import Batch, group_shards, share_shards
from shd_ref.teacher.run.outputs import BatchOutputs, find_faults
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.session import run_ahead, run_beside
from shd_ref.teacher.sources import Arrays, Source


@dataclass(frozen=True)
class PrecomputeSummary:
    """What ``precompute`` did and found.

    Attributes:
        samples, skipped: in the cache; without a record, because the teacher failed on them.
        missing_shards: that other processes have yet to write; the cache is sealed once no shard is missing.
        written, resumed: samples whose records this run wrote; those of its shards that were there already.
        written_by_others: samples of its shards that other processes wrote meanwhile.
        seconds: of this run.
        coded_bytes: of all codes in the cache; ``float32_bytes`` is what they teach, unpadded, as float32.
        errors: coding errors, over the measured rows.
        compared_samples, comparison: how many of the first batch the reference squeezed too, and what that showed.
        remarks: what is to be known of the records, such as that they depend on the batches they were made in.
        remark: what the reading process said of the data, such as how many texts were cut; None for nothing.
    """

    folder: Path | str
    samples: int
    missing_shards: int
    written: int
    resumed: int
    written_by_others: int
    skipped: int
    seconds: float
    coded_bytes: int
    float32_bytes: int
    errors: Errors
    compared_samples: int
    comparison: Comparison | None
    remarks: tuple[str, ...] = ()
    remark: str | None = None


WINDOW_BYTES: Final = 2**30
"""Codes that are held at most before their shards are written (but at least one shard's); the shard that is being
written meanwhile comes on top."""

FIRST_SAMPLES: Final = 4
"""Samples that are looked at before anything is written: what a mask leaves, and that graph and reference agree."""

OnProgress: TypeAlias = Callable[[int, int, int], None]
"""Called with samples done, samples in all and bytes written."""

OnRead: TypeAlias = Callable[[int, int], None]
"""Called with samples read and in all, while the inputs are read for their keys and lengths."""

OpenInputs: TypeAlias = Callable[[], Source | Arrays]
"""Opens the model inputs, on any machine that it is called on."""

Place: TypeAlias = str | os.PathLike[str]
"""A folder, or an address."""

Engine: TypeAlias = Callable[
    [Path, Source | Arrays | OpenInputs, Place, PrecomputeOptions, RunOptions, OnProgress | None, OnRead | None],
    PrecomputeSummary,
]
"""What runs a job: this process, or ``ray_engine.RayEngine``."""


def run_here(
    teacher: Path,
    inputs: Source | Arrays | OpenInputs,
    out: Place,
    options: PrecomputeOptions,
    run: RunOptions,
    on_progress: OnProgress | None,
    on_read: OnRead | None,
) -> PrecomputeSummary:
    """The engine that is this process."""
    job = PrecomputeJob(teacher, inputs() if callable(inputs) else inputs, out, options, run, on_read)
    job.write(job.shards, job.missing, on_progress)
    return job.finish()


def precompute(
    teacher: str | Path,
    inputs: Source | Arrays | OpenInputs,
    out: Place,
    options: PrecomputeOptions,
    run: RunOptions | None = None,
    *,
    engine: Engine = run_here,
    on_progress: OnProgress | None = None,
    on_read: OnRead | None = None,
) -> PrecomputeSummary:
    """Squeeze a teacher's attention over a data set into a cache.

    The first batch is also squeezed by the NumPy reference; a difference above tolerance refuses the whole run before
    anything is written. Stopping it at any moment loses at most the shards in progress: the same call goes on where
    it stopped, in the same batches.

    Args:
        teacher: an ``.onnx`` file.
        inputs: model inputs: a source (``open_source``), or arrays by graph input name with first axis N, or a
            function that opens them; columns that the graph does not take are ignored.
        out: the cache, a folder or an address such as ``s3://bucket/cache``, new or with the same job begun.
        options: what to make of the teacher.
        on_progress, on_read: called after every batch and shard; and while the inputs are read for keys and lengths.

    Raises:
        ShdError: as ``TeacherRun``; ``graph-mismatch`` (in-graph squeeze against the reference), ``cache-mismatch``
            (the folder holds another job), ``cache-exists``, ``write-failed``, ``not-finite``.
    """
    return engine(Path(teacher), inputs, out, options, run or RunOptions(), on_progress, on_read)


class PrecomputeJob:
    """A pass that is ready to write ``shards``: inputs read, graph equal to the reference, manifest written."""

    def __init__(
        self,
        teacher: Path,
        inputs: Source | Arrays,
        out: Place,
        options: PrecomputeOptions,
        run: RunOptions,
        on_read: OnRead | None = None,
    ) -> None:
        self._started = time.monotonic()
        check_destination(out)
        options = adopt_plans(out, options, run)
        work = self._work = TeacherRun.open(teacher, inputs, options, run, on_read, ahead=True)
        first, self._comparison = self._check_first()
        self._compared = min(len(first.indices), 2)
        manifest = self._manifest = make_manifest(work, first)
        # What a form cannot hold is refused before a manifest binds the folder to options that ask for it.
        make_records(first, first.indices, manifest, work.inputs.seed)
        check_company(work, manifest)
        self._folder, self._writer = out, CacheWriter(out, manifest)
        for form in manifest.forms:
            for file in form.files:
                self._writer.write_file(file, maker_of(form).files(work, form)[file.name])
        self.written = self._writer.written  # by this job; grows
        self.shards = share_shards(manifest.shards.num_shards, *run.shards)
        self._pending: dict[int, _Pending] = {}
        self._under_way: Callable[[], Receipt] | None = None

    @functools.cached_property
    def missing(self) -> set[int]:
        """Those of ``shards`` that were not committed when this was first asked for."""
        return self.find_missing(self.shards)

    def find_missing(self, shards: Collection[int]) -> set[int]:
        """Those of some shards that are not committed."""
        return set(self._writer.missing_shards(list(shards)))

    def count_samples(self, shards: Collection[int]) -> int:
        """Samples of these shards."""
        return sum(len(self._manifest.shard_samples(shard)) for shard in shards)

    def windows(self) -> list[list[int]]:
        """Shards of the whole job that share batches, as many as memory may hold, whoever writes which of them."""
        run, plan, inputs = self._work.run, self._manifest.shards, self._work.inputs
        longest = Extent(max(int(inputs.lengths.max()), 1), decoder=int(inputs.decoder_lengths.max()))
        record_bytes = sum(form.held_size(longest) for form in self._manifest.forms)
        mean_length = max(1.0, float(inputs.lengths.mean()))
        per_batch = run.batch_size if run.batch_tokens is None else max(1, int(run.batch_tokens / mean_length))
        most = WINDOW_BYTES // (plan.samples_per_shard * record_bytes)
        groups = group_shards(range(plan.num_shards), plan.samples_per_shard, per_batch, most)
        return [list(window) for window in groups]

    def write(self, shards: Collection[int], missing: set[int], on_progress: OnProgress | None = None) -> None:
        """Write those of some shards that ``find_missing`` says."""
        total = self.count_samples(shards)
        progress = _Progress(on_progress, total, total - self.count_samples(missing.intersection(shards)))
        progress.report()
        try:
            for window in self.windows():
                if not missing.isdisjoint(window):
                    self._write_window(window, missing, progress)
            self._wait(progress)
        except BaseException as error:
            try:
                self._wait(progress)  # the shard under way is committed all the same
            except Exception as failure:
                error.add_note(f"the shard that was being written failed too: {failure}")
            raise

    def finish(self) -> PrecomputeSummary:
        """Seal the cache if nothing is missing, and sum it up."""
        resumed = self.count_samples(self.shards) - self.count_samples(self.missing)
        missing_shards, listing, out = _seal(self._writer), list_cache(self._folder), self._folder
        return PrecomputeSummary(
            folder=out if isinstance(out, str) and is_address(out) else Path(out),
            samples=listing.samples,
            skipped=listing.skipped,
            coded_bytes=listing.coded_bytes,
            float32_bytes=listing.float32_bytes,
            errors=listing.errors,
            missing_shards=missing_shards,
            resumed=resumed,
            written=self.count_samples(self.written),
            written_by_others=self.count_samples(self.missing - self.written),
            seconds=time.monotonic() - self._started,
            compared_samples=self._compared,
            comparison=self._comparison,
            remarks=self._work.remarks,
            remark=self._work.inputs.remark,
        )

    def _check_first(self) -> tuple[BatchOutputs, Comparison | None]:
        """A few of the longest samples without a fault, and how their maps compare with the reference."""
        work = self._work
        for batch in work.checked_batches(range(len(work.inputs)), FIRST_SAMPLES):
            faulty: set[int] = set()
            # By map, which keeps nothing of a part while the next one runs.
            parts = list(map(functools.partial(self._check_part, faulty), work.squeeze_parts(batch)))
            sound = [number for number, index in enumerate(batch.indices) if index not in faulty]
            if sound:
                outputs = BatchOutputs.joined([part for part, _ in parts])
                layers = [comparison for _, compared in parts for comparison in compared]
                is_whole = len(sound) == len(batch.indices)  # then no copy is needed
                return outputs if is_whole else outputs[sound], Comparison.merged(layers) if layers else None
        remedy = "check its inputs, such as a mask whose 1 hides a token"
        raise ShdError("not-finite", f"the teacher gives NaN or infinity on every sample: {remedy}", "MAP-5")

    def _check_part(self, faulty: set[int], outputs: BatchOutputs) -> tuple[BatchOutputs, list[Comparison]]:
        """Outputs without check outputs, and how their layers compare; faulty samples are noted, and left out."""
        faulty.update(find_faults(self._work, outputs))
        sound = [number for number, index in enumerate(outputs.indices) if index not in faulty]
        compared: list[Comparison] = []
        if sound and outputs.layers:
            # In float64, so of a few: the ends of the batch, which are its longest sample and its shortest.
            compared = compare_layers(outputs[sorted({sound[0], sound[-1]})].layers, self._work.callers)
            for number in sound:
                for maker in MAKERS.values():
                    maker.compare(self._work, outputs[number])
        return replace(outputs, layers=tuple(layer.without_check() for layer in outputs.layers)), compared

    def _write_window(self, window: Collection[int], missing: set[int], progress: _Progress) -> None:
        """Run the batches of these shards that reach a missing one, and write each shard when it is full."""
        shard_of = {index: shard for shard in window for index in self._manifest.shard_samples(shard)}
        lost = sorted(missing.intersection(window))
        self._pending = {shard: _Pending(set(self._manifest.shard_samples(shard))) for shard in lost}
        # Samples that look faulty run again, with check outputs, on any thread.
        self._work.sessions.open(checked=True)
        with closing(run_ahead(self._run_step, self._steps(shard_of), self._work.callers)) as steps:
            for step, made in steps:
                self._take(step, made, progress)
                progress.report()
                del made  # before the next are waited for

    def _steps(self, shard_of: Mapping[int, int]) -> Iterator[_Step]:
        """The batches of a window in order, the same whatever is missing: a resumed run gives the same bytes."""
        work = self._work
        begun: set[int] = set()
        for indices in work.groups(shard_of):
            shards = {shard_of[index] for index in indices}
            first = not shards <= begun
            begun |= shards
            lacking = sorted(self._pending.keys() & shards)
            if lacking:
                checked = first and work.count_checked(indices) == len(indices)
                work.sessions.open(checked=checked)
                yield _Step(work.inputs.batch(indices), first, checked, lacking)

    def _run_step(self, step: _Step) -> _Made:
        """Run a batch and make its records, on any thread; its outputs too, where coding errors are measured."""
        outputs = self._work.squeeze(step.batch, checked=step.checked)
        faults = find_faults(self._work, outputs)
        records = {
            shard: make_records(
                outputs, self._pending[shard].samples - faults.keys(), self._manifest, self._work.inputs.seed
            )
            for shard in step.shards
        }
        return _Made(outputs if step.first else None, faults, records)

    def _take(self, step: _Step, made: _Made, progress: _Progress) -> None:
        """Collect the records of a batch, and commit full shards."""
        inputs, faults = self._work.inputs, made.faults
        for shard, records in made.records.items():
            pending = self._pending[shard]
            skipped = [index for index in step.batch.indices if index in pending.samples & faults.keys()]
            pending.records += records
            pending.skipped += [Skipped(i, inputs.key(i), faults[i], inputs.seed(i)) for i in skipped]
            progress.samples += len(records) + len(skipped)
            if pending.errors is None and made.outputs is not None and records:
                pending.errors = self._measure(made.outputs, records)
            if len(pending.records) + len(pending.skipped) == len(pending.samples):
                self._commit(shard, self._pending.pop(shard), progress)

    def _measure(self, outputs: BatchOutputs, records: list[SampleRecord]) -> Errors:
        """The coding errors of these records, or of the first where check outputs of all would take too much."""
        work = self._work
        if outputs.layers and not outputs.layers[0].has_check:
            indices = [record.index for record in records]
            outputs = work.squeeze(work.inputs.batch(indices[: work.count_checked(indices)]), checked=True)
            records = [record for record in records if record.index in outputs.indices]
        return measure_errors(outputs, records, self._manifest)

    def _commit(self, shard: int, full: _Pending, progress: _Progress) -> None:
        """Write a shard in the background, one at a time."""
        self._wait(progress)
        errors = full.errors or Errors.unmeasured(self._manifest)
        write = functools.partial(self._writer.write_shard, shard, full.records, errors, full.skipped)
        self._under_way = run_beside(write, self._work.callers)
        if not self._work.callers:
            self._wait(progress)

    def _wait(self, progress: _Progress) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            progress.report(under_way().size)


class _Step(NamedTuple):
    """A batch that runs, and the shards that lack samples of it; errors are measured on the first of a shard."""

    batch: Batch
    first: bool
    checked: bool
    shards: list[int]


class _Made(NamedTuple):
    """Of a batch what is wrong with samples, by index, and the records of all others, by shard."""

    outputs: BatchOutputs | None
    faults: Mapping[int, str]
    records: Mapping[int, list[SampleRecord]]


@dataclass
class _Pending:
    """A shard in the making."""

    samples: set[int]
    records: list[SampleRecord] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    errors: Errors | None = None


@dataclass
class _Progress:
    on_progress: OnProgress | None
    total: int
    samples: int
    written: int = 0

    def report(self, size: int = 0) -> None:
        self.written += size
        if self.on_progress is not None:
            self.on_progress(self.samples, self.total, self.written)


def _seal(writer: CacheWriter) -> int:
    """Seal a cache, unless shards are missing; how many are. Two processes at once write the same seal."""
    while True:
        try:
            writer.seal()
        except ShdError as error:
            if error.code != "cache-incomplete":
                raise
            missing = len(writer.missing_shards())
            if missing:
                return missing
            # Another process committed the last one just now, and may have died before it sealed.
        else:
            return 0


SHARD_BYTES: Final = 256 * 2**20
"""Default size of a shard, unless the data set is small."""
LEAST_SHARDS: Final = 16
"""A killed run loses at most the shards in progress: even a small data set has a few."""


def check_destination(folder: Folder) -> None:
    """Refuse a place that cannot become a cache; whether it holds another job, ``CacheWriter`` says."""
    storage = open_storage(folder)
    if isinstance(storage.root, Path):
        with write_errors(storage.root):
            _check_folder(storage.root)
    check_free(storage)


def _check_folder(root: Path) -> None:
    there = next(path for path in (root, *root.parents) if path.exists())
    if there == root and not root.is_dir():
        raise ShdError("cache-exists", f"{root} must be a folder; it is a file: name another --out", "CACHE-60")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "may not be written" if there.is_dir() else "is a file"
        raise ShdError("write-failed", f"{root} could not be written: {there} {reason}: name another --out")


def adopt_plans(folder: Folder, options: PrecomputeOptions, run: RunOptions) -> PrecomputeOptions:
    """The options, with the plans that the manifest of this job says where they are matched (CACHE-103)."""
    if matching_of(options, run) is None or not open_storage(folder).exists(MANIFEST_NAME):
        return options
    form = Manifest.read(folder).find(Attention)
    if form is None or (form.matching, form.num_student_heads) != (
        matching_of(options, run),
        options.num_student_heads,
    ):
        return options
    return replace(options, plans=form.layer_plans)


def make_manifest(work: TeacherRun, outputs: BatchOutputs) -> Manifest:
    """The manifest, by outputs of longest samples."""
    run, inputs, count = work.run, work.inputs, len(work.inputs)
    stored = describe_forms(work, outputs)
    if work.options.groups is not None:
        others = [form.SUBJECT for form in stored.forms if getattr(form, "rows", "sample") != "sample"]
        rule, why = "be left out where rows of positions are stored", "these are of the teacher's tokens"
        need(not others, "argument-value", "groups", rule, ", ".join(others), remedy=why, spec_id="CACHE-131")
    longest = stored.extent_of(outputs[0].extent)
    per_sample = sum(form.coded_size(longest) for form in stored.forms)
    size = run.samples_per_shard or max(1, min(SHARD_BYTES // per_sample, math.ceil(count / LEAST_SHARDS)))
    fingerprint = dataset_fingerprint(inputs.key(index) for index in range(count))
    return Manifest(
        spec_version=shd_ref.SPEC_VERSION,
        created_by=f"squeezing-heads {shd_ref.__version__}",
        teacher=work.fingerprint(),
        forms=stored.forms,
        on_error=work.options.on_error,
        inputs=SampleInputs(
            names=inputs.names,
            mask=inputs.mask,
            seed=inputs.seed_column,
            decoder=inputs.decoder,
            decoder_mask=inputs.decoder_mask,
        ),
        dataset=Dataset(fingerprint=fingerprint, num_samples=count),
        shards=ShardPlan(samples_per_shard=size, seed=run.seed, num_shards=math.ceil(count / size)),
    )
