"""Students with other tokens than their teacher: what do pooled maps add at equal processor time?

Images: the teacher is DINOv2's architecture, trained here on digits of 8 x 8 with patches of one pixel: 64 tokens and
a class token. Its cache holds logits and merged maps pooled to 4 x 4 patches (``patches:8x8:4x4:1``), which teach
students with patches twice as large; the base loss is KD.

Stories: the teacher is stories260K; its texts use 220 of its 512 tokens. Its tokenizer was not to be had, so the
student's is made of the teacher's tokens: the ``SINGLE`` most frequent ones are single tokens, another is a pair of
two out of ``PAIRED`` marks, 110 in all. A pair shares its token's characters equally (``span_groups``). Of the
teacher only its maps fit, so the base loss is cross entropy, judged in nats a token of the teacher.

Students start from random weights. Both arms have the same processor seconds, and choose among four settings on
validation data with other seeds: the base loss its rate, base + SHD its beta at that rate. Then six fresh seeds,
paired. Writes ``results/fewer_tokens.json``, a task each.
    python -m benchmarks.fewer_tokens [images] [stories] [--seconds 12]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate
from transformers import Dinov2Config, Dinov2ForImageClassification, LlamaConfig, LlamaForCausalLM

from benchmarks import STORIES, result_path, save
from benchmarks.study.analysis import paired_gain
from benchmarks.study.digits import load_small_digits
from shd_ref import span_groups
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import SupervisedDataset, capture_attention, export_teacher, kd_loss, layer_kls

RESULT = result_path(__file__)
POOL, VALID = 1000, 297
SINGLE, PAIRED = 86, 12 + 12
LENGTH, MOST = 64, 96  # tokens of the teacher and, padded, of the student
RATES, BETAS = (5e-4, 1e-3, 2e-3, 4e-3), (0.03, 0.1, 0.3, 1.0)
TUNED, SEEDS = (100, 101), tuple(range(6))


class Setting(NamedTuple):
    """Of a student; beta 0 is the base loss alone."""

    rate: float
    beta: float


class Task(Protocol):
    """A teacher with its data, whose cache has a record for each sample of the pool."""

    groups: str
    batch: int
    kl: dict[str, Any]
    pool: dict[str, np.ndarray]
    stored: dict[str, float]
    joined: SupervisedDataset

    def export(self, graph: Path) -> PrecomputeOptions: ...
    def student(self) -> Any: ...
    def loss(self, model: Any, index: Tensor) -> Tensor: ...
    def measure(self, model: Any, part: str) -> dict[str, float]: ...
    def measure_teacher(self) -> dict[str, float]: ...


class Images:
    """Patches twice as large."""

    groups, batch = "patches:8x8:4x4:1", 64
    kl: ClassVar[dict[str, Any]] = {}
    stored: dict[str, float]
    joined: SupervisedDataset

    def __init__(self, teacher_steps: int = 600) -> None:
        images, labels = load_small_digits()
        sizes = [POOL, VALID, len(images) - POOL - VALID]
        parts = zip(("pool", "valid", "test"), images.split(sizes), labels.split(sizes), strict=True)
        self.parts = {name: pair for name, *pair in parts}
        self.teacher = self._train_teacher(*self.parts["pool"], teacher_steps)
        self.pool = {"pixel_values": self.parts["pool"][0].numpy()}
        with torch.no_grad():
            self.targets = self.teacher(self.parts["pool"][0]).logits

    @staticmethod
    def make(patch: int, width: int, heads: int) -> Any:
        """A vision transformer with LayerScale and a class token."""
        sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": 4, "mlp_ratio": 2}
        images = {"image_size": 8, "patch_size": patch, "num_channels": 1, "num_labels": 10}
        return Dinov2ForImageClassification(Dinov2Config(**sizes, **images, layerscale_value=0.1))

    def _train_teacher(self, images: Tensor, labels: Tensor, steps: int) -> Any:
        """On labels alone."""
        torch.manual_seed(0)
        model = self.make(1, 64, 4).train()
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
        for _ in range(steps):
            index = torch.randint(len(images), (64,))
            F.cross_entropy(model(images[index]).logits, labels[index], label_smoothing=0.1).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return model.eval()

    def export(self, graph: Path) -> PrecomputeOptions:
        export_teacher(self.teacher, {"pixel_values": self.parts["pool"][0][:2]}, graph)
        return PrecomputeOptions(num_student_heads=2, logits="float16")

    def student(self) -> Any:
        return self.make(2, 48, 2)

    def loss(self, model: Any, index: Tensor) -> Tensor:
        return kd_loss(self.targets[index], model(self.parts["pool"][0][index]).logits, check=False)

    @torch.no_grad()
    def measure(self, model: Any, part: str) -> dict[str, float]:
        """Accuracy, and cross entropy in nats."""
        images, labels = self.parts[part]
        logits = model.eval()(images).logits
        accuracy = float((logits.argmax(-1) == labels).float().mean())
        model.train()
        return {"accuracy": accuracy, "loss": float(F.cross_entropy(logits, labels))}

    def measure_teacher(self) -> dict[str, float]:
        return self.measure(self.teacher, "test")


class Stories:
    """A tokenizer of half the vocabulary."""

    groups, batch = "weights:token_groups", 16
    # A mark's attention to the second of its pair is of the future.
    kl: ClassVar[dict[str, Any]] = {"support": "intersect"}
    stored: dict[str, float]
    joined: SupervisedDataset

    def __init__(self) -> None:
        from support.shrink.stories import load_llama  # the teacher's conversion, which tests use too

        tokens = np.load(STORIES / "self_sampled_1024x256_uint16.npy").astype(np.int64)
        self.teacher = load_llama(STORIES / "stories260K.bin").eval()
        order = np.bincount(tokens.ravel(), minlength=512).argsort()[::-1][: np.unique(tokens).size]
        marks = PAIRED // 2
        self.spelled: dict[int, tuple[int, ...]] = {int(token): (at,) for at, token in enumerate(order[:SINGLE])}
        for at, token in enumerate(order[SINGLE:]):
            self.spelled[int(token)] = (SINGLE + at // marks, SINGLE + marks + at % marks)
        parts = {"pool": tokens[:-128], "valid": tokens[-128:-64], "test": tokens[-64:]}
        self.teacher_ids = {name: part.reshape(-1, LENGTH) for name, part in parts.items()}
        self.teacher_ids["pool"] = self.teacher_ids["pool"][:POOL]
        self.ids, self.counted = {}, {}
        for name, windows in self.teacher_ids.items():
            rows, self.counted[name] = zip(*map(self.spell, windows), strict=True)
            self.ids[name] = torch.from_numpy(np.stack(rows))
        weights = np.stack([self.weigh(window) for window in self.teacher_ids["pool"]])
        self.pool = {"input_ids": self.teacher_ids["pool"], "token_groups": weights}

    def spell(self, window: np.ndarray) -> tuple[np.ndarray, int]:
        """The student's tokens, padded by -1, and how many of the teacher's they spell whole."""
        spelled, row = [self.spelled[int(token)] for token in window], np.full(MOST, -1)
        ends = np.cumsum([len(marks) for marks in spelled])
        whole = int((ends <= MOST).sum())
        flat = [mark for marks in spelled[:whole] for mark in marks]
        row[: len(flat)] = flat
        return row, whole

    def weigh(self, window: np.ndarray) -> np.ndarray:
        """``(LENGTH, MOST)``: each token of the teacher has two characters, a mark has one."""
        spelled = [self.spelled[int(token)] for token in window][: self.spell(window)[1]]
        spans = [
            (2 * at + part, 2 * at + (2 if len(marks) == 1 else part + 1))
            for at, marks in enumerate(spelled)
            for part in range(len(marks))
        ]
        weights = np.zeros((LENGTH, MOST), np.int64)
        teacher = [(2 * at, 2 * at + 2) for at in range(len(spelled))]
        weights[: len(spelled), : len(spans)] = span_groups(teacher, spans).T
        return weights

    def export(self, graph: Path) -> PrecomputeOptions:
        export_teacher(self.teacher, {"input_ids": torch.from_numpy(self.pool["input_ids"][:2])}, graph)
        return PrecomputeOptions(num_student_heads=4, num_student_layers=3)

    def student(self) -> Any:
        sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4}
        vocabulary = {"vocab_size": SINGLE + PAIRED, "max_position_embeddings": 512, "tie_word_embeddings": True}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, **vocabulary))

    def _losses(self, model: Any, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids.clamp(min=0)).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-1, reduction="sum")

    def loss(self, model: Any, index: Tensor) -> Tensor:
        ids = self.ids["pool"][index]
        return self._losses(model, ids) / (ids[:, 1:] >= 0).sum()

    @torch.no_grad()
    def measure(self, model: Any, part: str) -> dict[str, float]:
        """Nats a token of the teacher, the first of a window left out as it is given."""
        total = float(self._losses(model.eval(), self.ids[part]))
        model.train()
        return {"loss": total / (sum(self.counted[part]) - len(self.ids[part]))}

    @torch.no_grad()
    def measure_teacher(self) -> dict[str, float]:
        ids = torch.from_numpy(self.teacher_ids["test"]).clone()
        logits = self.teacher(input_ids=ids).logits
        for row, count in zip(ids, self.counted["test"], strict=True):
            row[count:] = -1
        return {"loss": float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-1))}


def precompute_both(task: Task, folder: Path) -> None:
    """Caches with whole maps, to compare bytes, and with pooled ones."""
    options = task.export(folder / "teacher.onnx")
    task.stored = {}
    plain = {name: array for name, array in task.pool.items() if name != "token_groups"}
    for name, pool, groups in (("whole", plain, None), ("pooled", task.pool, task.groups)):
        form = replace(options, groups=groups)
        precompute(folder / "teacher.onnx", pool, folder / name, form, RunOptions(num_threads=1))
        task.stored[name] = sum(p.stat().st_size for p in (folder / name).rglob("*.safetensors")) / POOL
    rows = [{name: torch.from_numpy(array[at]) for name, array in task.pool.items()} for at in range(POOL)]
    task.joined = SupervisedDataset(rows, folder / "pooled", preload=True)


def train_student(task: Task, setting: Setting, seed: int, seconds: float) -> dict[str, Any]:
    """For so many processor seconds, its evaluation apart; the rate falls with them to zero."""
    torch.manual_seed(seed)
    model = task.student().train()
    optimizer = torch.optim.AdamW(model.parameters(), setting.rate, weight_decay=0.05)
    collate, steps, started = task.joined.collate_with(default_collate), 0, time.process_time()
    draw = torch.Generator().manual_seed(seed)
    while (progress := (time.process_time() - started) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = setting.rate * min(10 * progress + 0.01, 1.0, 1.1 - progress)
        index = torch.randint(POOL, (task.batch,), generator=draw)
        if setting.beta:
            _, taught = collate(task.joined.__getitems__(index.tolist()))
            with capture_attention(model, taught.layers) as captured:
                loss = task.loss(model, index)
            terms = layer_kls(captured, taught, check=not steps, **task.kl)
            loss = loss + setting.beta * sum(terms.values())
        else:
            loss = task.loss(model, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    judged = {part: task.measure(model, part) for part in ("valid", "test")}
    return {"seed": seed, "steps": steps, **setting._asdict(), **judged}


def choose(task: Task, settings: list[Setting], seconds: float) -> tuple[Setting, list[Any]]:
    """The setting of the lowest mean validation loss."""
    runs = [train_student(task, setting, seed, seconds) for setting in settings for seed in TUNED]
    means = {
        setting: statistics.fmean(
            run["valid"]["loss"] for run in runs if Setting(run["rate"], run["beta"]) == setting
        )
        for setting in settings
    }
    return min(means, key=lambda setting: means[setting]), runs


def compare(task: Task, seconds: float) -> dict[str, Any]:
    """Both arms, tuned, on six seeds."""
    with tempfile.TemporaryDirectory() as folder:
        precompute_both(task, Path(folder))
        alone, tried = choose(task, [Setting(rate, 0.0) for rate in RATES], seconds)
        both, more = choose(task, [Setting(alone.rate, beta) for beta in BETAS], seconds)
        runs = {
            name: [train_student(task, setting, seed, seconds) for seed in SEEDS]
            for name, setting in (("base", alone), ("base_shd", both))
        }
    teacher = task.measure_teacher()
    tests = {name: {part: [run["test"][part] for run in arm] for part in teacher} for name, arm in runs.items()}
    return {
        "seconds": seconds,
        "teacher": teacher,
        "bytes_a_sample": task.stored,
        "groups": task.groups,
        "tried": [*tried, *more],
        "runs": runs,
        "steps": {name: statistics.fmean(run["steps"] for run in arm) for name, arm in runs.items()},
        "means": {name: {part: statistics.fmean(v) for part, v in arm.items()} for name, arm in tests.items()},
        **{part: paired_gain(tests["base"][part], tests["base_shd"][part]) for part in teacher},
    }


def main() -> None:
    """One task after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["images", "stories"], choices=["images", "stories"])
    parser.add_argument("--seconds", type=float, default=12.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    for name in options.tasks:
        figures = compare({"images": Images, "stories": Stories}[name](), options.seconds)
        about = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        result[name] = about | figures
        save(result, RESULT)
        brief = {part: value for part, value in figures.items() if part not in ("tried", "runs")}
        print(json.dumps({name: brief}), flush=True)


if __name__ == "__main__":
    main()
