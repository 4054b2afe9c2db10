"""What one merge depends on: heads, rounds and options; and the Gram matrices of W_o that go with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.merging.plans import MergePlan, merge_plan, merge_pool, plan_groups
from shd_ref.teacher.body import Array32


@dataclass(frozen=True)
class SqueezeOptions:
    """What is computed for every layer; the arguments of ``squeeze_graph`` after checking."""

    num_student_heads: int
    plan: str | MergePlan
    strategy: str
    alpha_rule: str
    alpha_per: str
    temperature: float
    codec: str


@dataclass(frozen=True)
class MergeRule:
    """All that the function of a merge depends on: equal rules share one function."""

    num_heads: int
    d_v: int
    rounds: MergePlan
    strategy: str
    alpha_rule: str
    alpha_per: str
    temperature: float
    codec: str

    @property
    def name(self) -> str:
        """The function's name: head counts, and d_v where alphas depend on it."""
        return f"squeeze_{self.num_heads}_to_{len(self.groups)}" + (f"_dv{self.d_v}" if self.solves else "")

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The teacher heads behind each student head."""
        return plan_groups(self.rounds, self.num_heads)

    @property
    def solves(self) -> bool:
        """Whether alphas are computed from the values."""
        return self.strategy in ("shd", "hard") and bool(self.rounds)


@dataclass(frozen=True)
class Round:
    """One round of pairs over the pool of that round."""

    pairs: tuple[tuple[int, int], ...]
    pool: tuple[tuple[int, ...], ...]  # teacher heads behind each position

    @property
    def order(self) -> list[int]:
        """Pool positions, pair after pair."""
        return [position for pair in self.pairs for position in pair]

    @property
    def width(self) -> int:
        """Teacher heads in the largest pool position used; smaller ones are padded to it."""
        return max(len(self.pool[position]) for position in self.order)

    def members(self) -> list[list[int]]:
        """The teacher heads behind every position of ``order``, padded by repetition of the first."""
        groups = [self.pool[position] for position in self.order]
        return [[*group, *[group[0]] * (self.width - len(group))] for group in groups]


def list_rounds(rule: MergeRule) -> list[Round]:
    """The rounds, each with the pool that it finds."""
    pool: list[tuple[int, ...]] = [(head,) for head in range(rule.num_heads)]
    rounds = []
    for pairs in rule.rounds:
        rounds.append(Round(pairs, tuple(pool)))
        pool = merge_pool(pool, pairs)
    return rounds


def make_rule(options: SqueezeOptions, num_heads: int, d_v: int, rounds: MergePlan | None = None) -> MergeRule:
    """The merge of a layer with so many heads, so wide, along its own rounds where given.

    Raises:
        ShdError: ``heads-exceed``, ``plan-invalid``.
    """
    rounds = merge_plan(num_heads, options.num_student_heads, options.plan if rounds is None else rounds)
    return MergeRule(
        num_heads,
        d_v,
        rounds,
        options.strategy,
        options.alpha_rule,
        options.alpha_per,
        options.temperature,
        options.codec,
    )


def gram_matrices(rule: MergeRule, output_projection: NDArray[Any]) -> list[Array32]:
    """Per round ``(num_pairs, 2 k d_v, 2 k d_v)``: products of the pairs' rows of W_o, zero where padded."""
    by_head = output_projection.astype(np.float64).reshape(rule.num_heads, rule.d_v, -1)
    grams = []
    for one_round in list_rounds(rule):
        rows = by_head[np.array(one_round.members())]  # (2 m, k, d_v, D)
        for place, position in enumerate(one_round.order):
            rows[place, len(one_round.pool[position]) :] = 0.0
        stacked = rows.reshape(len(one_round.pairs), 2 * one_round.width * rule.d_v, -1)
        grams.append((stacked @ stacked.swapaxes(1, 2)).astype(np.float32))
    return grams
