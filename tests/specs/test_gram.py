"""The gram tensor agrees with chapter ALPHA, through every round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shd_ref import (
    ShdError,
    compose_mixing,
    gram_tensor,
    merge_gram,
    softmax,
    solve_alpha_from_gram,
    squeeze_heads,
    value_outputs,
)


def teacher(heads: int = 4, value_heads: int = 4, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    probs = softmax(rng.normal(size=(2, heads, 5, 6)) * 2)
    return probs, rng.normal(size=(2, value_heads, 6, 3)), rng.normal(size=(heads * 3, 8))


def test_entries_are_inner_products() -> None:
    probs, values, projection = teacher(3, 3)
    outputs = value_outputs(values, projection)
    mask = np.array([[True] * 5, [True, False, True, False, False]])
    gram = gram_tensor(probs, values, projection, query_mask=mask)
    products = np.einsum("bils,bjsd->bijld", probs, outputs)
    expected = np.einsum("bijld,bkmld,bl->bijkm", products, products, mask.astype(float))
    np.testing.assert_allclose(gram, expected, atol=1e-11)


@pytest.mark.parametrize("alpha_per", ["map", "row"])
@pytest.mark.parametrize("value_heads", [4, 2, 1])
def test_every_round_agrees_with_the_maps(alpha_per: str, value_heads: int) -> None:
    probs, values, projection = teacher(value_heads=value_heads)
    mask = np.array([[True] * 5, [True, False, True, False, True]])
    result = squeeze_heads(probs, value_outputs(values, projection), 1, query_mask=mask, alpha_per=alpha_per)
    gram = gram_tensor(probs, values, projection, query_mask=mask, alpha_per=alpha_per)
    second = solve_alpha_from_gram(gram, 2, 3)  # the round (0, 1), (2, 3), merged from last to first
    first = solve_alpha_from_gram(gram, 0, 1)
    gram = merge_gram(gram, 2, 3, second)
    gram = merge_gram(gram, 1, 2, first)  # heads 0 and 1 moved one place
    last = solve_alpha_from_gram(gram, 0, 1)
    alphas = (np.stack([first, second], axis=1), last[:, None])
    for got, want in zip(alphas, result.alphas, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-9)
    np.testing.assert_allclose(compose_mixing(alphas, result.plan, 4), result.mixing, atol=1e-9)
    assert merge_gram(gram, 0, 1, last).shape == (2, 1, 1, 1, 1) + ((5,) if alpha_per == "row" else ())


def test_equal_maps_are_degenerate() -> None:
    probs, values, projection = teacher(2, 2)
    probs[:, 1] = probs[:, 0]
    assert solve_alpha_from_gram(gram_tensor(probs, values, projection), 0, 1).tolist() == [0.5, 0.5]


def test_sinks() -> None:
    probs, values, projection = teacher(2, 2)
    probs *= np.random.default_rng(1).uniform(0.3, 1.0, size=(2, 2, 5, 1))
    gram = gram_tensor(probs, values, projection, row_sums="at_most_one")
    result = squeeze_heads(probs, value_outputs(values, projection), 1, row_sums="at_most_one")
    np.testing.assert_allclose(solve_alpha_from_gram(gram, 0, 1), result.alphas[0][:, 0], atol=1e-9)


def test_bad_arguments() -> None:
    probs, values, projection = teacher()
    gram = gram_tensor(probs, values, projection)
    calls = [
        ("argument-shape", lambda: gram_tensor(probs, values[:, :3], projection)),
        ("argument-shape", lambda: gram_tensor(probs, values[:, :, :5], projection)),
        ("argument-shape", lambda: gram_tensor(probs, values, projection[:9])),
        ("argument-shape", lambda: gram_tensor(probs[0], values, projection)),
        ("argument-value", lambda: gram_tensor(probs, values, projection, alpha_per="head")),
        ("argument-value", lambda: solve_alpha_from_gram(gram, 1, 1)),
        ("argument-value", lambda: solve_alpha_from_gram(gram, 0, 4)),
        ("argument-shape", lambda: solve_alpha_from_gram(gram[0], 0, 1)),
        ("argument-shape", lambda: merge_gram(gram, 0, 1, np.ones((2, 5)))),
    ]
    for code, call in calls:
        with pytest.raises(ShdError) as caught:
            call()
        assert caught.value.code == code
