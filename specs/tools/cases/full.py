"""Cases whose numbers need all bits of a float64, for every floating argument of every operation.

All other cases hold numbers of a few bits, which an implementation may round to half precision without being seen.
These are drawn by a seeded generator and written as the shortest decimals that give them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from operator import add
from random import Random
from typing import Any

import oracle_loss as loss
from book import Book, Given, array, mask
from exact import Nested, map_numbers, unflatten

from cases.bounds import diagnosis_rules

WIDE = ("float64", "float32")
TEMPERATURE, COLD, BETA, SCALE = 1.3819660112501051, 0.7320508075688772, 2.718281828459045, 0.5773502691896258


class Draws:
    """Arrays of one case."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def numbers(self, *shape: int, low: float = -3.0, high: float = 3.0) -> Nested:
        """Numbers from low to high."""
        return self._filled(shape, lambda: low + (high - low) * self._random.random())

    def maps(self, *shape: int, zeros: bool = False, sinks: bool = False) -> Nested:
        """Rows that sum to one but for a rounding, or with sinks to anything from 1/4 to one."""

        def row() -> list[float]:
            weights = [0.02 + self._random.random() ** 2 for _ in range(shape[-1])]
            if zeros:
                weights[self._random.randrange(shape[-1])] = 0.0
            share = 0.25 + 0.75 * self._random.random() if sinks else 1.0
            total = reduce(add, weights)  # from left to right; sum() compensates from Python 3.12 on
            return [share * weight / total for weight in weights]

        return self._filled(shape[:-1], row)

    def _filled(self, shape: Sequence[int], draw: Callable[[], Any]) -> Nested:
        count = 1
        for size in shape:
            count *= size
        return unflatten([draw() for _ in range(count)], shape)


def add_full(book: Book) -> None:
    """The cases of the book's operation, where it has floating arguments."""
    cases = _CASES.get(book.operation)
    for name, comment, spec, inputs in cases() if cases else ():
        compare = diagnosis_rules(inputs["strategies"]) if book.operation == "diagnose" else None
        book.valid(f"full-{name}", comment, spec, "rounded-argument", dtypes=WIDE, compare=compare, **inputs)
    if book.operation == "matched_plan":
        _add_near_ties(book)


_Case = tuple[str, str, str, dict[str, Any]]
_ROWS = mask([[1, 0, 1], [1, 1, 0]])
_KEYS = mask([[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 1, 1]])


def _softmax() -> list[_Case]:
    draws = Draws(1)
    logits = array(draws.numbers(2, 2, 3, 5))
    cold = array(draws.numbers(2, 1, 3, 4, low=-9.0, high=9.0))
    return [
        ("temperature", "logits and a temperature of all bits", "MAP-1 TEMP-2",
         {"attn_logits": logits, "temperature": TEMPERATURE}),
        ("masked", "the same below one, with masked keys", "MAP-2 TEMP-2",
         {"attn_logits": cold, "attn_mask": _KEYS, "temperature": COLD}),
    ]  # fmt: skip


def _soften() -> list[_Case]:
    draws = Draws(2)
    return [
        ("above-one", "maps and a temperature of all bits", "TEMP-2",
         {"attn_probs": array(draws.maps(2, 2, 3, 4)), "temperature": TEMPERATURE}),
        ("below-one-sinks", "rows with sinks keep their own mass", "TEMP-5",
         {"attn_probs": array(draws.maps(2, 2, 3, 4, zeros=True, sinks=True)), "temperature": COLD,
          "row_sums": "at_most_one"}),
        ("one", "nothing is divided by the sum of its row", "TEMP-7",
         {"attn_probs": array(draws.maps(1, 2, 3, 5)), "temperature": 1}),
    ]  # fmt: skip


def _value_outputs() -> list[_Case]:
    draws = Draws(3)
    return [
        ("grouped", "values and a projection of all bits", "MAP-6 MAP-11",
         {"values": array(draws.numbers(2, 2, 3, 2)), "output_projection": array(draws.numbers(8, 3))}),
    ]  # fmt: skip


def _pair(draws: Draws, *, sinks: bool = False) -> dict[str, Any]:
    return {
        "probs_p": array(draws.maps(2, 3, 4, sinks=sinks)), "probs_q": array(draws.maps(2, 3, 4, sinks=sinks)),
        "value_outputs_p": array(draws.numbers(2, 4, 3)), "value_outputs_q": array(draws.numbers(2, 4, 3)),
    }  # fmt: skip


def _solve_alpha() -> list[_Case]:
    draws = Draws(51)
    maps, first = [array(draws.maps(2, 3, 4)) for _ in "pq"], draws.numbers(2, 4, 3)
    opposed = _between(draws.numbers(2, 4, 3), map_numbers(lambda x: -x, first), 0.875)
    return [
        ("opposed", "value outputs that nearly cancel show what they are rounded to", "ALPHA-2 ALPHA-3",
         {"probs_p": maps[0], "probs_q": maps[1], "value_outputs_p": array(first),
          "value_outputs_q": array(opposed)}),
        ("map", "maps and value outputs of all bits", "ALPHA-2 ALPHA-8", _pair(Draws(41))),
        ("row", "one weight a row, with rows that do not count", "ALPHA-9 ALPHA-7",
         {**_pair(Draws(42)), "alpha_per": "row", "query_mask": _ROWS}),
        ("printed-sinks", "the misprinted rule on rows with sinks", "ALPHA-4 MIX-17",
         {**_pair(Draws(43), sinks=True), "rule": "as_printed", "row_sums": "at_most_one"}),
    ]  # fmt: skip


def _compose_mixing() -> list[_Case]:
    draws, deep = Draws(5), Draws(391)
    plan = [[[3, 0], [1, 4]], [[1, 0]]]
    return [
        (name, "weights of all bits over two rounds", "MIX-13",
         {"alphas": [array(draws.numbers(2, pairs, *rows, low=0.0, high=1.0)) for pairs in (2, 1)], "plan": plan,
          "num_teacher_heads": 5})
        for name, rows in (("map", ()), ("row", (3,)))
    ] + [
        ("deep", "four rounds, whose weights multiply what each is off", "MIX-13",
         {"alphas": [array(deep.numbers(2, 1, low=0.9, high=1.0)) for _ in range(4)],
          "plan": [[[0, 4]], [[0, 3]], [[0, 2]], [[0, 1]]], "num_teacher_heads": 5})
    ]  # fmt: skip


def _mix_heads() -> list[_Case]:
    draws = Draws(6)
    by_row = [[[[row[t] for row in head] for t in range(3)] for head in sample] for sample in draws.maps(2, 2, 3, 3)]
    return [
        ("map", "maps and weights of all bits", "MIX-3",
         {"teacher_probs": array(draws.maps(2, 3, 3, 4)), "mixing": array(draws.maps(2, 2, 3))}),
        ("row", "a weight a row", "MIX-3 MIX-18",
         {"teacher_probs": array(draws.maps(2, 3, 3, 4, sinks=True)), "mixing": array(by_row)}),
    ]  # fmt: skip


def _teacher(seed: int, heads: int, *, width: int = 3, batch: int = 2, **kinds: bool) -> dict[str, Any]:
    draws = Draws(seed)
    return {
        "teacher_probs": array(draws.maps(batch, heads, 3, 4, **kinds)),
        "value_outputs": array(draws.numbers(batch, heads, 4, width)),
    }


def _squeeze_heads() -> list[_Case]:
    return [
        ("shd", "five heads to two, softened", "MIX-4 TEMP-3 MIX-8 NUM-6",
         {**_teacher(71, 5), "num_student_heads": 2, "temperature": TEMPERATURE}),
        ("shd-row-sinks", "a weight a row, solved on softened maps with sinks", "MIX-12 MIX-17 TEMP-3 TEMP-5",
         {**_teacher(72, 3, sinks=True), "num_student_heads": 2, "alpha_per": "row", "query_mask": _ROWS,
          "temperature": COLD, "alpha_from": "softened", "row_sums": "at_most_one"}),
        ("hard", "the better of two", "MIX-5 MIX-9",
         {**_teacher(73, 4), "num_student_heads": 2, "strategy": "hard", "query_mask": _ROWS}),
    ]  # fmt: skip


def _shd_loss() -> list[_Case]:
    draws = Draws(8)
    shape = 2, 2, 3, 4
    logits = array(draws.numbers(*shape))
    layers = {
        "supervision": [array(draws.maps(*shape)), array(draws.maps(2, 1, 3, 4))],
        "student_logits": [logits, array(draws.numbers(2, 1, 3, 4))],
    }
    sunk: dict[str, Any] = {"supervision": array(draws.maps(*shape, sinks=True)), "student_logits": logits}
    return [
        ("kl", "two layers, with beta, temperature and rows that do not count", "LOSS-2 LOSS-4 LOSS-11 TEMP-4",
         {**layers, "beta": BETA, "temperature": TEMPERATURE, "loss_mask": _ROWS}),
        ("reverse-kl", "sharper than at one, over the number of maps", "LOSS-5 LOSS-11 LOSS-18",
         {**layers, "divergence": "reverse_kl", "reduction": "mean", "temperature": COLD}),
        ("js-sinks", "rows with sinks weigh what they hold", "LOSS-10 LOSS-11",
         {**sunk, "divergence": "js", "row_sums": "at_most_one", "temperature": TEMPERATURE}),
        ("mse-intersected", "mass on masked keys goes, and the row is scaled back", "LOSS-11 LOSS-14",
         {**sunk, "divergence": "mse", "row_sums": "at_most_one", "support": "intersect", "attn_mask": _KEYS,
          "beta": BETA}),
    ]  # fmt: skip


def _shd_loss_gradient() -> list[_Case]:
    return [(name, comment, f"GRAD-1 {spec}", inputs) for name, comment, spec, inputs in _shd_loss()]


def _shd_loss_gradient_qk() -> list[_Case]:
    draws = Draws(9)
    rest: dict[str, Any] = {"queries": array(draws.numbers(2, 2, 3, 3)), "scale": SCALE}
    return [
        ("kl", "queries, keys and a scale of all bits", "GRAD-4 GRAD-5 GRAD-8",
         {"supervision": array(draws.maps(2, 2, 3, 4)), **rest, "keys": array(draws.numbers(2, 1, 4, 3)),
          "temperature": TEMPERATURE, "beta": BETA}),
        ("js-sinks", "rows with sinks, and rows that do not count", "GRAD-4 GRAD-6 LOSS-10",
         {"supervision": array(draws.maps(2, 2, 3, 4, sinks=True)), **rest,
          "keys": array(draws.numbers(2, 2, 4, 3)), "divergence": "js", "row_sums": "at_most_one",
          "loss_mask": _ROWS}),
    ]  # fmt: skip


def _intersect_support() -> list[_Case]:
    draws = Draws(10)
    return [
        ("masked", "what is left is scaled back to a sum of all bits", "LOSS-15",
         {"supervision": array(draws.maps(2, 2, 3, 4, sinks=True)),
          "student_logits": array(draws.numbers(2, 2, 3, 4)), "attn_mask": _KEYS, "row_sums": "at_most_one"}),
    ]  # fmt: skip


def _align_tokens() -> list[_Case]:
    draws = Draws(11)
    return [
        ("columns", "rows and columns out of order, scaled back to sums of all bits", "TOKEN-1 TOKEN-2",
         {"attn_probs": array(draws.maps(2, 2, 3, 5, sinks=True)), "rows": [2, 0], "columns": [3, 0, 2],
          "row_sums": "at_most_one"}),
    ]  # fmt: skip


def _gram_tensor() -> list[_Case]:
    draws = Draws(12)
    given = {
        "teacher_probs": array(draws.maps(2, 2, 3, 4)), "values": array(draws.numbers(2, 1, 4, 2)),
        "output_projection": array(draws.numbers(4, 3)),
    }  # fmt: skip
    return [
        ("map", "maps, values and a projection of all bits", "GRAM-1", given),
        ("row", "one tensor a row", "GRAM-1 GRAM-6", {**given, "alpha_per": "row", "query_mask": _ROWS}),
    ]


def _gram(seed: int, heads: int, *, batch: int, per: str) -> Given:
    """A gram tensor of maps and outputs of all bits, its own entries rounded to float64."""
    draws = Draws(seed)
    maps, outputs = (
        array(drawn).value for drawn in (draws.maps(batch, heads, 2, 3), draws.numbers(batch, heads, 3, 2))
    )
    eye = [[Fraction(int(r % 2 == c)) for c in range(2)] for r in range(2 * heads)]
    return array(map_numbers(float, loss.gram_tensor(maps, outputs, eye, alpha_per=per)))


def _solve_alpha_from_gram() -> list[_Case]:
    return [
        ("map", "a gram tensor of all bits", "GRAM-2", {"gram": _gram(131, 2, batch=2, per="map"), "p": 0, "q": 1}),
        ("row", "one tensor a row", "GRAM-2 GRAM-6", {"gram": _gram(132, 2, batch=2, per="row"), "p": 1, "q": 0}),
    ]


def _merge_gram() -> list[_Case]:
    draws = Draws(19)
    return [
        ("map", "a gram tensor and a weight of all bits", "GRAM-4",
         {"gram": _gram(146, 3, batch=1, per="map"), "p": 2, "q": 0,
          "alpha": array(draws.numbers(1, low=0.0, high=1.0))}),
        ("row", "a weight a row", "GRAM-4 GRAM-6",
         {"gram": _gram(142, 2, batch=2, per="row"), "p": 0, "q": 1,
          "alpha": array(draws.numbers(2, 2, low=0.0, high=1.0))}),
    ]  # fmt: skip


def _diagnose() -> list[_Case]:
    draws = Draws(170)
    # Heads that are nearly alike leave little, which shows what maps are rounded to.
    alike = [[_between(sample[0], head, 0.125) for head in sample] for sample in draws.maps(2, 4, 3, 4)]
    return [
        ("alike", "maps and value outputs of all bits", "ORACLE-1 ORACLE-2 ORACLE-3 ORACLE-5",
         {"teacher_probs": array(alike), "value_outputs": array(draws.numbers(2, 4, 4, 6)), "num_student_heads": 2,
          "strategies": ["shd"]}),
        ("row-sinks", "a weight a row, rows with sinks", "ORACLE-1 ORACLE-3 MIX-17",
         {**_teacher(152, 3, width=5, sinks=True), "num_student_heads": 2, "strategies": ["shd", "hard"],
          "alpha_per": "row", "row_sums": "at_most_one", "query_mask": _ROWS}),
    ]  # fmt: skip


def _taught(draws: Draws) -> dict[str, Any]:
    queries, keys = draws.numbers(2, 2, 3, 4), draws.numbers(2, 1, 4, 4)
    return {"teacher_queries": array(queries), "teacher_keys": array(keys), "teacher_scale": SCALE}


def _indexer_target() -> list[_Case]:
    draws = Draws(31)
    taught = _taught(draws)
    return [
        ("target", "queries, keys and scale of all bits", "IDX-6", {**taught, "attn_mask": _KEYS}),
        ("outside", "and log-sum-exps", "IDX-7", {**taught, "outside": array(draws.numbers(2, 2, 3))}),
    ]


def _indexer_loss() -> list[_Case]:
    draws = Draws(32)
    scorer = {
        name: array(draws.numbers(2, heads, rows, 3)) for name, heads, rows in (("queries", 2, 3), ("keys", 1, 4))
    }
    inputs = {**scorer, "weights": array(draws.numbers(2, 2, 3)), "scale": 0.7071067811865476, **_taught(draws)}
    outside = array(draws.numbers(2, 2, 3, low=6.0, high=16.0))
    return [
        ("dense", "all arguments of all bits", "IDX-1 IDX-12", {**inputs, "attn_mask": _KEYS}),
        ("outside", "with log-sum-exps", "IDX-7", {**inputs, "outside": outside}),
    ]


def _add_near_ties(book: Book) -> None:
    """Plans that another rounding of an argument turns: two sets of pairs score nearly the same."""
    for name, (by, seed, part, dtypes) in NEAR_TIES.items():
        draws = Draws(seed)
        maps, outputs = ([draws.maps(1, 4, 3, 4) for _ in "ab"], [draws.numbers(1, 4, 4, 3) for _ in "ab"])
        book.case(
            f"full-{name}: two sets of pairs score nearly the same, and an argument of fewer bits turns them",
            "PLAN-9 PLAN-12 matched-close",
            dtypes=dtypes,
            calibration=[[array(_between(maps[0], maps[1], part)), array(_between(outputs[0], outputs[1], part))]],
            num_student_heads=2,
            by=by,
        )


def _between(first: Nested, second: Nested, part: float) -> Nested:
    if isinstance(first, list):
        return [_between(a, b, part) for a, b in zip(first, second, strict=True)]
    return (1.0 - part) * first + part * second


# How it is scored, the seed, and how far from the one calibration to the other: found by bisection.
NEAR_TIES: dict[str, tuple[str, int, float, tuple[str, ...]]] = {
    "residual": ("residual", 1026, 0.2443476485852266, WIDE),
    "residual-float64": ("residual", 1000, 0.5994691671359541, ("float64",)),
    "similarity": ("similarity", 1001, 0.5041011793226998, WIDE),
    "similarity-float64": ("similarity", 1002, 0.6499175639200311, ("float64",)),
}

_CASES = {
    function.__name__.removeprefix("_"): function
    for function in (
        *(_softmax, _soften, _value_outputs, _solve_alpha, _compose_mixing, _mix_heads, _squeeze_heads, _shd_loss),
        *(_shd_loss_gradient, _shd_loss_gradient_qk, _intersect_support, _align_tokens, _gram_tensor),
        *(_solve_alpha_from_gram, _merge_gram, _diagnose, _indexer_target, _indexer_loss),
    )
}
_CASES["indexer_loss_gradient"] = _indexer_loss
