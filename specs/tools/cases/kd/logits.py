"""Cases of chapter KD of ``specs/kd.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle_kd as oracle
from book import Book, array, mask, numbers, special
from exact import flatten, unflatten

from cases.kd.inputs import (
    DIVERGENCES,
    DRAWN,
    SOME,
    STUDENT,
    STUDENT_REFUSALS,
    TEACHER,
    UNIFORMS,
    refusals,
    shared_cases,
    topk,
)

LOSS = {"rule": "close", "quantity": "loss"}
EXACT = {"rule": "exact"}
GRADIENT = {"rule": "close", "quantity": "gradient", "exact_zeros": True}
ROUNDED = {"rule": "close", "quantity": "gradient"}
PROBS = {"rule": "close", "quantity": "probs"}
LOGS = {"rule": "close", "quantity": "loss"}
BOUND = {"temperature": EXACT, "vocab_size": EXACT}


def add_shared(book: Book, name_inputs: Callable[[dict[str, Any]], dict[str, Any]], extra: str = "") -> None:
    """The shared cases, and the refusals of every loss on logits."""
    gradient = "gradient" in book.operation
    for name, comment, spec, inputs in shared_cases():
        loose = gradient and name in (
            "equal",
            "tiny-student",
            "tiny-teacher",
            "tiny-tail",
            "huge-logits",
            "padded-uncounted",
        )
        book.valid(
            name,
            comment,
            " ".join(dict.fromkeys(f"{extra} {spec}".split())),
            inputs=name_inputs(inputs),
            compare=dict.fromkeys(book.rules, ROUNDED) if loose else None,
        )
    for reduction in ("mean", "sum", "batch_mean"):
        for kind, targets in (("", TEACHER), ("-topk", topk(TEACHER, 2)), ("-sampled", DRAWN)):
            inputs = {
                "targets": targets,
                "student_logits": STUDENT,
                "loss_mask": mask([[0, 0], [0, 0]]),
                "reduction": reduction,
            }
            book.valid(
                f"no-row-counts-{reduction.replace('_', '-')}{kind}",
                "exactly 0",
                "KD-4",
                compare=dict.fromkeys(book.rules, EXACT),
                inputs=name_inputs(inputs),
            )
    good = {"targets": TEACHER, "student_logits": STUDENT}
    for name, comment, spec, code, changes in refusals():
        book.invalid(name, comment, spec, code, inputs=name_inputs({**good, **changes}))


def _plain(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs


def _bad_student(book: Book) -> None:
    for name, comment, spec, code, options, number in STUDENT_REFUSALS:
        bad = [number, *map(float, list(flatten(STUDENT.value))[1:])]
        inputs = {"targets": TEACHER, "student_logits": array(unflatten(bad, [2, 2, 5])), **options}
        book.invalid(name, comment, spec, code, inputs=inputs)
    book.invalid(
        "one-axis",
        "logits without rows",
        "KD-1",
        "argument-shape",
        inputs={"targets": array([1, 0]), "student_logits": array([0, 1])},
    )
    complex_numbers = array([[[1, 0]]], "complex128")
    book.invalid(
        "complex",
        "complex logits",
        "KD-1",
        "argument-dtype",
        inputs={"targets": array([[[1, 0]]]), "student_logits": complex_numbers},
    )


def kd_loss() -> Book:
    """KD-1 to KD-21."""
    book = Book("kd_loss", ("loss",), lambda **given: {"loss": oracle.kd_loss(**given)}, {"loss": LOSS})
    add_shared(book, _plain)
    _bad_student(book)
    return book


def kd_loss_gradient() -> Book:
    """KD-22, KD-23."""
    book = Book(
        "kd_loss_gradient", ("dz",), lambda **given: {"dz": oracle.kd_loss_gradient(**given)}, {"dz": GRADIENT}
    )
    add_shared(book, _plain, "KD-22 KD-23")
    _bad_student(book)
    return book


HIDDEN = array([[[1, -0.5], [0.25, 2]], [[-1, 1], [0.5, 0.5]]])
WEIGHT = array([[1, 0], [0.5, -1], [-0.25, 2], [0, 1], [1.5, 0.75]])
BIAS = array([0.5, -1, 0, 2, 0.25])


def _linear_cases(book: Book) -> None:
    head = {"hidden": HIDDEN, "weight": WEIGHT}
    kinds = {"": TEACHER, "-topk": topk(TEACHER, 2, 2), "-sampled": DRAWN}
    for kind, targets in kinds.items():
        book.valid(
            f"head{kind}",
            "logits of a head without a bias",
            "KD-25",
            inputs={"targets": targets, **head},
            leave_out=("dbias",),
        )
        for divergence in DIVERGENCES if kind != "-sampled" else ("kl", "cross_entropy"):
            book.valid(
                f"bias{kind}-{divergence.replace('_', '-')}",
                "a head with a bias, rows that count",
                "KD-25 KD-17",
                inputs={"targets": targets, **head, "bias": BIAS, "divergence": divergence, "loss_mask": SOME},
            )
    flat = {
        "targets": numbers([3, 5], 3020, -8, 8, 2),
        "hidden": numbers([3, 2], 3021, -8, 8, 2),
        "weight": WEIGHT,
        "bias": BIAS,
    }
    book.valid("classifier", "one leading axis, a sum", "KD-25 KD-3", inputs={**flat, "reduction": "sum"})
    padded = array([[[3, 1, 0, -20, -32]], [[0, 2, -2, -20, -24]]])
    book.valid(
        "padded",
        "rows of the head that are padding",
        "KD-25 KD-7",
        inputs={
            "targets": padded,
            "hidden": array([[[1, 2]], [[0.5, -1]]]),
            "weight": WEIGHT,
            "bias": BIAS,
            "vocab_size": 3,
        },
    )
    book.valid(
        "no-row-counts",
        "exactly 0",
        "KD-25 KD-4",
        compare=dict.fromkeys(book.rules, EXACT),
        inputs={"targets": TEACHER, **head, "bias": BIAS, "loss_mask": mask([[0, 0], [0, 0]])},
    )
    good = {"targets": TEACHER, **head, "bias": BIAS}
    for name, comment, code, changes in (
        ("widths-differ", "hidden of 2, a head of 3", "argument-shape", {"weight": numbers([5, 3], 3022, -8, 8, 2)}),
        ("bias-of-another-size", "four numbers for five classes", "argument-shape", {"bias": array([1, 0, 1, 0])}),
        ("weight-of-three-axes", "no matrix", "argument-shape", {"weight": numbers([1, 5, 2], 3023, -8, 8, 2)}),
        ("hidden-of-one-axis", "no rows", "argument-shape", {"hidden": array([1, 0])}),
        ("hidden-nan", "NaN", "not-finite", {"hidden": array([[["nan", 0], [0, 1]], [[1, 1], [0, 2]]])}),
        ("weight-inf", "infinite", "not-finite", {"weight": array([["inf", 0], [0, 1], [1, 1], [0, 2], [1, 2]])}),
        ("bias-nan", "NaN", "not-finite", {"bias": array([0, 0, "nan", 0, 0])}),
    ):
        book.invalid(name, comment, "KD-25", code, inputs={**good, **changes})
    book.invalid(
        "bad-divergence", "another divergence", "KD-17", "argument-value", inputs={**good, "divergence": "mse"}
    )
    book.invalid(
        "temperature-of-another",
        "targets at 2, loss at 1",
        "KD-6",
        "argument-value",
        inputs={**good, "targets": topk(TEACHER, 2, 2), "temperature": 1},
    )


def linear_kd_loss() -> Book:
    """KD-25."""
    book = Book("linear_kd_loss", ("loss",), lambda **given: {"loss": oracle.linear_kd_loss(**given)}, {"loss": LOSS})
    _linear_cases(book)
    return book


def linear_kd_loss_gradient() -> Book:
    """KD-25."""
    names = ("dhidden", "dweight", "dbias")
    book = Book("linear_kd_loss_gradient", names, oracle.linear_kd_loss_gradient, dict.fromkeys(names, ROUNDED))
    _linear_cases(book)
    return book


def kd_targets_topk() -> Book:
    """KD-8, KD-9."""
    rules = {"ids": EXACT, "log_probs": LOGS, "log_tail": LOGS, **BOUND}
    book = Book("kd_targets_topk", tuple(rules), oracle.kd_targets_topk, rules)
    for k in (1, 3, 5):
        book.valid(
            f"k-{k}",
            f"the {k} largest of five, ids ascending",
            "KD-8 KD-9",
            inputs={"teacher_logits": TEACHER, "k": k},
        )
    book.valid("temperature", "at T = 2", "KD-5 KD-8", inputs={"teacher_logits": TEACHER, "k": 2, "temperature": 2})
    distinct = array([[[((7 * j) % 61) / 8 - 3 for j in range(61)]], [[((11 * j) % 61) / 8 - 3 for j in range(61)]]])
    book.valid(
        "many", "sixty-one classes", "KD-8 KD-9", inputs={"teacher_logits": distinct, "k": 12, "temperature": 0.5}
    )
    padded = array([[[3, 1, 0, -20, -32]], [[0, 2, -2, -20, -24]]])
    book.valid("padded", "padding is cut", "KD-7 KD-8", inputs={"teacher_logits": padded, "k": 2, "vocab_size": 3})
    book.valid(
        "tiny-tail",
        "a tail of exp(-200) has a logarithm",
        "KD-9",
        inputs={"teacher_logits": array([[0, -200, -201]]), "k": 1},
    )
    book.valid(
        "nearly-all-tail",
        "a head of one in a thousand",
        "KD-9",
        inputs={"teacher_logits": array([[0.125, *[0] * 999]]), "k": 1},
    )
    good = {"teacher_logits": TEACHER, "k": 2}
    for name, comment, spec, code, changes in (
        ("k-zero", "no class", "KD-8", "argument-value", {"k": 0}),
        ("k-too-large", "more classes than there are", "KD-8", "argument-value", {"k": 6}),
        ("k-boolean", "True is no number", "KD-8 ERR-6", "argument-value", {"k": True}),
        ("temperature-zero", "T = 0", "KD-5", "argument-value", {"temperature": 0}),
        ("nan", "NaN", "KD-1", "not-finite", {"teacher_logits": array([[0, "nan"]]), "k": 1}),
        ("minus-inf", "-inf", "KD-1", "not-finite", {"teacher_logits": array([[0, "-inf"]]), "k": 1}),
        ("one-axis", "no rows", "KD-1", "argument-shape", {"teacher_logits": array([0, 1]), "k": 1}),
        ("no-class", "rows of nothing", "KD-1", "argument-shape", {"teacher_logits": array([[], []]), "k": 1}),
        ("cut-with-mass", "the class cut is the largest", "KD-7", "argument-value", {"vocab_size": 4}),
        ("vocab-size-too-large", "more than there are", "KD-7", "argument-shape", {"vocab_size": 6}),
        (
            "k-beyond-the-cut",
            "three classes left, k = 4",
            "KD-8 KD-7",
            "argument-value",
            {"teacher_logits": padded, "k": 4, "vocab_size": 3},
        ),
    ):
        book.invalid(name, comment, spec, code, inputs={**good, **changes})
    return book


def kd_targets_sampled() -> Book:
    """KD-12, KD-13."""
    rules = {"ids": EXACT, "weights": PROBS, "entropy": LOGS, **BOUND}
    book = Book("kd_targets_sampled", tuple(rules), oracle.kd_targets_sampled, rules)
    good = {"teacher_logits": TEACHER, "uniforms": UNIFORMS}
    for keep in (0, 1, 4):
        book.valid(f"keep-{keep}", "kept classes first, then the draws", "KD-12 KD-13", inputs={**good, "keep": keep})
    for power in (0, 0.5, 2):
        book.valid(
            f"power-{power}", "drawn in proportion to P^power", "KD-12", inputs={**good, "power": power, "keep": 2}
        )
    book.valid("temperature", "at T = 2", "KD-5 KD-12", inputs={**good, "temperature": 2, "keep": 2})
    padded = array([[[3, 1, 0, -20, -32]], [[0, 2, -2, -20, -24]]])
    points = array([[[0.25, 0.75]], [[0.5, 0.0625]]])
    book.valid(
        "padded",
        "padding is cut",
        "KD-7 KD-12",
        inputs={"teacher_logits": padded, "uniforms": points, "vocab_size": 3},
    )
    book.valid(
        "small-rest",
        "the others have exp(-100) of the mass, and are drawn as ever",
        "KD-12",
        inputs={
            "teacher_logits": array([[0, -100, -101, -102]]),
            "uniforms": array([[0.25, 0.75, 0.96875]]),
            "keep": 1,
        },
        dtypes=["float64", "float32"],
    )
    for name, comment, spec, code, changes in (
        ("keep-negative", "below 0", "KD-13", "argument-value", {"keep": -1}),
        ("keep-all", "nothing left to draw", "KD-13", "argument-value", {"keep": 5}),
        ("power-negative", "below 0", "KD-13", "argument-value", {"power": -0.5}),
        ("power-inf", "infinite", "KD-13", "argument-value", {"power": special("inf")}),
        (
            "uniforms-one",
            "1 is not below 1",
            "KD-13",
            "argument-value",
            {
                "uniforms": array(
                    [
                        [[1], [0]],
                        [
                            [
                                0,
                            ],
                            [0.5],
                        ],
                    ]
                )
            },
        ),
        (
            "uniforms-negative",
            "below 0",
            "KD-13",
            "argument-value",
            {"uniforms": array([[[-0.5], [0]], [[0], [0.5]]])},
        ),
        (
            "uniforms-nan",
            "NaN",
            "MAP-5 KD-13",
            "not-finite argument-value",
            {"uniforms": array([[["nan"], [0]], [[0], [0.5]]])},
        ),
        (
            "uniforms-of-other-rows",
            "for one sample",
            "KD-13",
            "argument-shape",
            {"uniforms": array([[[0.5], [0.25]]])},
        ),
        ("nan", "NaN", "KD-1", "not-finite", {"teacher_logits": array([[0, "nan"]]), "uniforms": array([[0.5]])}),
        ("temperature-negative", "T = -1", "KD-5", "argument-value", {"temperature": -1}),
        ("cut-with-mass", "the class cut is the largest", "KD-7", "argument-value", {"vocab_size": 4}),
    ):
        book.invalid(name, comment, spec, code, inputs={**good, **changes})
    return book


def mean_logits() -> Book:
    """KD-15."""
    book = Book("mean_logits", ("logits",), lambda **given: {"logits": oracle.mean_logits(**given)}, {"logits": LOGS})
    two = [TEACHER, STUDENT]
    for of in ("logits", "probs"):
        book.valid(f"{of}-two", "two teachers", "KD-15", inputs={"logits": two, "of": of})
        book.valid(
            f"{of}-three-weighted",
            "weights by their sum",
            "KD-15",
            inputs={"logits": [*two, array([[[0] * 5] * 2] * 2)], "of": of, "weights": [1, 2, 5]},
        )
        book.valid(
            f"{of}-temperature",
            "T matters to probabilities alone",
            "KD-15",
            inputs={"logits": two, "of": of, "temperature": 2},
        )
    book.valid(
        "probs-far-apart",
        "probabilities of exp(-300)",
        "KD-15",
        inputs={"logits": [array([[0, -300, -600]]), array([[0, -320, -500]])], "of": "probs"},
    )
    refused: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("bad-of", "another mean", "argument-value", {"of": "log_probs"}),
        ("no-teacher", "nothing to average", "argument-value", {"logits": []}),
        ("weights-too-few", "one weight for two", "argument-value", {"weights": [1]}),
        ("weight-zero", "a weight of 0", "argument-value", {"weights": [1, 0]}),
        ("weight-boolean", "True is no number", "argument-value", {"weights": [1, True]}),
        (
            "shapes-differ",
            "another vocabulary",
            "argument-shape",
            {"logits": [TEACHER, numbers([2, 2, 6], 3030, -8, 8, 2)]},
        ),
    )
    for name, comment, code, changes in refused:
        book.invalid(name, comment, "KD-15", code, inputs={"logits": two, **changes})
    book.invalid("nan", "NaN", "KD-1", "not-finite", inputs={"logits": [array([[0, "nan"]]), array([[0, 1]])]})
    return book


BOOKS = (
    kd_loss,
    kd_loss_gradient,
    kd_targets_sampled,
    kd_targets_topk,
    linear_kd_loss,
    linear_kd_loss_gradient,
    mean_logits,
)
