"""Larger patches: KD against KD + SHD on pooled maps at equal processor time.

The teacher is DINOv2's architecture, trained here on digits of 8 x 8 with patches of one pixel: 64 tokens and a class
token. Its cache holds logits and merged maps pooled to 4 x 4 patches (``patches:8x8:4x4:1``), which teach students
with patches twice as large and a random start. Both arms learn from the teacher's logits, on all pool images, for the
same processor seconds each. Both choose among four settings on validation images with other seeds: KD its
rate, KD + SHD its beta at KD's best rate. Then six fresh seeds, paired.

Writes ``fewer_tokens.json`` next to this file. python benchmarks/fewer_tokens.py [--seconds 12]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor
from torch.utils.data import default_collate
from transformers import Dinov2Config, Dinov2ForImageClassification

from benchmarks.study.digits import load_small_digits
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import SupervisedDataset, capture_attention, export_teacher, kd_loss, layer_kls

RESULT = Path(__file__).with_suffix(".json")
GROUPS = "patches:8x8:4x4:1"
POOL, VALID = 1000, 297
RATES, BETAS = (5e-4, 1e-3, 2e-3, 4e-3), (0.03, 0.1, 0.3, 1.0)
TUNED, SEEDS = (100, 101), tuple(range(6))


class Setting(NamedTuple):
    """Of a student; beta 0 is KD alone."""

    rate: float
    beta: float


class Data(NamedTuple):
    """Images and labels of each part; records of the pool, in one batch for each sample."""

    images: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    joined: SupervisedDataset
    targets: Tensor


def make_model(patch: int, width: int, heads: int) -> Any:
    """A vision transformer with LayerScale and a class token."""
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": 4, "mlp_ratio": 2}
    images = {"image_size": 8, "patch_size": patch, "num_channels": 1, "num_labels": 10}
    return Dinov2ForImageClassification(Dinov2Config(**sizes, **images, layerscale_value=0.1))


def train_teacher(images: Tensor, labels: Tensor, steps: int) -> Any:
    """On labels alone."""
    torch.manual_seed(0)
    model = make_model(1, 64, 4).train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        index = torch.randint(len(images), (64,))
        F.cross_entropy(model(images[index]).logits, labels[index], label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@torch.no_grad()
def measure(model: Any, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, and cross entropy in nats."""
    logits = model.eval()(images).logits
    accuracy = float((logits.argmax(-1) == labels).float().mean())
    model.train()
    return {"accuracy": accuracy, "loss": float(F.cross_entropy(logits, labels))}


def train_student(data: Data, setting: Setting, seed: int, seconds: float) -> dict[str, Any]:
    """For so many processor seconds, its evaluation apart; the rate falls with them to zero."""
    torch.manual_seed(seed)
    model = make_model(2, 48, 2).train()
    optimizer = torch.optim.AdamW(model.parameters(), setting.rate, weight_decay=0.05)
    collate, steps, started = data.joined.collate_with(default_collate), 0, time.process_time()
    draw = torch.Generator().manual_seed(seed)
    while (progress := (time.process_time() - started) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = setting.rate * min(10 * progress + 0.01, 1.0, 1.1 - progress)
        index = torch.randint(POOL, (64,), generator=draw)
        if setting.beta:
            _, taught = collate(data.joined.__getitems__(index.tolist()))
            with capture_attention(model, taught.layers) as captured:
                logits = model(data.images[0][index]).logits
            terms = layer_kls(captured, taught, check=not steps)
            loss = kd_loss(data.targets[index], logits, check=not steps) + setting.beta * sum(terms.values())
        else:
            logits = model(data.images[0][index]).logits
            loss = kd_loss(data.targets[index], logits, check=not steps)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    parts = zip(("valid", "test"), data.images[1:], data.labels[1:], strict=True)
    found = {name: measure(model, images, labels) for name, images, labels in parts}
    return {"seed": seed, "steps": steps, **setting._asdict(), **found}


def choose(data: Data, settings: list[Setting], seconds: float) -> tuple[Setting, list[Any]]:
    """The setting of the lowest mean validation loss."""
    runs = [train_student(data, setting, seed, seconds) for setting in settings for seed in TUNED]
    means = {
        setting: statistics.fmean(
            run["valid"]["loss"] for run in runs if Setting(run["rate"], run["beta"]) == setting
        )
        for setting in settings
    }
    return min(means, key=lambda setting: means[setting]), runs


def paired(first: list[float], second: list[float]) -> dict[str, float]:
    """What the second gains in the mean, with half the width of its 95% interval."""
    gains = [b - a for a, b in zip(first, second, strict=True)]
    half = float(stats.t.ppf(0.975, len(gains) - 1)) * statistics.stdev(gains) / len(gains) ** 0.5
    return {"gain": statistics.fmean(gains), "half": half}


def main() -> None:
    """The whole comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--teacher-steps", type=int, default=600)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = load_small_digits()
    sizes = [POOL, VALID, len(images) - POOL - VALID]
    images_of, labels_of = images.split(sizes), labels.split(sizes)
    teacher = train_teacher(images_of[0], labels_of[0], options.teacher_steps)
    with tempfile.TemporaryDirectory() as folder:
        graph, pool = Path(folder) / "teacher.onnx", {"pixel_values": images_of[0].numpy()}
        export_teacher(teacher, {"pixel_values": images_of[0][:2]}, graph)
        stored = {}
        for name, groups in (("whole", None), ("pooled", GROUPS)):
            asked = PrecomputeOptions(num_student_heads=2, logits="float16", groups=groups)
            precompute(graph, pool, [(Path(folder) / name, asked)], RunOptions(num_threads=1))
            stored[name] = sum(p.stat().st_size for p in (Path(folder) / name).rglob("*.safetensors")) / POOL
        samples = [{"pixel_values": image} for image in images_of[0]]
        joined = SupervisedDataset(samples, Path(folder) / "pooled", preload=True)
        with torch.no_grad():
            targets = teacher(images_of[0]).logits
        data = Data(images_of, labels_of, joined, targets)
        alone, tried = choose(data, [Setting(rate, 0.0) for rate in RATES], options.seconds)
        both, more = choose(data, [Setting(alone.rate, beta) for beta in BETAS], options.seconds)
        runs = {
            name: [train_student(data, setting, seed, options.seconds) for seed in SEEDS]
            for name, setting in (("kd", alone), ("kd_shd", both))
        }
    of = {
        name: {part: [run["test"][part] for run in own] for part in ("accuracy", "loss")}
        for name, own in runs.items()
    }
    result = {
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "seconds": options.seconds,
        "teacher": measure(teacher, images_of[2], labels_of[2]),
        "bytes_a_sample": stored,
        "groups": GROUPS,
        "tried": [*tried, *more],
        "runs": runs,
        "steps": {name: statistics.fmean(run["steps"] for run in own) for name, own in runs.items()},
        "accuracy": paired(of["kd"]["accuracy"], of["kd_shd"]["accuracy"]),
        "loss": paired(of["kd"]["loss"], of["kd_shd"]["loss"]),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    shown = {name: result[name] for name in ("teacher", "bytes_a_sample", "steps", "accuracy", "loss")}
    print(
        json.dumps(shown | {name: {part: statistics.fmean(v) for part, v in own.items()} for name, own in of.items()})
    )


if __name__ == "__main__":
    main()
