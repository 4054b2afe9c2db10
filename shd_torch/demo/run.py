"""Runs the demo from teacher to table and pictures, through the same commands that a user types."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from scipy import stats

from shd_ref.cache import CacheReader
from shd_ref.errors import ShdError
from shd_ref.plans import MergePlan, merge_pool
from shd_torch.capture.capture import capture_attention
from shd_torch.data.dataset import SupervisedDataset
from shd_torch.demo.digits import IMAGE_SIZE, NUM_CLASSES, Digits, load_split
from shd_torch.demo.pictures import draw_accuracy, draw_alphas, draw_losses, draw_maps
from shd_torch.demo.students import (
    METHODS,
    PATCH_SIZE,
    STUDENT_HEADS,
    STUDENT_LAYERS,
    Outcome,
    make_student,
    train_all,
)
from shd_torch.demo.train import ArrayDataset, measure_accuracy
from shd_torch.demo.vit import VisionTransformer
from shd_torch.export import export_teacher

TEACHER_HEADS = 8
TEACHER_LAYERS = 4
TEACHER_WIDTH = 64
TEACHER_SEED = 0

Results = list[tuple[Outcome, dict[str, Any]]]


def run_demo(
    out: Path,
    *,
    num_labels: Sequence[int] = (50, 100, 300),
    seeds: int = 5,
    steps: int = 240,
    teacher_epochs: int = 30,
    workers: int = 2,
    console: Console | None = None,
) -> dict[str, Any]:
    """Teacher, export, inspect, precompute, verify, students, table, pictures; everything lands in ``out``.

    Returns:
        What ``results.json`` holds.
    """
    console = console or Console(markup=False, emoji=False)
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    digits = load_split()

    console.rule("1. a teacher: 8 heads, 4 layers, all 1,257 labels")
    torch.set_num_threads(1)  # the models are too small for more
    teacher = train_teacher(digits, epochs=teacher_epochs, console=console)
    accuracy = measure_accuracy(teacher, torch.from_numpy(digits.test_images), torch.from_numpy(digits.test_labels))
    console.print(f"teacher: {accuracy:.1%} of {len(digits.test_labels)} test images")

    console.rule("2. its graph and its squeezed attention, offline")
    examples = {"image": torch.from_numpy(digits.train_images[:3])}
    report = export_teacher(teacher, examples, out / "teacher.onnx")
    console.print(f"exported {report.path.name}: differs from the model by at most {report.max_difference:.1g}")
    data = _write_data(out / "digits.npz", digits, teacher)
    # One row a sample: the test images of digits.npz are fewer than those that the teacher labels.
    inputs = out / "teacher_inputs.npz"
    np.savez(inputs, image=digits.train_images)
    _shd(console, "inspect", out / "teacher.onnx")
    cache = out / "cache"
    heads_layers = ("--student-heads", STUDENT_HEADS, "--student-layers", STUDENT_LAYERS)
    _shd(console, "precompute", out / "teacher.onnx", "--inputs", inputs, *heads_layers, "--out", cache)
    _shd(console, "verify", cache, "--teacher", out / "teacher.onnx", "--inputs", inputs)

    console.rule(f"3. students: {STUDENT_HEADS} heads, {STUDENT_LAYERS} layers, few labels")
    columns = (SpinnerColumn(), TextColumn("students"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("students", total=None)
        results = train_all(
            data,
            cache,
            num_labels=num_labels,
            seeds=range(seeds),
            steps=steps,
            workers=workers,
            on_done=lambda done, total: bar.update(task, completed=done, total=total),
        )
    rows = summarise([outcome for outcome, _ in results])
    title = f"test accuracy in %: mean and 95% interval of {seeds} seed{'s' * (seeds > 1)} (teacher {accuracy:.1%})"
    console.print(_table(rows, title, "accuracy", "interval", ".1f"))
    title = "gain over CE + KD in points, paired by seed (same images, same initial weights)"
    console.print(_table(rows, title, "gain_over_kd", "gain_interval", "+.1f"))

    console.rule("4. pictures")
    _draw_all(out, digits, teacher, accuracy, results, rows, num_labels, seeds)
    summary = {
        "teacher_accuracy": accuracy,
        "rows": rows,
        "seeds": seeds,
        "steps": steps,
        "test_images": len(digits.test_labels),
        "seconds": round(time.monotonic() - started, 1),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    (out / "results.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for name in ("accuracy.png", "maps.png", "alphas.png", "losses.png", "results.json"):
        console.print(f"  {out / name}")
    console.print(f"done in {summary['seconds']:.0f} s")
    return summary


def train_teacher(digits: Digits, *, epochs: int, console: Console) -> VisionTransformer:
    """A good teacher: all training labels, label smoothing, one-cycle schedule; seeded."""
    torch.manual_seed(TEACHER_SEED)
    teacher = VisionTransformer(
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        width=TEACHER_WIDTH,
        num_layers=TEACHER_LAYERS,
        num_heads=TEACHER_HEADS,
        num_classes=NUM_CLASSES,
    )
    images, labels = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    batch_size = 64
    steps_per_epoch = len(images) // batch_size
    optimizer = torch.optim.AdamW(teacher.parameters(), 2e-3, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, epochs * steps_per_epoch)
    generator = torch.Generator().manual_seed(TEACHER_SEED)
    with Progress(TextColumn("epoch"), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as bar:
        for _ in bar.track(range(epochs)):
            order = torch.randperm(len(images), generator=generator)
            for chosen in torch.split(order[: steps_per_epoch * batch_size], batch_size):
                loss = F.cross_entropy(teacher(images[chosen]), labels[chosen], label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without a type
                optimizer.step()
                schedule.step()
    return teacher.eval()


def summarise(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row per number of labels and method: mean accuracy, 95% t interval over seeds, and the gain over KD.

    The gain is paired: the same seed has the same labelled images and the same initial weights in every method.
    """
    rows = []
    for labels in sorted({outcome.num_labels for outcome in outcomes}):
        by_method = {
            method: np.array([o.accuracy for o in sorted(outcomes, key=lambda o: o.seed) if _is(o, method, labels)])
            for method in METHODS
        }
        for method, accuracies in by_method.items():
            gain = accuracies - by_method["CE + KD"]
            rows.append(
                {
                    "labels": labels,
                    "method": method,
                    "accuracy": float(accuracies.mean()),
                    "interval": _half_interval(accuracies),
                    "gain_over_kd": float(gain.mean()),
                    "gain_interval": _half_interval(gain),
                    "by_seed": [float(accuracy) for accuracy in accuracies],
                }
            )
    return rows


def _is(outcome: Outcome, method: str, labels: int) -> bool:
    return outcome.method == method and outcome.num_labels == labels


def _half_interval(values: NDArray[Any]) -> float:
    """Half the width of the 95% t interval of a mean."""
    if len(values) < 2:
        return float("nan")
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def _table(rows: Sequence[dict[str, Any]], title: str, value: str, interval: str, form: str) -> Table:
    """A row per method, a column per number of labels; ``form`` formats a percentage."""
    counts = sorted({row["labels"] for row in rows})
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for count in counts:
        table.add_column(f"{count} labels", justify="right", no_wrap=True)
    for method in METHODS:
        chosen = {row["labels"]: row for row in rows if row["method"] == method}
        cells = [(100 * chosen[count][value], 100 * chosen[count][interval]) for count in counts]
        # One seed has no interval.
        table.add_row(method, *(f"{mean:{form}}" + f" ± {half:.1f}" * (half == half) for mean, half in cells))
    return table


def _write_data(path: Path, digits: Digits, teacher: VisionTransformer) -> Path:
    with torch.no_grad():
        teacher_logits = teacher(torch.from_numpy(digits.train_images)).numpy()
    np.savez(
        path,
        image=digits.train_images,
        label=digits.train_labels,
        teacher_logits=teacher_logits,
        test_image=digits.test_images,
        test_label=digits.test_labels,
    )
    return path


def _shd(console: Console, *arguments: object) -> None:
    """Run a ``shd`` command as a user would, and show what it prints."""
    words = [str(argument) for argument in arguments]
    console.print(f"$ shd {' '.join(words)}", style="bold", highlight=False, soft_wrap=True)
    done = subprocess.run([sys.executable, "-c", "from shd_ref.cli import main; main()", *words], check=False)
    if done.returncode:
        raise ShdError("export-failed", f"shd {words[0]} must succeed in the demo; it ended with {done.returncode}")


def _draw_all(
    out: Path,
    digits: Digits,
    teacher: VisionTransformer,
    teacher_accuracy: float,
    results: Results,
    rows: list[dict[str, Any]],
    num_labels: Sequence[int],
    seeds: int,
) -> None:
    middle = num_labels[len(num_labels) // 2]
    reader = CacheReader(out / "cache")
    students = {o.method: state for o, state in results if o.num_labels == middle and o.seed == 0}
    # A training image: the cache holds its squeezed maps.
    index = int(np.flatnonzero(digits.train_labels == 3)[0])
    image = torch.from_numpy(digits.train_images[index : index + 1])
    joined = SupervisedDataset(ArrayDataset({"image": digits.train_images[index : index + 1]}), reader)
    _, supervision = joined.collate([joined[0]])
    squeezed = supervision.decode()[-1][0].numpy()
    panels = [
        (f"teacher, {TEACHER_HEADS} heads", _class_rows(_last_maps(teacher, image))),
        (f"squeezed to {STUDENT_HEADS}", _class_rows(squeezed)),
    ]
    for method in ("CE + KD + SHD", "CE + KD"):
        student = make_student(0)
        student.load_state_dict(students[method])
        panels.append((f"student\n{method}", _class_rows(_last_maps(student.eval(), image))))
    draw_maps(digits.train_images[index], panels, out / "maps.png")

    manifest = reader.manifest
    alphas = np.stack([reader.read(key, layers=()).alphas for key in reader])
    titles = [f"student layer {p.student_layer}, teacher layer {p.teacher_layer}" for p in manifest.attention.layers]
    draw_alphas(alphas, titles, _pair_labels(manifest.attention.plan, TEACHER_HEADS), out / "alphas.png")

    curves: dict[str, dict[str, NDArray[Any]]] = {}
    for term in ("ce", "kd", "shd"):
        curves[term] = {}
        for method in METHODS:
            runs = [o.losses[term] for o, _ in results if _is(o, method, middle) and o.losses[term]]
            if runs:
                curves[term][method] = np.mean(runs, axis=0)
    draw_losses(curves, out / "losses.png")
    draw_accuracy(rows, teacher_accuracy, out / "accuracy.png")


def _last_maps(model: VisionTransformer, image: torch.Tensor) -> NDArray[Any]:
    """``(H, L, L)`` of the last layer."""
    with torch.no_grad(), capture_attention(model) as captured:
        model(image)
    maps: NDArray[Any] = captured.probs[-1][0].numpy()
    return maps


def _class_rows(maps: NDArray[Any]) -> NDArray[Any]:
    """The class token's attention to the patches as a picture, ``(H, n, n)``."""
    side = IMAGE_SIZE // PATCH_SIZE
    return maps[:, 0, 1:].reshape(-1, side, side)


def _pair_labels(plan: MergePlan, heads: int) -> list[str]:
    """What each alpha merges, as the teacher heads on both sides, such as ``01+23``."""
    pool: list[tuple[int, ...]] = [(head,) for head in range(heads)]
    labels = []
    for one_round in plan:
        labels += [f"{''.join(map(str, pool[p]))}+{''.join(map(str, pool[q]))}" for p, q in one_round]
        pool = merge_pool(pool, one_round)
    return labels
