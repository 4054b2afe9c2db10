"""Cases of matched plans and of chapter ORACLE."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import oracle_heads as heads
import oracle_loss as loss
from book import Book, Given, array, lengths, mask, numbers, random_model

from cases.maps import bad_maps

PLAN = {"rule": "plan"}
RESIDUAL = {"rule": "close", "quantity": "residual"}


def matched_plan() -> Book:
    """PLAN-9 to PLAN-13."""

    def answer(**given: Any) -> dict[str, Any]:
        plan, margin = loss.matched_plan(**given)
        return {"plan": plan, "margin": margin}

    book = Book("matched_plan", ("plan",), answer, {"plan": PLAN}, _check_margin)

    def item(model: dict[str, Any], *rest: Given) -> list[Given]:
        return [model["teacher_probs"], model["value_outputs"], *rest]

    flags = "matched-greedy matched-adjacent matched-largest"
    for name, teachers, students, seed in (
        ("four-to-two", 4, 2, 819),
        ("four-to-three", 4, 3, 823),
        ("five-to-two", 5, 2, 833),
    ):
        for by in ("residual", "similarity"):
            book.valid(f"{name}-{by}", f"{teachers} heads to {students} by {by}",
                "PLAN-9 PLAN-10 PLAN-12" + (" PLAN-13" if teachers == 5 else ""), f"{flags} matched-measure",
                calibration=[item(random_model(2, teachers, 3, 4, 2, seed))], num_student_heads=students,
                by=by)  # fmt: skip
    for teachers, seed in ((4, 815), (6, 809)):
        book.valid(f"greedy-{teachers}-to-{teachers // 2}", "the best pair is not in the best set of pairs", "PLAN-9",
            "matched-greedy matched-adjacent", calibration=[item(random_model(1, teachers, 3, 4, 2, seed))],
            num_student_heads=teachers // 2)  # fmt: skip
    book.valid("two-items", "scores are summed over items, of different lengths, one with padded rows",
        "PLAN-11 PLAN-12", "alpha-padded-rows matched-measure",
        calibration=[item(random_model(1, 4, 2, 3, 2, 959)),
        item(random_model(2, 4, 3, 4, 2, 961), lengths(3, [1, 2]))], num_student_heads=2)  # fmt: skip
    book.valid("similarity-is-squared",
        "the sum of the distances themselves is smallest for other pairs than that of their squares",
        "PLAN-12 PLAN-9", "matched-measure",
        calibration=[[array([[[[0.25, 0.125, 0.625]], [[0.3125, 0.4375, 0.25]],
        [[0.6875, 0.1875, 0.125]], [[0.3125, 0.375, 0.3125]]]]), numbers([1, 4, 3, 2], 2001, -8, 16, 2)]],
        num_student_heads=2, by="similarity")  # fmt: skip
    book.valid("second-round-sums-outputs", "the second round reads merged heads with the sum of their value outputs",
        "PLAN-13 MIX-4", "merged-outputs-mean", calibration=[item(random_model(2, 5, 3, 4, 2, 2003))],
        num_student_heads=2)  # fmt: skip
    book.valid("second-round-padded", "padded rows enter neither the scores nor the alphas of the merged pool",
        "PLAN-12 PLAN-13 ALPHA-7", "alpha-padded-rows",
        calibration=[item(random_model(2, 5, 3, 4, 2, 3383), lengths(3, [1, 3]))], num_student_heads=2)  # fmt: skip
    book.valid("second-round-per-row", "the pool of the second round is merged with one alpha a row",
        "PLAN-13 ALPHA-9", "alpha-per-ignored", calibration=[item(random_model(2, 5, 3, 4, 2, 3473))],
        num_student_heads=2, alpha_per="row")  # fmt: skip
    book.valid("sinks", "maps whose rows fall short of one, as they are", "PLAN-11 MAP-9 MIX-17", "sink-filled",
        calibration=[[array([[[[0.5, 0.125]], [[0.125, 0.25]], [[0.0625, 0.5]]]]),
        array([[[[1, 2], [3, -1]], [[2, 0], [-1, 1]], [[1, 1], [2, 0.5]]]])]], num_student_heads=2,
        row_sums="at_most_one")  # fmt: skip
    book.valid("per-row", "E with one alpha a row", "PLAN-12 ALPHA-9", "alpha-per-ignored",
        calibration=[item(random_model(2, 4, 3, 4, 2, 841))], num_student_heads=2, alpha_per="row")  # fmt: skip
    book.valid("identity", "equal counts", "PLAN-3 PLAN-9", "identity-plan",
        calibration=[item(random_model(1, 3, 2, 3, 2, 851))], num_student_heads=3)  # fmt: skip
    good: dict[str, Any] = {"calibration": [item(random_model(1, 4, 2, 3, 2, 861))], "num_student_heads": 2}
    model = random_model(1, 4, 2, 3, 2, 861)
    for name, spec, code, change in (
        ("nothing", "PLAN-11", "argument-value", {"calibration": []}),
        ("by-unknown", "PLAN-12", "argument-value", {"by": "cosine"}),
        ("unused-by", "ERR-7 PLAN-12", "argument-value", {"num_student_heads": 4, "by": "cosine"}),
        ("alpha-per-unknown", "ALPHA-9", "argument-value", {"alpha_per": "head"}),
        ("row-sums-unknown", "MAP-9", "argument-value", {"row_sums": "many"}),
        ("no-student-heads", "PLAN-1", "argument-value", {"num_student_heads": 0}),
        ("heads-exceed", "PLAN-2", "heads-exceed", {"num_student_heads": 5}),
        (
            "items-disagree",
            "PLAN-11",
            "argument-shape",
            {"calibration": [item(model), item(random_model(1, 3, 2, 3, 2, 863))]},
        ),
        ("one-array", "PLAN-11", "argument-shape", {"calibration": [[model["teacher_probs"]]]}),
        (
            "four-arrays",
            "PLAN-11",
            "argument-shape",
            {"calibration": [item(model, lengths(2, [2]), lengths(2, [2]))]},
        ),
        (
            "outputs-do-not-fit",
            "PLAN-11 MIX-1",
            "argument-shape",
            {"calibration": [[model["teacher_probs"], numbers([1, 3, 3, 2], 862, -8, 8, 1)]]},
        ),
    ):
        book.invalid(name, "calibration data and options are checked", spec, code, **{**good, **change})
    book.invalid("sum-below", "a row that sums to 3/4", "PLAN-11 MAP-3", "not-a-distribution",
        calibration=[[array([[[[0.5, 0.25]], [[0.5, 0.5]]]]), array([[[[1], [2]], [[3], [4]]]])]],
        num_student_heads=1)  # fmt: skip
    return book


def _check_margin(given: dict[str, Any], answer: dict[str, Any], flags: Sequence[str], rules: dict[str, Any]) -> None:
    """The best plan is better than the next by more than rounding, where nothing else is said by much more."""
    least = Fraction(1, 10**9) if "matched-close" in flags else Fraction(1, 20)
    margin = answer["margin"]
    assert margin > least, f"the best plan is hardly better than the next: {float(margin):.3}"


def diagnosis_rules(strategies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What is compared of a diagnosis of these strategies."""
    fields = ("residual", "head_residual", "over_unconstrained", "over_stochastic")
    compare: dict[str, dict[str, Any]] = {"plan": PLAN, "unconstrained": RESIDUAL, "stochastic": RESIDUAL}
    return compare | {f"strategies.{name}.{field}": RESIDUAL for name in strategies for field in fields}


def diagnose() -> Book:
    """Chapter ORACLE."""
    book = Book("diagnose", ("plan", "unconstrained", "stochastic", "strategies"), loss.diagnose, {})

    def valid(
        title: str, words: str, students: int, strategies: str, maps: Given, outputs: Given, *plan: Any, **rest: Any
    ) -> None:
        inputs: dict[str, Any] = {"teacher_probs": maps, "value_outputs": outputs, "num_student_heads": students}
        inputs |= {"plan": plan[0]} if plan else {}
        inputs |= {"strategies": strategies.split()} if strategies else {}
        rules = diagnosis_rules(strategies.split() or heads.STRATEGIES)
        book.case(title, words, compare=rules, **inputs, **rest)

    valid(
        "one-row: O = 3, the keys give 2 and 1: the best is 2, off by a third",
        "ORACLE-1 ORACLE-3 ORACLE-4 ORACLE-5 oracle-negative-weights",
        1,
        "shd constant",
        array([[[[1, 0]], [[0, 1]]]]),
        array([[[[2], [0]], [[0], [1]]]]),
    )
    valid(
        "full-rank: as many independent rows as columns: the unconstrained error is 0, and ratios over it are "
        "infinite",
        "ORACLE-2 ORACLE-6 oracle-ratio",
        1,
        "shd hard mean",
        array([[[[0.5, 0.25, 0.25]], [[0, 0.5, 0.5]]]]),
        array([[[[4, 0], [0, 1], [1, 0]], [[0, 2], [1, 0], [0, 0]]]]),
    )
    valid(
        "keys-that-no-head-used: a causal map may not look ahead: only keys with teacher mass are allowed",
        "ORACLE-3 oracle-all-keys",
        1,
        "shd",
        array([[[[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.5, 0.25]], [[1, 0, 0], [0.25, 0.75, 0], [0.5, 0, 0.5]]]]),
        array([[[[1, 0], [0, 4], [3, 1]], [[0, 1], [2, 0], [5, 5]]]]),
    )
    valid(
        "heads-one-by-one: errors that cancel between heads count in the head residual",
        "ORACLE-1 residual-per-head",
        2,
        "constant",
        array([[[[1, 0]], [[0, 1]], [[0, 1]], [[1, 0]]]]),
        array([[[[2], [0]], [[0], [1]], [[2], [0]], [[0], [1]]]]),
    )
    valid(
        "sinks: with sinks the weights sum to at most one",
        "ORACLE-3 MAP-9 sink-filled",
        1,
        "shd",
        array([[[[0.25, 0.125]], [[0, 0.25]]]]),
        array([[[[4, 1], [2, 1]], [[2, 0], [1, 3]]]]),
        row_sums="at_most_one",
    )
    valid(
        "padded-rows: rows that do not count enter no error",
        "ORACLE-1 ALPHA-7 alpha-padded-rows",
        1,
        "shd constant",
        array([[[[1, 0], [0.5, 0.5]], [[0, 1], [1, 0]]]]),
        array([[[[2], [0]], [[0], [1]]]]),
        query_mask=mask([[1, 0]]),
    )
    valid(
        "identity: nothing is merged: no error anywhere, and 0 over 0 is 1",
        "ORACLE-6 oracle-ratio residual-nan",
        2,
        "shd",
        array([[[[1, 0]], [[0, 1]]]]),
        array([[[[2], [1]], [[1], [1]]]]),
    )
    valid(
        "two-samples: every sample has its own errors, optima and ratios",
        "ORACLE-1 ORACLE-5 MIX-10 alpha-batch-shared",
        2,
        "shd constant",
        *random_model(2, 4, 2, 3, 3, 911).values(),
    )
    valid(
        "explicit-plan: groups, optima and strategies follow the rounds that are given",
        "ORACLE-1 ORACLE-5 PLAN-7 plan-last-pairs",
        2,
        "shd hard",
        *random_model(1, 4, 2, 3, 3, 931).values(),
        [[[3, 0]], [[1, 2]]],
    )
    valid(
        "all-strategies: no list of strategies asks for all five",
        "ORACLE-5 MIX-2",
        2,
        "",
        *random_model(1, 3, 2, 3, 3, 941).values(),
    )
    good: dict[str, Any] = {**random_model(1, 2, 2, 3, 2, 901), "num_student_heads": 1}
    for name, spec, code, change in (
        ("strategy-unknown", "ORACLE-7", "argument-value", {"strategies": ["shd", "random"]}),
        ("alpha-per-unknown", "ALPHA-9", "argument-value", {"alpha_per": "head"}),
        ("heads-exceed", "PLAN-2", "heads-exceed", {"num_student_heads": 3}),
        ("plan-unknown", "PLAN-1", "argument-value", {"plan": "random"}),
        ("row-sums-unknown", "MAP-9", "argument-value", {"row_sums": "many"}),
        ("mask-of-integers", "MAP-7", "argument-dtype", {"query_mask": array([[1, 1]], "int64")}),
    ):
        book.invalid(name, "options are checked", spec, code, **{**good, **change})
    outputs = numbers([1, 1, 3, 2], 903, -8, 8, 1)
    bad_maps(book, "teacher_probs", {"value_outputs": outputs, "num_student_heads": 1})
    book.invalid("outputs-nan", "NaN in the value outputs", "MAP-5", "not-finite",
        teacher_probs=array([[[[1, 0]], [[0, 1]]]]), value_outputs=array([[[[1], ["nan"]], [[3], [0]]]]),
        num_student_heads=1)  # fmt: skip
    return book


BOOKS = (matched_plan, diagnose)
