"""``shd plan`` and ``shd precompute --dry-run``: what a cache would cost before it is written, and which to make."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from rich.filesize import decimal
from rich.table import Table

from shd_ref.commands.derive import Document, Without
from shd_ref.commands.options import InputOptions, NoAttention, StudentHeads, TeacherPath, heads_of, option_words
from shd_ref.commands.terminal import console, narrow_table, print_remarks, show_progress
from shd_ref.teacher.options import PlanOptions, PrecomputeOptions, RunOptions
from shd_ref.teacher.sources import Source

if TYPE_CHECKING:
    from shd_ref.teacher.study.advice import TrainingMemory
    from shd_ref.teacher.study.forecast import Forecast
    from shd_ref.teacher.study.offers import TargetOffer

STUDENT_FIELDS: Final = ("num_student_heads", "num_student_layers", "layer_pairs")
"""Options that a student's folder says."""


def plan(
    teacher: TeacherPath,
    inputs: InputOptions,
    options: Annotated[
        partial[PrecomputeOptions],
        Without("num_student_heads", "form", "factored_codec", "codec", "on_error", "seed_column"),
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
    heads_given, options = heads_of(student_heads, options, no_attention=no_attention)
    students = [(options(num_student_heads=heads), None) for heads in heads_given]
    return measure(teacher, inputs, inputs.open(), students, run, wanted)


def measure(
    teacher: Path,
    inputs: InputOptions,
    source: Source,
    students: Iterable[tuple[PrecomputeOptions, str | None]],
    run: RunOptions,
    wanted: PlanOptions | None = None,
    student: Path | None = None,
) -> Document:
    """Forecast the cache of each student (options, and its place if asked for), print it, and return ``--json``."""
    from shd_ref.teacher.study.forecast import forecast_cache
    from shd_ref.teacher.study.kept import advise_plan

    documents = []
    for options, out in students:
        if wanted is not None and options.has_attention:
            print_remarks(advise_plan(teacher, options))
        with show_progress("samples measured") as (on_progress,):
            on_progress(0, 0)
            forecast = forecast_cache(teacher, source, options, run, wanted)
        print_remarks(*forecast.remarks)
        line = None
        if forecast.advice.pays:
            default = PrecomputeOptions(1)
            usual = {"form": default.form, "codec": default.codec, "factored_codec": default.factored_codec}
            asks = usual | forecast.taken.asks
            advised = replace(options, **asks)  # type: ignore[arg-type]
            line = precompute_command(teacher, inputs, advised, run, out=out, student=student)
        _print_forecast(forecast, options.num_student_heads, line)
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
    """What was found, what to do and why, and what training will need; without a command where no cache pays."""
    heads = f"{num_student_heads} student heads" if num_student_heads else "no attention"
    length = f"{forecast.mean_length:.0f} positions on average, {forecast.max_length} at most"
    support = f", {forecast.support} support" if forecast.support else ""
    _say(f"{heads}; {forecast.num_samples} samples, {length}{support}")
    if forecast.supplied:
        _say(f"added inputs: {forecast.supplied}")
    console.print(_table(forecast))
    for target in forecast.beside:
        errors = {name: value for name, value in vars(target.error).items() if name.endswith("_mean")}
        means = ", ".join(f"{name.removesuffix('_mean')} {value:.2g}" for name, value in errors.items())
        size = f"{target.bytes_per_row:.0f} bytes per {target.unit}, {decimal(round(target.total_bytes))} in all"
        _say(f"of these {target.subject} {target.codec}: {size}; mean errors: {means}")
    if forecast.offers:
        _say("KD on logits can learn from (error of its gradient, measured on one sample):")
        _list(*map(_describe_offer, forecast.offers))
    for refused in forecast.refused:
        _say(f"not {refused}")
    taken = forecast.taken
    size = f"{taken.title}, {decimal(round(taken.total_bytes))} in all"
    instead = "no cache; run the teacher while training (OnlineTeacher). The best cache would be "
    _say(f"take: {'' if command else instead}{size}")
    _list(*forecast.advice.reasons)
    if command:
        console.say(f"  {command}")
    duration = timedelta(seconds=max(1, round(forecast.squeeze_seconds * forecast.num_samples)))
    teacher, squeezed = 1000 * forecast.teacher_seconds, 1000 * forecast.squeeze_seconds
    times = f"teacher {teacher:.3g} ms per sample, squeezed {squeezed:.3g} ms: {duration} in all on this machine"
    _say(f"time: {times} (measured on {forecast.measured_samples} samples)")
    _say_memory(forecast.memory)


def _describe_offer(offer: TargetOffer) -> str:
    head = f", and the head once, {decimal(offer.head_bytes)}" if offer.head_bytes else ""
    return (
        f"{offer.way}: {offer.bytes_per_token} bytes per token{head}; error {offer.gradient_error:.2g} ({offer.asks})"
    )


def _say(text: str) -> None:
    console.print(text, highlight=False)


def _list(*points: str) -> None:
    grid = Table.grid(padding=(0, 1))
    for point in points:
        grid.add_row("-", point)
    console.print(grid, highlight=False)


def _table(forecast: Forecast) -> Table:
    """A form and codec per row."""
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


def _say_memory(memory: TrainingMemory) -> None:
    student, optimizer, records, term, teacher = (
        decimal(size).replace("bytes", "B")
        for size in (memory.student, memory.optimizer, memory.records, memory.term, memory.teacher)
    )
    step = f"{memory.batch_size} samples of {memory.length} positions"
    _say(f"memory of a step of {step}, in float32 with AdamW, activations apart:")
    whose = ", as many as the teacher (set --student-parameters to change)" if memory.is_assumed else ""
    parameters = f"{memory.student_parameters / 1e6:.3g} M parameters{whose}"
    _list(
        f"student {student}, its gradients and optimizer {optimizer}: {parameters}",
        *([f"SHD term about {term}"] * bool(memory.term)),
        f"records {records}; a live teacher instead: {teacher}",
    )
