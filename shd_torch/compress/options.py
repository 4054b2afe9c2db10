"""Targets for a student: the options of ``compress``, and the limits that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from cyclopts import Parameter

from shd_ref.errors import need
from shd_ref.integers import check_integer, check_number
from shd_ref.teacher.options import FLOATS, FROM_0, FROM_1, INTEGERS, OPTIONS, panel, read_by

FASTEST: Final = "fastest"
"""The name of the target where only a quality is asked for."""

TARGETS = panel("What is wanted", 1)
RUNNING = panel("How it will be run", 2)
LOOKING = panel("How long to look", 3)
READING = panel("How texts are read", 4)


def _read_least(option: str, text: str) -> float | tuple[str, float]:
    """``0.95``, ``map=0.8``."""
    name, _, value = text.rpartition("=")
    try:
        return (name, float(value)) if name else float(value)
    except ValueError:
        raise ValueError(f"{option} must be a number, or NAME=NUMBER; got {text}") from None


@OPTIONS
@dataclass(frozen=True)
class CompressOptions:
    """What is wanted of a student, and how long to look for it.

    Attributes:
        faster: Times faster than the teacher with fused attention, at every setting, above 1: 4, or several for a
            front: 3,4,6.
        ms: Milliseconds of a run, with one batch and length.
        mb: Megabytes of the graph with its weights.
        at_least: Quality to keep, 1 being the teacher; alone: the fastest student that keeps it. Or another figure of
            the page by its name, also by labels: map=0.8.
        batch: Samples per run; a target must hold for each.
        length: Tokens per sample; not for images. Default: the median of the data, to the next multiple of 8.
        threads: Threads of onnxruntime.
        max_length: Tokens to keep of a text or pair. Default: as the tokenizer's file says.
        text_column: The column of the texts, or of the first texts of pairs.
        pair_column: The column of the second texts. Default: text_pair, where there is one and the model reads pairs.
        minutes: Minutes for everything, above 0. Default: 60, or 12 with --quick.
        quick: A first answer: two candidates for each target, and no trial of SHD.
        candidates: Students to try for each target. Default: 4, or 2 with --quick.
        learning_rate: Of training, at its height. Default: the best of four after a short one.
        seed: Seed for the division of the data and their order.
        int8: Deploy products in int8, or in float.
        go_on: Also if the teacher in int8 is fast enough.
        kept_layers: Train kept layers of the teacher as long as each student, for its target; they share the time.
        static: Write static/ too, a table of one vector a token for sentence-transformers; of sentence encoders.
    """

    faster: Annotated[tuple[float, ...], TARGETS, FLOATS] = ()
    ms: Annotated[tuple[float, ...], TARGETS, FLOATS] = ()
    mb: Annotated[tuple[float, ...], TARGETS, FLOATS] = ()
    at_least: Annotated[float | tuple[str, float] | None, TARGETS, read_by(_read_least, "NUMBER")] = None
    batch: Annotated[tuple[int, ...], RUNNING, INTEGERS] = (1, 32)
    length: Annotated[tuple[int, ...], RUNNING, INTEGERS] = ()
    threads: Annotated[int, RUNNING, FROM_1] = 1
    max_length: Annotated[int | None, READING, FROM_1] = None
    text_column: Annotated[str, READING] = "text"
    pair_column: Annotated[str | None, READING] = None
    minutes: Annotated[float | None, LOOKING] = None
    quick: Annotated[bool, LOOKING, Parameter(negative="")] = False
    candidates: Annotated[int | None, LOOKING, FROM_1] = None
    learning_rate: Annotated[float | None, LOOKING] = None
    seed: Annotated[int, LOOKING, FROM_0] = 0
    int8: Annotated[bool, Parameter(negative="--no-int8")] = True
    go_on: bool = False
    kept_layers: Annotated[bool, Parameter(negative="")] = False
    static: Annotated[bool, Parameter(negative="")] = False

    def __post_init__(self) -> None:
        requests = self.requests
        for name, number in (*requests, ("minutes", self.minutes), ("learning_rate", self.learning_rate)):
            if number is not None:
                check_number(name, number, above=1 if name == "faster" else 0)
        if self.at_least is not None:
            check_number("at_least", self.least[1], above=0, most=1)
        for name, count in (("candidates", self.most_candidates), ("threads", self.threads)):
            check_integer(name, count, 1, None)
        is_one = len({name for name, _ in requests}) <= 1 and len(set(requests)) == len(requests)
        got = ", ".join(f"{name} {value:g}" for name, value in requests)
        need(is_one, "argument-value", "faster, ms and mb", "not be mixed, and hold each number once", got)
        is_any = bool(requests) or self.at_least is not None
        need(is_any, "argument-value", "faster, ms, mb or at_least", "be given", "none")
        remedy = "say how fast the student shall be"
        is_ladder = self.kept_layers and not requests
        need(not is_ladder, "argument-value", "kept_layers", "go with faster, ms or mb", "none", remedy=remedy)
        is_single = not self.ms or len(self.batch) * max(len(self.length), 1) == 1
        got = f"batch {self.batch} and length {self.length}"
        need(is_single, "argument-value", "ms", "go with one batch and one length", got)

    @property
    def least(self) -> tuple[str, float]:
        """The figure that is to be kept, by name, and its least value."""
        if isinstance(self.at_least, tuple):
            return self.at_least
        return "quality", self.at_least or 0.0

    @property
    def most_minutes(self) -> float:
        """For everything."""
        return self.minutes or (12.0 if self.quick else 60.0)

    @property
    def most_candidates(self) -> int:
        """For each target."""
        return self.candidates if self.candidates is not None else 2 if self.quick else 4

    @property
    def requests(self) -> list[tuple[str, float]]:
        """The options among ``faster``, ``ms`` and ``mb`` that are given, each with one of its numbers."""
        return [(name, value) for name in ("faster", "ms", "mb") for value in getattr(self, name)]

    @property
    def num_targets(self) -> int:
        """How many students are searched for."""
        return max(len(self.requests), 1)

    def targets(self, teacher: Sequence[float]) -> list[Target]:
        """One for each target, or the one for a quality alone; ``teacher`` is its row of costs."""
        free = [math.inf] * len(teacher)
        targets = []
        for name, value in self.requests:
            if name == "faster":
                limits = [*(seconds / value for seconds in teacher[:-1]), math.inf]
                targets.append(Target(f"{value:g}x", f"{value:g} times faster", limits, value))
            elif name == "ms":
                targets.append(Target(f"{value:g}ms", f"{value:g} ms", [value / 1e3, math.inf]))
            else:
                targets.append(Target(f"{value:g}mb", f"{value:g} MB", [*free[:-1], 1e6 * value]))
        name, least = self.least
        return targets or [Target(FASTEST, f"{name} of at least {least:g}", free)]


@dataclass(frozen=True)
class Target:
    """One student that is wanted.

    Attributes:
        name: of its folder, where there are several.
        text: the target in words.
        limits: of each row of the costs: seconds at each setting, and bytes.
        speed: times faster than the teacher, where that is asked for.
    """

    name: str
    text: str
    limits: list[float]
    speed: float | None = None
