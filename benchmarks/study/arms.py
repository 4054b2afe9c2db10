"""What is run, as data: arms of a grid file, and the key under which a run is known."""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRIDS = Path(__file__).parent / "grids"
PRESETS = ("quick", "gpu")
ALONE = "base"
"""The method of an arm without anything beside its base loss."""


@dataclass(frozen=True)
class Arm:
    """One way to train one student.

    Attributes:
        task: name of the grid.
        part: of the grid, the question that the arm answers.
        options: every other choice by name; ``method`` and ``beta`` are always there.
        settings: sizes of the task, which its part may change.
        seeds: 0 to this, less one.
    """

    task: str
    part: str
    options: dict[str, Any]
    settings: dict[str, Any]
    seeds: int = 3

    @property
    def method(self) -> str:
        """A rival's name, or ``base``."""
        return str(self.options["method"])

    def key(self, seed: int) -> str:
        """Equal for equal runs, whichever part asks for them."""
        return json.dumps([self.task, self.options, self.settings, seed], sort_keys=True)


@dataclass(frozen=True)
class Grid:
    """A task's arms.

    Attributes:
        task: its name.
        seeds: of every arm whose part asks for no more, from 0.
        arms: part after part.
        questions: of each part.
        base_options: names of options that make a difference to an arm without anything beside its base loss.
    """

    task: str
    seeds: int
    arms: tuple[Arm, ...]
    questions: dict[str, str]
    base_options: tuple[str, ...]

    def runs(self, parts: Collection[str] | None = None) -> list[tuple[Arm, int]]:
        """Of these parts, default all, each run once; arm after arm, as arms of one teacher are cheaper together."""
        arms = [arm for arm in self.arms if parts is None or arm.part in parts]
        return list({arm.key(seed): (arm, seed) for arm in arms for seed in range(arm.seeds)}.values())


def read_grid(task: str, preset: str | None = None) -> Grid:
    """The grid of a task: each part is the product of its lists, over the grid's defaults.

    An arm without a method beside its base loss has no beta; the product holds it once.

    Args:
        task: name of a file in ``grids``.
        preset: a table of that file, one of ``PRESETS``, which changes sizes, defaults and, where it has any, parts.
    """
    with (GRIDS / f"{task}.toml").open("rb") as file:
        page = tomllib.load(file)
    changed = page[preset] if preset is not None else {}
    settings, defaults = (
        page["settings"] | changed.get("settings", {}),
        page["defaults"] | changed.get("defaults", {}),
    )
    seeds = changed.get("seeds", page["seeds"])
    arms = []
    parts = changed.get("part", page["part"])
    for part in parts:
        lists = {name: value if isinstance(value, list) else [value] for name, value in part["options"].items()}
        for values in itertools.product(*lists.values()):
            options = defaults | dict(zip(lists, values, strict=True))
            if options["method"] == ALONE:
                options = (
                    defaults
                    | {"beta": 0.0}
                    | {name: value for name, value in options.items() if name in page["base_options"]}
                )
                options |= {"method": ALONE}
            arm = Arm(task, part["name"], options, settings | part.get("settings", {}), part.get("seeds", seeds))
            if arm not in arms:
                arms.append(arm)
    questions = {part["name"]: part["question"] for part in parts}
    return Grid(task, seeds, tuple(arms), questions, tuple(page["base_options"]))
