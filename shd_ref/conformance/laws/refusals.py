"""Laws of what is refused though another argument leaves it without a use (ERR-7): each fault under each setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.laws import refused_student, refused_teacher
from shd_ref.conformance.laws.law import DTYPE, FINITE, SHAPE, SUMS, VALUE, Asked, Trial, ask_all, law
from shd_ref.conformance.laws.refused_calls import CALLS, Sizes, options_of, right_call

_SIZES: Mapping[str, Sizes] = {
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


def _settings(trial: Trial, operation: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Right calls, in words, with the arguments that they set: each option alone, small axes, and equal maps."""
    for words, sizes in _SIZES.items():
        yield words or "defaults", right_call(trial, operation, sizes), {}
    good = right_call(trial, operation, _SIZES[""])
    for name in options_of(operation):
        for value in _WORDS.get(name, _VALUES.get(name, ())):
            setting = {name: value}
            yield f"{name} {'with rows' if isinstance(value, np.ndarray) else value}", {**good, **setting}, setting
    if operation == "solve_alpha":
        yield "equal maps", {**good, "probs_q": good["probs_p"]}, {}


def _faults(trial: Trial, operation: str, call: Mapping[str, Any]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """An argument, something that it must not be, and the codes of which any is right."""
    for name in options_of(operation):
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
        for name, value, codes in _faults(trial, operation, call):
            if name not in setting:
                yield Asked(f"a wrong {name}, {words}", codes, operation, {**call, name: value})


def _refused(operation: str, trial: Trial) -> None:
    ask_all(trial, _asked(operation, trial))


_IDLE = (
    law(
        f"refused-with-{operation.replace('_', '-')}",
        operation,
        "ERR-7 ERR-1 MAP-5 MAP-7",
        f"What {operation} must refuse it refuses under every other option, also where nothing would come of it.",
        partial(_refused, operation),
    )
    for operation in CALLS
    if options_of(operation)
)

LAWS = (*refused_teacher.LAWS, *refused_student.LAWS, *_IDLE)
"""All laws of what must be refused: on either side, and where another option leaves an argument without a use."""
