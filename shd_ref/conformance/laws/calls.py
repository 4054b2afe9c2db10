"""Laws on calls in a row (NUM-2, NUM-9): no state, and results that a later call leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.adapter import OUTPUTS, take_output
from shd_ref.conformance.compare import as_numbers
from shd_ref.conformance.laws.law import Array, Law, Trial, broken

_MASK = np.array([[True, False, True], [True, True, False]])


def _teacher(trial: Trial, seed: int) -> dict[str, Any]:
    return {
        "teacher_probs": trial.probs(seed, 2, 4, 3, 5),
        "value_outputs": trial.numbers(seed + 1, 2, 4, 5, 3),
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


def _survive(operation: str, trial: Trial) -> None:
    make, options = _CALLS[operation]
    names = OUTPUTS[operation]

    def numbers_of(answer: Any) -> dict[str, Array]:
        return {place: found for name in names for place, found in _numbers(take_output(answer, name, names), name)}

    first = trial.subject.run(operation, make(trial, 9500))
    before = numbers_of(first)
    trial.subject.run(operation, {**make(trial, 9531), **options})
    trial.subject.run(operation, make(trial, 9531))
    if not before:
        raise broken(f"the answer of {operation}", "holds no numbers", "numbers", first)
    _same(before, numbers_of(first), f"after another call of {operation}, the first result", exact=True)
    again = numbers_of(trial.subject.run(operation, make(trial, 9500)))
    _same(before, again, f"the same call of {operation} after another", exact=False)


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


LAWS = tuple(
    Law(
        f"law/results-survive-{operation.replace('_', '-')}",
        (operation,),
        ("NUM-2", "NUM-9"),
        "A later call changes no earlier result, and leaves nothing behind for the next.",
        partial(_survive, operation),
    )
    for operation in OUTPUTS
)
