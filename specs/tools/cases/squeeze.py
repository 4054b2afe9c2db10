"""Cases of squeeze_heads: chapter MIX with plans, alphas, masks and sinks together."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import oracle_heads as heads
from book import Arrays, Book, array, lengths, mask, numbers, probs, random_model

from cases.maps import BAD_TEMPERATURES, bad_maps
from cases.strategies import add_residuals, add_strategies, add_temperatures

PLAN = {"rule": "plan"}
ALPHA = {"rule": "alpha"}
EXACT = {"rule": "exact"}
MIXING = {"rule": "close", "quantity": "alpha"}
PROBS = {"rule": "close", "quantity": "probs"}
RESIDUAL = {"rule": "close", "quantity": "residual"}
COUNTS = ("num_clipped", "num_degenerate")
SUMMED = "merged-outputs-mean merged-outputs-first merged-outputs-mixed"
POOL = "pool-in-place pool-untouched-first"
FORMULA = "alpha-misprinted alpha-swapped alpha-unclipped"


def squeeze_heads() -> Book:
    """MIX-4 to MIX-17, TEMP-3, NUM."""
    book = Book(
        "squeeze_heads",
        ("probs", "mixing", "alphas", "residual", *COUNTS, "plan"),
        _squeeze,
        {
            "probs": PROBS,
            "mixing": MIXING,
            "alphas": ALPHA,
            "residual": RESIDUAL,
            "num_clipped": EXACT,
            "num_degenerate": EXACT,
            "plan": PLAN,
        },
        _check_squeeze,
    )
    _rounds_of_shd(book)
    add_strategies(book)
    add_temperatures(book)
    add_residuals(book)
    _large_squeezes(book)
    _refused_by_squeeze_heads(book)
    return book


def _squeeze(**given: Any) -> dict[str, Any]:
    result = heads.squeeze_heads(**given)
    answer = {name: getattr(result, name) for name in ("probs", "mixing", "residual", *COUNTS, "plan")}
    return {**answer, "alphas": Arrays(result.alphas), "solved": result.solved}


def _check_squeeze(
    given: dict[str, Any], answer: dict[str, Any], flags: Sequence[str], rules: dict[str, Any]
) -> None:
    """NUM-7: where counts are compared, no call may be close; the same for the choice of ``hard``."""
    for sums in answer["solved"]:
        if sums.bottom == 0:
            continue
        best, margin = float(sums.best), 0.05
        if "near-degenerate" not in flags:
            assert float(sums.bottom) > 1e-5 * float(sums.scale), "too near to degenerate"
        if given.get("strategy") == "hard" and "hard-tie" not in flags:
            assert abs(best - 0.5) > margin, f"too near to a tie: {best}"
        if "num_clipped" in rules:
            assert min(abs(best), abs(best - 1)) > margin, f"too near to the clip: {best}"


def _rounds_of_shd(book: Book) -> None:
    book.valid("two-to-one", "one pair, one row: nothing is lost", "MIX-4 MIX-8 MIX-11", FORMULA,
        teacher_probs=array([[[[1, 0]], [[0, 1]]]]), value_outputs=array([[[[1], [0]], [[3], [0]]]]),
        num_student_heads=1)  # fmt: skip
    book.valid("three-to-one", "the merged head is read with X_0 + X_1 when head 2 joins", "MIX-4 MIX-9",
        f"{FORMULA} {SUMMED}", **{**random_model(2, 3, 3, 4, 2, 211), "num_student_heads": 1})  # fmt: skip
    book.valid("four-to-three", "one pair; heads 2 and 3 stay", "MIX-4 PLAN-4 PLAN-5",
        f"{POOL} plan-overshoot plan-last-pairs",
        **{**random_model(2, 4, 3, 4, 2, 223), "num_student_heads": 3})  # fmt: skip
    book.valid("five-to-two", "two pairs, then one: head 4 stays to the end", "MIX-4 PLAN-5",
        f"{POOL} plan-overshoot plan-last-pairs plan-halves",
        **{**random_model(2, 5, 3, 4, 3, 233), "num_student_heads": 2})  # fmt: skip
    book.valid("five-to-three", "two pairs of five: head 4 stays and comes last", "MIX-4 PLAN-4",
        f"{POOL} plan-last-pairs plan-halves",
        **{**random_model(1, 5, 3, 4, 3, 241), "num_student_heads": 3})  # fmt: skip
    book.valid("explicit-middle", "explicit rounds: the pair of the middle goes first", "MIX-16 PLAN-4", POOL,
        **{**random_model(2, 4, 3, 4, 2, 251), "num_student_heads": 3, "plan": [[[1, 2]]]})  # fmt: skip
    book.case(
        "explicit-swapped: positions out of order: alpha is the weight of the pair's first head",
        f"MIX-16 MIX-4 PLAN-6 alpha-swapped {SUMMED} pair-sorted",
        **{**random_model(2, 4, 3, 4, 2, 261), "num_student_heads": 2, "plan": [[[3, 1]], [[1, 0]]]},
    )
    book.valid("balanced", "five heads in groups of three and two", "MIX-16 PLAN-8",
        "balanced-is-progressive balanced-larger-last",
        **{**random_model(2, 5, 3, 4, 3, 271), "num_student_heads": 2, "plan": "balanced"})  # fmt: skip
    book.valid("identity", "equal counts: nothing happens", "MIX-4 PLAN-3", "identity-plan",
        **{**random_model(2, 3, 2, 4, 2, 281), "num_student_heads": 3})  # fmt: skip
    book.valid("identity-per-row", "equal counts with a query axis on C", "MIX-12 PLAN-3", "identity-plan",
        **{**random_model(1, 2, 3, 4, 2, 283), "num_student_heads": 2, "alpha_per": "row"})  # fmt: skip
    book.valid("as-printed", "the printed rule by name", "ALPHA-4 MIX-4", "alpha-rule-ignored", leave_out=COUNTS,
        **{**random_model(2, 4, 3, 4, 2, 291), "num_student_heads": 2, "alpha_rule": "as_printed"})  # fmt: skip
    book.case(
        "padded-rows: rows past the lengths 2 and 4 enter no sum, but are mixed like the others",
        "ALPHA-7 MIX-8 alpha-padded-rows residual-uncounted-rows mask-polarity",
        **{**random_model(2, 3, 4, 5, 2, 301), "num_student_heads": 1, "query_mask": lengths(4, [2, 4])},
    )
    book.valid(
        "sample-without-rows",
        "a sample with no counted row: degenerate, residual 0; the other is as it is alone",
        "ALPHA-7 MIX-8 MIX-10",
        "alpha-padded-rows degenerate-nan degenerate-value",
        **{**random_model(2, 3, 3, 4, 2, 311), "num_student_heads": 1, "query_mask": lengths(3, [0, 3])},
    )
    book.valid("per-row", "one alpha a row", "ALPHA-9 MIX-11 MIX-12", f"alpha-per-ignored {SUMMED}", leave_out=COUNTS,
        **{**random_model(2, 3, 3, 4, 3, 321), "num_student_heads": 1, "alpha_per": "row"})  # fmt: skip
    book.valid("per-row-padded", "rows that do not count get 1/2 and are not counted as clipped or degenerate",
        "ALPHA-9 MIX-11 MIX-14", "alpha-per-ignored alpha-padded-rows count-uncounted-rows",
        teacher_probs=array([[[[1, 0], [0.5, 0.5], [1, 0], [0, 1]], [[0, 1], [0.5, 0.5], [0.25, 0.75], [1, 0]]]]),
        value_outputs=array([[[[2], [0]], [[0], [1]]]]), num_student_heads=1, alpha_per="row",
        query_mask=mask([[1, 1, 0, 0]]))  # fmt: skip
    book.valid("per-row-masked-row", "a fully masked row that counts is degenerate, and is counted so",
        "ALPHA-9 MIX-11", "count-uncounted-rows degenerate-nan",
        teacher_probs=array([[[[0, 0], [1, 0], [1, 0]], [[0, 0], [0, 1], [0, 1]]]]),
        value_outputs=array([[[[2], [0]], [[0], [1]]]]), num_student_heads=1, alpha_per="row",
        query_mask=mask([[1, 1, 0]]))  # fmt: skip
    book.valid("clipped-and-degenerate",
        "three samples: clipped, degenerate, neither; counts are sums over samples and pairs",
        "ALPHA-5 MIX-9 MIX-11 NUM-7", "count-per-sample degenerate-counts-as-clipped alpha-unclipped",
        teacher_probs=array([[[[1, 0]], [[0, 1]], [[1, 0]], [[0, 1]]],
        [[[1, 0]], [[1, 0]], [[0, 1]], [[0, 1]]], [[[1, 0]], [[0, 1]], [[0.5, 0.5]], [[0, 1]]]]),
        value_outputs=array([[[[2], [0]], [[0], [1]], [[0], [1]], [[2], [0]]],
        [[[2], [0]], [[0], [1]], [[1], [2]], [[0], [3]]], [[[1], [0]], [[3], [0]], [[2], [0]], [[0], [1]]]]),
        num_student_heads=2)  # fmt: skip
    book.valid("near-degenerate", "the pair's maps differ by 1/256 where little is read", "NUM-5 NUM-6",
        "near-degenerate", leave_out=COUNTS,
        teacher_probs=array([[[[Fraction(255, 256), Fraction(1, 256), 0]],
        [[Fraction(255, 256), 0, Fraction(1, 256)]]]]),
        value_outputs=array([[[[64], [1], [0]], [[64], [0], [0]]]]), num_student_heads=1)  # fmt: skip
    book.valid("equal-heads", "equal heads merge to themselves", "ALPHA-6 MIX-4", "degenerate-value degenerate-nan",
        teacher_probs=array([[[[0.25, 0.75], [1, 0]]] * 4]), value_outputs=numbers([1, 4, 2, 3], 331, -8, 16, 2),
        num_student_heads=2)  # fmt: skip
    book.valid("sinks", "maps as they are: nothing is filled up, a merged row has the mixed mass", "MIX-17 MAP-9",
        "sink-filled",
        teacher_probs=array([[[[0.5, 0.125], [0.25, 0.25]], [[0.125, 0.25], [0.5, 0.5]],
        [[0.0625, 0.5], [0, 0.25]]]]),
        value_outputs=array([[[[1, 2], [3, -1]], [[2, 0], [-1, 1]], [[1, 1], [2, 0.5]]]]),
        num_student_heads=2, row_sums="at_most_one")  # fmt: skip
    book.valid("fully-masked-rows",
        "a row that is zero in all heads stays zero; one that is zero in one head alone gets less mass",
        "MAP-2 MIX-4", "masked-row-nan sink-filled", compare={"probs": {**PROBS, "exact_zeros": True}},
        teacher_probs=array([[[[0, 0], [0.75, 0.25], [0, 0]], [[0, 0], [0.25, 0.75], [0.5, 0.5]]]]),
        value_outputs=array([[[[1, 2], [3, -1]], [[2, 0], [-1, 1]]]]), num_student_heads=1)  # fmt: skip


def _large_squeezes(book: Book) -> None:
    book.valid("large-12-to-5", "12 heads to 5 with 63 queries, 65 keys, width 5", "MIX-4 PLAN-5 NUM-1",
        f"ugly-shape half-accumulation plan-overshoot {SUMMED}", at=64,
        teacher_probs=probs([1, 12, 63, 65], 601, 6, 2, 8), value_outputs=numbers([1, 12, 65, 5], 602, -127, 255, 0),
        num_student_heads=5)  # fmt: skip
    book.valid("large-causal-padded", "two samples, causal, padded to 31 of 33 queries, T = 2",
        "MIX-4 ALPHA-7 TEMP-3", "ugly-shape alpha-padded-rows alpha-batch-shared", at=64,
        teacher_probs=probs([2, 3, 33, 33], 611, 6, 2, 8, causal=True),
        value_outputs=numbers([2, 3, 33, 5], 612, -64, 127, 3), num_student_heads=2, query_mask=lengths(33, [31, 20]),
        temperature=2)  # fmt: skip
    for teachers, students, seed in ((25, 16, 621), (16, 6, 631)):
        book.valid(f"large-{teachers}-to-{students}",
            f"{teachers} heads to {students}: the last round merges the first pairs alone", "MIX-4 PLAN-5 PLAN-4",
            f"ugly-shape plan-overshoot plan-last-pairs {POOL}", at=96, leave_out=COUNTS,
            **{**random_model(2, teachers, 5, 7, 3, seed), "num_student_heads": students})  # fmt: skip
    book.valid("large-16-to-6-per-row", "16 heads to 6, one alpha a row", "MIX-4 ALPHA-9",
        "ugly-shape alpha-per-ignored plan-overshoot", at=96, leave_out=COUNTS,
        **{**random_model(2, 16, 5, 7, 3, 641), "num_student_heads": 6, "alpha_per": "row"})  # fmt: skip


def _refused_by_squeeze_heads(book: Book) -> None:
    model = random_model(1, 4, 2, 3, 2, 701)
    good: dict[str, Any] = {**model, "num_student_heads": 2}
    for name, spec, change in (
        ("strategy-unknown", "MIX-2", {"strategy": "random"}),
        ("strategy-matched", "MIX-2 MIX-16", {"strategy": "matched"}),
        ("plan-unknown", "PLAN-1", {"plan": "matched"}),
        ("alpha-rule-unknown", "ALPHA-4", {"alpha_rule": "printed"}),
        ("alpha-per-unknown", "ALPHA-9", {"alpha_per": "head"}),
        ("alpha-from-unknown", "TEMP-3", {"alpha_from": "student"}),
        ("row-sums-unknown", "MAP-9", {"row_sums": "many"}),
        ("no-student-heads", "PLAN-1", {"num_student_heads": 0}),
        ("negative-student-heads", "PLAN-1", {"num_student_heads": -1}),
        ("boolean-student-heads", "ERR-6 PLAN-1", {"num_student_heads": True}),
        ("boolean-temperature", "ERR-6 TEMP-1", {"temperature": True}),
        ("unused-alpha-rule", "ERR-7 ALPHA-4", {"strategy": "mean", "alpha_rule": "printed"}),
        ("unused-alpha-per", "ERR-7 ALPHA-9", {"strategy": "mean", "alpha_per": "head"}),
        ("unused-alpha-from", "ERR-7 TEMP-3", {"strategy": "mean", "alpha_from": "student"}),
        ("unused-strategy", "ERR-7 MIX-2", {"num_student_heads": 4, "strategy": "random"}),
    ):
        book.invalid(name, "not in its list, or out of its range", spec, "argument-value", **{**good, **change})
    for name, value in BAD_TEMPERATURES:
        book.invalid(f"bad-temperature-{name}", "not a finite number above 0", "TEMP-1", "argument-value",
            **{**good, "temperature": value})  # fmt: skip
    for strategy in ("shd", "mean"):
        book.invalid(f"heads-exceed-{strategy}", "more student heads than teacher heads, under every strategy",
            "PLAN-2", "heads-exceed", **{**good, "num_student_heads": 5, "strategy": strategy})  # fmt: skip
    for name, plan in (
        ("used-twice", [[[0, 1], [1, 2]]]),
        ("outside", [[[0, 4], [1, 2]]]),
        ("negative", [[[0, -1], [1, 2]]]),
        ("empty-round", [[[0, 1], [2, 3]], []]),
        ("too-few-merges", [[[0, 1]]]),
        ("too-many-merges", [[[0, 1], [2, 3]], [[0, 1]]]),
        ("with-itself", [[[0, 0], [1, 2]]]),
        ("three-in-a-pair", [[[0, 1, 2]]]),
    ):
        book.invalid(f"plan-{name}", "explicit rounds use valid positions once a round and leave H_s heads", "PLAN-7",
            "plan-invalid", **{**good, "plan": plan})  # fmt: skip
    for name, change in (
        ("heads", {"value_outputs": numbers([1, 3, 3, 2], 702, -8, 8, 1)}),
        ("keys", {"value_outputs": numbers([1, 4, 2, 2], 702, -8, 8, 1)}),
        ("samples", {"value_outputs": numbers([2, 4, 3, 2], 702, -8, 8, 1)}),
        ("output-axes", {"value_outputs": numbers([4, 3, 2], 702, -8, 8, 1)}),
    ):
        book.invalid(
            f"shapes-{name}", "maps and value outputs must fit", "MIX-1", "argument-shape", **{**good, **change}
        )
    book.invalid("shapes-map-axes", "maps of three axes", "MAP-4", "argument-shape",
        **{**good, "teacher_probs": probs([4, 2, 3], 701, 9, 2, 6)})  # fmt: skip
    for name, query_mask in (("length", lengths(3, [3])), ("samples", lengths(2, [2, 2]))):
        book.invalid(f"mask-{name}", "query_mask is (B, L)", "MAP-7", "argument-shape",
            **{**good, "query_mask": query_mask})  # fmt: skip
    book.invalid("mask-of-integers", "query_mask must be boolean", "MAP-7", "argument-dtype", flags="mask-dtype",
        **{**good, "query_mask": array([[1, 1]], "int64")})  # fmt: skip
    book.invalid("outputs-nan", "NaN in the value outputs", "MAP-5", "not-finite",
        teacher_probs=array([[[[1, 0]], [[0, 1]]]]), value_outputs=array([[[[1], ["nan"]], [[3], [0]]]]),
        num_student_heads=1)  # fmt: skip
    book.invalid("outputs-nan-identity", "the same where nothing is merged", "MAP-5", "not-finite",
        teacher_probs=array([[[[1, 0]], [[0, 1]]]]), value_outputs=array([[[[1], ["inf"]], [[3], [0]]]]),
        num_student_heads=2)  # fmt: skip
    book.invalid("outputs-complex", "complex value outputs", "MAP-5", "argument-dtype",
        teacher_probs=array([[[[1, 0]], [[0, 1]]]]), value_outputs=array([[[[1], [0]], [[3], [0]]]], "complex128"),
        num_student_heads=1)  # fmt: skip
    bad_maps(book, "teacher_probs", {"value_outputs": numbers([1, 1, 3, 2], 703, -8, 8, 1), "num_student_heads": 1})


BOOKS = (squeeze_heads,)
