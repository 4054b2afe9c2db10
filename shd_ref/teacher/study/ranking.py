"""Ways to squeeze, what each costs the teacher, and which to take: never one for a difference that may be noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from shd_ref.merging.plans import MergePlan
from shd_ref.teacher.options import PrecomputeOptions
from shd_ref.tolerances import tie_width

WEIGHED: Final = ("shd", "hard")
"""Strategies that compute weights, so that ``alpha_per`` makes a difference."""


@dataclass(frozen=True)
class Setting:
    """One way to squeeze, in the words of ``PrecomputeOptions``; ``matched_by`` is None for other plans."""

    num_student_heads: int
    plan: str
    matched_by: str | None
    strategy: str
    alpha_per: str

    @property
    def title(self) -> str:
        """For people: the plan, and the weights."""
        return f"{self.plan_title} plan, {self.weights_title} weights"

    @property
    def plan_title(self) -> str:
        """The plan, with what it is matched by where that is not the usual."""
        is_usual = self.matched_by in (None, PrecomputeOptions.matched_by)
        return self.plan if is_usual else f"{self.plan} ({self.matched_by})"

    @property
    def weights_title(self) -> str:
        """The strategy, and what a weight is for where there are several."""
        return f"{self.strategy} per {self.alpha_per}" if self.strategy in WEIGHED else self.strategy

    @property
    def departures(self) -> int:
        """How many options differ from what ``precompute`` does unasked."""
        names = ("plan", "matched_by", "strategy", "alpha_per")
        return sum(getattr(self, name) not in (None, getattr(PrecomputeOptions, name)) for name in names)


@dataclass(frozen=True)
class Fidelity:
    """What the teacher loses with one setting.

    Attributes:
        output_error: relative error of the output over counted rows.
        cosine_distance: mean over samples of 1 - cosine of the output (of its mean over counted rows).
        attention_error, merge_error: mean over sites of the relative error of the attention output, with drift from
            earlier layers, and without: against the unmerged maps of the squeezed teacher itself (MIX-8).
        margin: half of the interval of ``cost`` over samples; None of a single sample.
        excess, excess_margin: by how much ``cost`` is above the best of these student heads, and half of its
            interval on the same samples; all of a number of heads hold at once.
    """

    setting: Setting
    output_error: float
    cosine_distance: float
    attention_error: float
    merge_error: float
    loss: float | None
    margin: float | None
    excess: float
    excess_margin: float | None
    plans: tuple[MergePlan, ...] = field(repr=False)

    @property
    def cost(self) -> float:
        """What settings are ranked by: the loss where there is one, else the cosine distance of the output."""
        return self.cosine_distance if self.loss is None else self.loss

    @property
    def is_tied(self) -> bool:
        """Whether these samples cannot tell it from the best: the interval of their difference reaches 0."""
        return self.excess_margin is None or abs(self.excess) <= max(self.excess_margin, rounding_of(self.cost))


def rounding_of(cost: float) -> float:
    """Costs that are no farther from this one count as equal: another processor may exchange them."""
    return tie_width() * max(cost, tie_width())


def rank_costs(costs: Sequence[float]) -> list[int]:
    """The numbers of settings by cost, lowest first; equal costs keep their order."""
    least, keys = -math.inf, {}
    for number in sorted(range(len(costs)), key=costs.__getitem__):
        least = least if costs[number] - least <= rounding_of(least) else costs[number]
        keys[number] = least, number
    return sorted(keys, key=keys.__getitem__)


@dataclass(frozen=True)
class FidelityReport:
    """All settings, best first, with intervals by Student's t over samples (``intervals.CONFIDENCE``).

    Attributes:
        output, sites: what was compared, and the attention sites that were squeezed.
        skipped: ``name: reason`` of those that were not.
        held_out: whether none of the samples is one that plans were matched on.
        loss: the teacher's own, unsqueezed; None without targets.
    """

    output: str
    sites: tuple[str, ...]
    skipped: tuple[str, ...]
    samples: int
    held_out: bool
    loss: float | None
    results: tuple[Fidelity, ...]

    @property
    def measure(self) -> str:
        """What ``Fidelity.cost`` is."""
        return "1 - cosine" if self.loss is None else "loss"

    def best(self) -> dict[int, Fidelity]:
        """The lowest cost by number of student heads, ascending."""
        first: dict[int, Fidelity] = {}
        for result in self.results:
            first.setdefault(result.setting.num_student_heads, result)
        return dict(sorted(first.items()))

    def tied(self, heads: int) -> tuple[Fidelity, ...]:
        """What cannot be told from the best for a number of student heads, which is first."""
        of_heads = (result for result in self.results if result.setting.num_student_heads == heads)
        return tuple(result for result in of_heads if result.is_tied)

    def recommended(self) -> dict[int, Fidelity]:
        """By number of student heads, of ``tied`` the one with fewest options, then the lowest cost."""
        return {heads: min(self.tied(heads), key=lambda one: one.setting.departures) for heads in self.best()}
