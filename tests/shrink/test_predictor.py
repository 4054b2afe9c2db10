"""The predictor against the published points: 22 fine-tuned DeiT-B of known attention and activation ratios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shd_ref.shrink import (
    Predictor,
    best_split,
    change_meaning,
    choose_degree,
    cross_validate,
    fit_predictor,
    study_noise,
)


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


def test_noise_study(points: np.ndarray) -> None:
    still = study_noise(points, 12, 16, deviation=0.0, trials=3)
    assert (still.same, still.one_layer, still.more, still.std) == (1.0, 0.0, 0.0, (0.0, 0.0))
    assert still.mean == pytest.approx((10 / 12, 6 / 12))
    study = study_noise(points, 12, 16, trials=50)
    assert study == study_noise(points, 12, 16, trials=50)
    assert study.same + study.one_layer + study.more == pytest.approx(1.0)
    assert sum(study.mean) == pytest.approx(16 / 12)
    assert study.same > 0.5  # one tenth of a percent of noise rarely moves it
