"""MAP, the accuracy predictor of depth pruning: a polynomial of two ratios, and its best split.

The coefficients published for DeiT-B are not the least-squares fit of the 22 published points (root mean squared
error 1.81 against 0.42): on the line of 16 of 24 they prefer 8 attention blocks and 8 activations, the fit 10 and 6.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, as_float
from shd_ref.errors import need
from shd_ref.integers import check_integer, check_number
from shd_ref.tolerances import tie_width

DEGREES: tuple[int, ...] = (1, 2, 3, 4)


@dataclass(frozen=True)
class Predictor:
    """A polynomial of quality over the ratios of attention blocks and of activations that are kept."""

    degree: int  # from 1 to 4
    # of 1, a, t, a^2, a t, t^2, a^3, a^2 t, ...: by total degree, then by falling power of a
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_degree(self.degree)
        count = (self.degree + 1) * (self.degree + 2) // 2
        fits = as_float(self.coefficients, "coefficients").shape == (count,)
        rule, got = f"be {count} for degree {self.degree}", len(self.coefficients)
        need(fits, "argument-shape", "coefficients", rule, got)

    def predict(self, attention: ArrayLike, activation: ArrayLike) -> Array:
        """The polynomial at these ratios, which broadcast."""
        a, t = np.broadcast_arrays(as_float(attention, "attention"), as_float(activation, "activation"))
        values: Array = _monomials(a.ravel(), t.ravel(), self.degree) @ np.array(self.coefficients)
        return values.reshape(a.shape)


@dataclass(frozen=True)
class Split:
    """The best split of a budget: numbers of kept layers."""

    attention: int  # attention blocks that are kept
    activation: int  # activations that are kept
    quality: float  # predicted by the polynomial


def fit_predictor(points: ArrayLike, degree: int) -> Predictor:
    """The least-squares polynomial through measured points.

    Args:
        points: rows ``(attention ratio, activation ratio, quality)``, ratios of kept parts in [0, 1].
        degree: from 1 to 4.

    Raises:
        ShdError: ``argument-value``, ``argument-shape`` (too few points, or points that leave a coefficient open),
            ``argument-dtype``, ``not-finite``.

    Source: MAP's accuracy predictor.
    """
    rows, design = _design(points, degree)
    solution, _, rank, _ = np.linalg.lstsq(design, rows[:, 2], rcond=None)
    rule = f"determine the {design.shape[1]} coefficients of degree {degree}"
    got, remedy = f"{len(design)} points of rank {rank}", "measure more splits, or lower the degree"
    need(rank == design.shape[1], "argument-shape", "points", rule, got, remedy=remedy)
    return Predictor(degree, tuple(float(c) for c in solution))


def cross_validate(points: ArrayLike, degree: int) -> float:
    """Root mean squared error of leave-2-out cross-validation: every pair of points is left out once."""
    rows, design = _design(points, degree)
    squares = []
    for pair in itertools.combinations(range(len(rows)), 2):
        fitted, quality = np.delete(design, pair, axis=0), np.delete(rows[:, 2], pair)
        solution = np.linalg.lstsq(fitted, quality, rcond=None)[0]  # the shortest of several
        squares.append(float(((design[list(pair)] @ solution - rows[list(pair), 2]) ** 2).sum()))
    return float(np.sqrt(sum(squares) / (2 * len(squares))))


def choose_degree(points: ArrayLike, degrees: Sequence[int] = DEGREES) -> int:
    """The degree with the least error of cross-validation, the smaller one on a tie."""
    need(bool(degrees), "argument-value", "degrees", "name at least one degree", "none")
    errors = {degree: cross_validate(points, degree) for degree in degrees}
    equal = min(errors.values()) + tie_width() * float(np.abs(_check_points(points)[:, 2]).max())
    return min(degree for degree, error in errors.items() if error <= equal)


def best_split(predictor: Predictor, num_layers: int, budget: int) -> Split:
    """The split of a budget that the polynomial likes best, by enumeration.

    Args:
        predictor: from ``fit_predictor``.
        num_layers: L of the teacher.
        budget: K of 2 L, attention blocks and activations that are kept together.

    Returns:
        Kept counts; of equal predictions the one that keeps more attention blocks.

    Raises:
        ShdError: ``argument-value``.
    """
    num_layers = check_integer("num_layers", num_layers, 1, None)
    budget = check_integer("budget", budget, 0, 2 * num_layers)
    attention = np.arange(min(num_layers, budget), max(0, budget - num_layers) - 1, -1)  # more attention blocks first
    values = predictor.predict(attention / num_layers, (budget - attention) / num_layers)
    best = int(np.argmax(values >= values.max() - tie_width() * np.abs(values).max()))
    return Split(int(attention[best]), int(budget - attention[best]), float(values[best]))


@dataclass(frozen=True)
class Stability:
    """How often noise in the measured points leaves the best split where it is: shares of all draws."""

    unchanged: float
    off_by_one: float  # one attention block more or less
    further: float


def split_stability(
    points: ArrayLike, noise: float, *, num_layers: int, budget: int, degree: int = 2, draws: int = 1000, seed: int
) -> Stability:
    """How sure a best split is: Monte Carlo over the error of the measured qualities.

    Args:
        points: as in ``fit_predictor``.
        noise: standard deviation of a measured quality, in its unit, as between seeds of one split; normal.
        num_layers: L of the teacher.
        budget: K of 2 L, as in ``best_split``.
        degree: of the polynomial, the same in every draw.
        draws: at least 1.
        seed: of the draws, at least 0.

    Raises:
        ShdError: those of ``fit_predictor`` and ``best_split``.
    """
    check_number("noise", noise, least=0)
    draws, seed = check_integer("draws", draws, 1, None), check_integer("seed", seed, 0, None)
    best = best_split(fit_predictor(points, degree), num_layers, budget)
    rows, random = _check_points(points), np.random.default_rng(seed)
    counts = np.zeros(3)
    for _ in range(draws):
        drawn = rows + np.outer(random.normal(0.0, noise, len(rows)), [0.0, 0.0, 1.0])
        split = best_split(fit_predictor(drawn, degree), num_layers, budget)
        counts[min(abs(split.attention - best.attention), 2)] += 1
    return Stability(*(counts / draws).tolist())


def _monomials(a: Array, t: Array, degree: int) -> Array:
    """``(n, (degree + 1)(degree + 2) / 2)`` in the order ``1, a, t, a^2, a t, t^2, ...``."""
    return np.stack([a ** (total - p) * t**p for total in range(degree + 1) for p in range(total + 1)], axis=1)


def _design(points: ArrayLike, degree: int) -> tuple[Array, Array]:
    rows = _check_points(points)
    _check_degree(degree)
    return rows, _monomials(rows[:, 0], rows[:, 1], degree)


def _check_points(points: ArrayLike) -> Array:
    rows = as_float(points, "points")
    is_rows = rows.ndim == 2 and rows.shape[1] == 3 and len(rows) > 0
    need(is_rows, "argument-shape", "points", "be rows (attention, activation, quality)", f"shape {rows.shape}")
    low, high = rows[:, :2].min(), rows[:, :2].max()
    need(low >= 0.0 and high <= 1.0, "argument-value", "ratios", "lie in [0, 1]", f"{low:g} to {high:g}")
    return rows


def _check_degree(degree: object) -> None:
    is_known = not isinstance(degree, bool) and degree in DEGREES
    need(is_known, "argument-value", "degree", "be 1, 2, 3 or 4", repr(degree))
