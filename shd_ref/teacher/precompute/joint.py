"""One pass of a teacher that fills a cache for each of several students."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from shd_ref.cache import CacheWriter
from shd_ref.errors import ShdError
from shd_ref.teacher.precompute.destination import check_destination
from shd_ref.teacher.precompute.job import OnProgress, PrecomputeJob
from shd_ref.teacher.precompute.manifest import adopt_plans
from shd_ref.teacher.precompute.summary import PrecomputeSummary, summarise
from shd_ref.teacher.run.buckets import share_shards
from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.sources import Arrays, Source

Students = Sequence[tuple[str | os.PathLike[str], PrecomputeOptions]]
"""Each student's cache and what it holds; those of one pass differ in the number of heads alone."""


class JointJob:
    """Jobs that share a teacher, with their caches opened; one student's job is the simplest of them.

    Args:
        teacher: the ``.onnx`` file.
        inputs: model inputs.
        students: the caches, most heads first: the largest maps decide how many samples a shard holds, for all alike,
            so that the batches are the same.
        run: how to run it.
        on_read: called with samples read and in all, while the inputs are read.

    Attributes:
        shards: those that this run answers for.

    Raises:
        ShdError: as ``precompute``, before anything but manifests is written.
    """

    def __init__(
        self,
        teacher: Path,
        inputs: Source | Arrays,
        students: Students,
        run: RunOptions,
        on_read: Callable[[int, int], None] | None = None,
    ) -> None:
        self._started = time.monotonic()
        for folder, options in students:
            check_destination(folder, teacher, options, run)
        self._folders = [folder for folder, _ in students]
        shapes = [adopt_plans(folder, options, run) for folder, options in students]
        first = TeacherRun(teacher, inputs, shapes[0], run, on_read)
        works = [first, *(first.for_shape(shape) for shape in shapes[1:])]
        self._jobs = [PrecomputeJob(first)]
        plan = self._jobs[0].manifest.shards
        for work in works[1:]:
            work.run = replace(work.run, samples_per_shard=plan.samples_per_shard)
            self._jobs.append(PrecomputeJob(work))
        self._writers = [
            CacheWriter(folder, job.manifest) for folder, job in zip(self._folders, self._jobs, strict=True)
        ]
        self.shards = share_shards(plan.num_shards, *run.shards)

    @functools.cached_property
    def missing(self) -> list[set[int]]:
        """For each student those of ``shards`` that were not committed when this was first asked for."""
        return self.find_missing(self.shards)

    def find_missing(self, shards: Sequence[int]) -> list[set[int]]:
        """For each student those of some shards that are not committed."""
        return [set(writer.missing_shards(shards)) for writer in self._writers]

    def count_samples(self, shards: Collection[int], missing: Sequence[Collection[int]]) -> int:
        """Samples to write of all students: of those of these shards that are missing."""
        chosen = set(shards)
        return sum(
            job.count_samples(chosen.intersection(lost)) for job, lost in zip(self._jobs, missing, strict=True)
        )

    def windows(self) -> list[Sequence[int]]:
        """Shards of the whole job whose samples run in common batches, see ``PrecomputeJob.windows``."""
        return list(self._jobs[0].windows(self._window_shards))

    def write(
        self,
        shards: Sequence[int],
        missing: Sequence[Collection[int]],
        on_progress: OnProgress | None = None,
    ) -> None:
        """Write what is missing of some shards, batch by batch in step: so every batch runs once for all students.

        Args:
            shards: ascending.
            missing: what ``find_missing`` says of them.
            on_progress: called after every batch and shard, with the sums over students.
        """
        counts = [(0, 0, 0)] * len(self._jobs)

        def report(place: int) -> OnProgress:
            def note(*count: int) -> None:
                counts[place] = (count[0], count[1], count[2])
                if on_progress is not None:
                    on_progress(*(sum(column) for column in zip(*counts, strict=True)))

            return note

        steps = [
            job.steps(writer, shards, lost, self._window_shards, report(place))
            for place, (job, writer, lost) in enumerate(zip(self._jobs, self._writers, missing, strict=True))
        ]
        try:
            for _ in itertools.zip_longest(*steps):
                pass
        finally:
            for step in steps:
                step.close()

    def finish(self) -> list[PrecomputeSummary]:
        """Seal every cache of which nothing is missing, and sum them up."""
        summaries = []
        for job, writer, folder, lost in zip(self._jobs, self._writers, self._folders, self.missing, strict=True):
            left = _seal(writer)
            written = job.count_samples(lost)
            summaries.append(
                summarise(
                    folder,
                    job.manifest,
                    resumed=job.count_samples(self.shards) - written,
                    written=written,
                    missing_shards=left,
                    seconds=time.monotonic() - self._started,
                    compared_samples=job.compared_samples,
                    comparison=job.comparison,
                    remarks=job.work.remarks,
                    supplied=job.work.inputs.supply,
                    remark=job.work.inputs.remark,
                )
            )
        return summaries

    @property
    def _window_shards(self) -> int:
        return min(job.window_shards for job in self._jobs)


def _seal(writer: CacheWriter) -> int:
    """Seal a cache, unless shards are missing; how many are.

    Of processes that share the work, the last one finds none; two at once write the same seal.
    """
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
