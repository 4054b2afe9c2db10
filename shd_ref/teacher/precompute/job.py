"""Shards of one cache, made batch by batch from a teacher that runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import CacheWriter, Errors, Extent, Factors, NewRecord, Skipped
from shd_ref.errors import ShdError
from shd_ref.teacher.precompute.commits import Commits
from shd_ref.teacher.precompute.compare import compare_with_reference
from shd_ref.teacher.precompute.factored import check_factors
from shd_ref.teacher.precompute.manifest import make_manifest
from shd_ref.teacher.precompute.masks import read_spans
from shd_ref.teacher.precompute.records import make_records, measure_codec
from shd_ref.teacher.run.buckets import group_shards
from shd_ref.teacher.run.faults import Fault, Outputs, find_faults
from shd_ref.teacher.run.inputs import Batch
from shd_ref.teacher.run.teacher import TeacherRun

WINDOW_BYTES: Final = 2**30
"""Codes that are held at most before their shards are written (but at least one shard's); the shard that is being
written meanwhile comes on top."""

OnProgress = Callable[[int, int, int], None]
"""Called with samples done, samples in all and bytes written."""


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
        work.check_samples()
        outputs, masks, spans = self._first_outputs()
        self.comparison = compare_with_reference(work.graph, outputs, query_mask=masks)
        self.compared_samples = len(outputs[work.graph.layers[0].codes])
        self.manifest = make_manifest(work, outputs, masks, spans)
        if isinstance(self.manifest.attention, Factors):
            check_factors(work, outputs, next(iter(masks.values())), self.manifest.attention)

    @property
    def window_shards(self) -> int:
        """Shards whose codes fit into ``WINDOW_BYTES`` together, 0 where not even one does."""
        longest = Extent(max(int(self.work.inputs.lengths.max()), 1))
        held = sum(form.held_size(longest) for form in self.manifest.forms)
        return WINDOW_BYTES // (self.manifest.shards.samples_per_shard * held)

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
        missing = set(writer.missing_shards(chosen))
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
    ) -> Generator[None, None, None]:
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
        with Commits(writer, lambda size: progress.add(written=size)) as commits:
            for window in self.windows(window_shards):
                if not chosen.isdisjoint(window):
                    yield from self._write_window(commits, window, missing, progress)

    def _write_window(
        self, commits: Commits, window: Sequence[int], missing: Collection[int], progress: _Progress
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
            whole = first and work.count_checked(indices) == len(indices)
            outputs = work.squeeze_checked(batch) if whole else work.squeeze(batch)
            faults = self._judge(batch, outputs)
            for shard in sorted(touched & pending.keys()):
                part = pending[shard]
                wanted = part.samples - faults.keys()
                records = make_records(work, batch, outputs, wanted, self.manifest.attention)
                part.records += records
                part.skipped += [
                    Skipped(index, faults[index].key, faults[index].reason, work.inputs.seed(index))
                    for index in indices
                    if index in part.samples & faults.keys()
                ]
                if part.errors is None and first:
                    part.errors = (
                        self._measure(batch, outputs, records)
                        if whole
                        else self._measure_some([record.index for record in records])
                    )
                if part.full:
                    del pending[shard]
                    commits.put(shard, part.records, part.errors or _UNMEASURED, part.skipped)
            progress.add(samples=sum(shard_of[index] in missing for index in indices))
            yield

    def _measure_some(self, indices: Sequence[int]) -> Errors:
        """What coding costs as many of these samples as may yield check outputs at once, run for it anew."""
        chosen = indices[: self.work.count_checked(indices)]
        if not chosen:
            return _UNMEASURED
        batch = self.work.inputs.batch(chosen)
        outputs = self.work.squeeze_checked(batch)
        records = make_records(self.work, batch, outputs, set(chosen), self.manifest.attention)
        return self._measure(batch, outputs, records)

    def _measure(self, batch: Batch, outputs: Outputs, records: Sequence[NewRecord]) -> Errors:
        return Errors(attention=measure_codec(self.work, batch, outputs, records, self.manifest.attention))

    def _first_outputs(
        self,
    ) -> tuple[dict[str, NDArray[Any]], dict[int, NDArray[np.bool_] | None], list[NDArray[Any]]]:
        """Check outputs and row masks (by student layer) of the longest samples without a fault, as many as are
        checked at once.

        For factored records also what the mask leaves the first of these samples, see ``read_spans``.
        """
        work = self.work
        for batch in work.checked_batches(range(len(work.inputs))):
            outputs = work.squeeze_checked(batch)
            faults = self._judge(batch, outputs)
            sound = [number for number, index in enumerate(batch.indices) if index not in faults]
            if sound:
                masks = work.query_masks(batch)
                spans = read_spans(work, batch, outputs, sound[0]) if work.options.is_factored else []
                cut = {name: array[sound] for name, array in outputs.items()}
                return cut, {name: None if mask is None else mask[sound] for name, mask in masks.items()}, spans
        raise ShdError("not-finite", "the teacher gives NaN or infinity on every sample: look at its inputs", "MAP-5")

    def _judge(self, batch: Batch, outputs: dict[str, NDArray[Any]]) -> dict[int, Fault]:
        faults = {fault.index: fault for fault in find_faults(self.work, batch, outputs)}
        if faults and self.work.options.on_error == "stop":
            raise faults[min(faults)].error()
        return faults


_UNMEASURED: Final = Errors.unmeasured()


class _Pending:
    """A shard in the making."""

    def __init__(self, samples: Sequence[int]) -> None:
        self.samples = set(samples)
        self.records: list[NewRecord] = []
        self.skipped: list[Skipped] = []
        self.errors: Errors | None = None

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
