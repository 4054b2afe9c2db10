"""The ridge of a refitted matrix, chosen on samples that are held out."""

import numpy as np
from numpy.typing import NDArray

from shd_ref.shrink.align import HELD_OUT, RIDGES, RowSums, choose_change, solve_change

Array = NDArray[np.float64]


def make_sums(z: Array, targets: Array, start: Array) -> RowSums:
    return RowSums(z.T @ z, z.T @ (targets - z @ start), len(z), float((targets**2).sum()))


def choose(z: Array, targets: Array, start: Array, sample_rows: int = 1) -> tuple[Array | None, float | None]:
    held = np.arange(len(z)) // sample_rows % HELD_OUT == HELD_OUT - 1
    fitted, chooses = (make_sums(z[rows], targets[rows], start) for rows in (~held, held))
    return choose_change(fitted, chooses, biased=False)


def test_few_rows_are_held_many_are_fitted_and_noise_is_neither() -> None:
    rng = np.random.default_rng(3)
    start, moved = rng.normal(size=(32, 4)), 0.5 * rng.normal(size=(32, 4))

    def fit(rows: int, truth: Array) -> tuple[float, float, float | None]:
        """The squared error of the choice, of the smallest ridge, and the chosen one."""
        z = rng.normal(size=(rows, 32))
        targets = z @ (start + truth) + rng.normal(size=(rows, 4))
        change, ridge = choose(z, targets, start, 4)
        least = solve_change(make_sums(z, targets, start), RIDGES[0], biased=False)
        gap = truth if change is None else change - truth
        return float((gap**2).mean()), float(((least - truth) ** 2).mean()), ridge

    few, many, still = fit(40, moved), fit(4000, moved), fit(40, np.zeros_like(moved))
    assert few[0] < few[1]
    assert many[0] < 0.02 * float((moved**2).mean())
    assert many[2] == RIDGES[0]
    assert still[2] is None or still[2] >= 1.0
    assert still[0] < still[1]


def test_where_nothing_is_left_to_fit_the_closed_form_stays() -> None:
    """Not one of the ridges, whose errors are rounding."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        z, start = rng.normal(size=(80, 8)), rng.normal(size=(8, 2))
        left = 1e-9 * rng.normal(size=8)[:, None]  # what float32 leaves of equal streams
        assert choose(z, z @ (start + left), start) == (None, None)


def test_too_few_samples_to_hold_any_out_are_held_to_the_closed_form() -> None:
    rng = np.random.default_rng(4)
    change, ridge = choose(rng.normal(size=(3, 8)), rng.normal(size=(3, 2)), rng.normal(size=(8, 2)))
    assert ridge == RIDGES[-1]
    assert change is not None
