"""Cases of the mixing matrix in chapter MIX: composing it from alphas, and mixing heads with it."""

from __future__ import annotations

from typing import Any

import oracle_heads as heads
from book import Book, array, book_of, probs

MIXING = {"rule": "close", "quantity": "alpha"}
PROBS = {"rule": "close", "quantity": "probs"}


def compose_mixing() -> Book:
    """MIX-13."""
    book = book_of(heads.compose_mixing, "mixing", MIXING)
    flags = "alpha-swapped pool-in-place pool-untouched-first"
    plans: list[tuple[str, int, Any, Any, str]] = [
        ("one-pair", 2, [[[0, 1]]], [[[0.25]]], "the weight is that of the first head"),
        ("three-to-one", 3, [[[0, 1]], [[0, 1]]], [[[0.25]], [[0.75]]], "two rounds: 3/16, 9/16, 1/4"),
        ("untouched", 4, [[[2, 3]]], [[[0.125]]], "merged heads first, then the untouched ones"),
        ("pairs-out-of-order", 5, [[[3, 4], [0, 1]]], [[[0.125, 0.75]]], "alphas are in the order of the round"),
        ("swapped-pair", 3, [[[2, 0]], [[1, 0]]], [[[0.25]], [[0.5]]], "the pair's first head has the weight"),
        (
            "five-to-two",
            5,
            [[[0, 1], [2, 3]], [[0, 1]]],
            [[[0.25, 0.5], [1, 0]], [[0.125], [0.75]]],
            "two samples, each with its alphas",
        ),
        (
            "per-row",
            3,
            [[[0, 1]], [[0, 1]]],
            [[[[0.25, 0.5]], [[1, 0]]], [[[0.75, 0.125]], [[0.5, 0.25]]]],
            "one weight a row: the last axis of C is the row",
        ),
        (
            "per-row-two-samples",
            4,
            [[[0, 1], [2, 3]]],
            [[[[0.25, 0.5, 1], [0, 0.125, 0.75]], [[0.5, 1, 0.25], [1, 0.25, 0.5]]]],
            "two samples, two pairs, three rows",
        ),
    ]
    for name, teachers, plan, alphas, comment in plans:
        book.valid(name, comment, "MIX-13", f"{flags} alpha-batch-shared" if len(alphas[0]) > 1 else flags,
            alphas=[array(a) for a in alphas], plan=plan, num_teacher_heads=teachers)  # fmt: skip
    for name, plan in (("used-twice", [[[0, 1], [1, 2]]]), ("outside", [[[0, 3], [1, 2]]])):
        book.invalid(name, "the plan is checked", "PLAN-7", "plan-invalid", alphas=[array([[0.5, 0.5]])], plan=plan,
            num_teacher_heads=3)  # fmt: skip
    good: dict[str, Any] = {"plan": [[[0, 1], [2, 3]], [[0, 1]]], "num_teacher_heads": 4}
    first, second = array([[0.5, 0.25]]), array([[0.5]])
    change: dict[str, Any]
    for name, change in (
        ("too-few-rounds", {"alphas": [first]}),
        ("too-many-rounds", {"alphas": [first, second, second]}),
        ("too-few-pairs", {"alphas": [array([[0.5]]), second]}),
        ("too-many-pairs", {"alphas": [first, first]}),
        ("samples-differ", {"alphas": [first, array([[0.5], [0.5]])]}),
        ("rows-differ", {"alphas": [array([[[0.5, 1], [0.25, 0]]]), array([[[0.5, 1, 0]]])]}),
        ("axes-differ", {"alphas": [array([[[0.5, 1], [0.25, 0]]]), second]}),
        ("axes", {"alphas": [array([0.5, 0.25]), array([0.5])]}),
        ("empty-plan", {"alphas": [], "plan": []}),
    ):
        comment = "one array a round, (B, pairs) or (B, pairs, L), and at least one round"
        book.invalid(name, comment, "MIX-13", "argument-shape", **{**good, **change})
    for name, weight in (("above-one", 1.25), ("below-zero", -0.25)):
        book.invalid(f"alpha-{name}", "alphas lie in [0, 1]", "MIX-13", "mixing-invalid",
            **{**good, "alphas": [first, array([[weight]])]})  # fmt: skip
    book.invalid("nan", "NaN in an alpha", "MAP-5", "not-finite", **{**good, "alphas": [first, array([["nan"]])]})
    return book


def mix_heads() -> Book:
    """MIX-3, MIX-18."""
    book = book_of(heads.mix_heads, "probs", PROBS)
    two = array([[[[1, 0], [0.25, 0.75]], [[0, 1], [0.5, 0.5]]]])
    three = probs([2, 3, 2, 4], 101, 9, 2, 6)
    flags = "mixing-transposed"
    book.valid("two-to-one", "1/4 and 3/4", "MIX-3", flags, teacher_probs=two, mixing=array([[[0.25, 0.75]]]))
    book.valid("square", "two to two heads: rows of C are student heads", "MIX-3", flags, teacher_probs=two,
        mixing=array([[[0.25, 0.75], [1, 0]]]))  # fmt: skip
    book.valid("per-sample", "every sample has its C", "MIX-3 MIX-10", "alpha-batch-shared", teacher_probs=three,
        mixing=array([[[0.25, 0.75, 0], [0, 0, 1]], [[0.5, 0.25, 0.25], [0.125, 0, 0.875]]]))  # fmt: skip
    book.valid("per-row", "with a query axis row i is mixed with C[h, t, i]", "MIX-3", "alpha-per-ignored",
        teacher_probs=three,
        mixing=array([[[[0.25, 1], [0.75, 0], [0, 0]]], [[[0, 0.5], [0.5, 0.25], [0.5, 0.25]]]]))  # fmt: skip
    book.valid("cyclic", "a C whose columns sum to one too: student heads 0, 1, 2 are teacher heads 1, 2, 0", "MIX-3",
        flags, teacher_probs=probs([1, 3, 2, 4], 101, 9, 2, 6),
        mixing=array([[[0, 1, 0], [0, 0, 1], [1, 0, 0]]]))  # fmt: skip
    book.valid("per-row-two-heads", "two samples, two student heads, four queries", "MIX-3",
        "alpha-per-ignored mixing-transposed alpha-batch-shared",
        teacher_probs=probs([2, 2, 4, 3], 103, 9, 2, 6),
        mixing=array([[[[0.25, 1, 0.5, 0], [0.75, 0, 0.5, 1]], [[0, 0.125, 1, 0.25], [1, 0.875, 0, 0.75]]],
        [[[1, 0.5, 0.25, 0.5], [0, 0.5, 0.75, 0.5]], [[0.75, 0, 0.5, 1], [0.25, 1, 0.5, 0]]]]))  # fmt: skip
    book.case(
        "zero-rows: fully masked rows mix to zero",
        "MIX-3 MAP-2 masked-row-nan",
        compare={"probs": {**PROBS, "exact_zeros": True}},
        teacher_probs=array([[[[0, 0], [1, 0]], [[0, 0], [0, 1]]]]),
        mixing=array([[[0.25, 0.75]]]),
    )
    book.valid("identity", "unit rows give the maps back", "MIX-3", teacher_probs=two,
        mixing=array([[[0, 1], [1, 0]]]))  # fmt: skip
    rows = [[[0.5, 0.5 + 2.0**-14]]]
    book.valid("own-dtype",
        "a C of float32 whose row sums to 1 + 2^-14 mixes maps of float64: `ROW_SUM` is that of C's own dtype",
        "MIX-3", dtypes=["float64"], teacher_probs=two, mixing=array(rows, "float32"))  # fmt: skip
    book.invalid("own-dtype-strict",
        "a C of float64 whose row sums to 1 + 2^-14, beside maps of float32: `ROW_SUM` is that of C's own dtype",
        "MIX-3", "mixing-invalid", dtypes=["float32"], teacher_probs=two, mixing=array(rows, "float64"))  # fmt: skip
    loose = [[[[0.5, 0.5 + 2.0**-14], [1, 0]], [[0.25, 0.75], [0, 1]]]]
    book.valid("own-dtype-maps", "maps of float32 with a row that sums to 1 + 2^-14, mixed by a C of float64",
        "MAP-3 MIX-3", dtypes=["float64"], teacher_probs=array(loose, "float32"),
        mixing=array([[[0.5, 0.5]]]))  # fmt: skip
    book.invalid("own-dtype-maps-strict", "maps of float64 with a row that sums to 1 + 2^-14, beside a C of float32",
        "MAP-3", "not-a-distribution", dtypes=["float32"], teacher_probs=array(loose, "float64"),
        mixing=array([[[0.5, 0.5]]]))  # fmt: skip
    good: dict[str, Any] = {"teacher_probs": two}
    invalid = "mixing-invalid"
    book.invalid("negative", "C has entries of at least 0", "MIX-3", invalid,
        **{**good, "mixing": array([[[1.25, -0.25]]])})  # fmt: skip
    book.invalid("below-one", "rows of C sum to one", "MIX-3", invalid, **{**good, "mixing": array([[[0.5, 0.25]]])})
    book.invalid("above-one", "rows of C sum to one", "MIX-3", invalid, **{**good, "mixing": array([[[0.5, 0.75]]])})
    book.invalid("one-row-per-query", "one query's weights do not sum to one", "MIX-3", invalid,
        **{**good, "mixing": array([[[[0.5, 0.5], [0.5, 0.25]]]])})  # fmt: skip
    for dtype, bits in (("float64", 16), ("float32", 13), ("float16", 6), ("bfloat16", 5)):
        book.invalid(f"just-outside-{dtype}",
            "a row of C further from one than ROW_SUM of this dtype, by less than twice", "MIX-3", invalid,
            flags="row-sum-bound", dtypes=[dtype], teacher_probs=probs([1, 3, 2, 4], 101, 9, 2, 6),
            mixing=array([[[0.5, 0.5, 2.0**-bits]]]))  # fmt: skip
    book.case(
        "just-inside-float64: a row of C within ROW_SUM of one",
        "MIX-3 row-sum-bound",
        dtypes=["float64", "float32"],
        teacher_probs=probs([1, 3, 2, 4], 101, 9, 2, 6),
        mixing=array([[[0.5, 0.5, 2.0**-17]]]),
    )
    for name, change in (
        ("teacher-heads", {"mixing": array([[[0.25, 0.25, 0.5]]])}),
        ("samples", {"mixing": array([[[0.5, 0.5]]] * 2)}),
        ("queries", {"mixing": array([[[[0.5] * 3] * 2]])}),
    ):
        book.invalid(name, "maps and C must fit", "MIX-3", "argument-shape", **{**good, **change})
    book.valid("sinks", "rows of any sum up to one, in every row", "MIX-18 MIX-17", "sink-filled row-renormalised",
        teacher_probs=array([[[[0.25, 0.125], [0, 0]], [[0.5, 0.5], [0, 0.75]]]]),
        mixing=array([[[0.25, 0.75]]]))  # fmt: skip
    for name, row in (("sum-above", [0.75, 0.5]), ("negative", [0.75, -0.25])):
        book.invalid(f"map-{name}", "a row of more than one, or an entry below 0", "MIX-18 MAP-9 MAP-3",
            "not-a-distribution", teacher_probs=array([[[[1, 0]], [row]]]),
            mixing=array([[[0.25, 0.75]]]))  # fmt: skip
    book.invalid(
        "mixing-axes", "C of two axes", "MIX-3", "argument-shape", **{**good, "mixing": array([[0.25, 0.75]])}
    )
    book.invalid("axes", "maps of three axes", "MAP-4", "argument-shape", teacher_probs=array([[[1, 0]]]),
        mixing=array([[[1]]]))  # fmt: skip
    book.invalid("nan", "NaN in a map", "MAP-5", "not-finite", teacher_probs=array([[[["nan", 0]], [[0, 1]]]]),
        mixing=array([[[0.25, 0.75]]]))  # fmt: skip
    book.invalid("mixing-nan", "NaN in C", "MAP-5", "not-finite", **{**good, "mixing": array([[["nan", 0.75]]])})
    book.invalid(
        "complex-map",
        "a complex map",
        "MAP-5",
        "argument-dtype",
        teacher_probs=array([[[[1, 0]], [[0, 1]]]], "complex128"),
        mixing=array([[[0.25, 0.75]]]),
    )
    book.invalid("complex", "complex C", "MAP-5", "argument-dtype",
        **{**good, "mixing": array([[[0.25, 0.75]]], "complex128")})  # fmt: skip
    return book


BOOKS = (compose_mixing, mix_heads)
