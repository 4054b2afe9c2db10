"""Fewer key and value heads, query heads kept: what is a start worth before training, and after some steps of KD?

The teacher is stories260K (8 query heads over 4 key and value heads). Students keep everything but key and value
heads, 4 -> 2 and 4 -> 1. Starts: ``shrink`` on 64 sequences; the mean of a group's matrices, the usual recipe; the
first head of each group. Losses are cross entropies in nats a token on 128 other sequences, before training and after
steps of KD (KL to the teacher's logits), alone and with SHD's KL on the attention maps. All arms of a seed share
steps, rate and batches.

Then bytes of the cache of keys and values, and processor time of a token in transformers, of larger Llamas with
random weights: ``--times``. Writes ``results/grouped_queries.json``, run by run; a stopped run resumes.
python -m benchmarks.grouped_queries [--seeds 6] [--steps 200] [--times]
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from support.shrink.stories import load_llama, measure_loss  # the teacher's conversion, which tests use too
from torch import Tensor

from benchmarks import STORIES, result_path, save
from benchmarks.shrink.rivals import RIVALS, shrink
from shd_ref.shrink.heads import HeadMerge, HeadWeights
from shd_torch import OnlineTeacher, capture_attention, layer_kls
from shd_torch.shrink.layer import Squeezed

RESULT = result_path(__file__)
KV_HEADS = (2, 1)
BATCH, LENGTH, VALIDATION, CALIBRATION = 4, 64, 128, 64
RATE = 1e-3
BETA = 0.01


def keep_first(weights: HeadWeights, _: HeadMerge, __: Any, kv_heads: int, *___: Any, **____: Any) -> Squeezed:
    """Of each group the first key and value head."""
    per = weights.num_kv_heads // kv_heads
    return Squeezed(replace(weights, key=weights.key[::per], value=weights.value[::per]), "picked", False)


STARTS: dict[str, dict[str, Any]] = {
    "shrink": {},
    "mean": {"squeezer": RIVALS["mean pooling"]["squeezer"], "align": False},
    "first": {"squeezer": keep_first, "align": False},
    "shrink, closed form": {"align": False},
    "mean, aligned": {"squeezer": RIVALS["mean pooling"]["squeezer"]},
    "first, aligned": {"squeezer": keep_first},
}
"""Options of ``shrink``; the first three are trained."""


class Training:
    """What all runs share: windows of tokens, and the teacher."""

    def __init__(self) -> None:
        tokens = torch.from_numpy(np.load(STORIES / "self_sampled_1024x256_uint16.npy").astype(np.int64))
        self.calibration, self.valid = tokens[:CALIBRATION], tokens[-VALIDATION:, :128]
        self.windows = tokens[:-VALIDATION].reshape(-1, LENGTH)
        self.teacher = load_llama(STORIES / "stories260K.bin").requires_grad_(requires_grad=False)

    def start(self, name: str, kv_heads: int) -> Any:
        return shrink(self.teacher, {"input_ids": self.calibration}, kv_heads=kv_heads, **STARTS[name]).student

    def run(self, student: Any, seed: int, steps: int, *, shd: bool) -> float:
        """The loss of validation after so many steps; the rate rises for 20 of them, then falls to 0."""
        sampler = torch.Generator().manual_seed(seed)
        order = torch.randint(len(self.windows), (steps, BATCH), generator=sampler)
        optimizer = torch.optim.AdamW(student.parameters(), RATE, weight_decay=0.0, fused=True)
        shape = partial(np.interp, xp=[-1, 20, steps], fp=[0.0, 1.0, 0.0])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
        online = OnlineTeacher(self.teacher, 8, 5) if shd else None
        student.train()
        for number, chosen in enumerate(order):
            ids = self.windows[chosen]
            taught = None if online is None else online(input_ids=ids)
            with capture_attention(student, layers=5) if shd else nullcontext() as captured:
                logits = student(input_ids=ids).logits
            loss = kl_divergence(self.teacher(input_ids=ids).logits, logits)
            if taught is not None:
                loss = loss + sum(layer_kls(captured, taught, beta=BETA, check=number == 0).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return measure_loss(student.eval(), self.valid)


def kl_divergence(goal: Tensor, logits: Tensor) -> Tensor:
    """``KL(teacher || student)`` of the next token, a mean over tokens."""
    log_probs, target = (part.log_softmax(-1).flatten(0, 1) for part in (logits, goal))
    return F.kl_div(log_probs, target, log_target=True, reduction="batchmean")


def plan_runs(seeds: int, steps: int) -> list[tuple[str, int, bool, int]]:
    """KD first; steps with SHD take twice as long."""
    arms = list(product(list(STARTS)[:3], KV_HEADS))
    return [(*arm, shd, seed) for shd in (False, True) for seed in range(seeds) for arm in arms]


def time_tokens(kv_heads: int, context: int) -> dict[str, float]:
    """Bytes of keys and values, and processor seconds of a token for each sample, on a filled cache."""
    import transformers

    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 4096}
    heads = {"num_attention_heads": 8, "num_key_value_heads": kv_heads}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=4096)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    samples, tokens, width = 8, 16, config.hidden_size // 8
    cache = transformers.DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, samples, kv_heads, context, width).unbind(), layer)
    size = sum(part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values))
    ids, times = torch.zeros(samples, 1, dtype=torch.long), []
    with torch.no_grad():
        for _ in range(tokens):
            before = time.process_time()
            ids = model(input_ids=ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            times.append(time.process_time() - before)
    return {"cache_bytes": size / samples, "seconds": statistics.median(times[2:]) / samples}


def repeat(report: dict[str, Any], part: str, name: str, make: Callable[[], Any], out: Path) -> Any:
    """A figure of the report, made and written where it is missing."""
    runs = report.setdefault(part, {})
    if name not in runs:
        before = time.process_time()
        runs[name] = make()
        print(part, name, runs[name], f"{time.process_time() - before:.0f} s", flush=True)
        save(report, out)
    return runs[name]


def measure_times(report: dict[str, Any], out: Path) -> None:
    """By turns, as other programs may slow one of them; medians of the rounds are taken on the page."""
    for turn in range(3):
        for context in (128, 2048):
            for kv_heads in (8, 4, 2, 1):
                name = f"kv_heads={kv_heads} context={context} round={turn}"
                repeat(report, "times", name, partial(time_tokens, kv_heads, context), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"batch": BATCH, "length": LENGTH, "rate": RATE, "beta": BETA}
    report: dict[str, Any] = {"settings": settings}
    report["machine"] = {"cpu": platform.machine(), "torch": torch.__version__}
    if arguments.out.exists():
        report = json.loads(arguments.out.read_text(encoding="utf-8"))
        if report["settings"] != settings:
            raise SystemExit(f"{arguments.out} was made with {report['settings']}: remove it, or give --out")
    if arguments.times:
        measure_times(report, arguments.out)
        return
    training = Training()
    report["teacher"] = measure_loss(training.teacher, training.valid)
    made = cache(training.start)
    for kv, name in product(KV_HEADS, STARTS):
        measure = partial(lambda *start: measure_loss(made(*start), training.valid), name, kv)
        repeat(report, "starts", f"{name} kv_heads={kv}", measure, arguments.out)

    def train(name: str, kv: int, seed: int, steps: int, *, shd: bool) -> float:
        return training.run(copy.deepcopy(made(name, kv)), seed, steps, shd=shd)

    for name, kv, shd, seed in plan_runs(arguments.seeds, arguments.steps):
        label = f"{name} kv_heads={kv} shd={shd} steps={arguments.steps} seed={seed}"
        run = partial(train, name, kv, seed, arguments.steps, shd=shd)
        repeat(report, "runs", label, run, arguments.out)


if __name__ == "__main__":
    main()
