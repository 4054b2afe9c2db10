"""Consoles, tables and progress of the commands. Text from files is shown as it is, never read as markup."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shd_ref.errors import printable


class PlainConsole(Console):
    """A console for which a string is a string: no markup, no emoji codes, unprintable characters escaped."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as text: rich calls this for everything printed, cells and titles of tables too."""
        return super().render_str(printable(text), **options)

    def say(self, text: str | Text) -> None:
        """A line as it is: no colours for numbers and paths, and no line breaks, so that it can be copied."""
        self.print(text, highlight=False, soft_wrap=True)


console = PlainConsole()
messages = PlainConsole(stderr=True)


def marked(word: str, style: str, rest: str = "") -> Text:
    """A word in a style, and plain text after it."""
    return Text.assemble((printable(word), style), printable(rest))


def fact_table(title: str) -> Table:
    """A table of names and values; long hashes and paths are folded."""
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


def plus_minus(value: float, margin: float | None, most: int | None = None) -> str:
    """A number and half of its interval, if it has one, to two digits of the half, but at most ``most`` decimals."""
    if not margin or not math.isfinite(margin):
        return f"{value:.4g}"
    if most is None and margin < 1e-5:
        return f"{value:.1e} ± {margin:.0e}"
    decimals = max(1 - math.floor(math.log10(margin)), 0)
    decimals = decimals if most is None else min(decimals, most)
    return f"{value:.{decimals}f} ± {margin:.{decimals}f}"


EVERY: Final = 15.0
"""Seconds between lines of progress, at least, and before the first: a short command says nothing."""

_IS_QUIET: ContextVar[bool] = ContextVar("is_quiet", default=False)


def print_remarks(*remarks: str | None) -> None:
    """Remarks on a run, each once, on the error stream."""
    for remark in dict.fromkeys(remarks):
        if remark is not None:
            messages.say(marked("remark", "yellow", f": {remark}"))


@contextmanager
def quiet_progress(is_quiet: bool) -> Iterator[None]:
    """Show no progress of the work inside."""
    token = _IS_QUIET.set(is_quiet or _IS_QUIET.get())
    try:
        yield
    finally:
        _IS_QUIET.reset(token)


def print_stage(text: str) -> None:
    """A line of progress that stays on the error stream."""
    if not _IS_QUIET.get():
        messages.say(f"progress: {text}")


@contextmanager
def show_progress(*units: str) -> Iterator[tuple[Callable[..., None], ...]]:
    """Progress on the error stream while work is done: a line that changes on a terminal, elsewhere one now and then.

    Yields a function for each unit. It takes the numbers done and in all (0 where not known), and as ``says`` the
    work of the moment in place of the unit; all else is ignored. A call with 0 done begins a stage.
    """
    if _IS_QUIET.get():
        yield tuple(lambda *_, **__: None for _ in units)
    elif messages.is_interactive:
        with messages.status("") as status:  # it limits how often it draws; a string would be markup
            yield tuple(_reporter(unit, lambda text: status.update(Text(text, no_wrap=True)), 0.0) for unit in units)
    else:
        yield tuple(_reporter(unit, lambda text: messages.say(f"progress: {text}"), EVERY) for unit in units)


def _reporter(unit: str, show: Callable[[str], None], pause: float) -> Callable[..., None]:
    """The function of a unit that ``show_progress`` yields; ``pause``: seconds between two lines at least."""
    started = stage_start = last_line = time.monotonic()
    done_before = 0  # a run may be resumed

    def report(done: int, total: int, *_: Any, says: str = unit) -> None:
        nonlocal stage_start, last_line, done_before
        now = time.monotonic()
        # The rate counts from the first call with anything done: resumed work was not done in this time.
        if not done or not done_before:
            stage_start, done_before = now, done
        if now - last_line < pause:
            return
        last_line = now
        count = f"{done}/{total} " if total else ""
        is_known = done > done_before
        remaining = (now - stage_start) / (done - done_before) * (total - done) if is_known else 0.0
        ending = f", about {_clock(max(remaining, 1.0))} left" if remaining else ""
        show(printable(f"{count}{says}; {_clock(now - started)} passed{ending}"))

    return report


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
