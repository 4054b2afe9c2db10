"""Laws on both sides of a threshold (ALPHA-5, ALPHA-6, NUM-7): it is on the quantity that the text names alone.

At float64 alone, where a quantity can be put a fifth above or below its threshold whatever else is large or small.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance.chain import Pair
from shd_ref.conformance.laws.bounds import check_diagnosis
from shd_ref.conformance.laws.calls import CALLS, numbers_of, same
from shd_ref.conformance.laws.law import Array, Law, Trial, as_array, exactly, require
from shd_ref.tolerances import degenerate_threshold

_SAMPLES, _ROWS, _KEYS, _WIDTH = 24, 3, 4, 3


def _flat_pairs(trial: Trial, per_row: bool, masked: bool) -> tuple[list[Array], NDArray[np.bool_]]:
    """Maps and value outputs of two heads whose flatness is a fifth off the threshold, half of them on either side.

    Their outputs are plain, cancel in the sum, or share a constant; their rows differ in size, and those that do not
    count differ most.
    """
    shape = (_SAMPLES, _ROWS, _KEYS)
    kind = np.arange(_SAMPLES)[:, None, None] % 3
    x = trial.numbers(8301, _SAMPLES, _KEYS, _WIDTH).astype(np.float64)
    y = trial.numbers(8302, _SAMPLES, _KEYS, _WIDTH).astype(np.float64)
    y = np.where(kind == 1, y / 16 - x, y)
    x = np.where(kind == 2, x + 64.0, x)
    p = trial.probs(8303, *shape) / 2 + 0.125
    mask = (np.arange(_SAMPLES)[:, None] + np.arange(_ROWS)) % 3 > 0 if masked else np.ones(shape[:2], dtype=np.bool_)
    slope = trial.numbers(8304, *shape)
    slope = (slope - slope.mean(-1, keepdims=True)) * np.where(mask, 2.0 ** -(2.0 * np.arange(_ROWS)), 16.0)[
        ..., None
    ]
    step = 2.0**-20
    flatness = Pair.of(p, p + step * slope, x, y, mask, per_row=per_row).flatness
    side = np.where(np.arange(flatness.size).reshape(flatness.shape) // 3 % 2, 1.25, 0.8) * degenerate_threshold()
    steps = step * np.sqrt(side / np.where(flatness > 0, flatness, 1.0))
    return [p, p + np.where(flatness > 0, steps, 0.0)[..., None] * slope, x, y], mask


def _degenerate(trial: Trial) -> None:
    for per, masked in (("map", False), ("map", True), ("row", False), ("row", True)):
        (p, q, x, y), mask = _flat_pairs(trial, per == "row", masked)
        options: dict[str, Any] = {"alpha_per": per, **({"query_mask": mask} if masked else {})}
        right = Pair.of(p, q, x, y, mask, per_row=per == "row")
        wanted = right.clipped if per == "row" else right.clipped[:, 0]
        probs = {"probs_p": p, "probs_q": q, "value_outputs_p": x, "value_outputs_q": y}
        maps, outputs = np.stack([p, q], axis=1), np.stack([x, y], axis=1)
        squeezed = trial.call(
            "squeeze_heads", teacher_probs=maps, value_outputs=outputs, num_student_heads=1, **options
        )
        alphas = {
            "solve_alpha": trial.numbers_of("solve_alpha", **probs, **options),
            "squeeze_heads": as_array(squeezed["mixing"], "mixing")[:, 0, 0],
        }
        what = f"per {per} {'with' if masked else 'without'} a mask, near the threshold of ALPHA-6"
        for name, alpha in alphas.items():
            exactly(list(alpha.shape), list(wanted.shape), f"the shape of alpha of {name}")
            require(bool((np.abs(alpha - wanted) < 1e-4).all()), f"alpha of {name} {what}", wanted, alpha)
        exactly(squeezed["num_degenerate"], int(right.degenerate.sum()), f"num_degenerate {what}")


def _gram_degenerate(trial: Trial) -> None:
    for per_row in (False, True):
        (p, q, x, y), mask = _flat_pairs(trial, per_row, False)
        right = Pair.of(p, q, x, y, mask, per_row=per_row).clipped
        products = np.stack([p, q], axis=1)[:, :, None] @ np.stack([x, y], axis=1)[:, None]  # A_i X_j
        gram = np.einsum("bijld,bmnld->bijmnl", products, products)
        wanted = right if per_row else right[:, 0]
        alpha = trial.numbers_of("solve_alpha_from_gram", gram=gram if per_row else gram.sum(-1), p=0, q=1)
        what = f"alpha from a gram tensor of {'rows' if per_row else 'maps'} near the threshold of GRAM-3"
        exactly(list(alpha.shape), list(wanted.shape), f"the shape of {what}")
        require(bool((np.abs(alpha - wanted) < 1e-2).all()), what, wanted, alpha)


def _clipped(trial: Trial) -> None:
    near = 2.0 ** -np.array([8.0, 12.0, 20.0, 26.0])
    best = np.concatenate([-near, near, 1.0 - near, 1.0 + near])
    outputs = np.zeros((best.size, 2, 2, 1))
    outputs[:, 0, 0, 0], outputs[:, 1, 0, 0] = best, 1.0 - best  # M = 1 and N = -a*
    maps = np.broadcast_to(np.eye(2)[None, :, None], (best.size, 2, 1, 2)).copy()
    for per in ("map", "row"):
        got = trial.call(
            "squeeze_heads", teacher_probs=maps, value_outputs=outputs, num_student_heads=1, alpha_per=per
        )
        exactly(got["num_clipped"], 2 * near.size, f"num_clipped per {per}, near 0 and 1")


def _ratios(trial: Trial) -> None:
    """Head residuals some way above and below the root of the threshold (ORACLE-6)."""
    maps = trial.probs(8321, 9, 2, 3, 4, bits=12)
    outputs = trial.numbers(8322, 9, 2, 4, 5).astype(np.float64)
    # Two heads of nearly the same outputs: the optimum leaves about their difference.
    outputs[:, 1] = outputs[:, 0] + outputs[:, 1] * (2.0 ** -np.arange(9.0, 18.0))[:, None, None]
    check_diagnosis(
        trial,
        {"teacher_probs": maps, "value_outputs": outputs, "num_student_heads": 1, "strategies": ["shd"]},
        "near the threshold of ORACLE-6",
    )


def _units(operation: str, trial: Trial) -> None:
    """In another unit value outputs are other numbers, and what is relative to them is what it was."""
    make, options = CALLS[operation]
    inputs = {**make(trial, 8311), **options}
    right = numbers_of(trial, operation, inputs)
    for exponent in (-200, 200):
        unit = 2.0**exponent
        scaled = {name: value * unit if "value_outputs" in name else value for name, value in inputs.items()}
        if "calibration" in inputs:
            scaled["calibration"] = [(maps, outputs * unit) for maps, outputs in inputs["calibration"]]
        what = f"{operation} with value outputs times 2^{exponent}"
        same(right, numbers_of(trial, operation, scaled), what, exact=False)


LAWS = (
    Law(
        "law/degenerate-by-its-own-quantity",
        ("solve_alpha", "squeeze_heads"),
        ("ALPHA-6", "ALPHA-7", "ALPHA-9", "MIX-11", "NUM-7"),
        "A pair is degenerate by ||M||^2 over its own scale, whatever its outputs, rows and other samples are like.",
        _degenerate,
        dtypes=("float64",),
    ),
    Law(
        "law/gram-degenerate-by-its-own-quantity",
        ("solve_alpha_from_gram",),
        ("GRAM-3", "GRAM-7"),
        "So it does in a gram tensor.",
        _gram_degenerate,
        dtypes=("float64",),
    ),
    Law(
        "law/clipped-near-the-ends",
        ("squeeze_heads",),
        ("ALPHA-5", "MIX-11", "NUM-7"),
        "An a* counts as clipped outside [0, 1] and nowhere else, however near it is.",
        _clipped,
        dtypes=("float64",),
    ),
    Law(
        "law/ratios-near-zero",
        ("diagnose", "squeeze_heads"),
        ("ORACLE-5", "ORACLE-6"),
        "A head residual counts as 0 by its square and nothing else.",
        _ratios,
        dtypes=("float64",),
    ),
    *(
        Law(
            f"law/units-{operation.replace('_', '-')}",
            (operation,),
            spec,
            "Value outputs in another unit, however small or large, give the same alphas, plans and residuals.",
            partial(_units, operation),
            dtypes=("float64",),
        )
        for operation, spec in (
            ("solve_alpha", ("ALPHA-2", "ALPHA-6")),
            ("squeeze_heads", ("ALPHA-6", "MIX-8")),
            ("diagnose", ("ORACLE-1", "ORACLE-5")),
            ("matched_plan", ("PLAN-12",)),
        )
    ),
)
