"""A table of starts: the teacher, the student that was made, the closed form, and rivals of the same sizes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from shd_torch.shrink.calibration import read_data
from shd_torch.shrink.compare.measure import choose_measure, count_flops, measure_loss, time_model
from shd_torch.shrink.compare.rivals import RIVALS
from shd_torch.shrink.folders import load_teacher
from shd_torch.shrink.sizes import count_parameters, sizes_of
from shd_torch.shrink.student import Shrunk, shrink
from shd_torch.shrink.unfinished import Unfinished


@dataclass(frozen=True)
class Start:
    """One row of the table.

    Attributes:
        name: of the start.
        parameters: how many numbers it has.
        flops: floating point operations of matrix products, a sample.
        seconds: of a forward pass in PyTorch, a sample.
        loss: on data that it was not made from, before any training.
        measure: what the loss is: ``"cross entropy"`` or ``"KL from the teacher"``, in nats, or ``"1 - cosine"``.
    """

    name: str
    parameters: int
    flops: int
    seconds: float
    loss: float
    measure: str


def compare_starts(
    teacher: nn.Module | str | os.PathLike[str],
    data: Mapping[str, Any],
    held_out: Mapping[str, Any],
    made: Shrunk,
    *,
    batch_size: int = 16,
    progress: Callable[[int, int, str], None] | None = None,
    unfinished: Unfinished | None = None,
    **sizes: Any,
) -> list[Start]:
    """The student that ``shrink`` made beside its teacher and beside other starts, in one table.

    Rivals have the student's sizes and are not aligned: kept heads, mean pooling and Minitron's importance, each with
    the channels of the largest activation where the stream is narrower; the teacher's layers as they are, where the
    student has fewer; random weights. One of them is in memory at a time.

    Args:
        teacher: as it was given to ``shrink``.
        data: the calibration set.
        held_out: other samples, in the same form.
        made: what ``shrink`` returned.
        batch_size: samples that run together.
        progress: gets the numbers of starts that are done and of all, and the name of the next.
        unfinished: where rows are kept as they are done, of a run that may be killed and started again.
        **sizes: as they were given to ``shrink``; ``align`` is of ``made`` alone.

    Raises:
        ShdError: what ``shrink`` raises; ``inputs-invalid``.
    """
    model: Any = teacher if isinstance(teacher, nn.Module) else load_teacher(teacher)
    model = model.float() if next(model.parameters()).dtype in (torch.float16, torch.bfloat16) else model
    example = next(model.parameters())
    samples = {
        name: part.to(device=example.device, dtype=example.dtype if part.is_floating_point() else part.dtype)
        for name, part in read_data(held_out).items()
    }
    aligned = bool(sizes.pop("align", True))
    rows, mode = [], model.training
    try:
        measure = choose_measure(model.eval(), samples)
        plans = _starts(model, data, made, batch_size, sizes, aligned=aligned)
        for number, (name, make) in enumerate(plans.items()):
            if progress is not None:
                progress(number, len(plans), name)
            found = None if unfinished is None else unfinished.get(f"start-{number}")
            if found is not None:
                rows.append(Start(**found[1]))
                continue
            start = make()
            row = Start(
                name,
                count_parameters(start),
                count_flops(start, samples),
                time_model(start, samples, batch_size),
                measure_loss(model, start, samples, batch_size, measure),
                measure,
            )
            rows.append(row)
            if unfinished is not None:
                unfinished.put(f"start-{number}", {}, asdict(row))
    finally:
        model.train(mode)
    return rows


def _starts(
    model: Any, data: Mapping[str, Any], made: Shrunk, batch_size: int, options: dict[str, Any], *, aligned: bool
) -> dict[str, Callable[[], Any]]:
    """By name what makes each start."""
    example = next(model.parameters())
    student = copy.deepcopy(made.student).to(example.dtype).eval()

    def plain(**changes: Any) -> Callable[[], Any]:
        return lambda: shrink(model, data, **changes, align=False, batch_size=batch_size).student

    def random() -> Any:
        torch.manual_seed(0)
        return type(student)(student.config).to(device=example.device, dtype=example.dtype).eval()

    starts: dict[str, Callable[[], Any]] = {"teacher": lambda: model, "this student": lambda: student}
    if aligned:
        starts["closed form"] = plain(**options)
    before, after = sizes_of(model.config), sizes_of(student.config)
    if (before.heads, before.hidden, before.neurons) != (after.heads, after.hidden, after.neurons):
        starts |= {name: plain(**options | rival) for name, rival in RIVALS.items()}
    if after.layers != before.layers:
        layers = ", ".join(str(layer) for layer in made.report["sources"])
        starts[f"layers {layers} as they are"] = plain(layers=made.report["sources"])
    return starts | {"random": random}
