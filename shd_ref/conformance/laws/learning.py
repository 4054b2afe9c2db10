"""Laws of the chapters LOSS, GRAD and TOKEN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shd_ref.conformance.compare import Difference, compare_close
from shd_ref.conformance.laws.answers import check_answer
from shd_ref.conformance.laws.law import Array, LawBrokenError, Laws, Trial, as_array, exactly, in_words, require
from shd_ref.conformance.specification import agreement
from shd_ref.conformance.variants import compute

LAWS = Laws()
_MASK = np.array([[True, True, False, True], [True, False, False, False]])
_DIVERGENCES = ("kl", "reverse_kl", "js", "mse")


def _target(trial: Trial, seed: int, *shape: int) -> Array:
    """Supervision with mass on every key, so that every divergence is finite."""
    return trial.rounded((trial.probs(seed, *shape, bits=5) + 1.0 / shape[-1]) / 2.0)


def _inputs(trial: Trial, seed: int) -> dict[str, Array]:
    shape = (2, 3, 4, 4)
    return {"supervision": _target(trial, seed, *shape), "student_logits": trial.numbers(seed + 1, *shape)}


def _loss(trial: Trial, **inputs: Any) -> float:
    value = trial.numbers_of("shd_loss", **inputs)
    require(value.shape == (), "shd_loss", "one number", f"shape {list(value.shape)}")
    return float(value)


def _gradient(trial: Trial, **inputs: Any) -> Array:
    return as_array(trial.call("shd_loss_gradient", **inputs)["dz"], "dz")


def _check(trial: Trial, operation: str, inputs: dict[str, Any], times: float = 1.0) -> dict[str, Any]:
    """One call of a loss or a gradient against its formula, more closely than over many options."""
    answer = trial.call(operation, **inputs)
    for name, right in compute(operation, inputs).items():
        quantity = "loss" if operation == "shd_loss" else "gradient"
        trial.agree(answer[name], right, quantity, f"{name} with {in_words(inputs)}", times=times)
    return answer


@LAWS.add("loss-zero-iff-equal", "shd_loss", "LOSS-1 LOSS-11 LOSS-17")
def _zero_iff_equal(trial: Trial) -> None:
    """Every divergence is 0 for equal maps and above 0 for others."""
    inputs = _inputs(trial, 401)
    same = trial.rounded(np.log(inputs["supervision"].astype(np.float64)))
    for divergence in _DIVERGENCES:
        equal = _loss(trial, **{**inputs, "student_logits": same}, divergence=divergence)
        trial.agree(equal, 0.0, "loss", f"the {divergence} loss of equal maps", times=12)
        apart = _loss(trial, **inputs, divergence=divergence)
        require(apart > 0.05, f"the {divergence} loss of different maps", "well above 0", f"{apart:.9g}")


@LAWS.add("loss-one-hot", "shd_loss", "LOSS-1 LOSS-12")
def _one_hot(trial: Trial) -> None:
    """For one-hot rows the loss is -log Q."""
    logits = trial.numbers(405, 2, 2, 3, 5)
    target = trial.rounded(np.broadcast_to(np.eye(5)[1:4], logits.shape))
    for factor in (1.0, 64.0):
        _check(trial, "shd_loss", {"supervision": target, "student_logits": trial.rounded(logits * factor)})


@LAWS.add("loss-zero-rows", "shd_loss", "LOSS-4 LOSS-16 MAP-2")
def _masked_rows(trial: Trial) -> None:
    """Rows without mass do not count, and never make NaN."""
    inputs = _inputs(trial, 429)
    empty = trial.rounded(np.where(_MASK[:, None, :, None], inputs["supervision"], 0.0))
    blocked = trial.rounded(np.where(_MASK[:, None, :, None], inputs["student_logits"], -np.inf))
    _check(trial, "shd_loss", {**inputs, "loss_mask": _MASK})
    _check(trial, "shd_loss", {**inputs, "supervision": empty})
    _check(trial, "shd_loss", {"supervision": empty, "student_logits": blocked})


@LAWS.add("loss-empty-mask", "shd_loss", "LOSS-7")
def _empty(trial: Trial) -> None:
    """Without a counted row the loss is exactly 0."""
    for divergence in _DIVERGENCES:
        loss = _loss(trial, **_inputs(trial, 433), loss_mask=np.zeros((2, 4), dtype=np.bool_), divergence=divergence)
        exactly(loss, 0.0, f"{divergence} with an empty mask")


@LAWS.add("loss-beta-and-mean", "shd_loss", "LOSS-2 LOSS-5")
def _scaled(trial: Trial) -> None:
    """beta multiplies, and reduction='mean' divides by the number of maps."""
    inputs = _inputs(trial, 437)
    for options in ({}, {"beta": 2.5}, {"reduction": "mean"}):
        _check(trial, "shd_loss", {**inputs, **options})
    exactly(_loss(trial, **inputs, beta=0.0), 0.0, "the loss with beta=0")


@LAWS.add("loss-attn-mask", "shd_loss", "LOSS-12 LOSS-16 MAP-7")
def _attn_mask(trial: Trial) -> None:
    """A masked key is one with logit -inf, and large logits give a finite loss."""
    causal = np.tril(np.ones((4, 4), dtype=np.bool_))
    inputs = {"supervision": trial.probs(453, 2, 3, 4, 4, causal=True)}
    logits = trial.numbers(454, 2, 3, 4, 4)
    _check(trial, "shd_loss", {**inputs, "student_logits": logits, "attn_mask": causal})
    _check(trial, "shd_loss", {**inputs, "student_logits": trial.rounded(np.where(causal, logits, -np.inf))})
    large = _loss(trial, **inputs, student_logits=trial.rounded(logits * 1024.0), attn_mask=causal)
    require(bool(np.isfinite(large)), "the loss of logits as large as 3072", "finite", f"{large:.9g}")


@LAWS.add("loss-far-logits", "shd_loss shd_loss_gradient", "LOSS-16 MAP-2")
def _far_logits(trial: Trial) -> None:
    """Masked keys are left out of the student's softmax, however large their logits are."""
    target = trial.rounded(np.broadcast_to([0.5, 0.25, 0.25, 0.0], (2, 3, 4, 4)))
    keys = np.array([True, True, True, False])
    near = trial.numbers(458, 2, 3, 4, 4, low=-4, high=4, shift=0)
    for masked in (0.0, 24576.0):
        far_logits = trial.rounded(np.where(keys, near - 24576.0, masked))
        for divergence in _DIVERGENCES:
            for logits in (far_logits, trial.rounded(np.where(keys, far_logits + 24576.0, 0.0))):
                inputs = {
                    "supervision": target,
                    "student_logits": logits,
                    "attn_mask": keys,
                    "divergence": divergence,
                }
                _check(trial, "shd_loss", inputs)
                _check(trial, "shd_loss_gradient", inputs)


def _differences(trial: Trial, inputs: dict[str, Any], name: str) -> Array:
    """Central finite differences of the implementation's own loss with respect to one argument."""
    step = 2.0**-16
    point = inputs[name]
    slopes = np.zeros(point.shape)
    for index in np.ndindex(*point.shape):
        if np.isneginf(point[index]):
            continue
        values = []
        for sign in (1.0, -1.0):
            moved = point.copy()
            moved[index] += sign * step
            values.append(_loss(trial, **{**inputs, name: moved}))
        slopes[index] = (values[0] - values[1]) / (2 * step)
    return slopes


@LAWS.add("gradient-finite-differences", "shd_loss shd_loss_gradient", "LOSS-8 GRAD-1 GRAD-2 LOSS-14", ("float64",))
def _finite_differences(trial: Trial) -> None:
    """The gradient is the slope of the implementation's own loss."""
    shape = (2, 1, 2, 3)
    base = {"supervision": _target(trial, 461, *shape), "student_logits": trial.numbers(462, *shape)}
    mask = np.array([[True, False], [True, True]])
    options: Sequence[dict[str, Any]] = (
        {},
        {"temperature": 2.0, "beta": 0.5, "loss_mask": mask},
        {"reduction": "mean", "divergence": "reverse_kl", "temperature": 0.5},
        {"divergence": "js", "loss_mask": mask, "temperature": 2.0},
        {"divergence": "mse", "beta": 3.0, "temperature": 2.0},
        {"row_sums": "at_most_one", "supervision": base["supervision"] * 0.5, "temperature": 2.0},
        {"attn_mask": np.array([[True, False, True], [True, True, False]]), "support": "intersect"},
    )
    for option in options:
        inputs = {**base, **option}
        gradient = _gradient(trial, **inputs)
        slopes = _differences(trial, inputs, "student_logits")
        # Differences truncate and cancel: what is left of float64 is about what float32 holds.
        difference = compare_close(slopes, gradient, *agreement("float32", "gradient"))
        if difference:
            problem = f"dz with {in_words(option)}, against finite differences of the loss, {difference.problem}"
            raise LawBrokenError(Difference(problem, difference.expected, difference.got))


@LAWS.add("gradient-formula", "shd_loss_gradient", "LOSS-8 GRAD-1")
def _formula(trial: Trial) -> None:
    """The gradient of KL is beta (s Q - P) / (n T) on counted rows."""
    inputs = {**_inputs(trial, 465), "loss_mask": _MASK}
    for temperature, beta in ((1.0, 1.0), (2.0, 0.5), (0.5, 2.0)):
        for options in ({}, {"reduction": "mean"}):
            scale = {"temperature": temperature, "beta": beta}
            _check(trial, "shd_loss_gradient", {**inputs, **scale, **options})


@LAWS.add("gradient-zeros", "shd_loss_gradient", "LOSS-7 LOSS-8 GRAD-3")
def _zero_gradient(trial: Trial) -> None:
    """The gradient is exactly 0 on uncounted rows and masked keys, and sums to 0 over keys."""
    keys = np.array([True, True, False, True])
    logits = trial.numbers(469, 2, 3, 4, 4)
    supervision = trial.rounded(np.broadcast_to([0.5, 0.25, 0.0, 0.25], logits.shape))
    inputs = {"supervision": supervision, "student_logits": logits, "attn_mask": keys[None, :]}
    counted = np.broadcast_to(_MASK[:, None, :], (2, 3, 4))
    for divergence in _DIVERGENCES:
        dz = _gradient(trial, **inputs, loss_mask=_MASK, divergence=divergence)
        exactly(dz[~counted], 0.0, f"dz of {divergence} on rows that do not count")
        exactly(dz[..., ~keys], 0.0, f"dz of {divergence} on masked keys")
        trial.agree(dz.sum(-1), np.zeros((2, 3, 4)), "gradient", f"the sum of dz over keys, {divergence},", times=8)
        nothing = _gradient(trial, **inputs, loss_mask=np.zeros((2, 4), dtype=np.bool_), divergence=divergence)
        exactly(nothing, 0.0, f"dz of {divergence} with an empty mask")


@LAWS.add("gradient-queries-and-keys", "shd_loss_gradient_qk", "GRAD-4 GRAD-5 GRAD-6")
def _chain_rule(trial: Trial) -> None:
    """Gradients of queries and keys follow from dz by the chain rule, shared key heads summed."""
    arrays = {"queries": trial.numbers(481, 2, 4, 4, 3), "keys": trial.numbers(482, 2, 2, 4, 3)}
    inputs = {"supervision": trial.probs(483, 2, 4, 4, 4), **arrays, "scale": 0.5, "loss_mask": _MASK}
    dq = as_array(_check(trial, "shd_loss_gradient_qk", inputs, times=4)["dq"], "dq")
    exactly(dq[~np.broadcast_to(_MASK[:, None, :], (2, 4, 4))], 0.0, "dq on rows that do not count")


@LAWS.add("support-intersected", "intersect_support shd_loss", "LOSS-14 LOSS-15")
def _intersected(trial: Trial) -> None:
    """Mass outside of the student's support is dropped, reported, and the row scaled back."""
    arrays = {"supervision": trial.probs(485, 2, 2, 4, 4), "student_logits": trial.numbers(486, 2, 2, 4, 4)}
    inputs = {**arrays, "attn_mask": np.array([[True, True, False, True]] * 3 + [[True] * 4])}
    check_answer(trial, "intersect_support", inputs)
    _check(trial, "shd_loss", {**inputs, "support": "intersect"})


@LAWS.add("tokens-aligned", "align_tokens", "TOKEN-1 TOKEN-2 TOKEN-3")
def _aligned(trial: Trial) -> None:
    """Listed positions are kept in order, rows scaled back, and what was dropped is reported."""
    maps = trial.probs(489, 2, 2, 4, 5)
    check_answer(trial, "align_tokens", {"attn_probs": maps, "rows": [3, 0, 2], "columns": [4, 1, 2]})
    check_answer(trial, "align_tokens", {"attn_probs": maps})
