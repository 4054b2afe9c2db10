"""Short trainings: how much of SHD to add to a base loss, and a paired run with and without it for several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import check_number
from shd_ref.teacher.study.intervals import CONFIDENCE, half_width, t_quantile
from shd_torch.doctor.objective import Batch, Objective, inputs_of, student_terms
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
class DiagnosisOptions:
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

    options: DiagnosisOptions
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
        """Seeds for a significant gain of this size and spread: those that were used, if it is; None if too many."""
        if self.is_distinguishable:
            return self.options.seeds
        spread = float(np.std(self.gains, ddof=1))
        needed = (
            seeds
            for seeds in range(self.options.seeds + 1, MOST_SEEDS + 1)
            if t_quantile((1 + CONFIDENCE) / 2, seeds - 1) * spread / seeds**0.5 < abs(self.gain)
        )
        return next(needed, None)


def check_probe(options: DiagnosisOptions, num_samples: int | None) -> None:
    """Refuse a run that could say nothing, before anything is measured: ``argument-value``."""
    check_number("learning_rate", options.learning_rate, above=0)
    if not options.probe:
        return
    if options.seeds < 2:
        raise ShdError("argument-value", f"seeds must be at least 2, as one has no interval; got {options.seeds}")
    if num_samples is None:
        raise ShdError("argument-value", "data must be given for a probe, which trains on it; got none")
    if num_samples < LEAST_SAMPLES:
        rule = f"data must hold at least {LEAST_SAMPLES} samples for a probe, a fifth held out"
        raise ShdError("argument-value", f"{rule}; got {num_samples}")


@dataclass(frozen=True, eq=False)
class Trial:
    """What students are trained and judged with."""

    teacher: OnlineTeacher
    objective: Objective  # the terms beside SHD
    data: Batch  # arrays by name (N, ...)
    options: DiagnosisOptions

    @property
    def num_samples(self) -> int:
        """N."""
        return len(next(iter(self.data.values())))

    def batches(self, rows: Tensor) -> Iterator[dict[str, Tensor]]:
        """Some samples, in their order."""
        for chosen in torch.split(rows, self.options.batch_size):
            yield {name: array[chosen] for name, array in self.data.items()}

    @torch.no_grad()
    def judge(self, students: Sequence[Any], rows: Tensor) -> tuple[float, ...]:
        """The measure of each student on held-out samples, a mean over them; ``not-finite`` where one diverged."""
        sums = np.zeros(len(students))
        for batch in self.batches(rows):
            taught = self.teacher(**inputs_of(batch))
            for number, student in enumerate(students):
                terms = student_terms(self.objective, student.eval(), taught, batch, None)
                sums[number] += float(terms[self.objective.measure].value) * len(next(iter(batch.values())))
        if not np.isfinite(sums).all():
            message = "a probed student must stay finite; got NaN or infinity: lower learning_rate"
            raise ShdError("not-finite", message)
        return tuple((sums / len(rows)).tolist())

    def train(
        self,
        students: Sequence[Any],
        betas: Sequence[float | None],
        rows: Tensor,
        *,
        steps: int,
        seed: int = 0,
        done: Callable[[int], None] = lambda _: None,
    ) -> None:
        """AdamW on the same batches for all, with a warm-up of a tenth of the steps and gradients cut to length 1.

        The teacher runs once for all. Students are left in training mode; beta None leaves SHD out.
        """
        warm = max(steps // 10, 1)
        optimizers = [torch.optim.AdamW(student.parameters(), self.options.learning_rate) for student in students]
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(one, lambda step: min((step + 1) / warm, 1.0)) for one in optimizers
        ]
        runs = list(zip(students, optimizers, schedules, betas, strict=True))
        source, step = torch.Generator().manual_seed(seed), 0
        for student in students:
            student.train()
        with torch.random.fork_rng(devices=[]):
            while step < steps:
                shuffled = rows[torch.randperm(len(rows), generator=source)]
                for batch in islice(self.batches(shuffled), steps - step):
                    taught = self.teacher(**inputs_of(batch))
                    for student, optimizer, schedule, beta in runs:
                        torch.manual_seed(1_000_003 * seed + step)
                        loss = student_terms(self.objective, student, taught, batch, beta).total
                        optimizer.zero_grad()
                        loss.backward()  # type: ignore[no-untyped-call]
                        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
                        optimizer.step()
                        schedule.step()
                    step += 1
                    done(step)


def run_probe(trial: Trial, make: Callable[[int], Any], progress: Callable[[int, int], None]) -> Probe:
    """Train pairs of students, made by seed, in lockstep with and without SHD; ``options`` hold a beta."""
    options, count = trial.options, trial.num_samples
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    judged = order[: min(max(int(HELD_OUT * count), 1), MOST_HELD_OUT)]
    ends: list[tuple[float, ...]] = []
    halfway: list[float] = []
    for seed in range(options.seeds):
        students = [make(seed), make(seed)]

        def done(step: int, seed: int = seed, students: list[Any] = students) -> None:
            if step == max(options.probe // 2, 1):
                own, other = trial.judge(students, judged)
                halfway.append(own - other)
                for student in students:
                    student.train()
            progress(seed * options.probe + step, options.seeds * options.probe)

        trial.train(students, (None, options.beta), order[len(judged) :], steps=options.probe, seed=seed, done=done)
        ends.append(trial.judge(students, judged))
    without, with_shd = zip(*ends, strict=True)
    return Probe(options, trial.objective.measure, len(judged), without, with_shd, tuple(halfway))


@dataclass(frozen=True)
class BetaRange:
    """Betas at which the gradient of SHD is 1%, 3% and 5% as long as that of all else at the first step.

    All three are lower where the middle one's gradient would come to more than ``LATER`` after a short training.
    """

    low: float
    middle: float
    high: float
    first: float  # how long the middle one's gradient is beside that of all else
    later: float  # the same after the steps
    steps: int  # of training without SHD between the looks


def find_beta(trial: Trial, student: Any, progress: Callable[[int, int], None] = lambda *_: None) -> BetaRange:
    """Betas by ``scale_report``: medians over a few batches, before and after a short training without SHD."""
    rows = torch.arange(trial.num_samples)
    looked = list(trial.batches(rows[: LOOKS * trial.options.batch_size]))

    def look() -> float:
        """The beta at which both gradients are equally long."""
        student.eval()
        taught = ((batch, trial.teacher(**inputs_of(batch))) for batch in looked)
        terms = (student_terms(trial.objective, student, outputs, batch, 0.0) for batch, outputs in taught)
        return statistics.median(scale_report(one, student.parameters()).weight_for(1.0) for one in terms)

    first = look()
    trial.train([student], [None], rows, steps=WARM_UP, done=lambda step: progress(step, WARM_UP))
    later = look()
    lowered = min(1.0, LATER * later / (SHARES[1] * first)) if first > 0 else 1.0
    low, middle, high = (share * first * lowered for share in SHARES)
    return BetaRange(low, middle, high, SHARES[1] * lowered, middle / later if later > 0 else math.inf, WARM_UP)
