"""``shd conformance``: the judge's own options, read and shown as those of the other commands."""

from __future__ import annotations

import argparse
import inspect
from typing import Annotated, Any, NoReturn

import typer

from shd_ref.commands.derive import keyword, quiet_flag
from shd_ref.commands.terminal import ShownCommand, quiet_progress, show_progress


class _Parser(argparse.ArgumentParser):
    """The judge's parser, whose refusals look like those of the other commands."""

    def error(self, message: str) -> NoReturn:
        raise typer.BadParameter(message)


def conformance(context: typer.Context) -> None:
    """Judge an implementation of the specification, in any language.

    shd conformance --impl my_package.adapter

    shd conformance --program "node adapter.js" --dtype float32

    Exit code 0: it conforms; 1: something failed; 2: nothing could be judged.
    """
    from shd_ref.conformance.__main__ import main, make_parser

    actions = [action for action in make_parser(context.command_path)._actions if action.dest != "help"]

    def judge(quiet: bool, **given: Any) -> None:
        words = [word for action in actions if action.option_strings for word in _words(action, given[action.dest])]
        words += ["--", *(given["arguments"] or [])]
        with quiet_progress(quiet), show_progress("items are judged") as (on_progress,):
            on_progress(0, 0)
            status = main(words, context.command_path, parser=_Parser)
        raise typer.Exit(status)

    judge.__doc__ = conformance.__doc__
    parameters = [*map(_parameter, actions), quiet_flag()]
    judge.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False)
    app.command(cls=ShownCommand)(judge)
    typer.main.get_command(app).main(context.args, prog_name=context.command_path)


def _parameter(action: argparse.Action) -> inspect.Parameter:
    """An option or argument of the judge as typer takes it; what it may be the judge decides."""
    metavar = "|".join(action.choices) if action.choices else str(action.metavar)
    text = f"{action.help}."[0].upper() + f"{action.help}."[1:]
    if not action.option_strings:
        return keyword(action.dest, Annotated[list[str] | None, typer.Argument(help=text, metavar=metavar)], None)
    if action.nargs == 0:
        return keyword(action.dest, Annotated[bool, typer.Option(*action.option_strings, help=text)], False)
    option = typer.Option(*action.option_strings, help=text, metavar=metavar)
    kind: Any = list[str] if isinstance(action, argparse._AppendAction) else str
    return keyword(action.dest, Annotated[kind | None, option], None)


def _words(action: argparse.Action, value: Any) -> list[str]:
    """An option as it was typed."""
    (option,) = action.option_strings
    if isinstance(value, bool):
        return [option] * value
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [f"{option}={one}" for one in values]
