"""Laws of the chapters PLAN and LAYER, which are integers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np

from shd_ref.conformance.chain import Pair
from shd_ref.conformance.compare import as_plain
from shd_ref.conformance.laws.law import Trial, exactly, law, require
from shd_ref.conformance.laws.pair_rows import (
    COUNTS,
    EXPLICIT,
    LEFT,
    MASKS,
    PER,
    ROUNDS,
    SAMPLES,
    SINKS,
    WIDE,
    Row,
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
    whole_pool,
)
from shd_ref.conformance.variants import compute

_COUNTS = ((16, 6), (12, 6), (25, 16), (40, 32), (9, 3), (6, 3), (7, 7), (1, 1), (5, 1), (11, 4), (8, 5))


def _check_rounds(plan: Any, heads: int, students: int) -> list[list[int]]:
    """The groups of a plan, after checking that it is one (PLAN-4, PLAN-6, PLAN-7)."""
    pool = [[head] for head in range(heads)]
    for one_round in plan:
        used = [head for pair in one_round for head in pair]
        fits = used and len(set(used)) == len(used) and all(0 <= head < len(pool) for head in used)
        require(bool(fits), f"a round on a pool of {len(pool)}", "distinct positions in the pool", one_round)
        merged = [pool[p] + pool[q] for p, q in one_round]
        pool = merged + [group for position, group in enumerate(pool) if position not in used]
    require(len(pool) == students, f"the plan {heads} -> {students}", f"{students} heads", f"{len(pool)} heads")
    return pool


def _progressive(trial: Trial) -> None:
    for heads, students in _COUNTS:
        counts = {"num_teacher_heads": heads, "num_student_heads": students}
        plan = as_plain(trial.call("merge_plan", **counts)["plan"])
        _check_rounds(plan, heads, students)
        expected, left = [], heads
        while left > students:
            pairs = min(left // 2, left - students)
            expected.append([[2 * i, 2 * i + 1] for i in range(pairs)])
            left -= pairs
        exactly(plan, expected, f"the progressive plan {heads} -> {students}")


def _balanced(trial: Trial) -> None:
    for heads, students in _COUNTS:
        counts = {"num_teacher_heads": heads, "num_student_heads": students}
        plan = as_plain(trial.call("merge_plan", kind="balanced", **counts)["plan"])
        groups = _check_rounds(plan, heads, students)
        sizes = [heads // students + (group < heads % students) for group in range(students)]
        starts = [sum(sizes[:group]) for group in range(students)]
        expected = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
        # Groups that are complete early wait behind later rounds' merges, so their order is the plan's.
        exactly(
            sorted(sorted(group) for group in groups),
            expected,
            f"the groups of the balanced plan {heads} -> {students}",
        )
        rounds = compute("merge_plan", {**counts, "kind": "balanced"})["plan"]
        exactly(plan, rounds, f"the balanced plan {heads} -> {students}")


def _groups(trial: Trial) -> None:
    for heads, students in _COUNTS:
        for kind in ("progressive", "balanced"):
            counts = {"num_teacher_heads": heads, "num_student_heads": students}
            plan = trial.call("merge_plan", kind=kind, **counts)["plan"]
            expected = _check_rounds(as_plain(plan), heads, students)
            groups = trial.call("plan_groups", plan=plan, num_teacher_heads=heads)["groups"]
            exactly(groups, expected, f"the groups of the {kind} plan {heads} -> {students}")


def _explicit(trial: Trial) -> None:
    rounds = [[[4, 1], [0, 5]], [[2, 0]]]
    plan = trial.call("merge_plan", num_teacher_heads=6, num_student_heads=3, kind=rounds)["plan"]
    exactly(plan, rounds, "explicit rounds 6 -> 3")
    groups = trial.call("plan_groups", plan=rounds, num_teacher_heads=6)["groups"]
    exactly(groups, [[2, 4, 1], [0, 5], [3]], "the groups of explicit rounds")


def _identity(trial: Trial) -> None:
    for kind in ("progressive", "balanced"):
        plan = trial.call("merge_plan", num_teacher_heads=7, num_student_heads=7, kind=kind)["plan"]
        exactly(plan, [], f"the {kind} plan 7 -> 7")


def _layers(trial: Trial) -> None:
    for teachers in (1, 2, 3, 5, 6, 7, 12, 24, 28, 48):
        for students in {1, 2, 3, 4, 5, 6, 9, 12, 16, 24} & set(range(1, teachers + 1)):
            pairs = as_plain(
                trial.call("layer_map", num_teacher_layers=teachers, num_student_layers=students)["pairs"]
            )
            what = f"the layer map {teachers} -> {students}"
            exactly(pairs[-1], [students - 1, teachers - 1], f"the last pair of {what}")
            expected = [[s, (2 * (s + 1) * teachers + students) // (2 * students) - 1] for s in range(students)]
            exactly(pairs, expected, what)


def _explicit_layers(trial: Trial) -> None:
    layer_pairs = [[3, 11], [0, 2], [1, 2]]
    pairs = trial.call("layer_map", num_teacher_layers=12, num_student_layers=4, pairs=layer_pairs)["pairs"]
    exactly(pairs, sorted(layer_pairs), "explicit layer pairs")
    wide = trial.call("layer_map", num_teacher_layers=2, num_student_layers=4, pairs=[[3, 1], [1, 0]])["pairs"]
    exactly(wide, [[1, 0], [3, 1]], "explicit pairs with more student than teacher layers")


def _matched(trial: Trial) -> None:
    mask = np.array([[True] * 4, [True, True, False, False]])
    # With one draw alone, pools that were merged wrongly often give the same second round.
    for seed in (21, 61, 65, 69, 73, 77):
        maps, outputs = trial.probs(seed, 2, 5, 4, 6), trial.numbers(seed + 1, 2, 5, 6, 3)
        calibration = [(maps, outputs, mask), (maps[:1, ::-1].copy(), outputs[:1, ::-1].copy())]
        for by in ("residual", "similarity"):
            for per in ("map", "row"):
                answer = trial.call(
                    "matched_plan", calibration=calibration, num_student_heads=2, by=by, alpha_per=per
                )
                check_matched(trial, as_plain(answer["plan"]), calibration, 2, by, per)


def check_matched(trial: Trial, plan: Any, calibration: Sequence[Any], students: int, by: str, per: str) -> None:
    """Each round is as good as the best of all sets of pairs, on the pool that the earlier rounds made."""
    what = f"the matched plan by {by}, alpha per {per},"
    heads = calibration[0][0].shape[1]
    _check_rounds(plan, heads, students)
    pools = [
        tuple([array[:, t].astype(np.float64) for t in range(heads)] for array in item[:2]) for item in calibration
    ]
    masks = [item[2] if len(item) == 3 else None for item in calibration]
    for number, one_round in enumerate(plan):
        count = min(heads // 2, heads - students)
        exactly(len(one_round), count, f"{what} the pairs of round {number}")
        exactly(one_round, sorted(sorted(pair) for pair in one_round), f"{what} the order of round {number}")
        scores: dict[tuple[int, int], float] = {}
        merges: dict[tuple[int, int], list[Any]] = {}
        for p, q in combinations(range(heads), 2):
            scores[p, q], merges[p, q] = 0.0, []
            for (maps, outputs), mask in zip(pools, masks, strict=True):
                pair = Pair.of(maps[p], maps[q], outputs[p], outputs[q], mask, per_row=per == "row")
                a = pair.clipped
                counts = 1.0 if mask is None else mask[:, :, None]
                distance = ((maps[p] - maps[q]) ** 2 * counts).sum()
                scores[p, q] -= float(pair.squared_error(a).sum() if by == "residual" else distance)
                merges[p, q].append(
                    (a[:, :, None] * maps[p] + (1 - a[:, :, None]) * maps[q], outputs[p] + outputs[q])
                )
        best = _largest_sum(scores, heads, count)
        reached = sum(scores[p, q] for p, q in one_round)
        missed = np.array([(best - reached) / max(abs(best), 1.0)])
        trial.at_most(missed, np.zeros(1), "residual", f"{what} the share of the score missed in round {number}")
        used = {head for pair in one_round for head in pair}
        for item, pool in enumerate(pools):
            for component, heads_of in enumerate(pool):
                merged = [merges[p, q][item][component] for p, q in one_round]
                heads_of[:] = merged + [head for position, head in enumerate(heads_of) if position not in used]
        heads -= count


def _largest_sum(scores: dict[tuple[int, int], float], heads: int, count: int) -> float:
    """The largest sum of exactly ``count`` pairs that share no head: the first head left stays alone or is paired."""

    @cache
    def best(left: frozenset[int], alone: int) -> float:
        if not left:
            return 0.0
        first = min(left)
        rest = left - {first}
        sums = [best(rest, alone - 1)] if alone else []
        return max([*sums, *(scores[first, other] + best(rest - {other}, alone) for other in rest)], default=-np.inf)

    return best(frozenset(range(heads)), heads - 2 * count)


_RULES = (
    law("plan-progressive", "merge_plan", "PLAN-5 PLAN-3 PLAN-4",
        "A round merges the first min(floor(H/2), H - H_s) adjacent pairs, until H_s heads are left.",
        _progressive),
    law("plan-balanced", "merge_plan", "PLAN-8 PLAN-4",
        "Balanced plans make contiguous groups whose sizes differ by at most one, the larger first.", _balanced),
    law("plan-groups", "merge_plan plan_groups", "PLAN-6 PLAN-4",
        "The groups are what comes of following the rounds: merged heads first, then the untouched.", _groups),
    law("plan-explicit", "merge_plan plan_groups", "PLAN-7 PLAN-4 PLAN-6",
        "Explicit rounds come back as they are, and their groups list the first member's heads first.",
        _explicit),
    law("plan-identity", "merge_plan", "PLAN-3", "Equal counts give the empty plan.", _identity),
    law("plan-matched", "matched_plan", "PLAN-9 PLAN-10 PLAN-11 PLAN-12 PLAN-13 NUM-8",
        "No set of pairs scores higher than the one that a matched round lists.", _matched),
    law("layers-meet", "layer_map", "LAYER-1 LAYER-3 LAYER-6",
        "Layers are paired by rounding s L_t / L_s to nearest, halves up, and the last layers meet.", _layers),
    law("layers-explicit", "layer_map", "LAYER-4 LAYER-5",
        "Explicit pairs come back in student order; layers may be missing and teachers may serve several.",
        _explicit_layers),
)  # fmt: skip


def _plans(trial: Trial) -> None:
    rows = cover({"kind": ("progressive", "balanced", "explicit"), "rounds": ROUNDS, "heads left": LEFT}, whole_pool)

    def check(number: int, row: Row) -> None:
        heads, students = COUNTS[row["rounds"], row["heads left"]]
        kind = EXPLICIT[heads, students] if row["kind"] == "explicit" else row["kind"]
        counts: dict[str, Any] = {"num_teacher_heads": heads, "num_student_heads": students}
        expected = compute("merge_plan", {**counts, "kind": kind})["plan"]
        options = {} if kind == "progressive" and number % 2 else {"kind": kind}
        exactly(trial.call("merge_plan", **counts, **options)["plan"], expected, f"the plan {say(row)}")

    each(rows, check)


def _groups_pairs(trial: Trial) -> None:
    def check(_: int, row: Row) -> None:
        heads, students = COUNTS[row["rounds"], row["heads left"]]
        plan = ordered(EXPLICIT[heads, students], row["order"])
        expected = compute("plan_groups", {"plan": plan, "num_teacher_heads": heads})["groups"]
        got = trial.call("plan_groups", plan=plan, num_teacher_heads=heads)["groups"]
        exactly(got, expected, f"the groups {say(row)}")

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


def _matched_pairs(trial: Trial) -> None:
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


_PAIRS = (
    pair_law("merge_plan", "PLAN-1 PLAN-3 PLAN-5 PLAN-7 PLAN-8", _plans),
    pair_law("plan_groups", "PLAN-4 PLAN-6", _groups_pairs),
    pair_law("matched_plan", "PLAN-9 PLAN-10 PLAN-11 PLAN-12 PLAN-13", _matched_pairs, dtypes=WIDE),
)

LAWS = (*_RULES, *_PAIRS)
