"""Cases of chapter HID of ``specs/kd.md``."""

from __future__ import annotations

from typing import Any

import oracle_kd as oracle
from book import Arrays, Book, array, mask, numbers

from cases.kd.inputs import SOME, Case

LOSS = {"rule": "close", "quantity": "loss"}
EXACT = {"rule": "exact"}
GRADIENT = {"rule": "close", "quantity": "gradient", "exact_zeros": True}
ROUNDED = {"rule": "close", "quantity": "gradient"}

S = array([[[1, 2, -2], [0.5, 0, 0.25]], [[-1, 0.25, 3], [0, 4, 3]]])
T = array([[[2, 1, -1], [0.5, 1, 0]], [[1, 0.5, -2], [0, 3, 4]]])


def hidden_cases() -> list[Case]:
    """What the loss and its gradient share."""
    cases: list[Case] = []
    other = [array([[[1, -1]] * 2] * 2), array([[[0.5, 2]] * 2] * 2)]
    layers = {"student_hidden": oracle.Layers([S, other[0]]), "teacher_hidden": oracle.Layers([T, other[1]])}
    pooled = {
        "student_hidden": oracle.Layers([array([[3, 4], [1, 0]])]),
        "teacher_hidden": oracle.Layers([array([[4, 3], [0.5, 2]])]),
    }
    for distance in ("mse", "cosine", "normalized_mse"):
        slug, option = distance.replace("_", "-"), {"distance": distance}
        pair = {"student_hidden": S, "teacher_hidden": T, **option}
        cases += [
            (slug, "the mean over four rows", "HID-2 HID-3", pair),
            (f"{slug}-mask", "the mean over rows that count", "HID-2 HID-3", {**pair, "loss_mask": SOME}),
            (
                f"{slug}-layers",
                "the sum over layers of different widths",
                "HID-1 HID-4",
                {**option, **layers, "loss_mask": SOME},
            ),
            (f"{slug}-layers-mean", "the mean over layers", "HID-4", {**option, **layers, "reduction": "mean"}),
            (f"{slug}-pooled", "one leading axis, one layer in a list", "HID-1 HID-3", {**option, **pooled}),
            (
                f"{slug}-teacher-zero",
                "a zero vector of the teacher",
                "HID-3",
                {**option, "student_hidden": array([[[3, 4]]]), "teacher_hidden": array([[[0, 0]]])},
            ),
            (
                f"{slug}-student-zero",
                "a zero vector of the student",
                "HID-3 HID-6",
                {**option, "student_hidden": array([[[0, 0]]]), "teacher_hidden": array([[[3, 4]]])},
            ),
            (
                f"{slug}-many",
                "many features",
                "HID-3",
                {
                    **option,
                    "student_hidden": numbers([2, 3, 50], 3040, -16, 16, 3),
                    "teacher_hidden": numbers([2, 3, 50], 3041, -16, 16, 3),
                },
            ),
        ]
        if distance != "mse":
            tiny = {
                **option,
                "student_hidden": array([[[2**-20, 2**-19]]]),
                "teacher_hidden": array([[[2**-21, -(2**-20)]]]),
            }
            cases.append((f"{slug}-tiny", "squares that leave the range of float16", "HID-9", tiny))
    return cases


def _hidden_book(book: Book, zero: dict[str, Any], extra: str = "") -> Book:
    loose = {"cosine-pooled", "normalized-mse-pooled", "normalized-mse-teacher-zero"} if extra else set()
    for name, comment, spec, inputs in hidden_cases():
        if extra and name.endswith("-tiny"):
            continue  # its gradient is larger than float16 holds
        book.valid(
            name,
            comment,
            " ".join(dict.fromkeys(f"{spec} {extra}".split())),
            inputs=inputs,
            compare=dict.fromkeys(book.rules, ROUNDED) if name in loose else None,
        )
    nothing = {"loss_mask": mask([[0, 0], [0, 0]])}
    for distance in ("mse", "cosine", "normalized_mse"):
        book.valid(
            f"no-row-counts-{distance.replace('_', '-')}",
            "exactly 0",
            "HID-5",
            compare=zero,
            inputs={"student_hidden": S, "teacher_hidden": T, "distance": distance, **nothing},
        )
    good = {"student_hidden": S, "teacher_hidden": T}
    for name, comment, spec, code, changes in (
        ("bad-distance", "another distance", "HID-3", "argument-value", {"distance": "l1"}),
        ("bad-reduction", "another reduction", "HID-4", "argument-value", {"reduction": "batch_mean"}),
        (
            "widths-differ",
            "a projection is the caller's",
            "HID-1",
            "argument-shape",
            {"teacher_hidden": numbers([2, 2, 4], 3042, -8, 8, 2)},
        ),
        (
            "lists-differ",
            "two layers against one",
            "HID-1",
            "argument-shape",
            {"student_hidden": [S, S], "teacher_hidden": [T]},
        ),
        ("list-and-array", "a list against an array", "HID-1", "argument-shape", {"student_hidden": [S]}),
        (
            "one-axis",
            "no rows",
            "HID-1",
            "argument-shape",
            {"student_hidden": array([1, 2]), "teacher_hidden": array([1, 2])},
        ),
        (
            "student-nan",
            "NaN in a row that does not count",
            "HID-1",
            "not-finite",
            {
                "student_hidden": array([[["nan", 0, 0], [1, 1, 1]], [[0, 0, 1], [1, 0, 0]]]),
                "loss_mask": mask([[0, 1], [1, 1]]),
            },
        ),
        (
            "teacher-inf",
            "infinite",
            "HID-1",
            "not-finite",
            {"teacher_hidden": array([[["inf", 0, 0], [1, 1, 1]], [[0, 0, 1], [1, 0, 0]]])},
        ),
        (
            "mask-of-another-shape",
            "for three rows",
            "MAP-7 HID-2",
            "argument-shape",
            {"loss_mask": mask([[1, 0, 1], [1, 1, 1]])},
        ),
        (
            "mask-of-integers",
            "integers",
            "MAP-7 HID-2",
            "argument-dtype",
            {"loss_mask": array([[1, 0], [1, 1]], "int64")},
        ),
        (
            "complex",
            "complex numbers",
            "HID-1",
            "argument-dtype",
            {"student_hidden": array([[[1, 0]]], "complex128"), "teacher_hidden": array([[[1, 0]]])},
        ),
    ):
        book.invalid(name, comment, spec, code, inputs={**good, **changes})
    return book


def hidden_loss() -> Book:
    """HID-1 to HID-5, HID-9."""
    return _hidden_book(
        Book("hidden_loss", ("loss",), lambda **given: {"loss": oracle.hidden_loss(**given)}, {"loss": LOSS}),
        {"loss": EXACT},
    )


def hidden_loss_gradient() -> Book:
    """HID-6, HID-8."""

    def answer(**given: Any) -> dict[str, Any]:
        gradients = oracle.hidden_loss_gradient(**given)
        return {"dstudent": Arrays(gradients) if isinstance(given["student_hidden"], oracle.Layers) else gradients[0]}

    book = Book("hidden_loss_gradient", ("dstudent",), answer, {"dstudent": GRADIENT})
    return _hidden_book(book, {"dstudent": EXACT}, "HID-6 HID-8")


BOOKS = (hidden_loss, hidden_loss_gradient)
