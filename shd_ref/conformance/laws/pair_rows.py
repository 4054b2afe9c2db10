"""Covering arrays: rows in which every two or three option values meet, and the arrays that a row asks for."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, product
from typing import Any, TypeAlias

import numpy as np

from shd_ref.conformance.laws.answers import check_answer
from shd_ref.conformance.laws.law import WIDE, Array, Law, Trial, each, law
from shd_ref.conformance.specification import DTYPES

Row = dict[str, str]
Calls: TypeAlias = Iterator[dict[str, Any]]
Meeting = frozenset[tuple[str, str]]  # some options, with one value each


def cover(
    options: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool] = lambda row: True, *, strength: int = 2
) -> list[Row]:
    """A few rows, one value an option, that hold every meeting of values which is allowed at all.

    Greedy and without chance: a row starts with the first meeting that is not covered, and takes for each other
    option the value that covers most of what is left. ``allowed`` says whether a row, or a part of one, can be asked
    for, and ``strength`` how many options meet.
    """
    left: dict[Meeting, None] = dict.fromkeys(
        frozenset(zip(names, values, strict=True))
        for names in combinations(options, strength)
        for values in product(*(options[name] for name in names))
        if allowed(dict(zip(names, values, strict=True)))
    )
    rows: list[Row] = []
    while left:
        for meeting in list(left):
            row = _extend(dict(meeting), options, left, allowed, strength)
            if row is not None:
                break
            del left[meeting]  # no whole row can have it
        else:
            break
        for pairs in combinations(row.items(), strength):
            left.pop(frozenset(pairs), None)
        rows.append(row)
    return rows


def _extend(
    row: Row,
    options: Mapping[str, Sequence[str]],
    left: Container[Meeting],
    allowed: Callable[[Row], bool],
    strength: int,
) -> Row | None:
    def gain(pair: tuple[str, str]) -> int:
        return sum(frozenset((pair, *others)) in left for others in combinations(row.items(), strength - 1))

    for name in options:
        if name not in row:
            pairs = [(name, value) for value in options[name] if allowed({**row, name: value})]
            if not pairs:
                return None
            row |= [max(pairs, key=gain)]
    return {name: row[name] for name in options}


@dataclass(frozen=True)
class Covering:
    """Rows in which options of an operation meet, and the calls that a numbered row asks for."""

    operation: str
    options: Mapping[str, Sequence[str]]
    calls: Callable[[Trial, int, Row], Calls]
    allowed: Callable[[Row], bool]
    strength: int

    @cached_property
    def rows(self) -> list[Row]:
        """All of them, made where they are first asked for."""
        return cover(self.options, self.allowed, strength=self.strength)

    def law(self, spec: str, dtypes: tuple[str, ...] = DTYPES, name: str = "", **only: str) -> Law:
        """The law of all rows, or of those with some value alone."""
        count, group = {2: ("two", "pairs"), 3: ("three", "triples"), 4: ("four", "fours")}[self.strength]

        def check(trial: Trial, numbered: tuple[int, Row]) -> None:
            for inputs in self.calls(trial, *numbered):
                check_answer(trial, self.operation, inputs, say(numbered[1]))

        def statement(trial: Trial) -> None:
            each(((i, row) for i, row in enumerate(self.rows) if only.items() <= row.items()), partial(check, trial))

        comment = f"Any {count} options of {self.operation} do together what each does alone."
        operations = f"{self.operation} squeeze_heads" if self.operation == "diagnose" else self.operation
        called = f"{group}-{name or self.operation.replace('_', '-')}"
        return law(called, operations, spec, comment, statement, dtypes)


def covering(
    operation: str,
    names: str,
    allowed: Callable[[Row], bool] = lambda row: True,
    *,
    strength: int = 2,
    values: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[Callable[[Trial, int, Row], Calls]], Covering]:
    """Take a maker of calls for these options, whose values are those of ``VALUES`` unless others are given."""
    options = {name: {**VALUES, **(values or {})}[name] for name in names.split(", ")}
    return lambda calls: Covering(operation, options, calls, allowed, strength)


SAMPLES = {"1": 1, "2 to 4": 3, "more": 6}
SHAPES = {"L < S": (3, 5), "L = S": (4, 4), "L > S": (5, 3)}
LARGE = {"L < S": (6, 19), "L = S": (18, 18), "L > S": (19, 7)}
# Short enough for bfloat16, and numbers that no half precision holds.
TEMPERATURES = {
    ("one", "short"): 1.0, ("whole", "short"): 3.0, ("above", "short"): 1.25, ("below", "short"): 0.75,
    ("one", "full"): 1.0, ("whole", "full"): 2.0, ("above", "full"): 1.4145508, ("below", "full"): 0.7071075,
}  # fmt: skip
# Teacher and student heads for a number of rounds, and what is left.
COUNTS = {
    ("0", "all"): (3, 3),
    ("1", "one"): (2, 1), ("1", "several, evenly"): (4, 2), ("1", "several, unevenly"): (5, 3),
    ("2", "one"): (3, 1), ("2", "several, evenly"): (6, 2), ("2", "several, unevenly"): (5, 2),
    ("3", "one"): (5, 1), ("3", "several, evenly"): (10, 2), ("3", "several, unevenly"): (11, 2),
    ("4 or more", "one"): (9, 1), ("4 or more", "several, evenly"): (18, 2),
    ("4 or more", "several, unevenly"): (17, 2),
}  # fmt: skip
AXES = {"2": (), "3": (3,), "4": (2, 3), "5 or more": (2, 1, 3)}
GROUPED = {"own": (3, 3), "two": (6, 3), "three": (6, 2), "one for all": (4, 1)}
POOLS = {"2": 2, "3": 3, "more": 6}
_SOME = ("none", "some")
VALUES: Mapping[str, Sequence[str]] = {
    "alpha_from": ("teacher", "softened"),
    "alpha_per": ("map", "row"),
    "alpha_rule": ("least_squares", "as_printed"),
    "attn_mask": ("none", "full", "(L, S)", "(B, 1, 1, S)", "other"),
    "axes": tuple(AXES),
    "by": ("residual", "similarity"),
    "grouped": tuple(GROUPED),
    "heads left": ("all", "one", "several, evenly", "several, unevenly"),
    "heads of the pool": tuple(POOLS),
    "-inf": _SOME,
    "items": ("1", "several"),
    "kind": ("progressive", "balanced", "explicit"),
    "numbers": ("short", "full"),
    "order": ("as the pool", "pairs swapped", "rounds shuffled"),
    "plan": ("progressive", "balanced", "explicit"),
    "positions": ("p < q, the last", "p > q, the last", "p < q, not the last", "p > q, not the last"),
    "query_mask": ("none", "some rows", "an empty sample"),
    "rounds": ("0", "1", "2", "3", "4 or more"),
    "row_sums": ("one", "at_most_one"),
    "rule": ("least_squares", "as_printed"),
    "samples": tuple(SAMPLES),
    "shape": tuple(SHAPES),
    "size": ("small", "large"),
    "small mass": _SOME,
    "strategies": ("not given", "one", "several"),
    "strategy": ("shd", "constant", "hard", "mean"),
    "student heads": ("one", "fewer", "as many"),
    "temperature": ("one", "whole", "above", "below"),
    "widths": ("different", "S = d_v = D"),
    "zero rows": _SOME,
}
"""What each option can be, or what arrays can be that an implementation may go another way for."""

# Explicit rounds for the counts above: pairs out of order, from everywhere in the pool.
EXPLICIT: dict[tuple[int, int], list[list[list[int]]]] = {
    (3, 3): [],
    (2, 1): [[[1, 0]]],
    (4, 2): [[[3, 1], [0, 2]]],
    (5, 3): [[[4, 2], [1, 3]]],
    (3, 1): [[[2, 0]], [[1, 0]]],
    (6, 2): [[[5, 1], [0, 3]], [[2, 0], [3, 1]]],
    (5, 2): [[[3, 0], [4, 1]], [[2, 1]]],
    (5, 1): [[[2, 4]], [[3, 0], [1, 2]], [[1, 0]]],
    (10, 2): [[[9, 0], [3, 5], [8, 1], [2, 4]], [[5, 2], [1, 4]], [[3, 0], [2, 1]]],
    (11, 2): [[[10, 0], [3, 5], [8, 1], [2, 4], [9, 6]], [[5, 2], [1, 4]], [[3, 0], [2, 1]]],
    (9, 1): [[[8, 3], [0, 5]], [[6, 0], [2, 4], [1, 3]], [[3, 1]], [[2, 0]], [[1, 0]]],
    (18, 2): [[[17, 0], [3, 5], [8, 1], [2, 4], [9, 6], [16, 7]], [[11, 4], [0, 9], [7, 2], [5, 1]],
        [[3, 7], [6, 0]], [[5, 2], [1, 4]], [[3, 1], [0, 2]]],
    (17, 2): [[[16, 0], [3, 5], [8, 1], [2, 4], [9, 6], [15, 7]], [[10, 4], [0, 9], [7, 2]], [[3, 7], [6, 0]],
        [[5, 2], [1, 4]], [[3, 1], [0, 2]]],
}  # fmt: skip


def whole_pool(row: Row) -> bool:
    """The empty plan leaves all heads, and no other does."""
    empty, whole = row.get("rounds"), row.get("heads left")
    return None in (empty, whole) or (empty == "0") == (whole == "all")


def shape_of(row: Row) -> tuple[int, int, int]:
    """Samples, rows and keys."""
    rows, keys = (LARGE if row.get("size") == "large" else SHAPES)[row["shape"]]
    return SAMPLES[row["samples"]], rows, keys


def maps_of(trial: Trial, seed: int, row: Row, *shape: int) -> Array:
    """Maps with the numbers, sums and zero rows that a row of options asks for."""
    zero = (1,) if row.get("zero rows") == "some" else ()
    sinks = row.get("row_sums") == "at_most_one"
    # Rounded to half precision, the sums of rows would be off by more than float32's ROW_SUM.
    wide = trial.subject.dtype in WIDE
    full, small = wide and row.get("numbers") == "full", wide and row.get("small mass") == "some"
    maps = trial.shares(seed, *shape, zero_rows=zero) if full else trial.probs(seed, *shape, zero_rows=zero)
    if small:
        maps = trial.with_small_mass(maps)
    if sinks:
        # Another share of its mass in every row, so that heads differ in it too.
        count = np.arange(maps[..., 0].size).reshape(maps.shape[:-1])
        maps = trial.rounded(maps * np.array([1.0, 0.5, 0.25, 0.75])[count % 7 % 4][..., None])
    return maps


def numbers_of(trial: Trial, seed: int, row: Row, *shape: int) -> Array:
    """Numbers of a few bits, or of all."""
    return trial.quotients(seed, *shape) if row.get("numbers") == "full" else trial.numbers(seed, *shape)


def weights_of(trial: Trial, seed: int, row: Row, *shape: int) -> Array:
    """Alphas of a few bits, or of all."""
    if row["numbers"] == "full":
        return trial.rounded(np.abs(trial.quotients(seed, *shape)) / 3.5)
    return trial.numbers(seed, *shape, low=0, high=16, shift=4)


def plan_of(row: Row, number: int) -> dict[str, Any]:
    """The counts of heads and the plan of a row, which is left out every other time where it is the default."""
    heads, students = COUNTS[row["rounds"], row["heads left"]]
    kind: Any = EXPLICIT[heads, students] if row["plan"] == "explicit" else row["plan"]
    return {"num_student_heads": students, **({"plan": kind} if kind != "progressive" or number % 2 else {})}


def row_mask(kind: str, batch: int, rows: int) -> Array | None:
    """A mask ``(B, L)``, another in every sample; of an empty sample the last."""
    if kind == "none":
        return None
    counts: Array = (np.arange(batch)[:, None] * 2 + np.arange(rows)[None, :]) % 3 != 0
    counts[:, -1] = True
    if kind == "an empty sample":
        counts[-1] = False
    return counts


def options_of(row: Row, **defaults: str) -> dict[str, str]:
    """The options of a row that are words, without those at their defaults."""
    return {name: row[name] for name, default in defaults.items() if row.get(name, default) != default}


def present(**arguments: Any) -> dict[str, Any]:
    """Those arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def say(row: Row) -> str:
    """The row of options in words."""
    return f"with {', '.join(f'{name}: {value}' for name, value in row.items())}"


def ordered(row: Row) -> list[list[list[int]]]:
    """The explicit rounds of a row, with their pairs in its order."""
    plan = EXPLICIT[COUNTS[row["rounds"], row["heads left"]]]
    if row["order"] == "as the pool":
        return [sorted(sorted(pair) for pair in one_round) for one_round in plan]
    if row["order"] == "pairs swapped":
        return [[sorted(pair, reverse=True) for pair in one_round] for one_round in plan]
    return [sorted((sorted(pair) for pair in one_round), reverse=True) for one_round in plan]


def has_order(row: Row) -> bool:
    """Only rounds with pairs have an order, and only one with several pairs can be shuffled."""
    order, rounds, left = (row.get(name) for name in ("order", "rounds", "heads left"))
    if order not in (None, "as the pool") and (rounds == "0" or left == "all"):
        return False
    return whole_pool(row) and not (order == "rounds shuffled" and rounds in ("1", "2") and left == "one")
