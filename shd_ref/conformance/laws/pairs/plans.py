"""Laws in which two options of the chapter PLAN meet."""

from __future__ import annotations

from functools import cache
from typing import Any

from shd_ref.conformance.compare import as_plain
from shd_ref.conformance.laws.covering import Row, cover, each
from shd_ref.conformance.laws.law import Trial, exactly
from shd_ref.conformance.laws.pairs.rows import (
    COUNTS,
    EXPLICIT,
    LEFT,
    MASKS,
    PER,
    ROUNDS,
    SAMPLES,
    SINKS,
    WIDE,
    maps_of,
    numbers_of,
    options_of,
    ordered,
    ordered_rows,
    pair_law,
    row_mask,
    say,
    whole_pool,
)
from shd_ref.conformance.laws.plans import check_matched
from shd_ref.conformance.variants import compute


def _plans(trial: Trial) -> None:
    rows = cover({"kind": ("progressive", "balanced", "explicit"), "rounds": ROUNDS, "heads left": LEFT}, whole_pool)

    def check(number: int, row: Row) -> None:
        heads, students = COUNTS[row["rounds"], row["heads left"]]
        kind = EXPLICIT[heads, students] if row["kind"] == "explicit" else row["kind"]
        counts: dict[str, Any] = {"num_teacher_heads": heads, "num_student_heads": students}
        wanted = compute("merge_plan", {**counts, "kind": kind})["plan"]
        given = {} if kind == "progressive" and number % 2 else {"kind": kind}
        exactly(trial.call("merge_plan", **counts, **given)["plan"], wanted, f"the plan {say(row)}")

    each(rows, check)


def _groups(trial: Trial) -> None:
    def check(_: int, row: Row) -> None:
        heads, students = COUNTS[row["rounds"], row["heads left"]]
        plan = ordered(EXPLICIT[heads, students], row["order"])
        wanted = compute("plan_groups", {"plan": plan, "num_teacher_heads": heads})["groups"]
        got = trial.call("plan_groups", plan=plan, num_teacher_heads=heads)["groups"]
        exactly(got, wanted, f"the groups {say(row)}")

    each(ordered_rows(rounds=ROUNDS, **{"heads left": LEFT}), check)


@cache
def _matched_rows() -> list[Row]:
    def allowed(row: Row) -> bool:
        deep = row.get("rounds") == "4 or more" and row.get("heads left", "one") != "one"
        return whole_pool(row) and not deep  # of 17 heads and more there are too many sets of pairs to compare

    return cover(
        {
            "by": ("residual", "similarity"),
            "alpha_per": PER,
            "row_sums": SINKS,
            "query_mask": MASKS,
            "rounds": ROUNDS,
            "heads left": LEFT,
            "items": ("1", "several"),
            "samples": tuple(SAMPLES),
            "zero rows": ("none", "some"),
            "numbers": ("short", "full"),
        },
        allowed,
    )


_MATCHED = {**COUNTS, ("3", "several, unevenly"): (9, 2)}


def _matched(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        heads, students = _MATCHED[row["rounds"], row["heads left"]]
        batch, seed = SAMPLES[row["samples"]], 3001 + 11 * number
        calibration = []
        for item in range(1 if row["items"] == "1" else 3):
            rows, keys = ((3, 5), (4, 4), (5, 3))[item]
            maps = maps_of(trial, seed + item, row, batch, heads, rows, keys)
            outputs = numbers_of(trial, seed + 5 + item, row, batch, heads, keys, 3)
            mask = row_mask(row["query_mask"], batch, rows)
            calibration.append((maps, outputs) if mask is None else (maps, outputs, mask))
        options = options_of(row, {"by": "residual", "alpha_per": "map", "row_sums": "one"})
        answer = trial.call("matched_plan", calibration=calibration, num_student_heads=students, **options)
        check_matched(trial, as_plain(answer["plan"]), calibration, students, row["by"], row["alpha_per"])

    each(_matched_rows(), check)


LAWS = (
    pair_law("merge_plan", "PLAN-1 PLAN-3 PLAN-5 PLAN-7 PLAN-8", _plans),
    pair_law("plan_groups", "PLAN-4 PLAN-6", _groups),
    pair_law("matched_plan", "PLAN-9 PLAN-10 PLAN-11 PLAN-12 PLAN-13", _matched, dtypes=WIDE),
)
