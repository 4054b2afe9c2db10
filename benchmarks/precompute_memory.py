"""Does memory grow with the data? Peak memory of `shd precompute` over N and 10 N samples, from every kind of file.

Each run is a separate process; the figure is its peak of private memory (VmHWM counts mapped files too, so the peak
of RssAnon is sampled beside it). The rival is the same data loaded whole before the run.

Prints a table and writes ``results/precompute_memory.json``.

    python -m benchmarks.precompute_memory [--samples 400] [--length 64]
"""

from __future__ import annotations

import argparse
import json
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


def make_teacher(folder: Path, length: int) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--length", type=int, default=64)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(1), "samples": arguments.samples, "length": arguments.length}
    report["megabytes"] = {}
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
