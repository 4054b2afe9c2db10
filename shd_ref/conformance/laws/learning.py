"""Laws of the chapters LOSS, GRAD and TOKEN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shd_ref.conformance.compare import Difference, compare_close
from shd_ref.conformance.laws.law import Array, Law, LawBrokenError, Trial, as_array, exactly, law, require
from shd_ref.conformance.specification import agreement

_MASK = np.array([[True, True, False, True], [True, False, False, False]])
_DIVERGENCES = ("kl", "reverse_kl", "js", "mse")


def _target(trial: Trial, seed: int, *shape: int) -> Array:
    """Supervision with mass on every key, so that every divergence is finite."""
    size = shape[-1]
    return trial.rounded((trial.probs(seed, *shape, bits=5) + 1.0 / size) / 2.0)


def _inputs(trial: Trial, seed: int) -> dict[str, Array]:
    shape = (2, 3, 4, 4)
    return {"supervision": _target(trial, seed, *shape), "student_logits": trial.numbers(seed + 1, *shape)}


def _loss(trial: Trial, **inputs: Any) -> float:
    value = trial.numbers_of("shd_loss", **inputs)
    require(value.shape == (), "shd_loss", "one number", f"shape {list(value.shape)}")
    return float(value)


def _zero_iff_equal(trial: Trial) -> None:
    inputs = _inputs(trial, 401)
    target = inputs["supervision"]
    same = trial.rounded(np.log(target.astype(np.float64)))
    for divergence in _DIVERGENCES:
        equal = _loss(
            trial, supervision=inputs["supervision"], student_logits=trial.rounded(same), divergence=divergence
        )
        trial.agree(equal, 0.0, "loss", f"the {divergence} loss of equal maps", times=12)
        apart = _loss(trial, **inputs, divergence=divergence)
        require(apart > 0.05, f"the {divergence} loss of different maps", "well above 0", f"{apart:.9g}")


def _one_hot(trial: Trial) -> None:
    logits = trial.numbers(405, 2, 2, 3, 5)
    chosen = np.arange(3) + 1
    target = np.zeros(logits.shape)
    target[:, :, np.arange(3), chosen] = 1.0
    for factor in (1.0, 64.0):
        z = logits.astype(np.float64) * factor
        peak = z.max(-1, keepdims=True)
        log_probs = z - peak - np.log(np.exp(z - peak).sum(-1, keepdims=True))
        expected = -log_probs[:, :, np.arange(3), chosen].mean((0, 2)).sum()
        got = _loss(trial, supervision=trial.rounded(target), student_logits=trial.rounded(z))
        what = f"the loss of one-hot rows, -log Q of the chosen keys, with logits up to {np.abs(z).max():g},"
        trial.agree(got, expected, "loss", what)


def _masked_rows(trial: Trial) -> None:
    # A row without mass counts as little as one outside of loss_mask.
    inputs = _inputs(trial, 429)
    empty = np.where(_MASK[:, None, :, None], inputs["supervision"], 0.0).astype(inputs["supervision"].dtype)
    masked = _loss(trial, **inputs, loss_mask=_MASK)
    without = _loss(trial, supervision=empty, student_logits=inputs["student_logits"])
    trial.agree(without, masked, "loss", "the loss with zero rows, against the same rows masked,")
    blocked = np.where(_MASK[:, None, :, None], inputs["student_logits"], -np.inf)
    finite = _loss(trial, supervision=empty, student_logits=trial.rounded(blocked))
    trial.agree(finite, masked, "loss", "the loss where the student's rows are fully masked too")


def _empty(trial: Trial) -> None:
    inputs = _inputs(trial, 433)
    nothing = np.zeros((2, 4), dtype=np.bool_)
    for divergence in _DIVERGENCES:
        exactly(
            _loss(trial, **inputs, loss_mask=nothing, divergence=divergence), 0.0, f"{divergence} with an empty mask"
        )


def _scaled(trial: Trial) -> None:
    inputs = _inputs(trial, 437)
    loss = _loss(trial, **inputs)
    trial.agree(_loss(trial, **inputs, beta=2.5), 2.5 * loss, "loss", "the loss with beta=2.5")
    exactly(_loss(trial, **inputs, beta=0.0), 0.0, "the loss with beta=0")
    trial.agree(_loss(trial, **inputs, reduction="mean"), loss / 3, "loss", "the mean over three heads")


def _attn_mask(trial: Trial) -> None:
    causal = np.tril(np.ones((4, 4), dtype=np.bool_))
    target = trial.probs(453, 2, 3, 4, 4, causal=True)
    logits = trial.numbers(454, 2, 3, 4, 4)
    masked = _loss(trial, supervision=target, student_logits=logits, attn_mask=causal)
    blocked = trial.rounded(np.where(causal, logits, -np.inf))
    other = _loss(trial, supervision=target, student_logits=blocked)
    trial.agree(other, masked, "loss", "logits of -inf, against the same keys in attn_mask,")
    shifted = _loss(trial, supervision=target, student_logits=trial.rounded(logits * 1024.0), attn_mask=causal)
    require(bool(np.isfinite(shifted)), "the loss of logits as large as 3072", "finite", f"{shifted:.9g}")


def _far_logits(trial: Trial) -> None:
    # What is masked is left out, not made small: here it is far larger than what is allowed.
    target = trial.rounded(np.broadcast_to([0.5, 0.25, 0.25, 0.0], (2, 3, 4, 4)))
    keys = np.array([True, True, True, False])
    near = trial.numbers(458, 2, 3, 4, 4, low=-4, high=4, shift=0)
    for masked in (0.0, 24576.0):
        far_logits = trial.rounded(np.where(keys, near - 24576.0, masked))
        plain = trial.rounded(np.where(keys, far_logits + 24576.0, 0.0))
        for divergence in _DIVERGENCES:
            calls = (
                {"supervision": target, "student_logits": logits, "attn_mask": keys, "divergence": divergence}
                for logits in (far_logits, plain)
            )
            losses, slopes = [], []
            for inputs in calls:
                losses.append(_loss(trial, **inputs))
                slopes.append(_gradient(trial, **inputs))
            what = f"{divergence} of logits far below a masked one of {masked:g}, against the same moved to 0,"
            trial.agree(losses[0], losses[1], "loss", what, times=2)
            trial.agree(slopes[0], slopes[1], "gradient", f"dz for {what}", times=2)


def _gradient(trial: Trial, **inputs: Any) -> Array:
    return as_array(trial.call("shd_loss_gradient", **inputs)["dz"], "dz")


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


def _finite_differences(trial: Trial) -> None:
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
            problem = f"dz with {_words(option)}, against finite differences of the loss, {difference.problem}"
            raise LawBrokenError(Difference(problem, difference.expected, difference.got))


def _words(option: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" if isinstance(v, str | float) else k for k, v in option.items()) or "defaults"


def _formula(trial: Trial) -> None:
    inputs = _inputs(trial, 465)
    P, z = (array.astype(np.float64) for array in inputs.values())
    for temperature, beta in ((1.0, 1.0), (2.0, 0.5), (0.5, 2.0)):
        powers = np.exp(z / temperature)
        Q = powers / powers.sum(-1, keepdims=True)
        s = P.sum(-1, keepdims=True)
        expected = np.where(_MASK[:, None, :, None], beta * (s * Q - P) / (4 * temperature), 0.0)
        options = {"temperature": temperature, "beta": beta, "loss_mask": _MASK}
        trial.agree(_gradient(trial, **inputs, **options), expected, "gradient", f"dz at temperature {temperature:g}")
        mean = _gradient(trial, **inputs, **options, reduction="mean")
        trial.agree(mean, expected / 3, "gradient", "dz with reduction='mean'")


def _zero_gradient(trial: Trial) -> None:
    keys = np.array([True, True, False, True])
    target = np.array([0.5, 0.25, 0.0, 0.25])
    logits = trial.numbers(469, 2, 3, 4, 4)
    supervision = trial.rounded(np.broadcast_to(target, logits.shape))
    for divergence in _DIVERGENCES:
        dz = _gradient(
            trial,
            supervision=supervision,
            student_logits=logits,
            attn_mask=keys[None, :],
            loss_mask=_MASK,
            divergence=divergence,
        )
        counted = np.broadcast_to(_MASK[:, None, :], (2, 3, 4))
        exactly(dz[~counted], 0.0, f"dz of {divergence} on rows that do not count")
        exactly(dz[..., ~keys], 0.0, f"dz of {divergence} on masked keys")
        trial.agree(dz.sum(-1), np.zeros((2, 3, 4)), "gradient", f"the sum of dz over keys, {divergence},", times=8)
        nothing = _gradient(
            trial,
            supervision=supervision,
            student_logits=logits,
            attn_mask=keys[None, :],
            loss_mask=np.zeros((2, 4), dtype=np.bool_),
            divergence=divergence,
        )
        exactly(nothing, 0.0, f"dz of {divergence} with an empty mask")


def _chain_rule(trial: Trial) -> None:
    queries, keys = trial.numbers(481, 2, 4, 4, 3), trial.numbers(482, 2, 2, 4, 3)
    target = trial.probs(483, 2, 4, 4, 4)
    scale = 0.5
    q, k = queries.astype(np.float64), np.repeat(keys.astype(np.float64), 2, axis=1)
    # A product of multiples of 1/8 is a multiple of 1/64: exact in float64 and float32 alone, so that the law has
    # its own softmax rather than the implementation's shd_loss_gradient at rounded logits.
    z = scale * (q @ k.swapaxes(-1, -2))
    Q = np.exp(z - z.max(-1, keepdims=True))
    Q /= Q.sum(-1, keepdims=True)
    dz = np.where(_MASK[:, None, :, None], (Q - target.astype(np.float64)) / 4, 0.0)
    got = trial.call(
        "shd_loss_gradient_qk", supervision=target, queries=queries, keys=keys, scale=scale, loss_mask=_MASK
    )
    dq, dk = (as_array(got[name], name) for name in ("dq", "dk"))
    trial.agree(dq, scale * dz @ k, "gradient", "dq, scale * dz k,", times=4)
    per_query_head = scale * dz.swapaxes(-1, -2) @ q
    expected = per_query_head.reshape(2, 2, 2, 4, 3).sum(2)
    trial.agree(dk, expected, "gradient", "dk, summed over the query heads that read a key head,", times=8)
    counted = np.broadcast_to(_MASK[:, None, :], (2, 4, 4))
    exactly(dq[~counted], 0.0, "dq on rows that do not count")


def _intersected(trial: Trial) -> None:
    target = trial.probs(485, 2, 2, 4, 4)
    logits = trial.numbers(486, 2, 2, 4, 4)
    keys = np.array([[True, True, False, True]] * 3 + [[True] * 4])
    got = trial.call("intersect_support", supervision=target, student_logits=logits, attn_mask=keys)
    P = target.astype(np.float64)
    dropped = np.where(keys, 0.0, P).sum(-1)
    trial.agree(got["dropped"], dropped, "probs", "the dropped mass")
    kept = np.where(keys, P, 0.0)
    left = kept.sum(-1, keepdims=True)
    expected = np.where(left > 0, kept / np.where(left > 0, left, 1.0), 0.0)
    supervision = as_array(got["supervision"], "supervision")
    trial.agree(supervision, expected, "probs", "the intersected maps: kept mass scaled back to the row's sum,")
    exactly(supervision[np.broadcast_to(~keys, P.shape)], 0.0, "the mass where the student may not attend")
    loss = _loss(trial, supervision=target, student_logits=logits, attn_mask=keys, support="intersect")
    exps = np.where(keys, np.exp(logits.astype(np.float64)), 0.0)
    Q = exps / exps.sum(-1, keepdims=True)
    shared = expected > 0
    terms = np.where(shared, expected * np.log(np.where(shared, expected, 1.0) / np.where(shared, Q, 1.0)), 0.0)
    number = (expected.sum(-1) > 0).sum((0, 2))
    kl = (terms.sum((-1, 0, 2)) / number).sum()
    trial.agree(loss, kl, "loss", "the loss with support='intersect', against the intersected maps,")


def _aligned(trial: Trial) -> None:
    maps = trial.probs(489, 2, 2, 4, 5)
    got = trial.call("align_tokens", attn_probs=maps, rows=[3, 0, 2], columns=[4, 1, 2])
    P = maps.astype(np.float64)[:, :, [3, 0, 2]]
    kept, mass = P[..., [4, 1, 2]], P.sum(-1, keepdims=True)
    left = kept.sum(-1, keepdims=True)
    expected = np.where(left > 0, kept * mass / np.where(left > 0, left, 1.0), 0.0)
    trial.agree(got["probs"], expected, "probs", "the aligned maps: listed rows and columns, scaled back,")
    trial.agree(got["dropped"], P[..., [0, 3]].sum(-1), "probs", "the dropped mass")
    whole = trial.call("align_tokens", attn_probs=maps)
    exactly(whole["probs"], maps, "maps aligned with nothing left out")
    exactly(whole["dropped"], np.zeros((2, 2, 4)), "the dropped mass of nothing")


def _law(
    name: str, operations: tuple[str, ...], spec: tuple[str, ...], comment: str, statement: Any, **more: Any
) -> Law:
    return law(name, operations, spec, comment, statement, **more)


_LOSS, _GRADIENT = ("shd_loss",), ("shd_loss_gradient",)

LAWS = (
    law("loss-zero-iff-equal", _LOSS, "LOSS-1 LOSS-11 LOSS-17",
        "Every divergence is 0 for equal maps and above 0 for others.", _zero_iff_equal),
    law("loss-one-hot", _LOSS, "LOSS-1 LOSS-12", "For one-hot rows the loss is -log Q.", _one_hot),
    law("loss-zero-rows", _LOSS, "LOSS-4 LOSS-16 MAP-2", "Rows without mass do not count, and never make NaN.",
        _masked_rows),
    law("loss-empty-mask", _LOSS, "LOSS-7", "Without a counted row the loss is exactly 0.", _empty),
    law("loss-beta-and-mean", _LOSS, "LOSS-2 LOSS-5",
        "beta multiplies, and reduction='mean' divides by the number of maps.", _scaled),
    law("loss-attn-mask", _LOSS, "LOSS-12 LOSS-16 MAP-7",
        "A masked key is one with logit -inf, and large logits give a finite loss.", _attn_mask),
    law("loss-far-logits", "shd_loss shd_loss_gradient", "LOSS-16 MAP-2",
        "Masked keys are left out of the student's softmax, however large their logits are.", _far_logits),
    law("gradient-finite-differences", "shd_loss shd_loss_gradient", "LOSS-8 GRAD-1 GRAD-2 LOSS-14",
        "The gradient is the slope of the implementation's own loss.", _finite_differences, dtypes=("float64",)),
    law("gradient-formula", _GRADIENT, "LOSS-8 GRAD-1",
        "The gradient of KL is beta (s Q - P) / (n T) on counted rows.", _formula),
    law("gradient-zeros", _GRADIENT, "LOSS-7 LOSS-8 GRAD-3",
        "The gradient is exactly 0 on uncounted rows and masked keys, and sums to 0 over keys.", _zero_gradient),
    law("gradient-queries-and-keys", "shd_loss_gradient_qk", "GRAD-4 GRAD-5 GRAD-6",
        "Gradients of queries and keys follow from dz by the chain rule, shared key heads summed.", _chain_rule),
    law("support-intersected", "intersect_support shd_loss", "LOSS-14 LOSS-15",
        "Mass outside of the student's support is dropped, reported, and the row scaled back.", _intersected),
    law("tokens-aligned", "align_tokens", "TOKEN-1 TOKEN-2 TOKEN-3",
        "Listed positions are kept in order, rows scaled back, and what was dropped is reported.", _aligned),
)  # fmt: skip
