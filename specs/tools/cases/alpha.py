"""Cases of chapter ALPHA."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import oracle_heads as heads
from book import Book, Given, array, book_of, lengths, mask, numbers, probs

from cases.maps import bad_maps

ALPHA = {"rule": "alpha"}


def solve_alpha() -> Book:
    """Chapter ALPHA."""
    book = book_of(heads.solve_alpha, "alpha", ALPHA, check_conditioning)
    formula = "alpha-misprinted alpha-swapped alpha-other-numerator alpha-opposite-sign"
    one, other = array([[[1, 0]]]), array([[[0, 1]]])

    def pair(p: Given, q: Given, x_p: Given, x_q: Given, **rest: Any) -> dict[str, Any]:
        return {"probs_p": p, "probs_q": q, "value_outputs_p": x_p, "value_outputs_q": x_q, **rest}

    book.valid("quarter", "u = 1, w = 3: 1/4", "ALPHA-2 ALPHA-11", formula,
        **pair(one, other, array([[[1], [0]]]), array([[[3], [0]]])))  # fmt: skip
    book.valid("three-quarters", "the same with the heads swapped: 1 - 1/4", "ALPHA-2 ALPHA-11", formula,
        **pair(other, one, array([[[3], [0]]]), array([[[1], [0]]])))  # fmt: skip
    book.valid("clipped-high", "u = 2, w = -1: a* = 2", "ALPHA-3 ALPHA-10", "alpha-unclipped",
        **pair(one, other, array([[[2], [0]]]), array([[[0], [1]]])))  # fmt: skip
    book.valid("clipped-low", "u = -1, w = 2: a* = -1", "ALPHA-3 ALPHA-10", "alpha-unclipped",
        **pair(one, other, array([[[0], [1]]]), array([[[2], [0]]])))  # fmt: skip
    book.valid("clipped-slightly", "u = 16, w = -1: a* = 16/15", "ALPHA-3", "alpha-unclipped",
        **pair(one, other, array([[[16], [0]]]), array([[[0], [1]]])))  # fmt: skip
    book.valid("exactly-one", "head q is worth nothing: 1", "ALPHA-2", "alpha-swapped",
        **pair(one, other, array([[[1], [4]]]), array([[[0], [0]]])))  # fmt: skip
    book.valid("exactly-zero", "head p is worth nothing: 0", "ALPHA-2", "alpha-swapped",
        **pair(one, other, array([[[0], [0]]]), array([[[1], [4]]])))  # fmt: skip
    two_maps = probs([2, 3, 4], 41, 9, 2, 6), probs([2, 3, 4], 42, 9, 2, 6)
    two_outputs = numbers([2, 4, 3], 43, -8, 16, 2), numbers([2, 4, 3], 49, -8, 16, 2)
    book.valid("two-samples", "one alpha a sample", "ALPHA-2 ALPHA-8", f"{formula} alpha-batch-shared",
        **pair(*two_maps, *two_outputs))  # fmt: skip
    book.valid("two-samples-swapped", "the heads of the case two-samples swapped: 1 - a", "ALPHA-2 ALPHA-11",
        f"{formula} alpha-batch-shared", **pair(*reversed(two_maps), *reversed(two_outputs)))  # fmt: skip
    bias = array([[[Fraction(x) + 8 for x in row] for row in sample] for sample in two_outputs[0].value])
    book.valid("value-bias", "the case two-samples with 8 added to every entry of X_p: the same alphas", "ALPHA-2",
        formula, **pair(*two_maps, bias, two_outputs[1]))  # fmt: skip
    book.valid("padded-rows", "rows past the lengths 2 and 5 enter no sum", "ALPHA-7",
        "alpha-padded-rows mask-polarity",
        **pair(probs([2, 5, 4], 45, 9, 2, 6), probs([2, 5, 4], 46, 9, 2, 6), numbers([2, 4, 2], 47, -8, 16, 2),
        numbers([2, 4, 2], 48, -8, 16, 2), query_mask=lengths(5, [2, 5])))  # fmt: skip
    book.valid("uncounted-row-sums", "a row that does not count need not sum to one", "MAP-3 ALPHA-7",
        "alpha-padded-rows",
        **pair(array([[[0.5, 0.25], [0.75, 0.25]]]), array([[[0, 0.75], [0.25, 0.75]]]),
        array([[[1, 2], [3, -1]]]), array([[[2, 0], [-1, 1]]]), query_mask=mask([[0, 1]])))  # fmt: skip
    book.valid("sample-without-rows", "a sample with no counted row is degenerate; the other is not",
        "ALPHA-7 ALPHA-6", "alpha-padded-rows degenerate-value degenerate-nan",
        **pair(*two_maps, *two_outputs, query_mask=lengths(3, [0, 3])))  # fmt: skip
    book.valid("equal-maps", "equal maps: every a is as good", "ALPHA-6 ALPHA-10", "degenerate-value degenerate-nan",
        **pair(one, one, array([[[2], [0]]]), array([[[0], [1]]])))  # fmt: skip
    book.valid("constant-outputs", "the maps differ, X_p + X_q has equal rows: M = 0", "ALPHA-6",
        "degenerate-value degenerate-nan degenerate-by-maps",
        **pair(one, other, array([[[2], [-1]]]), array([[[1], [4]]])))  # fmt: skip
    book.valid("no-outputs", "value outputs of zero: 0 <= 0", "ALPHA-6", "degenerate-value degenerate-nan",
        **pair(one, other, array([[[0], [0]]]), array([[[0], [0]]])))  # fmt: skip
    book.valid("zero-maps", "fully masked rows alone", "ALPHA-6 MAP-3", "degenerate-value degenerate-nan",
        **pair(array([[[0, 0]]]), array([[[0, 0]]]), array([[[2], [1]]]), array([[[0], [1]]])))  # fmt: skip
    book.valid("differ-on-padding-alone", "the maps differ only in a row that does not count", "ALPHA-6 ALPHA-7",
        "alpha-padded-rows degenerate-value",
        **pair(array([[[0.5, 0.5], [1, 0]]]), array([[[0.5, 0.5], [0, 1]]]), array([[[2], [0]]]),
        array([[[3], [1]]]), query_mask=mask([[1, 0]])))  # fmt: skip
    book.valid("masked-rows", "a fully masked row among others; in the second sample in one head alone",
        "MAP-3 ALPHA-2", "masked-row-nan",
        **pair(array([[[0, 0], [0.75, 0.25]], [[0, 0], [0.5, 0.5]]]),
        array([[[0, 0], [0.125, 0.875]], [[1, 0], [0.25, 0.75]]]), array([[[1, 2], [3, -1]], [[1, 1], [2, 0]]]),
        array([[[2, 0], [-1, 1]], [[0, 1], [1, 0.5]]])))  # fmt: skip
    book.valid("as-printed", "the printed rule by name, on the inputs of two-samples", "ALPHA-4",
        "alpha-rule-ignored alpha-unclipped", **pair(*two_maps, *two_outputs, rule="as_printed"))  # fmt: skip
    book.valid("as-printed-interior", "the printed rule inside [0, 1]: N = 0*1 - 1*(-1/2)", "ALPHA-4",
        "alpha-rule-ignored",
        **pair(one, other, array([[[-1], [0]]]), array([[[0], [0.5]]]), rule="as_printed"))  # fmt: skip
    rows = (
        probs([2, 5, 4], 51, 9, 2, 6),
        probs([2, 5, 4], 52, 9, 2, 6),
        numbers([2, 4, 3], 53, -8, 16, 2),
        numbers([2, 4, 3], 54, -8, 16, 2),
    )
    book.valid("per-row", "one alpha a row", "ALPHA-9", "alpha-per-ignored alpha-unclipped",
        **pair(*rows, alpha_per="row"))  # fmt: skip
    book.valid("per-row-padded", "rows that do not count get 1/2", "ALPHA-9 ALPHA-7",
        "alpha-padded-rows alpha-per-ignored",
        **pair(*rows, alpha_per="row", query_mask=lengths(5, [3, 4])))  # fmt: skip
    book.valid("per-row-degenerate", "degenerate row by row: an equal row, a zero row, an ordinary row",
        "ALPHA-9 ALPHA-6", "degenerate-value degenerate-nan alpha-per-ignored",
        **pair(array([[[0.5, 0.5], [0, 0], [1, 0]]]), array([[[0.5, 0.5], [0, 0], [0, 1]]]),
        array([[[1], [0]]]), array([[[3], [0]]]), alpha_per="row"))  # fmt: skip
    book.valid("per-row-as-printed", "the printed rule row by row", "ALPHA-9 ALPHA-4",
        "alpha-rule-ignored alpha-per-ignored", **pair(*rows, alpha_per="row", rule="as_printed"))  # fmt: skip
    book.valid("sinks", "rows of different mass are used as they are", "MIX-17 MAP-9", "sink-filled",
        **pair(array([[[0.5, 0.125], [0.25, 0.25]]]), array([[[0.125, 0.25], [0.5, 0.5]]]),
        array([[[1, 2], [3, -1]]]), array([[[2, 0], [-1, 1]]]), row_sums="at_most_one"))  # fmt: skip
    book.valid("sinks-value-bias", "where rows differ in mass alone, what is constant over keys counts",
        "MIX-17 ALPHA-2", "sink-filled alpha-misprinted",
        **pair(array([[[0.25, 0.25]]]), array([[[0.5, 0.5]]]), array([[[1], [1]]]), array([[[3], [3]]]),
        row_sums="at_most_one"))  # fmt: skip
    book.valid("causal", "causal maps", "ALPHA-2", formula,
        **pair(probs([1, 6, 6], 55, 9, 1, 6, causal=True), probs([1, 6, 6], 56, 9, 1, 6, causal=True),
        numbers([1, 6, 3], 57, -16, 32, 2), numbers([1, 6, 3], 58, -16, 32, 2)))  # fmt: skip
    for name, shape, seed in (("wide", (2, 9, 1), 61), ("tall", (9, 2, 4), 71)):
        length, keys, width = shape
        book.case(
            f"{name}: L = {length}, S = {keys}, D = {width}",
            f"ALPHA-1 ALPHA-2 {formula} ugly-shape",
            **pair(
                probs([3, length, keys], seed, 9, 2, 6),
                probs([3, length, keys], seed + 1, 9, 2, 6),
                numbers([3, keys, width], seed + 2, -8, 24, 2),
                numbers([3, keys, width], seed + 3, -8, 24, 2),
            ),
        )
    big = (probs([1, 63, 65], 81, 6, 2, 8), probs([1, 63, 65], 82, 6, 2, 8))
    book.valid("long-sums",
        "63 queries, 65 keys, D = 5, outputs up to 255: the sums of squares leave the range of float16",
        "ALPHA-8 NUM-1", "half-accumulation ugly-shape",
        **pair(*big, numbers([1, 65, 5], 83, -255, 255, 0), numbers([1, 65, 5], 84, -128, 255, 0)))  # fmt: skip
    book.valid("small-outputs",
        "outputs near 2^-12: their squares are below what float16 holds, and nothing is degenerate",
        "ALPHA-8 NUM-1 ALPHA-6", "half-accumulation degenerate-absolute",
        **pair(probs([1, 4, 3], 85, 9, 2, 6), probs([1, 4, 3], 86, 9, 2, 6),
        numbers([1, 3, 2], 87, -8, 24, 15), numbers([1, 3, 2], 88, -8, 24, 15)))  # fmt: skip
    small = Fraction(1, 256)
    near = (array([[[1 - small, small, 0]]]), array([[[1 - small, 0, small]]]))
    book.valid("near-degenerate",
        "the maps differ by 1/256 where little is read: ||M||^2 is 5e-10 of the scale, alpha hardly matters",
        "ALPHA-6 NUM-5", "near-degenerate",
        **pair(*near, array([[[64], [1], [0]]]), array([[[64], [0], [0]]])))  # fmt: skip
    book.valid("near-degenerate-inside", "the same with half the output: ||M||^2 is 3e-11 of the scale",
        "ALPHA-6 NUM-5", "near-degenerate",
        **pair(*near, array([[[96], [0.25], [0]]]), array([[[96], [0.125], [0]]])))  # fmt: skip
    _refused_by_solve_alpha(book, pair)
    return book


def check_conditioning(
    given: dict[str, Any], answer: dict[str, Any], flags: Sequence[str], rules: dict[str, Any]
) -> None:
    """Outside cases flagged near-degenerate no pair may be near the threshold of ALPHA-6."""
    if "near-degenerate" in flags:
        return
    for b in range(len(given["probs_p"])):
        masks = given.get("query_mask")
        for sums in heads.pair_sums(
            given["probs_p"][b],
            given["probs_q"][b],
            given["value_outputs_p"][b],
            given["value_outputs_q"][b],
            masks[b] if masks else None,
            rule=given.get("rule", "least_squares"),
            per=given.get("alpha_per", "map"),
        ):
            assert sums.bottom == 0 or sums.bottom > 10**5 * heads.DEGENERATE * sums.scale, "too near to degenerate"


def _refused_by_solve_alpha(book: Book, pair: Any) -> None:
    p, q = array([[[0.5, 0.5, 0]] * 2]), array([[[0.25, 0.75, 0]] * 2])
    x, y = array([[[1, 2], [3, 4], [5, 6]]]), array([[[2, 1], [0, 4], [1, 1]]])
    good = pair(p, q, x, y)
    shape = "argument-shape"
    for name, change in (
        ("maps-differ-in-rows", {"probs_q": array([[[0.25, 0.75, 0]]])}),
        ("maps-differ-in-keys", {"probs_q": array([[[0.25, 0.75]] * 2])}),
        ("maps-differ-in-samples", {"probs_q": array([[[0.25, 0.75, 0]] * 2] * 2)}),
        ("outputs-differ-in-keys", {"value_outputs_q": array([[[2, 1], [0, 4]]])}),
        ("outputs-differ-in-width", {"value_outputs_q": array([[[2], [0], [1]]])}),
        (
            "outputs-of-another-length",
            {"value_outputs_p": array([[[1, 2]] * 4]), "value_outputs_q": array([[[1, 2]] * 4])},
        ),
        ("outputs-differ-in-samples", {"value_outputs_p": array([[[1, 2]] * 3] * 2)}),
        ("maps-of-two-axes", {"probs_p": array([[0.5, 0.5, 0]] * 2), "probs_q": array([[0.5, 0.5, 0]] * 2)}),
        ("maps-of-four-axes", {"probs_p": array([[[[0.5, 0.5, 0]] * 2]]), "probs_q": array([[[[0.5, 0.5, 0]] * 2]])}),
        ("outputs-of-two-axes", {"value_outputs_p": array([[1, 2]] * 3)}),
    ):
        book.invalid(name, "maps (B, L, S) and outputs (B, S, D) must fit", "ALPHA-1", shape, **{**good, **change})
    for name, query_mask in (("keys", lengths(3, [2])), ("samples", lengths(2, [2, 2])), ("axis", mask([1, 1]))):
        book.invalid(f"mask-{name}", "query_mask is (B, L)", "MAP-7", shape, **{**good, "query_mask": query_mask})
    for name, query_mask in (("integers", array([[1, 0]], "int64")), ("numbers", array([[1, 0]]))):
        book.invalid(f"mask-of-{name}", "query_mask must be boolean", "MAP-7", "argument-dtype", flags="mask-dtype",
            **{**good, "query_mask": query_mask})  # fmt: skip
    for name, spec, change in (
        ("rule-unknown", "ALPHA-4", {"rule": "printed"}),
        ("alpha-per-unknown", "ALPHA-9", {"alpha_per": "head"}),
        ("row-sums-unknown", "MAP-9", {"row_sums": "many"}),
    ):
        book.invalid(name, "not in its list", spec, "argument-value", **{**good, **change})
    for name, change in (
        ("complex", {"value_outputs_p": array([[[1, 2]] * 3], "complex128")}),
        ("boolean-map", {"probs_p": mask([[[1, 0, 0]] * 2])}),
    ):
        book.invalid(name, "arrays hold real numbers", "MAP-5", "argument-dtype", **{**good, **change})
    for name, change in (
        ("outputs-nan", {"value_outputs_q": array([[[2, 1], [0, "nan"], [1, 1]]])}),
        ("outputs-of-p-nan", {"value_outputs_p": array([[[2, 1], [0, "nan"], [1, 1]]])}),
        ("outputs-infinite", {"value_outputs_p": array([[[2, 1], [0, "-inf"], [1, 1]]])}),
        (
            "nan-in-an-uncounted-row",
            {"probs_p": array([[[0.5, 0.5, 0], [0.5, "nan", 0]]]), "query_mask": mask([[1, 0]])},
        ),
    ):
        book.invalid(name, "NaN and infinity, also where a row does not count", "MAP-5", "not-finite",
            **{**good, **change})  # fmt: skip
    book.valid(
        "sum-just-inside-float64",
        "a row that differs from one by less than float64's ROW_SUM is accepted and used as it is",
        "MAP-3",
        "row-sum-bound",
        dtypes=["float64", "float32"],
        **pair(array([[[0.5, 0.5, 2**-17], [1, 0, 0]]]), array([[[0.25, 0.75, 0], [0, 1, 0]]]), x, y),
    )
    book.case(
        "sum-just-inside-float32: a row that differs from one by less than float32's ROW_SUM",
        "MAP-3 row-sum-bound",
        dtypes=["float32"],
        **pair(array([[[0.5, 0.5, 2**-14], [1, 0, 0]]]), array([[[0.25, 0.75, 0], [0, 1, 0]]]), x, y),
    )
    book.invalid(
        "negative-in-an-uncounted-row",
        "an entry below 0 is refused in every row, without tolerance",
        "MAP-3",
        "not-a-distribution",
        **{**good, "probs_p": array([[[0.5, 0.5, 0], [0.5, 0.5, -(2.0**-20)]]]), "query_mask": mask([[1, 0]])},
    )
    two = array([[[0.25, 0.75, 0], [0.5, 0.5, 0]]])
    bad_maps(book, "probs_p", {"probs_q": two, "value_outputs_p": x, "value_outputs_q": y}, head_axis=False)
    rest: dict[str, Any] = {"probs_p": two, "value_outputs_p": x, "value_outputs_q": y}
    bad_maps(book, "probs_q", rest, head_axis=False, prefix="q-")


BOOKS = (solve_alpha,)
