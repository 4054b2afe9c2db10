"""Run a teacher graph over a data set and store its squeezed attention in a cache, resumably."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import CacheWriter, CodecError, NewRecord, Skipped, code_dtype
from shd_ref.errors import ShdError
from shd_ref.teacher.buckets import group_shards
from shd_ref.teacher.compare import compare_with_reference
from shd_ref.teacher.faults import Fault, find_faults
from shd_ref.teacher.inputs import Batch
from shd_ref.teacher.job import adopt_plans, make_manifest
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
    out: str | Path,
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
        out: the cache folder, new or with the same job begun.
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
    job = PrecomputeJob(teacher, inputs, adopt_plans(Path(out), options, run), run, on_read=on_read)
    writer = CacheWriter(out, job.manifest)
    resumed = job.write_shards(writer, on_progress=on_progress)
    writer.seal()
    return summarise(
        Path(out),
        job.manifest,
        resumed=resumed,
        seconds=time.monotonic() - started,
        compared_samples=job.compared_samples,
        comparison=job.comparison,
    )


class PrecomputeJob:
    """A run that is ready to write: teacher open, inputs read, and the graph found equal to the reference.

    Args:
        teacher, inputs, options, run, on_read: as for ``precompute``.

    Attributes:
        work: the teacher and its inputs.
        manifest: of the cache.
        comparison: of the graph with the reference on the longest samples.
        compared_samples: how many.

    Raises:
        ShdError: as ``precompute``, before anything is written.
    """

    def __init__(
        self,
        teacher: str | Path,
        inputs: Source | Arrays,
        options: PrecomputeOptions,
        run: RunOptions | None = None,
        *,
        on_read: Callable[[int, int], None] | None = None,
    ) -> None:
        self.work = TeacherRun(Path(teacher), inputs, options, run or RunOptions(), on_read)
        outputs, mask = self._first_outputs()
        self.comparison = compare_with_reference(self.work.graph, outputs, query_mask=mask)
        self.compared_samples = len(outputs[self.work.graph.layers[0].codes])
        self.manifest = make_manifest(self.work, outputs)

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
        manifest, run = self.manifest, self.work.run
        chosen = range(manifest.shards.num_shards) if shards is None else shards
        missing = set(writer.missing_shards()).intersection(chosen)
        total = sum(len(manifest.shard_samples(shard)) for shard in chosen)
        progress = _Progress(on_progress, total)
        resumed = total - sum(len(manifest.shard_samples(shard)) for shard in missing)
        progress.add(samples=resumed)
        lengths = self.work.inputs.lengths
        longest = max(int(lengths.max()), 1)
        shard_bytes = (
            manifest.shards.samples_per_shard * len(manifest.layers) * manifest.num_student_heads * longest**2
        )
        per_batch = run.batch_size if run.batch_tokens is None else max(1, run.batch_tokens // max(1, lengths.mean()))
        windows = group_shards(
            chosen,
            manifest.shards.samples_per_shard,
            int(per_batch),
            WINDOW_BYTES // (shard_bytes * code_dtype(manifest.codec).itemsize),
        )
        for window in windows:
            if not missing.isdisjoint(window):
                self._write_window(writer, window, missing, progress)
        return resumed

    def _write_window(
        self, writer: CacheWriter, window: Sequence[int], missing: set[int], progress: _Progress
    ) -> None:
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
                continue
            batch = work.inputs.batch(indices)
            outputs = work.squeeze_checked(batch) if first else work.squeeze(batch)
            faults = self._judge(batch, outputs)
            for shard in sorted(touched & pending.keys()):
                part = pending[shard]
                wanted = part.samples - faults.keys()
                part.records += make_records(work, batch, outputs, wanted)
                part.skipped += [
                    Skipped(index, faults[index].key, faults[index].reason, work.inputs.seed(index))
                    for index in indices
                    if index in part.samples & faults.keys()
                ]
                if part.codec_error is None and first:
                    part.codec_error = measure_codec(work, batch, outputs, wanted)
                if part.full:
                    del pending[shard]
                    receipt = writer.write_shard(shard, part.records, part.codec_error or _UNMEASURED, part.skipped)
                    progress.add(written=receipt.size)
            progress.add(samples=sum(shard_of[index] in missing for index in indices))

    def _first_outputs(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_] | None]:
        """Check outputs and row mask of the first batch, longest samples first, that has samples without a fault."""
        work = self.work
        for batch in work.batches(range(len(work.inputs))):
            outputs = work.squeeze_checked(batch)
            faults = self._judge(batch, outputs)
            sound = [number for number, index in enumerate(batch.indices) if index not in faults]
            if sound:
                mask = work.query_mask(batch)
                return {name: array[sound] for name, array in outputs.items()}, None if mask is None else mask[sound]
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
