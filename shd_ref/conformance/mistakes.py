"""The mistakes that newcomers make, recognised by their results.

``specs/mistakes.json`` has a sentence for each, and by operation how to get its result: the reference with other
arguments (null: left out), or a function of this file with its options. Nothing is judged here: an answer that has
failed already, and equals the result of a mistake, is explained by its sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import shd_ref
from shd_ref.attention import Array
from shd_ref.conformance.comparison import compare, fields_of
from shd_ref.conformance.generator import Inputs
from shd_ref.conformance.specification import load_mistakes
from shd_ref.merging.mixing import make_pool, merge_round


def _answer(call: Any, inputs: Inputs, times: float = 1, plus: float = 0, power_of_t: int = 0) -> Any:
    """The reference's answer times a factor and a power of the temperature, plus a number."""
    return plus + times * np.asarray(call(**inputs)) * (inputs["temperature"] ** power_of_t if power_of_t else 1)


def _inverse(call: Any, inputs: Inputs, argument: str) -> Any:
    """A mask with the opposite meaning, or 1 / T in place of T."""
    value = inputs[argument]
    return call(**{**inputs, argument: ~value if isinstance(value, np.ndarray) else 1 / value})


def _empty_rows(call: Any, inputs: Inputs, fill: str) -> Array:
    probs = call(**inputs)
    return np.where(probs.sum(-1, keepdims=True) == 0, np.nan if fill == "nan" else 1 / probs.shape[-1], probs)


def _softened_after(call: Any, inputs: Inputs) -> dict[str, Any]:
    sharp = call(**{name: value for name, value in inputs.items() if name != "temperature"}).probs
    return {"probs": shd_ref.soften(sharp, inputs["temperature"], row_sums="at_most_one")}


def _cycled(_: Any, inputs: Inputs) -> Array:
    """Query head i reads value head i mod H_kv, in place of i // (H_t / H_kv) (MAP-6)."""
    values, weights = inputs["values"], inputs["output_projection"]
    heads = weights.shape[0] // values.shape[3]
    return np.asarray(values[:, np.arange(heads) % values.shape[1]] @ weights.reshape(heads, values.shape[3], -1))


def _quotient(_: Any, inputs: Inputs, *, clipped: bool = True, shared: bool = False) -> Array:
    """ALPHA-2 without the threshold of ALPHA-6: not clipped, or one for the whole batch."""
    a_p, a_q, x_p, x_q = (
        np.asarray(inputs[f"{name}_{side}"], np.float64) for name in ("probs", "value_outputs") for side in "pq"
    )
    m, u, mask = (a_p - a_q) @ (x_p + x_q), (a_p - a_q) @ x_p, inputs.get("query_mask")
    numerators, denominators = (((x * m).sum(-1) * (1 if mask is None else mask)).sum(-1) for x in (u, m))
    alpha = numerators.sum() / denominators.sum() + 0 * numerators if shared else numerators / denominators  # (B,)
    return np.asarray(np.clip(alpha, 0.0, 1.0) if clipped else alpha)


def _pool(_: Any, inputs: Inputs, *, merged: str = "sum", in_place: bool = False) -> dict[str, Any]:
    """MIX-4 with another value output of a merged head, or PLAN-4 with merged heads in the place of their first."""
    pool = make_pool(*(np.asarray(inputs[name], np.float64) for name in ("teacher_probs", "value_outputs")))
    for pairs in shd_ref.merge_plan(len(pool), inputs["num_student_heads"], inputs.get("plan") or "progressive"):
        heads, solutions = merge_round(pool, pairs, query_mask=inputs.get("query_mask"))
        for number, ((p, q), solution) in enumerate(zip(pairs, solutions, strict=True)):
            a, x_p, x_q = solution.clipped[:, None, None], pool[p][1], pool[q][1]
            output = {"sum": x_p + x_q, "mean": (x_p + x_q) / 2, "mixed": a * x_p + (1 - a) * x_q}[merged]
            heads[number] = heads[number][0], output
        used = [place for pair in pairs for place in pair]
        places = [pair[0] for pair in pairs] + [place for place in range(len(pool)) if place not in used]
        pool = [heads[number] for number in np.argsort(places)] if in_place else heads
    return {"probs": np.stack([maps for maps, _ in pool], axis=1)}


def _rounds(_: Any, inputs: Inputs, pairs: str) -> Any:
    """PLAN-5 with all pairs of every round, or the last ones."""
    heads, students, rounds = int(inputs["num_teacher_heads"]), int(inputs["num_student_heads"]), []
    while heads > students:
        count = heads // 2 if pairs == "all" else min(heads // 2, heads - students)
        first = heads - 2 * count if pairs == "last" else 0
        rounds.append([[first + 2 * i, first + 2 * i + 1] for i in range(count)])
        heads -= count
    return rounds


def _layers(_: Any, inputs: Inputs, halves: str) -> Any:
    teachers, students = int(inputs["num_teacher_layers"]), int(inputs["num_student_layers"])
    rounded = int if halves == "down" else round
    return [[s - 1, rounded(s * teachers / students) - 1] for s in range(1, students + 1)]


def _loss(_: Any, inputs: Inputs, *, term: str = "kl", divide: str = "") -> float:
    """LOSS-1 to -5 with another divergence or denominator."""
    total, num_maps = 0.0, 0
    maps, logits, mask = inputs["supervision"], inputs["student_logits"], inputs.get("loss_mask")
    for p, z in zip(maps, logits, strict=True) if isinstance(maps, list) else [(maps, logits)]:
        q = shd_ref.softmax(z, inputs.get("attn_mask"), temperature=inputs.get("temperature", 1))
        counted = (p.sum(-1) > 0) & (True if mask is None else mask[:, None])
        log_p, log_q = (np.log(np.where(x > 0, x, 1.0)) for x in (np.asarray(p, np.float64), q))
        terms = {"kl": p * (log_p - log_q), "cross entropy": -p * log_q, "reversed": q * (log_q - log_p)}[term]
        row_losses, num_maps = terms.sum(-1) * counted, num_maps + p.shape[1]
        if divide == "sample":
            total += (row_losses.sum(-1) / np.maximum(counted.sum(-1), 1)).mean(0).sum()
        else:
            num_rows = {"all": counted[:, 0].size, "none": 1}.get(divide) or np.maximum(counted.sum((0, 2)), 1)
            total += (row_losses.sum((0, 2)) / num_rows).sum()
    return float(inputs.get("beta", 1)) * float(total) / (num_maps if inputs.get("reduction") == "mean" else 1)


_FUNCTIONS = (_answer, _inverse, _empty_rows, _softened_after, _cycled, _quotient, _pool, _rounds, _layers, _loss)
# specs/mistakes.json names them without the underscore.
WAYS: dict[str, Callable[..., Any]] = {function.__name__[1:]: function for function in _FUNCTIONS}


def recognise(
    operation: str, inputs: Inputs, right: Mapping[str, Any], got: Mapping[str, Any], output: str, dtype: str
) -> list[str]:
    """The sentences of the mistakes that give this wrong output of a call; empty if none does."""
    sentences, call = [], getattr(shd_ref, operation)
    for mistake in load_mistakes().values():
        if not (options := dict(mistake["gives"].get(operation, {}))):
            continue
        try:
            with np.errstate(all="ignore"):
                if way := options.pop("way", None):
                    wrong = WAYS[way](call, inputs, **options)
                else:
                    wrong = call(
                        **{name: value for name, value in {**inputs, **options}.items() if value is not None}
                    )
        except Exception:
            continue  # inputs outside what the mistake is about
        wrong = fields_of(wrong).get(output) if operation == "squeeze_heads" else wrong
        answers = ({output: fields.get(output)} for fields in (got, right))
        is_got, is_right = (compare({output: wrong}, list, answer, dtype, inputs) is None for answer in answers)
        if is_got and not is_right:  # on some inputs a mistake changes nothing
            sentences.append(mistake["message"])
    return sentences
