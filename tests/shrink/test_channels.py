"""Channels of a stream from which the others are predicted."""

import numpy as np

from shd_ref.shrink.kept import predictive_channels


def chosen(moment: object, width: int) -> list[int]:
    return [int(channel) for channel in predictive_channels(moment, width).argmax(axis=0)]


def test_the_first_is_the_one_whose_regression_leaves_least() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 6)) @ np.random.default_rng(1).normal(size=(6, 6))
    rows -= rows.mean(axis=0)
    left = [np.linalg.lstsq(rows[:, [channel]], rows, rcond=None)[1].sum() for channel in range(6)]
    assert chosen(rows.T @ rows, 1) == [int(np.argmin(left))]


def test_a_copy_is_left_out_and_the_first_of_equals_is_kept() -> None:
    moment = np.eye(5)
    moment[1, 3] = moment[3, 1] = 1.0  # channel 3 is channel 1, and both say most
    assert [chosen(moment, width) for width in (1, 2, 4)] == [[1], [0, 1], [0, 1, 2, 4]]
    assert chosen(np.zeros((3, 3)), 2) == [0, 1]
