"""Laws on shapes and scales: axes of one size, long axes, samples of very different size, and every threshold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance.chain import Pair
from shd_ref.conformance.laws.answers import check_answer
from shd_ref.conformance.laws.calls import CALLS, numbers_of, same
from shd_ref.conformance.laws.law import WIDE, Array, Laws, Trial, as_array, exactly, law, require
from shd_ref.conformance.variants import gram_of
from shd_ref.tolerances import degenerate_threshold

_DOUBLE = ("float64",)


@dataclass(frozen=True)
class Sizes:
    """The axes of a call, and what its samples are multiplied by."""

    samples: int
    heads: int
    students: int
    rows: int
    keys: int
    width: int
    kv_heads: int = 1
    scale: tuple[float, ...] = ()  # of the outputs, a factor a sample
    tiny: int = 0  # one key with mass 2^-tiny, and an output of 2^tiny
    full: bool = False  # numbers that need all bits of the dtype


_SQUARE = (Sizes(4, 4, 2, 4, 4, 4, 4), Sizes(4, 8, 4, 4, 4, 4, 4))
_LONG = (
    Sizes(7, 3, 1, 3, 5, 3, full=True),
    Sizes(2, 4, 2, 1, 4, 3, full=True),
    Sizes(1, 3, 2, 5, 4, 133, full=True),
    Sizes(1, 3, 2, 131, 4, 5, full=True),
    Sizes(1, 3, 2, 3, 259, 5, full=True),
    Sizes(1, 19, 10, 3, 5, 9, full=True),
    Sizes(1, 18, 17, 3, 5, 3, 2, full=True),
)
_SCALED = (
    Sizes(3, 4, 2, 4, 5, 3, 2, scale=(2.0**-24, 1.0, 2.0**20)),
    Sizes(3, 3, 1, 4, 5, 3, scale=(2.0**17, 2.0**-20, 1.0)),
)
_TINY = (Sizes(2, 4, 2, 3, 5, 3, tiny=28), Sizes(2, 4, 2, 3, 5, 3, tiny=40))


def _maps(trial: Trial, sizes: Sizes, seed: int) -> Array:
    shape = sizes.samples, sizes.heads, sizes.rows, sizes.keys
    maps = trial.shares(seed, *shape) if sizes.full else trial.probs(seed, *shape, bits=12)
    if sizes.tiny:
        maps = maps.astype(np.float64)
        index = np.arange(maps[..., 0].size).reshape(maps.shape[:-1])
        tiny = 2.0**-sizes.tiny * (1 + (index + index // sizes.rows) % 3)  # another in every head
        receiver = maps[..., 1:].argmax(-1)[..., None] + 1  # the sum stays one
        np.put_along_axis(
            maps, receiver, np.take_along_axis(maps, receiver, -1) + (maps[..., 0] - tiny)[..., None], -1
        )
        maps[..., 0] = tiny
        maps = trial.rounded(maps)
    return maps


def _outputs(trial: Trial, sizes: Sizes, seed: int) -> Array:
    make = trial.quotients if sizes.full else trial.numbers
    outputs = make(seed, sizes.samples, sizes.heads, sizes.keys, sizes.width).astype(np.float64)
    if sizes.tiny:
        outputs[:, :, 0] *= 2.0**sizes.tiny
    for sample, factor in enumerate(sizes.scale):
        outputs[sample] *= factor
    return trial.rounded(outputs)


def _mask(sizes: Sizes) -> Array:
    """Another mask in every sample, and not symmetric where B = L; the last row counts."""
    rows = np.arange(sizes.rows)[None, :]
    mask: Array = (np.arange(sizes.samples)[:, None] * 3 + rows * rows) % 4 != 1
    mask[:, -1] = True
    return mask


def _ways(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Options: one alpha a map and one a row, with and without a mask."""
    yield {}
    yield {"query_mask": _mask(sizes)}
    yield {"alpha_per": "row", "query_mask": _mask(sizes)}


_Calls = Iterator[dict[str, Any]]


def _softmax(trial: Trial, sizes: Sizes) -> _Calls:
    shape = (sizes.samples, sizes.heads, sizes.rows, sizes.keys)
    logits = trial.numbers(9001, *shape)
    for axes in range(1, 5):
        mask = trial.numbers(9002, *shape[-axes:], low=0, high=3, shift=0) > 0
        temperature = 1.0 + axes / 4 if axes % 2 else 2.0**-axes  # the latter leaves keys with next to nothing
        yield {"attn_logits": logits, "attn_mask": mask, "temperature": temperature}


def _soften(trial: Trial, sizes: Sizes) -> _Calls:
    maps = _maps(trial, sizes, 9011)
    for temperature in (2.0, 0.75):
        for probs in (maps, maps[0, 0, :1].copy()):
            yield {"attn_probs": probs, "temperature": temperature}
        for exponent in (8, 14, 30, 90):  # rows of which a sink takes nearly all
            thin = trial.rounded(maps * 2.0**-exponent)
            yield {"attn_probs": thin, "temperature": temperature / 64, "row_sums": "at_most_one"}


def _projected(trial: Trial, sizes: Sizes, seed: int) -> _Calls:
    """Values and a projection; d_v is the width, so that axes are equal where D and S are."""
    kv = sizes.kv_heads if sizes.heads % sizes.kv_heads == 0 else 1
    values = _outputs(trial, replace(sizes, heads=kv), seed)
    yield {"values": values, "output_projection": trial.numbers(seed + 1, sizes.heads * sizes.width, sizes.width)}


def _solve_alpha(trial: Trial, sizes: Sizes) -> _Calls:
    maps, outputs = _maps(trial, sizes, 9031), _outputs(trial, sizes, 9032)
    pair = {f"probs_{name}": maps[:, head].copy() for head, name in enumerate("pq")}
    pair |= {f"value_outputs_{name}": outputs[:, head].copy() for head, name in enumerate("pq")}
    for options in _ways(sizes):
        yield {**pair, **options}


def _compose_mixing(trial: Trial, sizes: Sizes) -> _Calls:
    pairs = min(sizes.heads - sizes.students, sizes.heads // 2)
    alphas = trial.numbers(9041, sizes.samples, pairs, sizes.rows, low=0, high=16, shift=4)
    plan = [[[2 * n + 1, 2 * n] for n in range(pairs)]]
    yield {"alphas": [alphas], "plan": plan, "num_teacher_heads": sizes.heads}


def _mix_heads(trial: Trial, sizes: Sizes) -> _Calls:
    mixings = []
    for students in (sizes.students, sizes.heads):
        weights = trial.probs(9052, sizes.samples, students, sizes.rows, sizes.heads)
        mixings += [weights[:, :, 0].copy(), np.ascontiguousarray(np.swapaxes(weights, 2, 3))]
    # Weights that sum to one along two axes: no check of sums tells whether these are swapped.
    share = np.zeros(sizes.heads)
    share[:3] = 0.5, 0.375, 0.125
    circle = np.stack([np.roll(share, shift) for shift in range(sizes.heads)])  # (h or l, t)
    squares = [circle, *([np.stack([circle.T, circle[::-1].T])] if sizes.heads == sizes.rows else [])]  # (h, t, l)
    mixings += [trial.rounded(np.broadcast_to(square, (sizes.samples, *square.shape))) for square in squares]
    for mixing in mixings:
        yield {"teacher_probs": _maps(trial, sizes, 9051), "mixing": mixing}


def _squeeze_heads(trial: Trial, sizes: Sizes) -> _Calls:
    inputs = {"teacher_probs": _maps(trial, sizes, 9061), "value_outputs": _outputs(trial, sizes, 9062)}
    for options in (
        {"strategy": "hard", "temperature": 1.25},
        {"alpha_per": "row", "plan": "balanced", "temperature": 0.875},
        *_ways(sizes),
    ):
        yield {**inputs, "num_student_heads": sizes.students, **options}


def _gram_tensor(trial: Trial, sizes: Sizes) -> _Calls:
    for options in _ways(sizes) if sizes.heads <= 18 else ():
        yield {"teacher_probs": _maps(trial, sizes, 9072), **next(_projected(trial, sizes, 9071)), **options}


def _diagnose(trial: Trial, sizes: Sizes) -> _Calls:
    maps, outputs = _maps(trial, sizes, 9081), _outputs(trial, replace(sizes, tiny=0), 9082)
    if sizes.tiny:
        maps[:, 1:, :, 0] = 0.0  # that little mass is what allows the key (ORACLE-3)
    inputs = {"teacher_probs": maps, "value_outputs": outputs, "num_student_heads": sizes.students}
    plain, _, options = _ways(sizes)
    for chosen in (plain, options):
        yield {**inputs, "strategies": ["shd"], **chosen}


_GROUPS: Mapping[str, tuple[str, tuple[Sizes, ...]]] = {
    "square": ("Axes of one size are not confused.", _SQUARE),
    "long": ("Long axes, and axes that are not a multiple of a block, are read to their end.", _LONG),
    "scaled": ("Samples of very different scale do not disturb each other.", _SCALED),
    "tiny-mass": ("A mass of 2^-28 or 2^-40 counts like any other.", _TINY),
}
_OPERATIONS: Mapping[str, tuple[Callable[[Trial, Sizes], _Calls], str, str]] = {
    "softmax": (_softmax, "MAP-1 MAP-2 MAP-10", ""),
    "soften": (_soften, "TEMP-2 TEMP-6", "tiny-mass"),
    "value_outputs": (partial(_projected, seed=9021), "MAP-6 MAP-11", "scaled"),
    "solve_alpha": (_solve_alpha, "ALPHA-2 ALPHA-6 ALPHA-7 ALPHA-8 ALPHA-9", "scaled tiny-mass"),
    "compose_mixing": (_compose_mixing, "MIX-13", ""),
    "mix_heads": (_mix_heads, "MIX-3", "tiny-mass"),
    "squeeze_heads": (_squeeze_heads, "MIX-4 MIX-5 MIX-8 MIX-10 NUM-3 NUM-6", "scaled tiny-mass"),
    "gram_tensor": (_gram_tensor, "GRAM-1 GRAM-6", "scaled tiny-mass"),
    "diagnose": (_diagnose, "ORACLE-1 ORACLE-2 ORACLE-3 ORACLE-5", "scaled tiny-mass"),
}


def _check_sizes(operation: str, group: str, trial: Trial) -> None:
    for sizes in _GROUPS[group][1]:
        for inputs in _OPERATIONS[operation][0](trial, sizes):
            check_answer(trial, operation, inputs)


LAWS = Laws(
    law(
        f"{group}-{operation.replace('_', '-')}",
        f"{operation} squeeze_heads" if operation == "diagnose" else operation,
        spec,
        _GROUPS[group][0],
        partial(_check_sizes, operation, group),
        WIDE,
    )
    for operation, (_, spec, more) in _OPERATIONS.items()
    for group in ("square", "long", *more.split())
)


# --- thresholds -------------------------------------------------------------------------------------------------


@LAWS.add("alpha-threshold-close", "solve_alpha squeeze_heads", "ALPHA-6", _DOUBLE)
def _threshold(trial: Trial) -> None:
    """A fifth above the threshold a pair is not degenerate, a fifth below it is."""
    # As in law/alpha-threshold; squared differences are exact enough in float64 alone.
    for share, expected in ((1.25e-10, 0.25), (0.8e-10, 0.5)):
        delta = np.sqrt(share * 40.5)
        maps = np.array([[[0.5, 0.5]], [[0.5 + delta, 0.5 - delta]]])[None]
        outputs = np.array([[[1.0], [1.25]], [[3.0], [3.75]]])[None]
        for per in ("map", "row"):
            for name, alpha in _pair_alphas(trial, maps, outputs, alpha_per=per)[1].items():
                what = f"alpha of {name} per {per} at {share:g} of its scale"
                require(bool((np.abs(alpha - expected) < 1e-4).all()), what, str(expected), alpha)


def _pair_alphas(
    trial: Trial, maps: Array, outputs: Array, **options: Any
) -> tuple[dict[str, Any], dict[str, NDArray[np.float64]]]:
    """What ``squeeze_heads`` answers for two heads, and the alpha of either operation that solves one."""
    pair = {f"probs_{name}": maps[:, head].copy() for head, name in enumerate("pq")}
    pair |= {f"value_outputs_{name}": outputs[:, head].copy() for head, name in enumerate("pq")}
    solved = trial.numbers_of("solve_alpha", **pair, **options)
    arrays = {"teacher_probs": maps, "value_outputs": outputs}
    squeezed = trial.call("squeeze_heads", **arrays, num_student_heads=1, **options)
    mixing = as_array(squeezed["mixing"], "mixing")
    return squeezed, {"solve_alpha": solved, "squeeze_heads": mixing[:, 0, 0]}


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


@LAWS.add(
    "degenerate-by-its-own-quantity", "solve_alpha squeeze_heads", "ALPHA-6 ALPHA-7 ALPHA-9 MIX-11 NUM-7", _DOUBLE
)
def _degenerate(trial: Trial) -> None:
    """A pair is degenerate by ||M||^2 over its own scale, whatever its outputs, rows and other samples are like."""
    for per, masked in (("map", False), ("map", True), ("row", False), ("row", True)):
        (p, q, x, y), mask = _flat_pairs(trial, per == "row", masked)
        options: dict[str, Any] = {"alpha_per": per, **({"query_mask": mask} if masked else {})}
        right = Pair.of(p, q, x, y, mask, per_row=per == "row")
        expected = right.clipped if per == "row" else right.clipped[:, 0]
        squeezed, alphas = _pair_alphas(trial, np.stack([p, q], axis=1), np.stack([x, y], axis=1), **options)
        what = f"per {per} {'with' if masked else 'without'} a mask, near the threshold of ALPHA-6"
        for name, alpha in alphas.items():
            exactly(list(alpha.shape), list(expected.shape), f"the shape of alpha of {name}")
            require(bool((np.abs(alpha - expected) < 1e-4).all()), f"alpha of {name} {what}", expected, alpha)
        exactly(squeezed["num_degenerate"], int(right.degenerate.sum()), f"num_degenerate {what}")


@LAWS.add("gram-degenerate-by-its-own-quantity", "solve_alpha_from_gram", "GRAM-3 GRAM-7", _DOUBLE)
def _gram_degenerate(trial: Trial) -> None:
    """So it does in a gram tensor."""
    for per in ("map", "row"):
        (p, q, x, y), mask = _flat_pairs(trial, per == "row", False)
        right = Pair.of(p, q, x, y, mask, per_row=per == "row").clipped
        expected = right if per == "row" else right[:, 0]
        gram = gram_of(np.stack([p, q], axis=1), np.stack([x, y], axis=1), per=per)
        alpha = trial.numbers_of("solve_alpha_from_gram", gram=gram, p=0, q=1)
        what = f"alpha from a gram tensor per {per} near the threshold of GRAM-3"
        exactly(list(alpha.shape), list(expected.shape), f"the shape of {what}")
        require(bool((np.abs(alpha - expected) < 1e-2).all()), what, expected, alpha)


@LAWS.add("clipped-near-the-ends", "squeeze_heads", "ALPHA-5 MIX-11 NUM-7", _DOUBLE)
def _clipped(trial: Trial) -> None:
    """An a* counts as clipped outside [0, 1] and nowhere else, however near it is."""
    near = 2.0 ** -np.array([8.0, 12.0, 20.0, 26.0])
    best = np.concatenate([-near, near, 1.0 - near, 1.0 + near])
    outputs = np.zeros((best.size, 2, 2, 1))
    outputs[:, 0, 0, 0], outputs[:, 1, 0, 0] = best, 1.0 - best  # M = 1 and N = -a*
    maps = np.broadcast_to(np.eye(2)[None, :, None], (best.size, 2, 1, 2)).copy()
    inputs = {"teacher_probs": maps, "value_outputs": outputs, "num_student_heads": 1}
    for per in ("map", "row"):
        got = trial.call("squeeze_heads", **inputs, alpha_per=per)
        exactly(got["num_clipped"], 2 * near.size, f"num_clipped per {per}, near 0 and 1")


@LAWS.add("ratios-near-zero", "diagnose squeeze_heads", "ORACLE-5 ORACLE-6", _DOUBLE)
def _ratios(trial: Trial) -> None:
    """A head residual counts as 0 by its square and nothing else."""
    maps = trial.probs(8321, 9, 2, 3, 4, bits=12)
    outputs = trial.numbers(8322, 9, 2, 4, 5).astype(np.float64)
    # Two heads of nearly the same outputs: the optimum leaves about their difference, near the threshold's root.
    outputs[:, 1] = outputs[:, 0] + outputs[:, 1] * (2.0 ** -np.arange(9.0, 18.0))[:, None, None]
    inputs = {"teacher_probs": maps, "value_outputs": outputs, "num_student_heads": 1, "strategies": ["shd"]}
    check_answer(trial, "diagnose", inputs, "near the threshold of ORACLE-6")


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


LAWS += [
    law(
        f"units-{operation.replace('_', '-')}",
        operation,
        spec,
        "Value outputs in another unit, however small or large, give the same alphas, plans and residuals.",
        partial(_units, operation),
        _DOUBLE,
    )
    for operation, spec in (
        ("solve_alpha", "ALPHA-2 ALPHA-6"),
        ("squeeze_heads", "ALPHA-6 MIX-8"),
        ("diagnose", "ORACLE-1 ORACLE-5"),
        ("matched_plan", "PLAN-12"),
    )
]
