"""Intervals hold the truth as often as they say."""

import numpy as np
import pytest

from shd_ref.teacher.study.intervals import CONFIDENCE, half_width, t_quantile


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


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    trials, held = 300, 0
    for _ in range(trials):
        sample = rng.normal(2.0, 1.0, 10)
        held += abs(sample.mean() - 2.0) <= (half_width(sample) or 0.0)
    spread = 3 * np.sqrt(CONFIDENCE * (1 - CONFIDENCE) / trials)  # three standard deviations of a count
    assert CONFIDENCE - spread <= held / trials <= CONFIDENCE + spread
