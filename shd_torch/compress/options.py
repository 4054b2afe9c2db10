"""What is wanted of a student: the options of ``compress``, and the limits that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shd_ref.errors import ShdError
from shd_ref.integers import check_integer, check_number
from shd_torch.compress.costs import Costs

FASTEST: Final = "fastest"
"""The name of the wish where only a quality is asked for."""


@dataclass(frozen=True)
class CompressOptions:
    """What is wanted of a student, and how long to look for it.

    Attributes:
        faster: times faster than the teacher with fused attention, at every setting; several for a front.
        ms: milliseconds of a run; then there must be one setting.
        mb: megabytes of the graph with its weights.
        at_least: quality, 1 being the teacher's; alone: the fastest student that keeps it.
        batch: samples per run.
        length: tokens per sample; left out for images.
        threads: of onnxruntime.
        int8: deploy products in int8.
        max_length: tokens that are kept of a text.
        budget: minutes of training, of all students together.
        candidates: students that are tried for each wish.
        learning_rate: of training, at its height; default: 5e-4.
        go_on: also where the teacher in int8 is fast enough.
        seed: of the division of the data and their order.
    """

    faster: tuple[float, ...] = ()
    ms: tuple[float, ...] = ()
    mb: tuple[float, ...] = ()
    at_least: float | None = None
    batch: tuple[int, ...] = (1, 32)
    length: tuple[int, ...] = (64,)
    threads: int = 1
    int8: bool = True
    max_length: int | None = None
    budget: float = 30.0
    candidates: int = 4
    learning_rate: float | None = None
    go_on: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        targets = list(self.targets())
        for name, value in targets:
            check_number(name, value, "", above=0)
        if len({name for name, _ in targets}) > 1 or len(set(targets)) < len(targets):
            message = "targets must be of one kind, each once; got " + ", ".join(f"{n} {v:g}" for n, v in targets)
            raise ShdError("argument-value", message)
        if not targets and self.at_least is None:
            raise ShdError("argument-value", "faster, ms, mb or at_least must be given; got none")
        if self.ms and len(self.batch) * len(self.length) > 1:
            rule = "ms must go with one batch and one length"
            raise ShdError("argument-value", f"{rule}; got batch {self.batch} and length {self.length}")
        if self.at_least is not None and not 0 < self.at_least <= 1:
            raise ShdError("argument-value", f"at_least must lie in (0, 1], 1 being the teacher; got {self.at_least}")
        check_number("budget", self.budget, "", above=0)
        for name, count in (("candidates", self.candidates), ("threads", self.threads)):
            check_integer(name, count, 1, None, "")

    def targets(self) -> Iterator[tuple[str, float]]:
        """All that are given: the name of an option and a number."""
        for name in ("faster", "ms", "mb"):
            yield from ((name, value) for value in getattr(self, name))

    def wishes(self, costs: Costs) -> list[Wish]:
        """One for each target, or the one for a quality alone."""
        settings = costs.teacher[:-1]
        wishes = []
        for name, value in self.targets():
            if name == "faster":
                limits = (*(seconds / value for seconds in settings), math.inf)
                wishes.append(Wish(f"{value:g}x", f"{value:g} times faster", limits))
            elif name == "ms":
                wishes.append(Wish(f"{value:g}ms", f"{value:g} ms", (value / 1e3, math.inf)))
            else:
                wishes.append(Wish(f"{value:g}mb", f"{value:g} MB", (*(math.inf for _ in settings), 1e6 * value)))
        return wishes or [Wish(FASTEST, f"quality of at least {self.at_least:g}", (math.inf,) * len(costs.teacher))]


@dataclass(frozen=True)
class Wish:
    """One student that is wanted.

    Attributes:
        name: of its folder, where there are several.
        text: what is asked for.
        limits: of each row of the costs: seconds at each setting, and bytes.
    """

    name: str
    text: str
    limits: tuple[float, ...]
