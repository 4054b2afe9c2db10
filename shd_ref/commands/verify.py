"""``shd verify``: every byte of a cache, and on request some of its records made again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from rich.filesize import decimal

from shd_ref.commands.derive import Document, Failed
from shd_ref.commands.options import CacheArgument, CheckProvider, InputOptions, check_both
from shd_ref.commands.terminal import console, marked, messages, print_remarks, show_progress
from shd_ref.errors import ShdError
from shd_ref.teacher.run.options import Shown


def verify(
    cache: CacheArgument,
    teacher: Annotated[Path | None, Shown("Also run this teacher again on some records.")] = None,
    inputs: InputOptions | None = None,
    with_teachers: Annotated[
        tuple[Path, ...],
        Shown(
            "The other teachers of averaged logits, in the same order as for precompute: one option each.",
            metavar="TEACHER.onnx",
            needs="teacher",
        ),
    ] = (),
    records: Annotated[int, Shown("Records to run again.", least=1, needs="teacher")] = 8,
    seed: Annotated[int, Shown("Seed for choosing records.", least=0, needs="teacher")] = 0,
    provider: CheckProvider = "cpu",
) -> Document:
    """Check every byte of a cache, and optionally run its teacher again on some records.

    shd verify cache/ --teacher teacher.onnx --inputs data.npz

    With exit code 1, it names each file and record that is damaged, missing or different.
    """
    from shd_ref.cache import verify_cache

    check_both(teacher, inputs)
    # What is named wrongly is said before every byte is read.
    source = None if inputs is None else inputs.open()
    if teacher is not None and not teacher.is_file():
        raise ShdError("graph-invalid", f"--teacher must be a file; got {teacher}")
    with show_progress("shards") as (on_progress,):
        report = verify_cache(cache, on_progress=on_progress)
    document: dict[str, Any] = {"cache": cache} | asdict(report) | {"again": None}
    if count := len(report.problems):
        messages.say(marked(f"{count} problem{'s' * (count > 1)}", "bold red", f" in {cache}:"))
        for problem in report.problems:
            messages.say(f"  {problem}")
        if any(problem.path.startswith("receipts/") for problem in report.problems):
            messages.say(f"shd ls {cache} says which shards are missing, and what to do")
        raise Failed(document)
    counts = f"{report.records} records in {report.shards} shards, {decimal(report.bytes)}"
    console.print(marked("intact", "green", f": {counts}, every byte read"))
    if teacher is not None and source is not None:
        from shd_ref.teacher.study.recheck import recheck_records

        with show_progress("records run again") as (on_progress,):
            on_progress(0, 0)
            again = recheck_records(
                cache,
                teacher,
                source,
                with_teachers=with_teachers,
                num_records=records,
                seed=seed,
                provider=provider,
            )
        print_remarks(source.remark)
        rows = f"{again.rows} rows, largest total variation {again.tv_max:.2g}" if again.rows else ""
        targets = f"{again.target_rows} rows of logits and hidden states" if again.target_rows else ""
        counts = f"{again.records} records run again ({'; '.join(filter(None, (rows, targets)))})"
        console.print(marked("same", "green", f": {counts}"))
        document["again"] = asdict(again)
    return document
