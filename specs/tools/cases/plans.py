"""Cases of chapters PLAN and LAYER."""

from __future__ import annotations

from typing import Any

import oracle_heads as heads
from book import Book, book_of

PLAN = {"rule": "plan"}
EXACT = {"rule": "exact"}


def merge_plan() -> Book:
    """PLAN-1 to PLAN-5, PLAN-8."""
    book = book_of(heads.merge_plan, "plan", PLAN)
    overshoot = "plan-overshoot plan-last-pairs plan-halves"
    for teachers, students, flags in (
        (1, 1, ""),
        (2, 1, ""),
        (2, 2, "identity-plan"),
        (3, 1, ""),
        (3, 2, "plan-overshoot"),
        (4, 1, "plan-halves"),
        (4, 3, overshoot),
        (5, 2, "plan-last-pairs"),
        (5, 3, "plan-last-pairs"),
        (7, 2, overshoot),
        (9, 3, overshoot),
        (12, 1, overshoot),
        (12, 3, "plan-halves"),
        (12, 4, "plan-halves"),
        (12, 5, overshoot),
        (12, 6, "plan-halves"),
        (12, 8, overshoot),
        (12, 12, "identity-plan"),
        (16, 6, overshoot),
        (16, 12, overshoot),
        (25, 16, overshoot),
        (32, 12, overshoot),
        (40, 32, overshoot),
        (64, 1, "plan-halves"),
    ):
        spec = "PLAN-3" if teachers == students else "PLAN-5"
        arguments: dict[str, Any] = {"num_teacher_heads": teachers, "num_student_heads": students}
        book.valid(f"{teachers}-to-{students}", f"{teachers} heads to {students}", spec, flags, **arguments)
    book.valid("kind-progressive", "the kind by name", "PLAN-5", num_teacher_heads=6, num_student_heads=4,
        kind="progressive")  # fmt: skip
    for teachers, students in (
        (3, 1), (3, 3), (4, 1), (5, 1), (5, 2), (6, 4), (7, 1), (7, 3), (10, 3), (11, 4), (12, 5), (12, 6), (13, 1),
        (14, 4), (16, 6), (25, 16), (40, 32),
    ):  # fmt: skip
        book.valid(f"balanced-{teachers}-to-{students}", f"{teachers} heads in {students} contiguous groups",
            "PLAN-8" if teachers > students else "PLAN-8 PLAN-3",
            "balanced-larger-last balanced-odd-part balanced-is-progressive", num_teacher_heads=teachers,
            num_student_heads=students, kind="balanced")  # fmt: skip
    for name, teachers, students, rounds in (
        ("explicit", 5, 2, [[[3, 1], [0, 4]], [[2, 0]]]),
        ("explicit-identity", 3, 3, []),
    ):
        book.valid(name, "explicit rounds are checked and come back as they are", "PLAN-1 PLAN-7", "pair-sorted",
            num_teacher_heads=teachers, num_student_heads=students, kind=rounds)  # fmt: skip
    for name, rounds in (
        ("too-few-merges", [[[0, 1]]]),
        ("too-many-merges", [[[0, 1], [2, 3]], [[0, 1]]]),
        ("used-twice", [[[0, 1], [1, 2]]]),
        ("outside", [[[0, 4], [1, 2]]]),
        ("empty-round", [[[0, 1], [2, 3]], []]),
        ("three-in-a-pair", [[[0, 1, 2]]]),
    ):
        book.invalid(f"explicit-{name}", "explicit rounds lead from the teacher's heads to the student's",
            "PLAN-7 PLAN-1", "plan-invalid", num_teacher_heads=4, num_student_heads=2, kind=rounds)  # fmt: skip
    book.invalid("boolean-count", "a boolean is no integer", "ERR-6 PLAN-1", "argument-value", num_teacher_heads=4,
        num_student_heads=True)  # fmt: skip
    for teachers, students in ((12, 16), (1, 2), (6, 7)):
        book.invalid(f"exceed-{teachers}-to-{students}", "more student heads than teacher heads", "PLAN-2",
            "heads-exceed", num_teacher_heads=teachers, num_student_heads=students)  # fmt: skip
    book.invalid("exceed-and-no-heads",
        "no teacher heads and one student head: two rules are broken, and either code is right",
        "ERR-4 PLAN-1 PLAN-2", "argument-value heads-exceed", num_teacher_heads=0, num_student_heads=1)  # fmt: skip
    book.invalid("exceed-balanced", "the balanced kind refuses it too", "PLAN-2", "heads-exceed", num_teacher_heads=4,
        num_student_heads=5, kind="balanced")  # fmt: skip
    for name, arguments in (
        ("no-student-heads", {"num_teacher_heads": 4, "num_student_heads": 0}),
        ("no-heads", {"num_teacher_heads": 0, "num_student_heads": 0}),
        ("negative", {"num_teacher_heads": 4, "num_student_heads": -2}),
        ("fraction", {"num_teacher_heads": 4, "num_student_heads": 2.5}),
        ("fraction-teacher", {"num_teacher_heads": 4.5, "num_student_heads": 2}),
        ("kind-unknown", {"num_teacher_heads": 4, "num_student_heads": 2, "kind": "random"}),
        ("kind-matched", {"num_teacher_heads": 4, "num_student_heads": 2, "kind": "matched"}),
        ("kind-unknown-identity", {"num_teacher_heads": 4, "num_student_heads": 4, "kind": "random"}),
    ):
        comment = "counts are integers of at least 1, kinds are progressive and balanced"
        book.invalid(name, comment, "PLAN-1", "argument-value", **arguments)
    return book


def plan_groups() -> Book:
    """PLAN-4, PLAN-6, PLAN-7."""
    book = book_of(heads.plan_groups, "groups", EXACT)
    plan: Any
    for name, teachers, plan, comment in (
        ("identity", 3, [], "the empty plan: every head alone"),
        ("untouched-last", 4, [[[2, 3]]], "merged heads come first, untouched ones after them"),
        ("middle", 5, [[[1, 2]]], "heads before and after the pair keep their order"),
        ("pairs-out-of-order", 6, [[[4, 5], [0, 1]]], "merged heads come in the order of the round"),
        ("swapped-pair", 3, [[[2, 0]]], "the first member's list comes first"),
        ("crossed", 5, [[[3, 1], [0, 4]], [[2, 0]]], "positions of a second round are those of the new pool"),
        ("three-rounds", 5, [[[0, 4]], [[1, 3], [0, 2]], [[1, 0]]], "three rounds"),
        ("progressive-9-to-3", 9, heads.merge_plan(9, 3), "as the progressive kind writes it"),
        ("progressive-12-to-5", 12, heads.merge_plan(12, 5), "the last round merges only as many as are missing"),
        ("progressive-25-to-16", 25, heads.merge_plan(25, 16), "one round of nine pairs"),
        ("progressive-16-to-6", 16, heads.merge_plan(16, 6), "a second round of two pairs"),
        ("balanced-7-to-3", 7, heads.merge_plan(7, 3, "balanced"), "contiguous groups"),
        ("balanced-11-to-4", 11, heads.merge_plan(11, 4, "balanced"), "an odd part waits"),
    ):
        book.valid(name, comment, "PLAN-4 PLAN-6", "pool-in-place pool-untouched-first group-sorted", plan=plan,
            num_teacher_heads=teachers)  # fmt: skip
    for name, plan in (
        ("used-twice", [[[0, 1], [1, 2]]]),
        ("with-itself", [[[1, 1]]]),
        ("outside", [[[0, 4]]]),
        ("outside-the-new-pool", [[[0, 1]], [[0, 3]]]),
        ("negative", [[[0, -1]]]),
        ("empty-round", [[]]),
        ("empty-second-round", [[[0, 1]], []]),
        ("fraction", [[[0, 0.5]]]),
        ("three-in-a-pair", [[[0, 1, 2]]]),
        ("one-in-a-pair", [[[0]]]),
    ):
        book.invalid(name, "a round has at least one pair of valid positions, each used once", "PLAN-7",
            "plan-invalid", plan=plan, num_teacher_heads=4)  # fmt: skip
    book.invalid("booleans", "a boolean is no position", "ERR-6 PLAN-7", "plan-invalid", plan=[[[False, True]]],
        num_teacher_heads=4)  # fmt: skip
    book.invalid("no-heads", "a count of 0", "PLAN-1", "argument-value", plan=[], num_teacher_heads=0)
    return book


def layer_map() -> Book:
    """Chapter LAYER."""
    book = book_of(heads.layer_map, "pairs", EXACT)
    rounding = "layers-floor layers-ceiling layers-half-even layers-zero-based layers-first"
    for teachers, students in (
        (1, 1), (12, 12), (12, 1), (12, 6), (24, 16), (48, 24), (6, 4), (5, 2), (9, 2), (7, 2), (12, 5), (12, 8),
        (10, 4), (13, 5), (24, 7), (28, 24), (32, 12), (36, 24), (40, 12), (100, 7), (13, 12),
    ):  # fmt: skip
        book.valid(f"{teachers}-to-{students}", f"{teachers} layers to {students}",
            "LAYER-1 LAYER-3" if teachers % students else "LAYER-1", rounding, num_teacher_layers=teachers,
            num_student_layers=students)  # fmt: skip
    for teachers, students in INEXACT_LAYERS:
        book.valid(f"inexact-{teachers}-to-{students}",
            "the ratio of the counts is no binary fraction, and rounding it first gives another pair",
            "LAYER-6 LAYER-1", "layers-inexact", num_teacher_layers=teachers,
            num_student_layers=students)  # fmt: skip
    book.valid("many", "2^24 + 1 layers: float32 cannot count them", "LAYER-6", "layers-inexact",
        num_teacher_layers=16777217, num_student_layers=2)  # fmt: skip
    for name, pairs, comment in (
        ("sorted", [[2, 5], [0, 1], [1, 3]], "pairs come back in student order"),
        ("missing-students", [[3, 0]], "student layers may be missing"),
        ("shared-teacher", [[0, 5], [1, 5], [3, 5]], "a teacher layer may serve several"),
        ("crossing", [[0, 5], [3, 0]], "pairs may cross"),
    ):
        book.valid(f"explicit-{name}", comment, "LAYER-4 LAYER-5", "layers-by-teacher", num_teacher_layers=6,
            num_student_layers=4, pairs=pairs)  # fmt: skip
    book.valid("explicit-deeper-student", "with explicit pairs the student may have more layers", "LAYER-2 LAYER-4",
        num_teacher_layers=2, num_student_layers=4, pairs=[[3, 1], [0, 0]])  # fmt: skip
    for name, arguments in (
        ("deeper-student", {"num_teacher_layers": 4, "num_student_layers": 5}),
        ("no-teacher-layers", {"num_teacher_layers": 0, "num_student_layers": 0}),
        ("no-student-layers", {"num_teacher_layers": 4, "num_student_layers": 0}),
        ("negative", {"num_teacher_layers": 4, "num_student_layers": -1}),
        ("fraction", {"num_teacher_layers": 4, "num_student_layers": 1.5}),
    ):
        book.invalid(name, "counts are integers of at least 1, L_s <= L_t", "LAYER-2", "layers-invalid", **arguments)
    book.invalid("boolean-count", "a boolean is no integer", "ERR-6 LAYER-2", "layers-invalid", num_teacher_layers=4,
        num_student_layers=True)  # fmt: skip
    for name, pairs in (
        ("none", []),
        ("student-twice", [[0, 1], [0, 2]]),
        ("teacher-outside", [[0, 6]]),
        ("student-outside", [[4, 0]]),
        ("negative-teacher", [[0, -1]]),
        ("negative-student", [[-1, 0]]),
        ("fraction", [[0, 0.5]]),
        ("of-three", [[0, 1, 2]]),
        ("of-one", [[0]]),
    ):
        book.invalid(f"pairs-{name}",
            "explicit pairs are pairs of integers in range, at least one, no student layer twice", "LAYER-4",
            "layers-invalid", num_teacher_layers=6, num_student_layers=4, pairs=pairs)  # fmt: skip
    return book


# Counts for which s * (L_t / L_s) or (s / L_s) * L_t in float64 rounds to another layer for some s.
INEXACT_LAYERS = ((45, 10), (61, 14), (34, 28), (42, 28))

BOOKS = (merge_plan, plan_groups, layer_map)
