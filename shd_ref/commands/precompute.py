"""``shd precompute``: run the teacher over the data and fill caches."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.filesize import decimal
from rich.table import Table

from shd_ref.cache.storage.storage import subfolder
from shd_ref.commands.options import (
    PLACE,
    InputOptions,
    NoAttention,
    StudentHeads,
    TeacherPath,
    heads_of,
    option_words,
)
from shd_ref.commands.program import Document, option_of
from shd_ref.commands.terminal import console, fact_table, marked, print_remarks, show_progress
from shd_ref.errors import need
from shd_ref.teacher.options import FROM_1, RUNNING, Needs, PrecomputeOptions, RunOptions, one_of

if TYPE_CHECKING:
    from shd_ref.teacher.precompute.engine import Engine, PrecomputeSummary


_DEFAULTS, _RUN = PrecomputeOptions(), RunOptions()


def precompute(
    teacher: TeacherPath,
    /,
    *,
    inputs: InputOptions,
    options: PrecomputeOptions = _DEFAULTS,
    run: RunOptions = _RUN,
    out: Annotated[str | None, PLACE] = None,
    student_heads: StudentHeads = None,
    student: Path | None = None,
    no_attention: NoAttention = False,
    dry_run: bool = False,
    engine: Annotated[str, RUNNING, one_of(("local", "ray"))] = "local",
    workers: Annotated[int | None, RUNNING, FROM_1, Needs("engine=ray")] = None,
) -> Document:
    """Run the teacher once over the data and store its squeezed attention.

    shd precompute teacher.onnx --inputs data.npz --student-heads 4 --out cache/

    The merge is part of the graph. The first batch is compared with the NumPy reference, and a difference above
    tolerance stops the run. You can stop it at any moment, even with kill -9: the same command resumes.

    Args:
        out: The cache: a folder or an address (s3://...). Use it again to resume; only --dry-run needs none.
        student: Folder of a student. From shd-torch shrink it sets heads, layers, pairs and plans; any other Hugging
            Face folder sets heads and layers.
        dry_run: Write nothing; measure a few samples and estimate the cost.
        engine: This process (local), or actors on a Ray cluster (ray, extra 'ray').
        workers: Ray actors, each with a teacher. Default: as many as fit.
    """
    need(dry_run or out is not None, "argument-value", "--out", "be given, the cache to make", "none")
    if student is not None:
        need(not no_attention, "argument-value", "--student", "be left out with --no-attention", student)
        options, student_heads = _read_student(student, options, student_heads)
        student = student if options.plans else None  # else as if its numbers had been given
    heads_given, options = heads_of(student_heads, options, no_attention=no_attention, or_student=True)
    options = inputs.pool(options)
    from shd_ref.teacher.precompute.engine import precompute as precompute_cache
    from shd_ref.teacher.precompute.engine import run_here

    source = inputs.open()
    variants = [replace(options, num_student_heads=heads) for heads in heads_given]
    if dry_run:
        from shd_ref.commands.plan import measure

        places = [out] if len(variants) == 1 else [out and f"{out}-{heads}" for heads in heads_given]
        return measure(teacher, inputs, source, list(zip(variants, places, strict=True)), run, student=student)
    caches = [subfolder(str(out), f"heads-{heads}") for heads in heads_given] if len(variants) > 1 else [str(out)]
    runs: Engine = run_here
    if engine == "ray":
        from shd_ref.teacher.precompute.ray_engine import RayEngine

        runs = RayEngine(workers)
    with show_progress("inputs read", "samples") as (on_read, on_progress):
        opened = source if engine == "local" else inputs.absolute().open  # every actor opens them itself
        summaries = [
            precompute_cache(
                teacher, opened, cache, variant, run, engine=runs, on_read=on_read, on_progress=on_progress
            )
            for cache, variant in zip(caches, variants, strict=True)
        ]
    print_remarks(*(remark for summary in summaries for remark in (*summary.remarks, summary.remark)))
    following = []  # none while shards are missing
    if not any(summary.missing_shards for summary in summaries):
        others = [word for path in variants[0].with_teachers for word in ("--with-teacher", str(path))]
        words = ["--teacher", str(teacher), *others, *option_words(inputs)]
        following = [shlex.join(["shd", "verify", str(cache), *words]) for cache in caches]
    for summary in summaries:
        console.print(_summary_table(summary))
    for command in following or ["the other parts; the last one seals the cache (separate folders: shd merge)"]:
        console.say(f"next: {command}")
    return [vars(summary) | {"next": following} for summary in summaries]


def _read_student(
    folder: Path, options: PrecomputeOptions, student_heads: tuple[int, ...] | None
) -> tuple[PrecomputeOptions, tuple[int, ...]]:
    """The options with what ``shrink.json`` says, or a folder that ``shrink`` did not make."""
    from shd_ref.shrink.student import read_counts, read_student

    heads, layers = (None, None) if (folder / "shrink.json").exists() else read_counts(folder)
    names = ("num_student_layers", "layer_pairs", "sites", "plan")[: 1 if heads and layers else None]
    surplus = {name: value for name, value in options.attention_given.items() if name in names}
    if student_heads is not None:
        surplus = {"num_student_heads": student_heads} | surplus
    for name, value in surplus.items():
        need(False, "argument-value", option_of(name), "not be given with --student, which sets it", repr(value))
    if heads and layers:
        return replace(options, num_student_layers=layers), (heads,)
    student = read_student(folder)
    fixed = {"num_student_layers": student.num_layers, "layer_pairs": student.layer_pairs, "plans": student.plans}
    return replace(options, **fixed), (student.num_heads,)  # type: ignore[arg-type]


def _summary_table(summary: PrecomputeSummary) -> Table:
    table = fact_table(str(summary.folder))
    rate = summary.written / max(summary.seconds, 1e-9)
    others = f", {summary.written_by_others} written by other processes" if summary.written_by_others else ""
    table.add_row("samples", f"{summary.samples} ({summary.resumed} resumed{others}), {rate:.1f} per second")
    if summary.missing_shards:
        left = marked(f"{summary.missing_shards} shards", "yellow", " are left to other processes")
        table.add_row("partial", left)
    ratio = summary.float32_bytes / max(summary.coded_bytes, 1)
    table.add_row("stored", f"{decimal(summary.coded_bytes)}, {ratio:.1f}x smaller than in float32")
    comparison = summary.comparison
    if comparison is not None:
        constant = f"constant merge {comparison.constant_residual:.4f} (of {summary.compared_samples} samples)"
        table.add_row("residual", f"{comparison.residual:.4f} of the attention output, {constant}")
    for name, error in summary.errors.items():
        table.add_row(f"{name} codec", error.describe())
    if comparison is not None:
        difference = f"maps within {comparison.map_difference:.1g}, {comparison.code_mismatch:.3%} of codes differ"
        table.add_row("graph = reference", difference)
    return table
