"""How much of SHD belongs beside a base loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from shd_torch.doctor.objective import Batch, Objective, cut_batches, inputs_of, student_terms
from shd_torch.doctor.probe import Wishes, train_students
from shd_torch.recipes import scale_report
from shd_torch.teacher import OnlineTeacher

SHARES: Final = (0.01, 0.03, 0.05)
"""How long the gradient of SHD may be at the first step beside that of all else: the ends of the range, and what a
probe takes. On digits 0.4% was too little; 10% and more was nowhere shown to do better than less (docs/doctor.md)."""
LATER: Final = 0.1
"""How long it may be after the warm-up, for the beta that a probe takes."""
LOOKS: Final = 4
"""Batches that are looked at."""
WARM_UP: Final = 100
"""Steps before the second look. Maps of random weights are nearly even, and SHD's gradient on them is small: on
stories260K, 8 to 4 heads, it grows twentyfold in 160 steps beside that of all else."""


@dataclass(frozen=True)
class BetaRange:
    """Betas at which the gradient of SHD is 1%, 3% and 5% as long as that of all else at the first step.

    All three are lower where the middle one's gradient would come to more than ``LATER`` after a short training.

    Attributes:
        low, middle, high: the betas.
        first, later: how long the middle one's gradient is beside that of all else, before and after ``steps``.
        steps: of training without SHD between the looks.
    """

    low: float
    middle: float
    high: float
    first: float
    later: float
    steps: int


def find_beta(
    objective: Objective,
    student: Any,
    teacher: OnlineTeacher,
    data: Batch,
    wishes: Wishes,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> BetaRange:
    """Betas by ``scale_report`` on real batches: medians over a few, before and after a short training without SHD.

    Args:
        objective: beside which SHD is put.
        student: at its start; it is trained.
        teacher: live.
        data: arrays by name ``(N, ...)``.
        wishes: batch size and learning rate.
        progress: called with steps done and in all.

    Raises:
        ShdError: as ``layer_kls`` and ``ScaleReport.weight_for``.
    """
    rows = torch.arange(len(next(iter(data.values()))))
    looked = list(cut_batches(data, rows[: LOOKS * wishes.batch_size], wishes.batch_size))

    def look() -> float:
        """The beta at which both gradients are equally long."""
        student.eval()
        terms = (student_terms(objective, student, teacher(**inputs_of(batch)), batch, 0.0) for batch in looked)
        return statistics.median(scale_report(one, student.parameters()).weight_for(1.0) for one in terms)

    first = look()
    train_students(
        [student],
        [None],
        teacher,
        objective,
        data,
        rows,
        wishes,
        steps=WARM_UP,
        seed=0,
        done=None if progress is None else lambda step: progress(step, WARM_UP),
    )
    later = look()
    lowered = min(1.0, LATER * later / (SHARES[1] * first)) if first > 0 else 1.0
    low, middle, high = (share * first * lowered for share in SHARES)
    return BetaRange(low, middle, high, SHARES[1] * lowered, middle / later if later > 0 else math.inf, WARM_UP)
