"""Maps, logits and a hidden state of 10,000 samples: does memory stay flat, and is a killed run's cache the same?

The teacher is stories260K: trained, causal, 5 layers of 8 heads, 512 classes. Samples are windows of stories it
wrote, 8 to 96 tokens long. `shd precompute` stores maps for 4 heads, the 32 likeliest classes of each row with the
rest, and the hidden state that enters block 3 in int8, of a tenth of the samples and of all. Then the same job is
killed with SIGKILL at several moments and resumed each time; its files are compared with those of the undisturbed
run, byte by byte. Peaks are of private memory, sampled from outside.

Prints a table and writes ``results/whole_cache.json``. python -m benchmarks.whole_cache [--samples 10000]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.binding.stories import load_stories  # the teacher's architecture, which tests use too

from benchmarks import STORIES, machine, result_path, save
from shd_ref.cache import CacheReader, verify_cache
from shd_ref.cache.audit import list_cache
from shd_torch import export_teacher

RESULT = result_path(__file__)
SHORTEST, LONGEST = 8, 96
TARGET = 1.25  # peak over ten times the data


def write_samples(path: Path, count: int) -> int:
    """Windows of mixed lengths as JSON lines; how many tokens they have."""
    tokens = np.load(STORIES / "self_sampled_1024x256_uint16.npy").astype(np.int64)
    rng = np.random.default_rng(0)
    total = 0
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            story, length = rng.integers(len(tokens)), int(rng.integers(SHORTEST, LONGEST + 1))
            start = int(rng.integers(tokens.shape[1] - length + 1))
            file.write(json.dumps({"input_ids": tokens[story, start : start + length].tolist()}) + "\n")
            total += length
    return total


def command_of(folder: Path, samples: Path, out: Path) -> list[str]:
    """One run of ``shd precompute``."""
    options = ["--student-heads", "4", "--logits", "topk", "--hidden", "3", "--hidden-codec", "int8"]
    options += ["--batch-tokens", "4096", "--samples-per-shard", "256", "--out", str(out)]
    program = [sys.executable, "-c", "from shd_ref.cli import main; main()", "precompute"]
    return [*program, str(folder / "teacher.onnx"), "--inputs", str(samples), *options]


def run_whole(command: list[str]) -> tuple[float, float]:
    """Seconds, and the peak of private memory in MB."""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        peak = max(peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
        time.sleep(0.02)
    if process.wait():
        raise SystemExit((process.stderr.read() if process.stderr else b"").decode())
    return time.perf_counter() - started, peak / 1000


def run_killed(command: list[str], out: Path, moments: int) -> int:
    """Kill the run so often, always after it has committed something more, and finish it; shards at the last kill."""
    chosen, committed = random.Random(0), 0
    for _ in range(moments):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and count_receipts(out) <= committed:
            time.sleep(0.005)
        time.sleep(chosen.uniform(0, 0.5))
        process.kill()
        if process.wait() != -signal.SIGKILL:
            raise SystemExit("the run ended before it could be killed: give more samples")
        committed = count_receipts(out)
    run_whole(command)
    return committed


def count_receipts(out: Path) -> int:
    """Shards that are committed."""
    return len(list((out / "receipts").glob("*.json")))


def contents(folder: Path) -> dict[str, bytes]:
    """All files by name, except the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=5)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(os.cpu_count() or 1), "samples": arguments.samples}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher = load_stories(STORIES / "stories260K.bin")
        export_teacher(teacher, {"input_ids": torch.ones(2, 16, dtype=torch.int64)}, folder / "teacher.onnx")
        peaks = []
        for count in (arguments.samples // 10, arguments.samples):
            tokens = write_samples(folder / f"{count}.jsonl", count)
            out = folder / f"cache-{count}"
            seconds, peak = run_whole(command_of(folder, folder / f"{count}.jsonl", out))
            peaks.append(peak)
            print(f"{count:6} samples, {tokens:7} tokens: {seconds:6.1f} s, peak {peak:6.1f} MB")
            report[f"{count} samples"] = {"tokens": tokens, "seconds": round(seconds, 1), "peak_megabytes": peak}
        assert verify_cache(out).ok
        command = command_of(folder, folder / f"{arguments.samples}.jsonl", folder / "killed")
        killed_at = run_killed(command, folder / "killed", arguments.kills)
        same = contents(out) == contents(folder / "killed")
        listed, reader = list_cache(out), CacheReader(out)
        report |= {
            "peak_ratio": round(peaks[1] / peaks[0], 3),
            "kills": arguments.kills,
            "shards_at_last_kill": f"{killed_at} of {reader.manifest.shards.num_shards}",
            "identical": same,
            "errors": listed.to_json()["errors"],
            "bytes_a_token": {form: round(size / tokens, 1) for form, size in listed.coded_by_form.items()},
        }
    print(f"peak over ten times the data: {report['peak_ratio']:.2f} (target {TARGET})")
    print(f"killed {arguments.kills} times (at {report['shards_at_last_kill']} shards), resumed: identical {same}")
    print(f"bytes a token: {report['bytes_a_token']}")
    save(report, RESULT)


if __name__ == "__main__":
    main()
