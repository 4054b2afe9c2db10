"""What commands print with: paths, messages and what files say are shown as they are, never obeyed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from shd_ref.errors import ShdError
from shd_ref.printable import printable


class _PlainFlags:
    """Flags take no value, so that ``--help`` shows none: newer typers print ``<bool>`` after each."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the command beside this class
        for one in params:
            if getattr(one, "is_bool_flag", False) and one.metavar is None:
                one.metavar = ""
        return params


class ShownCommand(_PlainFlags, TyperCommand):
    """A command as typer shows it, with plain flags."""


class ShownGroup(_PlainFlags, TyperGroup):
    """An application as typer shows it, with plain flags."""


class PlainConsole(Console):
    """A console for which a string is a string: no markup, no emoji codes, and unprintable characters escaped.

    Colours are given as ``marked`` text.

    Args:
        stderr: print on the error stream.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of a string, printed, in a table or as its title."""
        return super().render_str(printable(text), **options)

    def say(self, text: str | Text) -> None:
        """A line as it is: no colours for numbers and paths, and no line breaks, so that it can be copied."""
        self.print(text, highlight=False, soft_wrap=True)


console = PlainConsole()
messages = PlainConsole(stderr=True)


def marked(word: str, style: str, rest: str = "") -> Text:
    """A word in a style, and what follows it."""
    return Text.assemble((printable(word), style), printable(rest))


def fact_table(title: str) -> Table:
    """A table of names and what is said of them; long hashes and paths are folded."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    return table


def narrow_table(title: str | None = None, caption: str | None = None) -> Table:
    """A table of many columns that fits a terminal of 80."""
    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )


_ARGUMENT: Final = re.compile(r"^((?:sample \d+ \(key \w+\): )?)((?:inputs|tokenizer)(?= \S+)|\w+(?= must ))")
"""What a message says must be otherwise, where it begins with it, with it and a path, or with the sample that it is
about."""


@contextmanager
def reported_errors(options: Mapping[str, str] | None = None) -> Iterator[None]:
    """A ``ShdError`` becomes one message and exit code 1, Ctrl-C another and 130; all else keeps its traceback.

    Args:
        options: the option behind each argument, which a message names where it says what that argument must be.
    """
    try:
        yield
    except ShdError as error:
        text = _ARGUMENT.sub(lambda found: found[1] + (options or {}).get(found[2], found[2]), str(error))
        messages.say(marked("error", "bold red", f" ({error.code}): {text}"))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        messages.say(
            marked("stopped", "yellow", ": give the same command again; where its --help says so, it goes on")
        )
        raise typer.Exit(130) from None  # as a shell counts SIGINT


def print_remarks(*remarks: str | None) -> None:
    """What the user should know of a run, each once, on the error stream."""
    for remark in dict.fromkeys(remarks):
        if remark is not None:
            messages.say(marked("remark", "yellow", f": {remark}"))


@contextmanager
def show_progress(*units: str) -> Iterator[tuple[Callable[..., None], ...]]:
    """Bars on a terminal while work is done; they go when it ends, also with an error.

    Args:
        units: what is counted, a bar each.

    Yields:
        For each, what to call with the numbers done and in all, and with ``says`` in place of the unit what is done
        now; other things that follow are ignored.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.description}", table_column=Column(max_width=22, no_wrap=True, overflow="ellipsis")),
        TimeElapsedColumn(),
        TextColumn("passed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    bars = Progress(*columns, console=messages, transient=True)

    def teller(unit: str) -> Callable[..., None]:
        task = bars.add_task(unit, total=None, visible=False)
        return lambda done, total, *_, says=unit: bars.update(
            task, completed=done, total=total, description=printable(says), visible=True
        )

    with bars if messages.is_interactive else nullcontext():
        yield tuple(teller(unit) for unit in units)
