"""Arithmetic of the oracle: fractions where a result is rational, decimals of 60 digits where it is not.

Arrays are nested lists of ``Fraction``, of ``Decimal`` or of booleans, in the order of axes of the specification.
The only number that is neither is ``MINUS_INFINITY``, a masked logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, getcontext
from fractions import Fraction
from math import lcm
from operator import mul
from typing import Any

getcontext().prec = 60

Number = Any  # Fraction or Decimal: what a formula is given, it gives back
Nested = Any  # nested lists of numbers

MINUS_INFINITY = float("-inf")
INFINITY = float("inf")
HALF = Fraction(1, 2)


def decimal(value: Number | int) -> Decimal:
    """The number as a decimal of 60 digits."""
    if isinstance(value, Decimal):
        return value
    exact = Fraction(value)
    return Decimal(exact.numerator) / Decimal(exact.denominator)


def square_root(value: Number) -> Decimal:
    """The root of a number of at least 0."""
    return decimal(value).sqrt()


def map_numbers(function: Callable[[Any], Any], nested: Nested) -> Nested:
    """The function at every entry."""
    if isinstance(nested, list):
        return [map_numbers(function, item) for item in nested]
    return function(nested)


def shape_of(nested: Nested) -> list[int]:
    """The sizes of the axes."""
    shape = []
    while isinstance(nested, list):
        shape.append(len(nested))
        nested = nested[0] if nested else None
    return shape


def flatten(nested: Nested) -> Iterator[Any]:
    """All entries, the last axis fastest."""
    if isinstance(nested, list):
        for item in nested:
            yield from flatten(item)
    else:
        yield nested


def unflatten(flat: Sequence[Any], shape: Sequence[int]) -> Nested:
    """Nested lists of this shape from its entries, the last axis fastest."""
    if not shape:
        return flat[0]
    size = len(flat) // shape[0] if shape[0] else 0
    return [unflatten(flat[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def zeros(shape: Sequence[int]) -> Nested:
    """Nested lists of exact zeros."""
    if not shape:
        return Fraction(0)
    return [zeros(shape[1:]) for _ in range(shape[0])]


def broadcast(nested: Nested, shape: Sequence[int]) -> Nested:
    """Axes aligned with the last ones; a missing leading axis or one of size 1 stands for all positions (MAP-10)."""
    for _ in range(len(shape) - len(shape_of(nested))):
        nested = [nested]
    return _spread(nested, shape)


def _spread(nested: Nested, shape: Sequence[int]) -> Nested:
    if not shape:
        return nested
    items = nested * shape[0] if len(nested) == 1 else nested
    assert len(items) == shape[0], "the mask does not broadcast"
    return [_spread(item, shape[1:]) for item in items]


def stack_last(entries: Sequence[Nested]) -> Nested:
    """Nested lists of one shape, side by side along a new last axis."""
    if not isinstance(entries[0], list):
        return list(entries)
    return [stack_last(column) for column in zip(*entries, strict=True)]


def dot(left: Sequence[Number], right: Sequence[Number]) -> Number:
    """The sum of the products; of fractions it is brought to lowest terms once, at the end."""
    if all(type(x) is Fraction for x in (*left, *right)):
        above, below = 0, 1
        for a, b in zip(left, right, strict=True):
            over, under = a.numerator * b.numerator, a.denominator * b.denominator
            above, below = (above + over, below) if under == below else (above * under + over * below, below * under)
        return Fraction(above, below)
    total = 0 * left[0] * right[0]
    for a, b in zip(left, right, strict=True):
        if a and b:
            total += a * b
    return total


def multiply(left: Nested, right: Nested) -> Nested:
    """The matrix product; of fractions by way of integers over common denominators, which is as exact and faster."""
    columns = [list(column) for column in zip(*right, strict=True)]
    if not isinstance(left[0][0], Fraction) or not isinstance(right[0][0], Fraction):
        return [[dot(row, column) for column in columns] for row in left]
    rows, below_rows = over_common_denominator(left)
    columns, below_columns = over_common_denominator(columns)
    below = below_rows * below_columns
    return [[Fraction(sum(map(mul, row, column)), below) for column in columns] for row in rows]


def over_common_denominator(matrix: Nested) -> tuple[list[list[int]], int]:
    """The matrix as integers, and what each is to be divided by."""
    below = lcm(*(x.denominator for row in matrix for x in row))
    return [[x.numerator * (below // x.denominator) for x in row] for row in matrix], below


def combine(a: Number, left: Nested, b: Number, right: Nested) -> Nested:
    """``a left + b right``, entry by entry."""
    if isinstance(left, list):
        return [combine(a, x, b, y) for x, y in zip(left, right, strict=True)]
    return a * left + b * right


def add(left: Nested, right: Nested) -> Nested:
    """The sum, entry by entry."""
    return combine(1, left, 1, right)


def subtract(left: Nested, right: Nested) -> Nested:
    """The difference, entry by entry."""
    return combine(1, left, -1, right)


def solve_linear(matrix: list[list[Fraction]], right: list[Fraction]) -> list[Fraction] | None:
    """The solution of a square system in exact fractions; None where the matrix is singular.

    Elimination multiplies crosswise on integers. Division by the pivot before leaves no remainder (Bareiss 1968).
    """
    size = len(matrix)
    rows, _ = over_common_denominator([[*row, value] for row, value in zip(matrix, right, strict=True)])
    before = 1
    for column in range(size):
        pivot = next((r for r in range(column, size) if rows[r][column] != 0), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        head = rows[column][column]
        for r in range(size):
            if r != column:
                factor = rows[r][column]
                rows[r] = [(head * x - factor * y) // before for x, y in zip(rows[r], rows[column], strict=True)]
        before = head
    return [Fraction(row[size], row[i]) for i, row in enumerate(rows)]
