"""Cases of chapter GRAM."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import oracle_loss as loss
from book import Book, Given, array, book_of, lengths, numbers, probs
from exact import Nested, flatten, shape_of, unflatten

from cases.maps import bad_maps

CLOSE = {"rule": "close", "quantity": "probs"}


def gram_tensor() -> Book:
    """GRAM-1, GRAM-6."""
    book = book_of(loss.gram_tensor, "gram", CLOSE)
    maps = probs([2, 3, 2, 4], 91, 9, 2, 6)
    values, projection = numbers([2, 3, 4, 2], 92, -8, 8, 1), numbers([6, 3], 93, -8, 8, 2)
    good: dict[str, Any] = {"teacher_probs": maps, "values": values, "output_projection": projection}
    book.valid("three-heads", "all inner products of three heads", "GRAM-1", "gram-axes projection-slices", at=96,
        **good)  # fmt: skip
    book.valid("grouped", "four query heads read two value heads", "GRAM-1 GRAM-6 MAP-6", "gqa-interleaved gram-axes",
        at=96, teacher_probs=probs([1, 4, 2, 3], 94, 9, 2, 6), values=numbers([1, 2, 3, 2], 95, -8, 8, 1),
        output_projection=numbers([8, 3], 96, -8, 8, 2))  # fmt: skip
    book.valid("padded-rows", "rows that do not count enter no sum", "GRAM-1 ALPHA-7",
        "alpha-padded-rows mask-polarity", at=96, **{**good, "query_mask": lengths(2, [1, 2])})  # fmt: skip
    book.valid("per-row", "one tensor a row, 0 where it does not count", "GRAM-1",
        "alpha-padded-rows alpha-per-ignored", at=96,
        **{**good, "query_mask": lengths(2, [1, 2]), "alpha_per": "row"})  # fmt: skip
    book.valid("sinks", "maps as they are", "GRAM-1 MIX-17", "sink-filled",
        teacher_probs=array([[[[0.5, 0.25]], [[0.125, 0.5]]]]), values=array([[[[1], [2]], [[3], [-1]]]]),
        output_projection=array([[1, 2], [0.5, -1]]), row_sums="at_most_one")  # fmt: skip
    shape = "argument-shape"
    for name, change in (
        ("rows-of-the-projection", {"output_projection": numbers([8, 3], 93, -8, 8, 2)}),
        ("value-heads", {"values": numbers([2, 2, 4, 2], 92, -8, 8, 1)}),
        ("keys", {"values": numbers([2, 3, 3, 2], 92, -8, 8, 1)}),
        ("samples", {"values": numbers([1, 3, 4, 2], 92, -8, 8, 1)}),
        ("axes", {"teacher_probs": probs([2, 2, 4], 91, 9, 2, 6)}),
    ):
        book.invalid(name, "maps, values and projection must fit", "GRAM-6", shape, **{**good, **change})
    for name, spec, change in (
        ("alpha-per-unknown", "ALPHA-9", {"alpha_per": "head"}),
        ("row-sums-unknown", "MAP-9", {"row_sums": "many"}),
    ):
        book.invalid(name, "not in its list", spec, "argument-value", **{**good, **change})
    book.invalid("mask-of-integers", "query_mask must be boolean", "MAP-7", "argument-dtype", flags="mask-dtype",
        **{**good, "query_mask": array([[1, 1]] * 2, "int64")})  # fmt: skip
    for name, argument, given in (
        ("values-nan", "values", array([[[["nan", 1], [2, 1], [0, 1]]], [[[1, 1], [2, 1], [0, 1]]]])),
        ("projection-nan", "output_projection", array([[1, "nan"], [2, 1], [0, 1], [3, 1]])),
    ):
        book.invalid(name, "all arrays are finite", "MAP-5", "not-finite", **{**good, argument: given})
    bad_maps(
        book,
        "teacher_probs",
        {"values": numbers([1, 1, 3, 2], 97, -8, 8, 1), "output_projection": numbers([2, 2], 98, -8, 8, 1)},
    )
    return book


def solve_alpha_from_gram() -> Book:
    """GRAM-2, GRAM-3, GRAM-6, GRAM-7."""
    book = book_of(loss.solve_alpha_from_gram, "alpha", {"rule": "close", "quantity": "alpha"})
    formula = "alpha-swapped alpha-other-numerator gram-axes"
    hand = small_gram([[[1, 0]], [[0, 1]], [[0.5, 0.5]]], [[[1], [0]], [[3], [0]], [[2], [1]]])
    for p, q in ((0, 1), (1, 0), (0, 2), (2, 1)):
        book.valid(f"heads-{p}-{q}", f"alpha of heads {p} and {q} of three", "GRAM-2 GRAM-5", formula, gram=hand, p=p,
            q=q)  # fmt: skip
    book.valid("clipped", "outside [0, 1] before the clip", "GRAM-2", "alpha-unclipped",
        gram=small_gram([[[1, 0]], [[0, 1]]], [[[2], [0]], [[0], [1]]]), p=0, q=1)  # fmt: skip
    book.valid("degenerate", "equal maps", "GRAM-3", "degenerate-value degenerate-nan",
        gram=small_gram([[[1, 0]], [[1, 0]]], [[[2], [0]], [[0], [1]]]), p=0, q=1)  # fmt: skip
    book.valid("degenerate-outputs", "X_p + X_q has equal rows", "GRAM-3", "degenerate-value degenerate-nan",
        gram=small_gram([[[1, 0]], [[0, 1]]], [[[2], [-1]], [[1], [4]]]), p=0, q=1)  # fmt: skip
    book.valid("empty", "a gram tensor of zeros: no counted row", "GRAM-3", "degenerate-value degenerate-nan",
        gram=numbers([2, 2, 2, 2, 2], 1, 0, 0, 0), p=1, q=0)  # fmt: skip
    by_row = small_gram(
        [[[1, 0], [0.5, 0.5], [1, 0]], [[0, 1], [0.5, 0.5], [0.25, 0.75]]], [[[1], [0]], [[3], [1]]], per_row=True
    )
    book.valid("per-row", "one alpha a row; the second is degenerate", "GRAM-2 GRAM-3", "alpha-per-ignored",
        gram=by_row, p=0, q=1)  # fmt: skip
    cancelled = pool_of_two([[1, -2], [-2, 1]], [[1, -2], [-2, 1]])
    for name, comment, gram in (
        ("scale-below-zero", "equal maps, and outputs that cancel but for a rounding: 0 over 0", array([cancelled])),
        (
            "scale-below-zero-per-row",
            "one row of outputs that cancel but for a rounding, one of others",
            array([beside(cancelled, pool_of_two([[2, 0], [0, 1]], [[0, 0], [0, 0]]))]),
        ),
        (
            "denominator-below-zero",
            "a rounding below 0, and yet above DEGENERATE times the sum beside it",
            array([pool_of_two([[0, -(2**15)], [-(2**15), -(2**15)]], [[2**-17, -(2**15)], [-(2**15), -(2**15)]])]),
        ),
        (
            "denominator-above-zero",
            "the sum beside the denominator is below 0: a quotient all the same",
            array([pool_of_two([[-1, -1], [-1, -1]], [[-1, -2], [-2, -3]])]),
        ),
    ):
        book.valid(name, comment, "GRAM-3 GRAM-7", "degenerate-value degenerate-nan", gram=gram, p=0, q=1)
    for name, p, q in (("same", 1, 1), ("outside", 0, 3), ("negative", -1, 0)):
        book.invalid(f"positions-{name}", "two different positions in the pool", "GRAM-6", "argument-value",
            gram=hand, p=p, q=q)  # fmt: skip
    for name, gram in (
        ("uneven", numbers([1, 3, 3, 3, 2], 105, -8, 8, 1)),
        ("axes", numbers([3, 3, 3, 3], 105, -8, 8, 1)),
    ):
        book.invalid(f"gram-{name}", "gram is (B, H, H, H, H), or with a last axis L", "GRAM-6", "argument-shape",
            gram=gram, p=0, q=1)  # fmt: skip
    book.invalid("gram-nan", "NaN in the gram tensor", "MAP-5", "not-finite", gram=array(_with_nan(hand)), p=0, q=1)
    return book


def merge_gram() -> Book:
    """GRAM-4, GRAM-6."""
    book = book_of(loss.merge_gram, "gram", CLOSE)
    flags = "gram-outputs-mixed gram-axes alpha-swapped"
    three = small_gram([[[1, 0]], [[0, 1]], [[0.5, 0.5]]], [[[1], [0]], [[3], [0]], [[2], [1]]])
    for p, q in ((0, 1), (1, 2), (2, 0)):
        book.valid(f"heads-{p}-{q}", f"heads {p} and {q} of three become the first of two", "GRAM-4",
            f"{flags} pool-in-place pool-untouched-first", gram=three, p=p, q=q, alpha=array([0.25]))  # fmt: skip
    two = small_gram([[[1, 0]], [[0, 1]]], [[[1], [0]], [[3], [0]]])
    book.valid("to-one", "two heads become one", "GRAM-4", flags, gram=two, p=0, q=1, alpha=array([0.25]))
    book.case(
        "two-samples: every sample has its alpha",
        f"GRAM-4 {flags} alpha-batch-shared",
        **{"gram": numbers([2, 2, 2, 2, 2], 99, -32, 32, 2), "p": 1, "q": 0, "alpha": array([0.125, 0.75])},
    )
    book.case(
        "per-row: every row has its alpha",
        f"GRAM-4 {flags} alpha-per-ignored",
        **{"gram": numbers([1, 3, 3, 3, 3, 2], 100, -32, 32, 2), "p": 0, "q": 1, "alpha": array([[0.125, 1]])},
    )
    for name, p, q in (("same", 0, 0), ("outside", 0, 3), ("negative", -1, 0)):
        book.invalid(f"positions-{name}", "two different positions in the pool", "GRAM-6", "argument-value",
            gram=three, p=p, q=q, alpha=array([0.25]))  # fmt: skip
    for name, gram in (
        ("uneven", numbers([1, 3, 3, 3, 2], 105, -8, 8, 1)),
        ("axes", numbers([3, 3, 3, 3], 105, -8, 8, 1)),
    ):
        book.invalid(f"gram-{name}", "gram is (B, H, H, H, H), or with a last axis L", "GRAM-6", "argument-shape",
            gram=gram, p=0, q=1, alpha=array([0.25]))  # fmt: skip
    for name, weight in (("above-one", 1.25), ("below-zero", -0.25)):
        book.invalid(f"alpha-{name}", "alpha lies in [0, 1]", "GRAM-6", "mixing-invalid", gram=three, p=0, q=1,
            alpha=array([weight]))  # fmt: skip
    book.invalid("gram-nan", "NaN in the gram tensor", "MAP-5", "not-finite", gram=array(_with_nan(three)), p=0, q=1,
        alpha=array([0.25]))  # fmt: skip
    book.invalid("alpha-nan", "NaN in alpha", "MAP-5", "not-finite", gram=three, p=0, q=1, alpha=array(["nan"]))
    for name, alpha in (("samples", array([0.25, 0.5])), ("axes", array([[[0.25]]]))):
        book.invalid(f"alpha-{name}", "alpha is (B), or (B, L) per row", "GRAM-6", "argument-shape", gram=three, p=0,
            q=1, alpha=alpha)  # fmt: skip
    return book


def _with_nan(gram: Given) -> Nested:
    """The same numbers, but for the last."""
    *before, _ = flatten(gram.value)
    return unflatten([*before, "nan"], shape_of(gram.value))


def small_gram(maps: Nested, outputs: Nested, *, per_row: bool = False) -> Given:
    """The gram tensor of one sample from its maps and value outputs, as an input."""
    width = len(outputs[0][0])
    exact_maps, exact_outputs = array([maps]).value, array([outputs]).value
    # With d_v = D and a projection of stacked identities, values are value outputs.
    eye = [[Fraction(int(r % width == c)) for c in range(width)] for r in range(width * len(maps))]
    gram = loss.gram_tensor(exact_maps, exact_outputs, eye, alpha_per="row" if per_row else "map")
    return array(gram)


def pool_of_two(same: Nested, cross: Nested) -> Nested:
    """A gram tensor of two heads: its entries where both maps are one head's, and where they are not."""
    return [[[[(same if i == k else cross)[j][m] for m in (0, 1)] for k in (0, 1)] for j in (0, 1)] for i in (0, 1)]


def beside(first: Nested, second: Nested) -> Nested:
    """Two gram tensors as the rows of one."""
    if not isinstance(first, list):
        return [first, second]
    return [beside(a, b) for a, b in zip(first, second, strict=True)]


BOOKS = (gram_tensor, solve_alpha_from_gram, merge_gram)
