"""Covering arrays: rows in which every two or three option values meet, and the arrays that a row asks for."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import combinations, product

import numpy as np

from shd_ref.conformance.adapter import Missing
from shd_ref.conformance.compare import Difference
from shd_ref.conformance.laws.law import Array, Law, LawBrokenError, Trial, law

Row = dict[str, str]
Meeting = tuple[tuple[str, str], ...]  # some options, in order, with one value each


def cover(
    options: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool] = lambda row: True, *, strength: int = 2
) -> list[Row]:
    """A few rows, one value an option, that hold every meeting of values which is allowed at all.

    Greedy and without chance: a row starts with the first meeting that is not covered, and takes for each other
    option the value that covers most of what is left.

    Args:
        options: the values of each option.
        allowed: whether a row, or a part of one, can be asked for.
        strength: how many options meet: 2 for every pair of values, 3 for every three.
    """
    left: dict[Meeting, None] = dict.fromkeys(
        meeting
        for names in combinations(options, strength)
        for values in product(*(options[name] for name in names))
        if allowed(dict(meeting := tuple(zip(names, values, strict=True))))
    )
    rows: list[Row] = []
    while left:
        row: Row | None = None
        for meeting in list(left):
            row = _extend(dict(meeting), options, left, allowed, strength)
            if row is not None:
                break
            del left[meeting]  # no whole row can have it
        if row is None:
            break
        for meeting in combinations(((name, row[name]) for name in options), strength):
            left.pop(meeting, None)
        rows.append(row)
    return rows


def _extend(
    row: Row,
    options: Mapping[str, Sequence[str]],
    left: Container[Meeting],
    allowed: Callable[[Row], bool],
    strength: int,
) -> Row | None:
    order = list(options)
    for name in order:
        if name in row:
            continue
        best, gain = None, -1
        for value in options[name]:
            if not allowed({**row, name: value}):
                continue
            count = 0
            for others in combinations(row.items(), strength - 1):
                meeting = tuple(sorted(((name, value), *others), key=lambda item: order.index(item[0])))
                count += meeting in left
            if count > gain:
                best, gain = value, count
        if best is None:
            return None
        row[name] = best
    return row


def each(rows: Sequence[Row], check: Callable[[int, Row], None]) -> None:
    """Check every row; those that ask for a missing option are left out, but not all of them may be.

    Raises:
        Missing: no row could be asked for.
    """
    missing: list[Missing] = []
    for number, row in enumerate(rows):
        try:
            check(number, row)
        except Missing as reason:
            missing.append(reason)
    if rows and len(missing) == len(rows):
        raise missing[0]


def words(row: Row) -> Iterator[str]:
    """A row for a report."""
    return (f"{name}: {value}" for name, value in row.items())


WIDE = ("float64", "float32")
PER = ("map", "row")
SINKS = ("one", "at_most_one")
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
ROUNDS = ("0", "1", "2", "3", "4 or more")
LEFT = ("all", "one", "several, evenly", "several, unevenly")
MASKS = ("none", "some rows", "an empty sample")
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


def row_mask(kind: str, batch: int, rows: int) -> Array | None:
    """A mask ``(B, L)``, another in every sample; of an empty sample the last."""
    if kind == "none":
        return None
    counts: Array = (np.arange(batch)[:, None] * 2 + np.arange(rows)[None, :]) % 3 != 0
    counts[:, -1] = True
    if kind == "an empty sample":
        counts[-1] = False
    return counts


def options_of(row: Row, defaults: Mapping[str, str]) -> dict[str, str]:
    """The arguments of a row that are words, those with the default left out every other time."""
    return {name: row[name] for name, value in defaults.items() if row[name] != value}


def broken_row(row: Row, difference: Difference, name: str = "") -> LawBrokenError:
    """The error for a row of options."""
    what = f"{name}: {difference.problem}; with {', '.join(words(row))}" if name else difference.problem
    return LawBrokenError(Difference(what, difference.expected, difference.got))


def say(row: Row) -> str:
    """The row of options in words."""
    return f"with {', '.join(words(row))}"


# Rounds with every order of pairs, by the number of rounds and of heads left.
def ordered(plan: list[list[list[int]]], order: str) -> list[list[list[int]]]:
    """The rounds with their pairs in another order."""
    if order == "as the pool":
        return [sorted(sorted(pair) for pair in one_round) for one_round in plan]
    if order == "pairs swapped":
        return [[sorted(pair, reverse=True) for pair in one_round] for one_round in plan]
    return [sorted((sorted(pair) for pair in one_round), reverse=True) for one_round in plan]


ORDERS = ("as the pool", "pairs swapped", "rounds shuffled")


def ordered_rows(**options: Sequence[str]) -> list[Row]:
    """Options with an order of pairs, where the rounds have more than one."""

    def allowed(row: Row) -> bool:
        shuffled = row.get("order") == "rounds shuffled"
        alone = row.get("rounds") == "1" and row.get("heads left") == "one"
        few = row.get("rounds") == "2" and row.get("heads left") == "one"
        if row.get("rounds") == "0" and row.get("order", "as the pool") != "as the pool":
            return False
        if row.get("heads left") == "all" and row.get("order", "as the pool") != "as the pool":
            return False
        return whole_pool(row) and not (shuffled and (alone or few))

    return cover({"order": ORDERS, **options}, allowed)


Statement = Callable[[Trial], None]


def pair_law(
    operation: str, spec: str, statement: Statement, *, name: str = "", dtypes: Sequence[str] | None = None
) -> Law:
    """The law of an operation's pairs of options."""
    comment = f"Any two options of {operation} do together what each does alone."
    extra = {"dtypes": tuple(dtypes)} if dtypes else {}
    operations = (operation, "squeeze_heads") if operation == "diagnose" else (operation,)
    called = name or operation.replace("_", "-")
    return law(f"pairs-{called}", operations, spec, comment, statement, **extra)
