"""What is a student worth before any training, by where its weights come from?

The teacher is stories260K (5 layers of 8 heads over 4 key/value heads, width 64). Students are made from 64 of its
sequences; losses are cross entropies in nats a token on 128 others. Starts: the closed form, with and without
alignment (specs/shrink.md); of each group the head with the largest output, and for width the channels with the
largest activation; mean pooling of a group's weights; every second layer as it is; random weights.

Prints a table and writes ``shrink_start.json`` beside this file, run by run: started again with the same settings it
goes on where it stopped. python benchmarks/shrink_start.py [--samples 64] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shd_torch.shrink import shrink
from shd_torch.shrink.heads import AttentionStatistics, Squeezed
from shd_torch.shrink.merges import HeadMerge
from shd_torch.shrink.weights import AttentionWeights

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.shrink.stories import load_llama, measure_loss  # the teacher's conversion, which tests use too

RESULT = Path(__file__).with_suffix(".json")
SOURCE = Path(__file__).parents[2] / "shared" / "data" / "stories260K"
STUDENTS: dict[str, dict[str, Any]] = {
    "8 -> 4 heads": {"heads": 4},
    "8 -> 2 heads": {"heads": 2},
    "layers 0, 2, 4": {"layers": [0, 2, 4]},
    "4 heads, layers 0, 2, 4": {"heads": 4, "layers": [0, 2, 4]},
    "4 heads, width 48": {"heads": 4, "hidden": 48},
    "4 heads, width 32": {"heads": 4, "hidden": 32},
}


def pick_heads(choose: Callable[[Tensor, AttentionWeights, list[int]], AttentionWeights]) -> Callable[..., Squeezed]:
    """A rival that makes each student head from the weights of its group, one by one."""

    def squeeze(
        weights: AttentionWeights,
        merge: HeadMerge,
        statistics: AttentionStatistics,
        num_kv_heads: int,
        head_dim: int,
        **_: Any,
    ) -> Squeezed:
        energy = statistics.gram.flatten()[:: sum(len(statistics.gram) ** power for power in range(4))]
        made = [choose(energy, weights, list(group)) for group in merge.groups]
        shared = [made[h * len(made) // num_kv_heads] for h in range(num_kv_heads)]
        return Squeezed(
            AttentionWeights(
                torch.cat([each.query for each in made]),
                torch.cat([each.key for each in shared]),
                torch.cat([each.value for each in shared]),
                torch.cat([each.output for each in made]),
            ),
            "picked",
            False,
        )

    return squeeze


def keep_head(energy: Tensor, weights: AttentionWeights, group: list[int]) -> AttentionWeights:
    """The head with the largest output energy."""
    best = max(group, key=lambda head: float(energy[head]))
    kv = weights.read_by(best)
    return AttentionWeights(weights.query[[best]], weights.key[[kv]], weights.value[[kv]], weights.output[[best]])


def pool_heads(_: Tensor, weights: AttentionWeights, group: list[int]) -> AttentionWeights:
    """The mean of the group's queries, keys and values, and the sum of its outputs."""
    kv = [weights.read_by(head) for head in group]
    return AttentionWeights(
        weights.query[group].mean(0, keepdim=True),
        weights.key[kv].mean(0, keepdim=True),
        weights.value[kv].mean(0, keepdim=True),
        weights.output[group].sum(0, keepdim=True),
    )


def keep_channels(moment: Tensor, width: int, _: str) -> Tensor:
    """The channels with the largest activation in place of the principal axes."""
    best = moment.diagonal().argsort(descending=True)[:width].sort().values
    return torch.eye(len(moment), dtype=moment.dtype)[:, best]


STARTS: dict[str, dict[str, Any]] = {
    "closed form": {"align": False},
    "closed form, aligned": {},
    "kept heads": {"align": False, "squeezer": pick_heads(keep_head), "axes": keep_channels},
    "kept heads, aligned": {"squeezer": pick_heads(keep_head), "axes": keep_channels},
    "mean pooling": {"align": False, "squeezer": pick_heads(pool_heads), "axes": keep_channels},
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
    tokens = torch.from_numpy(np.load(SOURCE / "self_sampled_1024x256_uint16.npy").astype(np.int64))
    teacher, valid = load_llama(SOURCE / "stories260K.bin"), tokens[-arguments.valid :, :128]
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
            draft = arguments.out.with_suffix(".part")
            draft.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            draft.replace(arguments.out)  # a run that is killed leaves the last whole file
    print_table(runs, report["teacher"])


if __name__ == "__main__":
    main()
