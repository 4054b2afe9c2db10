"""Laws of what is refused though another argument leaves it without a use (ERR-7): each fault under each setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.laws import refused_student, refused_teacher
from shd_ref.conformance.laws.law import DTYPE, FINITE, SHAPE, SUMS, VALUE, Array, Asked, Trial, ask_all, law

_Sizes = tuple[int, int, int, int]  # B, H, L, S
_SIZES: Mapping[str, _Sizes] = {
    "": (2, 4, 3, 3),
    "one sample": (1, 4, 3, 3),
    "one row": (2, 4, 1, 3),
    "one key": (2, 4, 3, 1),
    "one head": (2, 1, 3, 3),
}
_FEW = np.array([[True, False, True], [True, True, False]])
_NONE = np.zeros((2, 3), dtype=np.bool_)
_WORDS: Mapping[str, tuple[str, ...]] = {
    "strategy": ("constant", "hard", "mean"),
    "plan": ("balanced",),
    "kind": ("balanced",),
    "alpha_per": ("row",),
    "alpha_rule": ("as_printed",),
    "rule": ("as_printed",),
    "alpha_from": ("softened",),
    "row_sums": ("at_most_one",),
    "by": ("similarity",),
    "reduction": ("mean",),
    "divergence": ("reverse_kl", "js", "mse"),
    "support": ("intersect",),
}
"""The other values of options that are words."""

_VALUES: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1.0, 2.0),
    "beta": (0.0, 3.0),
    "scale": (0.0,),
    "query_mask": (_FEW, _NONE),
    "loss_mask": (_FEW, _NONE),
    "attn_mask": (np.ones((3, 3), dtype=np.bool_),),
    "num_student_heads": (1, 4),
    "strategies": (["mean"], ["constant", "hard"]),
    "rows": ([1], [0, 1, 2]),
    "columns": ([0, 2],),
}
"""Other values that leave something without a use, and some that do not."""

_COUNTS = ("num_teacher_heads", "num_student_heads", "num_teacher_layers", "num_student_layers")


def _maps(trial: Trial, seed: int, *shape: int) -> Array:
    """Mass on every key, another in every row: halves of what is left, which every dtype holds."""
    row = 0.5 ** np.minimum(np.arange(1, shape[-1] + 1), shape[-1] - 1)
    turn = (np.arange(np.prod(shape)).reshape(shape) // shape[-1] + seed + np.arange(shape[-1])) % shape[-1]
    return trial.rounded(row[turn])


def _pair(trial: Trial, sizes: _Sizes) -> dict[str, Any]:
    batch, _, rows, keys = sizes
    maps, outputs = [_maps(trial, seed, batch, rows, keys) for seed in (0, 1)], trial.numbers(8201, 2, batch, keys, 2)
    return {"probs_p": maps[0], "probs_q": maps[1], "value_outputs_p": outputs[0], "value_outputs_q": outputs[1]}


def _teacher(trial: Trial, sizes: _Sizes) -> dict[str, Any]:
    batch, heads, _, keys = sizes
    outputs = trial.numbers(8202, batch, heads, keys, 2)
    return {"teacher_probs": _maps(trial, 0, *sizes), "value_outputs": outputs, "num_student_heads": (heads + 1) // 2}


def _student(trial: Trial, sizes: _Sizes) -> dict[str, Any]:
    return {"supervision": _maps(trial, 0, *sizes), "student_logits": trial.numbers(8203, *sizes)}


def _products(trial: Trial, sizes: _Sizes) -> dict[str, Any]:
    batch, heads, rows, keys = sizes
    return {
        "supervision": _maps(trial, 0, *sizes),
        "queries": trial.numbers(8204, batch, heads, rows, 2),
        "keys": trial.numbers(8205, batch, 1, keys, 2),
        "scale": 0.5,
    }


def _gram(trial: Trial, sizes: _Sizes) -> dict[str, Any]:
    batch, heads, _, keys = sizes
    values = trial.numbers(8206, batch, 1, keys, 2)
    projection = trial.numbers(8207, 2 * heads, 3)
    return {"teacher_probs": _maps(trial, 0, *sizes), "values": values, "output_projection": projection}


_LOSS = "beta loss_mask attn_mask temperature reduction divergence support row_sums"
_CALLS: Mapping[str, tuple[Callable[[Trial, _Sizes], dict[str, Any]], str]] = {
    "softmax": (lambda trial, sizes: {"attn_logits": trial.numbers(8208, *sizes)}, "attn_mask temperature"),
    "soften": (lambda trial, sizes: {"attn_probs": _maps(trial, 0, *sizes)}, "temperature row_sums"),
    "merge_plan": (
        lambda _, sizes: {"num_teacher_heads": sizes[1], "num_student_heads": (sizes[1] + 1) // 2},
        "num_student_heads kind",
    ),
    "solve_alpha": (_pair, "query_mask rule alpha_per row_sums"),
    "squeeze_heads": (
        _teacher,
        "num_student_heads plan strategy query_mask temperature alpha_rule alpha_per alpha_from row_sums",
    ),
    "shd_loss": (_student, _LOSS),
    "shd_loss_gradient": (_student, _LOSS),
    "shd_loss_gradient_qk": (_products, f"{_LOSS} scale"),
    "intersect_support": (_student, "loss_mask attn_mask row_sums"),
    "align_tokens": (
        lambda trial, sizes: {"attn_probs": _maps(trial, 0, *sizes)},
        "rows columns query_mask row_sums",
    ),
    "gram_tensor": (_gram, "query_mask alpha_per row_sums"),
    "matched_plan": (
        lambda trial, sizes: {
            "calibration": [tuple(_teacher(trial, sizes).values())[:2]],
            "num_student_heads": (sizes[1] + 1) // 2,
        },
        "num_student_heads by alpha_per row_sums",
    ),
    "diagnose": (_teacher, "num_student_heads plan strategies query_mask alpha_per row_sums"),
}
"""By operation: a right call of these sizes, and the arguments that may be given besides."""


def _settings(trial: Trial, operation: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Right calls, in words, with the arguments that they set: each option alone, small axes, and equal maps."""
    make, options = _CALLS[operation]
    for words, sizes in _SIZES.items():
        yield words or "defaults", make(trial, sizes), {}
    good = make(trial, _SIZES[""])
    for name in options.split():
        for value in _WORDS.get(name, _VALUES.get(name, ())):
            setting = {name: value}
            yield f"{name} {'with rows' if isinstance(value, np.ndarray) else value}", {**good, **setting}, setting
    if operation == "solve_alpha":
        yield "equal maps", {**good, "probs_q": good["probs_p"]}, {}


def _faults(trial: Trial, operation: str, call: Mapping[str, Any]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """An argument, something that it must not be, and the codes of which any is right."""
    for name in _CALLS[operation][1].split():
        if name in _WORDS:
            yield name, "another", VALUE
        elif name in ("temperature", "beta"):
            for number in (-1.0, np.nan, np.inf, True):
                yield name, number, VALUE
        elif name == "scale":
            for number in (np.nan, np.inf, True):
                yield name, number, VALUE
        elif name == "strategies":
            yield name, ["shd", "another"], VALUE
        elif name in ("rows", "columns"):
            for positions in ([9], [0, 0], [-1], [True], []):
                yield name, positions, VALUE
        elif name in _COUNTS:
            for count, codes in ((0, VALUE), (-1, VALUE), (True, VALUE), (9, ("heads-exceed",))):
                yield name, count, codes
        elif name.endswith("mask"):
            batch, *_, rows, keys = next(value.shape for value in call.values() if isinstance(value, np.ndarray))
            rows, keys = (call["queries"].shape[2], call["keys"].shape[2]) if "queries" in call else (rows, keys)
            right = (rows, keys) if name == "attn_mask" else (batch, rows)
            for kind in (np.int64, np.uint8, np.float32):
                yield name, np.ones(right, dtype=kind), DTYPE
            yield name, np.ones((7, 7), dtype=np.bool_), SHAPE
        if name in ("plan", "kind"):
            yield name, [[[0, 0]]], ("plan-invalid",)
            yield name, [[[0, 11]]], ("plan-invalid",)
    tiny = 2.0**-24 if trial.subject.dtype == "float16" else 2.0**-100
    sinks = call.get("row_sums") == "at_most_one"
    uncounted = not all(np.asarray(call.get(name, True)).all() for name in ("query_mask", "loss_mask"))
    for name, value in call.items():
        if isinstance(value, np.ndarray) and not name.endswith("mask"):
            for entry, refusals in _entries(name, uncounted):
                changed = value.astype(np.float64)
                changed.reshape(-1)[0] = entry
                yield name, trial.rounded(changed), refusals
            if ("probs" in name or name == "supervision") and not uncounted and not sinks:
                changed = value.astype(np.float64)
                changed[(0,) * (value.ndim - 1)] = np.where(np.arange(value.shape[-1]) == 0, tiny, 0.0)
                yield name, trial.rounded(changed), SUMS
            yield name, value.astype(np.complex128), DTYPE
            yield name, value[(0,) * (value.ndim - 1)], SHAPE


def _entries(name: str, uncounted: bool) -> Iterator[tuple[float, tuple[str, ...]]]:
    yield np.nan, FINITE
    if "probs" not in name and name != "supervision":
        yield np.inf, FINITE
        return
    yield -0.125, SUMS
    if not uncounted:
        yield 1.5, SUMS


def _asked(operation: str, trial: Trial) -> Iterator[Asked]:
    for words, call, setting in _settings(trial, operation):
        whole = {**call, "temperature": call.get("temperature", 2.0)} if operation == "soften" else call
        for name, value, codes in _faults(trial, operation, whole):
            if name not in setting:
                yield Asked(f"a wrong {name}, {words}", codes, operation, {**whole, name: value})


def _refused(operation: str, trial: Trial) -> None:
    ask_all(trial, _asked(operation, trial))


_IDLE = tuple(
    law(f"refused-with-{operation.replace('_', '-')}", operation, "ERR-7 ERR-1 MAP-5 MAP-7",
        f"What {operation} must refuse it refuses under every other option, also where nothing would come of it.",
        partial(_refused, operation))
    for operation in _CALLS
)  # fmt: skip

LAWS = (*refused_teacher.LAWS, *refused_student.LAWS, *_IDLE)
"""All laws of what must be refused: on either side, and where another option leaves an argument without a use."""
