"""A step without the teacher in memory: KD + SHD from a cache alone, against the live teacher.

The teacher is stories260K: trained, causal, 5 layers of 8 heads, 512 classes. Students have 3 layers of 4 heads. Both
arms of a seed share initial weights and batches; the cache holds merged maps and the likeliest classes of each row
with the mass of all others. What is measured:

- losses of both kinds at the same weights, and their gradients, on every tenth step of the run from the cache,
- validation after each run, in nats a token,
- the most bytes that tensors made in a step hold at once, and the teacher's own weights,
- seconds a step, of steps of both arms in turn, so that other work on the machine slows both,
- bytes a token of the cache.

Prints a table and writes ``results/teacher_free.json``. python -m benchmarks.teacher_free [--steps 300]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from support.binding.allocations import Live
from support.binding.stories import Stories, load_stories  # the teacher's architecture, which tests use too
from torch import Tensor, nn
from torch.utils.data import DataLoader, StackDataset

from benchmarks import STORIES, result_path, save
from shd_ref.cache import CodecError, LogitsError
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import OnlineTeacher, SupervisedDataset, capture_attention, export_teacher, kd_loss, layer_kls
from shd_torch.kd import kd_targets_topk

RESULT = result_path(__file__)
NUM_LAYERS, HEADS = 3, 4
VALIDATION = 64  # sequences


class Losses(NamedTuple):
    """Of a batch, before they are weighed."""

    base: Tensor
    kd: Tensor
    shd: Tensor


class Run:
    """A student with its optimizer, and how a batch teaches it."""

    def __init__(self, teacher: Stories, arguments: argparse.Namespace, seed: int) -> None:
        torch.manual_seed(seed)
        self.student = Stories(
            width=arguments.width,
            hidden=3 * arguments.width,
            num_layers=NUM_LAYERS,
            num_heads=HEADS,
            num_kv_heads=HEADS // 2,
            vocabulary=512,
            length=arguments.length,
        )
        nn.init.normal_(self.student.embed.weight, std=0.05)  # also the output layer
        self.optimizer = torch.optim.AdamW(self.student.parameters(), 1e-3)
        self.head, self.temperature = arguments.head, arguments.temperature
        self.online = OnlineTeacher(teacher, HEADS, NUM_LAYERS)
        self.beta = arguments.beta

    def losses(self, ids: Tensor, stored: Any | None) -> Losses:
        """By what the cache holds of the batch, or without it by the live teacher."""
        taught = self.online(ids, check=False) if stored is None else stored
        with capture_attention(self.student, NUM_LAYERS) as captured:
            logits = self.student(ids)
        kls = layer_kls(captured, taught, check=False)
        targets = taught.targets()
        if stored is None:  # the same classes as the cache
            targets = kd_targets_topk(targets, self.head, temperature=self.temperature, check=False)
        kd = kd_loss(targets, logits, check=False)
        base = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return Losses(base, kd, torch.stack(list(kls.values())).sum())

    def step(self, ids: Tensor, stored: Any | None) -> None:
        """One step of training."""
        losses = self.losses(ids, stored)
        self.optimizer.zero_grad()
        (losses.base + losses.kd + self.beta * losses.shd).backward()
        self.optimizer.step()

    def gradient(self, losses: Losses, name: str) -> Tensor:
        """Of one of the losses with respect to all weights, one vector."""
        weights = list(self.student.parameters())
        loss: Tensor = getattr(losses, name)
        parts = torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])

    @torch.no_grad()
    def validate(self, tokens: Tensor) -> float:
        """Nats a token."""
        return float(F.cross_entropy(self.student(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


def prepare(
    folder: Path, arguments: argparse.Namespace
) -> tuple[Stories, dict[str, Any], Tensor, Path, dict[str, Any]]:
    """The teacher, windows of its samples, those that no student sees, and the cache with what it is made of."""
    tokens = np.load(STORIES / "self_sampled_1024x256_uint16.npy").astype(np.int64)
    windows = tokens.reshape(-1, arguments.length)
    train, valid = windows[: arguments.samples], torch.from_numpy(windows[-VALIDATION:])
    teacher = load_stories(STORIES / "stories260K.bin")
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    graph = folder / "teacher.onnx"
    export_teacher(teacher, {"input_ids": torch.from_numpy(train[:2])}, graph)
    options = PrecomputeOptions(
        num_student_heads=HEADS,
        num_student_layers=NUM_LAYERS,
        logits="topk",
        logits_top=arguments.head,
        logits_temperature=arguments.temperature,
    )
    run = RunOptions(batch_size=64, num_threads=torch.get_num_threads())
    summary = precompute(graph, {"input_ids": train}, folder / "cache", options, run)
    joined = SupervisedDataset(StackDataset(input_ids=torch.from_numpy(train)), folder / "cache")
    record = joined[0][1]
    attention, logits = summary.errors["attention"], summary.errors["logits"]
    assert isinstance(attention, CodecError)
    assert isinstance(logits, LogitsError)
    sizes = {name: part.nbytes for name, part in record.parts.items() if part.dtype == np.uint8}
    stored = {
        "attention_bytes_a_token": (sum(sizes.values()) - sizes["logits"]) / record.length,
        "logits_bytes_a_token": sizes["logits"] / record.length,
        "cache_bytes_a_token": sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())
        / train.size,
        "attention_kl_mean": attention.kl_mean,
        "attention_kl_max": attention.kl_max,
        "logits_kl_mean": logits.kl_mean,
        "logits_kl_max": logits.kl_max,
        "logits_gradient_mean": logits.gradient_mean,
    }
    return teacher, {"input_ids": train}, valid, folder / "cache", stored


def batches(data: Any, cache: Path, arguments: argparse.Namespace, seed: int) -> Iterator[tuple[Tensor, Any]]:
    joined = SupervisedDataset(StackDataset(**{name: torch.from_numpy(array) for name, array in data.items()}), cache)
    sampler = torch.utils.data.RandomSampler(
        joined, num_samples=arguments.steps * arguments.batch, generator=torch.Generator().manual_seed(seed)
    )
    loader: Any = DataLoader(joined, arguments.batch, sampler=sampler, collate_fn=joined.collate)
    return ((batch["input_ids"], supervision) for batch, supervision in loader)


def compare(run: Run, ids: Tensor, stored: Any) -> dict[str, float]:
    """Cached against live at the same weights: relative differences of values and of gradients."""
    cached, live = run.losses(ids, stored), run.losses(ids, None)
    found = {}
    for name in ("kd", "shd"):
        one, other = getattr(cached, name).detach(), getattr(live, name).detach()
        found[name] = float(abs(one - other) / other)
        gradient, wanted = run.gradient(cached, name), run.gradient(live, name)
        found[f"{name}_gradient"] = float((gradient - wanted).norm() / wanted.norm())
    return found


def most_bytes(run: Run, ids: Tensor, stored: Any | None) -> int:
    """Of tensors that a step makes; weights, moments and the batch were there before."""
    moments = [
        value for state in run.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    ]
    held = [*run.student.parameters(), *run.online.model.parameters(), *run.student.buffers(), *moments, ids]
    run.optimizer.zero_grad()
    with Live(*held, *([] if stored is None else [stored.buffer])) as made:
        run.step(ids, stored)
    return int(made.most)


def measure(arguments: argparse.Namespace, seed: int, prepared: Any) -> dict[str, Any]:
    """Both arms of a seed, their steps in turn."""
    teacher, data, valid, cache, _ = prepared
    free, held = Run(teacher, arguments, seed), Run(teacher, arguments, seed)
    seconds: dict[str, list[float]] = {"cache": [], "live": []}
    compared: list[dict[str, float]] = []
    for number, (ids, stored) in enumerate(batches(data, cache, arguments, seed)):
        if number % 10 == 0:
            compared.append(compare(free, ids, stored))
        for name, run, given in (("cache", free, stored), ("live", held, None)):
            started = time.perf_counter()
            run.step(ids, given)
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times[5:]) for name, times in seconds.items()}
    return {
        "seed": seed,
        "relative_difference_mean": {key: statistics.fmean(c[key] for c in compared) for key in compared[0]},
        "relative_difference_max": {key: max(c[key] for c in compared) for key in compared[0]},
        "valid_cache": free.validate(valid),
        "valid_live": held.validate(valid),
        "step_bytes_cache": most_bytes(free, ids, stored),
        "step_bytes_live": most_bytes(held, ids, None),
        "teacher_bytes": sum(parameter.nbytes for parameter in teacher.parameters()),
        "step_seconds": medians,
        "seconds_cache_over_live": medians["cache"] / medians["live"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("steps", 300), ("seeds", 3), ("batch", 16), ("length", 128), ("samples", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--head", type=int, default=32, help="classes kept of a row")
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--beta", type=float, default=0.02)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(Path(folder), arguments)
        runs = [measure(arguments, seed, prepared) for seed in range(arguments.seeds)]
    stored = prepared[-1]
    machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    result = {"settings": vars(arguments), "machine": machine, "stored": stored, "runs": runs}
    save(result, RESULT)
    print(", ".join(f"{name} {value:.4g}" for name, value in stored.items()))
    print("seed  KD diff  its gradient  SHD diff  its gradient  valid cache  live   step MB cache  live   time ratio")
    for run in runs:
        worst = run["relative_difference_max"]
        print(
            f"{run['seed']:4d}  {worst['kd']:7.1e}  {worst['kd_gradient']:12.1e}  {worst['shd']:8.1e}  "
            f"{worst['shd_gradient']:12.1e}  {run['valid_cache']:11.4f}  {run['valid_live']:.4f}  "
            f"{run['step_bytes_cache'] / 1e6:12.1f}  {run['step_bytes_live'] / 1e6:.1f}  "
            f"{run['seconds_cache_over_live']:10.2f}"
        )


if __name__ == "__main__":
    main()
