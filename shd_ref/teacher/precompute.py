"""Run a teacher graph over a data set and store its squeezed attention in a cache, resumably."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import CacheWriter, CodecError, NewRecord, Skipped, code_dtype
from shd_ref.cache.storage import subfolder
from shd_ref.errors import ShdError
from shd_ref.teacher.buckets import group_shards, share_shards
from shd_ref.teacher.compare import compare_with_reference
from shd_ref.teacher.destination import check_destination
from shd_ref.teacher.factored import check_factors
from shd_ref.teacher.faults import Fault, find_faults
from shd_ref.teacher.inputs import Batch
from shd_ref.teacher.job import adopt_plans, make_manifest
from shd_ref.teacher.masks import read_spans
from shd_ref.teacher.records import make_records, measure_codec
from shd_ref.teacher.run import PrecomputeOptions, RunOptions, TeacherRun
from shd_ref.teacher.sources import Arrays, Source
from shd_ref.teacher.summary import PrecomputeSummary, summarise

WINDOW_BYTES: Final = 2**30
"""Codes that are held at most, before their shards are written (but at least one shard's)."""

OnProgress = Callable[[int, int, int], None]
"""Called with samples done, samples in all and bytes written."""


def precompute(
    teacher: str | Path,
    inputs: Source | Arrays,
    out: str | os.PathLike[str],
    options: PrecomputeOptions,
    run: RunOptions | None = None,
    *,
    on_progress: OnProgress | None = None,
    on_read: Callable[[int, int], None] | None = None,
) -> PrecomputeSummary:
    """Squeeze a teacher's attention over a data set into a cache folder.

    The first batch is also squeezed by the NumPy reference; a difference above tolerance refuses the whole run
    before anything is written. Stopping it at any moment loses at most the shards in progress: the same call
    goes on where it stopped, in the same batches.

    Args:
        teacher: an ``.onnx`` file.
        inputs: model inputs: a source (``open_source``), or arrays by graph input name with first axis N; columns
            that the graph does not take are ignored.
        out: the cache, a folder or an address such as ``s3://bucket/cache``, new or with the same job begun.
        options: what to make of the teacher.
        run: how to run it.
        on_progress: called after every batch and shard.
        on_read: called with samples read and in all, while the inputs are read for their keys and lengths.

    Raises:
        ShdError: as ``TeacherRun``; ``graph-mismatch`` (in-graph squeeze against the reference), ``cache-mismatch``
            (the folder holds another job), ``cache-exists``, ``write-failed``, ``not-finite``.
    """
    started = time.monotonic()
    run = run or RunOptions()
    check_destination(out, Path(teacher), options, run)
    job = PrecomputeJob(TeacherRun(Path(teacher), inputs, adopt_plans(out, options, run), run, on_read))
    return _write_caches([(job, out)], started, on_progress)[0]


def precompute_shapes(
    teacher: str | Path,
    inputs: Source | Arrays,
    out: str | os.PathLike[str],
    options: PrecomputeOptions,
    student_heads: Sequence[int],
    run: RunOptions | None = None,
    *,
    on_progress: OnProgress | None = None,
    on_read: Callable[[int, int], None] | None = None,
) -> list[PrecomputeSummary]:
    """As ``precompute``, for several numbers of student heads in one pass of the teacher.

    Args:
        teacher, inputs, options, run, on_progress, on_read: as for ``precompute``; ``options.num_student_heads`` does
            not matter.
        out: the folder or address of the caches, one in a subfolder ``heads-<n>`` for each number.
        student_heads: the numbers, distinct.

    Raises:
        ShdError: as ``precompute``; ``argument-value``.
    """
    started = time.monotonic()
    if not student_heads or len(set(student_heads)) != len(student_heads):
        raise ShdError("argument-value", f"student_heads must be distinct numbers; got {list(student_heads)}")
    run = run or RunOptions()
    # The largest maps decide how many samples a shard holds, for all alike: so the batches are the same.
    heads = sorted(student_heads, reverse=True)
    folders = [subfolder(out, f"heads-{number}") for number in heads]
    shapes = [replace(options, num_student_heads=number) for number in heads]
    for folder, shape in zip(folders, shapes, strict=True):
        check_destination(folder, Path(teacher), shape, run)
    shapes = [adopt_plans(folder, shape, run) for folder, shape in zip(folders, shapes, strict=True)]
    works = [TeacherRun(Path(teacher), inputs, shapes[0], run, on_read)]
    works += [works[0].for_shape(shape) for shape in shapes[1:]]
    jobs = [PrecomputeJob(works[0])]
    plan = jobs[0].manifest.shards
    for work in works[1:]:
        work.run = replace(work.run, samples_per_shard=plan.samples_per_shard)
        jobs.append(PrecomputeJob(work))
    return _write_caches(list(zip(jobs, folders, strict=True)), started, on_progress)


def _write_caches(
    caches: Sequence[tuple[PrecomputeJob, str | os.PathLike[str]]], started: float, on_progress: OnProgress | None
) -> list[PrecomputeSummary]:
    """Write caches batch by batch in step, so that jobs that share a teacher find each batch run already."""
    counts = [(0, 0, 0)] * len(caches)

    def report(place: int) -> OnProgress:
        def note(*count: int) -> None:
            counts[place] = (count[0], count[1], count[2])
            if on_progress is not None:
                on_progress(*(sum(column) for column in zip(*counts, strict=True)))

        return note

    # Also of caches for several students: they have the same shards.
    share = share_shards(caches[0][0].manifest.shards.num_shards, *caches[0][0].work.run.share)
    writers = [CacheWriter(folder, job.manifest) for job, folder in caches]
    missing = [set(writer.missing_shards()).intersection(share) for writer in writers]
    window = min(job.window_shards for job, _ in caches)
    steps = [
        job.steps(writer, share, lost, window, report(place))
        for place, ((job, _), writer, lost) in enumerate(zip(caches, writers, missing, strict=True))
    ]
    for _ in itertools.zip_longest(*steps):
        pass
    return [
        finish_cache(job, writer, folder, share, lost, started)
        for (job, folder), writer, lost in zip(caches, writers, missing, strict=True)
    ]


def finish_cache(
    job: PrecomputeJob,
    writer: CacheWriter,
    folder: str | os.PathLike[str],
    share: Sequence[int],
    lost: Collection[int],
    started: float,
) -> PrecomputeSummary:
    """Seal a cache if nothing is missing, and sum it up.

    Args:
        job: what was done.
        writer: of the cache.
        folder: the cache.
        share: the shards that this run answers for.
        lost: those of them that it wrote.
        started: when, by ``time.monotonic``.
    """
    left = len(writer.missing_shards())
    if not left:  # of processes that share the work, the last one gets here; two at once write the same seal
        writer.seal()
    return summarise(
        folder,
        job.manifest,
        resumed=job.count_samples(share) - job.count_samples(lost),
        written=job.count_samples(lost),
        missing_shards=left,
        seconds=time.monotonic() - started,
        compared_samples=job.compared_samples,
        comparison=job.comparison,
    )


class PrecomputeJob:
    """A run that is ready to write: teacher open, inputs read, and the graph found equal to the reference.

    Args:
        work: the teacher and its inputs.

    Attributes:
        work: likewise.
        manifest: of the cache.
        comparison: of the graph with the reference on the longest samples.
        compared_samples: how many.

    Raises:
        ShdError: as ``precompute``, before anything is written.
    """

    def __init__(self, work: TeacherRun) -> None:
        self.work = work
        outputs, mask, spans = self._first_outputs()
        self.comparison = compare_with_reference(work.graph, outputs, query_mask=mask)
        self.compared_samples = len(outputs[work.graph.layers[0].codes])
        self.manifest = make_manifest(work, outputs, spans)
        if work.options.is_factored:
            check_factors(work, outputs, mask, self.manifest)

    @property
    def window_shards(self) -> int:
        """Shards whose codes fit into ``WINDOW_BYTES`` together, 0 where not even one does."""
        manifest, longest = self.manifest, max(int(self.work.inputs.lengths.max()), 1)
        if manifest.factors is not None:
            return WINDOW_BYTES // (manifest.shards.samples_per_shard * sum(manifest.blob_sizes(longest)))
        entries = manifest.shards.samples_per_shard * len(manifest.layers) * manifest.num_student_heads * longest**2
        return WINDOW_BYTES // (entries * code_dtype(manifest.codec).itemsize)

    def windows(self, max_shards: int) -> Iterator[Sequence[int]]:
        """Shards whose samples are batched together.

        They are those of the whole job, whoever writes which shards: so the bytes do not depend on its division.

        Args:
            max_shards: as many as memory may hold, as ``window_shards`` says.
        """
        run, plan = self.work.run, self.manifest.shards
        mean_length = max(1.0, float(self.work.inputs.lengths.mean()))
        per_batch = run.batch_size if run.batch_tokens is None else max(1, int(run.batch_tokens / mean_length))
        return group_shards(range(plan.num_shards), plan.samples_per_shard, per_batch, max_shards)

    def count_samples(self, shards: Iterable[int]) -> int:
        """Samples of these shards."""
        return sum(len(self.manifest.shard_samples(shard)) for shard in shards)

    def write_shards(
        self, writer: CacheWriter, shards: Sequence[int] | None = None, on_progress: OnProgress | None = None
    ) -> int:
        """Write the shards that are missing.

        Args:
            writer: of a cache with this job's manifest.
            shards: those that this process answers for, ascending; default all.
            on_progress: called after every batch and shard.

        Returns:
            How many samples were there already.
        """
        chosen = range(self.manifest.shards.num_shards) if shards is None else shards
        missing = set(writer.missing_shards()).intersection(chosen)
        for _ in self.steps(writer, chosen, missing, self.window_shards, on_progress):
            pass
        return self.count_samples(set(chosen) - missing)

    def steps(
        self,
        writer: CacheWriter,
        shards: Sequence[int],
        missing: Collection[int],
        window_shards: int,
        on_progress: OnProgress | None,
    ) -> Iterator[None]:
        """``write_shards``, one batch at a step; batches of which nothing is missing are passed over.

        Args:
            writer: of a cache with this job's manifest.
            shards: those that this process answers for, ascending.
            missing: which of them to write.
            window_shards: over how many shards samples are sorted into batches, at most.
            on_progress: called after every batch and shard.
        """
        progress = _Progress(on_progress, self.count_samples(shards))
        progress.add(samples=progress.total - self.count_samples(missing))
        chosen = set(shards)
        for window in self.windows(window_shards):
            if not chosen.isdisjoint(window):
                yield from self._write_window(writer, window, missing, progress)

    def _write_window(
        self, writer: CacheWriter, window: Sequence[int], missing: Collection[int], progress: _Progress
    ) -> Iterator[None]:
        """Run the batches of these shards that reach a missing one, and write each shard when it is full.

        Which batches there are, and which of them also yield the uncoded maps, does not depend on what is missing:
        a resumed run gives the bytes that an undisturbed one gives.
        """
        work = self.work
        shard_of = {index: shard for shard in window for index in self.manifest.shard_samples(shard)}
        pending = {shard: _Pending(self.manifest.shard_samples(shard)) for shard in window if shard in missing}
        begun: set[int] = set()
        for indices in work.inputs.groups(shard_of, work.run.batch_size, work.run.batch_tokens):
            touched = {shard_of[index] for index in indices}
            first = not touched <= begun
            begun |= touched
            if touched.isdisjoint(pending):
                yield
                continue
            batch = work.inputs.batch(indices)
            outputs = work.squeeze_checked(batch) if first else work.squeeze(batch)
            faults = self._judge(batch, outputs)
            for shard in sorted(touched & pending.keys()):
                part = pending[shard]
                wanted = part.samples - faults.keys()
                records = make_records(work, batch, outputs, wanted, self.manifest)
                part.records += records
                part.skipped += [
                    Skipped(index, faults[index].key, faults[index].reason, work.inputs.seed(index))
                    for index in indices
                    if index in part.samples & faults.keys()
                ]
                if part.codec_error is None and first:
                    part.codec_error = measure_codec(work, batch, outputs, records, self.manifest)
                if part.full:
                    del pending[shard]
                    receipt = writer.write_shard(shard, part.records, part.codec_error or _UNMEASURED, part.skipped)
                    progress.add(written=receipt.size)
            progress.add(samples=sum(shard_of[index] in missing for index in indices))
            yield

    def _first_outputs(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_] | None, list[NDArray[Any]]]:
        """Check outputs and row mask of the first batch, longest samples first, that has samples without a fault.

        For factored records also what the mask leaves the first of these samples, see ``read_spans``.
        """
        work = self.work
        for batch in work.batches(range(len(work.inputs))):
            outputs = work.squeeze_checked(batch)
            faults = self._judge(batch, outputs)
            sound = [number for number, index in enumerate(batch.indices) if index not in faults]
            if sound:
                mask = work.query_mask(batch)
                spans = read_spans(work, batch, outputs, sound[0]) if work.options.is_factored else []
                cut = {name: array[sound] for name, array in outputs.items()}
                return cut, None if mask is None else mask[sound], spans
        raise ShdError("not-finite", "the teacher gives NaN or infinity on every sample: look at its inputs", "MAP-5")

    def _judge(self, batch: Batch, outputs: dict[str, NDArray[Any]]) -> dict[int, Fault]:
        faults = {fault.index: fault for fault in find_faults(self.work, batch, outputs)}
        if faults and self.work.options.on_error == "stop":
            raise faults[min(faults)].error()
        return faults


_UNMEASURED: Final = CodecError(0.0, 0.0, 0.0, 0)


class _Pending:
    """A shard in the making."""

    def __init__(self, samples: Sequence[int]) -> None:
        self.samples = set(samples)
        self.records: list[NewRecord] = []
        self.skipped: list[Skipped] = []
        self.codec_error: CodecError | None = None

    @property
    def full(self) -> bool:
        return len(self.records) + len(self.skipped) == len(self.samples)


@dataclass
class _Progress:
    """Counts, and tells whoever asked."""

    report: OnProgress | None
    total: int
    samples: int = field(default=0, init=False)
    written: int = field(default=0, init=False)

    def add(self, *, samples: int = 0, written: int = 0) -> None:
        self.samples += samples
        self.written += written
        if self.report is not None:
            self.report(self.samples, self.total, self.written)
