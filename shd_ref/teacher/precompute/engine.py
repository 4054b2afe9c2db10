"""Run a teacher graph over a data set and store its squeezed attention in a cache, resumably."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shd_ref.cache.storage.places import subfolder
from shd_ref.errors import ShdError
from shd_ref.teacher.precompute.job import OnProgress
from shd_ref.teacher.precompute.joint import JointJob, Students
from shd_ref.teacher.precompute.summary import PrecomputeSummary
from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.sources import Arrays, Source


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
    return _fill(JointJob(Path(teacher), inputs, [(out, options)], run or RunOptions(), on_read), on_progress)[0]


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

    Returns:
        A summary of each, most heads first.

    Raises:
        ShdError: as ``precompute``; ``argument-value``.
    """
    students = students_of(out, options, student_heads)
    return _fill(JointJob(Path(teacher), inputs, students, run or RunOptions(), on_read), on_progress)


def students_of(out: str | os.PathLike[str], options: PrecomputeOptions, student_heads: Sequence[int]) -> Students:
    """The caches of several numbers of student heads, most heads first.

    Raises:
        ShdError: ``argument-value``.
    """
    if not student_heads or len(set(student_heads)) != len(student_heads):
        raise ShdError("argument-value", f"student_heads must be distinct numbers; got {list(student_heads)}")
    return [
        (subfolder(out, f"heads-{number}"), replace(options, num_student_heads=number))
        for number in sorted(student_heads, reverse=True)
    ]


def _fill(job: JointJob, on_progress: OnProgress | None) -> list[PrecomputeSummary]:
    job.write(job.shards, job.missing, on_progress)
    return job.finish()
