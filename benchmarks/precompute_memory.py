"""Does memory grow with the data? Peak memory of `shd precompute` over N and 10 N samples, from every kind of file.

Each run is a separate process; the figure is its peak of private memory (VmHWM counts mapped files too, so the peak
of RssAnon is sampled beside it). The rival is the same data loaded whole before the run.

And what do the checks before the first record take on long samples? Peak of resident memory and seconds of processor
time of a process that makes the checks, and of one that makes a whole cache, four samples in batches of one, by a
teacher of 2 layers and 8 heads, width 256. The rival is onnxruntime's plain pass of the same graph over the same
samples. ``--before`` names a checkout of an older version to measure beside it.

Prints tables and writes ``results/precompute_memory.json``.

    python -m benchmarks.precompute_memory [--samples 400] [--length 64] [--lengths 512 1024 2048] [--before FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
import transformers

from benchmarks import machine, result_path, save
from shd_torch import export_teacher

RESULT = result_path(__file__)
TARGET = 1.25  # peak over ten times the data
WHOLE = """
import sys
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.sources import open_source
rows = list(open_source(sys.argv[2]).rows(["attention_mask", "input_ids", "features"]))
import numpy as np
arrays = {name: np.stack([row[name] for row in rows]) for name in ("attention_mask", "input_ids")}
run = RunOptions(samples_per_shard=64, num_threads=1)
precompute(sys.argv[1], arrays, sys.argv[3], PrecomputeOptions(2), run)
"""


LONG = """
import resource, sys
import numpy as np
from pathlib import Path
kind, teacher, length, out = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
tokens = np.random.default_rng(0).integers(1, 100, (4, length))
inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
if kind == "plain":
    from shd_ref.teacher.session import open_session
    session = open_session(teacher, num_threads=1)
    for row in range(4):
        session.run(None, {name: array[row : row + 1] for name, array in inputs.items()})
else:
    from shd_ref.teacher.precompute.engine import PrecomputeJob
    from shd_ref.teacher.options import PrecomputeOptions, RunOptions
    options = PrecomputeOptions(4, form=sys.argv[5])
    job = PrecomputeJob(teacher, inputs, out, options, RunOptions(batch_size=1, num_threads=1))
    if kind == "whole":
        job.write(job.missing)
        job.finish()
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_maxrss / 1000, used.ru_utime + used.ru_stime)
"""


def make_teacher(folder: Path, length: int, width: int = 32, heads: int = 4) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        intermediate_size=4 * width if width > 32 else width,
        max_position_embeddings=length,
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    ids = torch.ones(2, min(32, length // 2), dtype=torch.int64)
    export_teacher(model, {"input_ids": ids, "attention_mask": ids}, folder / "teacher.onnx")
    return folder / "teacher.onnx"


def write_data(folder: Path, count: int, length: int) -> dict[str, Path]:
    """The same rows as .npz, .parquet and .jsonl; ``features`` is 16 KB a row that the teacher does not take."""
    rng = np.random.default_rng(0)
    arrays = {
        "input_ids": rng.integers(0, 100, (count, length)),
        "attention_mask": np.ones((count, length), dtype=np.int64),
        "features": rng.integers(0, 9, (count, 2048)),
    }
    paths = {kind: folder / f"{count}.{kind}" for kind in ("npz", "parquet", "jsonl")}
    np.savez(paths["npz"], **arrays)
    table = pa.table({name: list(array) for name, array in arrays.items()})
    pyarrow.parquet.write_table(table, paths["parquet"], row_group_size=1000)
    with paths["jsonl"].open("w") as file:
        for row in range(count):
            file.write(json.dumps({name: array[row].tolist() for name, array in arrays.items()}) + "\n")
    return paths


def peak_memory(command: list[str]) -> dict[str, float]:
    """Peaks in MB: of private memory (sampled) and of resident memory (the kernel's own count)."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    private = resident = 0
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        found = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "VmHWM"))}
        private, resident = max(private, found.get("RssAnon", 0)), max(resident, found.get("VmHWM", 0))
        time.sleep(0.02)
    if process.wait():
        raise SystemExit((process.stderr.read() if process.stderr else b"").decode())
    return {"private": private / 1000, "resident": resident / 1000}


def measure_long(lengths: list[int], before: str | None) -> dict[str, dict[str, list[float]]]:
    """Megabytes and seconds of processor time by length and kind of run."""
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        teacher = make_teacher(Path(name), max(lengths), 256, 8)
        kinds = [("plain", "maps"), *((kind, form) for kind in ("checks", "whole") for form in ("maps", "factored"))]
        for length in lengths:
            row = found.setdefault(str(length), {})
            for kind, form in kinds:
                for tree in (None,) if kind == "plain" or before is None else (before, None):
                    title = f"{kind}{f' {form}' * (kind != 'plain')}{', before' * (tree is not None)}"
                    out = f"{name}/{length}-{title}".replace(" ", "-")
                    command = [sys.executable, "-c", LONG, kind, str(teacher), str(length), out, form]
                    path = {"PYTHONPATH": tree} if tree else {}
                    ran = subprocess.run(
                        command, cwd=name, env=os.environ | path, capture_output=True, text=True, check=True
                    )
                    row[title] = [round(float(number), 1) for number in ran.stdout.split()]
                    print(f"{length:6} {title:28}{row[title][0]:8.0f} MB{row[title][1]:8.1f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--before")
    parser.add_argument("--long-only", action="store_true", help="leave the other figures as they are")
    arguments = parser.parse_args()
    long = {"machine": machine(1), "runs": measure_long(arguments.lengths, arguments.before)}
    if arguments.long_only:
        save(json.loads(RESULT.read_text()) | {"long": long}, RESULT)
        return
    report: dict[str, Any] = {"long": long, "samples": arguments.samples, "length": arguments.length, "megabytes": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher = make_teacher(folder, arguments.length)
        sizes = (arguments.samples, 10 * arguments.samples)
        data = {count: write_data(folder, count, arguments.length) for count in sizes}
        print(f"{'':22}{'N':>10}{'10 N':>10}{'ratio':>8}   peak of private memory, MB")
        for kind in ("npz", "parquet", "jsonl", "loaded whole"):
            peaks = []
            for count in sizes:
                out = str(folder / f"cache-{kind}-{count}")
                if kind == "loaded whole":
                    command = [sys.executable, "-c", WHOLE, str(teacher), str(data[count]["jsonl"]), out]
                else:
                    command = [
                        sys.executable,
                        "-c",
                        "from shd_ref.cli import main; main()",
                        "precompute",
                        str(teacher),
                    ]
                    command += ["--inputs", str(data[count][kind]), "--student-heads", "2", "--out", out]
                    command += ["--samples-per-shard", "64", "--threads", "1"]
                peaks.append(peak_memory(command))
            ratio = peaks[1]["private"] / peaks[0]["private"]
            report["megabytes"][kind] = {"N": peaks[0], "10 N": peaks[1], "ratio": round(ratio, 3)}
            print(f"{kind:22}{peaks[0]['private']:10.0f}{peaks[1]['private']:10.0f}{ratio:8.2f}")
    streamed = [row["ratio"] for kind, row in report["megabytes"].items() if kind != "loaded whole"]
    print(f"target {TARGET}: {'met' if max(streamed) <= TARGET else 'missed'}")
    save(report, RESULT)


if __name__ == "__main__":
    main()
