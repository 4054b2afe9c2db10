"""Rounding decides nothing: of equals the first stays, signs go by rule, and shares lie within [0, 1]."""

import numpy as np
import pytest

from shd_ref.shrink import Predictor, best_split, choose_degree
from shd_ref.shrink.heads import HeadMerge, HeadWeights, low_rank_heads
from shd_ref.shrink.kept import kept_scale, most_important, principal_axes

RANDOM = np.random.default_rng(1)


def test_of_neurons_that_rounding_tells_apart_the_first_stay() -> None:
    for seed in range(8):
        noise = np.random.default_rng(seed).normal(size=7)
        scores = np.array([2.0, 1.0, 3.0, 1.0, 1.0, 0.5, 1.0]) * (1 + 1e-9 * noise)
        assert most_important(scores, 4) == (0, 1, 2, 3)


@pytest.mark.parametrize("slow", [None, np.zeros(2, bool)], ids=["plain", "rotary"])
def test_the_signs_of_factors_are_chosen_by_rule(slow: np.ndarray | None) -> None:
    """Where rounding would choose a sign of a factor, the first entry decides."""
    random = np.random.default_rng(0)
    teacher = HeadWeights(*(random.normal(size=size) for size in ((4, 12, 4), (4, 12, 4), (4, 12, 4), (4, 4, 12))))
    merge = HeadMerge(np.array([[0.6, 0, 0, 0.4], [0, 0.3, 0.7, 0]]), ((0, 3), (1, 2)))
    rows = np.concatenate([random.normal(size=(96, 12)) + 0.5, np.ones((96, 1))], axis=1)
    moment = rows.T @ rows / len(rows)

    def keys_of(moment: np.ndarray) -> np.ndarray:
        return low_rank_heads(teacher, merge, 1, 4, moment, moment[:-1, :-1], slow=slow).key

    keys = keys_of(moment)
    for _ in range(4):
        shaken = moment * (1 + 1e-13 * random.normal(size=moment.shape))
        np.testing.assert_allclose(keys_of(shaken), keys, atol=1e-7)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_signs_of_axes_are_chosen_by_rule(norm: str) -> None:
    for _ in range(10):
        rows = RANDOM.normal(size=(9, 6))
        moment = rows.T @ rows / 9
        basis = principal_axes(moment, 6, norm)
        if norm == "rms":
            assert (basis[np.abs(basis).argmax(axis=0), range(6)] > 0.0).all()
        shaken = principal_axes(moment + 1e-13 * RANDOM.normal(size=(6, 6)), 6, norm)
        np.testing.assert_allclose(shaken, basis, atol=1e-8)


def test_no_share_leaves_its_range() -> None:
    """Axes that hold nothing of a moment."""
    for _ in range(50):
        turn = np.linalg.qr(RANDOM.normal(size=(6, 6)))[0]
        thin = np.outer(turn[0], turn[0])
        assert 0.0 <= kept_scale(thin, turn[1:2].T) < 1e-6


def test_the_least_degree_and_the_split_with_more_attention() -> None:
    """Where rounding would choose a degree or a split, the first of the nearly equal ones is taken."""
    for seed in range(8):
        random = np.random.default_rng(seed)
        a, t = random.random((2, 20))
        points = np.stack([a, t, 70.0 + a + 2.0 * t + 1e-12 * random.normal(size=20)], axis=1)
        assert choose_degree(points[random.permutation(20)], (3, 2, 1)) == 1
        even = Predictor(1, (0.3, *(0.1 + 1e-15 * random.normal(size=2))))
        assert [best_split(even, 12, k).attention for k in range(9, 16)] == [9, 10, 11, 12, 12, 12, 12]
