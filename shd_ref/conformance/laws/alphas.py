"""Laws of the chapters ALPHA and GRAM: the weight of a pair, computed from maps and from Gram matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shd_ref.conformance.chain import Pair
from shd_ref.conformance.laws.answers import agree_alpha, check_answer
from shd_ref.conformance.laws.law import WIDE, Array, Laws, Trial, as_array, exactly, require
from shd_ref.conformance.variants import compute, gram_of

LAWS = Laws()
_MASK = np.array([[True, True, True, True, False], [True, False, True, True, True], [True] * 5])
_NAMES = ("probs_p", "probs_q", "value_outputs_p", "value_outputs_q")


def _pair(
    trial: Trial, seed: int, *, batch: int = 3, rows: int = 5, keys: int = 6, width: int = 4
) -> dict[str, Array]:
    """Two heads: maps that differ, and value outputs that do."""
    maps = [trial.probs(seed + n, batch, rows, keys) for n in (0, 1)]
    outputs = [trial.numbers(seed + n, batch, keys, width, low=-8, high=8, shift=2) for n in (2, 3)]
    return dict(zip(_NAMES, (*maps, *outputs), strict=True))


def _swapped(pair: Mapping[str, Array]) -> dict[str, Array]:
    p, q, x, y = pair.values()
    return dict(zip(_NAMES, (q, p, y, x), strict=True))


def _alpha(trial: Trial, pair: Mapping[str, Array], **options: Any) -> Array:
    return trial.numbers_of("solve_alpha", **pair, **options)


def _checked(trial: Trial, pair: Mapping[str, Array], words: str, **options: Any) -> Array:
    """An alpha that is right by its own."""
    return as_array(check_answer(trial, "solve_alpha", {**pair, **options}, words)["alpha"], "alpha")


@LAWS.add("alpha-antisymmetric", "solve_alpha", "ALPHA-2 ALPHA-3 ALPHA-11")
def _antisymmetric(trial: Trial) -> None:
    """alpha(p, q) + alpha(q, p) = 1."""
    for seed in (101, 105, 109):
        pair = _pair(trial, seed)
        for per in ("map", "row"):
            forward, backward = _alpha(trial, pair, alpha_per=per), _alpha(trial, _swapped(pair), alpha_per=per)
            what = f"alpha(p, q) + alpha(q, p), per {per},"
            trial.agree(forward + backward, np.ones(forward.shape), "alpha", what, times=2)


@LAWS.add("alpha-value-bias", "solve_alpha", "ALPHA-2 ALPHA-4")
def _value_bias(trial: Trial) -> None:
    """A constant row added to the value outputs of a head does not move alpha."""
    pair = _pair(trial, 113)
    alpha = _alpha(trial, pair)
    for name, bias in (("value_outputs_p", 4.0), ("value_outputs_q", -2.0)):
        moved = {**pair, name: trial.rounded(pair[name] + bias)}
        trial.agree(_alpha(trial, moved), alpha, "alpha", f"alpha with a constant added to {name}", times=2)


@LAWS.add("alpha-scale", "solve_alpha", "ALPHA-2 ALPHA-6")
def _scale(trial: Trial) -> None:
    """Value outputs times a constant leave alpha as it is: degenerate is a relative notion."""
    pair = _pair(trial, 117)
    alpha = _alpha(trial, pair)
    for factor in (2.0**-10, 2.0**6):
        scaled = {name: trial.rounded(a * factor) if "outputs" in name else a for name, a in pair.items()}
        trial.agree(_alpha(trial, scaled), alpha, "alpha", f"alpha with value outputs times {factor:g}", times=2)


@LAWS.add("alpha-minimum", "solve_alpha", "ALPHA-2 ALPHA-3 ALPHA-9 NUM-4")
def _minimum(trial: Trial) -> None:
    """No weight in [0, 1] gives a smaller error than alpha."""
    for seed in (121, 125, 129, 133):
        pair = _pair(trial, seed)
        for per in ("map", "row"):
            alpha = _checked(trial, pair, f"per {per}", alpha_per=per)
            require(bool(((alpha >= 0) & (alpha <= 1)).all()), f"alpha per {per}", "in [0, 1]", alpha)
            right = Pair.of_inputs({**pair, "alpha_per": per})
            least = np.min([right.error(np.full_like(right.best, a)) for a in np.linspace(0.0, 1.0, 201)], axis=0)
            reached = right.error(alpha.reshape(right.best.shape))
            trial.at_most(reached, least, "residual", f"the error of alpha per {per}, against a grid search,")


@LAWS.add("alpha-clipped", "solve_alpha", "ALPHA-3 ALPHA-10")
def _clipped(trial: Trial) -> None:
    """An optimum outside of [0, 1] becomes 0 or 1."""
    # u = 2 and w = -1, so that alpha is 2 before the clip; swapped it is -1.
    arrays = ([[[1.0, 0.0]]], [[[0.0, 1.0]]], [[[2.0], [0.0]]], [[[0.0], [1.0]]])
    pair = dict(zip(_NAMES, map(trial.rounded, arrays), strict=True))
    for per, shape in (("map", (1,)), ("row", (1, 1))):
        exactly(_alpha(trial, pair, alpha_per=per), np.ones(shape), "an alpha above 1, clipped")
        exactly(_alpha(trial, _swapped(pair), alpha_per=per), np.zeros(shape), "an alpha below 0, clipped")


@LAWS.add("alpha-as-printed", "solve_alpha", "ALPHA-4")
def _printed(trial: Trial) -> None:
    """The rule as_printed minimises the error with the misprinted N."""
    for per in ("map", "row"):
        _checked(trial, _pair(trial, 137), f"by the rule as_printed, per {per}", rule="as_printed", alpha_per=per)


@LAWS.add("alpha-uncounted-rows", "solve_alpha", "ALPHA-7 ALPHA-9")
def _uncounted(trial: Trial) -> None:
    """Rows where query_mask is False do not matter, and have alpha 1/2 per row."""
    pair = _pair(trial, 141)
    changed = dict(pair)
    for name, seed in (("probs_p", 161), ("probs_q", 165)):
        changed[name] = np.where(_MASK[..., None], pair[name], trial.probs(seed, *pair[name].shape))
    for per in ("map", "row"):
        alpha = _checked(trial, pair, f"per {per} with a query_mask", query_mask=_MASK, alpha_per=per)
        again = _alpha(trial, changed, query_mask=_MASK, alpha_per=per)
        trial.agree(again, alpha, "alpha", "alpha after changes in rows that do not count")
        if per == "row":
            exactly(alpha[~_MASK], 0.5, "the alpha of a row that does not count")


@LAWS.add("alpha-no-counted-row", "solve_alpha", "ALPHA-7")
def _no_counted_row(trial: Trial) -> None:
    """A sample without a counted row is degenerate: 1/2."""
    mask = np.array([[True] * 5, [False] * 5, [True] * 5])
    alpha = _alpha(trial, _pair(trial, 145), query_mask=mask)
    exactly(alpha[1], 0.5, "the alpha of a sample without a counted row")
    require(bool(np.isfinite(alpha).all()), "alpha", "finite", alpha)


@LAWS.add("alpha-degenerate", "solve_alpha", "ALPHA-6 ALPHA-10")
def _degenerate(trial: Trial) -> None:
    """Where every weight is as good, alpha is 1/2."""
    pair = _pair(trial, 149)
    ones = np.ones_like(pair["value_outputs_p"])
    for words, changed in (
        ("equal maps", {"probs_q": pair["probs_p"].copy()}),
        ("value outputs that cancel", {"value_outputs_q": -pair["value_outputs_p"]}),
        ("constant value outputs", {"value_outputs_p": ones, "value_outputs_q": ones.copy()}),
    ):
        for per in ("map", "row"):
            alpha = _alpha(trial, {**pair, **changed}, alpha_per=per)
            exactly(alpha, 0.5, f"the alpha of a pair with {words}")


@LAWS.add("alpha-threshold", "solve_alpha", "ALPHA-6", WIDE)
def _threshold(trial: Trial) -> None:
    """A pair is degenerate at the threshold of the specification, neither earlier nor later."""
    # Maps that differ by delta change an output of 4 to 5 by delta: ||M||^2 is about delta^2 / 40 of its scale.
    for exponent, expected in ((4, 0.25), (7, 0.25), (12, 0.25), (20, 0.5)):
        delta = 2.0**-exponent
        maps = [[[0.5, 0.5]]], [[[0.5 + delta, 0.5 - delta]]]
        arrays = (*maps, [[[1.0], [1.25]]], [[[3.0], [3.75]]])
        alpha = _alpha(trial, dict(zip(_NAMES, map(trial.rounded, arrays), strict=True)))
        if exponent == 12:  # 1.5e-9 of the scale: too flat to ask for the value, but no reason for 1/2
            require(bool(alpha < 0.4), "alpha above the threshold", "about 0.25", alpha)
        else:
            trial.agree(alpha, [expected], "alpha", f"alpha of maps that differ by {delta:g}")


@LAWS.add("alpha-batch", "solve_alpha", "ALPHA-8 MIX-10 NUM-3")
def _alpha_batch(trial: Trial) -> None:
    """A sample has the same alpha alone as in a batch."""
    pair = _pair(trial, 153)
    for per in ("map", "row"):
        together = _alpha(trial, pair, alpha_per=per)
        for sample in range(3):
            alone = _alpha(trial, {name: array[sample : sample + 1] for name, array in pair.items()}, alpha_per=per)
            trial.agree(alone, together[sample : sample + 1], "alpha", f"alpha of sample {sample} alone")


@LAWS.add("alpha-accumulates-wide", "solve_alpha", "ALPHA-8 NUM-1")
def _widened(trial: Trial) -> None:
    """Sums over many rows are accumulated in float32 or wider."""
    # Longer than a half-precision sum can count: its steps are 1 from 256 (bfloat16) or 2048 (float16) on.
    _checked(trial, _pair(trial, 157, batch=1, rows=96, keys=24, width=48), "over many rows")


def near_ends(trial: Trial) -> dict[str, Array]:
    """Pairs, one a sample, whose ``a*`` come near to 1, to 0 and to 1/2 from either side, and go far from them."""
    u, w = [], []
    for small in (factor * 2.0**-power for power in range(4, 15) for factor in (1.0, 1.625)):
        far = max(small, 2.0**-10)  # a* of 1 / far, and of 1 less than that below 0
        u += [(1.0, 0.0), (0.0, small), (1.0, 0.0), (1.0 + 1.75 * small * small, small), (1.0, 0.0), (far - 1.0, 0.0)]
        w += [(0.0, small), (1.0, 0.0), (-small * small, small), (1.0 - 1.75 * small * small, small)]
        w += [(far - 1.0, 0.0), (1.0, 0.0)]
    outputs = [trial.rounded(np.stack([np.array(x), np.zeros((len(x), 2))], axis=1)) for x in (u, w)]
    maps = [trial.rounded(np.tile(row, (len(u), 1, 1))) for row in ([[1.0, 0.0]], [[0.0, 1.0]])]
    return dict(zip(_NAMES, (*maps, *outputs), strict=True))


@LAWS.add("alpha-near-ends", "solve_alpha", "ALPHA-2 ALPHA-3 ALPHA-6")
def _ends(trial: Trial) -> None:
    """An alpha that is nearly 0, 1/2 or 1 is what it is."""
    for per in ("map", "row"):
        _checked(trial, near_ends(trial), f"near 0, 1/2 or 1, per {per}", alpha_per=per)


@LAWS.add("gram-near-ends", "solve_alpha_from_gram", "GRAM-2 GRAM-3", WIDE)
def _gram_ends(trial: Trial) -> None:
    """So is one from a gram tensor, for entries of any size."""
    pair = near_ends(trial)
    p, q, x, y = (array.astype(np.float64) for array in pair.values())
    gram = gram_of(np.stack([p, q], axis=1), np.stack([x, y], axis=1))
    right = Pair.of_inputs(pair).clipped[:, 0]
    # All samples of one size, and each of another: a threshold that is a number, or that of the batch, shows.
    spread = 2.0 ** (np.arange(len(gram)) * 5 % 9 * 8 - 32)
    for factor in (2.0**-40, 1.0, 2.0**40, spread[:, None, None, None, None]):
        alpha = trial.numbers_of("solve_alpha_from_gram", gram=trial.rounded(gram * factor), p=0, q=1)
        size = f"{np.min(factor):g} to {np.max(factor):g}"
        trial.agree(alpha, right, "alpha", f"alpha near 0, 1/2 or 1 from gram tensors times {size}")


@LAWS.add(
    "alpha-scale-of-counted-rows",
    "solve_alpha squeeze_heads gram_tensor solve_alpha_from_gram",
    "ALPHA-6 ALPHA-7 MIX-10 GRAM-3",
    WIDE,
)
def _counted_scale(trial: Trial) -> None:
    """Whether a pair is degenerate is decided by its own counted rows, in its own sample."""
    # As in law/alpha-threshold; the last row of the first sample does not count, and the second sample is far larger.
    maps = []
    for delta in (0.0, 2.0**-7):
        row = [0.5 + delta, 0.5 - delta, 0.0]
        maps.append(trial.rounded([[row, [0.25, 0.5, 0.25] if delta else [0.0, 0.0, 1.0]], [row, row]]))
    last = 2.0**12
    x, y = np.array([[1.0], [1.25], [last]]), np.array([[3.0], [3.75], [last]])
    outputs = [trial.rounded(np.stack([array, array * 2.0**20])) for array in (x, y)]
    mask = np.array([[True, False], [True, True]])
    pair = dict(zip(_NAMES, (*maps, *outputs), strict=True))
    stacked = {"teacher_probs": np.stack(maps, axis=1), "value_outputs": np.stack(outputs, axis=1)}
    projected = {"values": stacked["value_outputs"], "output_projection": trial.rounded([[1.0], [1.0]])}
    for per in ("map", "row"):
        expected = np.full((2,) if per == "map" else (2, 2), 0.25)
        counted = mask if per == "row" else np.full(2, True)
        options: dict[str, Any] = {"query_mask": mask, "alpha_per": per}
        alphas = {"alpha": _alpha(trial, pair, **options)}
        got = trial.call("squeeze_heads", **stacked, num_student_heads=1, **options)
        alphas["the mixing"] = as_array(got["mixing"], "mixing")[:, 0, 0]
        gram = trial.numbers_of("gram_tensor", teacher_probs=stacked["teacher_probs"], **projected, **options)
        if trial.subject.dtype == "float64":  # the gram form cancels (GRAM-5)
            alphas["alpha of the gram tensor"] = trial.numbers_of("solve_alpha_from_gram", gram=gram, p=0, q=1)
        for name, alpha in alphas.items():
            what = f"{name} per {per}, beside rows and samples of another scale,"
            trial.agree(alpha[counted], expected[counted], "alpha", what, times=4)


@LAWS.add("gram-tensor", "gram_tensor", "GRAM-1 GRAM-6")
def _gram(trial: Trial) -> None:
    """The gram tensor holds the inner products of all A_i X_j."""
    mask = np.array([[True] * 4, [True, True, False, True]])
    for per in ("map", "row"):
        check_answer(trial, "gram_tensor", {**_projected(trial, 241), "query_mask": mask, "alpha_per": per})


def _projected(trial: Trial, seed: int) -> dict[str, Array]:
    maps, values = trial.probs(seed, 2, 3, 4, 5), trial.numbers(seed + 1, 2, 3, 5, 2)
    return {"teacher_probs": maps, "values": values, "output_projection": trial.numbers(seed + 2, 6, 3)}


@LAWS.add("gram-alpha", "gram_tensor solve_alpha_from_gram merge_gram", "GRAM-2 GRAM-3 GRAM-4 GRAM-5", WIDE)
def _gram_alpha(trial: Trial) -> None:
    """Alphas from the gram tensor are those of the value outputs, also after a merge."""
    inputs = _projected(trial, 245)
    x = compute("value_outputs", {name: inputs[name] for name in ("values", "output_projection")})["value_outputs"]
    maps = inputs["teacher_probs"].astype(np.float64)
    for per in ("map", "row"):
        gram = trial.numbers_of("gram_tensor", **inputs, alpha_per=per)
        alpha = trial.numbers_of("solve_alpha_from_gram", gram=gram, p=0, q=1)
        first = (maps[:, 0], maps[:, 1], x[:, 0], x[:, 1])
        agree_alpha(trial, Pair.of(*first, None, per_row=per == "row"), alpha, f"from the gram tensor, per {per}")
        merged = trial.numbers_of("merge_gram", gram=gram, p=0, q=1, alpha=alpha)
        exactly(list(merged.shape[1:5]), [2, 2, 2, 2], "the heads of the merged gram tensor")
        a = alpha.reshape(2, -1, 1)
        second = (a * maps[:, 0] + (1 - a) * maps[:, 1], maps[:, 2], x[:, 0] + x[:, 1], x[:, 2])
        again = trial.numbers_of("solve_alpha_from_gram", gram=merged, p=0, q=1)
        words = f"of the second merge from the gram tensor, per {per}"
        agree_alpha(trial, Pair.of(*second, None, per_row=per == "row"), again, words)


@LAWS.add("gram-cancelled", "gram_tensor solve_alpha_from_gram", "GRAM-3 GRAM-7", WIDE)
def _gram_cancelled(trial: Trial) -> None:
    """Value outputs of any size that cancel up to a rounding have an alpha from 0 to 1, and equal maps 1/2."""
    # Value outputs that cancel leave every sum of the gram tensor at the rounding of its entries, of either sign.
    for exponent in range(-6, 7):
        sizes = 10.0**exponent * np.array([1.0, 0.6, 3.3])
        first = trial.rounded(sizes)
        second = trial.rounded(-first.astype(np.float64) * (1.0 + np.array([1e-12, 2.0**-20, 2.0**-22])))
        x, y = first.astype(np.float64), second.astype(np.float64)
        products = trial.rounded(np.array([[x * x, x * y], [x * y, y * y]]).transpose(2, 0, 1))  # (3, j, l)
        gram = np.broadcast_to(products[:, None, :, None, :], (3, 2, 2, 2, 2)).copy()
        for p, q in ((0, 1), (1, 0)):
            exactly(
                trial.numbers_of("solve_alpha_from_gram", gram=gram, p=p, q=q),
                0.5,
                f"the alpha of equal maps whose value outputs, about {10.0**exponent:g}, cancel",
            )
        maps = np.repeat(trial.probs(249 + exponent, 3, 1, 4, 5), 2, axis=1)
        spread = trial.numbers(262 + exponent, 3, 1, 5, 1, low=-8, high=8, shift=2).astype(np.float64)
        values = trial.rounded(np.concatenate((spread * x[:, None, None, None], spread * y[:, None, None, None]), 1))
        gram = trial.numbers_of(
            "gram_tensor", teacher_probs=maps, values=values, output_projection=trial.rounded([[1.0], [1.0]])
        )
        alpha = trial.numbers_of("solve_alpha_from_gram", gram=gram, p=0, q=1)
        within = (alpha >= 0) & (alpha <= 1)  # not where it is NaN
        require(bool(within.all()), "the alpha of a gram tensor", "a number from 0 to 1", alpha)
