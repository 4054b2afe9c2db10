"""``shd fidelity``: which heads to merge, with which weights, and what that costs the teacher."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from shd_ref.commands.app import app, console, messages, print_remark, reported_errors, show_progress
from shd_ref.commands.lists import ListCommand
from shd_ref.commands.options import (
    BatchSize,
    BatchTokens,
    CalibrationSamples,
    DecoderMaskOption,
    InputsPath,
    MaskOption,
    MaxLengthOption,
    Provider,
    SitesOption,
    TeacherPath,
    TextOption,
    Threads,
    TokenizerOption,
    words_of_inputs,
)
from shd_ref.errors import ShdError

if TYPE_CHECKING:
    from shd_ref.teacher.run.options import RunOptions
    from shd_ref.teacher.study.fidelity import Fidelity, FidelityOptions, FidelityReport


class FidelityPlan(StrEnum):
    """Which heads merge."""

    adjacent = "adjacent"
    balanced = "balanced"
    matched = "matched"
    similar = "similar"


class Alpha(StrEnum):
    """Which weights they get."""

    map = "map"
    row = "row"
    constant = "constant"
    simplex = "simplex"
    hard = "hard"


@app.command(cls=ListCommand)
def fidelity(
    teacher: TeacherPath,
    inputs: InputsPath,
    student_heads: Annotated[
        list[int], typer.Option(help="Heads of the student; several to compare: 4 6 8.", min=1, show_default=False)
    ],
    plans: Annotated[
        list[FidelityPlan],
        typer.Option(
            help="Which heads merge: adjacent pairs (the paper), balanced groups, or pairs matched on some "
            "samples, by residual or by similarity of their maps."
        ),
    ] = [FidelityPlan.adjacent, FidelityPlan.matched],  # noqa: B006  (typer copies it)
    alpha: Annotated[
        list[Alpha],
        typer.Option(
            help="Merge weights: one a map (the paper), one a query row, constant 1/2, the best convex weights of a "
            "whole group, or one head of each pair."
        ),
    ] = [Alpha.map, Alpha.row, Alpha.constant],  # noqa: B006
    output: Annotated[
        str | None, typer.Option(help="The graph's output to compare; default: its first floating-point one.")
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help="Array of the inputs with class labels (N,) or token ids (N, L), for the teacher's own loss. "
            "The graph's own token input stands for the next tokens."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="How many samples to run, chosen by the seed.", min=1)] = 128,
    calibration_samples: CalibrationSamples = 16,
    sites: SitesOption = None,
    tokenizer: TokenizerOption = None,
    text_column: TextOption = None,
    max_length: MaxLengthOption = None,
    mask: MaskOption = None,
    decoder_mask: DecoderMaskOption = None,
    batch_size: BatchSize = 16,
    batch_tokens: BatchTokens = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of samples.", min=0)] = 0,
    json_out: Annotated[str | None, typer.Option("--json", help="Also write everything to this file.")] = None,
    provider: Provider = "cpu",
    threads: Threads = None,
) -> None:
    """Measure what the teacher itself loses with squeezed attention, for every way to squeeze it.

    The teacher runs with merged maps in place of its own, in all layers at once; no student and no training is
    needed. Ends with the command line that precomputes the best way.
    """
    from shd_ref.cache.storage.outputs import output_file
    from shd_ref.teacher.run.options import RunOptions
    from shd_ref.teacher.sources import open_source
    from shd_ref.teacher.study.fidelity import FidelityOptions, measure_fidelity

    with reported_errors():
        json_file = None if json_out is None else output_file(json_out, argument="json")
        options = FidelityOptions(
            student_heads=tuple(student_heads),
            plans=tuple(plan.value for plan in plans),
            alphas=tuple(kind.value for kind in alpha),
            output=output,
            targets=targets,
            samples=samples,
            calibration_samples=calibration_samples,
            sites=sites,
        )
        run = RunOptions(
            mask=mask,
            decoder_mask=decoder_mask,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            seed=seed,
            provider=provider,
            num_threads=threads,
        )
        source = open_source(inputs, tokenizer=tokenizer, text_column=text_column, max_length=max_length)
        with show_progress("batches") as (bar, task):
            report = measure_fidelity(
                teacher,
                source,
                options,
                run,
                on_progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        commands = {
            heads: _precompute_command(
                [str(teacher), *words_of_inputs(inputs, tokenizer, text_column, max_length)],
                result,
                options,
                run,
            )
            for heads, result in report.best().items()
        }
        print_remark(source)
        if json_file is not None:
            _write_json(json_file, teacher, report, commands)
    for skipped in report.skipped:
        messages.print(f"left as it is: {skipped}", highlight=False, soft_wrap=True)
    console.print(_table(teacher, report))
    console.print("best that can be precomputed, for each number of student heads:" if commands else "")
    for command in commands.values():
        console.print(f"  {command}", highlight=False, soft_wrap=True)


def _table(teacher: Path, report: FidelityReport) -> Table:
    own = "" if report.loss is None else f", loss {report.loss:.4f} unsqueezed"
    table = Table(
        title=f"{teacher.name}: {len(report.sites)} attention sites squeezed, {report.samples} samples{own}",
        caption=f"errors relative to the teacher; 1 - cosine and output error of {report.output!r}",
        title_justify="left",
        caption_justify="left",
    )
    for title in ("heads", "plan", "alpha"):
        table.add_column(title, justify="right" if title == "heads" else "left")
    measures = [*(["loss"] if report.loss is not None else []), "1 - cosine", "output error", "attention error"]
    for title in measures:
        table.add_column(title, justify="right")
    best = {id(result) for result in report.best().values()}
    for result in report.results:
        shown = [] if result.loss is None else [f"{result.loss:.4f}"]
        # The cosine distance of equal outputs is 0 up to rounding of either sign.
        shown += [f"{max(result.cosine_distance, 0.0):.3g}"]
        shown += [f"{error:.3f}" for error in (result.output_error, result.attention_error)]
        setting = result.setting
        table.add_row(
            str(setting.num_student_heads), setting.plan, setting.alpha, *shown, style="bold" * (id(result) in best)
        )
    return table


def _precompute_command(subject: list[str], best: Fidelity, options: FidelityOptions, run: RunOptions) -> str:
    """The command line that squeezes as the best setting does."""
    from shd_ref.teacher.study.fidelity import ALPHAS

    heads, plan = best.setting.num_student_heads, best.setting.plan
    strategy, alpha_per = ALPHAS[best.setting.alpha]
    words = ["shd", "precompute", *subject, "--student-heads", str(heads)]
    if strategy != "shd":
        words += ["--strategy", strategy]
    if alpha_per != "map":
        words += ["--alpha-per", alpha_per]
    if plan in ("matched", "similar"):
        words += ["--plan", "matched", "--calibration-samples", str(options.calibration_samples)]
        words += ["--seed", str(run.seed)] if run.seed else []
    elif plan == "balanced":
        words += ["--plan", plan]
    if plan == "similar":
        words += ["--matched-by", "similarity"]
    if options.sites is not None:
        words += ["--sites", options.sites]
    if run.mask is not None:
        words += ["--mask", run.mask]
    return shlex.join([*words, "--out", f"cache-{heads}"])


def _write_json(path: Path, teacher: Path, report: FidelityReport, commands: dict[int, str]) -> None:
    results = [asdict(result.setting) | asdict(result) for result in report.results]
    for result in results:
        del result["setting"]
    document = {
        "teacher": teacher.name,
        "output": report.output,
        "sites": report.sites,
        "skipped": report.skipped,
        "samples": report.samples,
        "loss": report.loss,
        "results": results,
        "recommended": {str(heads): command for heads, command in commands.items()},
    }
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ShdError(
            "write-failed", f"{path} could not be written: {error.strerror or error}: name another --json"
        ) from error
