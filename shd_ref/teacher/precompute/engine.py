"""Run a teacher graph over a data set and store its squeezed attention in caches, resumably."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from shd_ref.cache.storage.places import subfolder
from shd_ref.errors import ShdError
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.job import OnProgress, PrecomputeJob, Students
from shd_ref.teacher.precompute.summary import PrecomputeSummary
from shd_ref.teacher.sources import Arrays, Source

OpenInputs: TypeAlias = Callable[[], Source | Arrays]
"""Opens the model inputs, on any machine that it is called on."""

OnRead: TypeAlias = Callable[[int, int], None]
"""Called with samples read and in all, while the inputs are read for their keys and lengths."""

Engine: TypeAlias = Callable[
    [Path, Source | Arrays | OpenInputs, Students, RunOptions, OnProgress | None, OnRead | None],
    list[PrecomputeSummary],
]
"""What runs a job: this process, or ``ray_engine.RayEngine``."""


def run_here(
    teacher: Path,
    inputs: Source | Arrays | OpenInputs,
    students: Students,
    run: RunOptions,
    on_progress: OnProgress | None,
    on_read: OnRead | None,
) -> list[PrecomputeSummary]:
    """The engine that is this process."""
    opened = inputs() if callable(inputs) else inputs
    job = PrecomputeJob(teacher, opened, students, run, on_read)
    job.write(job.shards, job.missing, on_progress)
    return job.finish()


def precompute(
    teacher: str | Path,
    inputs: Source | Arrays | OpenInputs,
    students: Students,
    run: RunOptions | None = None,
    *,
    engine: Engine = run_here,
    on_progress: OnProgress | None = None,
    on_read: OnRead | None = None,
) -> list[PrecomputeSummary]:
    """Squeeze a teacher's attention over a data set into caches, one for each student.

    The first batch is also squeezed by the NumPy reference; a difference above tolerance refuses the whole run
    before anything is written. Stopping it at any moment loses at most the shards in progress: the same call
    goes on where it stopped, in the same batches.

    Args:
        teacher: an ``.onnx`` file.
        inputs: model inputs: a source (``open_source``), or arrays by graph input name with first axis N, or what
            opens them; columns that the graph does not take are ignored.
        students: of each the cache, a folder or an address such as ``s3://bucket/cache``, new or with the same job
            begun; and what to make of the teacher, see ``students_of``.
        run: how to run it.
        engine: what runs it.
        on_progress: called after every batch and shard.
        on_read: called with samples read and in all, while the inputs are read for their keys and lengths.

    Returns:
        A summary of each student's cache, in their order.

    Raises:
        ShdError: as ``TeacherRun``; ``graph-mismatch`` (in-graph squeeze against the reference), ``cache-mismatch``
            (the folder holds another job), ``cache-exists``, ``write-failed``, ``not-finite``; ``argument-value`` for
            students that differ in more than ``num_student_heads`` and ``plans``.
    """
    return engine(Path(teacher), inputs, students, run or RunOptions(), on_progress, on_read)


def students_of(out: str | os.PathLike[str], options: PrecomputeOptions, student_heads: Sequence[int]) -> Students:
    """Students with several numbers of heads, most first; their caches are folders ``heads-<n>``.

    Raises:
        ShdError: ``argument-value``.
    """
    if not student_heads or len(set(student_heads)) != len(student_heads):
        raise ShdError("argument-value", f"student_heads must be distinct numbers; got {list(student_heads)}")
    return [
        (subfolder(out, f"heads-{number}"), replace(options, num_student_heads=number))
        for number in sorted(student_heads, reverse=True)
    ]
