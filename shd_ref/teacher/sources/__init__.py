"""Where model inputs come from: files of several kinds, read row by row, so that memory stays flat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from shd_ref.errors import argument_value, inputs_invalid
from shd_ref.teacher.sources.files import (
    Arrays,
    ArraySource,
    ArrowSource,
    IndexedSource,
    JsonLinesSource,
    ParquetSource,
    Row,
    Source,
    named_inputs,
    open_folder,
    open_npz,
)
from shd_ref.teacher.sources.text import TokenizedSource

__all__ = ["KINDS", "ArraySource", "Arrays", "IndexedSource", "Row", "Source", "named_inputs", "open_source"]

KINDS: Final[dict[str, Callable[[Path], Source]]] = {
    ".npz": open_npz,
    ".parquet": lambda path: ParquetSource([path], str(path)),
    ".arrow": lambda path: ArrowSource([path], str(path)),
    ".jsonl": JsonLinesSource,
    ".ndjson": JsonLinesSource,
}
"""Readers by the file name's suffix; folders are data sets of Arrow or Parquet files."""


TOO_LONG: Final = (
    "it must have at most {most} positions, the model's limit; got {got}: cut texts with --max-length {most}"
)
"""Of a sample that is named before."""

_TEXTS: Final = (".txt", ".csv", ".tsv", ".json")
"""Suffixes of files in which people have texts, and which have no one way to be read."""


def open_source(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    text_column: str | None = None,
    pair_column: str | None = None,
    max_length: int | None = None,
    student_tokenizer: str | Path | None = None,
) -> Source:
    """Open model inputs.

    Args:
        path: a file with a suffix of ``KINDS``, or a folder: what ``save_to_disk`` wrote, or Parquet or Arrow files.
        tokenizer: ``tokenizer.json`` or its folder, where the inputs are text.
        text_column: which column holds the text; default ``text``. Only with a tokenizer.
        pair_column: which column holds the second text of each pair, as cross encoders read them; default: none.
        max_length: tokens to keep of a text; default: as the tokenizer's file says. Only with a tokenizer.
        student_tokenizer: of a student with another tokenizer: rows then have the column ``token_groups`` ``(L, l)``,
            the characters in common of each token with each of the student's. Only with a tokenizer.

    Raises:
        ShdError: ``argument-value``; ``inputs-invalid`` for a file that is absent, unreadable or of no known kind;
            ``dependency-missing`` naming the extra that brings its reader.
    """
    file = Path(path)
    others = {"text_column": text_column, "pair_column": pair_column, "max_length": max_length}
    for name, value in (others | {"student_tokenizer": student_tokenizer}).items():
        if tokenizer is None and value is not None:
            raise argument_value(f"{name} must be given with a tokenizer alone; got {value!r} without one")
    try:
        is_folder, exists = file.is_dir(), file.exists()
    except (OSError, ValueError) as error:  # a name too long, or one with NUL
        raise inputs_invalid(f"inputs must be a path; got {str(path)[:80]!r}: {error}") from error
    if is_folder:
        source = open_folder(file)
    elif file.suffix not in KINDS or not exists:
        rule = "must exist" if file.suffix in KINDS else f"must be a folder or end in one of {', '.join(KINDS)}"
        advice = ': write a line {"text": ...} for each text into a .jsonl' if file.suffix in _TEXTS else ""
        raise inputs_invalid(f"inputs {rule}; got {path}{advice}")
    else:
        source = KINDS[file.suffix](file)
    if tokenizer is None:
        return source
    student = None if student_tokenizer is None else Path(student_tokenizer)
    return TokenizedSource(source, Path(tokenizer), text_column or "text", max_length, pair_column, student)
