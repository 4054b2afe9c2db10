"""``shd fidelity``: which heads to merge, with which weights, and what that costs the teacher."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from shd_ref.commands.derive import Document, Without
from shd_ref.commands.options import InputOptions, TeacherPath
from shd_ref.commands.plan import precompute_command
from shd_ref.commands.terminal import console, messages, narrow_table, plus_minus, print_remarks, show_progress
from shd_ref.teacher.options import FidelityOptions, PrecomputeOptions, RunOptions

if TYPE_CHECKING:
    from shd_ref.teacher.study.ranking import FidelityReport, Setting


def fidelity(
    teacher: TeacherPath,
    inputs: InputOptions,
    options: FidelityOptions,
    run: Annotated[RunOptions, Without("samples_per_shard", "shards")],
) -> Document:
    """Measure the teacher's loss of accuracy with squeezed attention, for every way to squeeze it.

    shd fidelity teacher.onnx --inputs data.npz --student-heads 4,6

    The teacher runs with merged instead of full maps, in all layers at once; no student and no training is needed.
    Ends with the precompute command for the best setting, or for the simplest of several that do not differ
    significantly. The result is saved next to the teacher (teacher.fidelity.json), where shd plan and shd precompute
    read it.
    """
    from shd_ref.teacher.study.fidelity import measure_fidelity
    from shd_ref.teacher.study.kept import keep_report, kept_path

    source = inputs.open()
    with show_progress("batches") as (on_progress,):
        report = measure_fidelity(teacher, source, options, run, on_progress=on_progress)
    commands = {
        heads: _command(teacher, inputs, report, result.setting, options, run)
        for heads, result in report.recommended().items()
    }
    lost = f"{kept_path(teacher)} could not be written: the result is not saved"
    print_remarks(source.remark, None if keep_report(teacher, report) else lost)
    for skipped in report.skipped:
        messages.say(f"left as it is: {skipped}")
    _print_report(teacher, report, commands)
    return _document(teacher, report, commands)


def _print_report(teacher: Path, report: FidelityReport, commands: dict[int, str]) -> None:
    from shd_ref.teacher.study.intervals import CONFIDENCE

    count = len(report.sites)
    title = f"{teacher.name}: {count} attention site{'s' * (count != 1)} squeezed; errors of {report.output!r}"
    console.print(title, highlight=False)
    own = "" if report.loss is None else f"; the teacher's loss {report.loss:.4f}"
    chosen_on = "" if report.held_out else ", including those for matching plans"
    console.print(f"{report.samples} samples{chosen_on}{own}", highlight=False)
    for heads in sorted({result.setting.num_student_heads for result in report.results}):
        console.print()
        console.print(_table(report, heads))
        if heads in commands:
            console.print(f"take: {_reason(report, heads)}", highlight=False)
            console.say(f"  {commands[heads]}")
    console.print()
    how = "intervals over samples (Student's t); differences sample by sample, all of a table at once"
    console.print(f"±: {CONFIDENCE:.0%} {how}", highlight=False)


def _table(report: FidelityReport, heads: int) -> Table:
    """The settings of one number of student heads, best first."""
    results = [result for result in report.results if result.setting.num_student_heads == heads]
    # Few digits before and after the point, the same power of ten in all rows.
    largest = max(abs(result.cost) for result in results)
    power = 0 if largest == 0 or largest >= 0.1 else 3 * math.floor(math.log10(largest) / 3)
    unit = f"\n(1e{power})" if power else ""
    table = narrow_table(f"{heads} student heads")
    for name in ("plan", "weights"):
        table.add_column(name)
    for name in (f"{report.measure}{unit}", f"above best{unit}", "attention\nerror"):
        table.add_column(name, justify="right")
    recommended, best = report.recommended().get(heads), report.best().get(heads)

    def say(value: float, margin: float | None) -> str:
        return plus_minus(value / 10**power, margin and margin / 10**power, most=4)

    for result in results:
        cost = max(result.cost, 0.0) if report.loss is None else result.cost  # 0 up to rounding of either sign
        above = "indistinguishable" if result.is_tied else say(result.excess, result.excess_margin)
        table.add_row(
            result.setting.plan_title,
            result.setting.weights_title,
            say(cost, result.margin),
            "best" if result is best else above,
            f"{result.attention_error:.3f}",
            style="bold" * (result is recommended),
        )
    return table


def _reason(report: FidelityReport, heads: int) -> str:
    """Which setting, and why."""
    taken, tied = report.recommended()[heads], report.tied(heads)
    samples = f"{report.samples} sample{'s' * (report.samples != 1)}"
    if len(tied) == 1:
        return f"{taken.setting.title}: the lowest {report.measure}, significant with {samples}"
    if taken is tied[0] and taken.excess_margin is not None:
        return f"{taken.setting.title}: the lowest {report.measure}, and no equally good setting has fewer options"
    tie = f"{len(tied)} settings without significant differences on {samples} (more: --samples)"
    return f"{taken.setting.title}: the fewest options of {tie}"


def _command(
    teacher: Path,
    inputs: InputOptions,
    report: FidelityReport,
    setting: Setting,
    options: FidelityOptions,
    run: RunOptions,
) -> str:
    """The command that squeezes as a setting does, of the sites that were measured."""
    chosen = PrecomputeOptions(
        setting.num_student_heads,
        sites=",".join(report.sites) if report.skipped else options.sites,
        strategy=setting.strategy,
        plan=setting.plan,
        alpha_per=setting.alpha_per,
    )
    if setting.matched_by is not None:
        chosen = replace(chosen, matched_by=setting.matched_by, calibration_samples=options.calibration_samples)
    return precompute_command(teacher, inputs, chosen, run)


def _document(teacher: Path, report: FidelityReport, commands: dict[int, str]) -> dict[str, Any]:
    """What ``--json`` prints."""
    results = []
    for result in report.results:
        members = asdict(result)
        results.append(members.pop("setting") | members | {"indistinguishable": result.is_tied})
    return {
        "teacher": teacher.name,
        "graph_output": report.output,
        "sites": report.sites,
        "skipped": report.skipped,
        "samples": report.samples,
        "held_out": report.held_out,
        "loss": report.loss,
        "results": results,
        "recommended": {str(heads): command for heads, command in commands.items()},
    }
