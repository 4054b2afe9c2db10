"""The predictor against the published points: 22 fine-tuned DeiT-B of known attention and activation ratios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shd_ref.errors import ShdError
from shd_ref.shrink.predictor import (
    Predictor,
    best_split,
    change_meaning,
    choose_degree,
    cross_validate,
    fit_predictor,
    study_noise,
)

EXACT = [(1.0, 1.0, 3.0), (0.5, 1.0, 2.0), (1.0, 0.5, 1.0), (0.5, 0.5, 0.5), (0.75, 0.5, 0.0), (0.5, 0.75, 4.0)]


@pytest.fixture(scope="module")
def golden(shared_data: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shared_data / "map_deitb" / "points.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def points(golden: dict[str, Any]) -> np.ndarray:
    """Printed with two decimals; they are twelfths."""
    rows = np.array(golden["points"])
    rows[:, :2] = np.round(rows[:, :2] * 12) / 12
    return rows


def rmse(predictor: Predictor, points: np.ndarray) -> float:
    return float(np.sqrt(np.mean((predictor.predict(points[:, 0], points[:, 1]) - points[:, 2]) ** 2)))


def test_fit_of_the_published_points(golden: dict[str, Any], points: np.ndarray) -> None:
    ours = golden["our_check"]
    predictor = fit_predictor(points, 2)
    np.testing.assert_allclose(predictor.coefficients, ours["lstsq_all_22_exact_twelfths"], atol=1e-6)
    assert rmse(predictor, points) == pytest.approx(ours["train_rmse"], abs=5e-5)
    split = best_split(predictor, 12, 16)
    assert [f"{split.attention}/12", f"{split.activation}/12"] == ours["argmax_16_12"]


def test_published_polynomial_is_not_their_fit(golden: dict[str, Any], points: np.ndarray) -> None:
    """It misses the points by four times as much as the least-squares fit does, and prefers another split."""
    published = Predictor(2, tuple(golden["published"]["coef_1_a_t_a2_at_t2"]))
    assert rmse(published, points) == pytest.approx(golden["our_check"]["published_poly_rmse_on_22"], abs=5e-5)
    assert rmse(published, points) > 4 * rmse(fit_predictor(points, 2), points)
    split = best_split(published, 12, 16)
    assert [f"{split.attention}/12", f"{split.activation}/12"] == golden["published"]["argmax_a_t"]


def test_degree_by_leaving_two_out(golden: dict[str, Any], points: np.ndarray) -> None:
    errors = [cross_validate(points, degree) for degree in (1, 2, 3, 4)]
    np.testing.assert_allclose(errors, golden["our_check"]["l2ocv_rmse_by_degree"], atol=5e-5)
    assert choose_degree(points) == golden["published"]["l2ocv_selected_degree"] == 2


def test_change_of_coordinates_as_published(golden: dict[str, Any]) -> None:
    published = Predictor(2, tuple(golden["published"]["coef_1_a_t_a2_at_t2"]))
    pruned = change_meaning(published)
    np.testing.assert_allclose(
        pruned.coefficients, golden["published"]["pruned_ratio_form_1_ma_mg_ma2_mamg_mg2"], atol=0.011
    )
    np.testing.assert_allclose(change_meaning(pruned).coefficients, published.coefficients, rtol=1e-9)
    ours, theirs = best_split(pruned, 12, 8, "pruned"), best_split(published, 12, 16, "retained")
    assert (ours.attention, ours.activation) == (theirs.attention, theirs.activation) == (8, 8)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_both_meanings_are_one_polynomial(degree: int) -> None:
    random = np.random.default_rng(degree)
    predictor = Predictor(degree, tuple(random.normal(size=(degree + 1) * (degree + 2) // 2)))
    other = change_meaning(predictor)
    a, t = random.random((2, 9))
    np.testing.assert_allclose(other.predict(1 - a, 1 - t), predictor.predict(a, t), atol=1e-9)
    for budget, meaning in ((9, "retained"), (24 - 9, "pruned")):
        ours, theirs = best_split(predictor, 12, budget, meaning), best_split(other, 12, budget, meaning)
        assert (ours.attention, ours.activation) == (theirs.attention, theirs.activation)
        assert ours.attention + ours.activation == 9


def test_a_polynomial_is_found_again() -> None:
    random = np.random.default_rng(0)
    truth = Predictor(3, tuple(random.normal(size=10)))
    a, t = random.random((2, 14))
    points = np.stack([a, t, truth.predict(a, t)], axis=1)
    np.testing.assert_allclose(fit_predictor(points, 3).coefficients, truth.coefficients, atol=1e-8)
    assert choose_degree(points, (1, 2, 3)) == 3
    assert cross_validate(points, 3) < 1e-7 < cross_validate(points, 2)


def test_what_rounding_tells_apart_is_equal() -> None:
    """The least of the degrees that fit, and of equal splits the one with more attention (PRED-4, PRED-5)."""
    for seed in range(8):
        random = np.random.default_rng(seed)
        a, t = random.random((2, 20))
        points = np.stack([a, t, 70.0 + a + 2.0 * t + 1e-12 * random.normal(size=20)], axis=1)
        assert choose_degree(points[random.permutation(20)], (3, 2, 1)) == 1
        even = Predictor(1, (0.3, *(0.1 + 1e-15 * random.normal(size=2))))
        assert [best_split(even, 12, k).attention for k in range(9, 16)] == [9, 10, 11, 12, 12, 12, 12]


def test_budget_lines_end_where_a_type_is_used_up() -> None:
    rising = Predictor(1, (0.0, 1.0, 0.5))
    assert (best_split(rising, 4, 8).attention, best_split(rising, 4, 5).attention) == (4, 4)
    falling = Predictor(1, (0.0, -1.0, 0.5))
    assert [best_split(falling, 4, k).attention for k in (8, 5, 4, 0)] == [4, 1, 0, 0]
    flat = best_split(Predictor(1, (7.0, 0.0, 0.0)), 4, 3)
    assert (flat.attention, flat.activation, flat.quality) == (3, 0, 7.0)


def test_noise_study(points: np.ndarray) -> None:
    still = study_noise(points, 12, 16, deviation=0.0, trials=3)
    assert (still.same, still.one_layer, still.more, still.std) == (1.0, 0.0, 0.0, (0.0, 0.0))
    assert still.mean == pytest.approx((10 / 12, 6 / 12))
    study = study_noise(points, 12, 16, trials=50)
    assert study == study_noise(points, 12, 16, trials=50)
    assert study.same + study.one_layer + study.more == pytest.approx(1.0)
    assert sum(study.mean) == pytest.approx(16 / 12)
    assert study.same > 0.5  # one tenth of a percent of noise rarely moves it


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: fit_predictor(EXACT, 5), "argument-value"),
        (lambda: fit_predictor(EXACT, True), "argument-value"),
        (lambda: fit_predictor(EXACT[:5], 2), "argument-shape"),
        (lambda: fit_predictor([(0.5, 0.5, 1.0)] * 9, 1), "argument-shape"),
        (lambda: fit_predictor([(50.0, 0.5, 1.0)] * 9, 1), "argument-value"),
        (lambda: fit_predictor([(0.5, 0.5, np.nan)] * 9, 1), "not-finite"),
        (lambda: fit_predictor([(0.5, 0.5)], 1), "argument-shape"),
        (lambda: choose_degree(EXACT, ()), "argument-value"),
        (lambda: Predictor(2, (1.0, 2.0)), "argument-shape"),
        (lambda: Predictor(1, (1.0, 2.0, 3.0), "kept"), "argument-value"),
        (lambda: best_split(fit_predictor(EXACT, 1), 12, 25), "argument-value"),
        (lambda: best_split(fit_predictor(EXACT, 1), 0, 0), "argument-value"),
        (lambda: best_split(fit_predictor(EXACT, 1), 12, 8, "kept"), "argument-value"),
        (lambda: study_noise(EXACT, 4, 4, degree=1, trials=0), "argument-value"),
        (lambda: study_noise(EXACT, 4, 4, degree=1, trials=2.0), "argument-value"),  # type: ignore[arg-type]
    ],
)
def test_refusals(call: Any, code: str) -> None:
    with pytest.raises(ShdError) as error:
        call()
    assert error.value.code == code
