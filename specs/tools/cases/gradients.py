"""Cases of chapter GRAD."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import oracle_loss as loss
from book import Arrays, Book, array, lengths, mask, numbers, probs, special
from exact import flatten, shape_of

from cases.loss_inputs import (
    DIVERGENCES,
    DTYPES_OF,
    STUDENT,
    TEACHER,
    pair_layers,
    refuse_bad_layers,
    shared_valid_cases,
)

EXACT = {"rule": "exact"}
GRADIENT = {"rule": "close", "quantity": "gradient", "exact_zeros": True}
ROUNDED = {"rule": "close", "quantity": "gradient"}


def shd_loss_gradient() -> Book:
    """GRAD-1, GRAD-2, GRAD-3, GRAD-9."""

    def answer(**given: Any) -> dict[str, Any]:
        dz = loss.shd_loss_gradient(**given)
        return {"dz": Arrays(dz) if len(shape_of(given["supervision"])) == 5 else dz}

    book = Book("shd_loss_gradient", ("dz",), answer, {"dz": GRADIENT}, _check_zeros)
    ids = {
        "row-sum-off": "GRAD-1",
        "row-sum-off-float64": "GRAD-1",
        "layers": "GRAD-9 GRAD-1",
        "one-layer-list": "GRAD-9",
    }
    # Rows with one key left: the student's row is the teacher's, and the zero is one of arithmetic.
    live_zeros = {"large", "causal", "causal-mask", "reverse-kl-causal", "js-causal", "mse-causal"}
    for name, comment, spec, flags, inputs in shared_valid_cases():
        extra = ids.get(name, "GRAD-1 GRAD-3" if "GRAD" not in spec else "")
        if name.startswith("kl") and "sinks" in name:
            extra = "GRAD-1 GRAD-2"
        kept = [
            f for f in flags.split() if f not in ("cross-entropy-called-kl", "loss-log2", "student-alone-softened")
        ]
        book.valid(name, comment, " ".join(dict.fromkeys(f"{extra} LOSS-8 {spec}".split())),
            " ".join([*kept, "gradient-on-uncounted-rows", "gradient-sign"]), dtypes=DTYPES_OF.get(name, ()),
            at=96 if name == "large" else 0, compare={"dz": ROUNDED} if name in live_zeros else None,
            **inputs)  # fmt: skip
    zero = {"dz": EXACT}
    book.valid("no-row-counts", "exactly 0", "LOSS-7 GRAD-3", "empty-mask-nan gradient-on-uncounted-rows",
        compare=zero, **pair_layers(TEACHER, STUDENT, loss_mask=mask([[0, 0]])))  # fmt: skip
    book.valid("no-row-has-mass", "exactly 0", "LOSS-7 GRAD-3", "empty-mask-nan gradient-on-uncounted-rows",
        compare=zero, **pair_layers(array([[[[0, 0]]]]), array([[[[0, 1]]]])))  # fmt: skip
    book.valid(
        "no-beta", "exactly 0", "GRAD-1", "beta-ignored", compare=zero, **pair_layers(TEACHER, STUDENT, beta=0)
    )
    for divergence in DIVERGENCES:
        book.valid(f"{divergence.replace('_', '-')}-equal", "equal rows: 0", "GRAD-1", compare={"dz": ROUNDED},
            **pair_layers(array([[[[0.5, 0.5]]]]), array([[[[3, 3]]]]), divergence=divergence))  # fmt: skip
    book.valid("tiny-student-probability", "the student's probability is 0 in float32, the gradient is not",
        "GRAD-1 LOSS-12", "epsilon-in-log", compare={"dz": ROUNDED},
        **pair_layers(array([[[[0.5, 0.5]]]]), array([[[[0, -200]]]])))  # fmt: skip
    book.valid("js-tiny-student-probability", "a probability of exp(-200) has a gradient of nearly 0, not NaN",
        "GRAD-1 LOSS-12", "epsilon-in-log masked-row-nan", compare={"dz": ROUNDED},
        **pair_layers(array([[[[0.5, 0.5, 0]]]]), array([[[[0, -200, -1024]]]]), divergence="js"))  # fmt: skip
    book.case(
        "reverse-kl-tiny-student-probability: the same",
        "GRAD-1 LOSS-12 epsilon-in-log masked-row-nan",
        compare={"dz": ROUNDED},
        **pair_layers(array([[[[0.25, 0.5, 0.25]]]]), array([[[[0, -200, -1024]]]]), divergence="reverse_kl"),
    )
    book.valid("scaled-up", "beta / T = 32 shows what tolerances might hide", "GRAD-1 TEMP-4",
        "gradient-without-temperature beta-ignored gradient-sign",
        **pair_layers(TEACHER, STUDENT, beta=16, temperature=0.5))  # fmt: skip
    refuse_bad_layers(book, STUDENT)
    return book


def _check_zeros(given: dict[str, Any], answer: dict[str, Any], flags: Sequence[str], rules: dict[str, Any]) -> None:
    """Exact zeros may be asked for only where the text says so: masked keys and rows that do not count."""
    for name, rule in rules.items():
        if rule.get("exact_zeros"):
            numbers_of = answer[name].items if isinstance(answer[name], Arrays) else answer[name]
            for number in flatten(numbers_of):
                assert isinstance(number, Fraction) or abs(number) > Decimal(10) ** -40, "a zero by arithmetic alone"


def shd_loss_gradient_qk() -> Book:
    """GRAD-4 to GRAD-9."""

    def answer(**given: Any) -> dict[str, Any]:
        dq, dk = loss.shd_loss_gradient_qk(**given)
        listed = len(shape_of(given["supervision"])) == 5
        return {"dq": Arrays(dq) if listed else dq, "dk": Arrays(dk) if listed else dk}

    book = Book("shd_loss_gradient_qk", ("dq", "dk"), answer, {"dq": GRADIENT, "dk": ROUNDED}, _check_zeros)

    def model(
        batch: int, heads: int, kv: int, rows: int, keys: int, width: int, seed: int, **rest: Any
    ) -> dict[str, Any]:
        return {
            "supervision": probs([batch, heads, rows, keys], seed, 4, 0, 6),
            "queries": numbers([batch, heads, rows, width], seed + 1, -8, 8, 2),
            "keys": numbers([batch, kv, keys, width], seed + 2, -8, 8, 2),
            **rest,
        }

    plain = "qk-without-scale qk-swapped gradient-sign"
    book.valid("two-heads", "z = q k / 2", "GRAD-4", plain, **model(1, 2, 2, 2, 3, 2, 1101, scale=0.5))
    book.valid("scale-one", "scale 1", "GRAD-4", plain, **model(1, 1, 1, 2, 3, 2, 1111, scale=1))
    book.valid("scale-negative", "a scale is any finite number", "GRAD-8 GRAD-4", plain,
        **model(1, 1, 1, 2, 3, 2, 1121, scale=-0.25))  # fmt: skip
    book.valid("grouped", "four query heads read two key heads: dk sums over those that read it", "GRAD-5",
        f"{plain} gqa-interleaved gqa-dk-not-summed", **model(2, 4, 2, 2, 3, 2, 1131, scale=0.5))  # fmt: skip
    book.valid("one-key-head", "all query heads read the one key head", "GRAD-5", "gqa-dk-not-summed",
        **model(1, 3, 1, 2, 3, 2, 1141, scale=0.5))  # fmt: skip
    book.valid("padded-rows", "dq is 0 on rows that do not count, and they give nothing to dk", "GRAD-6",
        "gradient-on-uncounted-rows mean-over-all-rows mean-per-sample",
        **model(2, 2, 2, 3, 3, 2, 1151, scale=0.5, loss_mask=lengths(3, [3, 1])))  # fmt: skip
    book.valid("causal", "masked keys by attn_mask", "GRAD-5 GRAD-3", "mask-transposed mask-polarity",
        compare={"dq": ROUNDED},
        **{**model(1, 2, 2, 3, 3, 2, 1161, scale=0.5),
        "supervision": probs([1, 2, 3, 3], 1161, 4, 0, 6, causal=True),
        "attn_mask": mask([[1, 0, 0], [1, 1, 0], [1, 1, 1]])})  # fmt: skip
    book.valid("zero-rows", "a row of zeros does not count", "GRAD-6",
        "gradient-on-uncounted-rows mean-over-all-rows",
        **{**model(1, 2, 1, 3, 3, 2, 1171, scale=0.5),
        "supervision": probs([1, 2, 3, 3], 1171, 4, 0, 6, zero_rows=[1])})  # fmt: skip
    for divergence in DIVERGENCES:
        book.valid(f"{divergence.replace('_', '-')}-temperature",
            "every divergence at T = 2, with beta and the mean", "GRAD-4 GRAD-1 TEMP-4",
            "divergence-ignored gradient-without-temperature beta-ignored reduction-ignored",
            **model(1, 2, 2, 2, 3, 2, 1181, scale=0.5, temperature=2, beta=4, reduction="mean",
            divergence=divergence))  # fmt: skip
    book.valid("sinks", "rows weigh their mass", "GRAD-2 GRAD-4", "sink-filled sink-not-weighed",
        **{**model(1, 1, 1, 2, 3, 2, 1191, scale=0.5, row_sums="at_most_one"),
        "supervision": array([[[[0.25, 0.125, 0.125], [0.5, 0.125, 0.25]]]])})  # fmt: skip
    book.valid("intersect", "supports are intersected first", "GRAD-4 LOSS-14",
        "support-ignored intersect-not-rescaled",
        **model(1, 1, 1, 2, 3, 2, 1201, scale=0.5, support="intersect", attn_mask=mask([1, 1, 0])))  # fmt: skip
    first, second = model(1, 2, 1, 2, 3, 2, 1213), model(1, 1, 1, 3, 2, 3, 1225)
    layers: dict[str, Any] = {name: [first[name], second[name]] for name in first}
    layers |= {"scale": 0.5, "reduction": "mean"}
    book.valid("layers", "lists of layers give lists of gradients", "GRAD-9 GRAD-8", "layers-averaged", **layers)
    book.valid("ugly", "d = 5, 13 queries, 11 keys, 6 query heads and 3 key heads", "GRAD-4 GRAD-5",
        "ugly-shape gqa-interleaved", at=64,
        **model(2, 6, 3, 13, 11, 5, 1231, scale=0.25, loss_mask=lengths(13, [13, 4])))  # fmt: skip
    good = model(1, 4, 2, 2, 3, 2, 1241, scale=0.5)
    shape = "argument-shape"
    for name, change in (
        ("key-heads", {"keys": numbers([1, 3, 3, 2], 1243, -8, 8, 2)}),
        ("too-many-key-heads", {"keys": numbers([1, 8, 3, 2], 1243, -8, 8, 2)}),
        ("widths", {"keys": numbers([1, 2, 3, 4], 1243, -8, 8, 2)}),
        ("key-positions", {"keys": numbers([1, 2, 4, 2], 1243, -8, 8, 2)}),
        ("query-positions", {"queries": numbers([1, 4, 3, 2], 1243, -8, 8, 2)}),
        ("query-heads", {"queries": numbers([1, 2, 2, 2], 1243, -8, 8, 2)}),
        ("samples", {"keys": numbers([2, 2, 3, 2], 1243, -8, 8, 2)}),
        ("axes", {"keys": numbers([2, 3, 2], 1243, -8, 8, 2)}),
    ):
        book.invalid(f"shapes-{name}", "queries (B, H_s, L, d) and keys (B, H_kv, S, d)", "GRAD-5", shape,
            **{**good, **change})  # fmt: skip
    one: dict[str, Any] = {
        "supervision": array([[[[1]]]]),
        "queries": array([[[[1, 2]]]]),
        "keys": array([[[[1, 2]]]]),
        "scale": 1,
    }
    for argument in ("queries", "keys"):
        book.invalid(f"{argument}-nan", "queries and keys are finite", "MAP-5", "not-finite",
            **{**one, argument: array([[[[1, "nan"]]]])})  # fmt: skip
    book.invalid(
        "scale-boolean", "a boolean is no number", "ERR-6 GRAD-8", "argument-value", **{**good, "scale": True}
    )
    for name in ("nan", "inf"):
        book.invalid(f"scale-{name}", "scale is a finite number", "GRAD-8", "argument-value",
            **{**good, "scale": special(name)})  # fmt: skip
    value, bad = "argument-value", "not-a-distribution"
    for name in ("queries", "keys"):
        book.invalid(f"{name}-complex", "queries and keys are real numbers", "MAP-5", "argument-dtype",
            **{**one, name: array([[[[1, 2]]]], "complex128")})  # fmt: skip
    for name, row, code in (
        ("negative", [1.25, -0.25], bad),
        ("sum-below", [0.5, 0.25], bad),
        ("sum-above", [0.5, 0.75], bad),
        ("nan", [0.5, "nan"], "not-finite"),
    ):
        spec = "MAP-5" if name == "nan" else "MAP-3"
        inputs: dict[str, Any] = {**one, "supervision": array([[[row]]]), "keys": array([[[[1, 2], [3, 1]]]])}
        book.invalid(f"supervision-{name}", "supervision is checked as in the loss", spec, code, **inputs)
    for name, spec, code, change in (
        ("reduction-unknown", "LOSS-5", value, {"reduction": "batchmean"}),
        ("support-unknown", "LOSS-14", value, {"support": "ignore"}),
        ("row-sums-unknown", "MAP-9", value, {"row_sums": "many"}),
        ("attn-mask-of-integers", "MAP-7", "argument-dtype", {"attn_mask": array([1, 1, 1], "int64")}),
        ("divergence-unknown", "LOSS-11", "argument-value", {"divergence": "tv"}),
        ("beta-negative", "LOSS-2", "argument-value", {"beta": -1}),
        ("temperature-zero", "TEMP-1", "argument-value", {"temperature": 0}),
        ("mask-of-integers", "MAP-7", "argument-dtype", {"loss_mask": array([[1, 1]], "int64")}),
        ("mass-on-masked-key", "LOSS-6", "support-mismatch", {"attn_mask": mask([1, 1, 0])}),
    ):
        book.invalid(name, "options are those of shd_loss", spec, code, **{**good, **change})
    return book


BOOKS = (shd_loss_gradient, shd_loss_gradient_qk)
