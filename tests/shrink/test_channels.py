"""Channels of a stream from which the others are predicted."""

import numpy as np
import pytest

from shd_ref.shrink.kept import predictive_channels


def chosen(moment: object, width: int) -> list[int]:
    return [int(channel) for channel in predictive_channels(moment, width).basis.argmax(axis=0)]


@pytest.mark.parametrize("width", [1, 3, 6])
def test_the_energy_is_what_regression_explains(width: int) -> None:
    rows = np.random.default_rng(0).normal(size=(50, 6)) @ np.random.default_rng(1).normal(size=(6, 6))
    rows -= rows.mean(axis=0)
    kept = predictive_channels(rows.T @ rows, width)
    inputs = rows @ kept.basis
    assert (kept.basis == np.eye(6)[:, np.flatnonzero(kept.basis.any(axis=1))]).all()
    left = rows - inputs @ np.linalg.lstsq(inputs, rows, rcond=None)[0]
    assert kept.energy == pytest.approx(1 - (left**2).sum() / (rows**2).sum(), abs=1e-12)
    if width == 1:
        alone = [
            (np.linalg.lstsq(rows[:, [channel]], rows, rcond=None)[1]).sum() for channel in range(6)
        ]  # what each of them leaves
        assert chosen(rows.T @ rows, 1) == [int(np.argmin(alone))]


def test_a_copy_is_left_out_and_the_first_of_equals_is_kept() -> None:
    moment = np.eye(5)
    moment[1, 3] = moment[3, 1] = 1.0  # channel 3 is channel 1, and both say most
    assert [chosen(moment, width) for width in (1, 2, 4)] == [[1], [0, 1], [0, 1, 2, 4]]
    assert predictive_channels(moment, 4).energy == pytest.approx(1.0)
    assert chosen(np.zeros((3, 3)), 2) == [0, 1]
