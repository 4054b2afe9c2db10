"""``shd-torch compress``: the student that somebody deploys, by one command; PyTorch is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from shd_ref.commands.program import Document, require_packages
from shd_ref.commands.terminal import console, narrow_table, print_remarks, show_progress
from shd_ref.errors import ShdError
from shd_torch.compress.options import CompressOptions
from shd_torch.compress.samples import open_rows
from shd_torch.shrink.folders import check_files, new_folder


def compress(
    teacher: Path,
    /,
    *,
    data: Path,
    options: CompressOptions | None = None,
    out: Path | None = None,
    held_out: Path | None = None,
    dry_run: bool = False,
) -> Document:
    """Make the student that loses least at the speed that you want, and write it ready to deploy.

    shd-torch compress teacher --data texts.jsonl --faster 4 --out student

    The teacher in int8 is tried first: if it is fast enough, it is the answer. Otherwise the costs of heads, neurons
    and layers are measured in onnxruntime, a few students with the best predicted loss are trained shortly, and the
    best is trained from a cache of the teacher's outputs. The folder has the model, ONNX graphs in float and int8, a
    page with the figures, and compress.json. If a run is stopped, the same command resumes it.

    Args:
        teacher: Folder of a Hugging Face model, or of sentence-transformers.
        data: Texts (a column text) or arrays without labels, in any file that shd precompute reads; .npy too.
        out: A new folder for the student, its graphs and a page; only --dry-run needs none.
        held_out: Other data to judge on. Default: a tenth of the data, at most 500 samples.
        dry_run: Say what would be tried, and for how long.
    """
    require_packages("torch", "transformers", "accelerate", "scipy", "onnxruntime", "tokenizers")
    if out is None and not dry_run:
        raise ShdError("argument-value", "--out must be given, a new folder for the student; got none")
    out = None if dry_run else out
    wanted = options or CompressOptions()  # which refuses that nothing is wanted
    check_files(teacher, "teacher")
    for argument, path in {"data": data, "held_out": held_out}.items():
        if path is not None:
            open_rows(path, teacher, wanted.max_length, argument)
    if out is not None:
        new_folder(out)
    from shd_torch.compress.run import compress as run
    from shd_torch.compress.run import forecast
    from shd_torch.export import hide_weight_bars

    hide_weight_bars()
    with show_progress("stages") as (on_step,):
        settings: dict[str, Any] = {"options": wanted, "held_out": held_out}
        settings["progress"] = lambda done, total, what: on_step(done, total, says=what)
        if out is None:
            lines = forecast(teacher, data, **settings)
        else:
            document = run(teacher, data, out=out, command=["shd-torch", *sys.argv[1:]], **settings)
    if out is None:
        console.say("\n".join(lines))
        return {"stages": lines}
    _print_front(document)
    print_remarks(*document["remarks"])
    console.say(f"{out}: the page README.md, compress.json, and graphs in onnx/")
    return document | {"path": out}


def _print_front(document: dict[str, Any]) -> None:
    from shd_torch.compress.handover import find_points, settings_of

    table = narrow_table(caption=f"quality: {document['measure']}; times faster: {'; '.join(settings_of(document))}")
    for number, heading in enumerate(("model", "quality", "times faster", "MB")):
        table.add_column(heading, justify="right" if number else "left")
    for point in find_points(document):
        name, quality, *speeds, megabytes = point.cells
        table.add_row(name, quality, ", ".join(speeds), megabytes)
    console.print(table)
    if not document["students"]:
        console.say("the teacher in int8 is fast enough; --go-on makes a student all the same")
    for student in document["students"]:
        console.say(f"{student['wish']}: {student['chosen']['text']}")
        print_remarks(*student["missed"])
