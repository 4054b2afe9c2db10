"""Cases of ``specs/recipes.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import oracle_recipes as oracle
from book import Book, Given, array, mask, numbers, special
from exact import map_numbers

from cases.full import Draws
from cases.kd.inputs import topk

LOSS = {"rule": "close", "quantity": "loss"}
EXACT = {"rule": "exact"}
WIDE = ("float64", "float32")

Z, U, DIST = (numbers([3, 5], seed, -16, 16, 2) for seed in (5001, 5002, 5003))
HARD = array([0, 4, 2], "int64")
SOFT = array([[0.5, 0.25, 0.25, 0, 0], [0, 0.375, 0.375, 0.25, 0], [0, 0, 0, 0, 1]])
TEXT, TEACHER, OTHER, BEFORE = (numbers([2, 4, 6], seed, -12, 12, 2) for seed in (5011, 5013, 5015, 5014))
WORDS = array([[1, -100, 5, 0], [-100, 2, 2, 3]], "int64")
NO_WORDS = array([[-100] * 4] * 2, "int64")
ROWS = mask([[1, 1, 0, 1], [1, 1, 1, 0]])
PADDED = {
    "student_logits": numbers([2, 4, 8], 5021, -8, 8, 2),
    "targets": array([[[*row, -40, -48] for row in rows] for rows in TEACHER.value]),
}
TOKENS = array([[3, 0, 5, 1], [2, 2, 4, 0]], "int64")
LOGITS = {"student_logits": Z, "labels": HARD}
WORDED = {"student_logits": TEXT, "labels": WORDS}


def _book(operation: str, *names: str) -> Book:
    rules = {f"{name}.{part}": LOSS for name in names for part in ("value", "weight")}
    return Book(operation, names, getattr(oracle, operation), rules)


def _label_refusals(book: Book, good: dict[str, Any], *, every_row: bool, soft: bool) -> None:
    shape = good["labels"]
    book.invalid("label-too-large", "a class that is not there", "REC-4", "argument-value",
                 inputs={**good, "labels": array(map_numbers(lambda y: 6, shape.value), "int64")})  # fmt: skip
    book.invalid("label-negative", "-1 says nothing", "REC-4", "argument-value",
                 inputs={**good, "labels": array(map_numbers(lambda y: -1, shape.value), "int64")})  # fmt: skip
    book.invalid("labels-short", "labels of other rows", "REC-4", "argument-shape",
                 inputs={**good, "labels": array(shape.value[1:], "int64")})  # fmt: skip
    book.invalid("labels-real", "hard labels that are no integers", "REC-4", "argument-dtype",
                 inputs={**good, "labels": array(map_numbers(lambda y: 1.5, shape.value))})  # fmt: skip
    if every_row:
        book.invalid("label-ignored", "of a recipe for images every row counts", "REC-4", "argument-value",
                     inputs={**good, "labels": array([0, -100, 1], "int64")})  # fmt: skip
    if soft:
        halves = array(map_numbers(lambda y: y / 2, SOFT.value))
        book.invalid("soft-half", "soft labels that sum to a half", "REC-5", "not-a-distribution",
                     inputs={**good, "labels": halves})  # fmt: skip
        signed = array([[1.5, -0.5, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]])
        book.invalid("soft-negative", "a soft label below zero", "REC-5", "not-a-distribution",
                     inputs={**good, "labels": signed})  # fmt: skip
        broken = array([["nan", 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]])
        book.invalid("soft-nan", "a soft label that is no number", "REC-5", "not-finite",
                     inputs={**good, "labels": broken})  # fmt: skip


def _weight_refusals(book: Book, good: dict[str, Any], name: str, *, shared: bool) -> None:
    slug = name.replace("_", "-")
    for what, number in (("negative", -0.5), ("nan", special("nan")), ("infinite", special("inf")), ("true", True)):
        inputs = {**good, name: number}
        book.invalid(
            f"{slug}-{what}", "a weight must be at least 0 and finite", "REC-2", "argument-value", inputs=inputs
        )
    if shared:
        inputs = {**good, name: 1.5}
        book.invalid(
            f"{slug}-above-one", "the other term would be negative", "REC-2", "argument-value", inputs=inputs
        )


def cross_entropy() -> Book:
    """REC-4 to REC-7."""
    book = _book("cross_entropy", "cross_entropy")
    book.valid("classes", "a mean over images", "REC-1 REC-7", inputs=LOGITS)
    book.valid("soft", "mixed labels", "REC-5 REC-7", inputs={**LOGITS, "labels": SOFT})
    book.valid("text", "the mean is over the rows that count", "REC-4 REC-7", inputs=WORDED)
    book.valid("shift", "row t has the label at t + 1", "REC-6", inputs={**WORDED, "shift": True})
    book.valid("no-row-counts", "exactly 0", "REC-7", inputs={**WORDED, "labels": NO_WORDS},
               compare=dict.fromkeys(book.rules, EXACT))  # fmt: skip
    book.valid("full", "logits of all bits", "REC-7", "rounded-argument", dtypes=WIDE,
               inputs={**LOGITS, "student_logits": array(Draws(51).numbers(3, 5))})  # fmt: skip
    _label_refusals(book, LOGITS, every_row=False, soft=True)
    book.invalid("shift-soft", "soft labels cannot be shifted", "REC-6", "argument-shape",
                 inputs={**LOGITS, "labels": SOFT, "shift": True})  # fmt: skip
    book.invalid("shift-images", "images have no next position", "REC-6", "argument-shape",
                 inputs={**LOGITS, "shift": True})  # fmt: skip
    return book


def language_kd() -> Book:
    """REC-8."""
    book = _book("language_kd", "cross_entropy", "kd")
    good = {**WORDED, "targets": TEACHER}
    cases: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("default", "both terms over the rows whose label counts", good),
        ("weight", "a quarter from the teacher", {**good, "kd_weight": 0.25}),
        ("teacher-alone", "all from the teacher", {**good, "kd_weight": 1}),
        ("temperature", "T^2 is in the value", {**good, "temperature": 2}),
        ("shift", "the label moves, the teacher's row does not", {**good, "shift": True}),
        ("record", "three classes and the tail", {**good, "targets": topk(TEACHER, 3, 2)}),
        ("padded", "two classes are padding", {**good, **PADDED, "vocab_size": 6}),
    )
    for name, comment, inputs in cases:
        book.valid(name, comment, "REC-6 REC-8" if name == "shift" else "REC-8", inputs=inputs)
    book.valid("no-row-counts", "exactly 0", "REC-7 REC-8", inputs={**good, "labels": NO_WORDS},
               compare={"cross_entropy.value": EXACT, "kd.value": EXACT})  # fmt: skip
    _label_refusals(book, good, every_row=False, soft=False)
    _weight_refusals(book, good, "kd_weight", shared=True)
    book.invalid("another-temperature", "a record is bound to its own", "REC-8", "argument-value",
                 inputs={**good, "targets": topk(TEACHER, 3, 2), "temperature": 1})  # fmt: skip
    return book


def image_kd() -> Book:
    """REC-9."""
    book = _book("image_kd", "cross_entropy", "kd")
    good = {**LOGITS, "targets": U}
    book.valid("default", "T = 4", "REC-9", inputs=good)
    book.valid("soft", "mixed labels, T = 1", "REC-5 REC-9", inputs={**good, "labels": SOFT, "temperature": 1})
    book.valid("weight", "an eighth from the teacher", "REC-9", inputs={**good, "kd_weight": 0.125})
    _label_refusals(book, good, every_row=True, soft=True)
    _weight_refusals(book, good, "kd_weight", shared=True)
    return book


def nkd() -> Book:
    """REC-10, REC-11."""
    book = _book("nkd", "cross_entropy", "target", "nontarget")
    good = {**LOGITS, "teacher_logits": U}
    book.valid("default", "T = 1", "REC-10 REC-11", inputs=good)
    book.valid("temperature", "the target class has none", "REC-10 REC-11",
               inputs={**good, "temperature": 2, "nontarget_weight": 1.5})  # fmt: skip
    book.valid("soft", "of equal classes the first is the target", "REC-10", inputs={**good, "labels": SOFT})
    two = {"student_logits": array([[1, 3]]), "teacher_logits": array([[2, -1]]), "labels": array([1], "int64")}
    book.valid("two-classes", "one class is left: nothing to learn among the others", "REC-11", inputs=two)
    draws = Draws(52)
    book.valid("full", "logits of all bits", "REC-10 REC-11", "rounded-argument", dtypes=WIDE,
               inputs={**good, "student_logits": array(draws.numbers(3, 5)),
                       "teacher_logits": array(draws.numbers(3, 5))})  # fmt: skip
    _label_refusals(book, good, every_row=True, soft=True)
    _weight_refusals(book, good, "nontarget_weight", shared=False)
    one = {"student_logits": array([[1]]), "teacher_logits": array([[2]]), "labels": array([0], "int64")}
    book.invalid("one-class", "no other class", "REC-10", "argument-shape", inputs=one)
    book.invalid("other-classes", "a teacher of other classes", "REC-10", "argument-shape",
                 inputs={**good, "teacher_logits": numbers([3, 4], 5031, -8, 8, 2)})  # fmt: skip
    book.invalid("temperature-zero", "T is above 0", "REC-11", "argument-value",
                 inputs={**good, "temperature": 0})  # fmt: skip
    return book


def deit_soft() -> Book:
    """REC-12."""
    book = _book("deit_soft", "cross_entropy", "kd")
    good = {**LOGITS, "distillation_logits": DIST, "targets": U}
    book.valid("default", "divided by the number of logits", "REC-12", inputs=good)
    book.valid("temperature", "T^2 is in the value", "REC-12", inputs={**good, "temperature": 2, "kd_weight": 0.25})
    book.valid(
        "record", "soft labels, a record", "REC-5 REC-12", inputs={**good, "labels": SOFT, "targets": topk(U, 2)}
    )
    _label_refusals(book, good, every_row=True, soft=True)
    _weight_refusals(book, good, "kd_weight", shared=True)
    book.invalid("other-rows", "a distillation token of other images", "REC-12", "argument-shape",
                 inputs={**good, "distillation_logits": numbers([2, 5], 5032, -8, 8, 2)})  # fmt: skip
    return book


def deit_hard() -> Book:
    """REC-13."""
    book = _book("deit_hard", "cross_entropy", "kd")
    good = {**LOGITS, "distillation_logits": DIST, "teacher_logits": U}
    tie = array([[1, 3, 3, 0, 3], [2, 2, -1, 0, 1], [0, 0, 0, 0, 0]])
    book.valid("default", "the teacher's decisions", "REC-13", inputs=good)
    book.valid("tie", "of equal classes the first", "REC-13", inputs={**good, "teacher_logits": tie})
    book.valid("weight", "soft labels, a quarter from the teacher", "REC-13",
               inputs={**good, "labels": SOFT, "kd_weight": 0.25})  # fmt: skip
    _label_refusals(book, good, every_row=True, soft=True)
    _weight_refusals(book, good, "kd_weight", shared=True)
    book.invalid("other-classes", "a teacher of other classes", "REC-13", "argument-shape",
                 inputs={**good, "teacher_logits": numbers([3, 4], 5033, -8, 8, 2)})  # fmt: skip
    return book


def gkd() -> Book:
    """REC-14."""
    book = _book("gkd", "jsd")
    good = {**WORDED, "targets": TEACHER}
    for mixing in (0, 0.25, 1):
        book.valid(f"mixing-{mixing}", "0 is KL(P || Q), 1 KL(Q || P)", "REC-14", inputs={**good, "mixing": mixing})
    book.valid("shift", "rows whose next label counts", "REC-6 REC-14", inputs={**good, "shift": True})
    book.valid("padded", "two classes are padding", "REC-14", inputs={**good, **PADDED, "vocab_size": 6})
    book.valid("record", "three classes and the tail", "REC-14", inputs={**good, "targets": topk(TEACHER, 3)})
    _label_refusals(book, good, every_row=False, soft=False)
    book.invalid("warm-record", "the temperature is 1", "REC-14", "argument-value",
                 inputs={**good, "targets": topk(TEACHER, 3, 2)})  # fmt: skip
    return book


def babyllama() -> Book:
    """REC-15."""
    book = _book("babyllama", "cross_entropy", "kd")
    good = {**WORDED, "teacher_logits": [TEACHER, OTHER]}
    book.valid("default", "every position, over B alone", "REC-6 REC-15", inputs=good)
    book.valid("one-teacher", "labels of their own rows", "REC-15",
               inputs={**good, "teacher_logits": [TEACHER], "shift": False, "kd_weight": 0.75})  # fmt: skip
    book.valid("temperature", "three teachers at T = 1", "REC-15",
               inputs={**good, "teacher_logits": [TEACHER, OTHER, BEFORE], "temperature": 1})  # fmt: skip
    book.valid(
        "no-label-counts", "the teachers teach all the same", "REC-7 REC-15", inputs={**good, "labels": NO_WORDS}
    )
    _label_refusals(book, good, every_row=False, soft=False)
    _weight_refusals(book, good, "kd_weight", shared=True)
    return book


PARAMETERS = {
    **{f"mimic_{n}_weight": numbers([3, 2], 5041 + n, -4, 4, 2) for n in range(2)},
    **{f"mimic_{n}_bias": numbers([3], 5043 + n, -4, 4, 2) for n in range(2)},
    "project_weight": numbers([3, 2], 5045, -4, 4, 2),
    "project_bias": numbers([3], 5046, -4, 4, 2),
    "mask_token": numbers([3], 5047, -4, 4, 2),
    **{f"generate_{n}_weight": numbers([3, 3, 3, 3], 5048 + n, -4, 4, 3) for n in (0, 2)},
    **{f"generate_{n}_bias": numbers([3], 5052 + n, -4, 4, 2) for n in (0, 2)},
}


def _vitkd_inputs(tokens: int, seed: int) -> dict[str, Any]:
    student, teacher = ([numbers([2, tokens, d], seed + n + d, -8, 8, 2) for n in range(0, 30, 10)] for d in (2, 3))
    return {
        "student_layers": student[:2],
        "student_last": student[2],
        "teacher_layers": teacher[:2],
        "teacher_last": teacher[2],
        "parameters": PARAMETERS,
        "noise": numbers([2, tokens], seed + 9, 0, 40, 3),
    }


def vitkd() -> Book:
    """REC-16 to REC-18."""
    book = _book("vitkd", "mimic", "generate")
    good = _vitkd_inputs(4, 5100)
    book.valid("square", "half of four tokens is removed", "REC-16 REC-17 REC-18", inputs=good)
    book.valid("odd", "of nine tokens four stay", "REC-17 REC-18", inputs=_vitkd_inputs(9, 5200))
    book.valid("grid", "two rows of three patches", "REC-18", inputs={**_vitkd_inputs(6, 5300), "grid": [2, 3]})
    ties = {**_vitkd_inputs(6, 5300), "noise": array([[1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0]]), "grid": [3, 2]}
    book.valid(
        "ties", "of equal noise the first stay; a quarter is removed", "REC-17", inputs={**ties, "removed": 0.25}
    )
    book.valid("weights", "b / r", "REC-1 REC-18",
               inputs={**good, "mimic_weight": 0.5, "generate_weight": 0.25, "removed": 0.75})  # fmt: skip
    book.valid("one-layer", "a single layer", "REC-16",
               inputs={**good, "student_layers": good["student_layers"][:1],
                       "teacher_layers": good["teacher_layers"][:1]})  # fmt: skip
    for name in ("mimic_weight", "generate_weight"):
        _weight_refusals(book, good, name, shared=False)
    for what, number in (("zero", 0), ("one", 1), ("nan", special("nan"))):
        book.invalid(
            f"removed-{what}", "between 0 and 1", "REC-17", "argument-value", inputs={**good, "removed": number}
        )
    few = {name: value for name, value in PARAMETERS.items() if name != "mask_token"}
    book.invalid(
        "no-mask-token", "a parameter is missing", "REC-16", "argument-value", inputs={**good, "parameters": few}
    )
    book.invalid("layers", "a layer without its teacher", "REC-16", "argument-shape",
                 inputs={**good, "teacher_layers": good["teacher_layers"][:1]})  # fmt: skip
    book.invalid("tokens", "a teacher of other tokens", "REC-16", "argument-shape",
                 inputs={**good, "teacher_last": numbers([2, 5, 3], 5400, -8, 8, 2)})  # fmt: skip
    book.invalid("noise", "noise of other tokens", "REC-17", "argument-shape",
                 inputs={**good, "noise": numbers([2, 5], 5401, 0, 8, 2)})  # fmt: skip
    book.invalid("no-square", "six patches are no square", "REC-18", "argument-shape", inputs=_vitkd_inputs(6, 5300))
    book.invalid("grid-wrong", "a grid of other patches", "REC-18", "argument-shape", inputs={**good, "grid": [2, 3]})
    return book


def vkd() -> Book:
    """REC-19, REC-20."""
    book = _book("vkd", "cross_entropy", "kd", "features")
    features = {
        "student_features": numbers([3, 4, 2], 5501, -8, 8, 2),
        "teacher_features": numbers([3, 4, 2, 2], 5502, -8, 8, 2),
        "projection": array([[1, 0], [0, 1], [0, 0], [0, 0]]),
    }
    good = {**LOGITS, "distillation_logits": DIST, "targets": U, **features}
    book.valid("convolutional", "channels first", "REC-19 REC-20", inputs=good)
    book.valid("tokens", "a transformer's tokens", "REC-19",
               inputs={**good, "teacher_features": numbers([3, 5, 4], 5503, -8, 8, 2), "labels": SOFT})  # fmt: skip
    book.valid("constant", "features without spread: LN gives 0", "REC-19",
               inputs={**good, "teacher_features": array([[[2] * 4] * 5] * 3)})  # fmt: skip
    book.valid("weights", "summed, not shared out; T^2 is in the value", "REC-20",
               inputs={**good, "kd_weight": 0.5, "feature_weight": 4, "temperature": 2})  # fmt: skip
    _label_refusals(book, good, every_row=True, soft=True)
    for name in ("kd_weight", "feature_weight"):
        _weight_refusals(book, good, name, shared=False)
    book.invalid("projection", "a matrix of the other sides", "REC-19", "argument-shape",
                 inputs={**good, "projection": array([[1, 0, 0, 0], [0, 1, 0, 0]])})  # fmt: skip
    book.invalid("pooled", "features without positions", "REC-19", "argument-shape",
                 inputs={**good, "teacher_features": numbers([3, 4], 5504, -8, 8, 2)})  # fmt: skip
    book.invalid("other-rows", "a distillation token of other images", "REC-20", "argument-shape",
                 inputs={**good, "distillation_logits": numbers([2, 5], 5032, -8, 8, 2)})  # fmt: skip
    return book


def vkd_detection() -> Book:
    """REC-34."""
    book = _book("vkd_detection", "features")
    students, teachers = (
        [numbers([6, 3], seed, -12, 12, 2), numbers([4, 2], seed + 1, -12, 12, 2)] for seed in (5801, 5811)
    )
    good = {"student_tokens": students, "teacher_tokens": teachers}
    book.valid("two-groups", "a sum of means: of groups of other sizes", "REC-34", inputs=good)
    book.valid("weight", "as the detector's other losses", "REC-34", inputs={**good, "feature_weight": 0.5})
    still = array([[0.5, x] for x in (1, -2, 3, 0.5)])
    book.valid("constant", "a channel without spread says nothing, on either side", "REC-34",
               inputs={"student_tokens": [still, teachers[1]], "teacher_tokens": [students[1], still]})  # fmt: skip
    few = {"student_tokens": [array([[1, 2], [3, -5]])], "teacher_tokens": [array([[2, 1], [0, 4]])]}
    book.valid("two-rows", "the fewest that have a deviation", "REC-34", inputs=few)
    _weight_refusals(book, good, "feature_weight", shared=False)
    refusals = {
        "one-row": ([array([[1, 2]])], [array([[2, 1]])]),
        "groups": (students, teachers[:1]),
        "no-group": ([], []),
        "rows": (students[:1], [numbers([5, 3], 5820, -8, 8, 2)]),
    }
    for name, (own, taught) in refusals.items():
        book.invalid(name, "groups that do not belong together, or say nothing", "REC-34", "argument-shape",
                     inputs={"student_tokens": own, "teacher_tokens": taught})  # fmt: skip
    return book


SAMPLED = {"student_logits": BEFORE, "teacher_logits": TEACHER, "tokens": TOKENS, "mask": ROWS}


def minillm_rollout() -> Book:
    """REC-21 to REC-23."""
    names = ("tokens", "mask", "log_probs", "rewards", "weights")
    rules = {name: EXACT if name in ("tokens", "mask") else LOSS for name in names}
    book = Book("minillm_rollout", names, oracle.minillm_rollout, rules)
    book.valid("default", "rows that do not count: 0, 0 and 1", "REC-22 REC-23", inputs=SAMPLED)
    book.valid("mix", "half of the teacher", "REC-21 REC-23", inputs={**SAMPLED, "mix": 0.5})
    for mix in (0, 1):
        book.valid(f"mix-{mix}", "an end of the mixture", "REC-21 REC-23", inputs={**SAMPLED, "mix": mix})
    book.valid("clip", "rewards of at most one", "REC-22",
               inputs={**SAMPLED, "reward_scale": 2, "reward_clip": 1})  # fmt: skip
    huge = {**SAMPLED, "student_logits": array(map_numbers(lambda x: 64 * x, BEFORE.value))}
    book.valid("unlikely", "a token that the student does not expect", "REC-22 REC-23", inputs=huge, dtypes=WIDE)
    bad = array([[9, 0, 5, 1], [2, 2, 4, 0]], "int64")
    fine = array([[3, 0, 9, 1], [2, 2, 4, -7]], "int64")
    book.valid(
        "padding", "tokens of rows that do not count are not read", "REC-21", inputs={**SAMPLED, "tokens": fine}
    )
    book.invalid("token", "a token that is not there", "REC-21", "argument-value", inputs={**SAMPLED, "tokens": bad})
    book.invalid("tokens-real", "tokens that are no integers", "REC-21", "argument-dtype",
                 inputs={**SAMPLED, "tokens": numbers([2, 4], 5601, 0, 5, 1)})  # fmt: skip
    book.invalid("tokens-short", "tokens of other rows", "REC-21", "argument-shape",
                 inputs={**SAMPLED, "tokens": array([[3, 0, 5, 1]], "int64")})  # fmt: skip
    book.invalid("teacher", "a teacher of other classes", "REC-21", "argument-shape",
                 inputs={**SAMPLED, "teacher_logits": numbers([2, 4, 5], 5602, -8, 8, 2)})  # fmt: skip
    for name in ("reward_scale", "reward_clip"):
        book.invalid(
            f"{name.replace('_', '-')}-zero", "above 0", "REC-22", "argument-value", inputs={**SAMPLED, name: 0}
        )
    _weight_refusals(book, SAMPLED, "mix", shared=True)
    return book


REWARDS = array([[1, -2, 0, 0.5], [-1.5, 3, 0.25, 0]])


def minillm_advantages() -> Book:
    """REC-24, REC-25."""
    book = Book("minillm_advantages", ("advantages",), oracle.minillm_advantages, {"advantages": LOSS})
    good = {"rewards": REWARDS, "mask": ROWS}
    for whitening in ("biased", "unbiased", "none"):
        book.valid(whitening, "over all numbers, those of rows that do not count included", "REC-24 REC-25",
                   inputs={**good, "whitening": whitening, "discount": 0.75})  # fmt: skip
    book.valid("default", "a discount of .95, the variance over n", "REC-24 REC-25", inputs=good)
    for discount in (0, 1):
        book.valid(f"discount-{discount}", "an end of the discount", "REC-24",
                   inputs={**good, "discount": discount, "whitening": "none"})  # fmt: skip
    holes = mask([[0, 1, 0, 0], [0, 0, 0, 0]])
    book.valid("none-left", "where no row is left the divisor is 1", "REC-24",
               inputs={"rewards": array([[0, 2, 0, 0], [0, 0, 0, 0]]), "mask": holes})  # fmt: skip
    book.valid("equal", "no variance: 1e-8 keeps the divisor", "REC-25",
               inputs={"rewards": array([[0, 0], [0, 0]]), "mask": mask([[1, 1], [1, 1]])})  # fmt: skip
    single = {"rewards": array([[2]]), "mask": mask([[1]])}
    book.invalid("single-unbiased", "one number has no such variance", "REC-25", "argument-value",
                 inputs={**single, "whitening": "unbiased"})  # fmt: skip
    book.invalid("whitening", "no such whitening", "REC-25", "argument-value", inputs={**good, "whitening": "masked"})
    _weight_refusals(book, good, "discount", shared=True)
    return book


def minillm_policy() -> Book:
    """REC-26."""
    book = _book("minillm_policy", "policy", "reverse_kl")
    rollout = {
        "tokens": TOKENS,
        "mask": ROWS,
        "log_probs": array([[-1, -2.5, 0, -0.5], [-3, -0.25, -1.5, 0]]),
        "rewards": REWARDS,
        "weights": array([[1, 0.75, 1, 1.125], [0.5, 1.25, 1, 1]]),
    }
    good = {"student_logits": TEXT, "teacher_logits": TEACHER, "rollout": rollout}
    book.valid("default", "clipped on the pessimistic side", "REC-26", inputs=good)
    for whitening in ("unbiased", "none"):
        book.valid(whitening, "another whitening and discount", "REC-25 REC-26",
                   inputs={**good, "whitening": whitening, "discount": 0.5})  # fmt: skip
    book.valid("clip", "a wide clip, half of the reverse KL", "REC-26",
               inputs={**good, "clip": 0.75, "reverse_kl_weight": 0.5})  # fmt: skip
    book.valid("no-row-counts", "exactly 0", "REC-26",
               inputs={**good, "rollout": {**rollout, "mask": mask([[0] * 4] * 2)}},
               compare={"policy.value": EXACT, "reverse_kl.value": EXACT})  # fmt: skip
    for name in ("clip", "reverse_kl_weight"):
        _weight_refusals(book, good, name, shared=False)
    return book


def linear_betas() -> Book:
    """REC-27."""
    book = Book("linear_betas", ("betas",), oracle.linear_betas, {"betas": LOSS})
    book.valid("default", "a thousand, from 1e-4 to .02", "REC-27", inputs={}, at=40)
    book.valid("few", "the fewest", "REC-27", inputs={"steps": 21})
    for what, steps in (("too-few", 20), ("real", 50.5)):
        book.invalid(what, "an integer of at least 21", "REC-27", "argument-value", inputs={"steps": steps})
    return book


X0 = array([[[[-1, 0.5], [0.25, 1]]], [[[0.125, -0.75], [0, 0.5]]], [[[1, -1], [-0.5, 0.625]]]])
NOISE = numbers([3, 1, 2, 2], 5701, -8, 8, 2)
STEPS = array([0, 300, 992], "int64")
DRAWN = {"x0": X0, "noise": NOISE, "t": STEPS}
BETAS = array([0.125, 0.25, 0.5])


def _draw_refusals(book: Book, good: dict[str, Any]) -> None:
    book.invalid("step", "a step beyond the last", "REC-28", "argument-value",
                 inputs={**good, "t": array([0, 300, 1000], "int64")})  # fmt: skip
    book.invalid("step-negative", "a step before the first", "REC-28", "argument-value",
                 inputs={**good, "t": array([0, -1, 5], "int64")})  # fmt: skip
    book.invalid("step-real", "steps that are no integers", "REC-28", "argument-dtype",
                 inputs={**good, "t": array([0, 0.5, 5])})  # fmt: skip
    book.invalid("steps-short", "a step a sample", "REC-28", "argument-shape",
                 inputs={**good, "t": array([0, 3], "int64")})  # fmt: skip
    book.invalid("noise-shape", "noise of another shape", "REC-28", "argument-shape",
                 inputs={**good, "noise": numbers([3, 1, 2, 3], 5702, -8, 8, 2)})  # fmt: skip
    for what, betas in (("one", [0.5, 1]), ("zero", [0, 0.5]), ("single", [0.5])):
        book.invalid(f"betas-{what}", "two numbers at least, each between 0 and 1", "REC-27", "argument-value",
                     inputs={**good, "t": array([0, 0, 0], "int64"), "betas": array(betas)})  # fmt: skip


def noised() -> Book:
    """REC-28."""
    book = Book("noised", ("x_t",), oracle.noised, {"x_t": {"rule": "close", "quantity": "probs"}})
    book.valid("default", "linear betas", "REC-27 REC-28", inputs=DRAWN)
    book.valid("betas", "three steps", "REC-27 REC-28",
               inputs={**DRAWN, "t": array([0, 1, 2], "int64"), "betas": BETAS})  # fmt: skip
    _draw_refusals(book, DRAWN)
    return book


def diffusion() -> Book:
    """REC-29 to REC-33."""
    book = _book("diffusion", "mse", "bound", "kd")
    plain, ranged = numbers([3, 1, 2, 2], 5711, -8, 8, 3), numbers([3, 2, 2, 2], 5712, -8, 8, 3)
    teacher = numbers([3, 1, 2, 2], 5713, -8, 8, 3)
    without: Callable[..., Sequence[str]] = lambda *names: [f"{n}.{p}" for n in names for p in ("value", "weight")]  # noqa: E731
    book.valid("epsilon", "min-SNR-5", "REC-29 REC-30", inputs={"student_output": plain, **DRAWN},
               leave_out=without("bound", "kd"))  # fmt: skip
    book.valid("range", "the bound at the first, a middle and a late step", "REC-29 REC-31 REC-32",
               inputs={"student_output": ranged, **DRAWN}, leave_out=without("kd"))  # fmt: skip
    book.valid("teacher", "on the same draw", "REC-33", leave_out=without("bound"),
               inputs={"student_output": plain, **DRAWN, "teacher_output": teacher, "kd_weight": 0.5})  # fmt: skip
    both = {"student_output": ranged, **DRAWN, "teacher_output": numbers([3, 2, 2, 2], 5714, -8, 8, 3)}
    book.valid("teacher-range", "its range is not read", "REC-33", inputs={**both, "bound_weight": 0.25})
    for name, clip in (("plain", None), ("clip-one", 1)):
        book.valid(name, "another weight of steps", "REC-30", inputs={**both, "snr_clip": clip})
    few = {"t": array([0, 1, 2], "int64"), "betas": BETAS}
    book.valid("betas", "three steps", "REC-27 REC-31 REC-32", inputs={**both, **few})
    bins = array([[[[-1, -1], [1, 1]]]] * 3)
    book.valid("open-bins", "black and white at the first step", "REC-32",
               inputs={**both, "x0": bins, "t": array([0, 0, 0], "int64")})  # fmt: skip
    wrong = array(map_numbers(lambda x: 64 * x, ranged.value))
    book.valid("no-mass", "a bin with next to no mass counts as 1e-12", "REC-32",
               inputs={**both, "student_output": _with_range(wrong, ranged), "t": array([0, 0, 0], "int64")},
               dtypes=WIDE)  # fmt: skip
    _draw_refusals(book, {"student_output": plain, **DRAWN})
    for name in ("kd_weight", "bound_weight"):
        _weight_refusals(book, both, name, shared=False)
    book.invalid("channels", "three times the channels", "REC-29", "argument-shape",
                 inputs={"student_output": numbers([3, 3, 2, 2], 5715, -8, 8, 2), **DRAWN})  # fmt: skip
    book.invalid("teacher-channels", "a teacher of other pictures", "REC-29", "argument-shape",
                 inputs={**both, "teacher_output": numbers([3, 1, 2, 3], 5716, -8, 8, 2)})  # fmt: skip
    for what, clip in (("zero", 0), ("nan", special("nan"))):
        book.invalid(f"snr-clip-{what}", "above 0", "REC-30", "argument-value", inputs={**both, "snr_clip": clip})
    return book


def _with_range(epsilon: Given, span: Given) -> Given:
    """The first channel of one, the second of the other."""
    return array([[e[0], s[1]] for e, s in zip(epsilon.value, span.value, strict=True)])


BOOKS = (
    babyllama,
    cross_entropy,
    deit_hard,
    deit_soft,
    diffusion,
    gkd,
    image_kd,
    language_kd,
    linear_betas,
    minillm_advantages,
    minillm_policy,
    minillm_rollout,
    nkd,
    noised,
    vitkd,
    vkd,
    vkd_detection,
)
