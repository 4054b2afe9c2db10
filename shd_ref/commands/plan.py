"""``shd plan``: what a cache would cost, before anyone writes it, and which to make."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from shd_ref.commands.derive import Document, Without
from shd_ref.commands.options import InputOptions, NoAttention, StudentHeads, TeacherPath, heads_of
from shd_ref.commands.terminal import print_remarks, show_progress
from shd_ref.commands.words import option_words
from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.sources import Source
from shd_ref.teacher.study.options import PlanOptions

if TYPE_CHECKING:
    from shd_ref.teacher.study.forecast import Forecast

STUDENT_FIELDS: Final = ("num_student_heads", "num_student_layers", "layer_pairs")
"""Options in whose place a student's folder stands."""


def plan(
    teacher: TeacherPath,
    inputs: InputOptions,
    options: Annotated[
        partial[PrecomputeOptions],
        Without("num_student_heads", "form", "factored_codec", "codec", "compression", "on_error", "seed_column"),
    ],
    run: Annotated[RunOptions, Without("samples_per_shard", "shards")],
    wanted: PlanOptions,
    student_heads: StudentHeads = None,
    no_attention: NoAttention = False,
) -> Document:
    """Measure bytes, time and error of every form and codec on a few samples, and recommend one.

    shd plan teacher.onnx --inputs data.npz --student-heads 4

    Ends with the command that creates the cache (or the advice to use a live teacher, if reading a cache would be
    slower) and the memory of a training step.
    """
    from shd_ref.teacher.study.kept import advise_plan

    heads_given, options = heads_of(student_heads, options, no_attention=no_attention)
    source, documents = inputs.open(), []
    for heads in heads_given:
        asked = options(num_student_heads=heads)
        print_remarks(None if no_attention else advise_plan(teacher, asked))
        documents.append(measure(teacher, inputs, source, asked, run, wanted))
    print_remarks(source.remark)
    return documents


def measure(
    teacher: Path,
    inputs: InputOptions,
    source: Source,
    options: PrecomputeOptions,
    run: RunOptions,
    wanted: PlanOptions | None = None,
    **command: Any,
) -> dict[str, Any]:
    """Forecast a cache, and say what was found.

    Args:
        teacher: the ``.onnx`` file.
        inputs: where the samples come from.
        source: the samples.
        options: what to make of the teacher.
        run: how.
        wanted: what is measured, and what for.
        **command: ``out`` and ``student`` of ``precompute_command``.

    Returns:
        What ``--json`` prints.
    """
    from shd_ref.commands.forecast import print_forecast
    from shd_ref.teacher.study.forecast import forecast_cache

    with show_progress("samples measured") as (on_progress,):
        on_progress(0, 0)
        forecast = forecast_cache(teacher, source, options, run, wanted)
    print_remarks(*forecast.remarks)
    line = precompute_command(teacher, inputs, options, run, forecast, **command)
    print_forecast(forecast, options.num_student_heads, line)
    return asdict(forecast) | {"command": line}


def precompute_command(
    teacher: Path,
    inputs: InputOptions,
    options: PrecomputeOptions,
    run: RunOptions,
    forecast: Forecast,
    *,
    out: str | None = None,
    student: Path | None = None,
) -> str | None:
    """The command that makes the cache that is advised; None where none is.

    Args:
        teacher: the ``.onnx`` file.
        inputs: where the samples come from.
        options: what was forecast.
        run: how.
        forecast: what was found.
        out: the cache.
        student: the folder that heads, layers and plans were read from, if any.
    """
    if not forecast.advice.pays:
        return None
    default = PrecomputeOptions(1)
    usual = {"form": default.form, "codec": default.codec, "factored_codec": default.factored_codec}
    asks = usual | forecast.taken.asks | {"compression": forecast.advice.compression}
    asked = replace(options, **asks)  # type: ignore[arg-type]
    without = ("num_student_heads", "form") if not asked.has_attention else () if student is None else STUDENT_FIELDS
    words = option_words(inputs, asked, run, without=without)
    words += [] if asked.has_attention else ["--no-attention"]
    words += [] if student is None else ["--student", str(student)]
    place = out or (f"cache-{options.num_student_heads}" if asked.has_attention else "cache-targets")
    return shlex.join(["shd", "precompute", str(teacher), *words, "--out", place])
