"""The loss under each divergence, support and reduction, and what stays an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shd_ref import ShdError, intersect_support, shd_loss, softmax
from shd_ref.loss import DIVERGENCES

HALF = np.array([[[[0.5, 0.5]]]])
QUARTER = np.log(np.array([[[[0.25, 0.75]]]]))  # student logits whose softmax is [1/4, 3/4]
BY_HAND = {
    "kl": 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75),
    "reverse_kl": 0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.75 / 0.5),
    "js": 0.5 * (0.5 * np.log(0.5 / 0.375) + 0.5 * np.log(0.5 / 0.625))
    + 0.5 * (0.25 * np.log(0.25 / 0.375) + 0.75 * np.log(0.75 / 0.625)),
    "mse": 0.125,
}


def maps_and_logits(seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return softmax(rng.normal(size=(2, 3, 4, 5))), rng.normal(size=(2, 3, 4, 5))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_by_hand(divergence: str) -> None:
    assert shd_loss(HALF, QUARTER, divergence=divergence) == pytest.approx(BY_HAND[divergence], rel=1e-12)
    sunk = shd_loss(HALF / 4, QUARTER, divergence=divergence, row_sums="at_most_one")
    assert sunk == pytest.approx(BY_HAND[divergence] / 4, rel=1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_zero_only_when_equal_up_to_the_mass(divergence: str) -> None:
    probs, logits = maps_and_logits()
    assert shd_loss(probs, np.log(probs), divergence=divergence) == pytest.approx(0.0, abs=1e-14)
    assert shd_loss(probs, logits, divergence=divergence) > 0.01
    sunk = probs * np.random.default_rng(1).uniform(0.1, 1.0, size=(2, 3, 4, 1))
    equal = shd_loss(sunk, np.log(probs), divergence=divergence, row_sums="at_most_one")
    assert equal == pytest.approx(0.0, abs=1e-14)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rows_denominators_and_reductions_are_those_of_kl(divergence: str) -> None:
    probs, logits = maps_and_logits()
    mask = np.array([[True, False, True, True], [False, False, True, False]])
    whole = shd_loss(probs, logits, divergence=divergence, loss_mask=mask)
    rows = [
        shd_loss(
            probs[b : b + 1, h : h + 1, i : i + 1], logits[b : b + 1, h : h + 1, i : i + 1], divergence=divergence
        )
        for h in range(3)
        for b, i in np.argwhere(mask)
    ]
    assert whole == pytest.approx(sum(rows) / mask.sum(), rel=1e-12)
    layers = shd_loss(
        [probs, probs[:, :1]],
        [logits, logits[:, :1]],
        divergence=divergence,
        loss_mask=mask,
        reduction="mean",
        beta=2,
    )
    first = shd_loss(probs[:, :1], logits[:, :1], divergence=divergence, loss_mask=mask)
    assert layers == pytest.approx(2 * (whole + first) / 4, rel=1e-12)
    assert shd_loss(probs, logits, divergence=divergence, loss_mask=np.zeros_like(mask)) == 0.0


def test_mse_does_not_change_with_padding_and_js_is_bounded_and_symmetric() -> None:
    probs, logits = maps_and_logits()
    wide = np.concatenate([probs, np.zeros_like(probs)], axis=-1)
    padded = np.concatenate([logits, np.full_like(logits, -np.inf)], axis=-1)
    for divergence in DIVERGENCES:
        loss = shd_loss(probs, logits, divergence=divergence)
        assert shd_loss(wide, padded, divergence=divergence) == pytest.approx(loss, rel=1e-12)
    swapped = shd_loss(softmax(logits), np.log(probs), divergence="js")
    assert swapped == pytest.approx(shd_loss(probs, logits, divergence="js"), rel=1e-12)
    assert shd_loss(probs, logits, divergence="reverse_kl") == pytest.approx(shd_loss(softmax(logits), np.log(probs)))
    apart = shd_loss(np.array([[[[1.0, 0.0]]]]), np.array([[[[-2000.0, 0.0]]]]), divergence="js")
    assert apart == pytest.approx(np.log(2), rel=1e-12)


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
    with pytest.raises(ShdError, match="layer 0, sample 0, head 0, row 0, key 1") as caught:
        shd_loss(HALF, QUARTER, divergence=divergence, attn_mask=np.array([True, False]))
    assert caught.value.code == "support-mismatch"
    assert caught.value.spec_id == "LOSS-6"


def test_reverse_kl_needs_mass_wherever_the_student_may_attend() -> None:
    probs, logits = np.array([[[[1.0, 0.0]]]]), np.zeros((1, 1, 1, 2))
    for support in ("error", "intersect"):
        with pytest.raises(ShdError) as caught:
            shd_loss(probs, logits, divergence="reverse_kl", support=support)
        assert caught.value.code == "support-mismatch"
        assert caught.value.spec_id == "LOSS-13"
    assert shd_loss(probs, logits, divergence="reverse_kl", attn_mask=np.array([True, False])) == 0.0
    rows = np.array([[[[1.0, 0.0], [0.5, 0.5]]]])
    counted = shd_loss(rows, np.zeros_like(rows), divergence="reverse_kl", loss_mask=np.array([[False, True]]))
    assert counted == pytest.approx(0.0, abs=1e-15)


def test_intersection_keeps_sums_and_reports_what_it_drops() -> None:
    rng = np.random.default_rng(5)
    probs, logits = softmax(rng.normal(size=(2, 3, 4, 6))), rng.normal(size=(2, 3, 4, 6))
    mask = rng.random((2, 1, 4, 6)) > 0.3
    mask[0, 0, 1] = False
    mask[1, 0, 2] = True
    result = intersect_support(probs, logits, attn_mask=mask)
    assert (result.supervision[np.broadcast_to(~mask, probs.shape)] == 0.0).all()
    np.testing.assert_allclose(result.dropped, (probs * ~mask).sum(-1), atol=1e-15)
    sums = result.supervision.sum(-1)
    assert (sums[0, :, 1] == 0.0).all()
    np.testing.assert_allclose(np.delete(sums.reshape(2, 3, 4)[0], 1, axis=1), 1.0, atol=1e-12)
    np.testing.assert_array_equal(result.supervision[1, :, 2], probs[1, :, 2])
    expected = shd_loss(result.supervision, logits, attn_mask=mask)
    assert shd_loss(probs, logits, attn_mask=mask, support="intersect") == pytest.approx(expected, rel=1e-12)
    by_hand = probs * mask / np.where((probs * mask).sum(-1) == 0, 1, (probs * mask).sum(-1))[..., None]
    np.testing.assert_allclose(result.supervision, by_hand, atol=1e-12)
    sunk = intersect_support(probs / 2, logits, attn_mask=mask, row_sums="at_most_one")
    np.testing.assert_allclose(sunk.supervision, result.supervision / 2, atol=1e-12)
    np.testing.assert_allclose(sunk.dropped, result.dropped / 2, atol=1e-12)


def test_intersection_of_a_tiny_rest_is_finite() -> None:
    maps = np.array([[[[1e-310, 1.0]]]])
    result = intersect_support(maps, np.array([[[[0.0, -np.inf]]]]))
    np.testing.assert_allclose(result.supervision, [[[[1.0, 0.0]]]])


@pytest.mark.parametrize(
    ("code", "keywords"),
    [
        ("argument-value", {"divergence": "forward_kl"}),
        ("argument-value", {"support": "union"}),
        ("argument-shape", {"attn_mask": np.ones((3, 2), dtype=bool)}),
    ],
)
def test_bad_options(code: str, keywords: dict[str, Any]) -> None:
    with pytest.raises(ShdError) as caught:
        shd_loss(HALF, QUARTER, **keywords)
    assert caught.value.code == code
