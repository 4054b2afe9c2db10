"""The demo's comparison: students of one teacher, by method, number of labels and seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shd_ref.cache import CacheReader
from shd_torch.demo.digits import IMAGE_SIZE, NUM_CLASSES, choose_labelled
from shd_torch.demo.train import ArrayDataset, TrainOptions, measure_accuracy, train_student
from shd_torch.demo.vit import VisionTransformer

PATCH_SIZE = 2
STUDENT_HEADS = 2
STUDENT_LAYERS = 2
STUDENT_WIDTH = 32
METHODS: dict[str, dict[str, float]] = {
    "CE": {},
    "CE + KD": {"kd_weight": 0.5},
    "CE + SHD": {"beta": 1.0},
    "CE + KD + SHD": {"kd_weight": 0.5, "beta": 1.0},
}
"""Name -> the training options that differ."""


@dataclass(frozen=True)
class Job:
    """One student: what decides it."""

    method: str
    num_labels: int
    seed: int
    steps: int
    data: str  # npz with image, label, teacher_logits, test_image, test_label
    cache: str


@dataclass(frozen=True)
class Outcome:
    """What became of it: accuracy on the test images, loss terms by step."""

    method: str
    num_labels: int
    seed: int
    accuracy: float
    losses: dict[str, list[float]]


def make_student(seed: int) -> VisionTransformer:
    """A student with the seed's initial weights, the same for every method."""
    torch.manual_seed(seed)
    return VisionTransformer(
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        width=STUDENT_WIDTH,
        num_layers=STUDENT_LAYERS,
        num_heads=STUDENT_HEADS,
        num_classes=NUM_CLASSES,
    )


def train_one(job: Job) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """Train and test one student; the same job gives the same numbers."""
    with np.load(job.data, allow_pickle=False) as arrays:
        chosen = choose_labelled(arrays["label"], job.num_labels, job.seed)
        labelled = ArrayDataset({name: arrays[name][chosen] for name in ("image", "label", "teacher_logits")})
        test_images, test_labels = (torch.from_numpy(arrays[name]) for name in ("test_image", "test_label"))
    student = make_student(job.seed)
    options = TrainOptions(steps=job.steps, seed=job.seed, **METHODS[job.method])  # type: ignore[arg-type]
    history = train_student(student, labelled, options, cache=CacheReader(job.cache) if options.beta else None)
    accuracy = measure_accuracy(student, test_images, test_labels)
    outcome = Outcome(job.method, job.num_labels, job.seed, accuracy, asdict(history))
    return outcome, student.state_dict()


def train_all(
    data: Path,
    cache: Path,
    *,
    num_labels: Sequence[int],
    seeds: Sequence[int],
    steps: int,
    workers: int,
    on_done: Callable[[int, int], None],
) -> list[tuple[Outcome, dict[str, Any]]]:
    """Every method, number of labels and seed, over a few single-threaded processes."""
    jobs = [
        Job(method, labels, seed, steps, str(data), str(cache))
        for labels, seed, method in itertools.product(num_labels, seeds, METHODS)
    ]
    results: dict[Job, tuple[Outcome, dict[str, Any]]] = {}
    # Spawned, not forked: a forked PyTorch may hang in its thread pool.
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(train_one, job): job for job in jobs}
        for number, future in enumerate(as_completed(futures), start=1):
            results[futures[future]] = future.result()
            on_done(number, len(jobs))
    return [results[job] for job in jobs]
