"""The demo's comparison: students of one teacher by start, loss, number of labels and seed."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import StackDataset

from shd_torch.data.dataset import SupervisedDataset
from shd_torch.demo.models import choose_labelled, measure_accuracy
from shd_torch.export import hide_weight_bars
from shd_torch.training.terms import KdTerm

STARTS: Final = ("random", "squeezed")
BETA: Final = 1.0
KD: Final = KdTerm(weight=1.0, temperature=2.0)
LEARNING_RATE: Final = 1e-3
"""Of five, the best on average over both starts, KD and KD + SHD with 100 labels, on training images whose labels no
student saw."""
CURVE_POINTS: Final = 20
"""Of each loss curve."""
TERMS: Final = {"base_loss": "cross entropy", "kd_loss": "KD", "shd_loss": "SHD, sum over layers"}
"""What is drawn, by the name under which ``SHDTrainer`` logs it."""


class Method(NamedTuple):
    """A row of the table: where the student starts, and which terms it is trained on beside cross entropy."""

    start: str
    kd: bool = False
    shd: bool = False

    @property
    def terms(self) -> str:
        """In words."""
        return f"CE{' + KD' * self.kd}{' + SHD' * self.shd}"

    def __str__(self) -> str:
        return f"{self.start} start: {self.terms}"


METHODS: Final = tuple(
    Method(start, *terms) for start in STARTS for terms in ((False, False), (True, False), (True, True))
)


class Job(NamedTuple):
    """One student, trained on so many labelled images."""

    method: Method
    num_labels: int
    seed: int  # of the choice of images, of random weights and of batches
    steps: int
    folder: Path  # the demo's, with digits.npz, student/ and cache/


@dataclass(frozen=True)
class Outcome:
    """What became of a job: accuracy on the test images, loss terms as ``(step, value)``, and weights if kept."""

    method: Method
    num_labels: int
    seed: int
    accuracy: float
    losses: dict[str, list[tuple[int, float]]]
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def load_start(folder: Path, start: str, seed: int) -> Any:
    """The squeezed student as ``shd-torch shrink`` left it, or its class with random weights."""
    from shd_torch.shrink import load_student

    student = load_student(folder / "student")
    if start == "squeezed":
        return student
    torch.manual_seed(seed)
    return type(student)(student.config).eval()


def train_one(job: Job) -> Outcome:
    """Train and test one student; the same job gives the same numbers."""
    with np.load(job.folder / "digits.npz", allow_pickle=False) as arrays:
        chosen = choose_labelled(arrays["labels"], job.num_labels, job.seed)
        tensors: Any = {name: torch.from_numpy(arrays[name][chosen]) for name in ("pixel_values", "labels")}
        tested: tuple[NDArray[Any], NDArray[Any]] = arrays["test_images"], arrays["test_labels"]
    student = load_start(job.folder, job.method.start, job.seed)
    losses: dict[str, list[tuple[int, float]]] = {}
    for entry in _train(student, StackDataset(**tensors), job):
        for term in TERMS.keys() & entry.keys():
            losses.setdefault(term, []).append((entry["step"], entry[term]))
    accuracy = measure_accuracy(student, *tested)
    return Outcome(job.method, job.num_labels, job.seed, accuracy, losses, student.state_dict())


def _train(student: Any, labelled: StackDataset[Any], job: Job) -> list[dict[str, Any]]:
    """What the trainer logged."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from shd_torch.training.trainer import SHDTrainer

    method = job.method
    with tempfile.TemporaryDirectory() as unused:
        arguments = TrainingArguments(
            output_dir=unused,
            max_steps=job.steps,
            per_device_train_batch_size=64,
            learning_rate=LEARNING_RATE,
            weight_decay=0.05,
            lr_scheduler_type="cosine",
            warmup_steps=job.steps // 10,
            seed=job.seed,
            logging_steps=max(1, job.steps // CURVE_POINTS),
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        if method.kd or method.shd:
            # What is not taught is not read.
            layers = None if method.shd else ()
            joined = SupervisedDataset(labelled, job.folder / "cache", layers=layers, preload=True)
            terms: dict[str, Any] = {"beta": BETA if method.shd else None, "kd": KD if method.kd else None}
            trainer: Trainer = SHDTrainer(model=student, args=arguments, train_dataset=joined, **terms)
        else:
            trainer = Trainer(model=student, args=arguments, train_dataset=labelled)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    # Without terms beside it the loss is the base loss.
    history: list[dict[str, Any]] = trainer.state.log_history
    return [{"base_loss": entry["loss"], **entry} if "loss" in entry else entry for entry in history]


def train_all(
    folder: Path,
    *,
    num_labels: Sequence[int],
    seeds: Sequence[int],
    steps: int,
    workers: int,
    on_done: Callable[[int, int], None],
) -> list[Outcome]:
    """Every method, number of labels and seed, over a few single-threaded processes."""
    choices = itertools.product(num_labels, seeds, METHODS)
    jobs = [Job(method, labels, seed, steps, folder) for labels, seed, method in choices]
    results: dict[Job, Outcome] = {}
    # Spawned, not forked: a forked PyTorch may hang in its thread pool.
    with ProcessPoolExecutor(workers, get_context("spawn"), be_quiet_and_single) as pool:
        futures = {pool.submit(train_one, job): job for job in jobs}
        for number, future in enumerate(as_completed(futures), start=1):
            results[futures[future]] = future.result()
            on_done(number, len(jobs))
    return [results[job] for job in jobs]


def be_quiet_and_single() -> None:
    """One thread, as the models are too small for more; no bars of transformers'."""
    hide_weight_bars()
    torch.set_num_threads(1)
