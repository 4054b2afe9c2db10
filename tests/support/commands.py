"""``shd`` and ``shd-torch`` as a terminal runs them."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple
from unittest import mock

from shd_ref.cli import load_app


class Result(NamedTuple):
    exit_code: int
    output: str  # of both streams
    stdout: str


class _Both(io.StringIO):
    def __init__(self, other: io.StringIO) -> None:
        super().__init__()
        self._other = other

    def write(self, text: str) -> int:
        self._other.write(text)
        return super().write(text)


def invoke(program: Any, words: list[Any] | tuple[Any, ...], columns: int = 200) -> Result:
    """What a program of commands prints; anything but an exit is raised as it is."""
    said = io.StringIO()
    out = _Both(said)
    terminal = {"COLUMNS": str(columns), "TERM": "dumb"}
    with redirect_stdout(out), redirect_stderr(said), mock.patch.dict(os.environ, terminal):
        try:
            code = program([str(word) for word in words])
        except SystemExit as end:  # of the judge, which reads its own words
            code = end.code
    return Result(code, said.getvalue(), out.getvalue())


def shd(*words: object, code: int = 0, columns: int = 80) -> str:
    """What a command of ``shd`` prints; its exit code is asserted."""
    result = invoke(load_app(), words, columns)
    assert result.exit_code == code, result.output
    return result.output
