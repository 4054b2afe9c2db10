"""How long does a good start last? Training from the closed form, from kept heads and from random weights.

The teacher is stories260K, the student has 4 heads and the teacher's layers 0, 2 and 4. Every start is trained on
half cross entropy and half KD, with and without SHD (a live teacher, the layer map and plan of shrink.json), on the
same batches in the same order for a seed. Losses are cross entropies in nats a token on 128 sequences that neither
training nor calibration saw, after each number of steps of one run with a cosine schedule.

Prints a table and writes ``shrink_training.json`` beside this file, run by run: started again with the same settings
it goes on where it stopped. python benchmarks/shrink_training.py [--steps 200] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from shrink_start import SOURCE
from torch import Tensor

from shd_torch import OnlineTeacher, capture_attention, layer_kls
from shd_torch.shrink import shrink
from shd_torch.shrink.compare.rivals import RIVALS

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.shrink.stories import load_llama, measure_loss  # the teacher's conversion, which tests use too

RESULT = Path(__file__).with_suffix(".json")
SIZES: dict[str, Any] = {"heads": 4, "layers": [0, 2, 4]}
STARTS: dict[str, dict[str, Any]] = {
    "closed form, aligned": {},
    "kept heads": {"align": False, **RIVALS["kept heads"]},
    "random": {},
}
MARKS = (25, 100, 200, 400, 700, 1000)
BETA = 0.02
RATES = {"random": 3e-3}
RATE = 2e-3
LENGTH, BATCH = 128, 16


def make_start(teacher: Any, tokens: Tensor, start: str, seed: int) -> tuple[Any, dict[str, Any]]:
    made = shrink(teacher, {"input_ids": tokens[:64]}, **SIZES, **STARTS[start])
    if start != "random":
        return made.student, made.report
    torch.manual_seed(seed)
    return type(made.student)(made.student.config), made.report


def train(teacher: Any, tokens: Tensor, start: str, shd: bool, steps: int, seed: int) -> dict[str, float]:
    """Losses of validation by number of steps."""
    student, report = make_start(teacher, tokens, start, seed)
    online = OnlineTeacher.for_student(teacher, report)
    optimizer = torch.optim.AdamW(student.parameters(), RATES.get(start, RATE))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    windows = tokens[:-128].reshape(-1, LENGTH)
    order = torch.randint(len(windows), (steps, BATCH), generator=torch.Generator().manual_seed(seed))
    found = {"0": measure_loss(student.eval(), tokens[-128:, :LENGTH])}
    for step in range(steps):
        ids = windows[order[step]]
        with capture_attention(student.train()) as captured:
            logits = student(input_ids=ids, use_cache=False).logits
        if shd:
            taught = online(input_ids=ids, use_cache=False)
            wanted = taught.output.logits
        else:
            with torch.no_grad():
                wanted = teacher(input_ids=ids, use_cache=False).logits
        ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        kd = F.kl_div(
            logits.log_softmax(-1).flatten(0, 1),
            wanted.log_softmax(-1).flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
        loss = (ce + kd) / 2
        if shd:
            loss = loss + torch.stack([*layer_kls(captured, taught, beta=BETA, check=step == 0).values()]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step + 1 in MARKS or step + 1 == steps:
            found[str(step + 1)] = measure_loss(student.eval(), tokens[-128:, :LENGTH])
    return found


def print_table(runs: dict[str, dict[str, float]], seeds: int) -> None:
    marks = sorted({int(mark) for run in runs.values() for mark in run})
    print(f"\n{'start':32}{'seeds':>6}" + "".join(f"{mark:>9}" for mark in marks))
    for shd in (False, True):
        for start in STARTS:
            own = [run for s in range(seeds) if (run := runs.get(name_run(start, shd, s))) is not None]
            if own:
                means = [statistics.mean(run[str(mark)] for run in own) for mark in marks]
                label = f"{start}, KD{' + SHD' if shd else ''}"
                print(f"{label:32}{len(own):6}" + "".join(f"{mean:9.3f}" for mean in means))


def name_run(start: str, shd: bool, seed: int) -> str:
    return f"start={start} shd={shd} seed={seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = {"steps": arguments.steps, "batch": BATCH, "length": LENGTH, "beta": BETA, "sizes": SIZES}
    report: dict[str, Any] = {
        "settings": settings,
        "machine": {"processor": platform.machine(), "torch": torch.__version__},
        "runs": {},
    }
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text(encoding="utf-8"))
        if before["settings"] != settings:
            raise SystemExit(f"{arguments.out} was made with {before['settings']}: remove it, or give --out")
        report = before
    tokens = torch.from_numpy(np.load(SOURCE / "self_sampled_1024x256_uint16.npy").astype(np.int64))
    teacher = load_llama(SOURCE / "stories260K.bin")
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    for seed in range(arguments.seeds):
        for start, shd in ((start, shd) for shd in (False, True) for start in STARTS):
            name = name_run(start, shd, seed)
            if name in report["runs"]:
                continue
            report["runs"][name] = train(teacher, tokens, start, shd, arguments.steps, seed)
            print(name, report["runs"][name], flush=True)
            draft = arguments.out.with_suffix(".part")
            draft.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            draft.replace(arguments.out)  # a run that is killed leaves the last whole file
    print_table(report["runs"], arguments.seeds)


if __name__ == "__main__":
    main()
