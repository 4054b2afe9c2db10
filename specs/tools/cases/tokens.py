"""Cases of chapter TOKEN and of the intersection of supports: mass is dropped, and rows keep their sums."""

from __future__ import annotations

from typing import Any

import oracle_loss as loss
from book import Book, array, lengths, mask, numbers, probs, random_mask

from cases.loss_inputs import STUDENT, TEACHER, pair_layers
from cases.maps import bad_maps

MAPS = {"rule": "close", "quantity": "probs", "exact_zeros": True}
CLOSE = {"rule": "close", "quantity": "probs"}
EXACT = {"rule": "exact"}
INF = "-inf"


def align_tokens() -> Book:
    """Chapter TOKEN."""

    def answer(**given: Any) -> dict[str, Any]:
        kept, dropped = loss.align_tokens(**given)
        return {"probs": kept, "dropped": dropped}

    book = Book("align_tokens", ("probs", "dropped"), answer, {"probs": MAPS, "dropped": CLOSE})
    maps = array([[[[0.5, 0.25, 0.25], [0, 0, 1], [1, 0, 0], [0.125, 0.5, 0.375]]]])
    good: dict[str, Any] = {"attn_probs": maps}
    book.valid("class-token", "position 0 goes on both axes; a row that had all its mass there is zero",
        "TOKEN-2 TOKEN-3", "align-not-rescaled align-dropped-after masked-row-nan",
        **{**good, "rows": [1, 2, 3], "columns": [1, 2]})  # fmt: skip
    book.valid("all", "no list keeps all", "TOKEN-1 TOKEN-3", compare={"probs": EXACT}, **good)
    book.valid("null-lists", "None keeps all", "TOKEN-1", compare={"probs": EXACT},
        **{**good, "rows": None, "columns": None})  # fmt: skip
    book.valid("rows-alone", "rows go, and every row that stays is as it was", "TOKEN-1 TOKEN-3",
        compare={"probs": EXACT}, **{**good, "rows": [0, 3]})  # fmt: skip
    book.valid("columns-alone", "columns go", "TOKEN-2", "align-not-rescaled", **{**good, "columns": [0, 2]})
    book.valid("order-wanted", "lists are in the order wanted", "TOKEN-1", "align-sorted",
        **{**good, "rows": [3, 0], "columns": [2, 1]})  # fmt: skip
    book.valid("permuted", "all columns in another order: no mass is lost", "TOKEN-1 TOKEN-3", "align-sorted",
        **{**good, "columns": [2, 0, 1]})  # fmt: skip
    book.valid("sinks", "a row is scaled back to the sum that it had, not to one", "TOKEN-2 MAP-9", "sink-filled",
        attn_probs=array([[[[0.25, 0.125, 0.125], [0.5, 0, 0.25]]]]), columns=[1, 2],
        row_sums="at_most_one")  # fmt: skip
    book.valid("zero-row", "a fully masked row stays zero and drops nothing", "TOKEN-2", "masked-row-nan",
        attn_probs=array([[[[0, 0, 0], [0.5, 0.25, 0.25]]]]), columns=[0, 1])  # fmt: skip
    book.valid("uncounted-row", "a row that does not count need not sum to one", "TOKEN-2 MAP-3",
        attn_probs=array([[[[0.5, 0.25, 0], [0.5, 0.25, 0.25]]]]), columns=[0, 1],
        query_mask=mask([[0, 1]]))  # fmt: skip
    book.valid("large", "2 samples, 3 heads, 17 positions, without positions 0 and 9", "TOKEN-1 TOKEN-2",
        "ugly-shape align-not-rescaled", at=64, attn_probs=probs([2, 3, 17, 17], 32, 7, 1, 8),
        rows=[i for i in range(17) if i not in (0, 9)],
        columns=[i for i in range(17) if i not in (0, 9)])  # fmt: skip
    value = "argument-value"
    for name, lists in (
        ("columns-empty", {"columns": []}),
        ("rows-empty", {"rows": []}),
        ("columns-twice", {"columns": [1, 1]}),
        ("rows-twice", {"rows": [0, 2, 0]}),
        ("columns-outside", {"columns": [0, 3]}),
        ("rows-outside", {"rows": [4]}),
        ("columns-negative", {"columns": [-1]}),
        ("rows-negative", {"rows": [0, -1]}),
        ("columns-fraction", {"columns": [0.5]}),
    ):
        comment = "a list names at least one position, each once, in range and an integer"
        book.invalid(name, comment, "TOKEN-4", value, **{**good, **lists})
    book.invalid("axes", "maps of three axes", "MAP-4", "argument-shape", attn_probs=array([[[0.5, 0.5]]]),
        columns=[0])  # fmt: skip
    book.invalid("row-sums-unknown", "row_sums has two values", "MAP-9", value, **{**good, "row_sums": "none"})
    book.invalid("mask-of-integers", "query_mask must be boolean", "MAP-7", "argument-dtype", flags="mask-dtype",
        **{**good, "query_mask": array([[1, 1, 1, 1]], "int64")})  # fmt: skip
    book.invalid("mask-shape", "query_mask is (B, L)", "MAP-7", "argument-shape",
        **{**good, "query_mask": lengths(3, [3])})  # fmt: skip
    bad_maps(book, "attn_probs", {"columns": [0, 1, 2]})
    return book


def intersect_support() -> Book:
    """LOSS-15."""

    def answer(**given: Any) -> dict[str, Any]:
        kept, dropped = loss.intersect_support(**given)
        return {"supervision": kept, "dropped": dropped}

    book = Book("intersect_support", ("supervision", "dropped"), answer, {"supervision": MAPS, "dropped": CLOSE})
    teacher = array([[[[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0, 0, 1]]]])
    flags = "intersect-not-rescaled support-ignored"
    book.valid("minus-infinity", "keys with logit -inf lose their mass, rows are scaled back", "LOSS-15", flags,
        **pair_layers(teacher, array([[[[0, 1, INF], [INF, 0, 1], [0, 0, 1]]]])))  # fmt: skip
    book.case(
        "masked-keys: the same by a mask (S); the last row loses all",
        f"LOSS-15 MAP-10 {flags} mask-polarity mask-broadcast masked-row-nan",
        **pair_layers(teacher, array([[[[0, 1, 2], [1, 0, 1], [0, 0, 1]]]]), attn_mask=mask([1, 1, 0])),
    )
    book.valid("mask-and-minus-infinity", "both together", "LOSS-15", flags,
        **pair_layers(teacher, array([[[[0, INF, 2], [1, 0, 1], [0, 0, 1]]]]),
        attn_mask=mask([[0, 1, 1], [1, 1, 0], [1, 1, 1]])))  # fmt: skip
    book.valid("nothing-lost", "a row that loses none is as it was", "LOSS-15", compare={"supervision": EXACT},
        **pair_layers(TEACHER, STUDENT))  # fmt: skip
    book.valid("zero-rows", "a row of zeros stays zero and drops nothing", "LOSS-15", "masked-row-nan",
        **pair_layers(array([[[[0, 0], [0.5, 0.5]]]]), array([[[[0, INF], [INF, INF]]]])))  # fmt: skip
    book.valid("sinks", "a row is scaled back to the sum that it had", "LOSS-15 MAP-9", f"{flags} sink-filled",
        **pair_layers(array([[[[0.25, 0.125, 0.125], [0.5, 0, 0.25]]]]), array([[[[0, 1, INF], [0, 1, INF]]]]),
        row_sums="at_most_one"))  # fmt: skip
    book.valid("uncounted-rows", "rows that do not count are treated alike, whatever their sum", "LOSS-15 MAP-3",
        f"{flags} loss-padded-rows",
        **pair_layers(array([[[[0.25, 0.125, 0.125], [0.5, 0.25, 0.25]]]]),
        array([[[[0, 1, INF], [0, 1, INF]]]]), loss_mask=mask([[0, 1]])))  # fmt: skip
    book.valid("large", "2 samples, 3 heads, 17 queries, 19 keys, keys masked at random", "LOSS-15",
        f"{flags} ugly-shape", at=96,
        **pair_layers(probs([2, 3, 17, 19], 1301, 5, 1, 8), numbers([2, 3, 17, 19], 1302, -8, 8, 2),
        attn_mask=random_mask([2, 1, 17, 19], 1303, 2, 3)))  # fmt: skip
    good = pair_layers(TEACHER, STUDENT)
    for name, spec, code, change in (
        ("shapes", "LOSS-3", "argument-shape", {"student_logits": numbers([1, 2, 2, 4], 1071, -8, 8, 2)}),
        ("attn-mask-keys", "MAP-10", "argument-shape", {"attn_mask": mask([1, 1])}),
        ("mask-length", "MAP-7", "argument-shape", {"loss_mask": lengths(3, [3])}),
        ("mask-of-integers", "MAP-7", "argument-dtype", {"loss_mask": array([[1, 1]], "int64")}),
        ("attn-mask-of-integers", "MAP-7", "argument-dtype", {"attn_mask": array([1, 1, 1], "int64")}),
        ("row-sums-unknown", "MAP-9", "argument-value", {"row_sums": "many"}),
    ):
        book.invalid(name, "arguments are checked as in the loss", spec, code, **{**good, **change})
    book.invalid("logits-nan", "NaN in the logits", "MAP-5", "not-finite",
        **pair_layers(array([[[[0.5, 0.5]]]]), array([[[[0, "nan"]]]])))  # fmt: skip
    bad_maps(book, "supervision", {"student_logits": array([[[[0, 1, 2], [2, 1, 0]]]])})
    return book


BOOKS = (align_tokens, intersect_support)
