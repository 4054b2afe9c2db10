"""Rows of option values in which every pair of values of two options meets somewhere."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import combinations

from shd_ref.conformance.adapter import Missing

Row = dict[str, str]
Pair = tuple[tuple[str, str], ...]  # two options with one value each


def cover(options: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """A few rows, one value an option, that hold every pair of values of two options which is allowed at all.

    Greedy and without chance: a row starts with the first pair that is not covered, and takes for each other option
    the value that covers most of what is left.

    Args:
        options: the values of each option.
        allowed: whether a row, or a part of one, can be asked for.
    """
    left: dict[Pair, None] = dict.fromkeys(
        ((one, a), (other, b))
        for one, other in combinations(options, 2)
        for a in options[one]
        for b in options[other]
        if allowed({one: a, other: b})
    )
    rows: list[Row] = []
    while left:
        row: Row | None = None
        for pair in list(left):
            row = _extend(dict(pair), options, left, allowed)
            if row is not None:
                break
            del left[pair]  # no whole row can have it
        if row is None:
            break
        for pair in combinations(((name, row[name]) for name in options), 2):
            left.pop(pair, None)
        rows.append(row)
    return rows


def _extend(
    row: Row,
    options: Mapping[str, Sequence[str]],
    left: Container[Pair],
    allowed: Callable[[Row], bool],
) -> Row | None:
    order = list(options)
    for name in order:
        if name in row:
            continue
        best, gain = None, -1
        for value in options[name]:
            if not allowed({**row, name: value}):
                continue
            found = 0
            for other, chosen in row.items():
                pair = ((name, value), (other, chosen))
                found += (pair if order.index(name) < order.index(other) else pair[::-1]) in left
            if found > gain:
                best, gain = value, found
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
