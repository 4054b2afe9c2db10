"""Laws on calls in a row (NUM-2, NUM-9): no state, and results that a later call leaves alone.

An operation that is new to the judge needs an entry in ``CALLS`` here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.adapter import OUTPUTS, BrokenError, Missing, RefusedError, copy_of, take_output
from shd_ref.conformance.compare import as_numbers
from shd_ref.conformance.laws.answers import check_answer
from shd_ref.conformance.laws.law import WIDE, Array, Trial, as_array, broken, law
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


def _teacher_products(trial: Trial, seed: int) -> dict[str, Any]:
    names = ("teacher_queries", "teacher_keys")
    arrays = trial.numbers(seed, 2, 4, 3, 2), trial.numbers(seed + 1, 2, 2, 5, 2)
    return {**dict(zip(names, arrays, strict=True)), "teacher_scale": 0.5}


def _indexer(trial: Trial, seed: int) -> dict[str, Any]:
    keys = trial.numbers(seed + 2, 2, 1, 5, 2)
    scorer = {"queries": trial.numbers(seed + 3, 2, 2, 3, 2), "keys": keys, "scale": 0.5}
    return {**scorer, **_teacher_products(trial, seed)}


_OUTSIDE = np.array([0.5, 1.0, -2.0, 3.0])[None, :, None] * np.array([[[1.0, 0.5, 2.0]], [[-1.0, 1.5, 1.0]]])
_INDEXING: Mapping[str, Any] = {
    "scale": 0.25, "teacher_scale": 1.0, "groups": 2, "top_k": 2, "restriction": "mask_first", "reduction": "rows",
    "relu": False, "loss_mask": _MASK, "outside": _OUTSIDE,
}  # fmt: skip

_Make = Callable[[Trial, int], dict[str, Any]]

CALLS: Mapping[str, tuple[_Make, Mapping[str, Any]]] = {
    "softmax": (
        lambda trial, seed: {"attn_logits": trial.numbers(seed, 2, 2, 3, 5)},
        {"temperature": 3.0, "attn_mask": np.array([[True] * 4 + [False]] * 3)},
    ),
    "soften": (
        lambda trial, seed: {"attn_probs": trial.probs(seed, 2, 2, 3, 5), "temperature": 2.0},
        {"temperature": 3.0, "row_sums": "at_most_one"},
    ),
    "value_outputs": (_projected, {}),
    "merge_plan": (lambda _, seed: {"num_teacher_heads": 9 + seed % 2, "num_student_heads": 3}, {"kind": "balanced"}),
    "plan_groups": (lambda _, seed: {"plan": [[[0, 1], [2 + seed % 2, 4]], [[1, 2]]], "num_teacher_heads": 5}, {}),
    "solve_alpha": (_pair, {"rule": "as_printed", "query_mask": _MASK}),
    "compose_mixing": (
        lambda trial, seed: {
            "alphas": [trial.numbers(seed, 2, 2, low=0, high=16, shift=4)],
            "plan": [[[0, 1 + seed % 2], [2 - seed % 2, 3]]],
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
    "indexer_target": (_teacher_products, {"groups": 2, "block_size": 2, "outside": _OUTSIDE}),
    "indexer_loss": (_indexer, _INDEXING),
    "indexer_loss_gradient": (_indexer, _INDEXING),
    "intersect_support": (_student, {"attn_mask": np.array([[True] * 4 + [False]] * 3), "loss_mask": _MASK}),
    "layer_map": (lambda _, seed: {"num_teacher_layers": 12 + seed % 2, "num_student_layers": 5}, {}),
    "align_tokens": (
        lambda trial, seed: {"attn_probs": trial.probs(seed, 2, 2, 3, 5), "columns": [0, 2, 4]},
        {"columns": [3, 1, 0], "rows": [2, 0], "query_mask": _MASK},
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
"""A right call of every operation by seed, and options that the call between two equal ones has besides."""

_MASKED = {"attn_mask": np.array([[True] * 4 + [False]] * 3), "support": "intersect"}
_WRITTEN_OVER: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("shd_loss", "shd_loss_gradient", "shd_loss_gradient_qk"), _MASKED),
    "merge_plan": {"kind": [[[0, 1], [2, 3]]], "num_teacher_heads": 5, "num_student_heads": 3},
    "squeeze_heads": {"plan": [[[0, 1], [2, 3]]]},
    "diagnose": {"plan": [[[0, 1], [2, 3]]], "strategies": ["hard", "constant"]},
    "layer_map": {"pairs": [[0, 2], [1, 4]]},
}
"""Masks and lists that ``CALLS`` leaves out."""


def _numbers(value: Any, name: str) -> Iterator[tuple[str, Array]]:
    """Copies of all numbers of an answer, with their places."""
    numbers = as_numbers(value)
    if numbers is not None:
        yield name, numbers.copy()
        return
    if isinstance(value, Mapping):
        parts = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(str(index), item) for index, item in enumerate(value)]
    else:
        parts = list(vars(value).items()) if hasattr(value, "__dict__") else []
    for key, item in parts:
        yield from _numbers(item, f"{name}.{key}")


def numbers_of(trial: Trial, operation: str, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """All numbers of an answer, by their places."""
    return _copied(operation, trial.subject.run(operation, inputs))


def _copied(operation: str, answer: Any) -> dict[str, Array]:
    names = OUTPUTS[operation]
    return {path: array for name in names for path, array in _numbers(take_output(answer, name, names), name)}


def _survive(operation: str, trial: Trial) -> None:
    make, options = CALLS[operation]
    first = trial.subject.run(operation, make(trial, 9500))
    before = _copied(operation, first)
    if not before:
        raise broken(f"the answer of {operation}", "holds no numbers", "numbers", first)
    # All options at once, and each alone: the next call must know nothing of them.
    for name, arguments in (("other options", options), *((name, {name: value}) for name, value in options.items())):
        try:
            trial.subject.run(operation, {**make(trial, 9531), **arguments})
        except Missing:
            continue
        again = numbers_of(trial, operation, make(trial, 9500))
        same(before, again, f"the same call of {operation} after one with {name}", exact=False)
    other = numbers_of(trial, operation, make(trial, 9531))
    same(before, _copied(operation, first), f"after another call of {operation}, the first result", exact=True)
    # What a caller writes into an array or a list is new input, though the object is the same.
    for more in ({}, *filter(None, (options, _WRITTEN_OVER.get(operation)))):
        inputs, new = {**make(trial, 9500), **copy_of(more)}, {**make(trial, 9531), **_turned(more)}
        try:
            numbers_of(trial, operation, inputs)
            fresh = numbers_of(trial, operation, copy_of(new)) if more else other
            rewritten = numbers_of(trial, operation, _overwrite(inputs, new))
        except Missing:
            continue
        same(fresh, rewritten, f"{operation} of what was written over since the last call", exact=False)
    # A refused call leaves nothing behind either.
    with contextlib.suppress(Missing, RefusedError, BrokenError):
        trial.subject.run(operation, _spoiled({**make(trial, 9531), **options}))
    again = numbers_of(trial, operation, make(trial, 9500))
    same(before, again, f"the same call of {operation} after one that is refused", exact=False)
    for name, (make_other, asked) in CALLS.items():
        if not asked:
            continue  # it has no option that could stay behind
        try:
            trial.subject.run(name, {**make_other(trial, 9531), **asked})
        except (Missing, RefusedError, BrokenError):
            continue  # its own laws report it
        again = numbers_of(trial, operation, make(trial, 9500))
        same(before, again, f"the same call of {operation} after one of {name}", exact=False)


def _overwrite(old: Any, new: Any) -> Any:
    """The arrays and lists of one call with the numbers of another, all the way down."""
    if isinstance(old, np.ndarray):
        old[...] = new
        return old
    if isinstance(old, list):
        old[:] = map(_overwrite, old, new)
        return old
    if isinstance(old, tuple):
        return tuple(map(_overwrite, old, new))
    return {name: _overwrite(old[name], value) for name, value in new.items()} if isinstance(old, Mapping) else new


def _turned(value: Any) -> Any:
    """Other masks and lists of the same size: the other way round, all the way down, and other strategies."""
    if isinstance(value, Mapping):
        return {name: _turned(item) for name, item in value.items()}
    if isinstance(value, list):
        return ["shd", "mean"] if value == ["hard", "constant"] else [_turned(item) for item in reversed(value)]
    return value[..., ::-1].copy() if isinstance(value, np.ndarray) else value


def _spoiled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A call with NaN in its first array; where it has none, with a boolean for its first number."""
    for name, value in inputs.items():
        if isinstance(value, np.ndarray) and value.dtype != np.bool_:
            return {**inputs, name: np.full_like(value, np.nan)}
    return {**inputs, **{name: True for name, value in inputs.items() if isinstance(value, int)}}


def _few_numbers(trial: Trial, operation: str, batch: int, rows: int) -> dict[str, Any]:
    """A call of the same bytes for any batch and rows of one product."""
    maps, numbers = trial.probs(9541, batch * rows * 4, 5), trial.numbers(9542, batch * rows * 4 * 5)
    inputs = {"supervision": maps.reshape(batch, rows, 4, 5), "student_logits": numbers.reshape(batch, rows, 4, 5)}
    heads, width = batch * 4 * 5, rows
    calls: dict[str, dict[str, Any]] = {
        "softmax": {"attn_logits": inputs["student_logits"]},
        "value_outputs": {
            "values": numbers[: batch * rows * 10].reshape(batch, 2, rows, 5),
            "output_projection": trial.numbers(9543, 10, 3),
        },
        "solve_alpha": {
            **{f"probs_{head}": maps[n::4].reshape(batch, rows, 5) for n, head in enumerate("pq")},
            **{f"value_outputs_{head}": numbers[n::4].reshape(batch, 5, rows) for n, head in enumerate("pq")},
        },
        "squeeze_heads": {
            "teacher_probs": maps.reshape(batch, 4, rows, 5),
            "value_outputs": numbers[: heads * width].reshape(batch, 4, 5, rows),
            "num_student_heads": 2,
        },
        "gram_tensor": {
            "teacher_probs": maps.reshape(batch, 4, rows, 5),
            "values": numbers[: batch * rows * 10].reshape(batch, 2, 5, rows),
            "output_projection": trial.numbers(9544, 4 * rows * batch).reshape(4 * rows, batch),
        },
        "shd_loss": inputs,
        "shd_loss_gradient": inputs,
    }
    return {name: np.ascontiguousarray(v) if isinstance(v, np.ndarray) else v for name, v in calls[operation].items()}


_NUMBERS = {
    "softmax": "attn_logits", "value_outputs": "values", "solve_alpha": "value_outputs_q",
    "squeeze_heads": "value_outputs", "gram_tensor": "values",
    "shd_loss": "student_logits", "shd_loss_gradient": "student_logits",
}  # fmt: skip


def _resembling(operation: str, trial: Trial) -> None:
    """Arrays that have much in common: their bytes, or all but one number."""
    calls = [_few_numbers(trial, operation, batch, rows) for batch, rows in ((2, 3), (3, 2))]
    name = _NUMBERS[operation]
    for index in (1, -1, calls[0][name].size // 2):
        array = calls[0][name].copy()
        array.reshape(-1)[index] += 1.0
        calls.append({**calls[0], name: array})
    array = calls[0][name]
    calls.append({**calls[0], name: array.reshape(-1).reshape(array.shape, order="F")})
    _check_in_turn(trial, operation, calls)


def _check_in_turn(trial: Trial, operation: str, calls: Sequence[dict[str, Any]]) -> None:
    """Every call in turn and then the other way round."""
    for number in (*range(len(calls)), *reversed(range(len(calls)))):
        words = f"of call {number} of {len(calls)} that resemble each other"
        answer = check_answer(trial, operation, calls[number], words)
        if operation == "shd_loss_gradient":  # closer than gradients need be where they add up more than these
            for name, right in compute(operation, calls[number]).items():
                what = f"{name} {words}, over its largest entry,"
                size = max(1.0, float(np.abs(right).max()))
                trial.agree(as_array(answer[name], what) / size, right / size, "probs", what, times=4)


# Calls that differ only in the order of something: a cache with too short a key confuses them.
_PLANS: tuple[list[list[list[int]]], ...] = (
    [[[0, 1], [2, 3]], [[0, 2]]], [[[1, 0], [2, 3]], [[0, 2]]], [[[2, 3], [0, 1]], [[0, 2]]],
    [[[0, 1], [3, 2]], [[2, 0]]], [[[0, 2], [1, 3]], [[0, 2]]], [[[0, 1], [2, 3]], [[0, 1]]],
)  # fmt: skip


def _alike(operation: str, trial: Trial) -> None:
    alphas = [trial.numbers(9601 + n, 2, 2 - n, low=1, high=15, shift=4) for n in (0, 1)]
    inputs: dict[str, dict[str, Any]] = {
        "plan_groups": {"num_teacher_heads": 5},
        "merge_plan": {"num_teacher_heads": 5, "num_student_heads": 2},
        "compose_mixing": {"alphas": alphas, "num_teacher_heads": 5},
        "squeeze_heads": {**_teacher(trial, 9611, 5), "strategy": "constant"},
    }
    name = "kind" if operation == "merge_plan" else "plan"
    _check_in_turn(trial, operation, [{**inputs[operation], name: plan} for plan in _PLANS])


def same(before: Mapping[str, Array], after: Mapping[str, Array], what: str, *, exact: bool) -> None:
    """All numbers of one answer are those of another, up to rounding, or bit for bit."""
    if before.keys() != after.keys():
        raise broken(what, "has other parts", str(sorted(before)), str(sorted(after)))
    for path, old in before.items():
        new = after[path]
        if old.shape != new.shape:
            raise broken(f"{what}, {path},", "has another shape", str(old.shape), str(new.shape))
        # The order of a sum may differ between calls; a state does more than a rounding.
        size = float(np.abs(old[np.isfinite(old)]).max(initial=0.0))
        if not np.allclose(new, old, rtol=0.0, atol=0.0 if exact else 1e-3 * size, equal_nan=True):
            raise broken(f"{what}, {path},", "is another", old, new)


LAWS = (
    *(
        law(f"results-survive-{operation.replace('_', '-')}", operation, "NUM-2 NUM-9",
            "A later call, of this or another operation, changes no earlier result and leaves nothing behind.",
            partial(_survive, operation))
        for operation in OUTPUTS
    ),
    *(
        law(f"resembling-calls-{operation.replace('_', '-')}", operation, "NUM-2 MAP-15",
            "Calls whose arrays have their bytes in common, or all but one number, are not taken for each other.",
            partial(_resembling, operation), WIDE)
        for operation in _NUMBERS
    ),
    *(
        law(f"alike-calls-{operation.replace('_', '-')}", operation, f"NUM-2 {spec}",
            "Calls that differ in an order alone are not taken for each other.", partial(_alike, operation))
        for operation, spec in (
            ("merge_plan", "PLAN-7"),
            ("plan_groups", "PLAN-6"),
            ("compose_mixing", "MIX-13"),
            ("squeeze_heads", "MIX-16"),
        )
    ),
)  # fmt: skip
