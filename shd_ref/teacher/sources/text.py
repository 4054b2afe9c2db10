"""Text made model inputs by a tokenizer of the ``tokenizers`` library."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.storage.documents import read_json
from shd_ref.errors import argument_value, inputs_invalid
from shd_ref.teacher.sentence_folder import TextSettings, read_texts
from shd_ref.teacher.sources.files import Row, Source, import_package
from shd_ref.tokens import span_groups

TOKEN_COLUMNS: Final = ("input_ids", "attention_mask", "token_type_ids")
"""Columns that a tokenizer adds to a row."""

GROUPS_COLUMN: Final = "token_groups"
"""The column that a student's tokenizer adds: characters that the teacher's tokens and the student's share."""

CONFIG_NAME: Final = "tokenizer_config.json"
"""Next to ``tokenizer.json`` in a folder: the settings of the model."""

SECONDS: Final = 20.0
"""Time that the tokenizer may take for its file, and for each 2^20 characters of text that are encoded together."""

_SAVING: Final = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
_HOW_TO_SAVE: Final = f"the folder has none; {_SAVING} writes it"
_HOW_TO_GET: Final = "there is none; hf download NAME tokenizer.json --local-dir FOLDER brings that of a hub's model"
_HOW_TO_AGREE: Final = f"{_SAVING} makes them agree; or give the tokenizer.json itself"
_LIBRARY_SECONDS: Final = 300.0  # to import transformers, also on a busy machine
_MEMORY: Final = 2**31  # bytes that it may take
_UNLIMITED: Final = 10**18  # transformers writes 1e30 where no length is known
_BLOCK_ROWS: Final = 256  # texts that are encoded together,
_BLOCK_CHARACTERS: Final = 2**20  # or fewer, where they are as long


class TokenizedSource(Source):
    """Another source with its text tokenised to ``max_length`` (None: all) and not padded; ``truncated`` were cut.

    With ``pair_column`` a row is a pair of texts, the longer of which is cut, as transformers does it. With a
    ``student_tokenizer`` each row has weights ``(L, l)`` too, see ``span_groups``.
    """

    def __init__(
        self,
        rows: Source,
        tokenizer: Path,
        text_column: str = "text",
        max_length: int | None = None,
        pair_column: str | None = None,
        student_tokenizer: Path | None = None,
    ) -> None:
        self.name = rows.name
        self._rows = rows
        self.made_from = (text_column, *([] if pair_column is None else [pair_column]))
        for argument, column in zip(("text_column", "pair_column"), self.made_from, strict=False):
            if column not in rows.columns:
                raise inputs_invalid(
                    f"{argument} must be one of {', '.join(rows.columns)}, the columns of {rows.name}; got "
                    f"{column!r}: name the one that holds text, or give no tokenizer where none does"
                )
        has_pairs, self._student = pair_column is not None, None
        self._made: tuple[str, ...] = TOKEN_COLUMNS
        if student_tokenizer is not None:
            if has_pairs:
                raise argument_value("student_tokenizer must be left out for pairs of texts; got both")
            self._student = TokenizedSource(rows, student_tokenizer, text_column)
            self._made = (*TOKEN_COLUMNS, GROUPS_COLUMN)
        self.columns = (*self._made, *(name for name in rows.columns if name not in self._made))
        self._tokenizer, self.max_length, self._settings = _load_tokenizer(tokenizer, max_length, pairs=has_pairs)
        self._path, self._is_compared = tokenizer, not tokenizer.is_dir()
        self._limited_by = tokenizer if max_length is None else "max_length"
        self.truncated = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def remark(self) -> str | None:
        if not self.truncated:
            return None
        return (
            f"{self.truncated} of {len(self)} texts were cut to {self.max_length} tokens, as {self._limited_by} says "
            "(--max-length sets another number)"
        )

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        self.truncated = 0
        self._compare()
        with_spans = self._student is not None and GROUPS_COLUMN in columns
        others = [name for name in columns if name not in self._made]
        needed = list(dict.fromkeys([*self.made_from, *others]))
        for start, block in self._blocks(self._rows.rows(needed)):
            texts = [[row[column] for column in self.made_from] for row in block]
            answer = self._encode(texts, start, with_spans=with_spans)
            spans: list[NDArray[np.int64]] = []
            if self._student is not None and with_spans:
                self._student._compare()
                spans = [tokens[3:].T for tokens in self._student._encode(texts, start, with_spans=True)[0]]
            for number, (row, tokens, is_cut) in enumerate(zip(block, *answer, strict=True)):
                self.truncated += is_cut
                if not tokens.size:
                    raise self.refuse("the text must give at least one token; got none", start + number)
                arrays = dict(zip(TOKEN_COLUMNS, tokens[:3], strict=True))
                if spans:
                    arrays[GROUPS_COLUMN] = span_groups(tokens[3:].T, spans[number]).T.astype(np.int64)
                yield {name: arrays[name] if name in arrays else row[name] for name in columns}

    def _blocks(self, rows: Iterator[Row]) -> Iterator[tuple[int, list[Row]]]:
        block: list[Row] = []
        characters = 0
        for index, row in enumerate(rows):
            length = 0
            for column in self.made_from:
                try:
                    length += len(row[column].encode())
                except (AttributeError, UnicodeEncodeError) as error:
                    kind = error if isinstance(error, UnicodeEncodeError) else f"got {type(row[column]).__name__}"
                    raise self.refuse(f"{column} must be text; {kind}", index) from error
            if block and (len(block) == _BLOCK_ROWS or characters + length > _BLOCK_CHARACTERS):
                yield index - len(block), block
                block, characters = [], 0
            block.append(row)
            characters += length
        if block:
            yield index + 1 - len(block), block

    def _encode(
        self, texts: list[list[str]], start: int, *, with_spans: bool
    ) -> tuple[list[NDArray[np.int64]], list[bool]]:
        """Tokens ``(3, L)`` of each text, with spans of characters ``(5, L)``, and whether it was cut."""
        prompt = self._settings.prompt
        texts = [[prompt + first, *second] for first, *second in texts]
        seconds = SECONDS * max(1.0, sum(len(part) for text in texts for part in text) / _BLOCK_CHARACTERS)
        try:
            answer, arrays = self._tokenizer.ask(seconds, texts=texts, with_spans=with_spans)
        except ValueError as error:
            raise self.refuse(f"the texts must be what the tokenizer can read: {error}", start) from error
        if "unlike" in answer:
            ids, expected = answer["ids"]
            rule = f"must give the tokens that AutoTokenizer gives, by all files of {self._path}"
            raise self.refuse(
                f"the text {rule}; tokenizer.json alone gives {ids}, and not {expected}: {_HOW_TO_AGREE}",
                start + answer["unlike"],
            )
        for tokens in arrays if with_spans else ():
            tokens[3:] -= len(prompt)  # which the other side may not have
        return arrays, answer["cut"]

    def _compare(self) -> None:
        """Begin to compare with transformers, which takes a second: not before texts are read."""
        if not self._is_compared:
            settings: dict[str, Any] = {"folder": str(self._path), "limit": self.max_length}
            try:
                self._tokenizer.ask(_LIBRARY_SECONDS, **settings, lower=self._settings.lower)
            except ValueError as error:
                raise inputs_invalid(
                    f"tokenizer {self._path} must agree in all its files; {error}: {_HOW_TO_AGREE}"
                ) from error
        self._is_compared = True


class _Tokenizer:
    """A tokenizer in a separate process (``tokenizing.py``), which begins with the file."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        command = [sys.executable, "-P", str(Path(__file__).with_name("tokenizing.py")), str(_MEMORY)]
        bounds = {"MALLOC_ARENA_MAX": "2", "RAYON_NUM_THREADS": str(min(os.cpu_count() or 1, 8))}  # of address space
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | bounds,
        )
        weakref.finalize(self, _end, self._process)

    def ask(self, seconds: float, **request: Any) -> tuple[dict[str, Any], list[NDArray[np.int64]]]:
        """The answer to a request, and for each of its texts the ids, mask and types, an array (3, tokens).

        With ``with_spans`` (5, tokens): also where each begins and ends in the text.
        """
        rows = 5 if request.get("with_spans") else 3
        process = self._process
        assert process.stdin is not None  # both are pipes
        assert process.stdout is not None
        with self._busy:
            try:
                process.stdin.write(json.dumps(request | {"seconds": seconds}).encode() + b"\n")
                process.stdin.flush()
                answer: dict[str, Any] = json.loads(process.stdout.readline())
            except (OSError, ValueError):
                is_late = process.wait() == -signal.SIGALRM
                rule = f"{seconds:.0f} seconds" if is_late else f"{_MEMORY >> 30} GiB of memory"
                raise ValueError(f"it needs more than {rule}: give another tokenizer, or shorter texts") from None
            if "error" in answer:
                raise ValueError(answer["error"])
            sizes = [rows * count for count in answer.get("counts", ())]
            blobs = [bytearray(process.stdout.read(8 * size)) for size in sizes]
            tokens = [np.frombuffer(raw, np.int64).reshape(rows, -1) for raw in blobs]
        return answer, tokens


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:
        process.kill()


def _load_tokenizer(
    path: Path, max_length: int | None, *, pairs: bool
) -> tuple[_Tokenizer, int | None, TextSettings]:
    """The tokenizer, how many tokens are kept, and what else is done with every text."""
    import_package("tokenizers")
    settings = read_texts(path)
    try:
        is_folder = path.is_dir()
        file = path / "tokenizer.json" if is_folder else path
        if not file.exists():
            raise OSError(_HOW_TO_SAVE if is_folder else _HOW_TO_GET)
        tokenizer = _Tokenizer()
        about, _ = tokenizer.ask(SECONDS, file=str(file), lower=settings.lower, pairs=pairs)
    except (OSError, ValueError) as error:  # a path that no file has
        raise inputs_invalid(f"tokenizer {path} must be a readable tokenizer.json: {error}") from error
    limit = settings.max_length if max_length is None else max_length
    if limit is None and is_folder:
        limits = [_model_max_length(path / CONFIG_NAME), settings.positions]
        limit = min((length for length in limits if length), default=None)
    # The limit in the file is the one its texts were once cut to; transformers ignores it.
    limit = about["own"] if limit is None else limit
    if limit is None:
        return tokenizer, None, settings
    added = about["added"]
    if limit <= added:  # the library would then cut nothing at all
        raise argument_value(
            f"max_length must be at least {added + 1}, since this tokenizer adds {added} special tokens to every "
            f"{'pair' if pairs else 'text'}; got {limit}"
        )
    side = _read_config(path / CONFIG_NAME).get("truncation_side") if is_folder else None
    if limit != about["own"] or side or pairs:
        changes = {"direction": side} if side in ("left", "right") else {}
        tokenizer.ask(SECONDS, limit=limit, changes=changes | ({"strategy": "longest_first"} if pairs else {}))
    return tokenizer, limit, settings


def _read_config(file: Path) -> dict[str, Any]:
    try:
        return {**read_json(file)}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise inputs_invalid(f"{file} must be a readable file: {error}") from error
    except (ValueError, TypeError) as error:
        raise inputs_invalid(f"{file} must hold a JSON object: {error}") from error


def _model_max_length(file: Path) -> int | None:
    length = _read_config(file).get("model_max_length")
    if length is None or (isinstance(length, int | float) and length >= _UNLIMITED):
        return None
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise inputs_invalid(
            f"model_max_length of {file} must be an integer from 1; got {str(length)[:80]}: correct it, or give the "
            "tokenizer.json itself"
        )
    return length
