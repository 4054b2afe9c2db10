"""What does precompute cost, and what divides it? Workers 1 and 2, and growth with length, heads and layers.

Workers are processes of `--shards i/n` into one folder, or Ray actors, that each have one thread; figures are samples
a second from the first batch on (start-up apart), relative to one worker of the same kind, in runs that take turns.
Growth is the time of a sample relative to the smallest teacher of its row; the rival is a plain onnxruntime forward
of the same graph. Prints tables and writes ``results/precompute_scaling.json``.

    python -m benchmarks.precompute_scaling [--repeats 3] [--samples 128] [--ray]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from benchmarks import machine, result_path, save
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import PrecomputeJob, precompute
from shd_ref.teacher.session import open_session
from shd_torch import export_teacher

RESULT = result_path(__file__)
BASE = {"length": 64, "heads": 4, "layers": 2}
GROWTH = {"length": (64, 128, 256), "heads": (4, 8, 16), "layers": (2, 4, 8)}
HEAD_WIDTH = 64
PART = """
import sys
from pathlib import Path
import numpy as np
from shd_ref.teacher.precompute.engine import PrecomputeJob
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
teacher, data, out, part, parts = sys.argv[1:]
run = RunOptions(batch_size=8, samples_per_shard=32, num_threads=1, shards=(int(part), int(parts)))
job = PrecomputeJob(Path(teacher), dict(np.load(data)), out, PrecomputeOptions(2), run)
print("ready", flush=True)
sys.stdin.readline()
job.write(job.missing)
print("done", flush=True)
"""


def make_teacher(folder: Path, *, length: int, heads: int, layers: int) -> Path:
    path = folder / f"teacher-{length}-{heads}-{layers}.onnx"
    if not path.exists():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=100,
            hidden_size=HEAD_WIDTH * heads,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * HEAD_WIDTH * heads,
            max_position_embeddings=length,
        )
        model = transformers.BertModel(config, add_pooling_layer=False).eval()
        ids = torch.ones(2, length // 2, dtype=torch.int64)
        export_teacher(model, {"input_ids": ids, "attention_mask": ids}, path)
    return path


def make_data(samples: int, length: int) -> dict[str, NDArray[Any]]:
    ids = np.random.default_rng(0).integers(1, 100, (samples, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def time_workers(teacher: Path, data: Path, out: Path, workers: int) -> float:
    """Seconds from the word go, which all wait for, to the last worker's last shard."""
    command = [sys.executable, "-c", PART, str(teacher), str(data), str(out)]
    processes = [
        subprocess.Popen(
            [*command, str(part), str(workers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for part in range(workers)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    started = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
    seconds = time.perf_counter() - started
    for process in processes:
        process.communicate()
    return seconds


def time_ray(teacher: Path, data: Path, out: Path, workers: int) -> float:
    """Seconds between the first and the last block of shards that actors report."""
    from shd_ref.teacher.precompute.ray_engine import RayEngine

    times: list[tuple[float, int]] = []
    precompute(
        teacher,
        lambda: dict(np.load(data)),
        out,
        PrecomputeOptions(2),
        RunOptions(batch_size=8, samples_per_shard=32),
        engine=RayEngine(workers),
        on_progress=lambda done, _total, _size: times.append((time.perf_counter(), done)),
    )
    (first, before), (last, after) = times[0], times[-1]
    return (last - first) / max(after - before, 1)


def time_growth(folder: Path, samples: int, **shape: int) -> tuple[float, float]:
    """Seconds a sample of precompute, and of a plain forward in the same batches."""
    teacher, data = make_teacher(folder, **shape), make_data(samples, shape["length"])
    run = RunOptions(batch_size=8, samples_per_shard=32, num_threads=1)
    with tempfile.TemporaryDirectory(dir=folder) as out:
        job = PrecomputeJob(teacher, data, Path(out) / "cache", PrecomputeOptions(shape["heads"] // 2), run)
        started = time.perf_counter()
        job.write(job.missing)
        squeezed = time.perf_counter() - started
    session = open_session(str(teacher), provider="cpu", num_threads=1)
    started = time.perf_counter()
    for start in range(0, samples, 8):
        session.run(None, {name: array[start : start + 8] for name, array in data.items()})
    return squeezed / samples, (time.perf_counter() - started) / samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--ray", action="store_true", help="also Ray actors")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(1), "samples": arguments.samples, "repeats": arguments.repeats}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher, data = make_teacher(folder, length=128, heads=8, layers=4), folder / "data.npz"
        np.savez(data, **make_data(4 * arguments.samples, 128))
        engines = {"--shards": time_workers} | ({"ray": time_ray} if arguments.ray else {})
        rows = []
        for engine, measure in engines.items():
            times: dict[int, list[float]] = {1: [], 2: []}
            for repeat in range(arguments.repeats):
                for workers in times:
                    times[workers].append(measure(teacher, data, folder / f"{engine}-{repeat}-{workers}", workers))
            speed = [alone / both for alone, both in zip(times[1], times[2], strict=True)]
            rows.append({"engine": engine, "speedup_of_two": statistics.median(speed), "all": speed})
            print(f"{engine:10} two workers are {rows[-1]['speedup_of_two']:.2f}x as fast as one")
        result["workers"] = rows
        print(f"\n{'':8}{'value':>8}{'ms a sample':>14}{'growth':>9}{'forward':>10}{'against forward':>18}")
        result["growth"] = []
        for axis, values in GROWTH.items():
            measured = {
                value: [
                    time_growth(folder, arguments.samples, **{**BASE, axis: value}) for _ in range(arguments.repeats)
                ]
                for value in values
            }
            smallest = statistics.median(squeezed for squeezed, _ in measured[values[0]])
            for value, pairs in measured.items():
                seconds = statistics.median(squeezed for squeezed, _ in pairs)
                plain = statistics.median(forward for _, forward in pairs)
                ratio = statistics.median(squeezed / forward for squeezed, forward in pairs)
                row = {"axis": axis, "value": value, "seconds": seconds, "growth": seconds / smallest}
                row |= {"forward_seconds": plain, "against_forward": ratio}
                result["growth"].append(row)
                print(
                    f"{axis:8}{value:8}{1e3 * seconds:14.2f}{seconds / smallest:9.2f}{1e3 * plain:10.2f}{ratio:18.2f}"
                )
    save(result, RESULT)


if __name__ == "__main__":
    main()
