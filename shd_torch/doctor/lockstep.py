"""Students that train side by side on the same batches: the teacher runs once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shd_torch.doctor.objective import Batch, Objective, cut_batches, inputs_of, student_terms
from shd_torch.teacher import OnlineTeacher


def train_students(
    students: Sequence[Any],
    betas: Sequence[float | None],
    teacher: OnlineTeacher,
    objective: Objective,
    data: Batch,
    rows: Tensor,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    done: Callable[[int], None] | None = None,
) -> None:
    """AdamW with a warm-up of a tenth of the steps and gradients cut to length 1.

    Args:
        students: are changed, and left in training mode.
        betas: the weight of SHD of each; None leaves it out.
        teacher: live.
        objective: beside SHD.
        data: arrays by name ``(N, ...)``.
        rows: samples to train on.
        steps: of each student.
        batch_size: samples of a step.
        learning_rate: after the warm-up.
        seed: of the order of samples, and of dropout.
        done: called with steps done.

    Raises:
        ShdError: as ``layer_kls``.
    """
    warm = max(steps // 10, 1)
    optimizers = [torch.optim.AdamW(student.parameters(), learning_rate) for student in students]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: min((step + 1) / warm, 1.0)) for each in optimizers
    ]
    source, step = torch.Generator().manual_seed(seed), 0
    for student in students:
        student.train()
    with torch.random.fork_rng(devices=[]):
        while step < steps:
            shuffled = rows[torch.randperm(len(rows), generator=source)]
            for batch in cut_batches(data, shuffled, batch_size):
                taught = teacher(**inputs_of(batch))
                for student, optimizer, schedule, beta in zip(students, optimizers, schedules, betas, strict=True):
                    torch.manual_seed(1_000_003 * seed + step)
                    loss = student_terms(objective, student, taught, batch, beta).total
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                step += 1
                if done is not None:
                    done(step)
                if step == steps:
                    break
