"""FFNs without their activation, and with fewer neurons."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shd_ref.errors import ShdError
from shd_ref.shrink.ffn import Linear, keep_neurons, merge_linear, neuron_importance

RANDOM = np.random.default_rng(0)
W1, W2, B1, B2 = (RANDOM.normal(size=size) for size in ((7, 4), (5, 7), 7, 5))


@pytest.mark.parametrize("first_bias", [B1, None], ids=["b1", "no b1"])
@pytest.mark.parametrize("second_bias", [B2, None], ids=["b2", "no b2"])
def test_one_linear_map(first_bias: Any, second_bias: Any) -> None:
    x = RANDOM.normal(size=(9, 4))
    merged = merge_linear(W1, W2, first_bias, second_bias)
    hidden = x @ W1.T + (0.0 if first_bias is None else first_bias)
    expected = hidden @ W2.T + (0.0 if second_bias is None else second_bias)
    got = x @ merged.weight.T + (0.0 if merged.bias is None else merged.bias)
    np.testing.assert_allclose(got, expected, atol=1e-12)
    assert (merged.bias is None) == (first_bias is None and second_bias is None)


def test_neurons_by_what_the_output_loses() -> None:
    hidden = np.abs(RANDOM.normal(size=(64, 7)))
    hidden[:, 2] = 0.0
    scores = neuron_importance(hidden, W2)
    alone = [np.sqrt(((hidden[:, [i]] @ W2[:, [i]].T) ** 2).sum(1).mean()) for i in range(7)]
    np.testing.assert_allclose(scores, alone, atol=1e-12)
    cut = keep_neurons(Linear(W1, B1), Linear(W2, B2), scores, 6)
    assert cut.kept == (0, 1, 3, 4, 5, 6)
    np.testing.assert_allclose(hidden[:, cut.kept] @ cut.second.weight.T, hidden @ W2.T, atol=1e-12)
    assert cut.first.weight.shape == (6, 4)
    assert cut.first.bias is not None
    np.testing.assert_array_equal(cut.second.bias, B2)
    assert keep_neurons(Linear(W1, None), Linear(W2, None), np.ones(7), 3).kept == (0, 1, 2)


def test_of_neurons_that_rounding_tells_apart_the_first_stay() -> None:
    eye = Linear(np.eye(7), None)
    for seed in range(8):
        noise = np.random.default_rng(seed).normal(size=7)
        scores = np.array([2.0, 1.0, 3.0, 1.0, 1.0, 0.5, 1.0]) * (1 + 1e-9 * noise)
        assert keep_neurons(eye, eye, scores, 4).kept == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: merge_linear(W1, W2, gate=W1), "shrink-unsupported"),
        (lambda: merge_linear(W1, W1), "argument-shape"),
        (lambda: merge_linear(W1, W2, B2), "argument-shape"),
        (lambda: merge_linear(W1 * np.nan, W2), "not-finite"),
        (lambda: neuron_importance(np.ones((3, 6)), W2), "argument-shape"),
        (lambda: keep_neurons(Linear(W1, B1), Linear(W2, B2), np.ones(7), 8), "argument-value"),
        (lambda: keep_neurons(Linear(W1, B1), Linear(W2, B2), np.ones(6), 3), "argument-shape"),
    ],
)
def test_refusals(call: Any, code: str) -> None:
    with pytest.raises(ShdError) as error:
        call()
    assert error.value.code == code
