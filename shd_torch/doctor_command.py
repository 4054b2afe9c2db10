"""``shd-torch doctor``: one answer, and what it rests on; PyTorch is imported when it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.commands.program import Document, require_packages
from shd_ref.commands.terminal import console, marked, narrow_table, plus_minus, show_progress
from shd_ref.errors import ShdError, need
from shd_ref.integers import check_number
from shd_ref.teacher.options import FROM_0, FROM_1, Needs, at_least
from shd_torch.shrink.folders import check_model
from shd_torch.shrink_command import read_inputs

if TYPE_CHECKING:
    from shd_torch.doctor import Diagnosis

_STYLES: Final = {"yes": "bold green", "probably not": "bold yellow", "no": "bold red"}


def doctor(
    teacher: str,
    student: str,
    /,
    *,
    data: Path | None = None,
    samples: Annotated[int, FROM_1, Needs("data")] = 512,
    probe: Annotated[int, FROM_0, Needs("data")] = 0,
    seeds: Annotated[int, at_least(2), Needs("probe")] = 5,
    batch_size: Annotated[int, FROM_1, Needs("data")] = 16,
    learning_rate: Annotated[float, Needs("data")] = 1e-3,
    beta: Annotated[float | None, Needs("probe")] = None,
    max_length: Annotated[int | None, FROM_1, Needs("data")] = None,
) -> Document:
    """Will attention supervision work for this teacher and student? Prints an answer and its evidence.

    shd-torch doctor teacher student --data train.jsonl --probe 200

    Compares the models' parts and tokenizers, and finds a range for beta on your batches. --probe trains pairs of
    students, with and without SHD, on the same batches, and reports the gain with its 95% interval. shd plan says
    what the teacher loses with its heads merged.

    Args:
        teacher: A Hugging Face folder or hub id with safetensors.
        student: A folder or hub id; a config.json without weights means random initialisation.
        data: Your samples: .npz of the models' inputs by name, with optional labels; .npy of token ids or pixels; or
            .jsonl with a column text, for the tokenizer in the teacher's folder, else the student's. Without data,
            only the configurations are compared.
        samples: Number of samples to use, from the start of the data.
        probe: Steps of a paired training with and without SHD; 0: no training.
        seeds: Pairs of students in the probe.
        batch_size: Samples per training step.
        learning_rate: Learning rate of AdamW, in the probe and when estimating beta; above 0.
        beta: Weight of SHD in the probe. Default: the middle of the estimated range.
        max_length: Tokens to keep of a text. Default: as the tokenizer's folder says.
    """
    require_packages("torch", "transformers")
    check_number("learning_rate", learning_rate, above=0)
    rule = "be a Hugging Face folder or hub id, whose parts are compared"
    remedy = "give its folder, or make a cache (shd precompute) and train with and without it (docs/doctor.md)"
    need(not teacher.endswith(".onnx"), "argument-value", "teacher", rule, repr(teacher), remedy=remedy)
    check_model(teacher, "teacher")
    check_model(student, "student")
    arrays = None if data is None else read_data(data, samples, (teacher, student), max_length)
    from transformers.utils import logging

    from shd_torch.doctor import DiagnosisOptions, diagnose

    quiet: Any = logging
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    options = DiagnosisOptions(probe, seeds, batch_size, learning_rate, beta)
    with show_progress("models are read") as (on_progress,):
        diagnosis = diagnose(
            teacher, student, arrays, options, progress=lambda done, total, what: on_progress(done, total, says=what)
        )
    print_diagnosis(diagnosis)
    return diagnosis.document()


def read_data(
    path: Path, samples: int, models: Sequence[str] = (), max_length: int | None = None
) -> dict[str, NDArray[Any]]:
    """The first samples of the models' inputs, and ``labels`` ``(N,)`` or ``(N, L)`` of an .npz.

    The first model that is a folder with a tokenizer.json tokenises the texts of a .jsonl.
    """
    from shd_ref.teacher.sources.arrays import open_npz

    folder = next((Path(model) for model in models if Path(model, "tokenizer.json").is_file()), None)
    arrays = read_inputs(path, samples, folder, max_length=max_length)
    if path.suffix == ".npz" and "labels" in (source := open_npz(path)).columns:
        count = len(next(iter(arrays.values())))
        labels = np.stack([row["labels"] for _, row in zip(range(count), source.rows(["labels"]), strict=False)])
        if labels.dtype.kind not in "iu" or labels.ndim > 2:
            message = f"data must hold labels as integers (N,) or (N, L); got {labels.dtype} {labels.shape}"
            raise ShdError("argument-shape", message)
        arrays["labels"] = labels.astype(np.int64)
    return arrays


def print_diagnosis(found: Diagnosis) -> None:
    """The verdict, then a table of what it rests on, then what to do."""
    verdict = found.verdict
    console.print(marked(verdict.answer, _STYLES[verdict.answer], f", because {verdict.because}"), highlight=False)
    console.print()
    table = narrow_table()
    for name in ("", "teacher", "student", ""):
        table.add_column(name, overflow="fold")
    start = "squeezed" if found.is_squeezed else "weights from its folder" if found.has_weights else "random weights"
    table.add_row("model", found.teacher.name, f"{found.student.name}, {start}", "")
    for name in ("layers", "heads"):
        if name not in {one.part for one in found.differences}:
            table.add_row(name, str(getattr(found.teacher, name)), str(getattr(found.student, name)), "")
    for one in found.differences:
        table.add_row(one.part, one.teacher, one.student, one.effect)
    console.print(table)
    console.print()
    for one in found.differences:
        console.print(f"{one.part}: {one.remedy}", highlight=False)
    for title, text in _facts(found):
        console.print(f"{title}: {text}", highlight=False)


def _facts(found: Diagnosis) -> Iterator[tuple[str, str]]:
    if found.failure is not None:
        yield "together", f"not possible: {found.failure}"
    if found.untried is not None:
        yield "together", f"not tried: {found.untried}"
    if found.objective is not None and found.beta is not None:
        beta = found.beta
        norm = f"{beta.middle:.1g} has a gradient norm of {beta.first:.1%} of all else's at the first step"
        later = f"{beta.later:.0%} after {beta.steps} steps without it"
        yield "beta", f"{beta.low:.1g} to {beta.high:.1g} beside {found.objective.recipe}; {norm}, and {later}"
    if found.probe is not None:
        probe = found.probe
        means = f"{np.mean(probe.without):.4g} without, {np.mean(probe.with_shd):.4g} with SHD"
        judged = f"gain {plus_minus(probe.gain, probe.margin)} ({probe.measure} on {probe.held_out} held-out samples"
        run = f"{probe.seeds} pairs of {probe.steps} steps, beta {probe.beta:.1g}"
        yield "probe", f"{judged}: {means}; {run}; 95% over seeds)"
