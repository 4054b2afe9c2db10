"""Rows of option values in which every two values of two options meet somewhere, or every three of three."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import combinations, product

from shd_ref.conformance.adapter import Missing

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
            found = 0
            for others in combinations(row.items(), strength - 1):
                meeting = tuple(sorted(((name, value), *others), key=lambda item: order.index(item[0])))
                found += meeting in left
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
