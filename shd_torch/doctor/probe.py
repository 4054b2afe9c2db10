"""Short trainings: how much of SHD to add to a base loss, and a paired run with and without it for several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.teacher.study.intervals import CONFIDENCE, half_width, t_quantile
from shd_torch.doctor.objective import Batch, Objective, cut_batches, inputs_of, student_terms
from shd_torch.recipes import scale_report
from shd_torch.teacher import OnlineTeacher

HELD_OUT: Final = 0.2
"""Part of the data that students are judged on and never trained on."""
MOST_HELD_OUT: Final = 256
LEAST_SAMPLES: Final = 20
MOST_SEEDS: Final = 30
"""More are not advised."""
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
class Wishes:
    """Options of a diagnosis.

    Attributes:
        probe: steps of each student of a paired run; 0 for none.
        seeds: pairs of students.
        batch_size: samples of a step.
        learning_rate: of the run.
        beta: of the run; None takes the middle of the recommended range.
    """

    probe: int = 0
    seeds: int = 5
    batch_size: int = 16
    learning_rate: float = 1e-3
    beta: float | None = None


@dataclass(frozen=True)
class Probe:
    """What came out.

    Attributes:
        options: of the run.
        measure: what is compared on held-out samples; the lower the better.
        held_out: how many they are.
        without, with_shd: the measure by seed, at the end.
        halfway: the gain by seed, after half of the steps.
    """

    options: Wishes
    measure: str
    held_out: int
    without: tuple[float, ...]
    with_shd: tuple[float, ...]
    halfway: tuple[float, ...]

    @property
    def gains(self) -> tuple[float, ...]:
        """By seed, how much lower the measure is with SHD."""
        return tuple(one - other for one, other in zip(self.without, self.with_shd, strict=True))

    @property
    def gain(self) -> float:
        """Their mean."""
        return float(np.mean(self.gains))

    @property
    def margin(self) -> float | None:
        """Half of the 95% interval of the gain, by Student's t over seeds."""
        return half_width(np.array(self.gains))

    @property
    def is_distinguishable(self) -> bool:
        """Whether the interval excludes 0."""
        return self.margin is not None and abs(self.gain) > self.margin

    @property
    def seeds_needed(self) -> int | None:
        """Seeds needed for a significant gain of this size and spread; None if above ``MOST_SEEDS``.

        For a significant gain, the number of seeds that was used.
        """
        if self.is_distinguishable:
            return self.options.seeds
        spread = float(np.std(self.gains, ddof=1))
        needed = (
            seeds
            for seeds in range(self.options.seeds + 1, MOST_SEEDS + 1)
            if t_quantile((1 + CONFIDENCE) / 2, seeds - 1) * spread / seeds**0.5 < abs(self.gain)
        )
        return next(needed, None)


def check_probe(wishes: Wishes, num_samples: int | None) -> None:
    """Refuse a run that could say nothing, before anything is measured.

    Raises:
        ShdError: ``argument-value``.
    """
    if not 0 < wishes.learning_rate < float("inf"):
        raise ShdError("argument-value", f"learning_rate must be above 0; got {wishes.learning_rate}")
    if not wishes.probe:
        return
    if wishes.seeds < 2:
        raise ShdError("argument-value", f"seeds must be at least 2, as one has no interval; got {wishes.seeds}")
    if num_samples is None:
        raise ShdError("argument-value", "data must be given for a probe, which trains on it; got none")
    if num_samples < LEAST_SAMPLES:
        raise ShdError(
            "argument-value",
            f"data must hold at least {LEAST_SAMPLES} samples for a probe, a fifth held out; got {num_samples}",
        )


def run_probe(
    make: Callable[[int], Any],
    teacher: OnlineTeacher,
    objective: Objective,
    data: Batch,
    wishes: Wishes,
    progress: Callable[[int, int], None] | None = None,
) -> Probe:
    """Train pairs of students in lockstep, so that the teacher runs once for both.

    Args:
        make: a student, from its folder's weights or by the seed.
        teacher: live.
        objective: beside SHD.
        data: arrays by name ``(N, ...)``.
        wishes: how; with a beta.
        progress: called with steps done and in all.

    Raises:
        ShdError: ``not-finite`` for a run that diverges; as ``layer_kls``.
    """
    count = len(next(iter(data.values())))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    judged = order[: min(max(int(HELD_OUT * count), 1), MOST_HELD_OUT)]
    ends: list[tuple[float, ...]] = []
    halfway: list[float] = []

    def judge(students: Sequence[Any]) -> tuple[float, ...]:
        return _judge(students, teacher, objective, data, judged, wishes.batch_size)

    for seed in range(wishes.seeds):
        students = [make(seed), make(seed)]

        def done(step: int, seed: int = seed, students: list[Any] = students) -> None:
            if step == max(wishes.probe // 2, 1):
                own, other = judge(students)
                halfway.append(own - other)
                for student in students:
                    student.train()
            if progress is not None:
                progress(seed * wishes.probe + step, wishes.seeds * wishes.probe)

        train_students(
            students,
            (None, wishes.beta),
            teacher,
            objective,
            data,
            order[len(judged) :],
            wishes,
            steps=wishes.probe,
            seed=seed,
            done=done,
        )
        ends.append(judge(students))
    without, with_shd = zip(*ends, strict=True)
    return Probe(wishes, objective.measure, len(judged), without, with_shd, tuple(halfway))


@torch.no_grad()
def _judge(
    students: Sequence[Any], teacher: OnlineTeacher, objective: Objective, data: Batch, rows: Tensor, size: int
) -> tuple[float, ...]:
    """The measure of each student on held-out samples, a mean over them."""
    sums = np.zeros(len(students))
    for batch in cut_batches(data, rows, size):
        taught = teacher(**inputs_of(batch))
        for number, student in enumerate(students):
            terms = student_terms(objective, student.eval(), taught, batch, None)
            sums[number] += float(terms[objective.measure].value) * len(next(iter(batch.values())))
    if not np.isfinite(sums).all():
        raise ShdError("not-finite", "a probed student must stay finite; got NaN or infinity: lower learning_rate")
    return tuple((sums / len(rows)).tolist())


def train_students(
    students: Sequence[Any],
    betas: Sequence[float | None],
    teacher: OnlineTeacher,
    objective: Objective,
    data: Batch,
    rows: Tensor,
    wishes: Wishes,
    *,
    steps: int,
    seed: int,
    done: Callable[[int], None] | None = None,
) -> None:
    """AdamW on the same batches for all, with a warm-up of a tenth of the steps and gradients cut to length 1.

    Args:
        students: are changed, and left in training mode.
        betas: the weight of SHD of each; None leaves it out.
        teacher: live; it runs once for all.
        objective: the other terms.
        data: arrays by name ``(N, ...)``.
        rows: samples to train on.
        wishes: batch size and learning rate.
        steps: of each student.
        seed: of the order of samples, and of dropout.
        done: called with steps done.

    Raises:
        ShdError: as ``layer_kls``.
    """
    warm = max(steps // 10, 1)
    optimizers = [torch.optim.AdamW(student.parameters(), wishes.learning_rate) for student in students]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: min((step + 1) / warm, 1.0)) for one in optimizers
    ]
    source, step = torch.Generator().manual_seed(seed), 0
    for student in students:
        student.train()
    with torch.random.fork_rng(devices=[]):
        while step < steps:
            shuffled = rows[torch.randperm(len(rows), generator=source)]
            for batch in islice(cut_batches(data, shuffled, wishes.batch_size), steps - step):
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
