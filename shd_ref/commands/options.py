"""Arguments and options that several subcommands of ``shd`` share, and options as words to paste."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

import shd_ref
from shd_ref.commands.derive import LAST_WORD, option_of, shown_of
from shd_ref.commands.terminal import console
from shd_ref.errors import ShdError
from shd_ref.teacher.options import LAST, NO_FORM, READING, RUNNING, STORING, PrecomputeOptions, Shown
from shd_ref.teacher.sources import Source


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"squeezing-heads {shd_ref.__version__}, specification {shd_ref.SPEC_VERSION}")
        raise typer.Exit


def refuse_nothing(value: Any) -> Any:
    """A callback of options: an empty place would mean the current folder."""
    if value == "" or (isinstance(value, list) and "" in value):
        raise typer.BadParameter("must be a folder or an address; got nothing")
    return value


CacheArgument = Annotated[
    str,
    typer.Argument(
        help="The cache: a folder, or an address such as s3://bucket/cache.", metavar="CACHE", callback=refuse_nothing
    ),
]
TeacherPath = Annotated[Path, typer.Argument(help="The teacher as an ONNX graph.", metavar="TEACHER.onnx")]
StudentHeads = Annotated[
    tuple[int, ...] | None, Shown("Heads of the student, at most the teacher's; several as 4,6.")
]
NoAttention = Annotated[
    bool,
    typer.Option(
        "--no-attention",
        help="Store only logits, hidden states or embeddings; works without attention in the graph and without "
        "--student-heads.",
        rich_help_panel=STORING,
    ),
]
ShowVersion = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and exit.")
]
CheckProvider = Annotated[
    str, Shown("cpu, cuda, or an onnxruntime provider; no fallback to another.", RUNNING, needs="teacher")
]


@dataclass(frozen=True)
class InputOptions:
    """Where the inputs of a teacher come from, and how texts are read."""

    inputs: Annotated[
        Path,
        Shown(
            "Model inputs, one column per graph input: .npz, .safetensors, .parquet, .arrow, .jsonl, or a folder of "
            "Parquet or Arrow files."
        ),
    ]
    tokenizer: Annotated[
        Path | None,
        Shown(
            "For text: tokenizer.json, or its folder; tokenizer_config.json there limits the length "
            "(model_max_length).",
            READING,
        ),
    ] = None
    text_column: Annotated[str | None, Shown("For text: name of its column. Default: text.", READING)] = None
    max_length: Annotated[
        int | None, Shown("For text: maximum number of tokens. Default: the tokenizer's limit.", READING, least=1)
    ] = None

    def open(self) -> Source:
        """The rows, by ``open_source``."""
        from shd_ref.teacher.sources import open_source

        return open_source(
            self.inputs, tokenizer=self.tokenizer, text_column=self.text_column, max_length=self.max_length
        )


def heads_of(
    student_heads: tuple[int, ...] | None, options: partial[PrecomputeOptions], *, no_attention: bool
) -> tuple[tuple[int, ...], partial[PrecomputeOptions]]:
    """The numbers of heads, one at least, and the options; without attention the one number 0: ``argument-value``."""
    if not no_attention:
        if student_heads is None:
            when = "unless only logits, hidden states or embeddings are stored (--no-attention)"
            raise ShdError("argument-value", f"--student-heads must be given, or --student, {when}")
        return student_heads, options
    if student_heads is not None:
        heads = ",".join(map(str, student_heads))
        raise ShdError("argument-value", f"--student-heads must be left out with --no-attention; got {heads}")
    form = options.keywords.get("form", PrecomputeOptions.form)
    if form != PrecomputeOptions.form:
        raise ShdError("argument-value", f"--form must be left out with --no-attention; got {form}")
    return (0,), partial(options.func, **options.keywords | {"form": NO_FORM})


def check_both(teacher: Path | None, inputs: InputOptions | None) -> None:
    """Refuse one of teacher and inputs without the other, where the teacher is run on request: ``argument-value``."""
    if (teacher is None) != (inputs is None):
        raise ShdError("argument-value", "--teacher and --inputs must be given together; got one of them")


def option_words(*groups: Any, without: Collection[str] = ()) -> list[str]:
    """The options that dataclasses hold: fields that are ``Shown``, not at their default and not ``without``."""
    words: list[str] = []
    for group in groups:
        hints = get_type_hints(type(group), include_extras=True)
        for field in fields(group):
            value = getattr(group, field.name)
            is_given = field.default is MISSING or value != field.default
            if is_given and field.name not in without and shown_of(hints[field.name]) is not None:
                is_repeated = isinstance(value, tuple) and isinstance(value[0], Path)
                for one in value if is_repeated else (value,):
                    words += [option_of(field.name), _write_value(field.name, one)]
    return words


def _write_value(field: str, value: Any) -> str:
    """A value as ``derive`` reads it again."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={number}" for key, number in value.items())
    if field == "hidden":
        return ",".join(LAST_WORD if layer == LAST else str(layer) for layer in value)
    if field == "shards":
        return "/".join(map(str, value))
    if isinstance(value, tuple):
        return ",".join(":".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in value)
    return str(value)
