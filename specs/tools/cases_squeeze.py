"""Cases of squeeze_heads: chapter MIX with plans, alphas, temperature, masks and sinks together."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import oracle_heads as heads
from book import Arrays, Book, Given, array, lengths, mask, numbers, probs
from cases_maps import BAD_TEMPERATURES, bad_maps

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
    _strategies(book)
    _temperatures(book)
    _residuals(book)
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


def random_model(batch: int, teachers: int, rows: int, keys: int, width: int, seed: int) -> dict[str, Given]:
    """Maps and value outputs that a generator writes."""
    return {
        "teacher_probs": probs([batch, teachers, rows, keys], seed, 9, 2, 6),
        "value_outputs": numbers([batch, teachers, keys, width], seed + 1, -8, 16, 2),
    }


def _rounds_of_shd(book: Book) -> None:
    book.valid(
        "two-to-one",
        "one pair, one row: nothing is lost",
        "MIX-4 MIX-8 MIX-11",
        FORMULA,
        inputs={
            "teacher_probs": array([[[[1, 0]], [[0, 1]]]]),
            "value_outputs": array([[[[1], [0]], [[3], [0]]]]),
            "num_student_heads": 1,
        },
    )
    book.valid(
        "three-to-one",
        "the merged head is read with X_0 + X_1 when head 2 joins",
        "MIX-4 MIX-9",
        f"{FORMULA} {SUMMED}",
        inputs={**random_model(2, 3, 3, 4, 2, 211), "num_student_heads": 1},
    )
    book.valid(
        "four-to-three",
        "one pair; heads 2 and 3 stay",
        "MIX-4 PLAN-4 PLAN-5",
        f"{POOL} plan-overshoot plan-last-pairs",
        inputs={**random_model(2, 4, 3, 4, 2, 223), "num_student_heads": 3},
    )
    book.valid(
        "five-to-two",
        "two pairs, then one: head 4 stays to the end",
        "MIX-4 PLAN-5",
        f"{POOL} plan-overshoot plan-last-pairs plan-halves",
        inputs={**random_model(2, 5, 3, 4, 3, 233), "num_student_heads": 2},
    )
    book.valid(
        "five-to-three",
        "two pairs of five: head 4 stays and comes last",
        "MIX-4 PLAN-4",
        f"{POOL} plan-last-pairs plan-halves",
        inputs={**random_model(1, 5, 3, 4, 3, 241), "num_student_heads": 3},
    )
    book.valid(
        "explicit-middle",
        "explicit rounds: the pair of the middle goes first",
        "MIX-16 PLAN-4",
        POOL,
        inputs={**random_model(2, 4, 3, 4, 2, 251), "num_student_heads": 3, "plan": [[[1, 2]]]},
    )
    book.valid(
        "explicit-swapped",
        "positions out of order: alpha is the weight of the pair's first head",
        "MIX-16 MIX-4 PLAN-6",
        f"alpha-swapped {SUMMED} pair-sorted",
        inputs={**random_model(2, 4, 3, 4, 2, 261), "num_student_heads": 2, "plan": [[[3, 1]], [[1, 0]]]},
    )
    book.valid(
        "balanced",
        "five heads in groups of three and two",
        "MIX-16 PLAN-8",
        "balanced-is-progressive balanced-larger-last",
        inputs={**random_model(2, 5, 3, 4, 3, 271), "num_student_heads": 2, "plan": "balanced"},
    )
    book.valid(
        "identity",
        "equal counts: nothing happens",
        "MIX-4 PLAN-3",
        "identity-plan",
        inputs={**random_model(2, 3, 2, 4, 2, 281), "num_student_heads": 3},
    )
    book.valid(
        "identity-per-row",
        "equal counts with a query axis on C",
        "MIX-12 PLAN-3",
        "identity-plan",
        inputs={**random_model(1, 2, 3, 4, 2, 283), "num_student_heads": 2, "alpha_per": "row"},
    )
    book.valid(
        "as-printed",
        "the printed rule by name",
        "ALPHA-4 MIX-4",
        "alpha-rule-ignored",
        leave_out=COUNTS,
        inputs={**random_model(2, 4, 3, 4, 2, 291), "num_student_heads": 2, "alpha_rule": "as_printed"},
    )
    book.valid(
        "padded-rows",
        "rows past the lengths 2 and 4 enter no sum, but are mixed like the others",
        "ALPHA-7 MIX-8",
        "alpha-padded-rows residual-uncounted-rows mask-polarity",
        inputs={**random_model(2, 3, 4, 5, 2, 301), "num_student_heads": 1, "query_mask": lengths(4, [2, 4])},
    )
    book.valid(
        "sample-without-rows",
        "a sample with no counted row: degenerate, residual 0; the other is as it is alone",
        "ALPHA-7 MIX-8 MIX-10",
        "alpha-padded-rows degenerate-nan degenerate-value",
        inputs={**random_model(2, 3, 3, 4, 2, 311), "num_student_heads": 1, "query_mask": lengths(3, [0, 3])},
    )
    book.valid(
        "per-row",
        "one alpha a row",
        "ALPHA-9 MIX-11 MIX-12",
        f"alpha-per-ignored {SUMMED}",
        leave_out=COUNTS,
        inputs={**random_model(2, 3, 3, 4, 3, 321), "num_student_heads": 1, "alpha_per": "row"},
    )
    book.valid(
        "per-row-padded",
        "rows that do not count get 1/2 and are not counted as clipped or degenerate",
        "ALPHA-9 MIX-11 MIX-14",
        "alpha-per-ignored alpha-padded-rows count-uncounted-rows",
        inputs={
            "teacher_probs": array(
                [[[[1, 0], [0.5, 0.5], [1, 0], [0, 1]], [[0, 1], [0.5, 0.5], [0.25, 0.75], [1, 0]]]]
            ),
            "value_outputs": array([[[[2], [0]], [[0], [1]]]]),
            "num_student_heads": 1,
            "alpha_per": "row",
            "query_mask": mask([[1, 1, 0, 0]]),
        },
    )
    book.valid(
        "per-row-masked-row",
        "a fully masked row that counts is degenerate, and is counted so",
        "ALPHA-9 MIX-11",
        "count-uncounted-rows degenerate-nan",
        inputs={
            "teacher_probs": array([[[[0, 0], [1, 0], [1, 0]], [[0, 0], [0, 1], [0, 1]]]]),
            "value_outputs": array([[[[2], [0]], [[0], [1]]]]),
            "num_student_heads": 1,
            "alpha_per": "row",
            "query_mask": mask([[1, 1, 0]]),
        },
    )
    book.valid(
        "clipped-and-degenerate",
        "three samples: clipped, degenerate, neither; counts are sums over samples and pairs",
        "ALPHA-5 MIX-9 MIX-11 NUM-7",
        "count-per-sample degenerate-counts-as-clipped alpha-unclipped",
        inputs={
            "teacher_probs": array(
                [
                    [[[1, 0]], [[0, 1]], [[1, 0]], [[0, 1]]],
                    [[[1, 0]], [[1, 0]], [[0, 1]], [[0, 1]]],
                    [[[1, 0]], [[0, 1]], [[0.5, 0.5]], [[0, 1]]],
                ]
            ),
            "value_outputs": array(
                [
                    [[[2], [0]], [[0], [1]], [[0], [1]], [[2], [0]]],
                    [[[2], [0]], [[0], [1]], [[1], [2]], [[0], [3]]],
                    [[[1], [0]], [[3], [0]], [[2], [0]], [[0], [1]]],
                ]
            ),
            "num_student_heads": 2,
        },
    )
    book.valid(
        "near-degenerate",
        "the pair's maps differ by 1/256 where little is read",
        "NUM-5 NUM-6",
        "near-degenerate",
        leave_out=COUNTS,
        inputs={
            "teacher_probs": array(
                [[[[Fraction(255, 256), Fraction(1, 256), 0]], [[Fraction(255, 256), 0, Fraction(1, 256)]]]]
            ),
            "value_outputs": array([[[[64], [1], [0]], [[64], [0], [0]]]]),
            "num_student_heads": 1,
        },
    )
    book.valid(
        "equal-heads",
        "equal heads merge to themselves",
        "ALPHA-6 MIX-4",
        "degenerate-value degenerate-nan",
        inputs={
            "teacher_probs": array([[[[0.25, 0.75], [1, 0]]] * 4]),
            "value_outputs": numbers([1, 4, 2, 3], 331, -8, 16, 2),
            "num_student_heads": 2,
        },
    )
    book.valid(
        "sinks",
        "maps as they are: nothing is filled up, a merged row has the mixed mass",
        "MIX-17 MAP-9",
        "sink-filled",
        inputs={
            "teacher_probs": array(
                [[[[0.5, 0.125], [0.25, 0.25]], [[0.125, 0.25], [0.5, 0.5]], [[0.0625, 0.5], [0, 0.25]]]]
            ),
            "value_outputs": array([[[[1, 2], [3, -1]], [[2, 0], [-1, 1]], [[1, 1], [2, 0.5]]]]),
            "num_student_heads": 2,
            "row_sums": "at_most_one",
        },
    )
    book.valid(
        "fully-masked-rows",
        "a row that is zero in all heads stays zero; one that is zero in one head alone gets less mass",
        "MAP-2 MIX-4",
        "masked-row-nan sink-filled",
        compare={"probs": {**PROBS, "exact_zeros": True}},
        inputs={
            "teacher_probs": array([[[[0, 0], [0.75, 0.25], [0, 0]], [[0, 0], [0.25, 0.75], [0.5, 0.5]]]]),
            "value_outputs": array([[[[1, 2], [3, -1]], [[2, 0], [-1, 1]]]]),
            "num_student_heads": 1,
        },
    )


def _strategies(book: Book) -> None:
    four = random_model(2, 4, 3, 4, 2, 401)
    three = random_model(2, 3, 3, 4, 3, 411)
    for strategy in ("constant", "mean"):
        book.valid(
            f"{strategy}-three-to-one",
            "1/4, 1/4, 1/2: two rounds of halves" if strategy == "constant" else "1/3 each",
            "MIX-5 MIX-9" if strategy == "constant" else "MIX-6 MIX-11",
            "constant-is-mean" if strategy == "constant" else "mean-per-group",
            inputs={**three, "num_student_heads": 1, "strategy": strategy},
        )
        book.valid(
            f"{strategy}-three-to-two",
            "1/2, 1/2 and 1" if strategy == "constant" else "1/3 for every student head",
            "MIX-5 MIX-9" if strategy == "constant" else "MIX-6 MIX-11",
            "constant-is-mean" if strategy == "constant" else "mean-per-group",
            inputs={**three, "num_student_heads": 2, "strategy": strategy},
        )
        book.valid(
            f"{strategy}-identity",
            "equal counts: C is the identity" if strategy == "constant" else "1/H_t for equal counts too",
            "MIX-5 PLAN-3" if strategy == "constant" else "MIX-6",
            "identity-plan" if strategy == "constant" else "mean-identity",
            inputs={**three, "num_student_heads": 3, "strategy": strategy},
        )
        book.valid(
            f"{strategy}-per-row",
            "with a query axis",
            "MIX-12",
            "alpha-per-ignored",
            inputs={**three, "num_student_heads": 2, "strategy": strategy, "alpha_per": "row"},
        )
    book.valid(
        "constant-counts-nothing",
        "pairs that are clipped or degenerate under shd",
        "MIX-9",
        "constant-counts",
        inputs={
            "teacher_probs": array([[[[1, 0]], [[0, 1]], [[1, 0]], [[1, 0]]]]),
            "value_outputs": array([[[[2], [0]], [[0], [1]], [[0], [1]], [[2], [0]]]]),
            "num_student_heads": 2,
            "strategy": "constant",
        },
    )
    hard = {**random_model(3, 4, 2, 4, 2, 421), "strategy": "hard"}
    book.valid(
        "hard",
        "the head that is better by E, in every sample and pair",
        "MIX-5 MIX-9",
        "hard-wrong-side hard-always-first alpha-batch-shared",
        inputs={**hard, "num_student_heads": 2},
    )
    book.valid(
        "hard-clipped",
        "a* = 2 and a* = -1 choose heads p and q, and count as not clipped",
        "MIX-5 MIX-9",
        "hard-wrong-side hard-counts-clipped",
        inputs={
            "teacher_probs": array([[[[1, 0]], [[0, 1]], [[1, 0]], [[0, 1]]]]),
            "value_outputs": array([[[[2], [0]], [[0], [1]], [[0], [1]], [[2], [0]]]]),
            "num_student_heads": 2,
            "strategy": "hard",
        },
    )
    book.valid(
        "hard-degenerate",
        "a degenerate pair has a* = 1/2, and hard takes 1 there; it counts as degenerate",
        "MIX-14 MIX-5",
        "hard-tie-to-second degenerate-nan",
        inputs={
            "teacher_probs": array([[[[0.5, 0.5]], [[0.5, 0.5]]]]),
            "value_outputs": array([[[[1], [0]], [[3], [1]]]]),
            "num_student_heads": 1,
            "strategy": "hard",
        },
    )
    book.valid(
        "hard-tie",
        "u = w = 1: a* is exactly 1/2, and hard takes 1",
        "MIX-5",
        "hard-tie hard-tie-to-second",
        inputs={
            "teacher_probs": array([[[[1, 0]], [[0, 1]]]]),
            "value_outputs": array([[[[1], [0]], [[1], [0]]]]),
            "num_student_heads": 1,
            "strategy": "hard",
        },
    )
    book.valid(
        "hard-three-to-one",
        "the second round reads the chosen map with the sum of the value outputs",
        "MIX-5 MIX-4",
        f"{SUMMED} hard-wrong-side",
        inputs={**random_model(2, 3, 3, 4, 2, 445), "num_student_heads": 1, "strategy": "hard"},
    )
    book.valid(
        "hard-per-row",
        "row by row; rows that do not count take 1",
        "MIX-5 MIX-12 MIX-14",
        "alpha-per-ignored hard-tie-to-second",
        inputs={
            **random_model(1, 2, 4, 4, 2, 441),
            "num_student_heads": 1,
            "strategy": "hard",
            "alpha_per": "row",
            "query_mask": lengths(4, [3]),
        },
        leave_out=COUNTS,
    )
    simplex = {"strategy": "simplex"}
    book.valid(
        "simplex-two",
        "for a group of two it equals shd",
        "MIX-7 MIX-11",
        "simplex-uniform alpha-misprinted",
        inputs={**four, "num_student_heads": 2, **simplex},
    )
    # Three maps on three keys; X' is the identity, and the target is inside or outside of the triangle of the maps.
    corner = [[[1, 0, 0]], [[0, 1, 0]], [[0, 0, 1]]]
    book.valid(
        "simplex-inside",
        "the minimum is inside the triangle: 1/2, 1/4, 1/4, and the error is 0",
        "MIX-7",
        "simplex-uniform simplex-greedy",
        inputs={
            "teacher_probs": array([corner]),
            "value_outputs": array(
                [
                    [
                        [[0.5, 0.25, 0.25], [0, 1, 0], [0, 0, 1]],
                        [[0.5, -0.25, -0.25], [0, 0, 0], [0, 0, 0]],
                        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
                    ]
                ]
            ),
            "num_student_heads": 1,
            **simplex,
        },
    )
    book.valid(
        "simplex-edge",
        "the affine minimum has a negative weight, and cutting it off and dividing by the sum is not the minimum",
        "MIX-7",
        "simplex-clipped-affine simplex-uniform simplex-greedy",
        inputs={**random_model(2, 3, 3, 4, 2, 451), "num_student_heads": 1, **simplex},
    )
    book.valid(
        "simplex-four",
        "a group of four, balanced plan, padded rows",
        "MIX-7 ALPHA-7",
        "simplex-clipped-affine simplex-greedy alpha-padded-rows",
        inputs={
            **random_model(2, 7, 4, 5, 3, 461),
            "num_student_heads": 2,
            "plan": "balanced",
            "query_mask": lengths(4, [3, 4]),
            **simplex,
        },
    )
    book.valid(
        "simplex-per-row",
        "row by row; a row that does not count takes 1/3",
        "MIX-7 MIX-12 MIX-14",
        "alpha-per-ignored simplex-greedy",
        inputs={
            **random_model(1, 3, 4, 5, 3, 471),
            "num_student_heads": 1,
            "alpha_per": "row",
            "query_mask": lengths(4, [3]),
            **simplex,
        },
    )
    book.valid(
        "simplex-without-preference",
        "all maps of the group equal: 1/3 each; the group of one takes 1",
        "MIX-7 MIX-15",
        "degenerate-nan",
        inputs={
            "teacher_probs": array([[[[0.25, 0.75]], [[0.25, 0.75]], [[0.25, 0.75]], [[0.5, 0.5]]]]),
            "value_outputs": numbers([1, 4, 2, 2], 481, -8, 16, 2),
            "num_student_heads": 2,
            "plan": [[[0, 1]], [[0, 1]]],
            **simplex,
        },
    )
    book.valid(
        "simplex-small-outputs",
        "value outputs near 2^-12: a group is degenerate relative to its outputs, not by their size",
        "MIX-7 MIX-15",
        "simplex-uniform simplex-greedy",
        inputs={
            **random_model(2, 3, 3, 4, 2, 451),
            "value_outputs": numbers([2, 3, 4, 2], 452, -8, 16, 15),
            "num_student_heads": 1,
            **simplex,
        },
    )
    book.valid(
        "simplex-plan-order",
        "groups are those of the plan",
        "MIX-7 PLAN-6",
        "simplex-contiguous",
        inputs={**four, "num_student_heads": 2, "plan": [[[3, 1]], [[1, 0]]], **simplex},
    )


def _temperatures(book: Book) -> None:
    model: dict[str, Any] = {**random_model(2, 3, 3, 4, 2, 501), "num_student_heads": 1}
    flags = "softened-after solved-on-softened temperature-ignored temperature-inverted"
    for name, temperature in (("two", 2), ("half", 0.5)):
        book.valid(
            f"temperature-{name}",
            "C is solved on the maps as given and mixes the softened ones; the residual is at T = 1",
            "TEMP-2 TEMP-3 MIX-8 MIX-11",
            f"{flags} residual-softened",
            inputs={**model, "temperature": temperature},
        )
    book.valid(
        "temperature-solved-on-softened",
        "alpha_from='softened': C is solved on the softened maps too; the residual is still at T = 1",
        "TEMP-3 MIX-8",
        "alpha-from-ignored residual-softened",
        inputs={**model, "temperature": 2, "alpha_from": "softened"},
    )
    book.valid(
        "temperature-hard-on-softened",
        "the same for hard selection",
        "TEMP-3 MIX-5",
        "alpha-from-ignored",
        leave_out=COUNTS,
        inputs={
            **random_model(2, 4, 3, 4, 2, 527),
            "num_student_heads": 2,
            "temperature": 4,
            "alpha_from": "softened",
            "strategy": "hard",
        },
    )
    for strategy in ("constant", "mean"):
        book.valid(
            f"temperature-{strategy}",
            "softened, then mixed",
            "TEMP-2 MIX-5" if strategy == "constant" else "TEMP-2 MIX-6",
            "softened-after",
            inputs={**model, "temperature": 2, "strategy": strategy},
        )
    book.valid(
        "temperature-simplex",
        "solved at T = 1",
        "TEMP-3 MIX-7",
        "solved-on-softened softened-after",
        inputs={**model, "temperature": 2, "strategy": "simplex"},
    )
    book.valid(
        "temperature-sinks",
        "softened rows keep their own mass, then they are mixed",
        "TEMP-5 MIX-17",
        "sink-filled sink-softened softened-after",
        inputs={
            "teacher_probs": array(
                [[[[0.5, 0.125, 0], [0.25, 0.25, 0.25]], [[0.125, 0.25, 0.0625], [0.5, 0.375, 0.125]]]]
            ),
            "value_outputs": array([[[[1, 2], [3, -1], [0, 1]], [[2, 0], [-1, 1], [1, 0]]]]),
            "num_student_heads": 1,
            "temperature": 2,
            "row_sums": "at_most_one",
        },
    )
    book.valid(
        "temperature-tiny",
        "a flat row beside a peaked one at T = 1/256: both keep their mass",
        "TEMP-6 TEMP-2",
        "power-underflow",
        inputs={
            "teacher_probs": array([[[[2**-6] * 64, [1] + [0] * 63]]]),
            "value_outputs": numbers([1, 1, 64, 1], 541, 1, 16, 2),
            "num_student_heads": 1,
            "temperature": 0.00390625,
        },
    )
    book.valid(
        "temperature-masked-rows",
        "zero rows and keys stay 0 at any temperature",
        "TEMP-2 MAP-2",
        "masked-row-nan masked-not-zero",
        compare={"probs": {**PROBS, "exact_zeros": True}},
        inputs={
            "teacher_probs": array([[[[0, 0, 0], [0.75, 0.25, 0]], [[0, 0, 0], [0.125, 0.875, 0]]]]),
            "value_outputs": array([[[[1, 2], [3, -1], [0, 1]], [[2, 0], [-1, 1], [1, 0]]]]),
            "num_student_heads": 1,
            "temperature": 2,
        },
    )


def _residuals(book: Book) -> None:
    flags = "residual-absolute residual-squared"
    constant = {"num_student_heads": 1, "strategy": "constant"}
    pair = array([[[[1, 0]], [[0, 1]]]])
    book.valid(
        "residual-half",
        "O = 3, the merged head gives 3/2: 1/2, whatever the scale",
        "MIX-8",
        flags,
        inputs={"teacher_probs": pair, "value_outputs": array([[[[2], [0]], [[0], [1]]]]), **constant},
    )
    book.valid(
        "residual-large-outputs",
        "the same with value outputs 64 times as large",
        "MIX-8",
        flags,
        inputs={"teacher_probs": pair, "value_outputs": array([[[[128], [0]], [[0], [64]]]]), **constant},
    )
    book.valid(
        "residual-heads-cancel",
        "errors of two student heads cancel in the sum, so nothing is left",
        "MIX-8",
        "residual-per-head",
        inputs={
            "teacher_probs": array([[[[1, 0]], [[0, 1]], [[0, 1]], [[1, 0]]]]),
            "value_outputs": array([[[[2], [0]], [[0], [1]], [[2], [0]], [[0], [1]]]]),
            "num_student_heads": 2,
            "strategy": "constant",
        },
    )
    book.valid(
        "residual-nothing-to-keep",
        "O = 0 and the merged head gives 0: 0",
        "MIX-8",
        "residual-nan",
        inputs={"teacher_probs": pair, "value_outputs": array([[[[0], [3]], [[2], [0]]]]), "num_student_heads": 2},
    )
    book.valid(
        "residual-infinite",
        "O = 1 - 1 = 0 and the merged head gives 1; the second sample is an ordinary one",
        "MIX-8 MIX-19",
        "residual-nan",
        inputs={
            "teacher_probs": array([[[[1, 0]], [[0, 1]]]] * 2),
            "value_outputs": array([[[[1], [2]], [[0], [-1]]], [[[2], [0]], [[0], [1]]]]),
            **constant,
        },
    )
    book.valid(
        "residual-padded-rows",
        "what happens in rows that do not count is not in the residual",
        "MIX-8 ALPHA-7",
        "residual-uncounted-rows",
        inputs={
            "teacher_probs": array([[[[1, 0], [0, 1]], [[0, 1], [0.5, 0.5]]]]),
            "value_outputs": array([[[[2], [0]], [[0], [1]]]]),
            **constant,
            "query_mask": mask([[1, 0]]),
        },
    )
    book.valid(
        "residual-masked-away",
        "no counted row: both norms vanish",
        "MIX-8",
        "residual-nan residual-uncounted-rows",
        inputs={
            "teacher_probs": pair,
            "value_outputs": array([[[[2], [0]], [[0], [1]]]]),
            **constant,
            "query_mask": mask([[0]]),
        },
    )


def _large_squeezes(book: Book) -> None:
    book.valid(
        "large-12-to-5",
        "12 heads to 5 with 63 queries, 65 keys, width 5",
        "MIX-4 PLAN-5 NUM-1",
        f"ugly-shape half-accumulation plan-overshoot {SUMMED}",
        at=64,
        inputs={
            "teacher_probs": probs([1, 12, 63, 65], 601, 6, 2, 8),
            "value_outputs": numbers([1, 12, 65, 5], 602, -127, 255, 0),
            "num_student_heads": 5,
        },
    )
    book.valid(
        "large-causal-padded",
        "two samples, causal, padded to 31 of 33 queries, T = 2",
        "MIX-4 ALPHA-7 TEMP-3",
        "ugly-shape alpha-padded-rows alpha-batch-shared",
        at=64,
        inputs={
            "teacher_probs": probs([2, 3, 33, 33], 611, 6, 2, 8, causal=True),
            "value_outputs": numbers([2, 3, 33, 5], 612, -64, 127, 3),
            "num_student_heads": 2,
            "query_mask": lengths(33, [31, 20]),
            "temperature": 2,
        },
    )
    for teachers, students, seed in ((25, 16, 621), (16, 6, 631)):
        book.valid(
            f"large-{teachers}-to-{students}",
            f"{teachers} heads to {students}: the last round merges the first pairs alone",
            "MIX-4 PLAN-5 PLAN-4",
            f"ugly-shape plan-overshoot plan-last-pairs {POOL}",
            at=96,
            leave_out=COUNTS,
            inputs={**random_model(2, teachers, 5, 7, 3, seed), "num_student_heads": students},
        )
    book.valid(
        "large-16-to-6-per-row",
        "16 heads to 6, one alpha a row",
        "MIX-4 ALPHA-9",
        "ugly-shape alpha-per-ignored plan-overshoot",
        at=96,
        leave_out=COUNTS,
        inputs={**random_model(2, 16, 5, 7, 3, 641), "num_student_heads": 6, "alpha_per": "row"},
    )


def _refused_by_squeeze_heads(book: Book) -> None:
    model = random_model(1, 4, 2, 3, 2, 701)
    good = {**model, "num_student_heads": 2}
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
        book.invalid(name, "not in its list, or out of its range", spec, "argument-value", inputs={**good, **change})
    for name, value in BAD_TEMPERATURES:
        book.invalid(
            f"bad-temperature-{name}",
            "not a finite number above 0",
            "TEMP-1",
            "argument-value",
            inputs={**good, "temperature": value},
        )
    for strategy in ("shd", "mean"):
        book.invalid(
            f"heads-exceed-{strategy}",
            "more student heads than teacher heads, under every strategy",
            "PLAN-2",
            "heads-exceed",
            inputs={**good, "num_student_heads": 5, "strategy": strategy},
        )
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
        book.invalid(
            f"plan-{name}",
            "explicit rounds use valid positions once a round and leave H_s heads",
            "PLAN-7",
            "plan-invalid",
            inputs={**good, "plan": plan},
        )
    for name, change in (
        ("heads", {"value_outputs": numbers([1, 3, 3, 2], 702, -8, 8, 1)}),
        ("keys", {"value_outputs": numbers([1, 4, 2, 2], 702, -8, 8, 1)}),
        ("samples", {"value_outputs": numbers([2, 4, 3, 2], 702, -8, 8, 1)}),
        ("output-axes", {"value_outputs": numbers([4, 3, 2], 702, -8, 8, 1)}),
    ):
        book.invalid(
            f"shapes-{name}", "maps and value outputs must fit", "MIX-1", "argument-shape", inputs={**good, **change}
        )
    book.invalid(
        "shapes-map-axes",
        "maps of three axes",
        "MAP-4",
        "argument-shape",
        inputs={**good, "teacher_probs": probs([4, 2, 3], 701, 9, 2, 6)},
    )
    for name, query_mask in (("length", lengths(3, [3])), ("samples", lengths(2, [2, 2]))):
        book.invalid(
            f"mask-{name}",
            "query_mask is (B, L)",
            "MAP-7",
            "argument-shape",
            inputs={**good, "query_mask": query_mask},
        )
    book.invalid(
        "mask-of-integers",
        "query_mask must be boolean",
        "MAP-7",
        "argument-dtype",
        flags="mask-dtype",
        inputs={**good, "query_mask": array([[1, 1]], "int64")},
    )
    book.invalid(
        "outputs-nan",
        "NaN in the value outputs",
        "MAP-5",
        "not-finite",
        inputs={
            "teacher_probs": array([[[[1, 0]], [[0, 1]]]]),
            "value_outputs": array([[[[1], ["nan"]], [[3], [0]]]]),
            "num_student_heads": 1,
        },
    )
    book.invalid(
        "outputs-nan-identity",
        "the same where nothing is merged",
        "MAP-5",
        "not-finite",
        inputs={
            "teacher_probs": array([[[[1, 0]], [[0, 1]]]]),
            "value_outputs": array([[[[1], ["inf"]], [[3], [0]]]]),
            "num_student_heads": 2,
        },
    )
    book.invalid(
        "outputs-complex",
        "complex value outputs",
        "MAP-5",
        "argument-dtype",
        inputs={
            "teacher_probs": array([[[[1, 0]], [[0, 1]]]]),
            "value_outputs": array([[[[1], [0]], [[3], [0]]]], "complex128"),
            "num_student_heads": 1,
        },
    )
    bad_maps(
        book,
        "teacher_probs",
        {"value_outputs": numbers([1, 1, 3, 2], 703, -8, 8, 1), "num_student_heads": 1},
    )


BOOKS = (squeeze_heads,)
