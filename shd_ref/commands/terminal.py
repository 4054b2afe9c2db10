"""What commands print with: paths, messages and what files say are shown as they are, never obeyed."""

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


def plus_minus(value: float, margin: float | None, most: int | None = None) -> str:
    """A number and half of its interval, if it has one, with two digits of the latter, but at most so many."""
    if not margin or not math.isfinite(margin):
        return f"{value:.4g}"
    if most is None and margin < 1e-5:
        return f"{value:.1e} ± {margin:.0e}"
    digits = max(1 - math.floor(math.log10(margin)), 0)
    digits = digits if most is None else min(digits, most)
    return f"{value:.{digits}f} ± {margin:.{digits}f}"


EVERY: Final = 15.0
"""Seconds between lines of progress, at least, and before the first: a short command says nothing."""

_IS_QUIET: ContextVar[bool] = ContextVar("is_quiet", default=False)


def print_remarks(*remarks: str | None) -> None:
    """What the user should know of a run, each once, on the error stream."""
    for remark in dict.fromkeys(remarks):
        if remark is not None:
            messages.say(marked("remark", "yellow", f": {remark}"))


@contextmanager
def quiet_progress(is_quiet: bool) -> Iterator[None]:
    """Leave out the progress of what is done meanwhile."""
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

    Yields for each unit what to call with the numbers done and in all (0 where not known), and with ``says`` in place
    of the unit what is done now; all else is ignored. A call with 0 done begins a stage.
    """
    if _IS_QUIET.get():
        yield tuple(lambda *_, **__: None for _ in units)
    elif messages.is_interactive:
        with messages.status("") as status:  # it draws at most so often; strings would be markup
            yield tuple(_teller(unit, lambda text: status.update(Text(text, no_wrap=True)), 0.0) for unit in units)
    else:
        yield tuple(_teller(unit, lambda text: messages.say(f"progress: {text}"), EVERY) for unit in units)


def _teller(unit: str, show: Callable[[str], None], pause: float) -> Callable[..., None]:
    """What ``show_progress`` yields for a unit; ``pause``: seconds between two lines at least."""
    began = stage = last_line = time.monotonic()
    first = 0  # done when the stage began: a run may be resumed

    def tell(done: int, total: int, *_: Any, says: str = unit) -> None:
        nonlocal stage, last_line, first
        now = time.monotonic()
        if not done or not first:
            stage, first = now, done
        if now - last_line < pause:
            return
        last_line = now
        count = f"{done}/{total} " if total else ""
        left = (now - stage) / (done - first) * (total - done) if done > first else 0.0
        ending = f", about {_clock(max(left, 1.0))} left" if left else ""
        show(printable(f"{count}{says}; {_clock(now - began)} passed{ending}"))

    return tell


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
