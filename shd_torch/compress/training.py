"""Training from a cache of the teacher's outputs: batches of similar length, a fixed number of steps, resumable."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from shd_torch.compress.samples import BATCH, Row, collate, collate_with_labels, training_order
from shd_torch.compress.task import Task
from shd_torch.data import SupervisedDataset
from shd_torch.shrink.folders import padding_of
from shd_torch.training.trainer import SHDTrainer, last_checkpoint

BETA: Final = 0.02
"""Weight of SHD where it is tried."""
_CHECKPOINTS: Final = 20


@dataclass(frozen=True)
class TrainingConfig:
    """What a student learns from, and how."""

    rows: Sequence[Row]  # of the training set
    cache: Path  # of the teacher's outputs for them
    steps: int  # of 32 samples
    seed: int  # of the order of samples
    half: bool  # products in bfloat16
    learning_rate: float  # at its height
    shd: bool = False  # the cache has merged maps, which are a term


def train(
    task: Task,
    student: Any,
    teacher_layers: int,
    config: TrainingConfig,
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Train a student in place; returns the seconds of a step.

    Checkpoints in ``folder`` let a killed run go on: the student is then the same as without the kill.
    """
    steps, embeddings = config.steps, student.get_input_embeddings()
    if task.FREEZES_EMBEDDINGS and isinstance(embeddings, nn.Embedding):
        embeddings.requires_grad_(False)
    for module in student.modules():
        if isinstance(module, nn.Dropout):  # the teacher is exact: it would only add noise
            module.p = 0.0
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=min(100, steps // 10),
        weight_decay=0.01,
        seed=config.seed,
        bf16=config.half,
        save_steps=max(50, math.ceil(steps / _CHECKPOINTS)),
        save_total_limit=1,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
        remove_unused_columns=False,
    )
    trainer = _Trainer(
        student,
        arguments,
        order=training_order(config.rows, steps, BATCH, config.seed),
        train_dataset=SupervisedDataset(config.rows, config.cache),
        data_collator=partial(collate_with_labels if task.HAS_LABELS else collate, pad_id=padding_of(student.config)),
        beta=BETA if config.shd else None,
        **task.terms(teacher_layers, student),
    )
    trainer.remove_callback(PrinterCallback)
    pace = _Pace(progress)
    trainer.add_callback(pace)
    checkpoint = last_checkpoint(folder)
    trainer.train(None if checkpoint is None else str(checkpoint))
    student.to("cpu").requires_grad_(True)  # where it is judged and exported
    return pace.seconds


class _Trainer(SHDTrainer):
    """Takes samples in a given order, the whole run as one epoch."""

    def __init__(self, *args: Any, order: Sequence[int], **kwargs: Any) -> None:
        self._order = order
        super().__init__(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self._order


class _Pace(TrainerCallback):
    """Counts steps, and measures how long one takes."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._progress = progress
        self._times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Of the trainer."""
        self._times.append(time.monotonic())
        self._progress(state.global_step, state.max_steps)

    @property
    def seconds(self) -> float:
        """Median of a step, which other programs move less than the mean."""
        steps = [after - before for before, after in pairwise(self._times)]
        return statistics.median(steps) if steps else 0.0
