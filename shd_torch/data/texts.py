"""Texts of a file as samples, read and tokenised as the teacher saw them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shd_ref.errors import ShdError
from shd_ref.teacher.sources import open_source


def read_texts(
    path: str | Path,
    tokenizer: Callable[..., Mapping[str, Any]],
    *,
    text_column: str = "text",
    max_length: int | None = None,
) -> list[dict[str, Any]]:
    """The samples of a file that ``shd precompute --inputs`` reads, tokenised, for a ``SupervisedDataset``.

    Args:
        path: JSON lines, Parquet or Arrow with a text column, or a folder of such files.
        tokenizer: a Hugging Face tokenizer, from the folder given to ``--tokenizer``.
        text_column: as ``--text-column``.
        max_length: as ``--max-length``; by default the tokenizer's ``model_max_length``.

    Returns:
        For each text the tokenizer's result: ``input_ids`` and ``attention_mask``, not padded.

    Raises:
        ShdError: ``inputs-invalid`` for a file that cannot be read, without the column, or with anything but text in
            it; ``dependency-missing`` naming the extra that brings its reader.

    Source: silent. Specification: silent.
    """
    source = open_source(path)
    if text_column not in source.columns:
        rule = f"text_column must be one of {', '.join(source.columns)}, the columns of {path}"
        raise ShdError("inputs-invalid", f"{rule}; got {text_column!r}")
    samples = []
    for number, row in enumerate(source.rows([text_column])):
        text = row[text_column]
        if not isinstance(text, str):
            raise source.refuse(f"{text_column} must be text; got {type(text).__name__}", number)
        samples.append(dict(tokenizer(text, truncation=True, max_length=max_length)))
    return samples
