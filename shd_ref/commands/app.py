"""The application ``shd``: its commands, in the order of use."""

from __future__ import annotations

from typing import Any

import typer

from shd_ref.commands.caches import ls, merge, report, seal, verify
from shd_ref.commands.conformance import conformance
from shd_ref.commands.derive import add_command
from shd_ref.commands.graphs import inspect
from shd_ref.commands.options import ShowVersion
from shd_ref.commands.plan import plan
from shd_ref.commands.precompute import precompute
from shd_ref.commands.terminal import STARTS_OVER, ShownCommand, ShownGroup

app = typer.Typer(
    name="shd", cls=ShownGroup, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False
)


@app.callback()
def root(version: ShowVersion = False) -> None:
    """Squeeze a transformer teacher's attention into fewer heads, offline, and cache it.

    shd inspect teacher.onnx

    shd precompute teacher.onnx --inputs data.npz --student-heads 4 --out cache/

    shd verify cache/
    """


_PANELS: dict[str, tuple[Any, ...]] = {
    "Look before you spend": (inspect, plan),
    "Make a cache": (precompute, verify, report),
    "Caches as files": (ls, seal, merge),
}
_SHARDS = "the same command resumes: the finished shards are kept in --out"
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        is_quick = _command in (inspect, ls, seal)
        after = _SHARDS if _command in (precompute, merge) else STARTS_OVER
        add_command(app, _command, panel=_panel, is_long=not is_quick, after=after)


# It reads its own options, which no import of the judge shall delay the other commands for.
app.command(
    "conformance",
    cls=ShownCommand,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    rich_help_panel="Implementations",
)(conformance)
