"""``shd conformance``: the judge, whose options it reads itself; ``shd_ref.cli`` runs it without this package too."""

from __future__ import annotations

import typer


def conformance(context: typer.Context) -> None:
    """Judge an implementation of the specification, in any language.

    shd conformance --impl my_package.adapter

    shd conformance --program "node adapter.js" --dtype float32

    Exit code 0: it conforms; 1: something failed; 2: nothing could be judged.
    """
    from shd_ref.conformance.__main__ import main

    raise typer.Exit(main(context.args, context.command_path))
