"""The ``shd`` command: inspect a teacher, choose how to squeeze it, precompute, verify and report its cache."""

from __future__ import annotations

import sys
from typing import Any


def load_app() -> Any:
    """The command with all its subcommands."""
    from shd_ref.commands.app import make_program

    return make_program()


def main() -> None:
    """Entry point; says what to install where the command's own packages are missing."""
    if sys.argv[1:2] == ["conformance"]:  # the judge needs NumPy alone
        from shd_ref.conformance.__main__ import main as judge

        sys.exit(judge(sys.argv[2:], "shd conformance"))
    try:
        import cyclopts  # noqa: F401  (only its presence matters here)
        import rich  # noqa: F401
    except ImportError as error:
        sys.exit(f"shd needs the package {error.name}: pip install '.[teacher]' (in a checkout)")
    sys.exit(load_app()())
