"""Laws on shapes and scales: axes of one size, long axes, and samples of very different size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance.chain import Pair, check_alpha, check_chain, soften_maps
from shd_ref.conformance.compare import Difference, as_numbers
from shd_ref.conformance.laws.calls import CALLS, numbers_of, same
from shd_ref.conformance.laws.formulas import check_diagnosis
from shd_ref.conformance.laws.law import Array, Law, LawBrokenError, Trial, as_array, exactly, law, require
from shd_ref.tolerances import degenerate_threshold

_WIDE = ("float64", "float32")


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

    def __str__(self) -> str:
        return (
            f"with B = {self.samples}, {self.heads} to {self.students} heads, L = {self.rows}, S = {self.keys}, "
            f"D = {self.width}"
        )


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


def _softmax(trial: Trial, sizes: Sizes) -> None:
    shape = (sizes.samples, sizes.heads, sizes.rows, sizes.keys)
    logits = trial.numbers(9001, *shape)
    for axes in range(1, 5):
        mask = trial.numbers(9002, *shape[-axes:], low=0, high=3, shift=0) > 0
        temperature = 1.0 + axes / 4 if axes % 2 else 2.0**-axes  # the latter leaves keys with next to nothing
        masked = np.where(mask, logits.astype(np.float64), -np.inf) / temperature
        peak = masked.max(-1, keepdims=True)
        exps = np.exp(masked - np.where(np.isneginf(peak), 0.0, peak))
        total = exps.sum(-1, keepdims=True)
        got = trial.numbers_of("softmax", attn_logits=logits, attn_mask=mask, temperature=temperature)
        what = f"softmax with a mask of {axes} axes {sizes}"
        trial.agree(got, exps / np.where(total > 0, total, 1.0), "probs", what)


def _soften(trial: Trial, sizes: Sizes) -> None:
    maps = _maps(trial, sizes, 9011)
    for temperature in (2.0, 0.75):
        got = trial.numbers_of("soften", attn_probs=maps, temperature=temperature)
        expected = soften_maps(maps.astype(np.float64), temperature, "one")
        trial.agree(got, expected, "probs", f"soften at temperature {temperature:g} {sizes}")
        row = maps[0, 0, :1].copy()
        got = trial.numbers_of("soften", attn_probs=row, temperature=temperature)
        trial.agree(got, expected[0, 0, :1], "probs", f"soften at temperature {temperature:g} of a row alone {sizes}")
        # Rows of which a sink takes nearly all.
        for exponent in (8, 14, 30, *((90,) if trial.subject.dtype in _WIDE else ())):
            thin, sharp = trial.rounded(maps * 2.0**-exponent), temperature / 64
            got = trial.numbers_of("soften", attn_probs=thin, temperature=sharp, row_sums="at_most_one")
            expected = soften_maps(thin.astype(np.float64), sharp, "at_most_one") * 2.0**exponent
            what = f"soften at temperature {sharp:g} of rows with a mass of 2^-{exponent}, {sizes}"
            trial.agree(got * 2.0**exponent, expected, "probs", what)


def _projected(trial: Trial, sizes: Sizes, seed: int) -> tuple[Array, Array, Array]:
    """Values, projection and value outputs; d_v is the width, so that axes are equal where D and S are."""
    kv = sizes.kv_heads if sizes.heads % sizes.kv_heads == 0 else 1
    make = trial.quotients if sizes.full else trial.numbers
    values = make(seed, sizes.samples, kv, sizes.keys, sizes.width).astype(np.float64)
    if sizes.tiny:
        values[:, :, 0] *= 2.0**sizes.tiny
    for sample, factor in enumerate(sizes.scale):
        values[sample] *= factor
    values = trial.rounded(values)
    projection = trial.numbers(seed + 1, sizes.heads * sizes.width, sizes.width)
    read = np.repeat(values.astype(np.float64), sizes.heads // kv, axis=1)
    weights = projection.astype(np.float64).reshape(sizes.heads, sizes.width, sizes.width)
    return values, projection, np.einsum("bhsv,hvd->bhsd", read, weights)


def _over_largest(trial: Trial, got: Array, wanted: Array, what: str) -> None:
    """Sample by sample relative to its largest entry."""
    exactly(list(got.shape), list(wanted.shape), f"the shape of {what}")
    size = np.abs(wanted).reshape(len(wanted), -1).max(-1).reshape(-1, *(1 for _ in wanted.shape[1:]))
    trial.agree(got / size, wanted / size, "probs", f"{what}, over its largest entry,")


def _value_outputs(trial: Trial, sizes: Sizes) -> None:
    values, projection, expected = _projected(trial, sizes, 9021)
    got = trial.numbers_of("value_outputs", values=values, output_projection=projection)
    _over_largest(trial, got, expected, f"value_outputs {sizes}")


def _solve_alpha(trial: Trial, sizes: Sizes) -> None:
    maps, outputs = _maps(trial, sizes, 9031), _outputs(trial, sizes, 9032)
    p, q, x, y = maps[:, 0].copy(), maps[:, 1].copy(), outputs[:, 0].copy(), outputs[:, 1].copy()
    for options in _ways(sizes):
        per_row = options.get("alpha_per") == "row"
        a_p, a_q, x_p, x_q = (array.astype(np.float64) for array in (p, q, x, y))
        right = Pair.of(a_p, a_q, x_p, x_q, options.get("query_mask"), per_row=per_row)
        alpha = trial.numbers_of("solve_alpha", probs_p=p, probs_q=q, value_outputs_p=x, value_outputs_q=y, **options)
        exactly(list(alpha.shape), list(right.best.shape[: 1 + per_row]), f"the shape of alpha {sizes}")
        difference = check_alpha(right, alpha.reshape(right.best.shape), trial.subject.dtype, flat=False)
        if difference:
            raise LawBrokenError(
                Difference(f"alpha {difference.problem}, {sizes}", difference.expected, difference.got)
            )


def _compose_mixing(trial: Trial, sizes: Sizes) -> None:
    pairs = min(sizes.heads - sizes.students, sizes.heads // 2)
    plan = [[[2 * n + 1, 2 * n] for n in range(pairs)]]
    alphas = trial.numbers(9041, sizes.samples, pairs, sizes.rows, low=0, high=16, shift=4)
    got = trial.numbers_of("compose_mixing", alphas=[alphas], plan=plan, num_teacher_heads=sizes.heads)
    expected = np.zeros((sizes.samples, sizes.heads - pairs, sizes.heads, sizes.rows))
    for n in range(pairs):
        expected[:, n, 2 * n + 1], expected[:, n, 2 * n] = alphas[:, n], 1 - alphas[:, n]
    for n in range(sizes.heads - 2 * pairs):
        expected[:, pairs + n, 2 * pairs + n] = 1.0
    trial.agree(got, expected, "alpha", f"compose_mixing {sizes}")


def _mix_heads(trial: Trial, sizes: Sizes) -> None:
    maps = _maps(trial, sizes, 9051)
    for students in (sizes.students, sizes.heads):
        weights = trial.probs(9052, sizes.samples, students, sizes.rows, sizes.heads)
        for per_row in (False, True):
            mixing = np.ascontiguousarray(np.swapaxes(weights, 2, 3)) if per_row else weights[:, :, 0].copy()
            wide = mixing.astype(np.float64).reshape(*mixing.shape[:3], -1, 1)
            got = trial.numbers_of("mix_heads", teacher_probs=maps, mixing=mixing)
            trial.agree(got, (wide * maps.astype(np.float64)[:, None]).sum(2), "probs", f"mix_heads {sizes}")
    # Weights that sum to one along two axes: no check of sums tells whether these are swapped.
    share = np.zeros(sizes.heads)
    share[:3] = 0.5, 0.375, 0.125
    circle = np.stack([np.roll(share, shift) for shift in range(sizes.heads)])  # (h or l, t)
    shape = sizes.samples, sizes.heads, sizes.heads
    _mixed(trial, maps, np.broadcast_to(circle, shape), f"square weights {sizes}")
    if sizes.heads == sizes.rows:
        by_row = np.stack([circle.T, circle[::-1].T])  # (h, t, l)
        _mixed(trial, maps, np.broadcast_to(by_row, (sizes.samples, *by_row.shape)), f"square weights a row {sizes}")


def _mixed(trial: Trial, maps: Array, mixing: Array, what: str) -> None:
    wide = mixing.reshape(*mixing.shape[:3], -1, 1)
    got = trial.numbers_of("mix_heads", teacher_probs=maps, mixing=trial.rounded(mixing))
    trial.agree(got, (wide * maps.astype(np.float64)[:, None]).sum(2), "probs", f"mix_heads, {what}")


def _squeeze_heads(trial: Trial, sizes: Sizes) -> None:
    inputs = {"teacher_probs": _maps(trial, sizes, 9061), "value_outputs": _outputs(trial, sizes, 9062)}
    ways: list[dict[str, Any]] = [
        {"strategy": "hard", "temperature": 1.25},
        {"alpha_per": "row", "plan": "balanced", "temperature": 0.875},
        *_ways(sizes),
    ]
    for options in ways:
        call = {**inputs, "num_student_heads": sizes.students, **options}
        got = trial.call("squeeze_heads", **call)
        failure = check_chain(call, got, trial.subject.dtype)
        if failure:
            name, difference = failure
            what = f"{name}: {difference.problem}; {sizes}, {', '.join(options) or 'defaults'}"
            raise LawBrokenError(Difference(what, difference.expected, difference.got))


def _gram_tensor(trial: Trial, sizes: Sizes) -> None:
    if sizes.heads > 18:
        return
    values, projection, outputs = _projected(trial, sizes, 9071)
    maps = _maps(trial, sizes, 9072)
    products = np.einsum("bils,bjsd->bijld", maps.astype(np.float64), outputs)
    for options in _ways(sizes):
        mask = options.get("query_mask")
        weight = np.ones((sizes.samples, sizes.rows)) if mask is None else mask.astype(np.float64)
        flat = products * weight[:, None, None, :, None]
        if options.get("alpha_per") == "row":
            expected = np.einsum("bijld,bmnld->bijmnl", flat, products, optimize=True)
        else:
            expected = np.einsum("bijld,bmnld->bijmn", flat, products, optimize=True)
        got = trial.numbers_of(
            "gram_tensor", teacher_probs=maps, values=values, output_projection=projection, **options
        )
        _over_largest(trial, got, expected, f"the gram tensor {sizes}")


def _diagnose(trial: Trial, sizes: Sizes) -> None:
    maps = _maps(trial, sizes, 9081)
    if sizes.tiny:
        maps[:, 1:, :, 0] = 0.0  # that little mass is what allows the key (ORACLE-3)
    inputs = {
        "teacher_probs": maps,
        "value_outputs": _outputs(trial, replace(sizes, tiny=0), 9082),
        "num_student_heads": sizes.students,
        "strategies": ["shd"],
    }
    plain, *_, options = _ways(sizes)
    for chosen in (plain, options):
        check_diagnosis(trial, {**inputs, **chosen}, str(sizes))


_CHECKS: Mapping[str, tuple[Callable[[Trial, Sizes], None], str]] = {
    "softmax": (_softmax, "MAP-1 MAP-2 MAP-10"),
    "soften": (_soften, "TEMP-2 TEMP-6"),
    "value_outputs": (_value_outputs, "MAP-6 MAP-11"),
    "solve_alpha": (_solve_alpha, "ALPHA-2 ALPHA-6 ALPHA-7 ALPHA-8 ALPHA-9"),
    "compose_mixing": (_compose_mixing, "MIX-13"),
    "mix_heads": (_mix_heads, "MIX-3"),
    "squeeze_heads": (_squeeze_heads, "MIX-4 MIX-5 MIX-8 MIX-10 NUM-3 NUM-6"),
    "gram_tensor": (_gram_tensor, "GRAM-1 GRAM-6"),
    "diagnose": (_diagnose, "ORACLE-1 ORACLE-2 ORACLE-3 ORACLE-5"),
}
_SCALES = ("value_outputs", "solve_alpha", "squeeze_heads", "gram_tensor", "diagnose")
_TINIES = ("soften", "solve_alpha", "mix_heads", "squeeze_heads", "gram_tensor", "diagnose")


def _all_of(check: Callable[[Trial, Sizes], None], chosen: tuple[Sizes, ...], trial: Trial) -> None:
    for sizes in chosen:
        check(trial, sizes)


def _threshold(trial: Trial) -> None:
    # As in law/alpha-threshold, a fifth above and below it; squared differences are exact enough in float64 alone.
    for share, degenerate in ((1.25e-10, False), (0.8e-10, True)):
        delta = np.sqrt(share * 40.5)
        p, q = np.array([[0.5, 0.5]]), np.array([[0.5 + delta, 0.5 - delta]])
        x, y = np.array([[1.0], [1.25]]), np.array([[3.0], [3.75]])
        maps, outputs = np.stack([p, q])[None], np.stack([x, y])[None]
        expected = 0.5 if degenerate else 0.25
        for per in ("map", "row"):
            alpha = trial.numbers_of(
                "solve_alpha",
                probs_p=p[None],
                probs_q=q[None],
                value_outputs_p=x[None],
                value_outputs_q=y[None],
                alpha_per=per,
            )
            require(
                bool((np.abs(alpha - expected) < 1e-4).all()),
                f"alpha at {share:g} of its scale",
                str(expected),
                alpha,
            )
            got = trial.call(
                "squeeze_heads", teacher_probs=maps, value_outputs=outputs, num_student_heads=1, alpha_per=per
            )
            mixing = as_numbers(got["mixing"])
            near = mixing is not None and abs(mixing.reshape(-1)[0] - expected) < 1e-4
            require(bool(near), f"shd per {per} at {share:g} of its scale", str(expected), got["mixing"])


def _laws() -> Iterator[Law]:
    for operation, (check, spec) in _CHECKS.items():
        name = operation.replace("_", "-")
        operations = (operation, "squeeze_heads") if operation == "diagnose" else (operation,)
        groups: list[tuple[str, str, tuple[Sizes, ...]]] = [
            ("square", "Axes of one size are not confused.", _SQUARE),
            ("long", "Long axes, and axes that are not a multiple of a block, are read to their end.", _LONG),
        ]
        if operation in _SCALES:
            groups.append(("scaled", "Samples of very different scale do not disturb each other.", _SCALED))
        if operation in _TINIES:
            groups.append(("tiny-mass", "A mass of 2^-28 or 2^-40 counts like any other.", _TINY))
        for group, comment, chosen in groups:
            statement = partial(_all_of, check, chosen)
            yield law(f"{group}-{name}", operations, spec, comment, statement, _WIDE)
    yield law("alpha-threshold-close", "solve_alpha squeeze_heads", "ALPHA-6",
              "A fifth above the threshold a pair is not degenerate, a fifth below it is.", _threshold,
              ("float64",))  # fmt: skip


_SHAPES = tuple(_laws())


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
        expected = right.clipped if per == "row" else right.clipped[:, 0]
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
            exactly(list(alpha.shape), list(expected.shape), f"the shape of alpha of {name}")
            require(bool((np.abs(alpha - expected) < 1e-4).all()), f"alpha of {name} {what}", expected, alpha)
        exactly(squeezed["num_degenerate"], int(right.degenerate.sum()), f"num_degenerate {what}")


def _gram_degenerate(trial: Trial) -> None:
    for per_row in (False, True):
        (p, q, x, y), mask = _flat_pairs(trial, per_row, False)
        right = Pair.of(p, q, x, y, mask, per_row=per_row).clipped
        products = np.stack([p, q], axis=1)[:, :, None] @ np.stack([x, y], axis=1)[:, None]  # A_i X_j
        gram = np.einsum("bijld,bmnld->bijmnl", products, products)
        expected = right if per_row else right[:, 0]
        alpha = trial.numbers_of("solve_alpha_from_gram", gram=gram if per_row else gram.sum(-1), p=0, q=1)
        what = f"alpha from a gram tensor of {'rows' if per_row else 'maps'} near the threshold of GRAM-3"
        exactly(list(alpha.shape), list(expected.shape), f"the shape of {what}")
        require(bool((np.abs(alpha - expected) < 1e-2).all()), what, expected, alpha)


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


_THRESHOLDS = (
    law("degenerate-by-its-own-quantity", "solve_alpha squeeze_heads", "ALPHA-6 ALPHA-7 ALPHA-9 MIX-11 NUM-7",
        "A pair is degenerate by ||M||^2 over its own scale, whatever its outputs, rows and other samples are like.",
        _degenerate, dtypes=("float64",)),
    law("gram-degenerate-by-its-own-quantity", "solve_alpha_from_gram", "GRAM-3 GRAM-7",
        "So it does in a gram tensor.", _gram_degenerate, dtypes=("float64",)),
    law("clipped-near-the-ends", "squeeze_heads", "ALPHA-5 MIX-11 NUM-7",
        "An a* counts as clipped outside [0, 1] and nowhere else, however near it is.", _clipped,
        dtypes=("float64",)),
    law("ratios-near-zero", "diagnose squeeze_heads", "ORACLE-5 ORACLE-6",
        "A head residual counts as 0 by its square and nothing else.", _ratios, dtypes=("float64",)),
    *(law(f"units-{operation.replace('_', '-')}", operation, spec,
        "Value outputs in another unit, however small or large, give the same alphas, plans and residuals.",
        partial(_units, operation), dtypes=("float64",)) for operation,
        spec in (("solve_alpha", ("ALPHA-2", "ALPHA-6")), ("squeeze_heads", ("ALPHA-6", "MIX-8")),
        ("diagnose", ("ORACLE-1", "ORACLE-5")), ("matched_plan", ("PLAN-12",)),)),
)  # fmt: skip


LAWS = (*_SHAPES, *_THRESHOLDS)
