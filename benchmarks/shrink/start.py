"""What is a student worth before any training, by where its weights come from?

The teacher is stories260K (5 layers of 8 heads over 4 key/value heads, width 64). Students are made from 64 of its
sequences; losses are cross entropies in nats a token on 128 others. Starts: the closed form, with and without
alignment; of each group the head with the largest output, and for width the channels with the
largest activation; mean pooling of a group's weights; Minitron's importance of heads; random weights.

Prints a table and writes ``results/shrink/start.json``, run by run; a stopped run with the same settings
resumes. python -m benchmarks.shrink.start [--samples 64] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.shrink.stories import load_llama, measure_loss  # the teacher's conversion, which tests use too
from torch import Tensor

from benchmarks import STORIES, result_path, save
from benchmarks.shrink.rivals import RIVALS, shrink

RESULT = result_path(__file__)
STUDENTS: dict[str, dict[str, Any]] = {
    "8 -> 4 heads": {"heads": 4},
    "8 -> 2 heads": {"heads": 2},
    "layers 0, 2, 4": {"layers": [0, 2, 4]},
    "4 heads, layers 0, 2, 4": {"heads": 4, "layers": [0, 2, 4]},
    "4 heads, width 48": {"heads": 4, "hidden": 48},
    "4 heads, width 32": {"heads": 4, "hidden": 32},
}
STARTS: dict[str, dict[str, Any]] = {
    "closed form": {"align": False},
    "closed form, aligned": {},
    "kept heads": {"align": False, **RIVALS["kept heads"]},
    "kept heads, aligned": RIVALS["kept heads"],
    "mean pooling": {"align": False, **RIVALS["mean pooling"]},
    "Minitron importance": {"align": False, **RIVALS["Minitron importance"]},
    "random": {},
}


def start_student(teacher: Any, data: dict[str, Tensor], student: dict[str, Any], start: str) -> Any:
    if start != "random":
        return shrink(teacher, data, **student, **STARTS[start]).student
    made = shrink(teacher, {name: part[:1] for name, part in data.items()}, **student, align=False).student
    torch.manual_seed(0)
    return type(made)(made.config).eval()


def print_table(runs: dict[str, float], teacher: float) -> None:
    print(f"\nteacher {teacher:.3f}\n{'nats before any training':28}" + "".join(f"{start:>22}" for start in STARTS))
    for student in STUDENTS:
        found = [runs.get(f"{student}: {start}") for start in STARTS]
        print(f"{student:28}" + "".join(f"{'' if loss is None else f'{loss:.3f}':>22}" for loss in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--valid", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = {"samples": arguments.samples, "valid": arguments.valid}
    tokens = torch.from_numpy(np.load(STORIES / "self_sampled_1024x256_uint16.npy").astype(np.int64))
    teacher, valid = load_llama(STORIES / "stories260K.bin"), tokens[-arguments.valid :, :128]
    report: dict[str, Any] = {
        "settings": settings,
        "machine": {"torch": torch.__version__, "cpu": platform.machine()},
    }
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text(encoding="utf-8"))
        if before["settings"] != settings:
            raise SystemExit(f"{arguments.out} was made with {before['settings']}: remove it, or give --out")
        report = before
    report.setdefault("teacher", measure_loss(teacher, valid))
    runs = report.setdefault("runs", {})
    for student, sizes in STUDENTS.items():
        for start in STARTS:
            name = f"{student}: {start}"
            if name in runs:
                continue
            made = start_student(teacher, {"input_ids": tokens[: arguments.samples]}, sizes, start)
            runs[name] = measure_loss(made, valid)
            print(f"{name}: {runs[name]:.4f}", flush=True)
            save(report, arguments.out)
    print_table(runs, report["teacher"])


if __name__ == "__main__":
    main()
