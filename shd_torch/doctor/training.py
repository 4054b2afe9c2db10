"""Short trainings: a base loss for the pair, how much of SHD to add to it, and a paired run with and without it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

import shd_torch.recipes as recipes
from shd_ref.errors import ShdError, need
from shd_ref.integers import check_number
from shd_ref.teacher.study.intervals import half_width
from shd_torch.capture import capture_attention
from shd_torch.capture.outputs import read_logits, read_output
from shd_torch.kd import embedding_loss, hidden_loss, pool_states
from shd_torch.live import OnlineTeacher
from shd_torch.recipes import SHD, Term, Terms, scale_report
from shd_torch.recipes.terms import IGNORED, join
from shd_torch.training.recipe import is_causal_model

HELD_OUT: Final = 0.2
"""Part of the data that students are judged on and never trained on."""
MOST_HELD_OUT: Final = 256
LEAST_SAMPLES: Final = 20
SHARES: Final = (0.01, 0.03, 0.05)
"""Norm of SHD's gradient at the first step relative to that of the other terms: the ends of the range, and what a
probe takes. On digits 0.4% was too little; 10% and more was nowhere shown to do better than less (docs/doctor.md)."""
LATER: Final = 0.1
"""The same after the warm-up, at most, for the beta of a probe."""
LOOKS: Final = 4
"""Batches that gradients are measured on."""
WARM_UP: Final = 100
"""Steps before the second measurement. Maps of random weights are nearly even, and SHD's gradient on them is small:
on stories260K, 8 to 4 heads, it grows twentyfold in 160 steps relative to the others."""

Batch = Mapping[str, Tensor]
Done = Callable[[int, int], None]


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

    def check(self, num_samples: int | None) -> None:
        """Refuse a run that could say nothing, before anything is measured: ``argument-value``."""
        check_number("learning_rate", self.learning_rate, above=0)
        if not self.probe:
            return
        need(self.seeds >= 2, "argument-value", "seeds", "be at least 2, as one has no interval", self.seeds)
        rule = f"hold at least {LEAST_SAMPLES} samples for a probe, a fifth held out"
        need((num_samples or 0) >= LEAST_SAMPLES, "argument-value", "data", rule, num_samples or "none")


@dataclass(frozen=True)
class BetaRange:
    """Betas at which the gradient of SHD is 1%, 3% and 5% as long as that of all else at the first step.

    All three are lower where the middle one's gradient would come to more than 10% after a short training.

    Attributes:
        first, later: relative norms of the middle one's gradient, before and after the steps.
        steps: of training without SHD in between.
    """

    low: float
    middle: float
    high: float
    first: float
    later: float
    steps: int


@dataclass(frozen=True)
class Probe:
    """The result of a paired run.

    Attributes:
        steps, seeds, beta: of the run.
        measure: the loss on the held-out samples; the lower the better.
        without, with_shd: the measure by seed.
        gain, margin: mean over seeds of how much lower it is with SHD, and half of its 95% interval (Student's t).
    """

    steps: int
    seeds: int
    beta: float
    measure: str
    held_out: int
    without: tuple[float, ...]
    with_shd: tuple[float, ...]
    gain: float
    margin: float

    @property
    def is_distinguishable(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.gain) > self.margin


@dataclass(frozen=True, eq=False)
class Objective:
    """A base loss: a recipe of ``shd_torch.recipes``, or ``hidden_loss`` or ``embedding_loss`` without a head.

    Its term ``measure`` says on held-out data how good a student is.
    """

    recipe: str
    measure: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def terms(self, output: Any, taught_output: Any, batch: Batch, shd: SHD | None = None) -> Terms:
        """Its terms on the outputs of student and teacher for a batch, and the term on attention."""
        if self.recipe in ("hidden_loss", "embedding_loss"):
            states, mask = (output.last_hidden_state, taught_output.last_hidden_state), mask_of(batch)
            if self.recipe == "hidden_loss":
                value = hidden_loss(*states, distance="cosine", loss_mask=mask, check=False)
            else:
                pooled = [pool_states(side, mask, pooling=self.options["pooling"]) for side in states]
                value = embedding_loss(*pooled, distance=self.options["distance"], check=False)
            return join(shd, **{self.measure: Term(value, 1.0)})
        logits, taught = output.logits, read_logits(taught_output)
        labels = batch.get("labels")
        if labels is None and logits.ndim == 2:
            assert taught is not None  # choose_objective saw them
            labels = taught.argmax(-1)
        if labels is None:
            labels = batch["input_ids"]
            if "attention_mask" in batch:
                labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORED)
        extra = [] if self.recipe == "cross_entropy" else [taught]
        result: Terms = getattr(recipes, self.recipe)(logits, labels, *extra, shd=shd, check=False, **self.options)
        return result


def choose_objective(student: Any, teacher: Any, batch: Batch, pooling: str | None = None) -> Objective | None:
    """The recipe for a pair, from what both return on a batch; ``pooling`` is a sentence encoder's.

    None for a student without a head whose last hidden states are not of the teacher's shape, so that nothing could
    say how good it is.
    """
    with torch.no_grad():
        outputs = [model(**inputs_of(batch)) for model in (student, teacher)]
    logits, teacher_logits = map(read_logits, outputs)
    if logits is None:
        shapes = [getattr(read_output(output, "last_hidden_state"), "shape", None) for output in outputs]
        if pooling is not None and None not in shapes:
            distance = "cosine" if shapes[0] == shapes[1] else "similarity"
            return Objective("embedding_loss", "embedding_distance", {"pooling": pooling, "distance": distance})
        is_alike = shapes[0] is not None and shapes[0] == shapes[1]
        return Objective("hidden_loss", "hidden_distance") if is_alike else None
    same, has_labels = teacher_logits is not None and logits.shape == teacher_logits.shape, "labels" in batch
    if logits.ndim == 2 and (same or has_labels):
        return Objective("image_kd" if same else "cross_entropy", "cross_entropy")
    if logits.ndim == 3 and is_causal_model(student):
        options: dict[str, Any] = {"shift": True}
        if teacher_logits is None or teacher_logits.shape[:2] != logits.shape[:2]:
            return Objective("cross_entropy", "cross_entropy", options)
        if not same:
            options["vocab_size"] = min(logits.shape[-1], teacher_logits.shape[-1])
        return Objective("language_kd", "cross_entropy", options)
    if logits.ndim == 3 and same:
        return Objective("gkd", "jsd", {"mixing": 0.0})
    rule = "data must hold labels where the teacher's logits are not of the student's classes"
    raise ShdError("argument-value", f"{rule}; got none: add an array labels to the .npz")


def mask_of(batch: Batch) -> Tensor | None:
    """``(B, L)``, True = a position of the sample; None where all are."""
    return batch["attention_mask"].bool() if "attention_mask" in batch else None


def inputs_of(batch: Batch) -> dict[str, Any]:
    return {name: array for name, array in batch.items() if name != "labels"}


@dataclass(frozen=True, eq=False)
class Trial:
    """Data and settings of trainings; ``data`` are arrays by name ``(N, ...)``."""

    teacher: OnlineTeacher
    objective: Objective
    data: Batch
    options: DiagnosisOptions

    def terms(self, student: Any, taught: Any, batch: Batch, beta: float | None) -> Terms:
        """Of a student on a batch that the teacher has seen; beta None leaves SHD out."""
        inputs = inputs_of(batch)
        if beta is None:
            return self.objective.terms(student(**inputs), taught.output, batch)
        with capture_attention(student, layers=taught.layers) as captured:
            output = student(**inputs)
        shd = SHD(captured, taught, beta, loss_mask=mask_of(batch))
        return self.objective.terms(output, taught.output, batch, shd)

    def find_beta(self, student: Any, done: Done = lambda *_: None) -> BetaRange:
        """Betas by ``scale_report``: medians over a few batches, before and after a short training without SHD."""
        rows = torch.arange(len(next(iter(self.data.values()))))
        batches = list(self._batches(rows[: LOOKS * self.options.batch_size]))

        def look() -> float:
            student.eval()
            terms = (self.terms(student, self.teacher(**inputs_of(batch)), batch, 0.0) for batch in batches)
            return statistics.median(
                scale_report(batch_terms, student.parameters()).weight_for(1.0) for batch_terms in terms
            )

        first = look()
        self._train([student], [None], rows, steps=WARM_UP, done=lambda step: done(step, WARM_UP))
        later = look()
        lowered = min(1.0, LATER * later / (SHARES[1] * first)) if first > 0 else 1.0
        low, middle, high = (share * first * lowered for share in SHARES)
        end = middle / later if later > 0 else math.inf
        return BetaRange(low, middle, high, SHARES[1] * lowered, end, WARM_UP)

    def probe(self, make: Callable[[int], Any], beta: float, done: Done) -> Probe:
        """Train pairs of students, made by seed, in lockstep with and without SHD."""
        steps, seeds, count = self.options.probe, self.options.seeds, len(next(iter(self.data.values())))
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        judged = order[: min(max(int(HELD_OUT * count), 1), MOST_HELD_OUT)]
        ends = []
        for seed in range(seeds):
            students = [make(seed), make(seed)]
            self._train(
                students,
                (None, beta),
                order[len(judged) :],
                steps=steps,
                seed=seed,
                done=lambda step, seed=seed: done(seed * steps + step, seeds * steps),  # type: ignore[misc]
            )
            ends.append(self._judge(students, judged))
        without, with_shd = zip(*ends, strict=True)
        gains = np.subtract(without, with_shd)
        margin = half_width(gains) or 0.0
        measure = self.objective.measure
        return Probe(steps, seeds, beta, measure, len(judged), without, with_shd, float(gains.mean()), margin)

    def _batches(self, rows: Tensor) -> Iterator[dict[str, Tensor]]:
        for numbers in torch.split(rows, self.options.batch_size):
            yield {name: array[numbers] for name, array in self.data.items()}

    @torch.no_grad()
    def _judge(self, students: Sequence[Any], rows: Tensor) -> tuple[float, ...]:
        sums = np.zeros(len(students))
        for batch in self._batches(rows):
            taught = self.teacher(**inputs_of(batch))
            for number, student in enumerate(students):
                terms = self.terms(student.eval(), taught, batch, None)
                sums[number] += float(terms[self.objective.measure].value) * len(next(iter(batch.values())))
        rule, remedy = "stay finite", "lower learning_rate"
        need(bool(np.isfinite(sums).all()), "not-finite", "a probed student", rule, "NaN or infinity", remedy=remedy)
        return tuple((sums / len(rows)).tolist())

    def _train(
        self,
        students: Sequence[Any],
        betas: Sequence[float | None],
        rows: Tensor,
        *,
        steps: int,
        seed: int = 0,
        done: Callable[[int], None],
    ) -> None:
        """AdamW on the same batches for all, with a warm-up of a tenth of the steps and gradients cut to length 1.

        The teacher runs once for all. Students are left in training mode; beta None leaves SHD out.
        """
        warm = max(steps // 10, 1)
        optimizers = [torch.optim.AdamW(student.parameters(), self.options.learning_rate) for student in students]
        runs = list(zip(students, optimizers, betas, strict=True))
        source, step = torch.Generator().manual_seed(seed), 0
        for student in students:
            student.train()
        with torch.random.fork_rng(devices=[]):
            while step < steps:
                shuffled = rows[torch.randperm(len(rows), generator=source)]
                for batch in islice(self._batches(shuffled), steps - step):
                    taught = self.teacher(**inputs_of(batch))
                    for student, optimizer, beta in runs:
                        optimizer.param_groups[0]["lr"] = self.options.learning_rate * min((step + 1) / warm, 1.0)
                        torch.manual_seed(1_000_003 * seed + step)
                        loss = self.terms(student, taught, batch, beta).total
                        optimizer.zero_grad()
                        loss.backward()  # type: ignore[no-untyped-call]
                        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
                        optimizer.step()
                    step += 1
                    done(step)
