"""What does a whole run of ``shd precompute`` cost over plain forward passes of the teacher, start and seal included?

The start: graph opened, inputs read and hashed, the first batch compared with the reference, until two batches are
there. Then what a batch costs until the cache is sealed (maps packed, checksums, shards of 226 MB written to a
local folder, codec error measured), over plain forward passes of the same batches just before and after. "steady" is
the same from the middle of the first shard to the middle of the second, as in a run of any length: one shard is
written meanwhile, one codec error measured. What it leaves out is the last shard, for which all threads wait.

Beside it the usual way: PyTorch's eager attention with ``output_attentions``, whose maps are saved in float16.

PyTorch runs in a child process, so that this one resembles ``shd precompute``: with PyTorch and the exporter loaded,
writing the same bytes took up to five times as long. Prints a table and writes ``precompute_overhead.json`` beside
this file.

    python -m benchmarks.precompute_overhead [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import machine, result_path, save
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.session import open_session

RESULT = result_path(__file__)
BATCHES = 96
PER_SHARD = 48  # batches: a shard of 226 MB, as by default
TARGETS = {6: 1.10, 4: 1.15}  # over plain: pairs, and two rounds of merges
START_TARGET = 2.0  # seconds
PLAIN, EAGER = "plain forward", "eager, all maps in float16"


@cache
def torch_teacher() -> tuple[str, Any, int, int]:
    """Name, model, batch and length; only the process of PyTorch calls this."""
    from benchmarks.squeeze_overhead import teachers

    name, given = next(iter(teachers().items()))
    return name, *given


def begin_torch(folder: Path, threads: int) -> tuple[str, int, int, dict[str, Any]]:
    """Export the teacher; its name, batch and length, and the machine."""
    import onnx
    import torch

    from benchmarks.squeeze_overhead import export

    torch.set_num_threads(threads)
    name, model, batch, length = torch_teacher()
    onnx.save(export(model), folder / "teacher.onnx")
    return name, batch, length, machine(threads)


def save_eager(ids: NDArray[np.int64], out: Path) -> float:
    """All maps as PyTorch gives them, in float16, a file of safetensors a batch; the seconds that this took."""
    import safetensors.torch
    import torch

    _, model, batch, _ = torch_teacher()
    model.eval()
    out.mkdir()
    started = time.perf_counter()
    with torch.inference_mode():
        for first in range(0, len(ids), batch):
            chosen = torch.from_numpy(ids[first : first + batch])
            maps = model(chosen, torch.ones_like(chosen), output_attentions=True).attentions
            tensors = {str(layer): probs.half() for layer, probs in enumerate(maps)}
            safetensors.torch.save_file(tensors, out / f"{first:06d}.safetensors")
    return time.perf_counter() - started


def _tick(ticks: list[tuple[int, float]], samples: int, *_: int) -> None:
    ticks.append((samples, time.perf_counter()))


def size_of(folder: Path) -> float:
    """Megabytes of all its files."""
    return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6, 1)


class Runs:
    """Whole runs by name: seconds of the start, seconds a batch, ratios to plain passes, and megabytes.

    Args:
        teacher: the graph.
        ids: token ids of the whole data set.
        batch: samples in a batch.
        threads: of every run.
    """

    def __init__(self, teacher: Path, ids: NDArray[np.int64], batch: int, threads: int) -> None:
        self._teacher, self._batch, self._threads = teacher, batch, threads
        self._inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        self._session = open_session(teacher, num_threads=threads)
        self.starts: dict[str, list[float]] = {PLAIN: []}
        self.batches: dict[str, list[float]] = {PLAIN: []}
        self.ratios: dict[str, list[float]] = {PLAIN: [1.0]}
        self.steady: dict[str, list[float]] = {PLAIN: [1.0]}
        self.sizes = {PLAIN: 0.0}
        self.run_plain()  # a cold one
        self._before = self.run_plain()

    def run_plain(self) -> float:
        """Seconds a batch of plain passes."""
        started = time.perf_counter()
        for first in range(0, BATCHES * self._batch, self._batch):
            self._session.run(None, self._cut(first))
        return (time.perf_counter() - started) / BATCHES

    def start_plain(self) -> None:
        """Open the graph and run two batches."""
        started = time.perf_counter()
        session = open_session(self._teacher, num_threads=self._threads)
        for first in (0, self._batch):
            session.run(None, self._cut(first))
        self.starts[PLAIN].append(time.perf_counter() - started)

    def run_precompute(self, heads: int, out: Path) -> None:
        """A whole run for a student of so many heads."""
        name, ticks = f"precompute 12 -> {heads}", [(0, time.perf_counter())]
        precompute(
            self._teacher,
            self._inputs,
            out,
            PrecomputeOptions(num_student_heads=heads),
            RunOptions(batch_size=self._batch, num_threads=self._threads, samples_per_shard=PER_SHARD * self._batch),
            on_progress=partial(_tick, ticks),
        )
        begun, ended = ticks[0][1], time.perf_counter()
        when = {samples // self._batch: second for samples, second in reversed(ticks[1:])}
        self.starts.setdefault(name, []).append(when[2] - begun)
        # The first two batches are part of the start.
        taken = (ended - when[2]) / (BATCHES - 2)
        self.note(name, taken, out, (when[PER_SHARD * 3 // 2] - when[PER_SHARD // 2]) / PER_SHARD)

    def note(self, name: str, taken: float, out: Path, steady: float | None = None) -> None:
        """Compare a run that just ended, of so many seconds a batch, with plain passes before and after it."""
        after = self.run_plain()
        self.batches[PLAIN].append(after)
        self.batches.setdefault(name, []).append(taken)
        self.ratios.setdefault(name, []).append(2 * taken / (self._before + after))
        self.steady.setdefault(name, []).append(2 * (steady or taken) / (self._before + after))
        self._before, self.sizes[name] = after, size_of(out)
        shutil.rmtree(out)

    def _cut(self, first: int) -> dict[str, NDArray[np.int64]]:
        return {name: array[first : first + self._batch] for name, array in self._inputs.items()}

    def figures(self) -> dict[str, dict[str, float]]:
        """Medians by name."""
        return {
            name: {
                "seconds_of_the_start": round(float(np.median(self.starts.get(name, [0.0]))), 2),
                "milliseconds_a_batch": round(1000 * float(np.median(taken)), 2),
                "ratio": round(float(np.median(self.ratios[name])), 3),
                "lowest_ratio": round(min(self.ratios[name]), 3),
                "highest_ratio": round(max(self.ratios[name]), 3),
                "steady_ratio": round(float(np.median(self.steady[name])), 3),
                "megabytes": self.sizes[name],
            }
            for name, taken in self.batches.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool, tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        name, batch, length, machine = pool.submit(begin_torch, folder, arguments.threads).result()
        ids = np.random.default_rng(0).integers(1000, 20000, (BATCHES * batch, length))
        runs = Runs(folder / "teacher.onnx", ids, batch, arguments.threads)
        for turn in range(arguments.rounds):
            runs.start_plain()
            for heads in TARGETS:
                runs.run_precompute(heads, folder / f"{turn}-{heads}")
            out = folder / f"{turn}-eager"
            runs.note(EAGER, pool.submit(save_eager, ids, out).result() / BATCHES, out)
    figures = runs.figures()
    print(f"\nwhole runs, {name}, {BATCHES} batches")
    print(f"{'':28}{'start, s':>10}{'ms a batch':>12}{'ratio':>8}  lowest, highest{'steady':>8}{'MB':>9}")
    for variant, row in figures.items():
        start, taken, *ratios, size = row.values()
        print(f"{variant:28}{start:10.2f}{taken:12.1f}{ratios[0]:8.2f}{ratios[1]:8.2f}{ratios[2]:9.2f}", end="")
        print(f"{ratios[3]:8.2f}{size:9.1f}")
    for heads, target in TARGETS.items():
        row = figures[f"precompute 12 -> {heads}"]
        beyond = row["seconds_of_the_start"] - figures[PLAIN]["seconds_of_the_start"]
        print(f"12 -> {heads}: steady {row['steady_ratio']:.2f} (target {target:.2f}, ", end="")
        print(f"{'met' if row['steady_ratio'] <= target else 'missed'}), with the end {row['ratio']:.2f};", end="")
        print(" start beyond opening the graph and ", end="")
        verdict = "met" if beyond <= START_TARGET else "missed"
        print(f"two plain batches {beyond:.2f} s (target {START_TARGET:.1f} s, {verdict})")
    report = {"teacher": name, "machine": machine, "rounds": arguments.rounds, "figures": figures}
    save(report, RESULT)


if __name__ == "__main__":
    main()
