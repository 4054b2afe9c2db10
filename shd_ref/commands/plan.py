"""``shd plan`` and ``shd precompute --dry-run``: bytes, time and error of a cache before it is written."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from rich.filesize import decimal
from rich.table import Table

from shd_ref.commands.options import InputOptions, NoAttention, StudentHeads, TeacherPath, heads_of, option_words
from shd_ref.commands.program import Document
from shd_ref.commands.terminal import console, narrow_table, plus_minus, print_remarks, show_progress
from shd_ref.teacher.options import FROM_1, MeasuredRun, PlannedOptions, PrecomputeOptions, RunOptions
from shd_ref.teacher.sources import Source

if TYPE_CHECKING:
    from shd_ref.teacher.study.forecast import Forecast

STUDENT_FIELDS: Final = ("num_student_heads", "num_student_layers", "layer_pairs")
"""Options that a student's folder says."""


_DEFAULTS, _RUN = PlannedOptions(), MeasuredRun()


def plan(
    teacher: TeacherPath,
    /,
    *,
    inputs: InputOptions,
    options: PlannedOptions = _DEFAULTS,
    run: MeasuredRun = _RUN,
    student_heads: StudentHeads = None,
    no_attention: NoAttention = False,
    samples: Annotated[int, FROM_1] = 8,
    read_bandwidth: float = 500.0,
) -> Document:
    """Measure bytes, time and error of every form and codec, and what merging heads costs the teacher.

    shd plan teacher.onnx --inputs data.npz --student-heads 4

    Ends with the command that creates the cache, or the advice to use a live teacher, if reading a cache would be
    slower. The residual is the error that merging heads by --plan makes in the attention output, layer by layer.

    Args:
        samples: Samples to run the teacher on.
        read_bandwidth: Read bandwidth per training device, in MB per second, above 0.
    """
    heads_given, pooled = heads_of(student_heads, options, no_attention=no_attention)
    pooled = inputs.pool(pooled)
    # The command to paste has the options of a form, which are none of this command.
    students = [(PrecomputeOptions(**vars(pooled) | {"num_student_heads": heads}), None) for heads in heads_given]
    source = inputs.open()
    return measure(teacher, inputs, source, students, run, samples=samples, read_bandwidth=read_bandwidth)


def measure(
    teacher: Path,
    inputs: InputOptions,
    source: Source,
    students: Iterable[tuple[PrecomputeOptions, str | None]],
    run: RunOptions,
    student: Path | None = None,
    samples: int = 8,
    read_bandwidth: float = 500.0,
) -> Document:
    """Forecast the cache of each student (options, and its place if given), print it, and return ``--json``."""
    from shd_ref.teacher.study.forecast import forecast_cache

    documents = []
    for options, out in students:
        with show_progress("samples measured") as (on_progress,):
            on_progress(0, 0)
            forecast = forecast_cache(teacher, source, options, run, samples=samples, read_bandwidth=read_bandwidth)
        line = None
        if forecast.pays:
            default = PrecomputeOptions(1)
            usual = {"form": default.form, "codec": default.codec, "factored_codec": default.factored_codec}
            advised = replace(options, **usual | forecast.taken.options)  # type: ignore[arg-type]
            line = precompute_command(teacher, inputs, advised, run, out=out, student=student)
        _print_forecast(forecast, options.num_student_heads, line)
        print_remarks(*forecast.remarks)
        documents.append(asdict(forecast) | {"command": line})
    print_remarks(source.remark)
    return documents


def precompute_command(
    teacher: Path,
    inputs: InputOptions,
    options: PrecomputeOptions,
    run: RunOptions,
    *,
    out: str | None = None,
    student: Path | None = None,
) -> str:
    """The command that makes a cache; ``student`` is the folder that heads, layers and plans were read from."""
    without: tuple[str, ...] = () if student is None else STUDENT_FIELDS
    if not options.has_attention:
        without = ("num_student_heads", "form")
    words = option_words(inputs, options, run, without=without)
    words += [] if options.has_attention else ["--no-attention"]
    words += [] if student is None else ["--student", str(student)]
    cache = out or (f"cache-{options.num_student_heads}" if options.has_attention else "cache-targets")
    return shlex.join(["shd", "precompute", str(teacher), *words, "--out", cache])


def _print_forecast(forecast: Forecast, num_student_heads: int, command: str | None) -> None:
    """Forms and codecs, the residual, and the command; without a command where no cache pays."""
    from shd_ref.teacher.study.forecast import MOST_LOST

    heads = f"{num_student_heads} student heads" if num_student_heads else "no attention"
    length = f"{forecast.mean_length:.0f} positions on average, {forecast.max_length} at most"
    support = f", {forecast.support} support" if forecast.support else ""
    _say(f"{heads}; {forecast.num_samples} samples, {length}{support}")
    console.print(_forms(forecast))
    for target in forecast.targets:
        errors = {name: value for name, value in vars(target.error).items() if name.endswith("_mean")}
        means = ", ".join(f"{name.removesuffix('_mean')} {value:.2g}" for name, value in errors.items())
        size = f"{decimal(round(target.total_bytes))} in all"
        _say(f"of these {target.subject} {target.codec}: {size}; mean errors: {means}")
    for refused in forecast.refused:
        _say(f"not {refused}")
    if forecast.residual is not None:
        residual = plus_minus(forecast.residual, forecast.margin, most=4)
        _say(f"residual: {residual} of the attention output, by weights 1/2 {forecast.constant_residual:.4f}")
        if forecast.residual > MOST_LOST:
            _say("no student was shown to gain above 52%: take more heads, or --plan matched")
    size = f"{forecast.taken.title}, {decimal(round(forecast.taken.total_bytes))} in all"
    least = f"{decimal(round(forecast.taken.break_even))}/s"
    if command:
        _say(f"take: {size}; read faster than the teacher runs, from {least} for each training device")
        console.say(f"  {command}")
    else:
        _say("take: no cache; run the teacher while training (OnlineTeacher): a reader slower than")
        _say(f"{least} for each training device waits longer than the teacher takes ({size})")
    duration = timedelta(seconds=max(1, round(forecast.squeeze_seconds * forecast.num_samples)))
    teacher, squeezed = 1000 * forecast.teacher_seconds, 1000 * forecast.squeeze_seconds
    times = f"teacher {teacher:.3g} ms per sample, squeezed {squeezed:.3g} ms: {duration} in all on this machine"
    _say(f"time: {times} (measured on {forecast.measured_samples} samples)")


def _say(text: str) -> None:
    console.print(text, highlight=False)


def _forms(forecast: Forecast) -> Table:
    table = narrow_table()
    table.add_column("stored as")
    for column in ("bytes\na token", "in all", "break-even\nread", "moved\nin a row", "KL a\nrow"):
        table.add_column(column, justify="right")
    for way in forecast.ways:
        table.add_row(
            way.title,
            f"{way.bytes_per_token:.0f}",
            decimal(round(way.total_bytes)).replace("bytes", "B"),
            f"{decimal(round(way.break_even))}/s",
            f"{way.error.tv_mean:.2%}",
            f"{way.error.kl_mean:.2g}",
            style="bold" * (way is forecast.taken),
        )
    return table
