"""The loss where numbers are tiny or infinite, and what names the place of an error."""

import numpy as np
import pytest
from support.refusals import refusal

from shd_ref import intersect_support, shd_loss, soften, softmax
from shd_ref.loss import DIVERGENCES

HALF = np.array([[[[0.5, 0.5]]]])
QUARTER = np.log(np.array([[[[0.25, 0.75]]]]))  # student logits whose softmax is [1/4, 3/4]


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_probabilities_too_small_for_the_dtype_stay_finite(divergence: str) -> None:
    loss = shd_loss(HALF, np.array([[[[0.0, -2000.0]]]]), divergence=divergence)
    expected = {"kl": 1000.0 - np.log(2), "reverse_kl": np.log(2), "mse": 0.5}
    expected["js"] = 0.5 * (0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(2) + np.log(1 / 0.75))
    assert loss == pytest.approx(expected[divergence], rel=1e-12)
    assert softmax([[1e308, -1e308]], temperature=0.5).tolist() == [[1.0, 0.0]]
    assert np.isfinite(shd_loss(HALF, np.array([[[[1e308, -1e308]]]]), divergence=divergence, temperature=0.5))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_teacher_mass_that_the_student_may_not_attend(divergence: str) -> None:
    with refusal("support-mismatch", "layer 0, sample 0, head 0, row 0, key 1") as caught:
        shd_loss(HALF, QUARTER, divergence=divergence, attn_mask=np.array([True, False]))
    assert caught.value.spec_id == "LOSS-6"


def test_intersection_of_a_tiny_rest_is_finite() -> None:
    maps = np.array([[[[1e-310, 1.0]]]])
    result = intersect_support(maps, np.array([[[[0.0, -np.inf]]]]))
    np.testing.assert_allclose(result.supervision, [[[[1.0, 0.0]]]])


@pytest.mark.parametrize("temperature", [1e-4, 1e-300])
def test_a_small_temperature_leaves_the_largest_entry(temperature: float) -> None:
    assert soften([[0.25, 0.75]], temperature).tolist() == [[0.0, 1.0]]
    assert soften([[1e-200, 3e-200]], temperature, row_sums="at_most_one").tolist() == [[0.0, 4e-200]]
    assert soften([[0.5, 0.25]], temperature, row_sums="at_most_one").tolist() == [[0.75, 0.0]]
