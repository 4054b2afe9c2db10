"""Laws in which two options of the chapters MIX and ORACLE meet."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from shd_ref.conformance.chain import check_chain
from shd_ref.conformance.laws.bounds import check_diagnosis
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
    SHAPES,
    SINKS,
    TEMPERATURES,
    WIDE,
    broken_row,
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
)
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
        for place, one_round in enumerate(plan):
            seed, shape = 5501 + 17 * number + place, (batch, len(one_round), *by_row)
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
        wanted = np.stack(vectors, axis=1)  # (B, H_s, H_t) or (B, H_s, L, H_t)
        wanted = np.swapaxes(wanted, 2, 3) if by_row else wanted
        trial.agree(got, wanted, "alpha", f"compose_mixing {say(row)}")

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
        wanted = (wide * maps.astype(np.float64)[:, None]).sum(2)
        trial.agree(got, wanted, "probs", f"mix_heads {say(row)}")

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
            found = check_chain(inputs, got, trial.subject.dtype)
            if found:
                raise broken_row(row, found[1], found[0])

        numbered = [(number, row) for number, row in enumerate(_squeeze_rows()) if row["strategy"] == strategy]
        each([row for _, row in numbered], lambda place, row: check(numbered[place][0], row))

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
LAWS = (
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
