"""The gradients of chapter GRAD against central differences of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shd_ref import ShdError, shd_loss, shd_loss_gradient, shd_loss_gradient_qk, softmax
from shd_ref.loss import DIVERGENCES

CAUSAL = np.tril(np.ones((4, 4), dtype=bool))
LOSS_MASK = np.array([[True, True, False, True], [False, True, True, False]])


def supervision(heads: int = 4, seed: int = 0) -> Any:
    return softmax(np.random.default_rng(seed).normal(size=(2, heads, 4, 4)), CAUSAL)


def differences(function: Callable[[Any], float], at: Any, step: float = 1e-5) -> Any:
    gradient = np.zeros_like(at)
    for where in np.ndindex(at.shape):
        moved = [at.copy(), at.copy()]
        moved[0][where] += step
        moved[1][where] -= step
        gradient[where] = (function(moved[0]) - function(moved[1])) / (2 * step)
    return gradient


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 2.5, "beta": 0.7, "reduction": "mean"},
    {"loss_mask": LOSS_MASK, "temperature": 0.6},
    {"row_sums": "at_most_one", "loss_mask": LOSS_MASK},
]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "tempered", "masked", "sinks"])
def test_logits(divergence: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    maps, logits = supervision(2), rng.normal(size=(2, 2, 4, 4))
    if options.get("row_sums") == "at_most_one":
        maps = maps * rng.uniform(0.2, 1.0, size=(2, 2, 4, 1))
    keywords = {**options, "divergence": divergence, "attn_mask": CAUSAL}
    gradient = shd_loss_gradient(maps, logits, **keywords)
    np.testing.assert_allclose(gradient, differences(lambda z: shd_loss(maps, z, **keywords), logits), atol=2e-9)
    assert (gradient[:, :, ~CAUSAL] == 0.0).all()
    np.testing.assert_allclose(gradient.sum(-1), 0.0, atol=1e-15)  # a shift of the logits changes nothing
    if "loss_mask" in options:
        assert (gradient.swapaxes(1, 2)[~LOSS_MASK] == 0.0).all()


def test_kl_is_the_difference_of_the_maps() -> None:
    maps, logits = supervision(), np.random.default_rng(2).normal(size=(2, 4, 4, 4))
    gradient = shd_loss_gradient(maps, logits, attn_mask=CAUSAL, beta=3.0, temperature=2.0, loss_mask=LOSS_MASK)
    expected = 3.0 * (softmax(logits, CAUSAL, temperature=2.0) - maps) / (LOSS_MASK.sum() * 2.0)
    np.testing.assert_allclose(gradient, np.where(LOSS_MASK[:, None, :, None], expected, 0.0), atol=1e-16)
    sunk = shd_loss_gradient(maps / 2, logits, attn_mask=CAUSAL, row_sums="at_most_one")
    np.testing.assert_allclose(sunk, (softmax(logits, CAUSAL) / 2 - maps / 2) / 8, atol=1e-16)


def test_a_row_that_is_slightly_off_uses_its_own_sum() -> None:
    maps, logits = supervision(1) * (1 + 5e-6), np.random.default_rng(2).normal(size=(2, 1, 4, 4))
    gradient = shd_loss_gradient(maps, logits, attn_mask=CAUSAL)
    exact = ((1 + 5e-6) * softmax(logits, CAUSAL) - maps) / 8
    np.testing.assert_allclose(gradient, exact, atol=1e-16)
    assert np.abs(gradient - (softmax(logits, CAUSAL) - maps) / 8).max() > 1e-7


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_intersected_support(divergence: str) -> None:
    rng = np.random.default_rng(4)
    maps, logits, narrow = softmax(rng.normal(size=(2, 2, 4, 4))), rng.normal(size=(2, 2, 4, 4)), CAUSAL.copy()
    narrow[2] = False
    keywords: Any = {"divergence": divergence, "support": "intersect", "attn_mask": narrow}
    gradient = shd_loss_gradient(maps, logits, **keywords)
    np.testing.assert_allclose(gradient, differences(lambda z: shd_loss(maps, z, **keywords), logits), atol=2e-9)
    assert (gradient[:, :, 2] == 0.0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_queries_and_keys(divergence: str, key_heads: int) -> None:
    rng = np.random.default_rng(3)
    maps, queries, keys = supervision(), rng.normal(size=(2, 4, 4, 3)), rng.normal(size=(2, key_heads, 4, 3))
    keywords: Any = {"divergence": divergence, "attn_mask": CAUSAL, "loss_mask": LOSS_MASK, "temperature": 1.5}

    def loss(q: Any, k: Any) -> float:
        logits = 0.6 * q @ np.repeat(k, 4 // key_heads, axis=1).swapaxes(-1, -2)
        return shd_loss(maps, logits, **keywords)

    dq, dk = shd_loss_gradient_qk(maps, queries, keys, scale=0.6, **keywords)
    np.testing.assert_allclose(dq, differences(lambda q: loss(q, keys), queries), atol=2e-9)
    np.testing.assert_allclose(dk, differences(lambda k: loss(queries, k), keys), atol=2e-9)
    assert (dq.swapaxes(1, 2)[~LOSS_MASK] == 0.0).all()
    none = shd_loss_gradient_qk(maps, queries, keys, scale=0.6, **{**keywords, "loss_mask": np.zeros((2, 4), bool)})
    assert not none[0].any()
    assert not none[1].any()


def test_layers_in_and_layers_out() -> None:
    maps, logits = supervision(), np.random.default_rng(2).normal(size=(2, 4, 4, 4))
    one = shd_loss_gradient(maps, logits, attn_mask=CAUSAL, reduction="mean")
    two = shd_loss_gradient([maps, maps[:, :2]], [logits, logits[:, :2]], attn_mask=CAUSAL, reduction="mean")
    assert isinstance(two, list)
    np.testing.assert_allclose(two[0], one * 4 / 6, atol=1e-16)
    np.testing.assert_allclose(two[1], one[:, :2] * 4 / 6, atol=1e-16)
    rng = np.random.default_rng(8)
    queries, keys = rng.normal(size=(2, 4, 4, 3)), rng.normal(size=(2, 4, 4, 3))
    dq, dk = shd_loss_gradient_qk([maps, maps], [queries, queries], [keys, keys], scale=0.5, attn_mask=CAUSAL)
    for got, want in zip(
        (dq, dk), shd_loss_gradient_qk(maps, queries, keys, scale=0.5, attn_mask=CAUSAL), strict=True
    ):
        np.testing.assert_array_equal(got[1], want)


@pytest.mark.parametrize(
    ("code", "queries", "keys", "scale"),
    [
        ("argument-shape", (2, 4, 4, 3), (2, 3, 4, 3), 1.0),
        ("argument-shape", (2, 4, 4, 3), (2, 4, 4, 2), 1.0),
        ("argument-shape", (2, 4, 4, 3), (1, 4, 4, 3), 1.0),
        ("argument-shape", (2, 4, 4, 3), (2, 4, 5, 3), 1.0),
        ("argument-shape", (2, 4, 3), (2, 4, 4, 3), 1.0),
        ("argument-value", (2, 4, 4, 3), (2, 4, 4, 3), float("nan")),
        ("argument-value", (2, 4, 4, 3), (2, 4, 4, 3), True),
    ],
)
def test_bad_queries_and_keys(code: str, queries: tuple[int, ...], keys: tuple[int, ...], scale: float) -> None:
    with pytest.raises(ShdError) as caught:
        shd_loss_gradient_qk(supervision(), np.ones(queries), np.ones(keys), scale=scale, attn_mask=CAUSAL)
    assert caught.value.code == code


def test_arguments_are_not_changed() -> None:
    maps, logits = supervision(), np.random.default_rng(2).normal(size=(2, 4, 4, 4))
    copies = maps.copy(), logits.copy()
    shd_loss_gradient(maps, logits, attn_mask=CAUSAL, support="intersect", row_sums="at_most_one")
    shd_loss_gradient_qk(maps, logits, logits, scale=1.0, attn_mask=CAUSAL)
    np.testing.assert_array_equal(maps, copies[0])
    np.testing.assert_array_equal(logits, copies[1])
