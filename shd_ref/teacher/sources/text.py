"""Text made model inputs by a tokenizer of the ``tokenizers`` library."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from shd_ref.errors import ShdError
from shd_ref.teacher.sources.packages import import_package
from shd_ref.teacher.sources.source import Row, Source

TOKEN_COLUMNS: Final = ("input_ids", "attention_mask", "token_type_ids")
"""What a tokenizer adds to a row."""

CONFIG_NAME: Final = "tokenizer_config.json"
"""Beside ``tokenizer.json`` in a folder: what the model takes."""

_MOST_BYTES: Final = 2**26  # of such settings
_UNLIMITED: Final = 10**18  # transformers writes 1e30 where no length is known
_BLOCK_ROWS: Final = 256  # texts that are encoded together


class TokenizedSource(Source):
    """Another source with its text column tokenised; nothing is padded.

    Args:
        rows: the source that holds the text.
        tokenizer: a ``tokenizer.json``, or a folder that holds one.
        text_column: which column.
        max_length: tokens to keep of a text; default: as the tokenizer's file says, and of a folder no more than the
            ``model_max_length`` of its ``tokenizer_config.json``.

    Attributes:
        max_length: tokens that are kept of a text; None for all.
        truncated: texts that were cut in the last pass over the rows.

    Raises:
        ShdError: ``inputs-invalid``, ``argument-value``, ``dependency-missing``.
    """

    def __init__(
        self, rows: Source, tokenizer: Path, text_column: str = "text", max_length: int | None = None
    ) -> None:
        self.name = rows.name
        self._rows = rows
        self._text_column = text_column
        if text_column not in rows.columns:
            raise ShdError(
                "inputs-invalid",
                f"text_column must be one of {', '.join(rows.columns)}, the columns of {rows.name}; got "
                f"{text_column!r}: name the one that holds text, or give no tokenizer where none does",
            )
        self.columns = (*TOKEN_COLUMNS, *(name for name in rows.columns if name not in TOKEN_COLUMNS))
        self._tokenizer, self.max_length = _load_tokenizer(tokenizer, max_length)
        self._limited_by = tokenizer if max_length is None else "max_length"
        self.truncated = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def remark(self) -> str | None:
        """How many texts were cut."""
        if not self.truncated:
            return None
        return (
            f"{self.truncated} of {len(self)} texts were cut to {self.max_length} tokens, as {self._limited_by} says "
            "(--max-length sets another number)"
        )

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """All rows in order, with these columns."""
        self.truncated = 0
        others = [name for name in columns if name not in TOKEN_COLUMNS]
        wanted = list(dict.fromkeys([self._text_column, *others]))
        for start, block in _blocks(self._rows.rows(wanted), _BLOCK_ROWS):
            texts = [row[self._text_column] for row in block]
            for place, text in enumerate(texts):
                if not isinstance(text, str):
                    raise self.refuse(f"{self._text_column} must be text; got {type(text).__name__}", start + place)
            encodings = self._encode(texts, start)
            for place, (row, encoding) in enumerate(zip(block, encodings, strict=True)):
                self.truncated += bool(encoding.overflowing)
                if not encoding.ids:
                    raise self.refuse("the text must give at least one token; got none", start + place)
                tokens = (encoding.ids, encoding.attention_mask, encoding.type_ids)
                made = {
                    name: np.asarray(values, dtype=np.int64)
                    for name, values in zip(TOKEN_COLUMNS, tokens, strict=True)
                }
                yield {name: made[name] if name in made else row[name] for name in columns}

    def _encode(self, texts: list[str], start: int) -> list[Any]:
        try:
            return list(self._tokenizer.encode_batch(texts))
        except Exception as error:  # the library raises what it likes
            for place, text in enumerate(texts):
                try:
                    text.encode()
                except UnicodeEncodeError as wrong:
                    raise self.refuse(f"{self._text_column} must be text: {wrong}", start + place) from error
            raise self.refuse(f"the texts must be what the tokenizer can read: {error}", start) from error


def _load_tokenizer(path: Path, max_length: int | None) -> tuple[Any, int | None]:
    """The tokenizer, and how many tokens it keeps of a text; None for all."""
    library = import_package("tokenizers")
    try:
        is_folder = path.is_dir()
        tokenizer = library.Tokenizer.from_file(str(path / "tokenizer.json" if is_folder else path))
    except Exception as error:  # the library raises Exception itself
        raise ShdError("inputs-invalid", f"tokenizer {path} must be a readable tokenizer.json: {error}") from error
    tokenizer.no_padding()
    own = tokenizer.truncation and tokenizer.truncation["max_length"]
    limits = [own, _model_max_length(path / CONFIG_NAME) if is_folder else None]
    limit = min((each for each in limits if each), default=None) if max_length is None else max_length
    if limit is None:
        return tokenizer, None
    added = tokenizer.num_special_tokens_to_add(False)
    if limit <= added:  # the library would then cut nothing at all
        raise ShdError(
            "argument-value",
            f"max_length must be at least {added + 1}, since this tokenizer adds {added} special tokens to every "
            f"text; got {limit}",
        )
    if limit != own:
        # From the side and by the strategy of the tokenizer's file, where it says them.
        kept = tokenizer.truncation or {}
        tokenizer.enable_truncation(limit, **{name: kept[name] for name in ("strategy", "direction") if name in kept})
    return tokenizer, limit


def _model_max_length(file: Path) -> int | None:
    """How many tokens the model takes, by the tokenizer's settings; None where they say none."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ShdError("inputs-invalid", f"{file} must be a readable file: {error}") from error
    try:
        found = json.loads(data).get("model_max_length") if len(data) <= _MOST_BYTES else None
    except (ValueError, AttributeError, RecursionError) as error:
        raise ShdError("inputs-invalid", f"{file} must hold a JSON object: {error}") from error
    if found is None or (isinstance(found, int | float) and found >= _UNLIMITED):
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ShdError(
            "inputs-invalid",
            f"model_max_length of {file} must be an integer from 1; got {str(found)[:80]}: correct it, or give the "
            "tokenizer.json itself",
        )
    return found


def _blocks(rows: Iterator[Row], size: int) -> Iterator[tuple[int, list[Row]]]:
    for start in itertools.count(0, size):
        block = list(itertools.islice(rows, size))
        if not block:
            return
        yield start, block
