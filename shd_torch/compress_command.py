"""``shd-torch compress``: the student that somebody deploys, by one command; PyTorch is imported when it runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shd_ref.commands.derive import Document, require_packages
from shd_ref.commands.terminal import console, narrow_table, print_remarks, show_progress
from shd_ref.errors import ShdError
from shd_ref.teacher.options import Shown

WISHES, RUNNING, LOOKING = "What is wanted", "How it will be run", "How long to look"


@dataclass(frozen=True)
class Wanted:
    """Options of ``compress``; see ``CompressOptions``."""

    faster: Annotated[
        str | None, Shown("Times faster than the teacher: 4, or several for a front: 3,4,6.", WISHES, metavar="X,...")
    ] = None
    ms: Annotated[str | None, Shown("Milliseconds of a run, with one batch and length.", WISHES, metavar="X,...")] = (
        None
    )
    mb: Annotated[str | None, Shown("Megabytes of the graph with its weights.", WISHES, metavar="X,...")] = None
    at_least: Annotated[
        float | None, Shown("Quality to keep, 1 being the teacher; alone: the fastest student that keeps it.", WISHES)
    ] = None
    batch: Annotated[tuple[int, ...], Shown("Samples per run; a target must hold for each.", RUNNING)] = (1, 32)
    length: Annotated[tuple[int, ...], Shown("Tokens per sample; not for images.", RUNNING)] = (64,)
    threads: Annotated[int, Shown("Threads of onnxruntime.", RUNNING, least=1)] = 1
    max_length: Annotated[
        int | None, Shown("Tokens that are kept of a text. Default: as the tokenizer's file says.", RUNNING, least=1)
    ] = None
    budget: Annotated[float, Shown("Minutes of training, of all students together.", LOOKING)] = 30.0
    candidates: Annotated[int, Shown("Students that are tried for each target.", LOOKING, least=1)] = 4
    learning_rate: Annotated[float | None, Shown("Of training, at its height. Default: 5e-4.", LOOKING)] = None
    seed: Annotated[int, Shown("Seed for the division of the data and their order.", LOOKING, least=0)] = 0

    def options(self) -> dict[str, Any]:
        """Fields of ``CompressOptions``."""
        targets = {name: _read_numbers(name, getattr(self, name)) for name in ("faster", "ms", "mb")}
        return vars(self) | targets


def _read_numbers(name: str, text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(",")) if text else ()
    except ValueError:
        raise ShdError("argument-value", f"{name} must be numbers, such as 3,4.5; got {text!r}") from None


def compress(
    teacher: Annotated[
        Path, typer.Argument(help="Folder of a Hugging Face model, or of sentence-transformers.", metavar="TEACHER")
    ],
    data: Annotated[
        Path, Shown("Texts (a column text) or arrays without labels, in any file that shd precompute reads.")
    ],
    out: Annotated[Path, Shown("A new folder for the student, its graphs and a page.")],
    wanted: Wanted,
    held_out: Annotated[
        Path | None, Shown("Other data to judge on. Default: a tenth of the data, at most 500 samples.")
    ] = None,
    no_int8: Annotated[bool, typer.Option("--no-int8", help="Deploy products in float.")] = False,
    go_on: Annotated[bool, typer.Option("--go-on", help="Also if the teacher in int8 is fast enough.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be tried and how long it takes.")
    ] = False,
) -> Document:
    """Make the student that loses least at the speed that you want, and write it ready to deploy.

    shd-torch compress teacher --data texts.jsonl --faster 4 --out student

    The teacher in int8 is tried first: if it is fast enough, it is the answer. Otherwise the costs of heads, neurons
    and layers are measured in onnxruntime, a few students with the best predicted loss are trained shortly, and the
    best is trained from a cache of the teacher's outputs. The folder has the model, ONNX graphs in float and int8, a
    page with the figures, and compress.json. If a run is stopped, the same command resumes it.
    """
    require_packages("onnxruntime", "pyarrow", "tokenizers", extra="compress")
    require_packages("torch", "transformers", "accelerate", extra="compress")
    from shd_torch.compress import CompressOptions
    from shd_torch.compress import compress as run
    from shd_torch.compress.run import forecast
    from shd_torch.export import hide_weight_bars

    options = CompressOptions(**wanted.options(), int8=not no_int8, go_on=go_on)
    hide_weight_bars()
    with show_progress("stages") as (on_step,):
        given: dict[str, Any] = {
            "held_out": held_out,
            "progress": lambda done, total, what: on_step(done, total, says=what),
        }
        if dry_run:
            lines = forecast(teacher, data, options, **given)
        else:
            made = run(teacher, data, options, out=out, command=["shd-torch", *sys.argv[1:]], **given)
    if dry_run:
        for line in lines:
            console.say(line)
        return {"stages": lines}
    _print_front(made.document)
    console.say(f"{out}: the page README.md, compress.json, and graphs in onnx/")
    return made.document | {"path": out}


def _print_front(document: Document) -> None:
    from shd_torch.compress.handover import find_points, settings_of

    assert isinstance(document, dict)
    table = narrow_table(caption=f"quality: {document['measure']}; times faster: {', '.join(settings_of(document))}")
    for number, heading in enumerate(("model", "quality", "times faster", "MB")):
        table.add_column(heading, justify="right" if number else "left")
    for point in find_points(document):
        speeds = ", ".join(f"{speed:.2f}" for speed in point.speeds)
        table.add_row(point.name, f"{point.quality:.4f}", speeds, f"{point.megabytes:.1f}")
    console.print(table)
    if "verdict" in document:
        console.say(f"{document['verdict']}; --go-on makes a student all the same")
    for student in document["students"]:
        console.say(f"{student['wish']}: {student['chosen']['text']}")
        print_remarks(*student["missed"])
