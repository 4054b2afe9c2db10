"""Run a teacher over a data set and fill a cache, resumably; the steps and their order are in ``PrecomputeJob``."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

import shd_ref
from shd_ref.cache import (
    Attention,
    CacheWriter,
    Dataset,
    Errors,
    Manifest,
    Receipt,
    SampleInputs,
    SampleRecord,
    ShardPlan,
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
from shd_ref.teacher.run.inputs import share_shards
from shd_ref.teacher.run.outputs import BatchOutputs, check_finite
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.session import run_ahead, run_in_background
from shd_ref.teacher.sources import Arrays, Source


@dataclass(frozen=True)
class PrecomputeSummary:
    """The result of ``precompute``.

    Attributes:
        samples: in the cache.
        missing_shards: that other processes have yet to write; the cache is sealed once no shard is missing.
        written, resumed: samples whose records this run wrote; those of its shards that were there already.
        written_by_others: samples of its shards that other processes wrote meanwhile.
        seconds: of this run.
        coded_bytes: of all codes in the cache; ``float32_bytes`` of the decoded arrays, unpadded.
        errors: coding errors, over the measured rows.
        compared_samples, comparison: how many of the first batch the reference squeezed too, and what that showed.
        remarks: notes on the records, such as that they depend on the batches they were made in.
        remark: the reading process's note on the data, such as how many texts were cut; None for nothing.
    """

    folder: Path | str
    samples: int
    missing_shards: int
    written: int
    resumed: int
    written_by_others: int
    seconds: float
    coded_bytes: int
    float32_bytes: int
    errors: Errors
    compared_samples: int
    comparison: Comparison | None
    remarks: tuple[str, ...] = ()
    remark: str | None = None


FIRST_SAMPLES: Final = 4
"""Samples that are checked before anything is written: the mask, and that graph and reference agree."""

OnProgress: TypeAlias = Callable[[int, int, int], None]
"""Called with samples done, samples in all and bytes written."""

OnRead: TypeAlias = Callable[[int, int], None]
"""Called with samples read and in all, while the inputs are read for their keys and lengths."""

OpenInputs: TypeAlias = Callable[[], Source | Arrays]
"""Opens the model inputs, on any machine that it is called on."""

Place: TypeAlias = str | os.PathLike[str]
"""A folder, or an address."""


@dataclass(frozen=True)
class JobOrder:
    """All that defines a job; an engine on other machines pickles it."""

    teacher: Path
    inputs: Source | Arrays | OpenInputs
    out: Place
    options: PrecomputeOptions
    run: RunOptions

    def prepare(self, on_read: OnRead | None = None) -> PrecomputeJob:
        """Load the teacher, read the inputs, and compare the graph with the reference."""
        inputs = self.inputs() if callable(self.inputs) else self.inputs
        return PrecomputeJob(self.teacher, inputs, self.out, self.options, self.run, on_read)


Engine: TypeAlias = Callable[[JobOrder, OnProgress | None, OnRead | None], "PrecomputeSummary"]
"""Runs a job: this process, or ``ray_engine.RayEngine``."""


def run_here(order: JobOrder, on_progress: OnProgress | None, on_read: OnRead | None) -> PrecomputeSummary:
    job = order.prepare(on_read)
    job.write(job.missing, on_progress)
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
    anything is written. Stopping it at any moment loses at most the shards in progress: the same call continues where
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
    return engine(JobOrder(Path(teacher), inputs, out, options, run or RunOptions()), on_progress, on_read)


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
        first, self._comparison = self._compare_first()
        self._compared = min(len(first.indices), 2)
        manifest = self._manifest = make_manifest(work, first)
        # Data that a form cannot store are refused before a manifest binds the folder to these options.
        make_records(first, manifest, work.inputs.seed)
        check_company(work, manifest)
        self._folder, self._writer = out, CacheWriter(out, manifest)
        # Before any shard: whoever commits the last one seals the cache, and these with it.
        for form in manifest.forms:
            for file in form.files:
                self._writer.write_file(file, maker_of(form).files(work, form)[file.name])
        self.written = self._writer.written  # by this job; grows
        self.shards = share_shards(manifest.shards.num_shards, *run.shards)
        self._under_way: Callable[[], Receipt] | None = None

    @functools.cached_property
    def missing(self) -> set[int]:
        """Those of ``shards`` that were not committed when this was first read."""
        return self.find_missing(self.shards)

    def find_missing(self, shards: Collection[int]) -> set[int]:
        return set(self._writer.missing_shards(list(shards)))

    def count_samples(self, shards: Collection[int]) -> int:
        return sum(len(self._manifest.shard_samples(shard)) for shard in shards)

    def write(self, shards: Collection[int], on_progress: OnProgress | None = None) -> int:
        """Write these shards, one by one, and return their bytes; progress is reported for all of ``shards``."""
        total = 0 if on_progress is None else self.count_samples(self.shards)
        progress = _Progress(on_progress, total, total - self.count_samples(shards))
        progress.report()
        try:
            for shard in sorted(shards):
                self._write_shard(shard, progress)
        finally:
            self._wait(progress)  # the shard under way is committed, also after an error
        return progress.written

    def finish(self) -> PrecomputeSummary:
        """Seal the cache if nothing is missing; the summary."""
        resumed = self.count_samples(self.shards) - self.count_samples(self.missing)
        missing_shards, listing, out = _seal(self._writer), list_cache(self._folder), self._folder
        return PrecomputeSummary(
            folder=out if isinstance(out, str) and is_address(out) else Path(out),
            samples=listing.samples,
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

    def _compare_first(self) -> tuple[BatchOutputs, Comparison | None]:
        """A few of the longest samples, and how their maps compare with the reference."""
        batch = next(self._work.checked_batches(range(len(self._work.inputs)), FIRST_SAMPLES))
        # By map, which keeps nothing of a part while the next one runs.
        parts = list(map(self._compare_part, self._work.squeeze_parts(batch)))
        layers = [comparison for _, compared in parts for comparison in compared]
        return BatchOutputs.joined([part for part, _ in parts]), Comparison.merged(layers) if layers else None

    def _compare_part(self, outputs: BatchOutputs) -> tuple[BatchOutputs, list[Comparison]]:
        """Outputs without check outputs, and how their layers compare."""
        check_finite(self._work, outputs)
        compared: list[Comparison] = []
        if outputs.layers:
            # In float64, so of a few: the ends of the batch, which are its longest sample and its shortest.
            ends = sorted({0, len(outputs.indices) - 1})
            compared = compare_layers(outputs[ends].layers, self._work.callers)
            for number in range(len(outputs.indices)):
                for maker in MAKERS.values():
                    maker.compare(self._work, outputs[number])
        return replace(outputs, layers=tuple(layer.without_check() for layer in outputs.layers)), compared

    def _write_shard(self, shard: int, progress: _Progress) -> None:
        """Run the batches of a shard, which are the same whenever it is written, and commit their records."""
        work, manifest = self._work, self._manifest
        groups = list(work.groups(manifest.shard_samples(shard)))
        # Coding errors are measured on the first batch, at once where its check outputs may be held.
        checked = work.count_checked(groups[0]) == len(groups[0])
        # Opened here, by one thread; samples that may be faulty run again, with check outputs, on any.
        work.sessions.open(checked=True)
        work.sessions.open(checked=checked and len(groups) == 1)

        def run_batch(number: int) -> tuple[list[SampleRecord], list[Errors]]:
            outputs = work.squeeze(work.inputs.batch(groups[number]), checked=checked and not number)
            check_finite(work, outputs)
            batch = make_records(outputs, manifest, work.inputs.seed)
            return batch, [] if number else [self._measure(outputs, batch)]

        records: list[SampleRecord] = []
        errors: list[Errors] = []
        with closing(run_ahead(run_batch, range(len(groups)), work.callers)) as batches:
            for _, (batch, measured) in batches:
                records += batch
                errors += measured
                progress.report(samples=len(batch))
        self._wait(progress)
        # In the background, one at a time, while the batches of the next shard run.
        self._under_way = run_in_background(
            functools.partial(self._writer.write_shard, shard, records, errors[0]), work.callers
        )
        if not work.callers:
            self._wait(progress)

    def _measure(self, outputs: BatchOutputs, records: list[SampleRecord]) -> Errors:
        """The coding errors of these records, or of the first where check outputs of all would take too much."""
        work = self._work
        if outputs.layers and not outputs.layers[0].has_check:
            outputs = work.squeeze(
                work.inputs.batch(outputs.indices[: work.count_checked(outputs.indices)]), checked=True
            )
            records = records[: len(outputs.indices)]
        return measure_errors(outputs, records, self._manifest)

    def _wait(self, progress: _Progress) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            progress.report(under_way().size)


@dataclass
class _Progress:
    on_progress: OnProgress | None
    total: int
    samples: int
    written: int = 0

    def report(self, size: int = 0, samples: int = 0) -> None:
        self.written, self.samples = self.written + size, self.samples + samples
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
    """Refuse a place that cannot become a cache; ``CacheWriter`` refuses one of another job."""
    storage = open_storage(folder)
    if isinstance(root := storage.root, Path):
        with write_errors(root):
            nearest = next(path for path in (root, *root.parents) if path.exists())
            if nearest == root and not root.is_dir():
                message = f"{root} must be a folder; it is a file: name another --out"
                raise ShdError("cache-exists", message, "CACHE-60")
            if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
                reason = "may not be written" if nearest.is_dir() else "is a file"
                message = f"{root} could not be written: {nearest} {reason}: name another --out"
                raise ShdError("write-failed", message)
    check_free(storage)


def adopt_plans(folder: Folder, options: PrecomputeOptions, run: RunOptions) -> PrecomputeOptions:
    """The options, with the plans in the manifest of this job where they are matched (CACHE-103)."""
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
