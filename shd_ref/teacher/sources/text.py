"""Text made model inputs by a tokenizer of the ``tokenizers`` library."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from shd_ref.errors import ShdError
from shd_ref.teacher.sources.packages import import_package
from shd_ref.teacher.sources.source import Row, Source

TOKEN_COLUMNS: Final = ("input_ids", "attention_mask", "token_type_ids")
"""What a tokenizer adds to a row."""

_BLOCK_ROWS: Final = 256  # texts that are encoded together


class TokenizedSource(Source):
    """Another source with its text column tokenised; nothing is padded.

    Args:
        rows: the source that holds the text.
        tokenizer: a ``tokenizer.json``, or a folder that holds one.
        text_column: which column.
        max_length: tokens to keep of a text; default: as the tokenizer's file says.

    Raises:
        ShdError: ``inputs-invalid``, ``dependency-missing``.
    """

    def __init__(
        self, rows: Source, tokenizer: Path, text_column: str = "text", max_length: int | None = None
    ) -> None:
        self.name = rows.name
        self._rows = rows
        self._text_column = text_column
        if text_column not in rows.columns:
            raise self.refuse(f"text column must be one of {', '.join(rows.columns)}; got {text_column!r}")
        self.columns = (*TOKEN_COLUMNS, *(name for name in rows.columns if name not in TOKEN_COLUMNS))
        self._tokenizer = _load_tokenizer(tokenizer, max_length)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """All rows in order, with these columns."""
        others = [name for name in columns if name not in TOKEN_COLUMNS]
        wanted = list(dict.fromkeys([self._text_column, *others]))
        for start, block in _blocks(self._rows.rows(wanted), _BLOCK_ROWS):
            texts = [row[self._text_column] for row in block]
            for place, text in enumerate(texts):
                if not isinstance(text, str):
                    raise self.refuse(f"{self._text_column} must be text; got {type(text).__name__}", start + place)
            for place, (row, encoding) in enumerate(zip(block, self._tokenizer.encode_batch(texts), strict=True)):
                if not encoding.ids:
                    raise self.refuse("the text must give at least one token; got none", start + place)
                tokens = (encoding.ids, encoding.attention_mask, encoding.type_ids)
                made = {
                    name: np.asarray(values, dtype=np.int64)
                    for name, values in zip(TOKEN_COLUMNS, tokens, strict=True)
                }
                yield {name: made[name] if name in made else row[name] for name in columns}


def _load_tokenizer(path: Path, max_length: int | None) -> Any:
    library = import_package("tokenizers")
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise ShdError("inputs-invalid", f"tokenizer {file} must be a readable tokenizer.json: {error}") from error
    tokenizer.no_padding()
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    return tokenizer


def _blocks(rows: Iterator[Row], size: int) -> Iterator[tuple[int, list[Row]]]:
    for start in itertools.count(0, size):
        block = list(itertools.islice(rows, size))
        if not block:
            return
        yield start, block
