"""Rows that sum below one (MAP-9): alpha, mixing, softening and every refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shd_ref import ShdError, align_tokens, intersect_support, shd_loss, soften, softmax, solve_alpha, squeeze_heads
from shd_ref.merging.mixing import STRATEGIES


def teacher_with_sinks(*, batch: int = 2, heads: int = 4, rows: int = 5, keys: int = 6, seed: int = 0) -> Any:
    """Maps of a softmax with one more logit that has no key, and value outputs."""
    rng = np.random.default_rng(seed)
    probs = softmax(rng.normal(size=(batch, heads, rows, keys + 1)))[..., 1:]
    return probs, rng.normal(size=(batch, heads, keys, 7))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("alpha_per", ["map", "row"])
def test_merged_rows_have_the_mixed_mass(strategy: str, alpha_per: str) -> None:
    probs, outputs = teacher_with_sinks()
    keywords: Any = {"strategy": strategy, "alpha_per": alpha_per, "row_sums": "at_most_one"}
    for temperature in (1.0, 3.0):
        result = squeeze_heads(probs, outputs, 2, temperature=temperature, **keywords)
        mixing = result.mixing if alpha_per == "row" else result.mixing[..., None]
        mass = (mixing * probs.sum(-1)[:, None]).sum(axis=2)
        np.testing.assert_allclose(result.probs.sum(-1), mass, atol=1e-12)
        assert (mass < 0.999).all()


def test_alpha_is_the_minimum_on_the_maps_as_they_are() -> None:
    probs, outputs = teacher_with_sinks(heads=2, seed=1)
    p, q, x, y = probs[:, 0], probs[:, 1], outputs[:, 0], outputs[:, 1]
    alpha = solve_alpha(p, q, x, y, row_sums="at_most_one")
    grid = np.linspace(0, 1, 1001)
    errors = [(((a * p + (1 - a) * q) @ (x + y) - p @ x - q @ y) ** 2).sum((1, 2)) for a in grid]
    np.testing.assert_allclose(alpha, grid[np.argmin(errors, axis=0)], atol=6e-4)
    filled = solve_alpha(p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True), x, y)
    assert np.abs(alpha - filled).max() > 1e-3


def test_softening_keeps_each_row_s_mass() -> None:
    probs, _ = teacher_with_sinks()
    soft = soften(probs, 2.5, row_sums="at_most_one")
    np.testing.assert_allclose(soft.sum(-1), probs.sum(-1), rtol=1e-12)
    mass = probs.sum(-1, keepdims=True)
    np.testing.assert_allclose(soft, soften(probs / mass, 2.5) * mass, rtol=1e-12)
    assert soften([[0.0, 0.0]], 2.5, row_sums="at_most_one").tolist() == [[0.0, 0.0]]
    assert soften(probs, 1.0, row_sums="at_most_one").tolist() == probs.tolist()


@pytest.mark.parametrize("temperature", [1e-4, 1e-300])
def test_a_small_temperature_leaves_the_largest_entry(temperature: float) -> None:
    assert soften([[0.25, 0.75]], temperature).tolist() == [[0.0, 1.0]]
    assert soften([[1e-200, 3e-200]], temperature, row_sums="at_most_one").tolist() == [[0.0, 4e-200]]
    assert soften([[0.5, 0.25]], temperature, row_sums="at_most_one").tolist() == [[0.75, 0.0]]


def test_rows_that_sum_to_one_give_the_same_either_way() -> None:
    rng = np.random.default_rng(3)
    probs, outputs = softmax(rng.normal(size=(2, 4, 5, 6))), rng.normal(size=(2, 4, 6, 7))
    strict = squeeze_heads(probs, outputs, 2, temperature=2.0)
    relaxed = squeeze_heads(probs, outputs, 2, temperature=2.0, row_sums="at_most_one")
    np.testing.assert_allclose(strict.probs, relaxed.probs, atol=1e-14)
    logits = rng.normal(size=(2, 2, 5, 6))
    for divergence in ("kl", "reverse_kl", "js", "mse"):
        one = shd_loss(strict.probs, logits, divergence=divergence)
        assert one == pytest.approx(shd_loss(strict.probs, logits, divergence=divergence, row_sums="at_most_one"))


@pytest.mark.parametrize("call", ["solve_alpha", "squeeze_heads", "shd_loss", "intersect_support", "align_tokens"])
def test_sums_are_checked_as_asked(call: str) -> None:
    probs, outputs = teacher_with_sinks(heads=2)
    logits = np.zeros_like(probs)

    def run(maps: Any, **keywords: Any) -> Any:
        if call == "solve_alpha":
            return solve_alpha(maps[:, 0], maps[:, 1], outputs[:, 0], outputs[:, 1], **keywords)
        if call == "squeeze_heads":
            return squeeze_heads(maps, outputs, 1, **keywords)
        if call == "shd_loss":
            return shd_loss(maps, logits, **keywords)
        return (
            intersect_support(maps, logits, **keywords)
            if call == "intersect_support"
            else align_tokens(maps, **keywords)
        )

    run(probs, row_sums="at_most_one")
    for maps, row_sums in ((probs, "one"), (probs * 1.5, "at_most_one")):
        with pytest.raises(ShdError) as caught:
            run(maps, row_sums=row_sums)
        assert caught.value.code == "not-a-distribution"
    with pytest.raises(ShdError) as caught:
        run(probs, row_sums="any")
    assert caught.value.code == "argument-value"


def test_a_row_that_is_all_sink_does_not_count() -> None:
    maps = np.array([[[[0.0, 0.0], [0.25, 0.25]]]])
    logits = np.log(np.array([[[[0.9, 0.1], [0.5, 0.5]]]]))
    assert shd_loss(maps, logits, row_sums="at_most_one") == pytest.approx(0.0, abs=1e-15)
    logits[0, 0, 1, 0] += np.log(3.0)  # the student's row is now [3/4, 1/4]
    by_hand = 0.5 * (np.log(0.5 / 0.75) + np.log(0.5 / 0.25)) / 2
    assert shd_loss(maps, logits, row_sums="at_most_one") == pytest.approx(by_hand, rel=1e-12)
