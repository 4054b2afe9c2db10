"""Precompute on a Ray cluster: Ray Data deals shards to actors that hold the teacher.

An actor writes shards and receipts itself: Ray may lose and repeat any of them, and the same call resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from shd_ref.cache.storage.storage import is_address
from shd_ref.errors import ShdError, argument_value
from shd_ref.teacher.precompute.engine import JobOrder, OnProgress, OnRead, PrecomputeJob, PrecomputeSummary

try:
    import pyarrow as pa  # type: ignore[import-untyped]
    import ray
    import ray.data
except ImportError as error:
    raise ShdError(
        "dependency-missing", f"--engine ray needs the package {error.name}: pip install '.[ray]' (in a checkout)"
    ) from error


@dataclass(frozen=True)
class RayEngine:
    """Runs ``precompute`` by actors on the Ray cluster that this process is connected to, or on a new local one.

    Teacher and cache must have the same path or address on all machines; inputs are given as what opens them, and
    every actor reads them once for keys and lengths. An actor takes ``num_threads`` CPUs (1 by default), and one GPU
    for provider ``cuda``. There are ``workers`` of them; None: as many as the cluster has room for. An error in an
    actor is raised here, and progress is reported after every shard, reading only in this process.
    """

    workers: int | None = None

    def __call__(self, order: JobOrder, on_progress: OnProgress | None, on_read: OnRead | None) -> PrecomputeSummary:
        if not callable(order.inputs):
            raise argument_value("inputs must be what opens them, as every actor does; got opened ones")
        out, others = order.out, tuple(path.absolute() for path in order.options.with_teachers)
        order = replace(
            order,
            teacher=order.teacher.absolute(),
            out=out if isinstance(out, str) and is_address(out) else Path(out).absolute(),
            options=replace(order.options, with_teachers=others),
            run=replace(order.run, num_threads=order.run.num_threads or 1),
        )
        job = order.prepare(on_read)  # it makes the cache too: the actors adopt its plans
        total, written = job.count_samples(job.shards), 0
        done = total - job.count_samples(job.missing)
        for shard, size, is_own in _run_shards(sorted(job.missing), order, self.workers):
            job.written.update([shard] * is_own)
            done, written = done + job.count_samples([shard]), written + size
            if on_progress is not None:
                on_progress(done, total, written)
        return job.finish()


class ShardWriter:
    """The actor: a teacher that is loaded once and makes the shards it is given."""

    def __init__(self, order: JobOrder) -> None:
        self._order = order
        self._job: PrecomputeJob | None = None

    def __call__(self, block: dict[str, NDArray[Any]]) -> dict[str, list[Any]]:
        """Write a shard; its bytes, or an error, of which Ray would keep only the text."""
        (shard,) = (int(number) for number in block["shard"])
        size, is_own, code, message = 0, False, "", ""
        try:
            if self._job is None:  # not when the actor is made, where errors cannot be returned
                self._job = self._order.prepare()
            size = self._job.write(self._job.find_missing([shard]))
            is_own = shard in self._job.written
        except ShdError as error:
            code, message = error.code, str(error)
        return {"shard": [shard], "bytes": [size], "own": [is_own], "code": [code], "message": [message]}


def _run_shards(shards: Sequence[int], order: JobOrder, workers: int | None) -> Iterator[tuple[int, int, bool]]:
    """Each shard as it is written, with its bytes, and whether it was an actor of this job that wrote it."""
    if not shards:
        return
    if not ray.is_initialized():
        ray.init()
    gpus = int(order.run.provider in ("cuda", "CUDAExecutionProvider"))
    cpus = order.run.num_threads or 1
    cluster = ray.cluster_resources()  # type: ignore[no-untyped-call]
    room = int(cluster.get("CPU", 0)) // cpus
    room = min(room, int(cluster.get("GPU", 0))) if gpus else room
    if not 1 <= (workers or room) <= room:
        raise argument_value(
            f"workers must be 1 to {room}, as many as the cluster has {cpus} CPUs and {gpus} GPUs for; got "
            f"{workers or room}: add machines, or lower workers or threads"
        )
    data = ray.data.from_arrow([pa.table({"shard": [shard]}) for shard in shards])
    data.context.enable_progress_bars = False
    data.context.print_on_execution_start = False
    counts = data.map_batches(
        ShardWriter,
        batch_size=None,  # a whole block, which is one shard
        fn_constructor_args=(order,),
        compute=ray.data.ActorPoolStrategy(size=min(workers or room, len(shards))),
        num_cpus=cpus,
        num_gpus=gpus or None,
    )
    for row in counts.iter_rows():
        if row["code"]:
            raise ShdError(row["code"], row["message"])
        yield int(row["shard"]), int(row["bytes"]), bool(row["own"])
