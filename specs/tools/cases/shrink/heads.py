"""Cases of chapter HEAD of ``specs/shrink.md``: products of a student's factors, attention, plans and C."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import oracle_loss as loss
import oracle_shrink as oracle
from book import array, mask, numbers, probs
from exact import combine

from cases.shrink.inputs import EXACT, FACTOR, PRODUCT, WIDTH, WideBook, layer, merge, moments

LAYER = ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias", "output_bias")
PLAN = {"rule": "plan"}
ALPHA = {"rule": "alpha"}
FORMS = {"logit_forms": PRODUCT, "value_forms": PRODUCT, "constant": PRODUCT}
CUT = {"logit_forms": FACTOR, "value_forms": FACTOR, "constant": FACTOR}
PAIRS = merge([[0, 1], [2, 3]], [0.25, 0.75], [0.625, 0.375])
CROSSED = merge([[3, 0], [1, 2]], [0.375, 0.625], [0.75, 0.25])
ROTARY = {"frequencies": array([0.75])}


def attend() -> WideBook:
    """HEAD-2, HEAD-6, HEAD-14."""
    book = WideBook("attend", ("outputs",), lambda **given: {"outputs": oracle.attend(**given)}, {"outputs": FACTOR})
    x = numbers([2, 3, WIDTH], 5001, -8, 8, 2)
    causal = mask([[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    book.valid("heads", "a layer without biases", "HEAD-2", inputs={"inputs": x, "weights": layer(2, 2, 5010)})
    book.valid(
        "grouped",
        "four query heads read two key and value heads, with biases and a mask",
        "HEAD-2 MAP-6",
        inputs={"inputs": x, "weights": layer(4, 2, 5020, "qkvo"), "attn_mask": causal},
    )
    book.valid(
        "merged",
        "softmax of the group's mixed logits, a map a group",
        "HEAD-2 HEAD-6",
        "maps-mixed-not-logits",
        inputs={"inputs": x, "weights": layer(4, 2, 5030, "qkv"), "merge": CROSSED, "attn_mask": causal},
    )
    book.valid(
        "scale",
        "a scale that is not that of the length",
        "HEAD-2 HEAD-10",
        inputs={"inputs": x, "weights": layer(2, 1, 5040, scale=0.375), "merge": merge([[1, 0]], [0.5, 0.5])},
    )
    for layout, dim in (("half", 4), ("adjacent", 4), ("half", 5)):
        book.valid(
            f"rotary-{layout}-{dim}", "pairs that turn, by position", "HEAD-8 HEAD-14",
            inputs={
                "inputs": x,
                "weights": layer(2, 2, 5050 + dim, "qk", dim),
                "merge": merge([[0, 1]], [0.25, 0.75]),
                "rotary": {"frequencies": array([0.75, 0.25]), "layout": layout},
            },
        )  # fmt: skip
    good = {"inputs": x, "weights": layer(2, 2, 5010)}
    _bad_records(book, good)
    book.invalid(
        "channels",
        "inputs with fewer channels than the layer reads",
        "HEAD-2",
        "argument-shape",
        inputs={**good, "inputs": numbers([1, 2, 3], 5002, -8, 8, 2)},
    )
    book.invalid(
        "not-finite",
        "NaN in the inputs",
        "HEAD-2",
        "not-finite",
        inputs={**good, "inputs": array([[["nan", 0, 0, 0]]])},
    )
    book.invalid(
        "layout",
        "pairs that lie in no known way",
        "HEAD-14",
        "argument-value",
        inputs={**good, "rotary": {"frequencies": array([0.5]), "layout": "quarter"}},
    )
    return book  # fmt: skip


def _bad_records(book: WideBook, good: dict[str, Any]) -> None:
    """What is refused of a layer and of a merge."""
    weights = good["weights"]
    for name, comment, code, changes in (
        ("key-channels", "keys read other channels than queries", "argument-shape",
         {"key": numbers([2, 3, 2], 1, 0, 4, 2)}),
        ("key-heads", "two query heads over three key heads", "argument-shape",
         {"key": numbers([3, 4, 2], 1, 0, 4, 2), "value": numbers([3, 4, 2], 2, 0, 4, 2)}),
        ("bias-shape", "a bias of another length", "argument-shape", {"query_bias": array([[1, 2, 3], [1, 2, 3]])}),
        ("weights-infinite", "an infinite weight", "not-finite",
         {"key_bias": array([["inf", 0], [0, 0]])}),
        ("scale-zero", "a scale of 0", "argument-value", {"scale": 0}),
        ("weights-complex", "complex weights", "argument-dtype",
         {"query_bias": array([[1, 0], [0, 1]], "complex128")}),
    ):  # fmt: skip
        book.invalid(name, comment, "HEAD-1", code, inputs={**good, "weights": {**weights, **changes}})
    for name, comment, code, record in (
        ("head-twice", "a head in two groups", "argument-shape",
         {"mixing": array([[1, 0], [0, 1]]), "groups": [[0, 1], [1]]}),
        ("head-missing", "a head in no group", "argument-shape", {"mixing": array([[1, 0]]), "groups": [[0]]}),
        ("group-empty", "a group without heads", "argument-shape",
         {"mixing": array([[0.5, 0.5], [0, 0]]), "groups": [[0, 1], []]}),
        ("head-half", "a head that is no integer", "argument-shape",
         {"mixing": array([[0.5, 0.5]]), "groups": [[0, 1.5]]}),
        ("heads-more", "a merge of four heads in a layer of two", "argument-shape", PAIRS),
        ("sum", "weights that sum to less than one", "mixing-invalid",
         {"mixing": array([[0.5, 0.25]]), "groups": [[0, 1]]}),
        ("negative", "a weight below 0", "mixing-invalid", {"mixing": array([[1.5, -0.5]]), "groups": [[0, 1]]}),
        ("outside", "a weight outside the group", "mixing-invalid",
         {"mixing": array([[0.5, 0.5], [0, 1]]), "groups": [[0], [1]]}),
    ):  # fmt: skip
        book.invalid(name, comment, "HEAD-1", code, inputs={**good, "merge": record})


def mix_queries() -> WideBook:
    """HEAD-7, HEAD-8, HEAD-18."""
    rules = {**FORMS, "query": PRODUCT, "query_bias": PRODUCT, "output": PRODUCT}
    book = WideBook("mix_queries", LAYER, oracle.mix_queries, rules)
    bare = {**rules, "query_bias": EXACT}
    for biases in ("", "qkv", "qkvo"):
        book.valid(
            f"grouped-{biases or 'bare'}",
            "four heads over two key heads become two",
            "HEAD-7 HEAD-1",
            "weights-transposed outputs-averaged bias-left-out",
            inputs={"weights": layer(4, 2, 5110, biases), "merge": PAIRS},
            compare=None if biases else bare,
        )
    book.valid(
        "order",
        "a group lists its heads in any order, and a weight of 0 still adds values",
        "HEAD-1 HEAD-7",
        "outputs-weighted",
        inputs={
            "weights": layer(6, 2, 5120, "q"),
            "merge": merge([[2, 0, 1], [4, 3, 5]], [0.5, 0.5, 0], [0.25, 0.25, 0.5]),
        },
    )
    book.valid(
        "uneven",
        "groups of one and two inside a key head",
        "HEAD-7",
        inputs={"weights": layer(3, 1, 5130, "qo"), "merge": merge([[2], [0, 1]], [1], [0.125, 0.875])},
    )
    book.valid(
        "scale",
        "the teacher's own scale stays",
        "HEAD-7",
        "scale-lost",
        inputs={"weights": layer(4, 2, 5140, scale=0.375), "merge": PAIRS},
        compare=bare,
    )
    book.valid(
        "query-norm",
        "queries of unlike length are mixed at equal length",
        "HEAD-18",
        "query-norm-ignored",
        inputs={"weights": layer(4, 2, 5150), "merge": PAIRS, "query_size": array([0.5, 2, 1, 0.25])},
        compare=bare,
    )
    good = {"weights": layer(4, 2, 5110), "merge": PAIRS}
    for name, comment, record in (
        ("crossed", "groups across key heads", CROSSED),
        (
            "swapped",
            "groups in the other order than their key heads",
            merge([[2, 3], [0, 1]], [0.5, 0.5], [0.5, 0.5]),
        ),
        ("unequal", "key heads with unequally many student heads", merge([[0], [1], [2, 3]], [1], [1], [0.5, 0.5])),
    ):
        book.invalid(name, comment, "HEAD-7", "shrink-unsupported", inputs={**good, "merge": record})
    book.invalid(
        "size-zero",
        "a query of size 0",
        "HEAD-18",
        "argument-value",
        inputs={**good, "query_size": array([1, 1, 0, 1])},
    )
    book.invalid(
        "size-shape",
        "sizes of fewer heads",
        "HEAD-18",
        "argument-shape",
        inputs={**good, "query_size": array([1, 1])},
    )
    _bad_records(book, {"weights": layer(2, 2, 5010), "merge": merge([[0], [1]], [1], [1])})
    return book  # fmt: skip


def concatenate_heads() -> WideBook:
    """HEAD-9, HEAD-10."""
    book = WideBook("concatenate_heads", LAYER, oracle.concatenate_heads, FORMS)
    for biases in ("", "qkv", "qkvo"):
        book.valid(
            f"crossed-{biases or 'bare'}",
            "groups across key heads, side by side",
            "HEAD-9 HEAD-10",
            "scale-lost bias-left-out",
            inputs={"weights": layer(4, 2, 5210, biases), "merge": CROSSED, "head_dim": 4},
        )
    book.valid(
        "padded",
        "groups of one and three, and a head with room to spare",
        "HEAD-9 HEAD-10",
        inputs={
            "weights": layer(4, 4, 5220, "qk"),
            "merge": merge([[1], [3, 0, 2]], [1], [0.25, 0.25, 0.5]),
            "head_dim": 7,
        },
    )
    book.valid(
        "scale",
        "the teacher's own scale",
        "HEAD-10",
        "scale-lost",
        inputs={"weights": layer(4, 4, 5230, scale=0.375), "merge": PAIRS, "head_dim": 5},
    )
    good = {"weights": layer(4, 2, 5210), "merge": CROSSED, "head_dim": 4}
    for name, comment, value in (("short", "too short for a group of two", 3), ("half", "no whole number", 4.5)):
        book.invalid(name, comment, "HEAD-9", "argument-value", inputs={**good, "head_dim": value})
    book.invalid(
        "other-heads",
        "a merge of other heads",
        "HEAD-1",
        "argument-shape",
        inputs={**good, "merge": merge([[0, 1]], [0.5, 0.5])},
    )
    return book  # fmt: skip


def low_rank_heads() -> WideBook:
    """HEAD-11 to HEAD-16."""
    book = WideBook("low_rank_heads", LAYER, oracle.low_rank_heads, CUT)
    moment, centred = moments(5301)
    given = {"moment": moment, "key_moment": centred}
    for biases in ("", "qkv", "qkvo"):
        book.valid(
            f"own-keys-{biases or 'bare'}",
            "each student head has its own keys",
            "HEAD-11 HEAD-12 HEAD-13",
            "key-moment-uncentred rank-cut bias-left-out",
            inputs={
                "weights": layer(4, 4, 5310, biases),
                "merge": CROSSED,
                "num_kv_heads": 2,
                "head_dim": 2,
                **given,
            },
        )
        book.valid(
            f"shared-keys-{biases or 'bare'}",
            "two student heads share one key and value head",
            "HEAD-11 HEAD-12 HEAD-13",
            "rank-cut factors-not-shared",
            inputs={
                "weights": layer(4, 2, 5320, biases),
                "merge": CROSSED,
                "num_kv_heads": 1,
                "head_dim": 3,
                **given,
            },
        )
    book.valid(
        "moment-alone",
        "the keys' moment about the mean comes from the one moment",
        "HEAD-11",
        inputs={
            "weights": layer(4, 4, 5330, "q"),
            "merge": PAIRS,
            "num_kv_heads": 2,
            "head_dim": 2,
            "moment": moment,
        },
    )
    book.valid(
        "whole",
        "more ranks than the forms have: they are as they were",
        "HEAD-13",
        inputs={"weights": layer(4, 4, 5340, "qo"), "merge": PAIRS, "num_kv_heads": 2, "head_dim": 6, **given},
    )
    book.valid(
        "ridge",
        "a larger ridge turns the cut",
        "HEAD-13",
        inputs={
            "weights": layer(4, 4, 5350),
            "merge": PAIRS,
            "num_kv_heads": 2,
            "head_dim": 2,
            "ridge": 0.5,
            **given,
        },
    )
    book.valid(
        "scale",
        "the teacher's own scale",
        "HEAD-11",
        "scale-lost",
        inputs={"weights": layer(4, 4, 5360, scale=0.375), "merge": PAIRS, "num_kv_heads": 2, "head_dim": 1, **given},
    )
    _rotary_cases(book, given)
    good = {"weights": layer(4, 4, 5310), "merge": PAIRS, "num_kv_heads": 2, "head_dim": 2, **given}
    for name, comment, spec, code, changes in (
        ("moment-bare", "a moment without the one", "HEAD-11", "argument-shape", {"moment": centred}),
        ("key-heads", "two student heads over three key heads", "HEAD-11", "argument-value argument-shape",
         {"num_kv_heads": 3}),
        ("key-heads-none", "no key head", "HEAD-11", "argument-value", {"num_kv_heads": 0}),
        ("rank-none", "heads without entries", "HEAD-11", "argument-value", {"head_dim": 0}),
        ("ridge-negative", "a ridge below 0", "HEAD-13", "argument-value", {"ridge": -0.5}),
        ("rotary-length", "another length with rotary positions", "HEAD-14", "shrink-unsupported",
         {"rotary": ROTARY, "head_dim": 3}),
        ("slow-shape", "slow says nothing of a pair", "HEAD-16", "argument-shape",
         {"rotary": {**ROTARY, "slow": mask([1, 0])}}),
        ("moment-nan", "NaN in the moment", "HEAD-11", "not-finite", {"moment": array([["nan"] * 5] * 5)}),
    ):  # fmt: skip
        book.invalid(name, comment, spec, code, inputs={**good, **changes})
    return book  # fmt: skip


def _rotary_cases(book: WideBook, given: dict[str, Any]) -> None:
    fast, whole = {"value_forms": FACTOR, "constant": FACTOR, "pair_forms": FACTOR}, dict(CUT)
    del whole["logit_forms"]
    both = {**fast, "still_forms": FACTOR}
    pairs = {"frequencies": array([0.75, 0.25])}
    for name, comment, spec, rotary, dim, biases, rules in (
        ("rotary", "rank one for each pair", "HEAD-14 HEAD-15", pairs, 4, "", fast),
        ("rotary-biases", "biases are one more row on both sides", "HEAD-15", pairs, 4, "qkvo", fast),
        ("rotary-adjacent", "pairs of entries that lie side by side", "HEAD-14 HEAD-15",
         {**pairs, "layout": "adjacent"}, 4, "qk", fast),
        ("rotary-partial", "entries that do not turn, as one real form", "HEAD-15 HEAD-16", pairs, 5, "q", both),
        ("rotary-slow", "a slow pair with the entries that do not turn", "HEAD-16",
         {**pairs, "slow": mask([0, 1])}, 5, "", both),
        ("rotary-slow-pair", "a slow pair alone", "HEAD-16", {**pairs, "slow": mask([0, 1])}, 4, "k", both),
    ):  # fmt: skip
        book.rules = rules
        for kv_heads in (2, 1):
            book.valid(
                f"{name}-{kv_heads}", comment, spec, "rotary-not-conjugate pairs-as-real",
                inputs={"weights": layer(4, 2, 5370, biases, dim), "merge": CROSSED, "num_kv_heads": kv_heads,
                        "head_dim": dim, "rotary": rotary, **given},
            )  # fmt: skip
    book.rules = CUT


GRAMS = {
    heads: loss.gram_tensor(
        probs([2, heads, 3, 4], 5400 + heads, 9, 2, 3).value,
        numbers([2, heads, 4, 2], 5410 + heads, -4, 4, 1).value,
        numbers([heads * 2, 3], 5420 + heads, -4, 4, 1).value,
    )
    for heads in (3, 4, 8)
}


def _pool(heads: int) -> Any:
    first, second = GRAMS[heads]
    return array(combine(Fraction(1), first, Fraction(1), second))


def pooled_mixing() -> WideBook:
    """HEAD-3."""
    book = WideBook("pooled_mixing", ("mixing", "groups"), oracle.pooled_mixing, {"mixing": ALPHA, "groups": EXACT})
    for name, comment, heads, plan in (
        ("one-round", "two pairs of one round", 4, [[[0, 1], [2, 3]]]),
        ("two-rounds", "a round of the merged heads", 4, [[[0, 2], [3, 1]], [[1, 0]]]),
        ("untouched", "a head that no round touches", 3, [[[2, 0]]]),
        ("none", "no round: every head alone", 3, []),
    ):
        book.valid(
            name,
            comment,
            "HEAD-3 GRAM-2 GRAM-4",
            "alpha-swapped pool-in-place",
            inputs={"gram": _pool(heads), "plan": plan},
        )
    good = {"gram": _pool(3), "plan": [[[0, 1]]]}
    book.invalid(
        "plan", "a position that does not exist", "HEAD-3 PLAN-7", "plan-invalid", inputs={**good, "plan": [[[0, 3]]]}
    )
    book.invalid(
        "shape",
        "a gram tensor of three axes",
        "HEAD-3",
        "argument-shape",
        inputs={**good, "gram": numbers([2, 2, 2], 1, 0, 4, 1)},
    )
    book.invalid(
        "infinite",
        "an infinite gram tensor",
        "HEAD-3",
        "not-finite",
        inputs={"gram": array([[[["inf"]]]]), "plan": []},
    )
    return book  # fmt: skip


def grouped_plan() -> WideBook:
    """HEAD-4, HEAD-5."""
    book = WideBook("grouped_plan", ("plan",), lambda **given: {"plan": oracle.grouped_plan(**given)}, {"plan": PLAN})
    for heads, students, kv_heads in ((8, 4, 2), (8, 2, 2), (8, 4, 4), (4, 2, 1), (4, 3, 1), (4, 1, 1), (3, 3, 3)):
        book.valid(
            f"{heads}-{students}-{kv_heads}",
            f"{heads} heads to {students} over {kv_heads} key heads",
            "HEAD-4 HEAD-5",
            "plan-crosses-key-heads",
            inputs={"gram": _pool(heads), "num_student_heads": students, "num_kv_heads": kv_heads},
        )
    gram = loss.gram_tensor(
        probs([1, 4, 3, 4], 5460, 9, 2, 3).value,
        numbers([1, 4, 4, 2], 5461, -4, 4, 1).value,
        numbers([8, 3], 5462, -4, 4, 1).value,
    )
    book.valid(
        "best-alpha", "the pairs that fit best, each with its own alpha and not with 1/2", "HEAD-4", "plan-at-half",
        inputs={"gram": array(gram[0]), "num_student_heads": 2, "num_kv_heads": 1},
    )  # fmt: skip
    for name, comment, students, kv_heads in (
        ("no-multiple", "three heads over two key heads", 3, 2),
        ("teacher-no-multiple", "four heads over three key heads", 3, 3),
        ("more", "more heads than the teacher has", 5, 1),
        ("none", "no head", 0, 1),
        ("half", "no whole number", 2.5, 1),
    ):
        book.invalid(
            name,
            comment,
            "HEAD-4",
            "argument-value heads-exceed" if name == "more" else "argument-value",
            inputs={"gram": _pool(4), "num_student_heads": students, "num_kv_heads": kv_heads},
        )
    return book  # fmt: skip


BOOKS = (attend, mix_queries, concatenate_heads, low_rank_heads, pooled_mixing, grouped_plan)
