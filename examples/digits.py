"""The whole path on handwritten digits: a teacher, a squeezed student, one cache, and students of few labels.

    python digits.py                        # also `nox -s demo`; about 5 minutes of one core

A vision transformer with 8 heads learns scikit-learn's digits. The commands export it, make a student of 2 heads that
starts as the squeezed teacher, and store attention and logits in a cache. Students then train on 50 or 300 labels,
from random weights or squeezed, with cross entropy (CE), KD and SHD; the teacher is no longer in memory. It prints

    teacher: 96.9% of 540 test images
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from matplotlib.figure import Figure  # without pyplot: files, no window
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch.utils.data import StackDataset
from transformers import PrinterCallback, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from shd_ref.cache import CacheReader
from shd_ref.merging.plans import merge_pool
from shd_ref.teacher.study.intervals import half_width
from shd_torch import KdTerm, SHDTrainer, SupervisedDataset, load_student

torch.set_num_threads(1)  # in every process: the models are too small for more
transformers.utils.logging.disable_progress_bar()
HEADS = 8
METHODS = tuple(itertools.product(("random", "squeezed"), ("CE", "CE + KD", "CE + KD + SHD")))  # start, terms
COMPARISONS = {
    "adding SHD to KD, random start": (("random", "CE + KD + SHD"), ("random", "CE + KD")),
    "adding SHD to KD, squeezed start": (("squeezed", "CE + KD + SHD"), ("squeezed", "CE + KD")),
    "squeezed instead of random start, both with KD": (("squeezed", "CE + KD"), ("random", "CE + KD")),
}  # each the first method's accuracy less the second's, seed by seed


def main() -> None:
    """From the teacher to a table and two pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="a new folder for everything")
    parser.add_argument("--labels", type=int, nargs="+", default=[50, 300], help="numbers of labelled images")
    parser.add_argument("--seeds", type=int, default=5, help="students of each method and number of labels")
    parser.add_argument("--steps", type=int, default=200, help="of each student")
    parser.add_argument("--epochs", type=int, default=30, help="of the teacher")
    given = parser.parse_args()
    out = given.out
    if out.exists():
        parser.error(f"{out} exists: remove it, or name another folder with --out")
    out.mkdir(parents=True)
    digits = load_split()
    np.savez(out / "digits.npz", **digits)
    np.savez(out / "images.npz", pixel_values=digits["pixel_values"])  # what the teacher reads, without labels

    teacher = train_teacher(digits, given.epochs)
    found: dict[str, Any] = {"teacher_accuracy": measure_accuracy(teacher, digits)}
    print(f"teacher: {found['teacher_accuracy']:.1%} of {len(digits['test_labels'])} test images")
    teacher.save_pretrained(out / "teacher")
    run_in(out, "shd-torch export teacher --out teacher.onnx")
    run_in(out, "shd-torch shrink teacher --data images.npz --heads 2 --layers 2 --samples 256 --out student")
    found["squeezed_accuracy"] = measure_accuracy(load_student(out / "student"), digits)
    print(f"squeezed, before any training: {found['squeezed_accuracy']:.1%}")
    run_in(out, "shd precompute teacher.onnx --inputs images.npz --student student --logits float16 --out cache")
    run_in(out, "shd verify cache --teacher teacher.onnx --inputs images.npz")
    draw_alphas(out)

    jobs = list(itertools.product(given.labels, METHODS, range(given.seeds), [given.steps], [out]))
    # Spawned, not forked: a forked PyTorch may hang in its thread pool.
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        accuracies = list(pool.map(train_student, *zip(*jobs, strict=True)))
    by_seed = np.reshape(accuracies, (len(given.labels), len(METHODS), given.seeds))
    found |= {"accuracy": [], "gain": []}
    for labels, rows in zip(given.labels, by_seed, strict=True):
        by_method = dict(zip(METHODS, rows, strict=True))
        named = {f"{start} start: {terms}": values for (start, terms), values in by_method.items()}
        linear = np.array([fit_linear(digits, labels, seed) for seed in range(given.seeds)])
        found["accuracy"] += describe(labels, {"logistic regression on pixels": linear} | named)
        gains = {name: by_method[one] - by_method[other] for name, (one, other) in COMPARISONS.items()}
        found["gain"] += describe(labels, gains)
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print_table("test accuracy in %, mean and 95% interval over seeds", found["accuracy"], ".1f")
    print_table("differences in points, paired by seed; one that contains 0 shows nothing", found["gain"], "+.1f")
    draw_accuracy(found, out / "accuracy.png")
    print(f"{out} has results.json, accuracy.png and alphas.png")


def load_split() -> dict[str, np.ndarray]:
    """Images ``(N, 1, 8, 8)`` in [0, 1]; 30%, stratified by class, are kept for testing."""
    data = load_digits()
    images, labels = (data.images / 16.0).astype(np.float32)[:, None], data.target.astype(np.int64)
    split = train_test_split(images, labels, test_size=0.3, stratify=labels, random_state=0)
    return dict(zip(("pixel_values", "test_images", "labels", "test_labels"), split, strict=True))


def choose_labelled(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Numbers of ``count`` training images, as many of each class as possible, drawn with the seed."""
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    rank = np.tril(labels[shuffled][:, None] == labels[shuffled]).sum(1)  # of each in its class
    return np.sort(shuffled[np.argsort(rank, kind="stable")][:count])


def train_teacher(digits: dict[str, np.ndarray], epochs: int) -> Any:
    """All training labels, label smoothing, one-cycle schedule; 4 layers, 17 positions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": HEADS}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = ViTConfig(image_size=8, patch_size=2, num_channels=1, **sizes)
    config.num_labels = 10
    teacher = ViTForImageClassification(config)
    images, labels = torch.from_numpy(digits["pixel_values"]), torch.from_numpy(digits["labels"])
    batch, rate = 64, 2e-3
    steps = len(images) // batch
    optimizer = torch.optim.AdamW(teacher.parameters(), rate, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, epochs * steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images), generator=generator)[: steps * batch].split(batch):
            logits = teacher(images[chosen]).logits
            loss = torch.nn.functional.cross_entropy(logits, labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return teacher.eval()


@torch.no_grad()
def measure_accuracy(model: Any, digits: Any) -> float:
    """Share of the test images whose largest logit is their label."""
    predicted = model.eval()(torch.from_numpy(digits["test_images"])).logits.argmax(-1)
    return float((predicted == torch.from_numpy(digits["test_labels"])).float().mean())


def run_in(folder: Path, line: str) -> None:
    """Run a command as a user would, and show it."""
    program, *words = line.split()
    print(f"$ {line}", flush=True)
    subprocess.run([Path(sys.executable).with_name(program).absolute(), *words], cwd=folder, check=True)


def train_student(count: int, method: tuple[str, str], seed: int, steps: int, folder: Path) -> float:
    """Test accuracy of one student; the seed chooses labelled images, random weights and batches."""
    start, terms = method
    with np.load(folder / "digits.npz") as file:
        digits = dict(file)
    chosen = choose_labelled(digits["labels"], count, seed)
    arrays = {name: torch.from_numpy(digits[name][chosen]) for name in ("pixel_values", "labels")}
    labelled: Any = StackDataset(**arrays)
    student = load_student(folder / "student")
    if start == "random":
        torch.manual_seed(seed)
        student = type(student)(student.config)
    given: Any = {"learning_rate": 1e-3, "weight_decay": 0.05, "lr_scheduler_type": "cosine"}
    given |= {"max_steps": steps, "warmup_steps": steps // 10, "per_device_train_batch_size": 64, "seed": seed}
    given |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as unused:
        arguments = TrainingArguments(output_dir=unused, **given)
        if terms == "CE":
            trainer = Trainer(model=student, args=arguments, train_dataset=labelled)
        else:
            has_shd = terms.endswith("SHD")
            # What is not taught is not read.
            joined = SupervisedDataset(labelled, folder / "cache", layers=None if has_shd else (), preload=True)
            options: Any = {"beta": 1.0 if has_shd else None, "kd": KdTerm(weight=1.0, temperature=2.0)}
            trainer = SHDTrainer(model=student, args=arguments, train_dataset=joined, **options)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return measure_accuracy(student, digits)


def fit_linear(digits: dict[str, np.ndarray], count: int, seed: int) -> float:
    """Test accuracy of logistic regression on the images whose labels a student of this seed sees."""
    chosen = choose_labelled(digits["labels"], count, seed)
    model = LogisticRegression(max_iter=2000)
    model.fit(digits["pixel_values"][chosen].reshape(count, -1), digits["labels"][chosen])
    return float(model.score(digits["test_images"].reshape(len(digits["test_images"]), -1), digits["test_labels"]))


def describe(labels: int, named: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Rows of a table, means with 95% intervals; one seed has none."""
    return [
        {"labels": labels, "name": name, "mean": values.mean(), "interval": half_width(values)}
        for name, values in named.items()
    ]


def print_table(title: str, rows: list[dict[str, Any]], form: str) -> None:
    """A line a name, a column a number of labels."""
    counts = sorted({row["labels"] for row in rows})
    print(f"\n{title}\n{'':48}" + "".join(f"{f'{count} labels':>14}" for count in counts))
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = {row["labels"]: row for row in rows if row["name"] == name}
        texts = [f"{100 * cells[n]['mean']:{form}} ± {100 * (cells[n]['interval'] or 0):.1f}" for n in counts]
        print(f"{name:48}" + "".join(f"{text:>14}" for text in texts))


def draw_accuracy(found: dict[str, Any], path: Path) -> None:
    """Test accuracy against the number of labelled images, with 95% intervals over seeds."""
    figure = Figure((6.4, 4.0), 150, layout="tight")
    axis = figure.subplots()
    counts = sorted({row["labels"] for row in found["accuracy"]})
    colors = {"CE": "#7f7f7f", "CE + KD": "#1f77b4", "CE + KD + SHD": "#d62728"}
    for number, (start, terms) in enumerate(METHODS):
        rows = [row for row in found["accuracy"] if row["name"] == f"{start} start: {terms}"]
        at = [counts.index(row["labels"]) + 0.05 * (number - 2.5) for row in rows]
        means, spreads = ([100 * (row[key] or 0.0) for row in rows] for key in ("mean", "interval"))
        style: Any = {"color": colors[terms], "linestyle": "--" if start == "random" else "-", "marker": "o"}
        axis.errorbar(at, means, yerr=spreads, capsize=2, label=f"{start}: {terms}", **style)
    axis.axhline(100 * found["teacher_accuracy"], color="black", linestyle=":", label="teacher, all labels")
    axis.axhline(100 * found["squeezed_accuracy"], color="black", linestyle="-.", label="squeezed, untrained")
    axis.set_xticks(range(len(counts)), [f"{count} labels" for count in counts])
    axis.set_ylabel("test accuracy, % (mean, 95% interval)")
    axis.legend(fontsize=7, frameon=False, loc="lower right")
    figure.savefig(path)


def draw_alphas(folder: Path) -> None:
    """How alphas, before clipping, spread over samples, by the teacher heads on both sides, such as ``01+23``."""
    reader = CacheReader(folder / "cache")
    attention = reader.manifest.attention
    alphas = np.stack([attention.alphas(reader.read(key, layers=())) for key in reader])  # (N, layers, pairs)
    figure = Figure((4.6 * len(attention.layers), 3.2), 150, layout="tight")
    axes = figure.subplots(1, len(attention.layers), sharey=True, squeeze=False)[0]
    for number, (axis, pair, plan) in enumerate(zip(axes, attention.layers, attention.layer_plans, strict=True)):
        pool, names = [(head,) for head in range(HEADS)], []
        for one_round in plan:
            names += [f"{''.join(map(str, pool[p]))}+{''.join(map(str, pool[q]))}" for p, q in one_round]
            pool = merge_pool(pool, one_round)
        axis.axhspan(0, 1, color="#f2f2f2", zorder=0)
        axis.boxplot(alphas[:, number], tick_labels=names, widths=0.6, flierprops={"markersize": 2, "alpha": 0.3})
        axis.set_title(f"student layer {pair.student_layer}, teacher layer {pair.teacher_layer}", fontsize=9)
    axes[0].set_ylabel("alpha of two merged teacher heads")
    figure.savefig(folder / "alphas.png")


if __name__ == "__main__":
    main()
