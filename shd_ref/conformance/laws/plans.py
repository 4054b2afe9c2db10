"""Laws of the chapters PLAN and LAYER, which are integers."""

from __future__ import annotations

import numpy as np

from shd_ref.conformance.compare import as_plain
from shd_ref.conformance.laws import pair_merging
from shd_ref.conformance.laws.answers import check_answer, check_rounds
from shd_ref.conformance.laws.law import Laws, Trial, exactly

LAWS = Laws()
_COUNTS = ((16, 6), (12, 6), (25, 16), (40, 32), (9, 3), (6, 3), (7, 7), (1, 1), (5, 1), (11, 4), (8, 5))


@LAWS.add("plan-progressive", "merge_plan", "PLAN-5 PLAN-3 PLAN-4")
def _progressive(trial: Trial) -> None:
    """A round merges the first min(floor(H/2), H - H_s) adjacent pairs, until H_s heads are left."""
    for heads, students in _COUNTS:
        counts = {"num_teacher_heads": heads, "num_student_heads": students}
        check_rounds(as_plain(check_answer(trial, "merge_plan", counts)["plan"]), heads, students)


@LAWS.add("plan-balanced", "merge_plan", "PLAN-8 PLAN-4")
def _balanced(trial: Trial) -> None:
    """Balanced plans make contiguous groups whose sizes differ by at most one, the larger first."""
    for heads, students in _COUNTS:
        counts = {"num_teacher_heads": heads, "num_student_heads": students, "kind": "balanced"}
        groups = check_rounds(as_plain(check_answer(trial, "merge_plan", counts)["plan"]), heads, students)
        expected = [group.tolist() for group in np.array_split(range(heads), students)]
        # Groups that are complete early wait behind later rounds' merges, so their order is the plan's.
        what = f"the groups of the balanced plan {heads} -> {students}"
        exactly(sorted(sorted(group) for group in groups), expected, what)


@LAWS.add("plan-groups", "merge_plan plan_groups", "PLAN-6 PLAN-4")
def _groups(trial: Trial) -> None:
    """The groups are what comes of following the rounds: merged heads first, then the untouched."""
    for heads, students in _COUNTS:
        for kind in ("progressive", "balanced"):
            counts = {"num_teacher_heads": heads, "num_student_heads": students}
            plan = trial.call("merge_plan", kind=kind, **counts)["plan"]
            expected = check_rounds(as_plain(plan), heads, students)
            groups = trial.call("plan_groups", plan=plan, num_teacher_heads=heads)["groups"]
            exactly(groups, expected, f"the groups of the {kind} plan {heads} -> {students}")


@LAWS.add("plan-explicit", "merge_plan plan_groups", "PLAN-7 PLAN-4 PLAN-6")
def _explicit(trial: Trial) -> None:
    """Explicit rounds come back as they are, and their groups list the first member's heads first."""
    rounds = [[[4, 1], [0, 5]], [[2, 0]]]
    plan = trial.call("merge_plan", num_teacher_heads=6, num_student_heads=3, kind=rounds)["plan"]
    exactly(plan, rounds, "explicit rounds 6 -> 3")
    groups = trial.call("plan_groups", plan=rounds, num_teacher_heads=6)["groups"]
    exactly(groups, [[2, 4, 1], [0, 5], [3]], "the groups of explicit rounds")


@LAWS.add("plan-identity", "merge_plan", "PLAN-3")
def _identity(trial: Trial) -> None:
    """Equal counts give the empty plan."""
    for kind in ("progressive", "balanced"):
        plan = trial.call("merge_plan", num_teacher_heads=7, num_student_heads=7, kind=kind)["plan"]
        exactly(plan, [], f"the {kind} plan 7 -> 7")


@LAWS.add("plan-matched", "matched_plan", "PLAN-9 PLAN-10 PLAN-11 PLAN-12 PLAN-13 NUM-8")
def _matched(trial: Trial) -> None:
    """No set of pairs scores higher than the one that a matched round lists."""
    mask = np.array([[True] * 4, [True, True, False, False]])
    # With one draw alone, pools that were merged wrongly often give the same second round.
    for seed in (21, 61, 65, 69, 73, 77):
        maps, outputs = trial.probs(seed, 2, 5, 4, 6), trial.numbers(seed + 1, 2, 5, 6, 3)
        calibration = [(maps, outputs, mask), (maps[:1, ::-1].copy(), outputs[:1, ::-1].copy())]
        for by in ("residual", "similarity"):
            for per in ("map", "row"):
                inputs = {"calibration": calibration, "num_student_heads": 2, "by": by, "alpha_per": per}
                check_answer(trial, "matched_plan", inputs)


@LAWS.add("layers-meet", "layer_map", "LAYER-1 LAYER-3 LAYER-6")
def _layers(trial: Trial) -> None:
    """Layers are paired by rounding s L_t / L_s to nearest, halves up, and the last layers meet."""
    for teachers in (1, 2, 3, 5, 6, 7, 12, 24, 28, 48):
        for students in {1, 2, 3, 4, 5, 6, 9, 12, 16, 24} & set(range(1, teachers + 1)):
            counts = {"num_teacher_layers": teachers, "num_student_layers": students}
            pairs = as_plain(check_answer(trial, "layer_map", counts)["pairs"])
            exactly(pairs[-1], [students - 1, teachers - 1], f"the last pair {teachers} -> {students}")


@LAWS.add("layers-explicit", "layer_map", "LAYER-4 LAYER-5")
def _explicit_layers(trial: Trial) -> None:
    """Explicit pairs come back in student order; layers may be missing and teachers may serve several."""
    pairs = [[3, 11], [0, 2], [1, 2]]
    check_answer(trial, "layer_map", {"num_teacher_layers": 12, "num_student_layers": 4, "pairs": pairs})
    wide = {"num_teacher_layers": 2, "num_student_layers": 4, "pairs": [[3, 1], [1, 0]]}
    check_answer(trial, "layer_map", wide)


LAWS += pair_merging.PLANS
