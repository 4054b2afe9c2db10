"""Arguments and options that several subcommands of ``shd`` share, and options as words to paste."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_type_hints

from cyclopts import Parameter

from shd_ref.commands.program import option_of
from shd_ref.errors import ShdError, need
from shd_ref.teacher.options import (
    BY_CHARACTERS,
    FROM_1,
    INTEGERS,
    NO_FORM,
    OPTIONS,
    READING,
    RUNNING,
    STORING,
    UNASKED,
    Needs,
    PrecomputeOptions,
    write_value,
)
from shd_ref.teacher.sources import Source


def _refuse_empty(_: Any, value: Any) -> None:
    if value == "" or (isinstance(value, list) and "" in value):
        raise ValueError("Must be a folder or an address.")  # an empty place would mean the current folder


PLACE = Parameter(validator=_refuse_empty, metavar="CACHE")
CacheArgument = Annotated[str, PLACE, Parameter(help="The cache: a folder, or an address such as s3://bucket/cache.")]
TeacherPath = Annotated[Path, Parameter(help="The teacher as an ONNX graph.")]
StudentHeads = Annotated[
    tuple[int, ...] | None, INTEGERS, Parameter(help="Heads of the student, at most the teacher's; several as 4,6.")
]
NoAttention = Annotated[
    bool,
    STORING,
    Parameter(
        help="Store only logits, hidden states or embeddings; works without attention in the graph and without "
        "--student-heads."
    ),
]
CheckProvider = Annotated[
    str, RUNNING, Parameter(help="cpu, cuda, or an onnxruntime provider; no fallback to another."), Needs("teacher")
]


@OPTIONS
@dataclass(frozen=True)
class InputOptions:
    """Where the inputs of a teacher come from, and how texts are read.

    Attributes:
        inputs: Model inputs, one column per graph input: .npz, .parquet, .arrow, .jsonl, or a folder of Parquet or
            Arrow files.
        tokenizer: For text: tokenizer.json, or its folder; tokenizer_config.json there limits the length
            (model_max_length).
        text_column: For text: name of its column. Default: text.
        pair_column: For pairs of texts: name of the second one's column.
        max_length: For text: maximum number of tokens. Default: the tokenizer's limit.
        student_tokenizer: For a student with another tokenizer: its tokenizer.json, or its folder. Maps are pooled
            over its tokens, by characters in common.
    """

    inputs: Path
    tokenizer: Annotated[Path | None, READING, Needs("inputs")] = None
    text_column: Annotated[str | None, READING, Needs("inputs")] = None
    pair_column: Annotated[str | None, READING, Needs("inputs")] = None
    max_length: Annotated[int | None, READING, FROM_1, Needs("inputs")] = None
    student_tokenizer: Annotated[Path | None, READING, Needs("tokenizer")] = None

    def absolute(self) -> InputOptions:
        """The same with absolute paths, for a process with another working folder."""
        tokenizer = self.tokenizer and self.tokenizer.absolute()
        student = self.student_tokenizer and self.student_tokenizer.absolute()
        return replace(self, inputs=self.inputs.absolute(), tokenizer=tokenizer, student_tokenizer=student)

    def open(self) -> Source:
        """The rows, by ``open_source``."""
        from shd_ref.teacher.sources import open_source

        columns = {"text_column": self.text_column, "pair_column": self.pair_column}
        student, length = self.student_tokenizer, self.max_length
        return open_source(
            self.inputs, tokenizer=self.tokenizer, max_length=length, student_tokenizer=student, **columns
        )

    def pool(self, options: PrecomputeOptions) -> PrecomputeOptions:
        """The options, with groups by characters where a student's tokenizer is given."""
        if self.student_tokenizer is None or options.groups is not None or not options.has_attention:
            return options
        return replace(options, groups=BY_CHARACTERS)


HEADS: Final = "num_student_heads"
"""The one field that commands set themselves, once for each of several numbers."""


def heads_of(
    student_heads: tuple[int, ...] | None, options: PrecomputeOptions, *, no_attention: bool, or_student: bool = False
) -> tuple[tuple[int, ...], PrecomputeOptions]:
    """The numbers of heads, one at least, and the options; without attention 0 alone. Raises ``argument-value``."""
    if not no_attention:
        if student_heads is None:
            condition = "unless only logits, hidden states or embeddings are stored (--no-attention)"
            alternative = ", or --student," if or_student else ""
            raise ShdError("argument-value", f"--student-heads must be given{alternative} {condition}")
        return student_heads, options
    heads = None if student_heads is None else ",".join(map(str, student_heads))
    need(heads is None, "argument-value", "--student-heads", "be left out with --no-attention", heads)
    is_usual = options.form == PrecomputeOptions.form
    need(is_usual, "argument-value", "--form", "be left out with --no-attention", options.form)
    return (0,), replace(options, form=NO_FORM)


def check_both(teacher: Path | None, inputs: InputOptions | None) -> None:
    """Refuse a teacher without inputs and inputs without a teacher, for a command that can run without both."""
    is_both = (teacher is None) == (inputs is None)
    need(is_both, "argument-value", "--teacher and --inputs", "be given together", "one of them")


def option_words(*groups: Any, without: Collection[str] = ()) -> list[str]:
    """The options of dataclasses as words to paste: fields that differ from their default, less ``without``."""
    words: list[str] = []
    for group in groups:
        hints = get_type_hints(type(group), include_extras=True)
        for field in fields(group):
            value = getattr(group, field.name)
            notes = get_args(hints[field.name])[1:]
            is_changed = field.default is MISSING or value != field.default
            if is_changed and field.name not in without and (UNASKED not in notes or field.name == HEADS):
                # A field that names its option, as --with-teacher, holds several values: the option is repeated.
                name = next((str(note.name[0]) for note in notes if isinstance(note, Parameter) and note.name), None)  # type: ignore[index]
                for item in value if name else (value,):
                    words += [name or option_of(field.name), write_value(field.name, item)]
    return words
