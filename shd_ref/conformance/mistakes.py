"""The mistakes that newcomers make, recognised by what they give: ``specs/mistakes.json`` has the words.

Each is a call of the reference with something changed, or a few lines of its own. It decides nothing: a failure that
equals what a mistake would give is told in the mistake's words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import shd_ref
from shd_ref.attention import Array
from shd_ref.conformance.comparison import QUANTITIES, as_numbers, as_plain
from shd_ref.conformance.specification import agreement, load_mistakes

Inputs = Mapping[str, Any]


def _changed(inputs: Inputs, **changes: Any) -> dict[str, Any]:
    """The arguments with these, or without those that are None."""
    return {name: value for name, value in {**inputs, **changes}.items() if value is not None}


def _alpha(inputs: Inputs, *, clip: bool = True, shared: bool = False) -> Array:
    """The quotient of ALPHA-2 without the threshold of ALPHA-6: not clipped, or one for the whole batch."""
    a_p, a_q, x_p, x_q = (
        np.asarray(inputs[f"{name}_{side}"], np.float64) for name in ("probs", "value_outputs") for side in "pq"
    )
    m, u, mask = (a_p - a_q) @ (x_p + x_q), (a_p - a_q) @ x_p, inputs.get("query_mask")
    top, bottom = (((x * m).sum(-1) * (1 if mask is None else mask)).sum(-1) for x in (u, m))
    alpha = top.sum() / bottom.sum() + 0 * top if shared else top / bottom
    return np.asarray(np.clip(alpha, 0.0, 1.0) if clip else alpha)


def _squeeze(inputs: Inputs, *, merged: str = "sum", in_place: bool = False) -> dict[str, Any]:
    """MIX-4 with another value output of a merged head, or PLAN-4 with merged heads in the place of their first."""
    maps, outputs = (np.asarray(inputs[name], np.float64) for name in ("teacher_probs", "value_outputs"))
    heads = [(maps[:, t], outputs[:, t], np.tile(row, (len(maps), 1))) for t, row in enumerate(np.eye(maps.shape[1]))]
    given: dict[str, Any] = {"query_mask": inputs.get("query_mask"), "row_sums": "at_most_one"}
    for one in shd_ref.merge_plan(maps.shape[1], inputs["num_student_heads"], inputs.get("plan") or "progressive"):
        pool: dict[int, Any] = dict(enumerate(heads))
        for p, q in one:
            (a_p, x_p, c_p), (a_q, x_q, c_q) = heads[p], heads[q]
            a = shd_ref.solve_alpha(a_p, a_q, x_p, x_q, **given)[:, None, None]
            output = {"sum": x_p + x_q, "mean": (x_p + x_q) / 2, "mixed": a * x_p + (1 - a) * x_q}[merged]
            pool[p] = a * a_p + (1 - a) * a_q, output, a[:, 0] * c_p + (1 - a[:, 0]) * c_q
            del pool[q]
        heads = [*([] if in_place else [pool.pop(p) for p, _ in one]), *pool.values()]
    probs, mixing = (np.stack([head[part] for head in heads], axis=1) for part in (0, 2))
    return {"probs": probs, "mixing": mixing}


def _plan(inputs: Inputs, way: str) -> Any:
    """PLAN-5 with too many pairs, or the last ones."""
    heads, students, rounds = int(inputs["num_teacher_heads"]), int(inputs["num_student_heads"]), []
    while heads > students:
        count = heads // 2 if way == "overshoot" else min(heads // 2, heads - students)
        first = heads - 2 * count if way == "last" else 0
        rounds.append([[first + 2 * i, first + 2 * i + 1] for i in range(count)])
        heads -= count
    return rounds


def _loss(inputs: Inputs, *, term: str = "kl", divide: str = "") -> float:
    """LOSS-1 to -5 with another divergence or denominator."""
    total, num_maps = 0.0, 0
    maps, logits, mask = inputs["supervision"], inputs["student_logits"], inputs.get("loss_mask")
    for p, z in zip(maps, logits, strict=True) if isinstance(maps, list) else [(maps, logits)]:
        q = shd_ref.softmax(z, inputs.get("attn_mask"), temperature=inputs.get("temperature", 1))
        counted = (p.sum(-1) > 0) & (True if mask is None else mask[:, None])
        log_p, log_q = (np.log(np.where(x > 0, x, 1.0)) for x in (np.asarray(p, np.float64), q))
        terms = {"kl": p * (log_p - log_q), "cross entropy": -p * log_q, "reversed": q * (log_q - log_p)}[term]
        of_rows, num_maps = terms.sum(-1) * counted, num_maps + p.shape[1]
        if divide == "sample":
            total += (of_rows.sum(-1) / np.maximum(counted.sum(-1), 1)).mean(0).sum()
        else:
            number = {"all": counted[:, 0].size, "none": 1}.get(divide) or np.maximum(counted.sum((0, 2)), 1)
            total += (of_rows.sum((0, 2)) / number).sum()
    return float(inputs.get("beta", 1)) * float(total) / (num_maps if inputs.get("reduction") == "mean" else 1)


def _filled(inputs: Inputs, fill: float) -> Array:
    probs = shd_ref.softmax(**inputs)
    return np.where(probs.sum(-1, keepdims=True) == 0, fill or 1 / probs.shape[-1], probs)


def _cycled(inputs: Inputs) -> Array:
    values, weights = inputs["values"], inputs["output_projection"]
    heads = weights.shape[0] // values.shape[3]
    return np.asarray(values[:, np.arange(heads) % values.shape[1]] @ weights.reshape(heads, values.shape[3], -1))


def _layers(inputs: Inputs, rounded: Callable[[float], int]) -> Any:
    teachers, students = int(inputs["num_teacher_layers"]), int(inputs["num_student_layers"])
    return [[s - 1, rounded(s * teachers / students) - 1] for s in range(1, students + 1)]


def _late(inputs: Inputs) -> dict[str, Any]:
    sharp = shd_ref.squeeze_heads(**_changed(inputs, temperature=None)).probs
    return {"probs": shd_ref.soften(sharp, inputs["temperature"], row_sums="at_most_one")}


# By operation and name: the arguments that the mistake changes, or what it gives.
MISTAKES: dict[str, dict[str, dict[str, Any] | Callable[[Inputs], Any]]] = {
    "solve_alpha": {
        "alpha-misprinted": {"rule": "as_printed"},
        "alpha-swapped": lambda i: 1 - shd_ref.solve_alpha(**i),
        "alpha-unclipped": lambda i: _alpha(i, clip=False),
        "alpha-padded-rows": {"query_mask": None},
        "alpha-solved-once": lambda i: _alpha(i, shared=True),
        "degenerate-formula": _alpha,
    },
    "squeeze_heads": {
        "alpha-misprinted": {"alpha_rule": "as_printed"},
        "alpha-padded-rows": {"query_mask": None},
        "merged-outputs-mean": lambda i: _squeeze(i, merged="mean"),
        "merged-outputs-mixed": lambda i: _squeeze(i, merged="mixed"),
        "pool-in-place": lambda i: _squeeze(i, in_place=True),
        "temperature-ignored": {"temperature": None},
        "softened-after": _late,
    },
    "softmax": {
        "attn-mask-inverted": lambda i: shd_ref.softmax(**{**i, "attn_mask": ~i["attn_mask"]}),
        "attn-mask-ignored": {"attn_mask": None},
        "masked-row-is-nan": lambda i: _filled(i, np.nan),
        "masked-row-is-uniform": lambda i: _filled(i, 0.0),
        "temperature-inverted": lambda i: shd_ref.softmax(**{**i, "temperature": 1 / i["temperature"]}),
        "temperature-ignored": {"temperature": None},
    },
    "value_outputs": {"value-heads-cycled": _cycled},
    "merge_plan": {"plan-overshoot": lambda i: _plan(i, "overshoot"), "plan-last-pairs": lambda i: _plan(i, "last")},
    "shd_loss": {
        "cross-entropy-called-kl": lambda i: _loss(i, term="cross entropy"),
        "kl-reversed": lambda i: _loss(i, term="reversed"),
        "mean-over-all-rows": lambda i: _loss(i, divide="all"),
        "mean-per-sample": lambda i: _loss(i, divide="sample"),
        "rows-summed": lambda i: _loss(i, divide="none"),
        "loss-padded-rows": {"loss_mask": None},
        "loss-times-t-squared": lambda i: shd_ref.shd_loss(**i) * i["temperature"] ** 2,
    },
    "shd_loss_gradient": {"gradient-sign": lambda i: -np.asarray(shd_ref.shd_loss_gradient(**i))},
    "layer_map": {"layers-floor": lambda i: _layers(i, int), "layers-half-even": lambda i: _layers(i, round)},
}


def recognise(
    operation: str, inputs: Inputs, right: Mapping[str, Any], got: Mapping[str, Any], output: str, dtype: str
) -> list[str]:
    """The sentences of the mistakes that give this wrong output of a call; empty where none does."""
    found = []
    for name, mistake in MISTAKES.get(operation, {}).items():
        try:
            with np.errstate(all="ignore"):
                call = getattr(shd_ref, operation)
                wrong = mistake(inputs) if callable(mistake) else call(**_changed(inputs, **mistake))
        except Exception:
            continue  # inputs outside what the mistake is about
        if operation == "squeeze_heads":
            wrong = wrong.get(output) if isinstance(wrong, dict) else getattr(wrong, output)
        if _same(wrong, got.get(output), output, dtype) and not _same(wrong, right.get(output), output, dtype):
            found.append(load_mistakes()[name])
    return found


def _same(left: Any, right: Any, output: str, dtype: str) -> bool:
    if output in ("plan", "pairs"):
        return bool(as_plain(left) == as_plain(right))
    if isinstance(left, Sequence):
        same = isinstance(right, Sequence) and len(left) == len(right) > 0
        return same and all(_same(*pair, output, dtype) for pair in zip(left, right, strict=True))
    a, b = (as_numbers(value) for value in (left, right))
    if a is None or b is None or a.shape != b.shape:
        return False
    atol, rtol = agreement(dtype, QUANTITIES.get(output, "probs"))
    return bool(np.allclose(a, b, atol=atol, rtol=rtol, equal_nan=True))
