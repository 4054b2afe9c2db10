"""What commands print with: paths, messages and what files say are shown as they are, never obeyed."""

from __future__ import annotations

import math
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from shd_ref.errors import ShdError
from shd_ref.printable import printable
from shd_ref.teacher.options import MERGING, READING, RUNNING, STORING, TARGETS

RARE: Final = (MERGING, STORING, TARGETS, READING, RUNNING)
"""Panels of options that ``--help-all`` shows, where a command has it, all but ``USUAL``."""

USUAL: Final = (
    *("plan", "form", "no_attention", "logits", "embeddings"),
    *("tokenizer", "text_column", "max_length", "batch_size", "provider"),
)


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """The callback of ``--help-all``."""
    if wanted:
        ctx.meta["help_all"] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


STARTS_OVER: Final = "the same command starts over"
"""After a command that keeps nothing of its work."""


class _PlainFlags:
    """Flags take no value, so that ``--help`` shows none: newer typers print ``<bool>`` after each."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the command beside this class
        is_long = any(one.name == "help_all" and not one.hidden for one in params)
        for one in params:
            if is_long:
                is_rare = getattr(one, "rich_help_panel", None) in RARE and one.name not in USUAL
                one.hidden = is_rare and not ctx.meta.get("help_all")
            if getattr(one, "is_bool_flag", False) and one.metavar is None:
                one.metavar = ""
        return params


class ShownCommand(_PlainFlags, TyperCommand):
    """A command as typer shows it, with plain flags."""


COMMANDS: Final = {
    "shd": ("inspect", "plan", "precompute", "verify", "report", "ls", "seal", "merge", "conformance"),
    "shd-torch": ("compress", "export", "doctor", "shrink", "vocabulary", "time"),
}
"""Of both programs, neither of which imports the other's."""


class ShownGroup(_PlainFlags, TyperGroup):
    """An application as typer shows it, with plain flags; a command of the other program names that program."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that words begin with."""
        for program, names in COMMANDS.items():
            if args[0] in names and args[0] not in self.commands:
                ctx.fail(f"{args[0]} is a command of {program}: {shlex.join([program, *args])}")
        return super().resolve_command(ctx, args)


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
"""Seconds between lines of progress, and before the first: a short command says nothing."""

_IS_QUIET: ContextVar[bool] = ContextVar("is_quiet", default=False)

_ARGUMENT: Final = re.compile(
    r"^((?:sample \d+ \(key \w+\): )?)"
    r"((?:inputs|data|held_out|compare|tokenizer)(?= \S+)|\w+(?:, \w+)*(?: (?:or|and) \w+)?(?= must ))"
)
"""What a message says must be otherwise, where it begins with it or several, with it and a path, or with the sample
that it is about."""


@contextmanager
def reported_errors(options: Mapping[str, str] | None = None, after: str = STARTS_OVER) -> Iterator[None]:
    """A ``ShdError`` becomes one message and exit code 1, Ctrl-C another and 130; all else keeps its traceback.

    Where a message says what an argument must be, it names the option of ``options`` behind that argument. ``after``
    is said where the command was stopped, or could not write.
    """
    try:
        yield
    except ShdError as error:
        known = options or {}

        def name(found: re.Match[str]) -> str:
            return found[1] + re.sub(r"\w+", lambda word: known.get(word[0], word[0]), found[2])

        text = _ARGUMENT.sub(name, str(error))
        messages.say(marked("error", "bold red", f" ({error.code}): {text}"))
        if error.code == "write-failed" and error.__cause__ is not None:  # else nothing was tried
            messages.say(after)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        messages.say(marked("stopped", "yellow", f": {after}"))
        raise typer.Exit(130) from None  # as a shell counts SIGINT


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


@contextmanager
def show_progress(*units: str) -> Iterator[tuple[Callable[..., None], ...]]:
    """Progress on the error stream while work is done: bars on a terminal, elsewhere a line now and then.

    Yields for each unit what to call with the numbers done and in all (0 where not known), and with ``says`` in place
    of the unit what is done now; all else is ignored. A call with 0 done begins a stage.
    """
    if _IS_QUIET.get():
        yield tuple(lambda *_, **__: None for _ in units)
    elif messages.is_interactive:
        with _bars() as bars:
            yield tuple(_bar(bars, unit) for unit in units)
    else:
        with _Lines() as lines:
            yield tuple(lines.counter(unit) for unit in units)


def _bars() -> Any:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=20),
        TextColumn("{task.fields[count]}"),
        TextColumn("{task.description}", table_column=Column(max_width=22, no_wrap=True, overflow="ellipsis")),
        TimeElapsedColumn(),
        TextColumn("passed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Progress(*columns, console=messages, transient=True)


def _bar(bars: Any, unit: str) -> Callable[..., None]:
    task = bars.add_task(unit, total=None, visible=False, count="")

    def tell(done: int, total: int, *_: Any, says: str = unit) -> None:
        if not done:
            bars.reset(task)
        count = f"{done}/{total}" if total else ""
        # For update() None is the total as before. What comes after the last is not known to take no time.
        bars.tasks[task].total = total if done < total else None
        bars.update(task, completed=done, description=printable(says), visible=True, count=count)

    return tell


class _Lines:
    """A line every ``EVERY`` seconds, and after the first so many when a stage begins."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._now: Callable[[], str] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Lines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def counter(self, unit: str) -> Callable[..., None]:
        stage: tuple[float, int] | None = None  # when it began, and with how many done: a run may be resumed

        def tell(done: int, total: int, *_: Any, says: str = unit) -> None:
            nonlocal stage
            now, is_new = time.monotonic(), stage is None or not done
            began, first = stage = (now, done) if stage is None or not done else stage

            def line() -> str:
                now = time.monotonic()
                count = f"{done}/{total} " if total else ""
                left = (now - began) / (done - first) * (total - done) if done > first else 0.0
                ending = f", about {_clock(max(left, 1.0))} left" if left else ""
                return f"progress: {count}{says}; {_clock(now - self._begun)} passed{ending}"

            self._now = line
            if is_new and now - self._begun > EVERY:
                messages.say(line())

        return tell

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            if self._now is not None:
                messages.say(self._now())


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
