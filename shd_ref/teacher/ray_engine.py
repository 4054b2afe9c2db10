"""Precompute on a Ray cluster: Ray Data deals shards to actors that each hold the teacher.

One input row is one shard; shards whose samples run in common batches are one block, so the bytes are those of a
single process. Maps never pass through Ray: an actor writes its shards and their receipts to the cache and returns
two numbers. So Ray may lose and repeat whatever it likes: what is committed stays, and the same call resumes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from shd_ref.cache import CacheWriter
from shd_ref.errors import ShdError
from shd_ref.teacher.buckets import share_shards
from shd_ref.teacher.destination import check_destination
from shd_ref.teacher.job import adopt_plans
from shd_ref.teacher.precompute import OnProgress, PrecomputeJob, finish_cache
from shd_ref.teacher.run import PrecomputeOptions, RunOptions, TeacherRun
from shd_ref.teacher.sources import Arrays, Source
from shd_ref.teacher.summary import PrecomputeSummary

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
        out: the cache.
        options: what to make of the teacher.
        run: how to run it.
    """

    teacher: Path
    open_inputs: OpenInputs
    out: str | os.PathLike[str]
    options: PrecomputeOptions
    run: RunOptions

    def prepare(self, on_read: Callable[[int, int], None] | None = None) -> PrecomputeJob:
        """Load the teacher, read the inputs, and compare the graph with the reference."""
        options = adopt_plans(self.out, self.options, self.run)
        return PrecomputeJob(TeacherRun(self.teacher, self.open_inputs(), options, self.run, on_read))


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
    started = time.monotonic()
    run = run or RunOptions()
    run = replace(run, num_threads=run.num_threads or 1)
    check_destination(out, Path(teacher), options, run)
    plan = RayJob(Path(teacher), open_inputs, out, options, run)
    job = plan.prepare(on_read)
    writer = CacheWriter(plan.out, job.manifest)  # before the actors: they adopt its plans
    share = share_shards(job.manifest.shards.num_shards, *run.share)
    lost = set(writer.missing_shards()).intersection(share)
    windows = [[shard for shard in window if shard in lost] for window in job.windows(job.window_shards)]
    blocks = [pa.table({"shard": window}) for window in windows if window]
    total, written = job.count_samples(share), 0
    done = total - job.count_samples(lost)
    if blocks:
        for count, size in _run_blocks(blocks, plan, workers):
            done, written = done + count, written + size
            if on_progress is not None:
                on_progress(done, total, written)
    return finish_cache(job, writer, plan.out, share, lost, started)


class ShardWriter:
    """The actor: a teacher that is loaded once and makes whatever shards it is given."""

    def __init__(self, plan: RayJob) -> None:
        self._plan = plan
        self._opened: tuple[PrecomputeJob, CacheWriter] | None = None

    def __call__(self, block: dict[str, NDArray[Any]]) -> dict[str, list[Any]]:
        """Write the shards of one block; how many samples and bytes that were, or what went wrong.

        Errors are returned, as Ray would keep no more than their text, and repeat what cannot succeed.
        """
        try:
            samples, written = self._write([int(shard) for shard in block["shard"]])
        except ShdError as error:
            return {"samples": [0], "bytes": [0], "code": [error.code], "message": [str(error)]}
        return {"samples": [samples], "bytes": [written], "code": [""], "message": [""]}

    def _write(self, shards: list[int]) -> tuple[int, int]:
        if self._opened is None:  # not when the actor is made, where errors cannot be returned
            prepared = self._plan.prepare()
            self._opened = prepared, CacheWriter(self._plan.out, prepared.manifest)
        job, writer = self._opened
        written = 0

        def note(_done: int, _total: int, size: int) -> None:
            nonlocal written
            written = size

        job.write_shards(writer, shards, note)
        return job.count_samples(shards), written


def _run_blocks(blocks: list[pa.Table], plan: RayJob, workers: int | None) -> Iterator[tuple[int, int]]:
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
    data = ray.data.from_arrow(blocks)
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
        yield int(row["samples"]), int(row["bytes"])


def _count_room(cpus: int, gpus: int) -> int:
    cluster = ray.cluster_resources()  # type: ignore[no-untyped-call]
    room = int(cluster.get("CPU", 0)) // cpus
    return min(room, int(cluster.get("GPU", 0)) // gpus) if gpus else room
