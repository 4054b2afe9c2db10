"""What ``shd plan`` and ``shd precompute --dry-run`` print."""

from __future__ import annotations

from datetime import timedelta

from rich.filesize import decimal
from rich.table import Table

from shd_ref.commands.terminal import console, narrow_table
from shd_ref.teacher.study.advice import TrainingMemory
from shd_ref.teacher.study.forecast import Forecast


def print_forecast(forecast: Forecast, num_student_heads: int, command: str | None) -> None:
    """What was found, what to do and why, and what training will need.

    Args:
        forecast: what was found.
        num_student_heads: H_s.
        command: that does it; None where no cache pays.
    """
    heads, support = f"{num_student_heads} student heads", f", {forecast.support} support"
    _say(
        f"{heads if num_student_heads else 'no attention'}; {forecast.num_samples} samples, "
        f"{forecast.mean_length:.0f} positions on average, {forecast.max_length} at most"
        f"{support * bool(forecast.support)}"
    )
    if forecast.supplied:
        _say(f"fed beside the data: {forecast.supplied}")
    console.print(_table(forecast))
    for target in forecast.beside:
        errors = {name: value for name, value in vars(target.error).items() if name.endswith("_mean")}
        said = ", ".join(f"{name.removesuffix('_mean')} {value:.2g}" for name, value in errors.items())
        size = f"{target.bytes_per_row:.0f} bytes a {target.unit}, {decimal(round(target.total_bytes))} in all"
        _say(f"of these {target.subject} {target.codec}: {size}; mean errors: {said}")
    for refused in forecast.refused:
        _say(f"not {refused}")
    taken = forecast.taken
    packed = " with zstd" if forecast.advice.compression != "none" else ""
    size = f"{taken.title}{packed}, {decimal(round(taken.total_bytes))} in all{' before zstd' * bool(packed)}"
    instead = "no cache; run the teacher while training (OnlineTeacher). The best cache would be "
    _say(f"take: {'' if command else instead}{size}")
    _list(*forecast.advice.reasons)
    if command:
        console.say(f"  {command}")
    _say_time(forecast)
    _say_memory(forecast.memory)


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
    for column in ("bytes\na token", "in all", "with\nzstd", "break-even\nread", "moved\nin a row", "KL a\nrow"):
        table.add_column(column, justify="right")
    for way in forecast.ways:
        table.add_row(
            way.title,
            f"{way.bytes_per_token:.0f}",
            decimal(round(way.total_bytes)).replace("bytes", "B"),
            "?" if way.zstd_ratio is None else f"x {way.zstd_ratio:.2f}",
            f"{decimal(round(way.break_even))}/s",
            f"{way.error.tv_mean:.2%}",
            f"{way.error.kl_mean:.2g}",
            style="bold" * (way is forecast.taken),
        )
    return table


def _say_time(forecast: Forecast) -> None:
    duration = timedelta(seconds=max(1, round(forecast.squeeze_seconds * forecast.num_samples)))
    teacher, squeezed = 1000 * forecast.teacher_seconds, 1000 * forecast.squeeze_seconds
    _say(
        f"time: teacher {teacher:.3g} ms a sample, squeezed {squeezed:.3g} ms: {duration} in all on this machine "
        f"(measured on {forecast.measured_samples} samples)"
    )


def _say_memory(memory: TrainingMemory) -> None:
    student, optimizer, records, term, teacher = (
        decimal(size).replace("bytes", "B")
        for size in (memory.student, memory.optimizer, memory.records, memory.term, memory.teacher)
    )
    _say(
        f"memory of a step of {memory.batch_size} samples of {memory.length} positions, in float32 with AdamW, "
        "activations apart:"
    )
    whose = ", as many as the teacher (--student-parameters says otherwise)" if memory.is_assumed else ""
    _list(
        f"student {student}, its gradients and optimizer {optimizer}: {memory.student_parameters / 1e6:.3g} M "
        f"parameters{whose}",
        *([f"SHD term about {term}"] * bool(memory.term)),
        f"records {records}; in their place a live teacher, {teacher}",
    )
