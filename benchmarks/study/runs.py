"""Runs what is missing of a grid, within a budget, and keeps each run as a line of a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.study.arms import Arm

Run = tuple[Arm, int]


class Record:
    """Finished runs, one JSON object a line; a line that was torn when the machine stopped is as if it never was.

    Args:
        path: of the file; made with its first line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole.splitlines():
            run = json.loads(line)
            self.found[run["key"]] = run
        if whole != text:
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def add(self, arm: Arm, seed: int, result: Mapping[str, Any]) -> None:
        """Append a run; on the disk when this returns."""
        run = {"task": arm.task, "options": arm.options, "settings": arm.settings, "seed": seed, **result}
        run["key"] = arm.key(seed)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(json.dumps(run, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.found[run["key"]] = run

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """In their order."""
        return [(arm, seed) for arm, seed in runs if arm.key(seed) not in self.found]


def run_missing(
    record: Record,
    runs: Sequence[Run],
    train: Callable[[Arm, int], Mapping[str, Any]],
    *,
    console: Console,
    end: float | None = None,
) -> list[Run]:
    """Train what the record lacks; no run starts once the time is over.

    Args:
        record: of what was run.
        runs: all that are wanted.
        train: gives a run's result.
        console: for the bar.
        end: after which no run starts, by ``time.monotonic``; None for no end.

    Returns:
        What is still missing.
    """
    missing = record.missing(runs)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("runs", total=len(runs), completed=len(runs) - len(missing))
        for arm, seed in missing:
            if end is not None and time.monotonic() >= end:
                break
            progress.update(bar, description=f"{arm.task}: {arm.part}, {arm.method}, seed {seed}")
            record.add(arm, seed, train(arm, seed))
            progress.advance(bar)
    return record.missing(runs)
