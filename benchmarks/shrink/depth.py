"""Attention blocks, activations or whole layers: what goes at least cost, and how does it recover?

The teacher is a GPT-2 of 6 layers (8 heads, width 64, FFNs of 256 GELUs), trained here on the sequences of
stories260K: half cross entropy, half KD from stories260K itself, whose own FFNs are gated and so have no merge.

* Recovery: one attention block dropped, or one activation, not aligned: the loss at once and after 25, 100 and 200
  steps of fine-tuning (cross entropy and KD from the teacher); a seed has every third layer, three seeds all six. The
  teacher itself, trained on in the same way, is the control.
* Depth at equal latency: dropped attention blocks and activations (the FFN merged) against whole layers that are
  dropped. Of all splits that are not slower than the network with so many whole layers fewer, and of all choices of
  these layers, the one with the least loss on the calibration set, aligned, before training. Each is then trained on
  cross entropy alone, + KD, + KD + SHD.

Losses are cross entropies in nats a token on 128 sequences that nothing else saw. Latencies are CPU time of a
forward pass in PyTorch, one thread, models by turns: the medians, as shares of the teacher's. Prints a table and
writes ``results/shrink/depth.json``, run by run; a stopped run with the same settings resumes.
python -m benchmarks.shrink.depth [--steps 200] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from support.shrink.stories import load_llama, measure_loss  # the model's conversion, which tests use too
from torch import Tensor

from benchmarks import STORIES, result_path, save
from benchmarks.shrink.rivals import count_flops
from shd_torch import OnlineTeacher, capture_attention, layer_kls
from shd_torch.shrink import rank_layers, shrink

RESULT = result_path(__file__)
LAYERS, BATCH, LENGTH = 6, 8, 128
TEACHER_STEPS, TEACHER_RATE, RATE, BETA = 5000, 3e-3, 1e-3, 0.02
TEACHER_FOLDER = f"shrink_depth_{LAYERS}x{LENGTH}_{TEACHER_STEPS}_steps"  # another recipe is another teacher
FEWER = (2,)
"""Whole layers dropped; splits of the same latency are compared with these."""
SPLITS = [(attention, activations) for attention in range(2, LAYERS + 1) for activations in (0, 2, 4, 6)]
CALIBRATION = 64
MARKS = (25, 100, 200)
ROUNDS = 21
TERMS = ("CE", "CE + KD", "CE + KD + SHD")


def draw_batches(tokens: Tensor, steps: int, seed: int) -> Tensor:
    windows = tokens[:-128].reshape(-1, LENGTH)
    order = torch.randint(len(windows), (steps, BATCH), generator=torch.Generator().manual_seed(seed))
    return windows[order]


def kd_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    log_probs, goal = (part.log_softmax(-1).flatten(0, 1) for part in (logits, wanted))
    return F.kl_div(log_probs, goal, log_target=True, reduction="batchmean")


def train(
    student: Any,
    teacher: Any,
    tokens: Tensor,
    *,
    steps: int,
    seed: int,
    terms: str = "CE + KD",
    rate: float = RATE,
    report: dict[str, Any] | None = None,
    marks: Sequence[int] = MARKS,
) -> dict[str, float]:
    """Losses of validation by number of steps."""
    online = OnlineTeacher.for_student(teacher, report) if "SHD" in terms and report is not None else None
    optimizer = torch.optim.AdamW(student.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    found = {"0": measure_loss(student.eval(), tokens[-128:, :LENGTH])}
    for step, ids in enumerate(draw_batches(tokens, steps, seed)):
        student.train()
        loss: Tensor
        if online is not None:
            with capture_attention(student) as captured:
                logits = student(input_ids=ids, use_cache=False).logits
            taught = online(input_ids=ids, use_cache=False)
            wanted = taught.output.logits
            shd = torch.stack([*layer_kls(captured, taught, beta=BETA, check=step == 0).values()]).sum()
        else:
            logits, shd = student(input_ids=ids, use_cache=False).logits, torch.zeros(())
            with torch.no_grad():
                wanted = None if terms == "CE" else teacher(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        if wanted is not None:
            loss = (loss + kd_loss(logits, wanted)) / 2
        optimizer.zero_grad()
        (loss + shd).backward()
        optimizer.step()
        schedule.step()
        if step + 1 in marks or step + 1 == steps:
            found[str(step + 1)] = measure_loss(student.eval(), tokens[-128:, :LENGTH])
    return found


def load_teacher(folder: Path, tokens: Tensor) -> Any:
    """The teacher, from an earlier run's folder or trained now."""
    from transformers import GPT2Config, GPT2LMHeadModel

    if not (folder / "config.json").exists():
        config = GPT2Config(
            vocab_size=512,
            n_positions=256,
            n_embd=64,
            n_layer=LAYERS,
            n_head=8,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
        torch.manual_seed(0)
        made: Any = GPT2LMHeadModel(config)
        llama = load_llama(STORIES / "stories260K.bin")
        print("teacher:", train(made, llama, tokens, steps=TEACHER_STEPS, seed=99, rate=TEACHER_RATE), flush=True)
        made.eval().save_pretrained(folder)
    loaded: Any = GPT2LMHeadModel.from_pretrained(folder)
    return loaded.eval().requires_grad_(False)


@torch.no_grad()
def time_models(models: Sequence[Any], ids: Tensor, rounds: int) -> list[float]:
    """Median CPU seconds of a forward pass of each, run by turns."""
    seconds: list[list[float]] = [[] for _ in models]
    for turn in range(rounds + 1):
        for model, taken in zip(models, seconds, strict=True):
            started = time.process_time()
            model(input_ids=ids, use_cache=False)
            if turn:
                taken.append(time.process_time() - started)
    return [statistics.median(taken) for taken in seconds]


def choose_students(teacher: Any, tokens: Tensor) -> dict[str, Any]:
    """For each number of whole layers fewer, the best such network and the best split that is not slower."""
    data = {"input_ids": tokens[:CALIBRATION, :LENGTH]}
    batches = [{"input_ids": part, "labels": part} for part in tokens[:64, :LENGTH].split(BATCH)]
    ranking = rank_layers(teacher.requires_grad_(True), batches)
    teacher.requires_grad_(False)

    models = [teacher]

    def start(options: dict[str, Any]) -> dict[str, Any]:
        models.append(shrink(teacher, data, **options).student)
        return {"options": options, "loss": measure_loss(models[-1], data["input_ids"])}

    dropped = [ranking.drop(attention=attention, activations=activations) for attention, activations in SPLITS]
    splits = [
        start({"drop_attention": list(one.attention), "drop_activations": list(one.activations)}) for one in dropped
    ]
    everything, wholes = list(splits), {}
    for fewer in FEWER:
        choices = [start({"layers": list(kept)}) for kept in combinations(range(LAYERS), LAYERS - fewer)]
        wholes[fewer] = min(choices, key=lambda one: one["loss"])
        everything += choices
    first, *rest = time_models(models, tokens[:BATCH, :LENGTH], ROUNDS)
    operations, *others = (count_flops(model, {"input_ids": tokens[:1, :LENGTH]}) for model in models)
    for one, seconds, own in zip(everything, rest, others, strict=True):
        one |= {"latency": seconds / first, "flops": own / operations}
    chosen = {}
    for fewer, whole in wholes.items():
        fast = [split for split in splits if split["latency"] <= whole["latency"]]
        chosen[str(fewer)] = {"layers": whole, "parts": min(fast, key=lambda one: one["loss"])}
    return {
        "ranking": {"attention": ranking.attention, "activations": ranking.activations},
        "disparity": sum(ranking.activations) / sum(ranking.attention),
        "chosen": chosen,
        "splits": splits,
    }


def list_runs(
    students: dict[str, Any], teacher: Any, tokens: Tensor, steps: int, seeds: int
) -> dict[str, Callable[[], dict[str, float]]]:
    """By name what makes each run."""
    data = {"input_ids": tokens[:CALIBRATION, :LENGTH]}
    runs: dict[str, Callable[[], dict[str, float]]] = {}

    def add(name: str, options: dict[str, Any], terms: str, seed: int) -> None:
        def run() -> dict[str, float]:
            made = shrink(teacher, data, **options)
            return train(made.student, teacher, tokens, steps=steps, seed=seed, terms=terms, report=made.report)

        runs[f"{name}, {terms}, seed {seed}"] = run

    for seed in range(seeds):
        for fewer, pair in students["chosen"].items():
            for kind, one in pair.items():
                for terms in TERMS:
                    add(f"{kind} as fast as {LAYERS - int(fewer)} layers", one["options"], terms, seed)
        add("nothing dropped", {"align": False}, "CE + KD", seed)
        for layer in range(seed, LAYERS, 3):
            for part in ("attention", "activations"):
                add(f"{part} of layer {layer}", {f"drop_{part}": [layer], "align": False}, "CE + KD", seed)
    return runs


def print_tables(report: dict[str, Any]) -> None:
    runs: dict[str, dict[str, float]] = report["runs"]
    marks = sorted({int(mark) for run in runs.values() for mark in run})
    groups: dict[str, list[dict[str, float]]] = {}
    for name, run in runs.items():
        label = name.rpartition(", seed")[0]
        if " of layer " in label:
            label = f"one part of the {label.partition(' of layer ')[0]}, mean of the layers"
        groups.setdefault(label, []).append(run)
    print(f"\nteacher {report['teacher']:.3f}\n{'nats after':56}{'runs':>5}" + "".join(f"{m:>8}" for m in marks))
    for label, own in groups.items():
        means = [statistics.mean(run[str(mark)] for run in own) for mark in marks]
        print(f"{label:56}{len(own):5}" + "".join(f"{mean:8.3f}" for mean in means))
    for fewer, pair in report["students"]["chosen"].items():
        print(
            f"{LAYERS - int(fewer)} layers:",
            {kind: (one["options"], round(one["latency"], 3)) for kind, one in pair.items()},
        )
    print(f"\n{'attention blocks and activations that stay':56}{'flops':>8}{'latency':>8}{'nats':>8}")
    for split in report["students"]["splits"]:
        stay = " and ".join(str(LAYERS - len(gone)) for gone in split["options"].values())
        print(f"{stay:56}{split['flops']:8.2f}{split['latency']:8.2f}{split['loss']:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--teacher", type=Path, default=Path(tempfile.gettempdir()) / TEACHER_FOLDER)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = {"steps": arguments.steps, "batch": BATCH, "length": LENGTH, "beta": BETA, "rate": RATE}
    report: dict[str, Any] = {
        "settings": settings | {"teacher_steps": TEACHER_STEPS, "layers": LAYERS},
        "machine": {"processor": platform.machine(), "torch": torch.__version__},
        "runs": {},
    }
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text(encoding="utf-8"))
        if before["settings"] != report["settings"]:
            raise SystemExit(f"{arguments.out} was made with {before['settings']}: remove it, or give --out")
        report = before
    tokens = torch.from_numpy(np.load(STORIES / "self_sampled_1024x256_uint16.npy").astype(np.int64))
    teacher = load_teacher(arguments.teacher, tokens)

    def write() -> None:
        save(report, arguments.out)

    report.setdefault("teacher", measure_loss(teacher, tokens[-128:, :LENGTH]))
    if "students" not in report:
        report["students"] = choose_students(teacher, tokens)
        write()
    for name, run in list_runs(report["students"], teacher, tokens, arguments.steps, arguments.seeds).items():
        if name not in report["runs"]:
            report["runs"][name] = run()
            print(name, report["runs"][name], flush=True)
            write()
    print_tables(report)


if __name__ == "__main__":
    main()
