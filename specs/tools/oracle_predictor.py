"""The oracle of chapter PRED of ``specs/shrink.md``: least squares and enumeration in exact fractions."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from math import gcd
from typing import Any

from exact import Nested, dot, multiply, over_common_denominator, solve_linear, square_root, transpose

DEGREES = (1, 2, 3, 4)


def monomials(a: Fraction, t: Fraction, degree: int) -> list[Fraction]:
    """PRED-1."""
    return [a ** (total - p) * t**p for total in range(degree + 1) for p in range(total + 1)]


def shortest_fit(design: Nested, quality: Sequence[Fraction]) -> list[Fraction]:
    """The least-squares coefficients, of several those of least norm: in the span of the rows, taken as integers."""
    whole, below = over_common_denominator(design)
    rows: list[list[int]] = []
    for row in whole:
        left = list(row)
        for other in rows:  # orthogonal to each other, of any length
            along, across = dot(left, other), dot(other, other)
            left = [across * x - along * y for x, y in zip(left, other, strict=True)]
        if any(left):
            common = gcd(*left)
            rows.append([x // common for x in left])
    inside = [[dot(row, other) for other in rows] for row in whole]
    weights = solve_linear(
        multiply(transpose(inside), inside), [below * dot(column, quality) for column in zip(*inside, strict=True)]
    )
    assert weights is not None
    return [dot(weights, column) for column in zip(*rows, strict=True)]


def fit_predictor(points: Nested, degree: int, meaning: str = "retained") -> dict[str, Any]:
    """PRED-1 to PRED-3."""
    design = [monomials(a, t, degree) for a, t, _ in points]
    system = multiply(transpose(design), design)
    right = [dot(column, [row[2] for row in points]) for column in zip(*design, strict=True)]
    found = solve_linear(system, right)
    assert found is not None, "points that leave a coefficient open"
    return {"degree": degree, "coefficients": found, "meaning": meaning}


def squared_error(points: Nested, degree: int) -> Fraction:
    """The mean squared error of PRED-4."""
    design = [monomials(a, t, degree) for a, t, _ in points]
    total, pairs = Fraction(0), list(combinations(range(len(points)), 2))
    for pair in pairs:
        left = [i for i in range(len(points)) if i not in pair]
        found = shortest_fit([design[i] for i in left], [points[i][2] for i in left])
        total += sum(((dot(found, design[i]) - points[i][2]) ** 2 for i in pair), Fraction(0))
    return total / (2 * len(pairs))


def cross_validate(points: Nested, degree: int) -> Decimal:
    """PRED-4."""
    return square_root(squared_error(points, degree))


def choose_degree(points: Nested, degrees: Sequence[int] = DEGREES) -> int:
    """PRED-4."""
    errors = [(squared_error(points, degree), degree) for degree in degrees]
    return min(errors)[1]


def value_of(predictor: dict[str, Any], a: Fraction, t: Fraction) -> Fraction:
    """PRED-1, PRED-2, at retained ratios."""
    if predictor.get("meaning") == "pruned":
        a, t = 1 - a, 1 - t
    value: Fraction = dot(predictor["coefficients"], monomials(a, t, predictor["degree"]))
    return value


def best_split(predictor: dict[str, Any], num_layers: int, budget: int, meaning: str = "retained") -> dict[str, Any]:
    """PRED-5."""
    kept = budget if meaning == "retained" else 2 * num_layers - budget
    splits = [(a, kept - a) for a in range(num_layers + 1) if 0 <= kept - a <= num_layers]
    ranked = [(value_of(predictor, Fraction(a, num_layers), Fraction(t, num_layers)), a, t) for a, t in splits]
    quality, attention, activation = max(ranked)
    return {"attention": attention, "activation": activation, "quality": quality}


def change_meaning(predictor: dict[str, Any]) -> dict[str, Any]:
    """PRED-6, by a fit through the lattice of the degree."""
    degree = predictor["degree"]
    places = [(Fraction(i, degree), Fraction(j, degree)) for i in range(degree + 1) for j in range(degree + 1 - i)]
    flipped = {**predictor, "meaning": "retained"}
    points = [[a, t, value_of(flipped, 1 - a, 1 - t)] for a, t in places]
    other = "retained" if predictor.get("meaning") == "pruned" else "pruned"
    return fit_predictor(points, degree, other)


def study_noise(
    points: Nested,
    num_layers: int,
    budget: int,
    *,
    noise: Nested,
    degree: int = 2,
    meaning: str = "retained",
    limit: Fraction = Fraction(1, 2),
) -> dict[str, Any]:
    """PRED-7 with the noise that is given."""

    def split(rows: Nested) -> tuple[int, int]:
        found = best_split(fit_predictor(rows, degree), num_layers, budget, meaning)
        return found["attention"], found["activation"]

    first = split(points)
    found = []
    for row in noise:
        added = [min(max(x, -limit), limit) for x in row]
        found.append(split([[a, t, y + x] for (a, t, y), x in zip(points, added, strict=True)]))
    count = Fraction(len(found))
    distances = [abs(a - first[0]) for a, _ in found]
    means = [sum((Fraction(x) for x in column), Fraction(0)) / count for column in zip(*found, strict=True)]
    spreads = [
        square_root(sum(((x - mean) ** 2 for x in column), Fraction(0)) / count)
        for mean, column in zip(means, zip(*found, strict=True), strict=True)
    ]
    return {
        "same": sum(d == 0 for d in distances) / count,
        "one_layer": sum(d == 1 for d in distances) / count,
        "more": sum(d > 1 for d in distances) / count,
        "mean": [mean / num_layers for mean in means],
        "std": [spread / num_layers for spread in spreads],
    }
