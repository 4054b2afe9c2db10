"""One run: a student, a base loss, and what is taught beside it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.study.memory import bytes_a_sample
from benchmarks.study.origin import fingerprint
from benchmarks.study.rivals import ForwardPass, Rival, RivalTerm, TeacherOutputs
from shd_torch.recipes import SHD, Terms, scale_report

Batch = Mapping[str, Tensor]
Forward = Callable[[Batch], Any]

Teach = Callable[[Tensor, Batch], TeacherOutputs]
"""What a teacher makes of samples: their numbers and the student's inputs, to its outputs."""


@dataclass(eq=False)
class Course:
    """What a student is taught with.

    Attributes:
        student: the model.
        size: number of training samples.
        batch: numbers of samples to the student's arguments by name.
        base: ``(output, index, shd)`` to the base loss of the samples that ``batch`` gave last.
        evaluate: figures by name, of the student as it stands; ``forward(inputs)`` runs it as in training.
        rivals: losses added to the base loss, each with the source of its teacher's outputs.
        parts: modules of the base loss that are trained too.
        loss_mask: numbers of samples to ``(B, L)`` boolean, True = the row counts in the rivals' loss; None for all.
        data: samples to train and to judge on, and teachers: for the record, where they are hashed.
    """

    student: nn.Module
    size: int
    batch: Callable[[Tensor], Batch]
    base: Callable[[Any, Tensor, SHD | None], Terms]
    evaluate: Callable[[Callable[[Batch], Any]], dict[str, float]]
    rivals: Sequence[tuple[Rival, Teach]] = ()
    parts: Sequence[nn.Module] = field(default=())
    loss_mask: Callable[[Tensor], Tensor] | None = None
    data: Sequence[Tensor | nn.Module] = field(default=())


def train(
    course: Course,
    *,
    beta: float,
    steps: int,
    batch: int,
    rate: float,
    seed: int,
    marks: Sequence[int] = (),
    taught: float = 1.0,
) -> dict[str, Any]:
    """Train and evaluate: AdamW, cosine schedule, the same samples in the same order for a seed.

    After the first ``taught`` of the steps, a share, the base loss is alone.

    Returns:
        ``curve`` (figures of ``evaluate`` by step), ``step_seconds`` (median; processor time, or wall time on a GPU),
        ``parameter_bytes`` that are trained and thrown away, ``sample_bytes`` of the teacher, ``gradient_share`` of
        what is taught beside the base loss at the first and at the last step, ``start`` and ``data`` (see
        ``origin.py``).
    """
    student, extra = course.student, [*course.parts, *(rival for rival, _ in course.rivals)]
    trained = [*student.parameters(), *(parameter for part in extra for parameter in part.parameters())]
    optimizer = torch.optim.AdamW(trained, rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draw = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(course.size, generator=draw) for _ in range(-(-steps * batch // course.size))])
    start, data = fingerprint(student, order), fingerprint(*course.data)
    seconds, shares, last, alone = [], {}, list[TeacherOutputs](), replace(course, rivals=())
    curve = {"0": course.evaluate(_forward(course))} if 0 in marks else {}
    for step in range(steps):
        index = order[step * batch : (step + 1) * batch]
        started = _now(course.student)
        if step < taught * steps:
            terms, last = _loss(course, index, beta)
        else:
            terms, _ = _loss(alone, index, beta)
        if "shd" in terms and step in (0, steps - 1):
            report = scale_report(terms, [part for part in student.parameters() if part.requires_grad])
            shares["first" if step == 0 else "last"] = report.terms["shd"].gradient_share
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
        schedule.step()
        seconds.append(_now(course.student) - started)
        if step + 1 in marks or step + 1 == steps:
            curve[str(step + 1)] = course.evaluate(_forward(course))
    return {
        "start": start,
        "data": data,
        "curve": curve,
        **curve[str(steps)],
        "step_seconds": statistics.median(seconds),
        "parameter_bytes": sum(p.nbytes for part in extra for p in part.parameters()),
        "sample_bytes": sum(
            bytes_a_sample(rival, outputs) for (rival, _), outputs in zip(course.rivals, last, strict=True)
        ),
        "gradient_share": shares,
    }


def _now(student: nn.Module) -> float:
    device = next(student.parameters()).device
    if device.type == "cpu":
        return time.process_time()  # other work on the machine does not count
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _loss(course: Course, index: Tensor, beta: float) -> tuple[Terms, list[TeacherOutputs]]:
    inputs = course.batch(index)
    taught = [teach(index, inputs) for _, teach in course.rivals]
    with _watching(course, taught) as passes:
        output = course.student.train()(**inputs)
    if not course.rivals or any(rival.needs_teacher for rival, _ in course.rivals):
        return course.base(output, index, None), taught
    mask = None if course.loss_mask is None else course.loss_mask(index)
    values = [
        rival(each, outputs, loss_mask=mask)
        for (rival, _), each, outputs in zip(course.rivals, passes, taught, strict=True)
    ]
    shd = RivalTerm(passes[0].captured, (), beta, value=torch.stack(values).mean())
    return course.base(output, index, shd), taught


@contextlib.contextmanager
def _watching(course: Course, taught: Sequence[TeacherOutputs]) -> Iterator[list[ForwardPass]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(rival.capture(course.student, outputs))
            for (rival, _), outputs in zip(course.rivals, taught, strict=True)
        ]


def _forward(course: Course) -> Callable[[Batch], Any]:
    """The student in evaluation mode; one that copies attention takes it from its teacher here too."""

    def forward(inputs: Batch) -> Any:
        block: AbstractContextManager[Any] = contextlib.nullcontext()
        for rival, _ in course.rivals:
            if rival.needs_teacher:
                block = rival.capture(course.student, rival.teach(**inputs))
        with torch.no_grad(), block:
            return course.student.eval()(**inputs)

    return forward
