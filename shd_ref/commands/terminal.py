"""What commands print with: paths, messages and what files say are shown as they are, never obeyed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shd_ref.errors import ShdError
from shd_ref.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


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


@contextmanager
def reported_errors(options: Mapping[str, str] | None = None) -> Iterator[None]:
    """A ``ShdError`` becomes one message and exit code 1; anything else is a bug and keeps its traceback.

    Args:
        options: the option behind each argument, which a message names where it says what that argument must be.
    """
    try:
        yield
    except ShdError as error:
        text = re.sub(r"^\w+(?= must )", lambda found: (options or {}).get(found[0], found[0]), str(error))
        messages.say(marked("error", "bold red", f" ({error.code}): {text}"))
        raise typer.Exit(1) from None


def print_remarks(*remarks: str | None) -> None:
    """What the user should know of a run, each once, on the error stream."""
    for remark in dict.fromkeys(remarks):
        if remark is not None:
            messages.say(marked("remark", "yellow", f": {remark}"))


@contextmanager
def show_progress(unit: str) -> Iterator[tuple[Progress, TaskID]]:
    """A bar on a terminal while work is done, and its task; it goes when the work ends, also with an error."""
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
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("passed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    bar = Progress(*columns, console=messages, transient=True)
    with bar if messages.is_interactive else nullcontext():
        yield bar, bar.add_task(unit, total=None)
