"""Cases of chapter PRED of ``specs/shrink.md``; fits are made in float64 by implementations of every dtype."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import oracle_predictor as oracle
from book import Book, array, numbers, special
from exact import Nested

FIT = {"rule": "close", "quantity": "fit"}
EXACT = {"rule": "exact"}
PREDICTOR = {"degree": EXACT, "coefficients": FIT, "meaning": EXACT}
OUTPUTS = ("degree", "coefficients", "meaning")
ALONE = ("float64",)


def points(count: int, seed: int, degree: int = 0) -> Nested:
    """Different places of a grid of eighths; qualities drawn, or a polynomial of the degree with a little noise."""
    drawn = numbers([count, 3], seed, -16, 16, 3).value
    rows = []
    for i, (x, y, z) in enumerate(drawn):
        place = i * 29 % 81
        a, t = Fraction(place // 9, 8), Fraction(place % 9, 8)
        if degree:
            shape = oracle.monomials(a, t, degree)
            z = z / 64 + sum((Fraction(k % 5 + 1, 2) * m * (-1) ** k for k, m in enumerate(shape)), Fraction(0))
        rows.append([a, t, z + 0 * (x + y)])
    return rows


def fit_predictor() -> Book:
    """PRED-1 to PRED-3."""
    book = Book("fit_predictor", OUTPUTS, oracle.fit_predictor, PREDICTOR)
    for degree in oracle.DEGREES:
        count = (degree + 1) * (degree + 2) // 2
        book.valid(
            f"degree-{degree}",
            "more points than coefficients",
            "PRED-1 PRED-3",
            "monomials-in-another-order",
            inputs={"points": array(points(count + 6, 5700 + degree)), "degree": degree},
            dtypes=ALONE,
        )
    book.valid(
        "pruned",
        "ratios of what is pruned",
        "PRED-2 PRED-3",
        inputs={"points": array(points(9, 5705)), "degree": 2, "meaning": "pruned"},
        dtypes=ALONE,
    )
    book.valid(
        "exactly-enough",
        "a polynomial through every point",
        "PRED-3",
        inputs={"points": array(points(6, 5706)), "degree": 2},
        dtypes=ALONE,
    )
    good: dict[str, Any] = {"points": array(points(9, 5707)), "degree": 2}
    line = [[Fraction(i, 8), Fraction(i, 8), Fraction(1)] for i in range(9)]
    for name, comment, spec, code, changes in (
        ("few", "fewer points than coefficients", "PRED-3", "argument-shape", {"points": array(points(5, 5708))}),
        ("on-a-line", "points on one line", "PRED-3", "argument-shape", {"points": array(line)}),
        ("ratio", "a ratio above 1", "PRED-3", "argument-value", {"points": array([[1.5, 0, 1]] * 9)}),
        ("ratio-negative", "a ratio below 0", "PRED-3", "argument-value", {"points": array([[0.5, -0.5, 1]] * 9)}),
        ("columns", "points without a quality", "PRED-3", "argument-shape", {"points": array([[0.5, 0.5]] * 9)}),
        ("nan", "a quality that is no number", "PRED-3", "not-finite", {"points": array([[0.5, 0.5, "nan"]] * 9)}),
        ("degree-zero", "degree 0", "PRED-1", "argument-value", {"degree": 0}),
        ("degree-five", "degree 5", "PRED-1", "argument-value", {"degree": 5}),
        ("degree-truth", "a degree that is no number", "PRED-1", "argument-value", {"degree": True}),
        ("meaning", "another meaning", "PRED-2", "argument-value", {"meaning": "kept"}),
    ):
        book.invalid(name, comment, spec, code, inputs={**good, **changes}, dtypes=ALONE)
    return book  # fmt: skip


def cross_validate() -> Book:
    """PRED-4."""
    book = Book(
        "cross_validate", ("error",), lambda **given: {"error": oracle.cross_validate(**given)}, {"error": FIT}
    )
    for degree in (1, 2, 3):
        book.valid(
            f"degree-{degree}",
            "every pair of points is left out once",
            "PRED-4",
            "one-left-out",
            inputs={"points": array(points(9, 5711)), "degree": degree},
            dtypes=ALONE,
        )
    book.valid(
        "enough",
        "the points that remain determine the fit",
        "PRED-4",
        "one-left-out",
        inputs={"points": array(points(13, 5712, 2)), "degree": 3},
        dtypes=ALONE,
    )
    return book  # fmt: skip


def choose_degree() -> Book:
    """PRED-4."""
    book = Book(
        "choose_degree", ("degree",), lambda **given: {"degree": oracle.choose_degree(**given)}, {"degree": EXACT}
    )
    for degree in (1, 2, 3):
        book.valid(
            f"of-{degree}",
            "a polynomial with a little noise",
            "PRED-4",
            "degree-by-fit",
            inputs={"points": array(points(17, 5720 + degree, degree))},
            dtypes=ALONE,
        )
    tie = [[Fraction(i % 3, 2), Fraction(i // 3, 2), Fraction(0)] for i in range(9)]
    book.valid("tie", "all degrees fit as well: the smallest", "PRED-4", inputs={"points": array(tie)}, dtypes=ALONE)
    book.valid(
        "of-some",
        "the degrees that are asked for",
        "PRED-4",
        inputs={"points": array(points(17, 5723, 3)), "degrees": [1, 2]},
        dtypes=ALONE,
    )
    book.invalid(
        "of-none",
        "no degree",
        "PRED-4",
        "argument-value",
        inputs={"points": array(points(9, 5721)), "degrees": []},
        dtypes=ALONE,
    )
    return book  # fmt: skip


def _predictor(degree: int, seed: int, meaning: str = "retained") -> dict[str, Any]:
    count = (degree + 1) * (degree + 2) // 2
    return {"degree": degree, "coefficients": numbers([count], seed, -16, 16, 2), "meaning": meaning}


def best_split() -> Book:
    """PRED-5."""
    rules = {"attention": EXACT, "activation": EXACT, "quality": FIT}
    book = Book("best_split", ("attention", "activation", "quality"), oracle.best_split, rules)
    for degree, seed in ((1, 5731), (2, 5732), (3, 5733), (4, 5734)):
        for ratios in ("retained", "pruned"):
            for meaning in ("retained", "pruned"):
                book.valid(
                    f"degree-{degree}-{ratios}-{meaning}",
                    "ratios and budget of either meaning",
                    "PRED-2 PRED-5",
                    "budget-meaning-exchanged",
                    inputs={
                        "predictor": _predictor(degree, seed, ratios),
                        "num_layers": 8,
                        "budget": 5,
                        "meaning": meaning,
                    },
                    dtypes=ALONE,
                )
    flat = {"degree": 1, "coefficients": array([7, 0, 0])}
    for budget in (0, 3, 6, 8):
        book.valid(
            f"flat-{budget}",
            "of equal predictions the one with more attention blocks",
            "PRED-5",
            "split-off-the-line",
            inputs={"predictor": flat, "num_layers": 4, "budget": budget},
            dtypes=ALONE,
        )
    good = {"predictor": flat, "num_layers": 4, "budget": 3}
    for name, comment, changes in (
        ("budget", "more than all", {"budget": 9}),
        ("budget-negative", "fewer than none", {"budget": -1}),
        ("budget-half", "no whole number", {"budget": 2.5}),
        ("layers", "no layer", {"num_layers": 0, "budget": 0}),
        ("meaning", "another meaning", {"meaning": "kept"}),
    ):
        book.invalid(name, comment, "PRED-5", "argument-value", inputs={**good, **changes}, dtypes=ALONE)
    for name, comment, spec, code, record in (
        (
            "coefficients",
            "too few coefficients",
            "PRED-1",
            "argument-shape",
            {"degree": 2, "coefficients": array([1, 2, 3])},
        ),
        ("ratios", "ratios of another meaning", "PRED-2", "argument-value", {**flat, "meaning": "kept"}),
        (
            "infinite",
            "an infinite coefficient",
            "PRED-1",
            "not-finite",
            {"degree": 1, "coefficients": array(["inf", 0, 0])},
        ),
    ):
        book.invalid(name, comment, spec, code, inputs={**good, "predictor": record}, dtypes=ALONE)
    return book  # fmt: skip


def change_meaning() -> Book:
    """PRED-6."""
    book = Book("change_meaning", OUTPUTS, oracle.change_meaning, PREDICTOR)
    for degree in oracle.DEGREES:
        meaning = "retained" if degree % 2 else "pruned"
        book.valid(
            f"degree-{degree}",
            "each ratio r becomes 1 - r",
            "PRED-6",
            "budget-meaning-exchanged",
            inputs={"predictor": _predictor(degree, 5740 + degree, meaning)},
            dtypes=ALONE,
        )
    return book  # fmt: skip


def study_noise() -> Book:
    """PRED-7."""
    rules = {"same": FIT, "one_layer": FIT, "more": FIT, "mean": FIT, "std": FIT}
    book = Book("study_noise", tuple(rules), oracle.study_noise, rules)
    rows = points(9, 5751, 2)
    for name, comment, spec, more in (
        ("plain", "noise as it is given", "PRED-7", {"noise": numbers([16, 9], 5752, -8, 8, 4)}),
        ("clipped", "noise beyond the limit", "PRED-7", {"noise": numbers([16, 9], 5753, -64, 64, 4)}),
        ("limit", "another limit", "PRED-7", {"noise": numbers([16, 9], 5753, -64, 64, 4), "limit": 4}),
        (
            "pruned",
            "a budget of what is pruned",
            "PRED-5 PRED-7",
            {"noise": numbers([16, 9], 5754, -16, 16, 4), "meaning": "pruned"},
        ),
        (
            "line",
            "fits of degree 1",
            "PRED-7",
            {"noise": numbers([16, 9], 5755, -32, 32, 4), "degree": 1, "limit": 2},
        ),
    ):
        book.valid(
            name,
            comment,
            spec,
            "noise-not-clipped",
            inputs={"points": array(rows), "num_layers": 8, "budget": 7, **more},
            dtypes=ALONE,
        )
    good = {"points": array(rows), "num_layers": 8, "budget": 7, "noise": numbers([2, 9], 5752, -8, 8, 4)}
    for name, comment, code, changes in (
        ("noise-shape", "noise of fewer points", "argument-shape", {"noise": numbers([2, 8], 1, 0, 4, 1)}),
        ("limit-negative", "a limit below 0", "argument-value", {"limit": -1}),
        ("limit-nan", "a limit that is no number", "argument-value", {"limit": special("nan")}),
    ):
        book.invalid(name, comment, "PRED-7", code, inputs={**good, **changes}, dtypes=ALONE)
    return book  # fmt: skip


BOOKS = (fit_predictor, cross_validate, choose_degree, best_split, change_meaning, study_noise)
