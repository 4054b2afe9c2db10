"""Right calls of any size, for laws of refusals: maps with mass on every key, and what each array holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from shd_ref.conformance.laws.law import Array, Trial

Sizes: TypeAlias = Sequence[int]  # B, H, L, S
_Inputs: TypeAlias = dict[str, Any]


def _maps(trial: Trial, seed: int, *shape: int) -> Array:
    """Mass on every key, another in every row: halves of what is left, which every dtype holds."""
    row = 0.5 ** np.minimum(np.arange(1, shape[-1] + 1), shape[-1] - 1)
    turn = (np.arange(np.prod(shape)).reshape(shape) // shape[-1] + seed + np.arange(shape[-1])) % shape[-1]
    return trial.rounded(row[turn])


def _weights(trial: Trial, seed: int, *shape: int) -> Array:
    """Alphas from 0 to 1."""
    return trial.numbers(seed, *shape, low=0, high=16, shift=4)


def _pair(trial: Trial, sizes: Sizes) -> _Inputs:
    batch, _, rows, keys = sizes
    maps, outputs = [_maps(trial, seed, batch, rows, keys) for seed in (0, 1)], trial.numbers(8201, 2, batch, keys, 2)
    return {"probs_p": maps[0], "probs_q": maps[1], "value_outputs_p": outputs[0], "value_outputs_q": outputs[1]}


def _teacher(trial: Trial, sizes: Sizes) -> _Inputs:
    batch, heads, _, keys = sizes
    outputs = trial.numbers(8202, batch, heads, keys, 2)
    return {"teacher_probs": _maps(trial, 0, *sizes), "value_outputs": outputs, "num_student_heads": (heads + 1) // 2}


def _student(trial: Trial, sizes: Sizes) -> _Inputs:
    return {"supervision": _maps(trial, 0, *sizes), "student_logits": trial.numbers(8203, *sizes)}


def _products(trial: Trial, sizes: Sizes) -> _Inputs:
    batch, heads, rows, keys = sizes
    return {
        "supervision": _maps(trial, 0, *sizes),
        "queries": trial.numbers(8204, batch, heads, rows, 2),
        "keys": trial.numbers(8205, batch, 2 - heads % 2, keys, 2),
        "scale": 0.5,
    }


def _projected(trial: Trial, sizes: Sizes) -> _Inputs:
    batch, heads, _, keys = sizes
    values = trial.numbers(8206, batch, 2 - heads % 2, keys, 2)
    return {"values": values, "output_projection": trial.numbers(8207, 2 * heads, 3)}


def _composed(trial: Trial, sizes: Sizes) -> _Inputs:
    """All pairs at once, and then one by one."""
    batch, heads, rows, _ = sizes
    plan = [[[2 * i, 2 * i + 1] for i in range(heads // 2)], *([[[1, 0]]] * (heads - heads // 2 - 1))]
    alphas = [_weights(trial, 8209 + n, batch, len(one_round), rows) for n, one_round in enumerate(plan)]
    return {"alphas": alphas, "plan": plan, "num_teacher_heads": heads}


def _mixed(trial: Trial, sizes: Sizes) -> _Inputs:
    batch, heads, rows, _ = sizes
    mixing = np.ascontiguousarray(np.swapaxes(_maps(trial, 1, batch, 2, rows, heads), 2, 3))
    return {"teacher_probs": _maps(trial, 0, *sizes), "mixing": mixing}


def _gram(trial: Trial, sizes: Sizes) -> _Inputs:
    batch, _, rows, _ = sizes
    return {"gram": trial.rounded(np.abs(trial.numbers(8021, batch, 3, 3, 3, 3, rows))), "p": 2, "q": 0}


def _calibration(trial: Trial, sizes: Sizes) -> _Inputs:
    items = [tuple(_teacher(trial, sizes).values())[:2] for _ in range(3)]
    return {"calibration": items, "num_student_heads": (sizes[1] + 1) // 2}


_LOSS = "beta loss_mask attn_mask temperature reduction divergence support row_sums"
_STUDENT = "supervision:maps: student_logits:logits:"
_TEACHER = "teacher_probs:maps:013 value_outputs:numbers:012"
CALLS: Mapping[str, tuple[Callable[[Trial, Sizes], _Inputs], str, str]] = {
    "softmax": (
        lambda trial, sizes: {"attn_logits": trial.numbers(8208, *sizes)},
        "attn_logits:logits:",
        "attn_mask temperature",
    ),
    "soften": (
        lambda trial, sizes: {"attn_probs": _maps(trial, 0, *sizes), "temperature": 2.0},
        "attn_probs:maps:",
        "temperature row_sums",
    ),
    "value_outputs": (_projected, "values:numbers: output_projection:numbers:0", ""),
    "merge_plan": (
        lambda _, sizes: {"num_teacher_heads": sizes[1], "num_student_heads": (sizes[1] + 1) // 2},
        "",
        "num_student_heads kind",
    ),
    "solve_alpha": (
        _pair,
        "probs_p:maps:012 probs_q:maps:012 value_outputs_p:numbers:012 value_outputs_q:numbers:012",
        "query_mask rule alpha_per row_sums",
    ),
    "compose_mixing": (_composed, "alphas.*:alphas:012", ""),
    "mix_heads": (_mixed, "teacher_probs:mixed:012 mixing:mixing:023", ""),
    "squeeze_heads": (
        _teacher,
        _TEACHER,
        "num_student_heads plan strategy query_mask temperature alpha_rule alpha_per alpha_from row_sums",
    ),
    "shd_loss": (_student, _STUDENT, _LOSS),
    "shd_loss_gradient": (_student, _STUDENT, _LOSS),
    "shd_loss_gradient_qk": (_products, "supervision:maps: queries:numbers: keys:numbers:", f"{_LOSS} scale"),
    "intersect_support": (_student, _STUDENT, "loss_mask attn_mask row_sums"),
    "align_tokens": (
        lambda trial, sizes: {"attn_probs": _maps(trial, 0, *sizes)},
        "attn_probs:maps:",
        "rows columns query_mask row_sums",
    ),
    "gram_tensor": (
        lambda trial, sizes: {"teacher_probs": _maps(trial, 0, *sizes), **_projected(trial, sizes)},
        "teacher_probs:maps:03 values:numbers:02 output_projection:numbers:0",
        "query_mask alpha_per row_sums",
    ),
    "solve_alpha_from_gram": (_gram, "gram:numbers:1234", ""),
    "merge_gram": (
        lambda trial, sizes: {**_gram(trial, sizes), "alpha": _weights(trial, 8091, sizes[0], sizes[2])},
        "gram:numbers:1234 alpha:alphas:01",
        "",
    ),
    "matched_plan": (
        _calibration,
        "calibration.*.0:maps:03 calibration.*.1:numbers:012",
        "num_student_heads by alpha_per row_sums",
    ),
    "diagnose": (_teacher, _TEACHER, "num_student_heads plan strategies query_mask alpha_per row_sums"),
}
"""By operation a right call; its arrays: path, role, and the axes that must not have one entry; and its options."""


def right_call(trial: Trial, operation: str, sizes: Sizes) -> dict[str, Any]:
    """The arguments of a call that must be answered."""
    return CALLS[operation][0](trial, sizes)


def options_of(operation: str) -> list[str]:
    """The arguments that a call may have besides, and counts that may be others."""
    return CALLS[operation][2].split()


def roles_of(operation: str) -> dict[str, str]:
    """What the float arguments are: ``logits``, ``maps``, ``mixing``, ``alphas`` or ``numbers``."""
    return {path: role for path, role, _ in (word.split(":") for word in CALLS[operation][1].split())}


def arrays_of(operation: str, inputs: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], str, tuple[int, ...], Array]]:
    """Every array of a call: the path that leads to it, its role and the axes that must not be one, and itself."""
    arrays = []
    for path, role, axes in (word.split(":") for word in CALLS[operation][1].split()):
        name, *steps = path.split(".")
        for index in range(len(inputs[name])) if steps else (None,):
            steps_here = tuple(index if step == "*" else int(step) for step in steps)
            array = inputs[name]
            for step in steps_here:
                array = array[step]
            wide = tuple(int(axis) for axis in axes if array.shape[int(axis)] > 1)
            arrays.append(((name, *steps_here), role, wide, np.array(array)))
    return arrays
