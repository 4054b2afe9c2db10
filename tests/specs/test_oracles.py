"""The oracles are optima, bound every strategy, and are reported with their ratios."""

from typing import Any

import numpy as np
import pytest

from shd_ref import merge_plan, plan_groups, softmax, squeeze_heads

pytest.importorskip("scipy", reason="the oracles need scipy")

from shd_ref import diagnose
from shd_ref.merging.oracles import head_residual, nearest_weights, unconstrained_optimum


def teacher(*, heads: int = 4, rows: int = 5, keys: int = 6, width: int = 4, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    causal = np.tril(np.ones((rows, keys), dtype=bool))
    return softmax(rng.normal(size=(2, heads, rows, keys)) * 2, causal), rng.normal(size=(2, heads, keys, width))


def groups_of(heads: int, student_heads: int) -> tuple[tuple[int, ...], ...]:
    return plan_groups(merge_plan(heads, student_heads), heads)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("points", "width"), [(2, 1), (5, 2), (6, 40), (30, 3)])
def test_nearest_weights_are_optimal(points: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cloud = (rng.normal(size=(points, width)) + seed) * 10.0 ** (6 * seed - 6)
    weights = nearest_weights(cloud)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
    nearest = weights @ cloud
    # Optimal exactly when no point lies on the near side of the plane through the nearest one.
    slack = (cloud @ nearest).min() - nearest @ nearest
    assert slack >= -1e-10 * (cloud**2).sum(-1).max()


def test_nearest_weights_of_points_at_zero_and_of_a_solver_that_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nearest_weights(np.zeros((3, 2))).sum() == pytest.approx(1.0)

    def gives_up(*_: Any, **__: Any) -> Any:
        raise RuntimeError("too many iterations")

    monkeypatch.setattr("scipy.optimize.nnls", gives_up)
    np.testing.assert_allclose(nearest_weights(np.array([[2.0], [-1.0]])), [1 / 3, 2 / 3])


@pytest.mark.parametrize("row_sums", ["one", "at_most_one"])
def test_optima_bound_every_strategy(row_sums: str) -> None:
    probs, outputs = teacher(heads=6, seed=1)
    if row_sums == "at_most_one":
        probs = probs * np.random.default_rng(2).uniform(0.2, 1.0, size=(2, 6, 5, 1))
    mask = np.array([[True] * 5, [True, True, False, True, False]])
    report = diagnose(probs, outputs, 2, query_mask=mask, row_sums=row_sums)
    assert tuple(report.strategies) == ("shd", "constant", "hard", "mean")
    assert (report.unconstrained <= report.stochastic + 1e-9).all()
    assert report.plan == merge_plan(6, 2)
    for name, strategy in report.strategies.items():
        result = squeeze_heads(probs, outputs, 2, strategy=name, query_mask=mask, row_sums=row_sums)
        np.testing.assert_array_equal(strategy.residual, result.residual)
        assert (strategy.over_stochastic >= 1 - 1e-9).all()
        np.testing.assert_allclose(strategy.over_stochastic, strategy.head_residual / report.stochastic)


def test_unconstrained_is_the_projection_and_lossless_when_the_keys_allow() -> None:
    probs, outputs = teacher(width=9)
    groups = groups_of(4, 2)
    best = unconstrained_optimum(probs, outputs, groups)
    floor = head_residual(best, probs, outputs, groups)
    rng = np.random.default_rng(3)
    for size in (1e-3, 1e-1):
        moved = head_residual(best + size * rng.normal(size=best.shape), probs, outputs, groups)
        assert (moved >= floor).all()
    narrow = diagnose(*teacher(width=3), 2)  # six keys in three dimensions reach every output
    np.testing.assert_allclose(narrow.unconstrained, 0.0, atol=1e-10)
    assert np.isinf(narrow.strategies["shd"].over_unconstrained).all()


def test_a_softmax_has_any_rank() -> None:
    """D-26: the source bounds a map's rank by the width of its head."""
    logits = np.outer(np.arange(3.0), np.arange(3.0))
    assert (np.linalg.matrix_rank(logits), np.linalg.matrix_rank(softmax(logits))) == (1, 3)


@pytest.mark.parametrize(("keys", "is_zero"), [(2, False), (3, False), (4, True), (9, True)])
def test_the_loss_reaches_zero_with_as_many_keys_as_values_are_wide(keys: int, is_zero: bool) -> None:
    """D-27, for two heads of width 2 as one; rows of probabilities leave a rest with four keys too."""
    rng = np.random.default_rng(0)
    maps, values = softmax(rng.normal(size=(1, 2, 9, keys))), rng.normal(size=(1, 2, keys, 2))
    report = diagnose(maps, values @ rng.normal(size=(1, 2, 2, 8)), 1, strategies=("constant",))
    assert (report.unconstrained[0] < 1e-10) == is_zero
    assert report.unconstrained[0] > 0.05 or is_zero
    assert report.stochastic[0] > 0.05 or keys > 4
