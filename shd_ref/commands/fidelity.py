"""``shd fidelity``: which heads to merge, with which weights, and what that costs the teacher."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from shd_ref.commands.derive import Without
from shd_ref.commands.options import AsJson, InputOptions, TeacherPath
from shd_ref.commands.terminal import console, messages, narrow_table, print_remarks, show_progress
from shd_ref.teacher.run.options import RunOptions
from shd_ref.teacher.study.options import FidelityOptions

if TYPE_CHECKING:
    from shd_ref.teacher.study.fidelity import Fidelity, FidelityReport


def fidelity(
    teacher: TeacherPath,
    inputs: InputOptions,
    options: FidelityOptions,
    run: Annotated[RunOptions, Without("samples_per_shard", "shards")],
    as_json: AsJson = False,
) -> None:
    """Measure what the teacher itself loses with squeezed attention, for every way to squeeze it.

    shd fidelity teacher.onnx --inputs data.npz --student-heads 4,6

    The teacher runs with merged maps in place of its full maps, in all layers at once; no student and no training is
    needed. Ends with the command that precomputes the best way.
    """
    from shd_ref.teacher.study.fidelity import measure_fidelity

    source = inputs.open()
    with show_progress("batches") as (on_progress,):
        report = measure_fidelity(teacher, source, options, run, on_progress=on_progress)
    commands = {
        heads: _precompute_command([str(teacher), *inputs.words], result, options, run)
        for heads, result in report.best().items()
    }
    print_remarks(source.remark)
    if as_json:
        print(json.dumps(_document(teacher, report, commands)))
        return
    for skipped in report.skipped:
        messages.say(f"left as it is: {skipped}")
    console.print(_table(teacher, report))
    if commands:
        console.print("best that can be precomputed, for each number of student heads:")
    for command in commands.values():
        console.say(f"  {command}")


def _table(teacher: Path, report: FidelityReport) -> Table:
    own = "" if report.loss is None else f", loss {report.loss:.4f} unsqueezed"
    count = len(report.sites)
    table = narrow_table(
        f"{teacher.name}: {count} attention site{'s' * (count != 1)} squeezed, {report.samples} samples{own}",
        f"errors relative to the teacher; 1 - cosine and output error of {report.output!r}",
    )
    table.add_column("heads", justify="right")
    for title in ("plan", "strategy", "alpha\nper"):
        table.add_column(title)
    measures = [*(["loss"] if report.loss is not None else []), "1 - cosine", "output\nerror", "attention\nerror"]
    for title in measures:
        table.add_column(title, justify="right")
    best = {id(result) for result in report.best().values()}
    for result in report.results:
        shown = [] if result.loss is None else [f"{result.loss:.4f}"]
        # The cosine distance of equal outputs is 0 up to rounding of either sign.
        shown += [f"{max(result.cosine_distance, 0.0):.3g}"]
        shown += [f"{error:.3f}" for error in (result.output_error, result.attention_error)]
        setting = result.setting
        plan = setting.plan if setting.matched_by in (None, "residual") else f"{setting.plan} ({setting.matched_by})"
        names = str(setting.num_student_heads), plan, setting.strategy, setting.alpha_per
        table.add_row(*names, *shown, style="bold" * (id(result) in best))
    return table


def _precompute_command(subject: list[str], best: Fidelity, options: FidelityOptions, run: RunOptions) -> str:
    """The command that squeezes as the best setting does."""
    setting = best.setting
    words = ["shd", "precompute", *subject, "--student-heads", str(setting.num_student_heads)]
    words += ["--strategy", setting.strategy] if setting.strategy != "shd" else []
    words += ["--alpha-per", setting.alpha_per] if setting.alpha_per != "map" else []
    words += ["--plan", setting.plan] if setting.plan != "progressive" else []
    if setting.matched_by is not None:
        words += ["--matched-by", setting.matched_by] if setting.matched_by != "residual" else []
        words += ["--calibration-samples", str(options.calibration_samples)]
        words += ["--seed", str(run.seed)] if run.seed else []
    words += ["--sites", options.sites] if options.sites is not None else []
    words += ["--mask", run.mask] if run.mask is not None else []
    words += ["--decoder-mask", run.decoder_mask] if run.decoder_mask is not None else []
    return shlex.join([*words, "--out", f"cache-{setting.num_student_heads}"])


def _document(teacher: Path, report: FidelityReport, commands: dict[int, str]) -> dict[str, Any]:
    """What ``--json`` prints."""
    results = [asdict(result.setting) | asdict(result) for result in report.results]
    for result in results:
        del result["setting"]
    return {
        "teacher": teacher.name,
        "graph_output": report.output,
        "sites": report.sites,
        "skipped": report.skipped,
        "samples": report.samples,
        "loss": report.loss,
        "results": results,
        "recommended": {str(heads): command for heads, command in commands.items()},
    }
