"""Runs the demo from teacher to table and pictures, through the same commands that a user types."""

from __future__ import annotations

import json
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from shd_ref.cache import CacheReader, Maps
from shd_ref.commands.terminal import PlainConsole, show_progress
from shd_ref.errors import ShdError
from shd_ref.merging.plans import MergePlan, merge_pool
from shd_torch.demo import models, page, students
from shd_torch.demo.models import TEACHER_HEADS, TEACHER_LAYERS, Digits
from shd_torch.demo.students import METHODS, Method, Outcome

STUDENT_HEADS = 2
STUDENT_LAYERS = 2
CALIBRATION = 256
"""Images, without their labels, on which the squeezed student is fitted."""
MARK = ".shd-torch-demo"
"""In a folder that the demo made, which alone it clears."""


def run_demo(
    out: Path,
    *,
    num_labels: Sequence[int] = (50, 300),
    seeds: int = 5,
    steps: int = 200,
    teacher_epochs: int = 30,
    workers: int = 2,
    console: Console | None = None,
) -> dict[str, Any]:
    """Teacher, export, shrink, precompute, verify, students, tables, pictures; everything lands in ``out``.

    Returns:
        What ``results.json`` holds.
    """
    console = console or PlainConsole()
    started = time.monotonic()
    _clear(out)
    students.be_quiet_and_single()
    digits = models.load_split()

    console.rule(f"1. a teacher: {TEACHER_HEADS} heads, {TEACHER_LAYERS} layers, all 1,257 labels")
    with show_progress("epochs") as (on_epoch,):
        teacher = models.train_teacher(digits, epochs=teacher_epochs, on_epoch=on_epoch)
    accuracy = models.measure_accuracy(teacher, digits.test_images, digits.test_labels)
    console.print(f"teacher: {accuracy:.1%} of {len(digits.test_labels)} test images")
    teacher.save_pretrained(out / "teacher")

    console.rule("2. a student that starts as the squeezed teacher")
    images = _write_data(out, digits)
    graph, folder = out / "teacher.onnx", out / "student"
    _run(console, "shd-torch", "export", out / "teacher", "--out", graph)
    sizes = ("--heads", STUDENT_HEADS, "--layers", STUDENT_LAYERS, "--samples", CALIBRATION)
    _run(console, "shd-torch", "shrink", out / "teacher", "--data", images, *sizes, "--out", folder)
    start = _describe_start(folder, digits)
    console.print(f"squeezed, before any training: {start['accuracy']:.1%} of the test images")

    console.rule("3. the teacher's attention and logits, in one cache")
    cache = out / "cache"
    words = ("precompute", graph, "--inputs", images, "--student", folder, "--logits", "float16", "--out", cache)
    _run(console, "shd", *words)
    _run(console, "shd", "verify", cache, "--teacher", graph, "--inputs", images)

    console.rule(f"4. students: {STUDENT_HEADS} heads, {STUDENT_LAYERS} layers, few labels, no teacher in memory")
    with show_progress("students") as (on_done,):
        results = students.train_all(
            out, num_labels=num_labels, seeds=range(seeds), steps=steps, workers=workers, on_done=on_done
        )
    tables = page.summarise(results) | {"linear": page.summarise_linear(digits, num_labels, seeds)}
    several = f"{seeds} seed{'s' * (seeds > 1)}"
    title = f"test accuracy in %: mean and 95% interval of {several} (teacher {accuracy:.1%})"
    console.print(page.console_table([*tables["linear"], *tables["accuracy"]], title, ".1f"))
    title = "differences in points, paired by seed; an interval that contains 0 shows nothing"
    console.print(page.console_table(tables["gain"], title, "+.1f"))

    _draw_alphas(out)
    _draw_curves(out, results)
    lines = {f"teacher ({TEACHER_HEADS} heads, all labels)": accuracy, "squeezed start, untrained": start["accuracy"]}
    by_method = {method: [row for row in tables["accuracy"] if row["name"] == str(method)] for method in METHODS}
    page.draw_accuracy(by_method, lines, out / "accuracy.png")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    summary = {
        "teacher_accuracy": accuracy,
        "squeezed_start": start,
        **tables,
        "seeds": seeds,
        "steps": steps,
        "beta": students.BETA,
        "learning_rate": students.LEARNING_RATE,
        "test_images": len(digits.test_labels),
        "cache_bytes": sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()),
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(sum(usage.ru_utime + usage.ru_stime for usage in used), 1),
        "machine": f"{platform.machine()}, {workers} students at a time, torch {torch.__version__}",
    }
    (out / "results.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(page.render_page(summary), encoding="utf-8")
    console.print(f"done in {summary['seconds']:.0f} s: {out / 'README.md'} has the tables and the pictures")
    console.rule("now your own teacher")
    console.print(f"{page.YOUR_OWN}\n\n{page.YOUR_TRAINING}", highlight=False, soft_wrap=True)
    return summary


def _clear(out: Path) -> None:
    """An empty folder; one that the demo made is made again."""
    if out.is_dir() and any(out.iterdir()):
        if not (out / MARK).is_file():
            message = f"--out must be a new folder, or one of the demo's; got {out}, which holds others' files"
            raise ShdError("argument-value", message)
        for name in ("teacher", "student", "cache"):
            shutil.rmtree(out / name, ignore_errors=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / MARK).touch()
    except OSError as error:
        raise ShdError("write-failed", f"--out must be a folder that can be written; got {out}: {error}") from error


def _write_data(out: Path, digits: Digits) -> Path:
    """``digits.npz`` for students, and what the teacher reads, without labels: the returned path."""
    tests: Any = {"test_images": digits.test_images, "test_labels": digits.test_labels}
    np.savez(out / "digits.npz", pixel_values=digits.train_images, labels=digits.train_labels, **tests)
    images = out / "images.npz"
    np.savez(images, pixel_values=digits.train_images)
    return images


def _describe_start(folder: Path, digits: Digits) -> dict[str, Any]:
    """What ``shrink`` made: sizes, and how good it is before any training."""
    report = json.loads((folder / "shrink.json").read_text(encoding="utf-8"))
    names = ("heads", "layers", "parameters")
    untrained = students.load_start(folder.parent, "squeezed", 0)
    sizes = {f"teacher_{name}": report["teacher"][name] for name in names}
    sizes |= {name: report["student"][name] for name in names}
    return {**sizes, "accuracy": models.measure_accuracy(untrained, digits.test_images, digits.test_labels)}


def _run(console: Console, program: str, *arguments: object) -> None:
    """Run a command as a user would, and show what it prints."""
    words = [str(argument) for argument in arguments]
    console.print(f"$ {program} {' '.join(words)}", style="bold", highlight=False, soft_wrap=True)
    package = {"shd": "shd_ref", "shd-torch": "shd_torch"}[program]
    program_words = [sys.executable, "-c", f"from {package}.cli import main; main()", *words]
    done = subprocess.run(program_words, stdout=subprocess.DEVNULL if console.quiet else None, check=False)
    if done.returncode:
        message = f"{program} {words[0]} must succeed in the demo; it ended with {done.returncode}"
        raise ShdError("export-failed", message)


def _draw_alphas(out: Path) -> None:
    """How the maps in the cache were merged."""
    reader = CacheReader(out / "cache")
    attention = reader.manifest.attention
    assert isinstance(attention, Maps)
    alphas = np.stack([attention.alphas(reader.read(key, layers=())) for key in reader])
    titles = [f"student layer {p.student_layer}, teacher layer {p.teacher_layer}" for p in attention.layers]
    labels = [_pair_labels(plan, TEACHER_HEADS) for plan in attention.layer_plans]
    page.draw_alphas(alphas, titles, labels, out / "alphas.png")


def _draw_curves(out: Path, outcomes: Sequence[Outcome]) -> None:
    middle = _of_middle_count(outcomes)
    curves: dict[str, dict[Method, NDArray[Any]]] = {}
    for term, name in students.TERMS.items():
        for method in METHODS:
            runs = [one.losses[term] for one in middle if one.method == method and term in one.losses]
            if runs:
                curves.setdefault(f"{name}, {middle[0].num_labels} labels", {})[method] = np.mean(runs, axis=0)
    page.draw_losses(curves, out / "losses.png")


def _of_middle_count(outcomes: Sequence[Outcome]) -> list[Outcome]:
    counts = sorted({one.num_labels for one in outcomes})
    return [one for one in outcomes if one.num_labels == counts[len(counts) // 2]]


def _pair_labels(plan: MergePlan, heads: int) -> list[str]:
    """What each alpha merges, as the teacher heads on both sides, such as ``01+23``."""
    pool: list[tuple[int, ...]] = [(head,) for head in range(heads)]
    labels = []
    for one_round in plan:
        labels += [f"{''.join(map(str, pool[p]))}+{''.join(map(str, pool[q]))}" for p, q in one_round]
        pool = merge_pool(pool, one_round)
    return labels
