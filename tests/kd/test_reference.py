"""The reference's gradients are the slopes of its losses, and draws are unbiased."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shd_ref import ShdError
from shd_ref.kd import (
    hidden_loss,
    hidden_loss_gradient,
    kd_loss,
    kd_loss_gradient,
    kd_targets_sampled,
    kd_targets_topk,
    linear_kd_loss,
    linear_kd_loss_gradient,
    systematic_uniforms,
)

Array = NDArray[Any]
RNG = np.random.default_rng(7)
TEACHER, STUDENT = 3 * RNG.standard_normal((2, 3, 7)), 2 * RNG.standard_normal((2, 3, 7))
MASK = np.array([[True, True, False], [True, True, True]])
TARGETS: dict[str, Callable[[float], Any]] = {
    "logits": lambda temperature: TEACHER,
    "topk": lambda temperature: kd_targets_topk(TEACHER, 3, temperature=temperature),
    "whole": lambda temperature: kd_targets_topk(TEACHER, 7, temperature=temperature),
    "sampled": lambda temperature: kd_targets_sampled(
        TEACHER, systematic_uniforms((2, 3), 5, 1), keep=2, power=0.7, temperature=temperature
    ),
}


def slopes(function: Callable[[Array], float], at: Array, step: float = 1e-5) -> Array:
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        moved = np.zeros_like(at)
        moved[place] = step
        found[place] = (function(at + moved) - function(at - moved)) / (2 * step)
    return found


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "jsd", "cross_entropy"])
@pytest.mark.parametrize("kind", TARGETS)
def test_gradient_is_the_slope(kind: str, divergence: str, temperature: float) -> None:
    targets = TARGETS[kind](temperature)
    keywords: dict[str, Any] = {
        "divergence": divergence,
        "mixing": 0.3,
        "temperature": temperature,
        "loss_mask": MASK,
    }
    if kind == "sampled" and divergence in ("reverse_kl", "jsd"):
        with pytest.raises(ShdError, match="biased"):
            kd_loss(targets, STUDENT, **keywords)
        return
    for options in ({"reduction": "mean"}, {"reduction": "batch_mean", "t_squared": False}):
        got = kd_loss_gradient(targets, STUDENT, **keywords, **options)
        wanted = slopes(lambda z, options=options: kd_loss(targets, z, **keywords, **options), STUDENT)
        np.testing.assert_allclose(got, wanted, atol=2e-9)
        assert (got[~MASK] == 0.0).all()


def test_linear_gradients_are_slopes() -> None:
    hidden, weight, bias = (RNG.standard_normal(shape) for shape in ((2, 3, 4), (7, 4), (7,)))
    targets = TARGETS["topk"](2.0)
    got = linear_kd_loss_gradient(targets, hidden, weight, bias)
    wanted = (
        slopes(lambda x: linear_kd_loss(targets, x, weight, bias), hidden),
        slopes(lambda x: linear_kd_loss(targets, hidden, x, bias), weight),
        slopes(lambda x: linear_kd_loss(targets, hidden, weight, x), bias),
    )
    for left, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(left, right, atol=2e-9)


@pytest.mark.parametrize("distance", ["mse", "cosine", "normalized_mse"])
def test_hidden_gradient_is_the_slope(distance: str) -> None:
    got = hidden_loss_gradient([STUDENT, STUDENT], [TEACHER, STUDENT], distance=distance, loss_mask=MASK)
    wanted = slopes(lambda s: hidden_loss(s, TEACHER, distance=distance, loss_mask=MASK), STUDENT)
    np.testing.assert_allclose(got[0], wanted, atol=2e-9)
    np.testing.assert_allclose(got[1], 0.0, atol=1e-15)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_draws_are_unbiased(power: float) -> None:
    points = (np.arange(1 << 16) + 0.5) / (1 << 16)
    drawn = kd_targets_sampled(TEACHER[:1, 0], points[None], keep=2, power=power)
    found = np.bincount(drawn.ids[0], drawn.weights[0], minlength=7)
    probs = np.exp(TEACHER[0, 0]) / np.exp(TEACHER[0, 0]).sum()
    np.testing.assert_allclose(found, probs, atol=1e-4)
    if power == 1.0:
        assert drawn.weights.sum() == pytest.approx(1.0, abs=1e-12)


def test_gradient_of_draws_is_right_in_the_mean() -> None:
    wanted = kd_loss_gradient(TEACHER[:1, :1], STUDENT[:1, :1])
    offsets = (np.arange(4096) + 0.5) / 4096
    uniforms = ((np.arange(3) + offsets[:, None]) / 3)[:, None]  # systematic draws from every start
    many = kd_targets_sampled(np.repeat(TEACHER[:1, :1], 4096, 0), uniforms)
    got = kd_loss_gradient(many, np.repeat(STUDENT[:1, :1], 4096, 0)).sum(axis=0)
    np.testing.assert_allclose(got[None], wanted, atol=1e-3)


def test_temperature_belongs_to_the_record() -> None:
    targets = TARGETS["topk"](2.0)
    assert kd_loss(targets, STUDENT) == kd_loss(targets, STUDENT, temperature=2.0)
    with pytest.raises(ShdError, match="temperature must be 2, that of the targets") as caught:
        kd_loss(targets, STUDENT, temperature=1.0)
    assert caught.value.code == "argument-value"


def test_renormalised_targets_are_targets_without_a_tail() -> None:
    topk = TARGETS["topk"](1.0)
    probs = np.exp(topk.log_probs) / np.exp(topk.log_probs).sum(-1, keepdims=True)
    bare = topk._replace(log_probs=np.log(probs), log_tail=np.full((2, 3), -np.inf))
    log_q = STUDENT - np.log(np.exp(STUDENT).sum(-1, keepdims=True))
    wanted = (probs * (np.log(probs) - np.take_along_axis(log_q, topk.ids, -1))).sum(-1).mean()
    assert kd_loss(bare, STUDENT) == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(ShdError) as caught:
        kd_loss(bare, STUDENT, divergence="reverse_kl")
    assert caught.value.code == "support-mismatch"
    assert np.isfinite(kd_loss(bare, STUDENT, divergence="jsd"))


def test_padded_vocabulary_is_cut_with_a_check() -> None:
    padded = np.concatenate((TEACHER, np.full((2, 3, 2), -30.0)), axis=-1)
    wide = np.concatenate((STUDENT, RNG.standard_normal((2, 3, 2))), axis=-1)
    assert kd_loss(padded, wide, vocab_size=7) == pytest.approx(kd_loss(TEACHER, STUDENT), rel=1e-12)
    gradient = kd_loss_gradient(padded, wide, vocab_size=7)
    assert (gradient[..., 7:] == 0.0).all()
    for call in (
        lambda: kd_loss(wide, padded, vocab_size=7),
        lambda: kd_targets_topk(wide, 2, vocab_size=7),
        lambda: kd_targets_sampled(wide, np.zeros((2, 3, 1)), vocab_size=7),
    ):
        with pytest.raises(ShdError, match="must cut padding alone"):
            call()
