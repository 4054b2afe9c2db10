"""Which part of the teacher's attention does SHD teach that a start lacks? Layer by layer, the KL of the maps.

The students and the training of ``training.py`` (4 heads, layers 0, 2, 4 of stories260K): the KL from the teacher's
merged maps to the student's, in nats a row, mean over rows and heads, on 128 sequences that nothing else saw; at the
start, after KD and after KD + SHD. Differences are paired by seed, with the 95% interval of Student's t.

Prints a table and writes ``maps.json`` beside this file. python -m benchmarks.shrink.maps [--steps 200] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.shrink.training import LENGTH, half_interval, load_source, make_start, train
from shd_torch import OnlineTeacher, capture_attention, layer_kls

RESULT = Path(__file__).with_suffix(".json")
SIZE = "width 64"
STARTS = ("closed form, aligned", "kept heads", "random")


@torch.no_grad()
def measure_maps(student: Any, report: dict[str, Any]) -> list[float]:
    """The KL of each layer of the student."""
    teacher, tokens = load_source()
    online = OnlineTeacher.for_student(teacher, report)
    found: list[list[float]] = []
    for ids in tokens[-128:, :LENGTH].split(16):
        with capture_attention(student.eval()) as captured:
            student(input_ids=ids, use_cache=False)
        terms = layer_kls(captured, online(input_ids=ids, use_cache=False), beta=1.0)
        found.append([float(term) / student.config.num_attention_heads for term in terms.values()])
    return [statistics.mean(column) for column in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'KL of the maps, layers':34}{'0':>16}{'2':>16}{'4':>16}{'loss':>9}")
    for start in STARTS:
        runs: dict[str, list[list[float]]] = {"before": [], "KD": [], "KD + SHD": []}
        losses: dict[str, list[float]] = {"before": [], "KD": [], "KD + SHD": []}
        for seed in range(arguments.seeds):
            student, report = make_start(SIZE, start, seed)
            runs["before"].append(measure_maps(student, report))
            for name, shd in (("KD", False), ("KD + SHD", True)):
                taught, found = train(SIZE, start, shd, arguments.steps, seed)
                runs[name].append(measure_maps(taught, report))
                losses[name].append(found[str(arguments.steps)])
                losses["before"].append(found["0"])
        for name, own in runs.items():
            columns = [list(column) for column in zip(*own, strict=True)]
            cells = "".join(f"{statistics.mean(column):16.3f}" for column in columns)
            print(f"{start + ', ' + name:34}{cells}{statistics.mean(losses[name]):9.3f}", flush=True)
        gains = [
            [kd - both for kd, both in zip(*pair, strict=True)]
            for pair in zip(zip(*runs["KD"], strict=True), zip(*runs["KD + SHD"], strict=True), strict=True)
        ]
        cells = "".join(f"{f'{statistics.mean(gain):.3f} +- {half_interval(gain):.3f}':>16}" for gain in gains)
        print(f"{'  nearer by SHD':34}{cells}", flush=True)
        rows[start] = {"kl": runs, "loss": losses}
    settings = {"steps": arguments.steps, "seeds": arguments.seeds, "size": SIZE}
    machine = {"processor": platform.machine(), "torch": torch.__version__}
    result = {"settings": settings, "machine": machine, "starts": rows}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
