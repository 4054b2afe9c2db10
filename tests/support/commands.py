"""``shd`` as a terminal runs it."""

from __future__ import annotations

from typer.testing import CliRunner

from shd_ref.cli import load_app


def shd(*words: object, code: int = 0) -> str:
    """What a command prints; its exit code is asserted, and anything but an exit is raised as it is."""
    result = CliRunner().invoke(load_app(), [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output
