"""JSON lines: one object a line; lists of numbers become arrays, strings stay text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shd_ref.cache.storage.strict_json import MAX_JSON_BYTES, parse_json
from shd_ref.errors import ShdError
from shd_ref.teacher.sources.source import Row, Source


class JsonLinesSource(Source):
    """A file of JSON lines; blank lines are passed over.

    Raises:
        ShdError: ``inputs-invalid`` naming the line.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        try:
            first = next(self._objects(), None)
        except OSError as error:
            raise ShdError("inputs-invalid", f"inputs {path} must be a readable file: {error}") from error
        if first is None:
            raise self.refuse("must hold at least 1 sample")
        self.columns = tuple(first)

    def __len__(self) -> int:
        return self._count

    @functools.cached_property
    def _count(self) -> int:
        with self._path.open("rb") as file:
            lines = iter(functools.partial(file.readline, MAX_JSON_BYTES + 1), b"")
            return sum(1 for line in lines if line.strip())

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """All rows in order, with these columns."""
        for index, members in enumerate(self._objects()):
            absent = [name for name in columns if name not in members]
            if absent:
                raise self.refuse(f"must hold {', '.join(absent)}; got {', '.join(members) or 'nothing'}", index)
            yield {name: self._value_of(members[name], name, index) for name in columns}

    def _objects(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_JSON_BYTES + 1)
                if not line:
                    return
                if not line.strip():
                    continue
                try:
                    members = parse_json(line)
                except ValueError as error:
                    rule = "JSON in UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
                    raise self.refuse(f"line {number} must be {rule}: {error}") from error
                if not isinstance(members, dict):
                    raise self.refuse(f"line {number} must be a JSON object; got {str(members)[:80]}")
                yield members

    def _value_of(self, value: Any, name: str, index: int) -> Any:
        if isinstance(value, str):
            return value
        try:
            array = np.asarray(value)
        except ValueError as error:  # lists of different lengths
            raise self.refuse(f"{name} must be numbers, even lists of numbers, or text: {error}", index) from error
        if array.dtype.kind not in "iufb":
            raise self.refuse(f"{name} must be numbers, even lists of numbers, or text; got {str(value)[:80]}", index)
        return array
