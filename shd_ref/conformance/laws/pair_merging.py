"""Laws in which two options of merging or its plans meet, or three, or four: mistakes like to sit there."""

from __future__ import annotations

from typing import Any

import numpy as np

from shd_ref.conformance.laws.law import WIDE, Array, Trial
from shd_ref.conformance.laws.pair_rows import (
    COUNTS,
    EXPLICIT,
    SAMPLES,
    TEMPERATURES,
    VALUES,
    Calls,
    Row,
    covering,
    has_order,
    maps_of,
    numbers_of,
    options_of,
    ordered,
    plan_of,
    present,
    row_mask,
    shape_of,
    weights_of,
    whole_pool,
)

# --- two options ------------------------------------------------------------------------------------------------


@covering("merge_plan", "kind, rounds, heads left", whole_pool)
def _plans(_: Trial, number: int, row: Row) -> Calls:
    heads, students = COUNTS[row["rounds"], row["heads left"]]
    kind: Any = EXPLICIT[heads, students] if row["kind"] == "explicit" else row["kind"]
    counts = {"num_teacher_heads": heads, "num_student_heads": students}
    yield {**counts, **present(kind=None if kind == "progressive" and number % 2 else kind)}


@covering("plan_groups", "order, rounds, heads left", has_order)
def _groups(_: Trial, number: int, row: Row) -> Calls:
    yield {"plan": ordered(row), "num_teacher_heads": COUNTS[row["rounds"], row["heads left"]][0]}


# Of 17 heads and more there are too many sets of pairs to compare.
_MATCHED = {**COUNTS, ("3", "several, unevenly"): (9, 2)}


def _is_matched(row: Row) -> bool:
    deep = row.get("rounds") == "4 or more" and row.get("heads left", "one") != "one"
    return whole_pool(row) and not deep


@covering(
    "matched_plan",
    "by, alpha_per, row_sums, query_mask, rounds, heads left, items, samples, zero rows, numbers",
    _is_matched,
)
def _matched(trial: Trial, number: int, row: Row) -> Calls:
    heads, students = _MATCHED[row["rounds"], row["heads left"]]
    batch, seed = SAMPLES[row["samples"]], 3001 + 11 * number
    calibration = []
    for item, (rows, keys) in enumerate(((3, 5), (4, 4), (5, 3))[: 1 if row["items"] == "1" else 3]):
        maps = maps_of(trial, seed + item, row, batch, heads, rows, keys)
        outputs = numbers_of(trial, seed + 5 + item, row, batch, heads, keys, 3)
        mask = row_mask(row["query_mask"], batch, rows)
        calibration.append((maps, outputs) if mask is None else (maps, outputs, mask))
    options = options_of(row, by="residual", alpha_per="map", row_sums="one")
    yield {"calibration": calibration, "num_student_heads": students, **options}


@covering(
    "compose_mixing",
    "order, alpha_per, rounds, heads left, samples, numbers",
    has_order,
    values={"rounds": VALUES["rounds"][1:], "heads left": VALUES["heads left"][1:]},
)
def _composed(trial: Trial, number: int, row: Row) -> Calls:
    plan, by_row = ordered(row), (4,) if row["alpha_per"] == "row" else ()
    alphas = [
        weights_of(trial, 5501 + 17 * number + index, row, SAMPLES[row["samples"]], len(one_round), *by_row)
        for index, one_round in enumerate(plan)
    ]
    heads, _ = COUNTS[row["rounds"], row["heads left"]]
    yield {"alphas": alphas, "plan": plan, "num_teacher_heads": heads}


@covering("mix_heads", "alpha_per, student heads, zero rows, samples, shape, size, numbers")
def _mixed(trial: Trial, number: int, row: Row) -> Calls:
    seed = 6001 + 11 * number
    batch, rows, keys = shape_of(row)
    heads = rows if number % 2 else 3  # H_t = L as well: C has two axes that could be swapped
    students = {"one": 1, "fewer": heads - 1, "as many": heads}[row["student heads"]]
    maps = maps_of(trial, seed, row, batch, heads, rows, keys)
    weights = maps_of(trial, seed + 1, {"numbers": row["numbers"]}, batch, students, rows, heads)
    mixing = np.swapaxes(weights, 2, 3) if row["alpha_per"] == "row" else weights[:, :, 0]
    yield {"teacher_probs": maps, "mixing": np.ascontiguousarray(mixing)}


_DEFAULTS = {
    "strategy": "shd",
    "alpha_per": "map",
    "alpha_rule": "least_squares",
    "alpha_from": "teacher",
    "row_sums": "one",
    "by": "residual",
}


@covering(
    "squeeze_heads",
    "strategy, plan, alpha_per, alpha_rule, alpha_from, row_sums, temperature, query_mask, rounds, heads left, "
    "zero rows, samples, shape, size, numbers",
    whole_pool,
)
def _squeezed(trial: Trial, number: int, row: Row) -> Calls:
    seed, temperature = 6501 + 13 * number, TEMPERATURES[row["temperature"], row["numbers"]]
    heads, _ = COUNTS[row["rounds"], row["heads left"]]
    batch, rows, keys = shape_of(row)
    yield {
        "teacher_probs": maps_of(trial, seed, row, batch, heads, rows, keys),
        "value_outputs": numbers_of(trial, seed + 1, row, batch, heads, keys, 21 if row["size"] == "large" else 4),
        **options_of(row, **_DEFAULTS),
        **plan_of(row, number),
        **present(
            temperature=temperature if temperature != 1.0 else None,
            query_mask=row_mask(row["query_mask"], batch, rows),
        ),
    }


@covering(
    "diagnose",
    "plan, strategies, alpha_per, row_sums, query_mask, rounds, heads left, zero rows, samples, shape, numbers",
    whole_pool,
)
def _diagnosed(trial: Trial, number: int, row: Row) -> Calls:
    seed = 7501 + 13 * number
    heads, _ = COUNTS[row["rounds"], row["heads left"]]
    batch, rows, keys = shape_of(row)
    yield {
        "teacher_probs": maps_of(trial, seed, row, batch, heads, rows, keys),
        "value_outputs": numbers_of(trial, seed + 1, row, batch, heads, keys, 6),
        **options_of(row, alpha_per="map", row_sums="one"),
        **plan_of(row, number),
        **present(
            strategies={"one": ["hard"], "several": ["mean", "shd", "constant"]}.get(row["strategies"]),
            query_mask=row_mask(row["query_mask"], batch, rows),
        ),
    }


# --- three and four options -------------------------------------------------------------------------------------

# Teacher and student heads, with explicit rounds that no kind gives.
_ROUNDS: dict[str, tuple[int, int, list[list[list[int]]]]] = {
    "none": (4, 4, []),
    "one": (5, 3, [[[4, 1], [2, 0]]]),
    "several": (6, 2, [[[5, 1], [0, 3]], [[2, 0], [3, 1]]]),
}
_TEMPERATURES = {"above": 5.5, "below": 0.3125}
_FEW = {
    "temperature": ("one", "above", "below"),
    "query_mask": ("none", "some rows"),
    "rounds": tuple(_ROUNDS),
    "strategies": ("not given", "two"),
    "heads": ("7 to 2", "8 to 3"),
}


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
    """A call of ``squeeze_heads`` or ``diagnose``; the default plan is left out every other time."""
    heads, students, explicit = _ROUNDS[row["rounds"]]
    if row.get("strategy") == "hard":
        sizes["batch"] = 9  # a choice of two shows less than a number
    maps, outputs, mask = _teacher(trial, seed, row, heads, **sizes)
    plan = explicit if row["plan"] == "explicit" else row["plan"]
    return {
        "teacher_probs": maps,
        "value_outputs": outputs,
        "num_student_heads": students,
        **options_of(row, **_DEFAULTS),
        **present(
            plan=plan if plan != "progressive" or seed % 2 else None,
            temperature=_TEMPERATURES.get(row.get("temperature", "one")),
            query_mask=mask,
        ),
    }


_OPTIONS = "plan, alpha_per, alpha_rule, alpha_from, row_sums"


@covering("squeeze_heads", f"strategy, rounds, {_OPTIONS}, temperature, query_mask", strength=3, values=_FEW)
def squeezed_triples(trial: Trial, number: int, row: Row) -> Calls:
    """Calls of ``squeeze_heads``."""
    yield _inputs(trial, 10_001 + 3 * number, row)


# Those values that each have their say.
@covering(
    "squeeze_heads",
    f"strategy, {_OPTIONS}, query_mask, temperature, rounds",
    strength=4,
    values={**_FEW, "temperature": ("above", "below"), "rounds": ("several",)},
)
def _squeezed_fours(trial: Trial, number: int, row: Row) -> Calls:
    yield _inputs(trial, 12_501 + 3 * number, row)


@covering("diagnose", "rounds, plan, alpha_per, row_sums, query_mask, strategies", strength=3, values=_FEW)
def diagnosed_triples(trial: Trial, number: int, row: Row) -> Calls:
    """Calls of ``diagnose``."""
    strategies = None if row["strategies"] == "not given" else ["hard", "shd"]
    yield {**_inputs(trial, 11_001 + 3 * number, row, batch=2, keys=4), **present(strategies=strategies)}


@covering("matched_plan", "by, alpha_per, row_sums, query_mask, items, heads", strength=3, values=_FEW)
def matched_triples(trial: Trial, number: int, row: Row) -> Calls:
    """Calls of ``matched_plan``."""
    heads, students = map(int, row["heads"].split(" to "))
    options = options_of(row, by="residual", alpha_per="map", row_sums="one")
    # A choice of pairs shows less than a number, and alphas by similarity show in later rounds alone.
    draws = 1 if row["alpha_per"] == "map" else 9 if row["by"] == "similarity" else 5
    for draw in range(draws):
        calibration = []
        for item in range(1 if row["items"] == "1" else 2):
            seed = 12_001 + 61 * number + 5 * draw + 2 * item
            width = 1 if row["by"] == "similarity" else 3  # one feature spreads the alphas of rows
            maps, outputs, mask = _teacher(trial, seed, row, heads, batch=1, width=width)
            calibration.append((maps, outputs) if mask is None else (maps, outputs, mask))
        yield {"calibration": calibration, "num_student_heads": students, **options}


_SQUEEZED = "NUM-6 MIX-4 MIX-8 MIX-11 MIX-12 MIX-13 MIX-16 MIX-17 ALPHA-9 TEMP-3 TEMP-5 "
_CHAIN = "NUM-6 MIX-4 MIX-5 MIX-8 MIX-9 MIX-11 MIX-12 MIX-16 MIX-17 ALPHA-4 ALPHA-9 TEMP-3 TEMP-5 MIX-6"
PLANS = (
    _plans.law("PLAN-1 PLAN-3 PLAN-5 PLAN-7 PLAN-8"),
    _groups.law("PLAN-4 PLAN-6"),
    _matched.law("PLAN-9 PLAN-10 PLAN-11 PLAN-12 PLAN-13", WIDE),
)
LAWS = (
    _composed.law("MIX-13 PLAN-4"),
    _mixed.law("MIX-3 MIX-18"),
    _squeezed.law(_SQUEEZED + "ALPHA-4 MIX-9", WIDE, "squeeze-shd", strategy="shd"),
    _squeezed.law(_SQUEEZED + "MIX-5 MIX-9", WIDE, "squeeze-constant", strategy="constant"),
    _squeezed.law(_SQUEEZED + "MIX-5 MIX-9 MIX-14", WIDE, "squeeze-hard", strategy="hard"),
    _squeezed.law(_SQUEEZED + "MIX-6", WIDE, "squeeze-mean", strategy="mean"),
    _diagnosed.law("ORACLE-1 ORACLE-2 ORACLE-3 ORACLE-5 ORACLE-6 MIX-8", WIDE),
    squeezed_triples.law(_CHAIN, WIDE, "squeeze"),
    _squeezed_fours.law(_CHAIN, WIDE, "squeeze"),
    diagnosed_triples.law("ORACLE-1 ORACLE-2 ORACLE-3 ORACLE-5", WIDE),
    matched_triples.law("PLAN-9 PLAN-11 PLAN-12 PLAN-13", WIDE),
)
