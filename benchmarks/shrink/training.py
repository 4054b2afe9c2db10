"""How long does a good start last? Training from the closed form, from kept heads and from random weights.

The teacher is stories260K, the students have 4 heads and the teacher's layers 0, 2 and 4, at its width of 64 and at
48. Every start is trained on half cross entropy and half KD, with and without SHD (a live teacher, the layer
map and plan of shrink.json), on the same batches in the same order for a seed. Losses are cross entropies in nats a
token on 128 sequences that neither training nor calibration saw, after each number of steps of one run with a cosine
schedule. What SHD gains is paired by seed, with the 95% interval of Student's t.

Prints tables and writes ``training.json`` beside this file, run by run: started again with the same settings
it goes on where it stopped. python -m benchmarks.shrink.training [--steps 1000] [--seeds 3]
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import t
from torch import Tensor

from benchmarks.shrink.start import SOURCE
from shd_torch import OnlineTeacher, capture_attention, layer_kls
from shd_torch.shrink import shrink
from shd_torch.shrink.compare import RIVALS

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.shrink.stories import load_llama, measure_loss  # the teacher's conversion, which tests use too

RESULT = Path(__file__).with_suffix(".json")
SIZES: dict[str, dict[str, Any]] = {
    "width 64": {"heads": 4, "layers": [0, 2, 4]},
    "width 48": {"heads": 4, "layers": [0, 2, 4], "hidden": 48},
}
STARTS: dict[str, dict[str, Any]] = {
    "closed form, aligned": {"ridge": 1e-4},
    "kept heads": {"align": False, **RIVALS["kept heads"]},
    "random": {},
}
MARKS = (25, 100, 200, 400, 700, 1000)
BETA = 0.02
RATES = {"random": 3e-3}
RATE = 2e-3
LENGTH, BATCH = 128, 8


@functools.cache
def load_source() -> tuple[Any, Tensor]:
    """The teacher, without gradients, and its own samples (1024, 256)."""
    tokens = torch.from_numpy(np.load(SOURCE / "self_sampled_1024x256_uint16.npy").astype(np.int64))
    teacher = load_llama(SOURCE / "stories260K.bin")
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    return teacher, tokens


@functools.cache
def shrink_once(size: str, start: str) -> Any:
    teacher, tokens = load_source()
    return shrink(teacher, {"input_ids": tokens[:64]}, **SIZES[size], **STARTS[start])


def make_start(size: str, start: str, seed: int) -> tuple[Any, dict[str, Any]]:
    made = shrink_once(size, start)
    if start != "random":
        return copy.deepcopy(made.student), made.report
    torch.manual_seed(seed)
    return type(made.student)(made.student.config), made.report


def train(size: str, start: str, shd: bool, steps: int, seed: int) -> tuple[Any, dict[str, float]]:
    """The student, and its losses of validation by number of steps."""
    teacher, tokens = load_source()
    student, report = make_start(size, start, seed)
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
    return student, found


def print_tables(runs: dict[str, dict[str, float]], seeds: int) -> None:
    """The means of each start, and below each pair what SHD gains over KD alone."""
    marks = sorted({int(mark) for run in runs.values() for mark in run})
    print(f"\n{'':36}{'seeds':>6}" + "".join(f"{mark:>9}" for mark in marks))
    for size, start in ((size, start) for size in SIZES for start in STARTS):
        arms = {shd: [runs.get(name_run(size, start, shd, seed)) for seed in range(seeds)] for shd in (False, True)}
        for shd, arm in arms.items():
            own = [run for run in arm if run is not None]
            if own:
                means = [statistics.mean(run[str(mark)] for run in own) for mark in marks]
                label = f"{size}, {start}, KD{' + SHD' if shd else ''}"
                print(f"{label:36}{len(own):6}" + "".join(f"{mean:9.3f}" for mean in means))
        pairs = [(kd, both) for kd, both in zip(arms[False], arms[True], strict=True) if kd and both]
        if len(pairs) > 1:
            gains = [[kd[str(mark)] - both[str(mark)] for kd, both in pairs] for mark in marks]
            print(f"{'  gain of SHD':36}{len(pairs):6}" + "".join(f"{statistics.mean(gain):9.3f}" for gain in gains))
            print(f"{'  +-':36}{'':6}" + "".join(f"{half_interval(gain):9.3f}" for gain in gains))


def half_interval(values: list[float]) -> float:
    """Half the 95% interval of Student's t for the mean."""
    return float(t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5)


def name_run(size: str, start: str, shd: bool, seed: int) -> str:
    return f"{size} start={start} shd={shd} seed={seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
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
    for seed in range(arguments.seeds):
        for size, start, shd in itertools.product(SIZES, arguments.starts, (False, True)):
            name = name_run(size, start, shd, seed)
            if name in report["runs"]:
                continue
            report["runs"][name] = train(size, start, shd, arguments.steps, seed)[1]
            print(name, report["runs"][name], flush=True)
            draft = arguments.out.with_suffix(".part")
            draft.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            draft.replace(arguments.out)  # a run that is killed leaves the last whole file
    print_tables(report["runs"], arguments.seeds)


if __name__ == "__main__":
    main()
