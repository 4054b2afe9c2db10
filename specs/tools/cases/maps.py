"""Cases of chapters MAP and TEMP."""

from __future__ import annotations

from typing import Any

import oracle_heads as heads
from book import Book, array, book_of, mask, numbers, probs, special

MAPS = {"rule": "close", "quantity": "probs", "exact_zeros": True}
CLOSE = {"rule": "close", "quantity": "probs"}
EXACT = {"rule": "exact"}
INF = "-inf"
BAD_TEMPERATURES = (("zero", 0), ("negative", -2), ("nan", special("nan")), ("infinite", special("inf")))


def softmax() -> Book:
    """MAP-1, MAP-2, MAP-7, MAP-10, TEMP-1, TEMP-2."""
    book = book_of(heads.softmax, "attn_probs", MAPS)
    small = array([[[[0, 1, 2], [-1, 0.5, 0.25]]]])
    book.valid("one-map", "two rows of three keys", "MAP-1", "wrong-axis", attn_logits=small)
    book.valid("two-axes", "leading axes are free", "MAP-1", attn_logits=array([[0, 3], [1, 1], [-2, 4]]))
    book.valid("one-key", "one key has all", "MAP-1", attn_logits=array([[[[3], [-7]]]]))
    book.valid("large-logits", "exp of a logit overflows; of the difference to the largest it does not", "MAP-1",
        "overflow", attn_logits=array([[[[1024, 1016, -1024], [-1016, -1024, -1020]]]]))  # fmt: skip
    book.case(
        "very-negative: finite logits are not masked, however negative they are",
        "MAP-1 MAP-2 magic-threshold",
        attn_logits=array([[[[-65280, -65280, INF], [-512, -510, -508], [-65280, INF, INF]]]]),
    )
    book.valid("far-apart", "probabilities below what the dtype holds may be rounded to 0, and nothing else happens",
        "MAP-1", "overflow", compare={"attn_probs": CLOSE},
        attn_logits=array([[[[0, -128, 1], [0, -1024, -896]]]]))  # fmt: skip
    book.valid("minus-infinity", "keys with logit -inf are exactly 0, and a row of nothing else is zero", "MAP-2",
        "masked-row-nan masked-not-zero",
        attn_logits=array([[[[0, INF, 1], [INF, INF, INF], [INF, 5, INF]]]]))  # fmt: skip
    mixed = array([[[[0, 1, 2], [2, 1, 0]]]])
    book.valid("mask-keeps-true", "True means may attend", "MAP-2 MAP-7", "mask-polarity masked-not-zero",
        attn_logits=mixed, attn_mask=mask([[[[1, 0, 1], [0, 1, 1]]]]))  # fmt: skip
    book.valid("mask-all-true", "a mask that hides nothing", "MAP-7", "mask-polarity", attn_logits=mixed,
        attn_mask=mask([[[[1, 1, 1], [1, 1, 1]]]]))  # fmt: skip
    book.valid("mask-hides-a-row", "a row where the mask is False throughout is zero", "MAP-2",
        "masked-row-nan mask-polarity", attn_logits=mixed, attn_mask=mask([[[[0, 0, 0], [1, 1, 0]]]]))  # fmt: skip
    book.valid("mask-and-minus-infinity", "mask and -inf together hide the whole first row", "MAP-2",
        "masked-row-nan", attn_logits=array([[[[INF, 1, 2], [INF, 1, 3]]]]),
        attn_mask=mask([[[[1, 0, 0], [1, 1, 1]]]]))  # fmt: skip
    book.valid("masked-key-is-largest", "the largest logit is masked: without it the row is an ordinary one",
        "MAP-1 MAP-2", "mask-after-softmax overflow", attn_logits=array([[[[2048, 0, 1]]]]),
        attn_mask=mask([[[[0, 1, 1]]]]))  # fmt: skip
    square = array([[[[0, 1, 2], [1, 3, 0], [2, 0, 1]]]])
    book.valid("causal-mask", "a mask of two axes serves all samples and heads: query i sees keys up to i",
        "MAP-7 MAP-10", "mask-transposed mask-polarity", attn_logits=square,
        attn_mask=mask([[1, 0, 0], [1, 1, 0], [1, 1, 1]]))  # fmt: skip
    cube = numbers([2, 2, 2, 2], 11, -8, 8, 2)
    for name, shape, flags in (
        ("per-sample", mask([[[[1, 0]]], [[[1, 1]]]]), "a mask (B, 1, 1, S), as for padded keys"),
        ("per-head", mask([[[1, 0]], [[1, 1]]]), "a mask (H, 1, S) is aligned with the last axes"),
        ("per-query", mask([[0], [1]]), "a mask (L, 1) hides whole rows"),
        ("per-key", mask([1, 0]), "a mask (S) serves every row"),
        ("single", mask([[[[1]]]]), "a mask of one entry"),
    ):
        book.valid(f"mask-{name}", flags, "MAP-10", "mask-broadcast mask-polarity", attn_logits=cube, attn_mask=shape)
    for name, temperature in (("two", 2), ("half", 0.5), ("three", 3)):
        book.valid(f"temperature-{name}", "logits are divided by the temperature", "TEMP-2",
            "temperature-inverted temperature-ignored", attn_logits=small, temperature=temperature)  # fmt: skip
    book.valid("temperature-tiny", "a tiny temperature makes large logits, not infinite ones", "TEMP-2 MAP-1",
        "overflow", compare={"attn_probs": CLOSE}, attn_logits=array([[[[2, 1.984375, -2], [0, 0, -1]]]]),
        temperature=0.015625)  # fmt: skip
    book.valid("temperature-with-mask", "masked keys stay 0 at any temperature", "TEMP-2 MAP-2",
        "masked-row-nan masked-not-zero", attn_logits=array([[[[INF, 1, 2], [INF, INF, INF], [0, 4, 1]]]]),
        attn_mask=mask([[[[1, 1, 1], [1, 1, 1], [1, 0, 1]]]]), temperature=4)  # fmt: skip
    book.valid("large-causal", "two samples, three heads, 63 queries, 65 keys, causal", "MAP-1 MAP-2",
        "masked-not-zero ugly-shape", at=64, attn_logits=numbers([2, 3, 63, 65], 12, -96, 96, 4, causal=True),
        temperature=2)  # fmt: skip
    good: dict[str, Any] = {"attn_logits": small}
    book.invalid("one-axis", "one axis", "MAP-13", "argument-shape", attn_logits=array([0, 1]))
    book.invalid("temperature-boolean", "a boolean is no number", "ERR-6 TEMP-1", "argument-value",
        **{**good, "temperature": True})  # fmt: skip
    book.invalid("nan", "NaN", "MAP-5", "not-finite", attn_logits=array([[[[0, "nan"]]]]))
    book.invalid("plus-infinity", "+inf", "MAP-5", "not-finite", attn_logits=array([[[[0, "inf"]]]]))
    book.invalid("complex", "complex logits", "MAP-5", "argument-dtype",
        attn_logits=array([[[[0, 1]]]], "complex128"))  # fmt: skip
    book.invalid("boolean", "logits must be real numbers", "MAP-5", "argument-dtype", attn_logits=mask([[[[1, 0]]]]))
    book.invalid("mask-of-integers", "an integer mask could mean anything", "MAP-7", "argument-dtype",
        flags="mask-dtype", **{**good, "attn_mask": array([[[[1, 0, 1], [0, 1, 1]]]], "int64")})  # fmt: skip
    book.invalid("mask-of-numbers", "an additive mask is not a mask", "MAP-7", "argument-dtype", flags="mask-dtype",
        **{**good, "attn_mask": array([[[[0, -1, 0], [0, 0, 0]]]])})  # fmt: skip
    for name, shape in (
        ("keys", mask([1, 0])),
        ("queries", mask([[1, 0, 1]] * 3)),
        ("extra-axis", mask([[[[[1, 0, 1]]]]])),
        ("samples", mask([[[[1, 0, 1]]]] * 2)),
    ):
        book.invalid(f"mask-does-not-broadcast-{name}", "the mask does not broadcast to (1, 1, 2, 3)", "MAP-10",
            "argument-shape", **{**good, "attn_mask": shape})  # fmt: skip
    for name, value in BAD_TEMPERATURES:
        book.invalid(f"temperature-{name}", "not a finite number above 0", "TEMP-1", "argument-value",
            **{**good, "temperature": value})  # fmt: skip
    return book


def soften() -> Book:
    """TEMP-2, TEMP-5, TEMP-6, TEMP-7, MAP-3, MAP-9."""
    book = book_of(heads.soften, "attn_probs", MAPS)
    map_ = array([[[[0.5, 0.25, 0.25], [0.75, 0.25, 0], [0.0625, 0.0625, 0.875]]]])
    for name, temperature in (("two", 2), ("half", 0.5), ("three", 3), ("quarter", 0.25)):
        book.valid(f"temperature-{name}", "A^(1/T), divided by its sum", "TEMP-2",
            "temperature-inverted soften-not-normalised", attn_probs=map_, temperature=temperature)  # fmt: skip
    book.valid("temperature-one", "at T = 1 the map comes back as it is", "TEMP-7", compare={"attn_probs": EXACT},
        attn_probs=map_, temperature=1)  # fmt: skip
    book.valid("temperature-one-sum-off", "a sum within ROW_SUM of one stays what it was", "TEMP-7 MAP-3",
        "row-renormalised", dtypes=["float32"], compare={"attn_probs": EXACT},
        attn_probs=array([[[[0.5, 0.5, 2**-14]]]]), temperature=1)  # fmt: skip
    book.case(
        "temperature-one-sinks: a row with a sink stays what it was",
        "TEMP-7 TEMP-5 sink-filled",
        compare={"attn_probs": EXACT},
        attn_probs=array([[[[0.25, 0.125], [0, 0]]]]),
        temperature=1,
        row_sums="at_most_one",
    )
    book.valid("zero-rows", "fully masked rows and masked keys stay exactly 0", "TEMP-2",
        "masked-row-nan masked-not-zero", attn_probs=array([[[[0, 0, 0], [0, 0.5, 0.5], [0.25, 0, 0.75]]]]),
        temperature=2)  # fmt: skip
    book.valid("sinks", "a row is softened as a distribution and keeps its own mass; a row of mass one among them",
        "TEMP-5 MAP-9", "sink-filled sink-softened",
        attn_probs=array([[[[0.5, 0.125, 0.125], [0.0625, 0.25, 0], [0, 0, 0], [0.5, 0.25, 0.25]]]]), temperature=2,
        row_sums="at_most_one")  # fmt: skip
    book.valid("sinks-sharpened", "the same below T = 1", "TEMP-5", "sink-filled sink-softened",
        attn_probs=array([[[[0.5, 0.125, 0.125], [0.0625, 0.25, 0]]]]), temperature=0.5,
        row_sums="at_most_one")  # fmt: skip
    book.valid("no-sinks-at-most-one", "rows that sum to one do not care about row_sums", "TEMP-5", attn_probs=map_,
        temperature=2, row_sums="at_most_one")  # fmt: skip
    book.valid("tiny-temperature", "(1/64)^256 is 0 in float64; relative to the largest entry it is 1", "TEMP-6",
        "power-underflow", attn_probs=probs([1, 1, 2, 64], 13, 1, 0, 6), temperature=0.00390625)  # fmt: skip
    book.valid("tiny-temperature-flat-and-peaked",
        "a flat row beside a peaked one: each is taken relative to its own largest entry", "TEMP-6",
        "power-underflow", attn_probs=array([[[[2**-6] * 64, [1] + [0] * 63]]]), temperature=0.00390625)  # fmt: skip
    book.valid("tiny-mass", "a row that is nearly all sink keeps its shape at a small temperature", "TEMP-5 TEMP-6",
        "power-underflow", attn_probs=array([[[[2**-10, 2**-11, 2**-10, 0]]]]), temperature=0.0625,
        row_sums="at_most_one")  # fmt: skip
    book.valid("per-head", "every head by itself", "TEMP-2", "softened-across-heads",
        attn_probs=probs([2, 3, 2, 4], 14, 9, 2, 6), temperature=2)  # fmt: skip
    book.valid("large", "63 queries, 65 keys, with zero rows and zero keys", "TEMP-2", "ugly-shape masked-row-nan",
        at=64, attn_probs=probs([1, 2, 63, 65], 15, 12, 2, 8, causal=True, zero_rows=(7, 62)),
        temperature=4)  # fmt: skip
    for name, value in BAD_TEMPERATURES:
        book.invalid(f"bad-temperature-{name}", "not a finite number above 0", "TEMP-1", "argument-value",
            attn_probs=map_, temperature=value)  # fmt: skip
    two: dict[str, Any] = {"temperature": 2}
    book.invalid("row-sums-unknown", "row_sums has two values", "MAP-9", "argument-value",
        **{"attn_probs": map_, **two, "row_sums": "any"})  # fmt: skip
    book.invalid("one-axis", "one axis", "MAP-13", "argument-shape", **{"attn_probs": array([0.5, 0.5]), **two})
    bad_maps(book, "attn_probs", two)
    return book


def bad_maps(book: Book, name: str, rest: dict[str, Any], *, head_axis: bool = True, prefix: str = "") -> None:
    """What every operation that takes a map refuses: values of chapter MAP, just outside for every dtype."""

    def given(row: list[Any], dtype: str = "float") -> dict[str, Any]:
        map_ = [row, [0.5, 0.5, 0]]
        return {name: array([[map_]] if head_axis else [map_], dtype), **rest}

    bad = "not-a-distribution"
    book.invalid(
        f"{prefix}complex-map", "a complex map", "MAP-5", "argument-dtype", **given([0.5, 0.5, 0], "complex128")
    )
    book.invalid(f"{prefix}negative", "a negative probability in a row that sums to one", "MAP-3", bad,
        **given([0.75, 0.5, -0.25]))  # fmt: skip
    tiny = given([0.5, 0.5, -(2.0**-20)])
    book.invalid(f"{prefix}negative-without-tolerance", "an entry of -2^-20", "MAP-3", bad, **tiny)
    book.invalid(f"{prefix}sum-below", "a row that sums to 3/4", "MAP-3", bad, flags="row-sum-unchecked",
        **given([0.5, 0.25, 0]))  # fmt: skip
    book.invalid(f"{prefix}sum-above", "a row that sums to 5/4", "MAP-3", bad, flags="row-sum-unchecked",
        **given([0.5, 0.75, 0]))  # fmt: skip
    for dtype, bits in (("float64", 16), ("float32", 13), ("float16", 6), ("bfloat16", 5)):
        book.invalid(f"{prefix}sum-just-outside-{dtype}",
            "a row further from one than ROW_SUM of this dtype, by less than twice", "MAP-3", bad,
            flags="row-sum-bound", dtypes=[dtype], **given([0.5, 0.5, 2.0**-bits]))  # fmt: skip
    book.invalid(f"{prefix}nan", "NaN", "MAP-5", "not-finite", **given([0.5, 0.5, "nan"]))
    book.invalid(f"{prefix}infinite", "infinity", "MAP-5", "not-finite", **given([0.5, 0.5, "inf"]))
    book.invalid(f"{prefix}sink-above-one", "with row_sums='at_most_one' a row of 5/4 is still too much", "MAP-9",
        bad, **{**given([0.5, 0.75, 0]), "row_sums": "at_most_one"})  # fmt: skip
    book.invalid(f"{prefix}sink-negative", "a negative probability in a row of allowed mass", "MAP-3", bad,
        **{**given([0.5, 0.25, -0.125]), "row_sums": "at_most_one"})  # fmt: skip


def value_outputs() -> Book:
    """MAP-6, MAP-11."""
    book = book_of(heads.value_outputs, "value_outputs", CLOSE)
    book.case(
        "one-head: X = V W",
        "MAP-11 projection-transposed",
        values=array([[[[1, 2], [3, 4], [0, -1]]]]),
        output_projection=array([[1, 2], [0, 5]]),
    )
    book.valid("slices", "head t has rows t d_v to (t+1) d_v - 1 of the projection, which is square here", "MAP-11",
        "projection-slices projection-transposed", values=array([[[[1, 2]], [[1, 0.5]], [[-1, 1]]]]),
        output_projection=numbers([6, 6], 21, -16, 16, 2))  # fmt: skip
    book.case(
        "grouped: four query heads, two value heads: heads 0 and 1 read value head 0",
        "MAP-6 gqa-interleaved projection-slices",
        values=numbers([1, 2, 2, 3], 22, -8, 8, 1),
        output_projection=numbers([12, 2], 23, -8, 8, 2),
    )
    book.case(
        "one-value-head: all query heads read the one value head",
        "MAP-6 gqa-interleaved",
        values=numbers([2, 1, 3, 2], 24, -8, 8, 1),
        output_projection=numbers([6, 4], 25, -8, 8, 2),
    )
    book.valid("ugly", "two samples, 6 query heads, 3 value heads, d_v = 5, D = 7", "MAP-6 MAP-11",
        "gqa-interleaved ugly-shape", values=numbers([2, 3, 4, 5], 26, -32, 32, 3),
        output_projection=numbers([30, 7], 27, -32, 32, 4))  # fmt: skip
    book.valid("long-sum", "d_v = 65 entries near 100: the sum leaves the range of float16", "NUM-1",
        "half-accumulation", dtypes=["float64", "float32", "bfloat16"], values=numbers([1, 1, 2, 65], 28, 96, 127, 0),
        output_projection=numbers([65, 2], 29, 96, 127, 0))  # fmt: skip
    values, projection = numbers([1, 2, 3, 2], 30, -8, 8, 1), numbers([4, 3], 31, -8, 8, 1)
    good: dict[str, Any] = {"values": values, "output_projection": projection}
    shape = "argument-shape"
    for name, rows in (("too-few-rows", 2), ("not-a-multiple", 6), ("odd-rows", 5)):
        book.invalid(name, f"{rows} rows are no positive multiple of H_kv d_v = 4", "MAP-11", shape,
            **{**good, "output_projection": numbers([rows, 3], 31, -8, 8, 1)})  # fmt: skip
    book.invalid("values-axes", "values of three axes", "MAP-11", shape,
        **{**good, "values": numbers([2, 3, 2], 30, -8, 8, 1)})  # fmt: skip
    book.invalid("projection-axes", "a projection of three axes", "MAP-11", shape,
        **{**good, "output_projection": numbers([2, 2, 3], 31, -8, 8, 1)})  # fmt: skip
    book.invalid("nan", "NaN in the values", "MAP-5", "not-finite",
        **{**good, "values": array([[[[1, "nan"]], [[1, 2]]]])})  # fmt: skip
    book.invalid("infinite", "-inf in the projection", "MAP-5", "not-finite",
        **{**good, "output_projection": array([["-inf"], [1], [1], [1]])})  # fmt: skip
    book.invalid("projection-nan", "NaN in the projection", "MAP-5", "not-finite",
        **{**good, "output_projection": array([[1], [1], [1], ["nan"]])})  # fmt: skip
    book.invalid("complex", "complex values", "MAP-5", "argument-dtype",
        **{**good, "values": array([[[[1, 2]], [[1, 2]]]], "complex128")})  # fmt: skip
    return book


BOOKS = (softmax, soften, value_outputs)
