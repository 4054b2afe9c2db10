"""Precompute on a Ray cluster: Ray Data deals shards to actors that each hold the teacher.

One input row is one shard; shards whose samples run in common batches are one block, so the bytes are those of a
single process. Maps never pass through Ray: an actor writes its shards and their receipts to the cache and returns
two numbers. So Ray may lose and repeat whatever it likes: what is committed stays, and the same call resumes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from shd_ref.errors import ShdError
from shd_ref.teacher.precompute.engine import students_of
from shd_ref.teacher.precompute.job import OnProgress
from shd_ref.teacher.precompute.joint import JointJob, Students
from shd_ref.teacher.precompute.summary import PrecomputeSummary
from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.sources import Arrays, Source

try:
    import pyarrow as pa  # type: ignore[import-untyped]
    import ray
    import ray.data
except ImportError as error:
    raise ShdError(
        "dependency-missing", f"--engine ray needs the package {error.name}: pip install 'squeezing-heads[ray]'"
    ) from error

OpenInputs = Callable[[], Source | Arrays]
"""Opens the model inputs, on whatever machine it is called."""


@dataclass(frozen=True)
class RayJob:
    """What every actor needs to make any shard; paths must mean the same on all machines.

    Attributes:
        teacher: the ``.onnx`` file.
        open_inputs: opens the model inputs; it is pickled.
        students: the caches.
        run: how to run it.
    """

    teacher: Path
    open_inputs: OpenInputs
    students: Students
    run: RunOptions

    def prepare(self, on_read: Callable[[int, int], None] | None = None) -> JointJob:
        """Load the teacher, read the inputs, and compare the graph with the reference."""
        return JointJob(self.teacher, self.open_inputs(), self.students, self.run, on_read)


def precompute_on_ray(
    teacher: str | Path,
    open_inputs: OpenInputs,
    out: str | os.PathLike[str],
    options: PrecomputeOptions,
    run: RunOptions | None = None,
    *,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
    on_read: Callable[[int, int], None] | None = None,
) -> PrecomputeSummary:
    """As ``precompute``, by actors on the Ray cluster that this process is connected to, or on a new local one.

    Args:
        teacher, out: as for ``precompute``; every machine must reach them under the same path or address.
        open_inputs: makes the inputs. Every actor calls it, and reads them once for keys and lengths.
        options: what to make of the teacher.
        run: how to run it. An actor takes ``num_threads`` CPUs (1 by default), and one GPU for provider ``cuda``.
        workers: actors; default: as many as the cluster has room for.
        on_progress: called after every block of shards.
        on_read: as for ``precompute``, in this process.

    Raises:
        ShdError: as ``precompute``, also what an actor raised; ``argument-value`` where the cluster has no room;
            ``dependency-missing``.
    """
    plan = _plan(teacher, open_inputs, [(out, options)], run)
    return _fill(plan, workers, on_progress, on_read)[0]


def precompute_shapes_on_ray(
    teacher: str | Path,
    open_inputs: OpenInputs,
    out: str | os.PathLike[str],
    options: PrecomputeOptions,
    student_heads: Sequence[int],
    run: RunOptions | None = None,
    *,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
    on_read: Callable[[int, int], None] | None = None,
) -> list[PrecomputeSummary]:
    """As ``precompute_shapes``: every actor runs a batch once for all students.

    Args:
        teacher, open_inputs, run, workers, on_progress, on_read: as for ``precompute_on_ray``.
        out, options, student_heads: as for ``precompute_shapes``.

    Returns:
        A summary of each, most heads first.

    Raises:
        ShdError: as ``precompute_on_ray``.
    """
    plan = _plan(teacher, open_inputs, students_of(out, options, student_heads), run)
    return _fill(plan, workers, on_progress, on_read)


class ShardWriter:
    """The actor: a teacher that is loaded once and makes whatever shards it is given."""

    def __init__(self, plan: RayJob) -> None:
        self._plan = plan
        self._job: JointJob | None = None

    def __call__(self, block: dict[str, NDArray[Any]]) -> dict[str, list[Any]]:
        """Write the shards of one block; which is its first and how many bytes that were, or what went wrong.

        Errors are returned, as Ray would keep no more than their text, and repeat what cannot succeed.
        """
        shards = [int(shard) for shard in block["shard"]]
        try:
            written = self._write(shards)
        except ShdError as error:
            return {"first": shards[:1], "bytes": [0], "code": [error.code], "message": [str(error)]}
        return {"first": shards[:1], "bytes": [written], "code": [""], "message": [""]}

    def _write(self, shards: list[int]) -> int:
        if self._job is None:  # not when the actor is made, where errors cannot be returned
            self._job = self._plan.prepare()
        written = 0

        def note(_done: int, _total: int, size: int) -> None:
            nonlocal written
            written = size

        self._job.write(shards, self._job.find_missing(shards), note)
        return written


def _plan(teacher: str | Path, open_inputs: OpenInputs, students: Students, run: RunOptions | None) -> RayJob:
    run = run or RunOptions()
    return RayJob(Path(teacher), open_inputs, students, replace(run, num_threads=run.num_threads or 1))


def _fill(
    plan: RayJob,
    workers: int | None,
    on_progress: OnProgress | None,
    on_read: Callable[[int, int], None] | None,
) -> list[PrecomputeSummary]:
    job = plan.prepare(on_read)  # it makes the caches too: the actors adopt their plans
    lost = set().union(*job.missing)
    blocks = [block for window in job.windows() if (block := [shard for shard in window if shard in lost])]
    todo = {block[0]: job.count_samples(block, job.missing) for block in blocks}
    total, written = job.count_samples(job.shards, [job.shards] * len(plan.students)), 0
    done = total - sum(todo.values())
    for first, size in _run_blocks(blocks, plan, workers):
        done, written = done + todo[first], written + size
        if on_progress is not None:
            on_progress(done, total, written)
    return job.finish()


def _run_blocks(blocks: Sequence[list[int]], plan: RayJob, workers: int | None) -> Iterator[tuple[int, int]]:
    """The first shard of each block that is written, as it is, and how many bytes that were."""
    if not blocks:
        return
    if not ray.is_initialized():
        ray.init()
    gpus = int(plan.run.provider in ("cuda", "CUDAExecutionProvider"))
    cpus = plan.run.num_threads or 1
    room = _count_room(cpus, gpus)
    if not 1 <= (workers or room) <= room:
        raise ShdError(
            "argument-value",
            f"workers must be 1 to {room}, as many as the cluster has {cpus} CPUs and {gpus} GPUs for; got "
            f"{workers or room}: add machines, or lower workers or threads",
        )
    data = ray.data.from_arrow([pa.table({"shard": block}) for block in blocks])
    data.context.enable_progress_bars = False
    data.context.print_on_execution_start = False
    counts = data.map_batches(
        ShardWriter,
        batch_size=None,  # whole blocks
        fn_constructor_args=(plan,),
        compute=ray.data.ActorPoolStrategy(size=min(workers or room, len(blocks))),
        num_cpus=cpus,
        num_gpus=gpus or None,
    )
    for row in counts.iter_rows():
        if row["code"]:
            raise ShdError(row["code"], row["message"])
        yield int(row["first"]), int(row["bytes"])


def _count_room(cpus: int, gpus: int) -> int:
    cluster = ray.cluster_resources()  # type: ignore[no-untyped-call]
    room = int(cluster.get("CPU", 0)) // cpus
    return min(room, int(cluster.get("GPU", 0)) // gpus) if gpus else room
