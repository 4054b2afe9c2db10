"""Layers, merges and moments that the cases of ``specs/shrink.md`` share, and a book of wide dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from book import Book, Given, array, numbers
from exact import Nested, multiply, transpose

WIDE = ("float64", "float32")
PRODUCT = {"rule": "close", "quantity": "product"}
FACTOR = {"rule": "close", "quantity": "factor"}
EXACT = {"rule": "exact"}
WIDTH, DIM = 4, 2


class WideBook(Book):
    """Cases that run at float64 and float32: the closed forms are not computed in half precision (STUDENT-5)."""

    def valid(self, name: str, comment: str, spec: str, flags: str = "", **more: Any) -> None:
        """As of a book; a case may name fewer dtypes."""
        super().valid(name, comment, spec, flags, **{"dtypes": WIDE, **more})

    def invalid(self, name: str, comment: str, spec: str, code: str, **more: Any) -> None:
        """As of a book."""
        super().invalid(name, comment, spec, code, **{"dtypes": WIDE, **more})


def layer(heads: int, kv_heads: int, seed: int, biases: str = "", dim: int = DIM, **fields: Any) -> dict[str, Any]:
    """A layer of attention; ``biases`` holds the first letters of those that it has."""
    drawn = {
        "query": numbers([heads, WIDTH, dim], seed, -8, 8, 2),
        "key": numbers([kv_heads, WIDTH, dim], seed + 1, -8, 8, 2),
        "value": numbers([kv_heads, WIDTH, dim], seed + 2, -8, 8, 2),
        "output": numbers([heads, dim, WIDTH], seed + 3, -8, 8, 2),
    }
    shapes = {"query": [heads, dim], "key": [kv_heads, dim], "value": [kv_heads, dim], "output": [WIDTH]}
    for number, (name, shape) in enumerate(shapes.items()):
        if name[0] in biases:
            drawn[f"{name}_bias"] = numbers(shape, seed + 4 + number, -8, 8, 2)
    return {**drawn, **fields}


def merge(groups: Sequence[Sequence[int]], *rows: Sequence[float]) -> dict[str, Any]:
    """A record of C and groups; rows hold the weights of the group's members, in the group's order."""
    heads = sum(map(len, groups))
    mixing = [[Fraction(0)] * heads for _ in groups]
    for h, (group, row) in enumerate(zip(groups, rows, strict=True)):
        for t, weight in zip(group, row, strict=True):
            mixing[h][t] = Fraction(weight)
    return {"mixing": array(mixing), "groups": [list(group) for group in groups]}


def moments(seed: int, rows: int = 12) -> tuple[Given, Given]:
    """The moment of ``[x, 1]`` and that of x less its mean, over rows that are drawn."""
    drawn = numbers([rows, WIDTH], seed, -12, 16, 2).value
    mean = [sum((row[i] for row in drawn), Fraction(0)) / rows for i in range(WIDTH)]
    mean = [Fraction(round(x * 16), 16) for x in mean]  # the moment of a sample's rows about nearly their mean
    return array(_moment([[*row, Fraction(1)] for row in drawn])), array(
        _moment([[x - m for x, m in zip(row, mean, strict=True)] for row in drawn])
    )


def _moment(rows: Nested) -> Nested:
    """Rounded to a grid, so that any number of rows gives few bits; the ridge lets any symmetric one pass."""
    return [[Fraction(round(x / len(rows) * 64), 64) for x in row] for row in multiply(transpose(rows), rows)]
