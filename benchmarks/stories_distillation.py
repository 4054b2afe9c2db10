"""Does attention help a small language model, live or from a cache? KD + SHD against KD, over seeds and betas.

The teacher is stories260K: trained, causal, 5 layers of 8 heads over 4 key/value heads. Students have 3 layers of 4
or 2 heads and keep ``scaled_dot_product_attention``. All arms of a seed share initial weights, batches and base
loss (half cross entropy, half KD on the teacher's logits), so gains are paired. Beta is a sum over layers and
heads. The loss of validation is the cross entropy, in nats a token, on sequences that no student saw.

Prints a table and writes ``results/stories_distillation.json``, run by run; a stopped run with the same
settings resumes. python -m benchmarks.stories_distillation [--steps 400] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from support.binding.stories import Stories, load_stories  # the teacher's architecture, which tests use too
from torch import Tensor, nn
from torch.utils.data import DataLoader, StackDataset

from benchmarks import STORIES, machine, result_path, save
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import OnlineTeacher, SupervisedDataset, attention_kl, capture_attention, export_teacher, layer_kls

RESULT = result_path(__file__)
NUM_LAYERS = 3
HEADS = (4, 2)
BETAS = (0.1, 0.02, 0.004)
VALIDATION = 128  # sequences
LIVE_BETA = 0.02  # of the runs with a live teacher and with a compiled student


class Arm(NamedTuple):
    """One way to train one student."""

    heads: int
    source: str  # "none", "cache" or "live"
    beta: float
    compiled: bool = False

    def name(self, seed: int) -> str:
        return f"heads={self.heads} source={self.source} beta={self.beta:g} compiled={self.compiled} seed={seed}"


class Material(NamedTuple):
    """What all runs share."""

    teacher: Stories
    train: dict[str, np.ndarray[Any, Any]]
    valid: Tensor
    caches: Path


def prepare(folder: Path, length: int) -> Material:
    """Windows of the teacher's samples, its logits on them, and a cache for each student shape; made once."""
    tokens = np.load(STORIES / "self_sampled_1024x256_uint16.npy").astype(np.int64)
    train, valid = (part.reshape(-1, length) for part in (tokens[:-VALIDATION], tokens[-VALIDATION:]))
    teacher = load_stories(STORIES / "stories260K.bin")
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "teacher_logits.npy"
    if not kept.exists():
        graph = folder / "teacher.onnx"
        export_teacher(teacher, {"input_ids": torch.from_numpy(train[:2])}, graph)
        run = RunOptions(batch_size=64, num_threads=torch.get_num_threads())
        for heads in HEADS:
            cache = folder / "caches" / f"heads-{heads}"
            options = PrecomputeOptions(num_student_heads=heads, num_student_layers=NUM_LAYERS)
            precompute(graph, {"input_ids": train}, cache, options, run)
        with torch.no_grad():
            made = np.concatenate([teacher(part).half().numpy() for part in torch.from_numpy(train).split(64)])
        draft = folder / "draft.npy"
        np.save(draft, made)
        draft.replace(kept)  # last: what is there is whole
    logits = np.load(kept)
    return Material(
        teacher, {"input_ids": train, "teacher_logits": logits}, torch.from_numpy(valid), folder / "caches"
    )


def batches(material: Material, arm: Arm, arguments: argparse.Namespace, seed: int) -> Iterator[tuple[Any, Any]]:
    """The same samples in the same order for every arm of a seed, with the cache's supervision where one is read."""
    data = StackDataset(**{name: torch.from_numpy(array) for name, array in material.train.items()})
    sampler = torch.utils.data.RandomSampler(
        data, num_samples=arguments.steps * arguments.batch, generator=torch.Generator().manual_seed(seed)
    )
    if arm.source != "cache":
        return ((batch, None) for batch in DataLoader(data, arguments.batch, sampler=sampler))
    joined = SupervisedDataset(data, material.caches / f"heads-{arm.heads}")
    return iter(DataLoader(joined, arguments.batch, sampler=sampler, collate_fn=joined.collate))


def train(material: Material, arm: Arm, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    student = Stories(
        width=arguments.width,
        hidden=3 * arguments.width,
        num_layers=NUM_LAYERS,
        num_heads=arm.heads,
        num_kv_heads=arm.heads // 2,
        vocabulary=512,
        length=arguments.length,
    )
    nn.init.normal_(student.embed.weight, std=0.05)  # also the output layer
    called: nn.Module = torch.compile(student) if arm.compiled else student
    online = OnlineTeacher(material.teacher, arm.heads, NUM_LAYERS) if arm.source == "live" else None
    optimizer = torch.optim.AdamW(student.parameters(), arguments.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.learning_rate, arguments.steps)
    attention: list[float] = []
    for number, (batch, coded) in enumerate(batches(material, arm, arguments, seed)):
        ids = batch["input_ids"]
        terms: list[Tensor] = []
        if arm.source == "none":
            logits, teacher_logits = called(ids), batch["teacher_logits"]
        else:
            with capture_attention(called, NUM_LAYERS) as captured:
                logits = called(ids)
            teacher_logits = batch["teacher_logits"]
            options: dict[str, Any] = {"beta": arm.beta, "check": number == 0}
            if online is not None:
                taught = online(ids)
                teacher_logits = taught.output
                terms = list(layer_kls(captured, taught, **options).values())
            else:
                for layer, maps in zip(coded.layers, coded.decode(), strict=True):
                    call = captured.layer(layer)
                    terms.append(attention_kl(call.query, call.key, maps, **call.mask_keywords, **options))
        loss = base_loss(logits, ids, teacher_logits)
        if terms:
            term = torch.stack(terms).sum()
            attention.append(float(term.detach()) / arm.beta)
            loss = loss + term
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    found: dict[str, Any] = {"valid_loss": validate(student, material.valid)}
    if attention:
        found |= {"kl_first": statistics.mean(attention[:20]), "kl_last": statistics.mean(attention[-20:])}
    return found


def base_loss(logits: Tensor, ids: Tensor, teacher_logits: Tensor) -> Tensor:
    """Half cross entropy on the next token, half ``KL(teacher || student)`` at temperature 1."""
    ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    log_probs, target = logits.log_softmax(-1), teacher_logits.float().log_softmax(-1)
    kd = F.kl_div(log_probs.flatten(0, 1), target.flatten(0, 1), log_target=True, reduction="batchmean")
    return (ce + kd) / 2


@torch.no_grad()
def validate(model: nn.Module, tokens: Tensor) -> float:
    losses = [
        F.cross_entropy(model(part)[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        for part in tokens.split(64)
    ]
    return float(torch.stack(losses).sum()) / tokens[:, 1:].numel()


def plan_runs(seeds: int) -> list[tuple[Arm, int]]:
    """In order of importance; compiling should change nothing."""
    kd = [Arm(heads, "none", 0.0) for heads in HEADS]
    cached = [Arm(heads, "cache", beta) for beta in BETAS for heads in HEADS]
    live = [Arm(heads, "live", LIVE_BETA) for heads in HEADS]
    sources = {"cache": LIVE_BETA, "none": 0.0, "live": LIVE_BETA}
    compiled = [Arm(heads, source, beta, compiled=True) for source, beta in sources.items() for heads in HEADS]
    return [(arm, seed) for arms in (kd + cached, live, compiled) for seed in range(seeds) for arm in arms]


def print_table(runs: dict[str, dict[str, Any]], seeds: int) -> None:
    """Means over the seeds that were run, and gains over KD pair by pair."""
    print(f"\n{'student':9}{'arm':32}{'seeds':>6}{'valid loss':>12}{'gain over KD: mean (least .. most)':>40}")
    for heads in HEADS:
        for arm in dict.fromkeys(arm for arm, _ in plan_runs(seeds) if arm.heads == heads):
            names = [(arm.name(seed), Arm(heads, "none", 0.0).name(seed)) for seed in range(seeds)]
            pairs = [(runs[own], runs[kd]) for own, kd in names if own in runs and kd in runs]
            if not pairs:
                continue
            label = "KD" if arm.source == "none" else f"KD + SHD {arm.source} {arm.beta:g}"
            label += ", compiled" if arm.compiled else ""
            gains = [kd["valid_loss"] - own["valid_loss"] for own, kd in pairs]
            gain = f"{statistics.mean(gains):+.4f} ({min(gains):+.4f} .. {max(gains):+.4f})"
            loss = statistics.mean(own["valid_loss"] for own, _ in pairs)
            print(f"{heads} heads  {label:32}{len(pairs):6}{loss:12.4f}{'' if arm.source == 'none' else gain:>40}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "stories_distillation")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = {
        name: getattr(arguments, name) for name in ("steps", "batch", "length", "width", "learning_rate", "threads")
    }
    report: dict[str, Any] = {"settings": settings, "machine": machine(arguments.threads), "runs": {}}
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text(encoding="utf-8"))
        if before["settings"] != settings:
            raise SystemExit(f"{arguments.out} was made with {before['settings']}: remove it, or give --out")
        report["runs"] = before["runs"]
    missing = [(arm, seed) for arm, seed in plan_runs(arguments.seeds) if arm.name(seed) not in report["runs"]]
    if missing:
        material = prepare(arguments.work / f"length-{arguments.length}", arguments.length)
        report["teacher_valid_loss"] = validate(material.teacher, material.valid)
    for arm, seed in missing:
        found = train(material, arm, arguments, seed)
        report["runs"][arm.name(seed)] = found
        print(arm.name(seed), found, flush=True)
        save(report, arguments.out)
    print_table(report["runs"], arguments.seeds)


if __name__ == "__main__":
    main()
