"""How much of SHD belongs beside a base loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from shd_torch.doctor.lockstep import train_students
from shd_torch.doctor.objective import Batch, Objective, cut_batches, inputs_of, student_terms
from shd_torch.recipes import scale_report
from shd_torch.teacher import OnlineTeacher

SHARES: Final = (0.1, 0.2, 0.5)
"""How long the gradient of SHD may be beside that of all else: the ends of the range, and what a probe takes."""
LOOKS: Final = 4
"""Batches that are looked at."""
WARM_UP: Final = 100
"""Steps before the look. Maps of random weights are nearly even, and SHD's gradient on them is small: on stories260K,
8 to 4 heads, the beta for a fifth is .59 at the start, .13 after 20 steps, .05 after 80 and .03 after 160."""


@dataclass(frozen=True)
class BetaRange:
    """Betas at which the gradient of SHD is a tenth, a fifth and half as long as that of all else.

    Attributes:
        low, middle, high: the betas.
        steps: of training without SHD before the look.
    """

    low: float
    middle: float
    high: float
    steps: int


def find_beta(
    objective: Objective,
    student: Any,
    teacher: OnlineTeacher,
    data: Batch,
    *,
    batch_size: int,
    learning_rate: float,
    progress: Callable[[int, int], None] | None = None,
) -> BetaRange:
    """Betas by ``scale_report`` on real batches: medians over a few, after a short training without SHD.

    Args:
        objective: beside which SHD is put.
        student: at its start; it is trained.
        teacher: live.
        data: arrays by name ``(N, ...)``.
        batch_size: samples of a step.
        learning_rate: of the training.
        progress: called with steps done and in all.

    Raises:
        ShdError: as ``layer_kls`` and ``ScaleReport.weight_for``.
    """
    rows = torch.arange(len(next(iter(data.values()))))
    train_students(
        [student],
        [None],
        teacher,
        objective,
        data,
        rows,
        steps=WARM_UP,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=0,
        done=None if progress is None else lambda step: progress(step, WARM_UP),
    )
    student.eval()
    reports = []
    for batch in cut_batches(data, rows[: LOOKS * batch_size], batch_size):
        terms = student_terms(objective, student, teacher(**inputs_of(batch)), batch, 0.0)
        reports.append(scale_report(terms, student.parameters()))
    low, middle, high = (statistics.median(each.weight_for(share) for each in reports) for share in SHARES)
    return BetaRange(low, middle, high, WARM_UP)
