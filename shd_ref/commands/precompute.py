"""``shd precompute``: run the teacher over the data and fill caches."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shd_ref.commands.derive import Document, Without, option_of
from shd_ref.commands.options import (
    InputOptions,
    NoAttention,
    StudentHeads,
    TeacherPath,
    heads_of,
    refuse_nothing,
)
from shd_ref.commands.terminal import console, print_remarks, show_progress
from shd_ref.commands.words import option_words
from shd_ref.errors import ShdError
from shd_ref.teacher.run.options import RUNNING, PrecomputeOptions, RunOptions, Shown

if TYPE_CHECKING:
    from shd_ref.teacher.precompute.summary import PrecomputeSummary
    from shd_ref.teacher.sources import Source


def precompute(
    teacher: TeacherPath,
    inputs: InputOptions,
    options: Annotated[partial[PrecomputeOptions], Without("num_student_heads")],
    run: RunOptions,
    out: Annotated[
        str,
        typer.Option(
            help="The cache: a folder or an address (s3://...). Use the same one again to resume.",
            metavar="CACHE",
            callback=refuse_nothing,
        ),
    ],
    student_heads: StudentHeads = None,
    student: Annotated[
        Path | None,
        Shown("Folder of a student from shd-torch shrink; it sets heads, layers, pairs and plans."),
    ] = None,
    no_attention: NoAttention = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; measure a few samples and estimate the cost.")
    ] = False,
    engine: Annotated[
        str, Shown("This process (local), or actors on a Ray cluster (ray, extra 'ray').", RUNNING, ("local", "ray"))
    ] = "local",
    workers: Annotated[
        int | None,
        Shown("Ray actors, each with a teacher. Default: as many as fit.", RUNNING, least=1, needs="engine=ray"),
    ] = None,
) -> Document:
    """Run the teacher once over the data and store its squeezed attention.

    shd precompute teacher.onnx --inputs data.npz --student-heads 4 --out cache/

    The merge is part of the graph. The first batch is compared with the NumPy reference, and a difference above
    tolerance stops the run. You can stop it at any moment, even with kill -9: the same command resumes.
    """
    if student is not None:
        if no_attention:
            raise ShdError("argument-value", f"--student must be left out with --no-attention; got {student}")
        options, student_heads = _read_student(student, options, student_heads)
    heads_given, options = heads_of(student_heads, options, no_attention=no_attention)
    from shd_ref.teacher.precompute.engine import students_of
    from shd_ref.teacher.study.kept import advise_plan

    source = inputs.open()
    if dry_run:
        asked = [options(num_student_heads=heads) for heads in heads_given]
        return _measure(teacher, inputs, source, asked, run, out, student)
    if student is None and not no_attention:
        print_remarks(*(advise_plan(teacher, options(num_student_heads=heads)) for heads in heads_given))
    with show_progress("inputs read", "samples") as (on_read, on_progress):
        told: dict[str, Any] = {"on_read": on_read, "on_progress": on_progress}
        summaries = _run(teacher, inputs, source, out, options, heads_given, run, engine, workers, told)
    print_remarks(*(remark for summary in summaries for remark in (*summary.remarks, summary.remark)))
    # As they were said: actors were given whole paths.
    several = students_of(out, options(num_student_heads=1), heads_given) if len(heads_given) > 1 else []
    others = options.keywords["with_teachers"]
    following = _following(summaries, teacher, others, inputs, [str(folder) for folder, _ in several] or [out])
    _print_summaries(summaries, following)
    return [
        {name: value for name, value in vars(summary).items() if name != "alphas"} | {"next": following}
        for summary in summaries
    ]


def _read_student(
    folder: Path, options: partial[PrecomputeOptions], student_heads: tuple[int, ...] | None
) -> tuple[partial[PrecomputeOptions], tuple[int, ...]]:
    """The options with what ``shrink.json`` says (STUDENT-6)."""
    from shd_ref.shrink.student import read_student

    given = {"num_student_heads": student_heads}
    given |= {name: options.keywords[name] for name in ("num_student_layers", "layer_pairs", "sites")}
    for name, value in given.items():
        if value is not None:
            raise ShdError(
                "argument-value",
                f"{option_of(name)} must not be given with --student, which says it; got {value!r}",
                "STUDENT-6",
            )
    if options.keywords["plan"] != PrecomputeOptions.plan:
        raise ShdError(
            "argument-value",
            f"--plan must not be given with --student, which says it; got {options.keywords['plan']!r}",
            "STUDENT-6",
        )
    made = read_student(folder)
    fixed: dict[str, Any] = {
        "num_student_layers": made.num_layers,
        "layer_pairs": made.layer_pairs,
        "plans": made.plans,
    }
    return partial(options.func, **options.keywords | fixed), (made.num_heads,)


def _measure(
    teacher: Path,
    inputs: InputOptions,
    source: Source,
    students: list[PrecomputeOptions],
    run: RunOptions,
    out: str,
    student: Path | None,
) -> Document:
    from shd_ref.commands.plan import measure

    documents = [
        measure(
            teacher,
            inputs,
            source,
            options,
            run,
            out=out if len(students) == 1 else f"{out}-{options.num_student_heads}",
            student=student,
        )
        for options in students
    ]
    print_remarks(source.remark)
    return documents


def _run(
    teacher: Path,
    inputs: InputOptions,
    source: Source,
    out: str,
    options: partial[PrecomputeOptions],
    heads: tuple[int, ...],
    run: RunOptions,
    engine: str,
    workers: int | None,
    told: dict[str, Any],
) -> list[PrecomputeSummary]:
    from shd_ref.cache.storage.places import is_address
    from shd_ref.teacher.precompute.engine import precompute as precompute_caches
    from shd_ref.teacher.precompute.engine import students_of

    place = Path(out).absolute() if engine == "ray" and not is_address(out) else out
    first = options(num_student_heads=heads[0])
    if engine == "ray":
        first = replace(first, with_teachers=tuple(path.absolute() for path in first.with_teachers))
    students = students_of(place, first, heads) if len(heads) > 1 else [(place, first)]
    if engine == "local":
        return precompute_caches(teacher, source, students, run, **told)
    from shd_ref.teacher.precompute.ray_engine import RayEngine

    # The actors open the inputs themselves, under these paths.
    tokenizer = inputs.tokenizer and inputs.tokenizer.absolute()
    reopen = replace(inputs, inputs=inputs.inputs.absolute(), tokenizer=tokenizer).open
    return precompute_caches(teacher.absolute(), reopen, students, run, engine=RayEngine(workers), **told)


def _following(
    summaries: list[PrecomputeSummary],
    teacher: Path,
    with_teachers: tuple[Path, ...],
    inputs: InputOptions,
    places: list[str],
) -> list[str]:
    """The commands that come next; none while shards are missing."""
    if any(summary.missing_shards for summary in summaries):
        return []
    others = [word for path in with_teachers for word in ("--with-teacher", str(path))]
    words = ["--teacher", str(teacher), *others, *option_words(inputs)]
    return [shlex.join(["shd", "verify", place, *words]) for place in places]


def _print_summaries(summaries: list[PrecomputeSummary], following: list[str]) -> None:
    from shd_ref.commands.tables import summary_table

    for summary in summaries:
        console.print(summary_table(summary))
    if not following:
        console.say("next: the other parts; the last one seals, or shd merge does where each has its folder")
    for command in following:
        console.say(f"next: {command}")
