"""Laws in which two options of merging meet, or three, or four: mistakes like to sit where options do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from shd_ref.conformance.chain import check_chain
from shd_ref.conformance.compare import Difference, as_plain
from shd_ref.conformance.laws.formulas import check_diagnosis
from shd_ref.conformance.laws.law import Array, Law, LawBrokenError, Trial, exactly, law
from shd_ref.conformance.laws.pair_rows import (
    COUNTS,
    EXPLICIT,
    LEFT,
    MASKS,
    PER,
    ROUNDS,
    SAMPLES,
    SHAPES,
    SINKS,
    TEMPERATURES,
    WIDE,
    Row,
    broken_row,
    cover,
    each,
    maps_of,
    numbers_of,
    options_of,
    ordered,
    ordered_rows,
    pair_law,
    row_mask,
    say,
    shape_of,
    whole_pool,
    words,
)
from shd_ref.conformance.laws.plans import check_matched
from shd_ref.conformance.variants import compute


def _composed(trial: Trial) -> None:
    rows = ordered_rows(
        alpha_per=PER,
        rounds=ROUNDS[1:],
        **{"heads left": LEFT[1:], "samples": tuple(SAMPLES), "numbers": ("short", "full")},
    )

    def check(number: int, row: Row) -> None:
        heads, students = COUNTS[row["rounds"], row["heads left"]]
        plan = ordered(EXPLICIT[heads, students], row["order"])
        batch, by_row = SAMPLES[row["samples"]], (4,) if row["alpha_per"] == "row" else ()
        alphas = []
        for index, one_round in enumerate(plan):
            seed, shape = 5501 + 17 * number + index, (batch, len(one_round), *by_row)
            short = trial.numbers(seed, *shape, low=0, high=16, shift=4)
            full = trial.rounded(np.abs(trial.quotients(seed, *shape)) / 3.5)
            alphas.append(full if row["numbers"] == "full" else short)
        got = trial.numbers_of("compose_mixing", alphas=alphas, plan=plan, num_teacher_heads=heads)
        pool = [np.eye(heads)[t] for t in range(heads)]
        vectors: list[Any] = [np.broadcast_to(c, (batch, *by_row, heads)) for c in pool]
        for one_round, weights in zip(plan, alphas, strict=True):
            a = weights.astype(np.float64)[..., None]
            used = {head for pair in one_round for head in pair}
            merged = [a[:, n] * vectors[p] + (1 - a[:, n]) * vectors[q] for n, (p, q) in enumerate(one_round)]
            vectors = merged + [c for position, c in enumerate(vectors) if position not in used]
        expected = np.stack(vectors, axis=1)  # (B, H_s, H_t) or (B, H_s, L, H_t)
        expected = np.swapaxes(expected, 2, 3) if by_row else expected
        trial.agree(got, expected, "alpha", f"compose_mixing {say(row)}")

    each(rows, check)


@cache
def _mix_rows() -> list[Row]:
    return cover(
        {
            "alpha_per": PER,
            "student heads": ("one", "fewer", "as many"),
            "zero rows": ("none", "some"),
            "samples": tuple(SAMPLES),
            "shape": tuple(SHAPES),
            "size": ("small", "large"),
            "numbers": ("short", "full"),
        }
    )


def _mixed(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        seed = 6001 + 11 * number
        batch, rows, keys = shape_of(row)
        heads = rows if number % 2 else 3  # H_t = L as well: C has two axes that could be swapped
        students = {"one": 1, "fewer": heads - 1, "as many": heads}[row["student heads"]]
        maps = maps_of(trial, seed, row, batch, heads, rows, keys)
        weights = maps_of(trial, seed + 1, {"numbers": row["numbers"]}, batch, students, rows, heads)
        by_row = row["alpha_per"] == "row"
        mixing = np.ascontiguousarray(np.swapaxes(weights, 2, 3) if by_row else weights[:, :, 0])
        got = trial.numbers_of("mix_heads", teacher_probs=maps, mixing=mixing)
        wide = mixing.astype(np.float64)[..., None] if by_row else mixing.astype(np.float64)[..., None, None]
        expected = (wide * maps.astype(np.float64)[:, None]).sum(2)
        trial.agree(got, expected, "probs", f"mix_heads {say(row)}")

    each(_mix_rows(), check)


@cache
def _squeeze_rows() -> list[Row]:
    return cover(
        {
            "strategy": ("shd", "constant", "hard", "mean"),
            "plan": ("progressive", "balanced", "explicit"),
            "alpha_per": PER,
            "alpha_rule": ("least_squares", "as_printed"),
            "alpha_from": ("teacher", "softened"),
            "row_sums": SINKS,
            "temperature": ("one", "whole", "above", "below"),
            "query_mask": MASKS,
            "rounds": ROUNDS,
            "heads left": LEFT,
            "zero rows": ("none", "some"),
            "samples": tuple(SAMPLES),
            "shape": tuple(SHAPES),
            "size": ("small", "large"),
            "numbers": ("short", "full"),
        },
        whole_pool,
    )


_SQUEEZE_DEFAULTS = {
    "strategy": "shd", "alpha_per": "map", "alpha_rule": "least_squares", "alpha_from": "teacher", "row_sums": "one",
}  # fmt: skip


def _squeezed(strategy: str) -> Callable[[Trial], None]:
    def law(trial: Trial) -> None:
        def check(number: int, row: Row) -> None:
            seed = 6501 + 13 * number
            heads, students = COUNTS[row["rounds"], row["heads left"]]
            batch, rows, keys = shape_of(row)
            kind: Any = EXPLICIT[heads, students] if row["plan"] == "explicit" else row["plan"]
            temperature = TEMPERATURES[row["temperature"], row["numbers"]]
            mask = row_mask(row["query_mask"], batch, rows)
            inputs: dict[str, Any] = {
                "teacher_probs": maps_of(trial, seed, row, batch, heads, rows, keys),
                "value_outputs": numbers_of(
                    trial, seed + 1, row, batch, heads, keys, 21 if row["size"] == "large" else 4
                ),
                "num_student_heads": students,
                **options_of(row, _SQUEEZE_DEFAULTS),
                **({"temperature": temperature} if temperature != 1.0 else {}),
                **({"plan": kind} if kind != "progressive" or number % 2 else {}),
                **({"query_mask": mask} if mask is not None else {}),
            }
            got = trial.call("squeeze_heads", **inputs)
            counts = {"num_teacher_heads": heads, "num_student_heads": students, "kind": kind}
            exactly(got["plan"], compute("merge_plan", counts)["plan"], f"the plan {say(row)}")
            failure = check_chain(inputs, got, trial.subject.dtype)
            if failure:
                raise broken_row(row, failure[1], failure[0])

        numbered = [(number, row) for number, row in enumerate(_squeeze_rows()) if row["strategy"] == strategy]
        each([row for _, row in numbered], lambda index, row: check(numbered[index][0], row))

    return law


@cache
def _diagnosis_rows() -> list[Row]:
    return cover(
        {
            "plan": ("progressive", "balanced", "explicit"),
            "strategies": ("not given", "one", "several"),
            "alpha_per": PER,
            "row_sums": SINKS,
            "query_mask": MASKS,
            "rounds": ROUNDS,
            "heads left": LEFT,
            "zero rows": ("none", "some"),
            "samples": tuple(SAMPLES),
            "shape": tuple(SHAPES),
            "numbers": ("short", "full"),
        },
        whole_pool,
    )


def _diagnosed(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        seed = 7501 + 13 * number
        heads, students = COUNTS[row["rounds"], row["heads left"]]
        batch, rows, keys = shape_of(row)
        kind: Any = EXPLICIT[heads, students] if row["plan"] == "explicit" else row["plan"]
        mask = row_mask(row["query_mask"], batch, rows)
        names = {"not given": None, "one": ["hard"], "several": ["mean", "shd", "constant"]}[row["strategies"]]
        check_diagnosis(
            trial,
            {
                "teacher_probs": maps_of(trial, seed, row, batch, heads, rows, keys),
                "value_outputs": numbers_of(trial, seed + 1, row, batch, heads, keys, 6),
                "num_student_heads": students,
                **options_of(row, {"alpha_per": "map", "row_sums": "one"}),
                **({"plan": kind} if kind != "progressive" or number % 2 else {}),
                **({"strategies": names} if names else {}),
                **({"query_mask": mask} if mask is not None else {}),
            },
            say(row),
        )

    each(_diagnosis_rows(), check)


_CHAIN = "NUM-6 MIX-4 MIX-8 MIX-11 MIX-12 MIX-13 MIX-16 MIX-17 ALPHA-9 TEMP-3 TEMP-5 "
_MERGING = (
    pair_law("compose_mixing", "MIX-13 PLAN-4", _composed),
    pair_law("mix_heads", "MIX-3 MIX-18", _mixed),
    *(
        pair_law("squeeze_heads", _CHAIN + spec, _squeezed(strategy), name=f"squeeze-{strategy}", dtypes=WIDE)
        for strategy, spec in (
            ("shd", "ALPHA-4 MIX-9"),
            ("constant", "MIX-5 MIX-9"),
            ("hard", "MIX-5 MIX-9 MIX-14"),
            ("mean", "MIX-6"),
        )
    ),
    pair_law("diagnose", "ORACLE-1 ORACLE-2 ORACLE-3 ORACLE-5 ORACLE-6 MIX-8", _diagnosed, dtypes=WIDE),
)


_WIDE = ("float64", "float32")
DEFAULTS = {
    "strategy": "shd", "alpha_per": "map", "alpha_rule": "least_squares", "alpha_from": "teacher", "row_sums": "one",
    "by": "residual",
}  # fmt: skip
# Teacher and student heads, with explicit rounds that no kind gives.
_ROUNDS: dict[str, tuple[int, int, list[list[list[int]]]]] = {
    "none": (4, 4, []),
    "one": (5, 3, [[[4, 1], [2, 0]]]),
    "several": (6, 2, [[[5, 1], [0, 3]], [[2, 0], [3, 1]]]),
}
_TEMPERATURES = {"one": 1.0, "above": 5.5, "below": 0.3125}
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "strategy": ("shd", "constant", "hard", "mean"),
    "plan": ("progressive", "balanced", "explicit"),
    "alpha_per": ("map", "row"),
    "alpha_rule": ("least_squares", "as_printed"),
    "alpha_from": ("teacher", "softened"),
    "row_sums": ("one", "at_most_one"),
    "temperature": ("one", "above", "below"),
    "query_mask": ("none", "some rows"),
    "by": ("residual", "similarity"),
    "rounds": tuple(_ROUNDS),
}


def _options_of(*names: str, **others: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {**{name: _ARGUMENTS[name] for name in names}, **others}


def _teacher(
    trial: Trial, seed: int, row: Row, heads: int, *, batch: int = 3, keys: int = 5, width: int = 3
) -> tuple[Array, Array, Array | None]:
    """Maps ``(B, H, 4, S)``, outputs ``(B, H, S, D)`` and a mask, as a row of options asks for."""
    maps = trial.probs(seed, batch, heads, 4, keys).astype(np.float64)
    if row["row_sums"] == "at_most_one":
        maps *= np.array([1.0, 0.25, 0.5, 0.75])[np.arange(maps[..., 0].size).reshape(maps.shape[:-1]) % 7 % 4, None]
    mask = None
    if row["query_mask"] != "none":
        # Another mask for every seed, so that items of one calibration have different ones.
        mask = (np.arange(batch)[:, None] * 3 + np.arange(4)[None, :] + seed // 2) % 4 > 1
        # A row that does not count may have anything but negative entries: here, what would decide if it did.
        other = 1.5 * np.eye(keys)[np.arange(seed, seed + heads) * 3 // 2 % keys]
        maps = np.where(mask[:, None, :, None], maps, other[None, :, None])
    return trial.rounded(maps), trial.numbers(seed + 1, batch, heads, keys, width), mask


def _inputs(trial: Trial, seed: int, row: Row, **sizes: int) -> dict[str, Any]:
    """A call of ``squeeze_heads`` or ``diagnose``; what is at its default is left out every other time."""
    heads, students, explicit = _ROUNDS[row["rounds"]]
    if row.get("strategy") == "hard":
        sizes["batch"] = 9  # a choice of two shows less than a number
    maps, outputs, mask = _teacher(trial, seed, row, heads, **sizes)
    named = {name: row[name] for name in DEFAULTS if row.get(name, DEFAULTS[name]) != DEFAULTS[name]}
    inputs: dict[str, Any] = {
        "teacher_probs": maps, "value_outputs": outputs, "num_student_heads": students, **named
    }  # fmt: skip
    if row["plan"] != "progressive" or seed % 2:
        inputs["plan"] = explicit if row["plan"] == "explicit" else row["plan"]
    if row.get("temperature", "one") != "one":
        inputs["temperature"] = _TEMPERATURES[row["temperature"]]
    return inputs if mask is None else {**inputs, "query_mask": mask}


@cache
def squeeze_rows() -> list[Row]:
    """Options of ``squeeze_heads``, every three values together."""
    return cover(
        _options_of(
            "strategy", "rounds", "plan", "alpha_per", "alpha_rule", "alpha_from", "row_sums",
            "temperature", "query_mask",
        ),
        strength=3,
    )  # fmt: skip


def squeeze_inputs(trial: Trial, number: int, row: Row) -> dict[str, Any]:
    """The call that a row asks for."""
    return _inputs(trial, 10_001 + 3 * number, row)


def check_squeezed(trial: Trial, inputs: Mapping[str, Any], answer: Mapping[str, Any], row: Row) -> None:
    """An answer of ``squeeze_heads`` is right for these inputs."""
    say = f"with {', '.join(words(row))}"
    counts = {
        "num_teacher_heads": inputs["teacher_probs"].shape[1],
        "num_student_heads": inputs["num_student_heads"],
        "kind": inputs.get("plan", "progressive"),
    }
    exactly(answer["plan"], compute("merge_plan", counts)["plan"], f"the plan {say}")
    failure = check_chain(inputs, answer, trial.subject.dtype)
    if failure:
        name, difference = failure
        raise LawBrokenError(Difference(f"{name}: {difference.problem}; {say}", difference.expected, difference.got))


def _squeezed_triples(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        inputs = squeeze_inputs(trial, number, row)
        check_squeezed(trial, inputs, trial.call("squeeze_heads", **inputs), row)

    each(squeeze_rows(), check)


@cache
def _four_rows() -> list[Row]:
    """Options of ``squeeze_heads`` that each have their say, every four values together."""
    options = _options_of("strategy", "plan", "alpha_per", "alpha_rule", "alpha_from", "row_sums", "query_mask")
    return cover({**options, "temperature": ("above", "below"), "rounds": ("several",)}, strength=4)


def _four(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        inputs = _inputs(trial, 12_501 + 3 * number, row)
        check_squeezed(trial, inputs, trial.call("squeeze_heads", **inputs), row)

    each(_four_rows(), check)


@cache
def diagnosis_rows() -> list[Row]:
    """Options of ``diagnose``, every three values together."""
    options = _options_of("rounds", "plan", "alpha_per", "row_sums", "query_mask")
    return cover({**options, "strategies": ("not given", "two")}, strength=3)


def diagnosis_inputs(trial: Trial, number: int, row: Row) -> dict[str, Any]:
    """The call that a row asks for."""
    inputs = _inputs(trial, 11_001 + 3 * number, row, batch=2, keys=4)
    return inputs if row["strategies"] == "not given" else {**inputs, "strategies": ["hard", "shd"]}


def _diagnosed_triples(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        check_diagnosis(trial, diagnosis_inputs(trial, number, row), f"with {', '.join(words(row))}")

    each(diagnosis_rows(), check)


@cache
def matched_rows() -> list[Row]:
    """Options of ``matched_plan``, every three values together."""
    options = _options_of("by", "alpha_per", "row_sums", "query_mask")
    return cover({**options, "items": ("1", "several"), "heads": tuple(_COUNTS)}, strength=3)


_COUNTS = {"7 to 2": (7, 2), "8 to 3": (8, 3)}


def matched_inputs(trial: Trial, number: int, row: Row) -> list[dict[str, Any]]:
    """The calls that a row asks for."""
    heads, students = _COUNTS[row["heads"]]
    named = {name: row[name] for name in ("by", "alpha_per", "row_sums") if row[name] != DEFAULTS[name]}
    calls = []
    # A choice of pairs shows less than a number, and alphas by similarity show in later rounds alone.
    draws = 1 if row["alpha_per"] == "map" else 9 if row["by"] == "similarity" else 5
    for draw in range(draws):
        calibration = []
        for item in range(1 if row["items"] == "1" else 2):
            seed = 12_001 + 61 * number + 5 * draw + 2 * item
            # One feature spreads the alphas of rows.
            width = 1 if row["by"] == "similarity" else 3
            maps, outputs, mask = _teacher(trial, seed, row, heads, batch=1, width=width)
            calibration.append((maps, outputs) if mask is None else (maps, outputs, mask))
        calls.append({"calibration": calibration, "num_student_heads": students, **named})
    return calls


def check_matching(trial: Trial, inputs: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """A matched plan is right for these inputs."""
    options = inputs.get("by", "residual"), inputs.get("alpha_per", "map")
    check_matched(trial, as_plain(answer["plan"]), inputs["calibration"], inputs["num_student_heads"], *options)


def _matched(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        for inputs in matched_inputs(trial, number, row):
            check_matching(trial, inputs, trial.call("matched_plan", **inputs))

    each(matched_rows(), check)


def _law(name: str, operations: tuple[str, ...], spec: str, statement: Callable[[Trial], None]) -> Law:
    comment = f"Any three options of {operations[0]} do together what each does alone."
    return law(f"triples-{name}", operations, spec, comment, statement, _WIDE)


def _laws() -> Iterator[Law]:
    chain = "NUM-6 MIX-4 MIX-5 MIX-8 MIX-9 MIX-11 MIX-12 MIX-16 MIX-17 ALPHA-4 ALPHA-9 TEMP-3 TEMP-5 "
    yield _law("squeeze", ("squeeze_heads",), chain + "MIX-6", _squeezed_triples)
    yield law("fours-squeeze", "squeeze_heads", (chain + "MIX-6"),
              "Any four options of squeeze_heads do together what each does alone.", _four, _WIDE)  # fmt: skip
    yield _law("diagnose", ("diagnose", "squeeze_heads"), "ORACLE-1 ORACLE-2 ORACLE-3 ORACLE-5", _diagnosed_triples)
    yield _law("matched-plan", ("matched_plan",), "PLAN-9 PLAN-11 PLAN-12 PLAN-13", _matched)


_TRIPLES = tuple(_laws())


LAWS = (*_MERGING, *_TRIPLES)
