"""Intervals hold the truth as often as they say, for means and for ratios, and pairs tell more than overlap does."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from shd_ref.teacher.study.intervals import CONFIDENCE, Scores, half_width, t_quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "published"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 5, 2.571),
        (0.975, 30, 2.042),
        (0.995, 10, 3.169),
        (0.9995, 1, 636.619),
    ],
)
def test_quantiles_are_those_of_published_tables(probability: float, freedom: int, published: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(published, rel=3e-4)


def draw(rng: np.random.Generator, count: int) -> tuple[Scores, Scores]:
    """Two runs on the same samples of differing lengths: losses a token are 2 and 2.1, and samples differ by more."""
    lengths = rng.integers(5, 50, count).astype(float)
    shared: NDArray[np.float64] = rng.exponential(1.0, count) - 1.0
    own = rng.normal(size=(2, count)) * 0.1
    first, second = (
        Scores((level + shared + noise) * lengths, lengths) for level, noise in zip((2.0, 2.1), own, strict=True)
    )
    return first, second


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    trials, held, paired = 600, 0, 0
    for _ in range(trials):
        first, second = draw(rng, 40)
        held += abs(first.value - 2.0) <= (first.margin() or 0.0)
        difference, margin = second.above(first)
        paired += abs(difference - 0.1) <= (margin or 0.0)
    # Within three standard deviations of a count; skewed losses lose a little of the first.
    spread = 3 * np.sqrt(CONFIDENCE * (1 - CONFIDENCE) / trials)
    assert CONFIDENCE - spread - 0.03 <= held / trials <= CONFIDENCE + spread
    assert CONFIDENCE - spread <= paired / trials <= CONFIDENCE + spread


def test_pairs_tell_apart_what_two_intervals_cannot() -> None:
    first, second = draw(np.random.default_rng(1), 40)
    difference, margin = second.above(first)
    own = first.margin()
    assert margin is not None
    assert own is not None
    assert margin < difference < own


def test_several_comparisons_widen_the_interval() -> None:
    first, second = draw(np.random.default_rng(2), 12)
    one, many = (second.above(first, count)[1] for count in (1, 10))
    assert one is not None
    assert many is not None
    assert many / one == pytest.approx(t_quantile(1 - 0.0025, 11) / t_quantile(0.975, 11))


def test_a_ratio_is_of_sums_and_one_sample_has_no_interval() -> None:
    scores = Scores(np.array([2.0, 9.0]), np.array([1.0, 3.0]))
    assert scores.value == 11 / 4
    assert scores.influences.sum() == pytest.approx(0.0)
    assert half_width(np.zeros(1)) is None
    assert Scores(np.ones(1), np.ones(1)).above(Scores(np.zeros(1), np.ones(1))) == (1.0, None)
    assert np.isnan(Scores(np.zeros(0), np.zeros(0)).value)
