"""Laws on calls in a row (NUM-2, NUM-9): no state, and results that a later call leaves alone.

An operation that is new to the judge needs an entry in ``_CALLS`` here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.adapter import OUTPUTS, BrokenError, Missing, RefusedError, take_output
from shd_ref.conformance.compare import as_numbers
from shd_ref.conformance.laws.law import Array, Law, Trial, broken, exactly
from shd_ref.conformance.variants import compute

_MASK = np.array([[True, False, True], [True, True, False]])


def _teacher(trial: Trial, seed: int, heads: int = 4) -> dict[str, Any]:
    return {
        "teacher_probs": trial.probs(seed, 2, heads, 3, 5),
        "value_outputs": trial.numbers(seed + 1, 2, heads, 5, 3),
        "num_student_heads": 2,
    }


def _pair(trial: Trial, seed: int) -> dict[str, Any]:
    return {
        "probs_p": trial.probs(seed, 2, 3, 5),
        "probs_q": trial.probs(seed + 1, 2, 3, 5),
        "value_outputs_p": trial.numbers(seed + 2, 2, 5, 4),
        "value_outputs_q": trial.numbers(seed + 3, 2, 5, 4),
    }


def _projected(trial: Trial, seed: int) -> dict[str, Any]:
    return {"values": trial.numbers(seed, 2, 2, 5, 3), "output_projection": trial.numbers(seed + 1, 12, 4)}


def _student(trial: Trial, seed: int) -> dict[str, Any]:
    return {"supervision": trial.probs(seed, 2, 2, 3, 5), "student_logits": trial.numbers(seed + 1, 2, 2, 3, 5)}


def _pool(trial: Trial, seed: int) -> Array:
    """A gram tensor of three heads."""
    maps = trial.probs(seed, 2, 3, 2, 4, bits=1).astype(np.float64)
    outputs = trial.numbers(seed + 1, 2, 3, 4, 2, low=-3, high=3, shift=0).astype(np.float64)
    products = np.einsum("bils,bjsd->bijld", maps, outputs)
    return trial.rounded(np.einsum("bijld,bmnld->bijmn", products, products))


_Make = Callable[[Trial, int], dict[str, Any]]

# A right call of every operation by seed, and options that the call between two equal ones has besides.
_CALLS: Mapping[str, tuple[_Make, Mapping[str, Any]]] = {
    "softmax": (
        lambda trial, seed: {"attn_logits": trial.numbers(seed, 2, 2, 3, 5)},
        {"temperature": 3.0, "attn_mask": np.array([[True] * 4 + [False]] * 3)},
    ),
    "soften": (
        lambda trial, seed: {"attn_probs": trial.probs(seed, 2, 2, 3, 5), "temperature": 2.0},
        {"temperature": 3.0, "row_sums": "at_most_one"},
    ),
    "value_outputs": (_projected, {}),
    "merge_plan": (
        lambda _, seed: {"num_teacher_heads": 9 + seed % 2, "num_student_heads": 3},
        {"kind": "balanced"},
    ),
    "plan_groups": (
        lambda _, seed: {"plan": [[[0, 1], [2 + seed % 2, 4]], [[1, 2]]], "num_teacher_heads": 5},
        {},
    ),
    "solve_alpha": (_pair, {"rule": "as_printed", "query_mask": _MASK}),
    "compose_mixing": (
        lambda trial, seed: {
            "alphas": [trial.numbers(seed, 2, 2, low=0, high=16, shift=4)],
            "plan": [[[0, 1], [2, 3]]],
            "num_teacher_heads": 4,
        },
        {},
    ),
    "mix_heads": (
        lambda trial, seed: {
            "teacher_probs": trial.probs(seed, 2, 3, 3, 5),
            "mixing": trial.probs(seed + 1, 2, 2, 3),
        },
        {},
    ),
    "squeeze_heads": (
        _teacher,
        {"strategy": "hard", "temperature": 2.0, "query_mask": _MASK, "alpha_from": "softened"},
    ),
    "shd_loss": (_student, {"temperature": 2.0, "beta": 3.0, "loss_mask": _MASK, "divergence": "js"}),
    "shd_loss_gradient": (_student, {"temperature": 2.0, "beta": 3.0, "loss_mask": _MASK, "divergence": "js"}),
    "shd_loss_gradient_qk": (
        lambda trial, seed: {
            "supervision": trial.probs(seed, 2, 2, 3, 5),
            "queries": trial.numbers(seed + 1, 2, 2, 3, 4),
            "keys": trial.numbers(seed + 2, 2, 1, 5, 4),
            "scale": 0.5,
        },
        {"temperature": 2.0, "beta": 3.0, "loss_mask": _MASK, "scale": 0.25},
    ),
    "intersect_support": (_student, {"attn_mask": np.array([[True] * 4 + [False]] * 3), "loss_mask": _MASK}),
    "layer_map": (lambda _, seed: {"num_teacher_layers": 12 + seed % 2, "num_student_layers": 5}, {}),
    "align_tokens": (
        lambda trial, seed: {"attn_probs": trial.probs(seed, 2, 2, 3, 5), "columns": [0, 2, 4]},
        {"columns": [3, 1, 0], "query_mask": _MASK},
    ),
    "gram_tensor": (
        lambda trial, seed: {"teacher_probs": trial.probs(seed, 2, 4, 3, 5), **_projected(trial, seed + 1)},
        {"query_mask": _MASK},
    ),
    "solve_alpha_from_gram": (lambda trial, seed: {"gram": _pool(trial, seed), "p": 0, "q": 2}, {}),
    "merge_gram": (
        lambda trial, seed: {
            "gram": _pool(trial, seed),
            "p": 0,
            "q": 2,
            "alpha": trial.numbers(seed + 5, 2, low=0, high=16, shift=4),
        },
        {},
    ),
    "matched_plan": (
        lambda trial, seed: {
            "calibration": [(trial.probs(seed, 2, 6, 3, 5), trial.numbers(seed + 1, 2, 6, 5, 3))],
            "num_student_heads": 3,
        },
        {"by": "similarity"},
    ),
    "diagnose": (_teacher, {"query_mask": _MASK, "plan": "balanced"}),
}


def _numbers(value: Any, name: str) -> Iterator[tuple[str, Array]]:
    """Copies of all numbers of an answer, with their places."""
    numbers = as_numbers(value)
    if numbers is not None:
        yield name, numbers.copy()
        return
    if isinstance(value, Mapping):
        parts = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(str(place), item) for place, item in enumerate(value)]
    else:
        parts = list(vars(value).items()) if hasattr(value, "__dict__") else []
    for key, item in parts:
        yield from _numbers(item, f"{name}.{key}")


def _numbers_of(trial: Trial, operation: str, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """All numbers of an answer, by their places."""
    return _copied(operation, trial.subject.run(operation, inputs))


def _copied(operation: str, answer: Any) -> dict[str, Array]:
    names = OUTPUTS[operation]
    return {place: found for name in names for place, found in _numbers(take_output(answer, name, names), name)}


def _survive(operation: str, trial: Trial) -> None:
    make, options = _CALLS[operation]
    first = trial.subject.run(operation, make(trial, 9500))
    before = _copied(operation, first)
    if not before:
        raise broken(f"the answer of {operation}", "holds no numbers", "numbers", first)
    # All options at once, and each alone: the next call must know nothing of them.
    for name, given in (("other options", options), *((name, {name: value}) for name, value in options.items())):
        try:
            trial.subject.run(operation, {**make(trial, 9531), **given})
        except Missing:
            continue
        again = _numbers_of(trial, operation, make(trial, 9500))
        _same(before, again, f"the same call of {operation} after one with {name}", exact=False)
    other = _numbers_of(trial, operation, make(trial, 9531))
    _same(before, _copied(operation, first), f"after another call of {operation}, the first result", exact=True)
    # What a caller writes into an array is new input, though the object is the same.
    inputs = make(trial, 9500)
    _numbers_of(trial, operation, inputs)
    if _overwrite(inputs, make(trial, 9531)):
        rewritten = _numbers_of(trial, operation, inputs)
        _same(other, rewritten, f"{operation} of arrays that were written over since the last call", exact=False)
    for name, (make_other, asked) in _CALLS.items():
        if not asked:
            continue  # it has no option that could stay behind
        try:
            trial.subject.run(name, {**make_other(trial, 9531), **asked})
        except (Missing, RefusedError, BrokenError):
            continue  # its own laws report it
        again = _numbers_of(trial, operation, make(trial, 9500))
        _same(before, again, f"the same call of {operation} after one of {name}", exact=False)


def _overwrite(old: Any, new: Any) -> bool:
    """Write one call's numbers into the arrays of another, all the way down; whether there were any."""
    if isinstance(old, np.ndarray):
        old[...] = new
        return True
    if isinstance(old, Mapping):
        written = [_overwrite(value, new[name]) for name, value in old.items()]
    elif isinstance(old, list | tuple):
        written = [_overwrite(*pair) for pair in zip(old, new, strict=True)]
    else:
        written = []
    return any(written)


# Calls that differ only in the order of something: a cache with too short a key confuses them.
_PLANS: tuple[list[list[list[int]]], ...] = (
    [[[0, 1], [2, 3]], [[0, 2]]], [[[1, 0], [2, 3]], [[0, 2]]], [[[2, 3], [0, 1]], [[0, 2]]],
    [[[0, 1], [3, 2]], [[2, 0]]], [[[0, 2], [1, 3]], [[0, 2]]], [[[0, 1], [2, 3]], [[0, 1]]],
)  # fmt: skip


def _alike(operation: str, trial: Trial) -> None:
    """Every call in turn and then the other way round, against what it gives."""
    calls = list(_similar_calls(operation, trial))
    for number in (*range(len(calls)), *reversed(range(len(calls)))):
        inputs, wanted = calls[number]
        got = trial.call(operation, **inputs)
        for name, right in wanted.items():
            what = f"{name} of call {number} of {len(calls)} that differ only in an order,"
            if isinstance(right, np.ndarray):
                trial.agree(got[name], right, "alpha" if operation == "compose_mixing" else "probs", what, times=2)
            else:
                exactly(got[name], right, what)


def _similar_calls(operation: str, trial: Trial) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for plan in _PLANS:
        groups = compute("plan_groups", {"plan": plan, "num_teacher_heads": 5})["groups"]
        if operation == "plan_groups":
            yield {"plan": plan, "num_teacher_heads": 5}, {"groups": groups}
        elif operation == "merge_plan":
            yield {"num_teacher_heads": 5, "num_student_heads": 2, "kind": plan}, {"plan": plan}
        elif operation == "compose_mixing":
            alphas = [trial.numbers(9601 + n, 2, 2 - n, low=1, high=15, shift=4) for n in (0, 1)]
            wide = [one_round.astype(np.float64) for one_round in alphas]
            yield {"alphas": alphas, "plan": plan, "num_teacher_heads": 5}, {"mixing": _composed(plan, wide)}
        else:
            inputs = {**_teacher(trial, 9611, 5), "plan": plan, "strategy": "constant"}
            half = [np.full((2, 2 - n), 0.5) for n in (0, 1)]
            maps = inputs["teacher_probs"].astype(np.float64)
            mixing = _composed(plan, half)
            yield inputs, {"mixing": mixing, "probs": np.einsum("bht,btls->bhls", mixing, maps), "plan": plan}


def _composed(plan: Sequence[Sequence[Sequence[int]]], alphas: Sequence[Array]) -> Array:
    pool = [np.broadcast_to(unit, (2, 5)) for unit in np.eye(5)]
    for one_round, given in zip(plan, alphas, strict=True):
        used = {head for pair in one_round for head in pair}
        merged = [given[:, [n]] * pool[p] + (1 - given[:, [n]]) * pool[q] for n, (p, q) in enumerate(one_round)]
        pool = merged + [head for place, head in enumerate(pool) if place not in used]
    return np.stack(pool, axis=1)


def _same(before: Mapping[str, Array], after: Mapping[str, Array], what: str, *, exact: bool) -> None:
    if before.keys() != after.keys():
        raise broken(what, "has other parts", str(sorted(before)), str(sorted(after)))
    for place, old in before.items():
        new = after[place]
        if old.shape != new.shape:
            raise broken(f"{what}, {place},", "has another shape", str(old.shape), str(new.shape))
        # The order of a sum may differ between calls; a state does more than a rounding.
        size = float(np.abs(old[np.isfinite(old)]).max(initial=0.0))
        if not np.allclose(new, old, rtol=0.0, atol=0.0 if exact else 1e-3 * size, equal_nan=True):
            raise broken(f"{what}, {place},", "is another", old, new)


LAWS = (
    *(
        Law(
            f"law/results-survive-{operation.replace('_', '-')}",
            (operation,),
            ("NUM-2", "NUM-9"),
            "A later call, of this or another operation, changes no earlier result and leaves nothing behind.",
            partial(_survive, operation),
        )
        for operation in OUTPUTS
    ),
    *(
        Law(
            f"law/alike-calls-{operation.replace('_', '-')}",
            (operation,),
            ("NUM-2", spec),
            "Calls that differ in an order alone are not taken for each other.",
            partial(_alike, operation),
        )
        for operation, spec in (
            ("merge_plan", "PLAN-7"),
            ("plan_groups", "PLAN-6"),
            ("compose_mixing", "MIX-13"),
            ("squeeze_heads", "MIX-16"),
        )
    ),
)
