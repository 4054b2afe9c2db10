"""``shd import-hidden``: a cache from hidden states that a server wrote."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from shd_ref.cache import VECTOR_CODECS
from shd_ref.commands.derive import Document
from shd_ref.commands.options import InputOptions, refuse_nothing
from shd_ref.commands.terminal import console, print_remarks, show_progress
from shd_ref.errors import ShdError
from shd_ref.teacher.options import Shown

PLACES: Final = ("before-norm", "after-norm")


def import_hidden(
    folder: Annotated[
        Path, typer.Argument(help="A server's files: .safetensors with token_ids, hidden_states.", metavar="FOLDER")
    ],
    inputs: InputOptions,
    teacher: Annotated[Path, Shown("The teacher's Hugging Face folder, for its head and final norm.")],
    out: Annotated[
        str,
        typer.Option(
            help="The cache: a folder or an address (s3://...). Use the same one again to resume.",
            metavar="CACHE",
            callback=refuse_nothing,
        ),
    ],
    layer: Annotated[int, Shown("Which of a file's layers is the teacher's last; -1 for the last in the file.")] = -1,
    states: Annotated[
        str, Shown("Where states stand: before the final norm (vLLM), or after it.", choices=PLACES)
    ] = "before-norm",
    codec: Annotated[str, Shown("Codec of the states: float16, int8 or float32.", choices=VECTOR_CODECS)] = "float16",
) -> Document:
    """Make a cache of exact targets from files of vLLM's connector or speculators.

    shd import-hidden states/ --inputs train.jsonl --tokenizer teacher --teacher teacher --out cache

    Files are joined with the texts by the hash of their tokens. A file that is damaged, of other tokens, of another
    width, not finite, or whose states do not fit its tokens is refused by name.
    """
    from shd_ref.teacher.precompute.imported import import_hidden as import_files

    if inputs.tokenizer is None:
        raise ShdError("argument-value", "--tokenizer must be given, the teacher's; got none")
    source = inputs.open()
    options: dict[str, Any] = {"layer": layer, "before_norm": states == "before-norm", "codec": codec}
    with show_progress("files") as (on_progress,):
        manifest, remark = import_files(folder, source, teacher, out, on_progress=on_progress, **options)
    print_remarks(source.remark, remark)
    for form in manifest.forms:
        for name, text in form.describe():
            console.print(f"{name}: {text}", highlight=False)
    following = shlex.join(["shd", "verify", out])
    console.say(f"next: {following}")
    return {"cache": out, "samples": manifest.dataset.num_samples, "id": manifest.id, "next": [following]}
