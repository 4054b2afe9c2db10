"""The ``shd-torch`` command: export a teacher, shrink one to a student, compress it."""

from __future__ import annotations

import sys
from typing import Any


def load_app() -> Any:
    """The command with all its subcommands."""
    from shd_torch.commands import make_program

    return make_program()


def main() -> None:
    """Entry point; says what to install where the command's own packages are missing."""
    try:
        import cyclopts  # noqa: F401  (only its presence matters here)
        import rich  # noqa: F401
    except ImportError as error:
        remedy = "pip install '.[cpu]' (in a checkout; '.[all]' for a GPU)"
        sys.exit(f"shd-torch needs the package {error.name}: {remedy}")
    sys.exit(load_app()())
