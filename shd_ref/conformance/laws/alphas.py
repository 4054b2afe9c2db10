"""Laws of the chapters ALPHA and GRAM: the weight of a pair, computed from maps and from Gram matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shd_ref.conformance.chain import Pair, check_alpha
from shd_ref.conformance.compare import Difference
from shd_ref.conformance.laws.law import Array, LawBrokenError, Trial, as_array, exactly, law, require

_MASK = np.array([[True, True, True, True, False], [True, False, True, True, True], [True] * 5])


def _pair(
    trial: Trial, seed: int, *, batch: int = 3, rows: int = 5, keys: int = 6, width: int = 4
) -> dict[str, Array]:
    """Two heads: maps that differ, and value outputs that do."""
    return {
        "probs_p": trial.probs(seed, batch, rows, keys),
        "probs_q": trial.probs(seed + 1, batch, rows, keys),
        "value_outputs_p": trial.numbers(seed + 2, batch, keys, width, low=-8, high=8, shift=2),
        "value_outputs_q": trial.numbers(seed + 3, batch, keys, width, low=-8, high=8, shift=2),
    }


def _swapped(pair: Mapping[str, Array]) -> dict[str, Array]:
    return {
        "probs_p": pair["probs_q"],
        "probs_q": pair["probs_p"],
        "value_outputs_p": pair["value_outputs_q"],
        "value_outputs_q": pair["value_outputs_p"],
    }


def _solved(
    pair: Mapping[str, Array], mask: Array | None = None, *, per_row: bool = False, printed: bool = False
) -> Pair:
    p, q, x, y = (array.astype(np.float64) for array in pair.values())
    return Pair.of(p, q, x, y, mask, per_row=per_row, printed=printed)


def _alpha(trial: Trial, pair: Mapping[str, Array], **options: Any) -> Array:
    return trial.numbers_of("solve_alpha", **pair, **options)


def _antisymmetric(trial: Trial) -> None:
    for seed in (101, 105, 109):
        pair = _pair(trial, seed)
        for per in ("map", "row"):
            forward, backward = _alpha(trial, pair, alpha_per=per), _alpha(trial, _swapped(pair), alpha_per=per)
            what = f"alpha(p, q) + alpha(q, p), per {per},"
            trial.agree(forward + backward, np.ones(forward.shape), "alpha", what, times=2)


def _value_bias(trial: Trial) -> None:
    pair = _pair(trial, 113)
    alpha = _alpha(trial, pair)
    for name, bias in (("value_outputs_p", 4.0), ("value_outputs_q", -2.0)):
        moved = {**pair, name: trial.rounded(pair[name] + bias)}
        trial.agree(_alpha(trial, moved), alpha, "alpha", f"alpha with a constant added to {name}", times=2)


def _scale(trial: Trial) -> None:
    pair = _pair(trial, 117)
    alpha = _alpha(trial, pair)
    for factor in (2.0**-10, 2.0**6):
        scaled = {name: trial.rounded(a * factor) if "outputs" in name else a for name, a in pair.items()}
        trial.agree(_alpha(trial, scaled), alpha, "alpha", f"alpha with value outputs times {factor:g}", times=2)


def _minimum(trial: Trial) -> None:
    grid = np.linspace(0.0, 1.0, 201)
    for seed in (121, 125, 129, 133):
        pair = _pair(trial, seed)
        for per_row in (False, True):
            alpha = _alpha(trial, pair, alpha_per="row" if per_row else "map")
            what = f"alpha per {'row' if per_row else 'map'}"
            require(bool(((alpha >= 0) & (alpha <= 1)).all()), what, "in [0, 1]", alpha)
            solved = _solved(pair, per_row=per_row)
            least = np.min([solved.error(np.full_like(solved.best, a)) for a in grid], axis=0)
            reached = solved.error(alpha.reshape(solved.best.shape))
            trial.at_most(reached, least, "residual", f"the error of {what}, against a grid search,")
            _judge_alpha(trial, solved, alpha, what)


def _judge_alpha(trial: Trial, solved: Pair, alpha: Array, what: str) -> None:
    difference = check_alpha(solved, alpha.reshape(solved.best.shape), trial.subject.dtype, flat=False)
    if difference:
        raise LawBrokenError(Difference(f"{what} {difference.problem}", difference.expected, difference.got))


def _clipped(trial: Trial) -> None:
    rows = np.array([[[1.0, 0.0]]]), np.array([[[0.0, 1.0]]])
    # u = 2 and w = -1, so that alpha is 2 before the clip; swapped it is -1.
    pair = {
        "probs_p": trial.rounded(rows[0]),
        "probs_q": trial.rounded(rows[1]),
        "value_outputs_p": trial.rounded([[[2.0], [0.0]]]),
        "value_outputs_q": trial.rounded([[[0.0], [1.0]]]),
    }
    for per in ("map", "row"):
        shape = (1,) if per == "map" else (1, 1)
        exactly(_alpha(trial, pair, alpha_per=per), np.ones(shape), "an alpha above 1, clipped")
        exactly(_alpha(trial, _swapped(pair), alpha_per=per), np.zeros(shape), "an alpha below 0, clipped")


def _printed(trial: Trial) -> None:
    pair = _pair(trial, 137)
    for per_row in (False, True):
        alpha = _alpha(trial, pair, rule="as_printed", alpha_per="row" if per_row else "map")
        _judge_alpha(trial, _solved(pair, per_row=per_row, printed=True), alpha, "alpha by the rule as_printed")


def _uncounted(trial: Trial) -> None:
    pair = _pair(trial, 141)
    for per in ("map", "row"):
        alpha = _alpha(trial, pair, query_mask=_MASK, alpha_per=per)
        _judge_alpha(trial, _solved(pair, _MASK, per_row=per == "row"), alpha, f"alpha per {per} with a query_mask")
        changed = dict(pair)
        for name, seed in (("probs_p", 161), ("probs_q", 165)):
            other = trial.probs(seed, *pair[name].shape)
            changed[name] = np.where(_MASK[..., None], pair[name], other)
        again = _alpha(trial, changed, query_mask=_MASK, alpha_per=per)
        trial.agree(again, alpha, "alpha", "alpha after changes in rows that do not count")
        if per == "row":
            exactly(alpha[~_MASK], 0.5, "the alpha of a row that does not count")


def _no_counted_row(trial: Trial) -> None:
    pair = _pair(trial, 145)
    mask = np.array([[True] * 5, [False] * 5, [True] * 5])
    alpha = _alpha(trial, pair, query_mask=mask)
    exactly(alpha[1], 0.5, "the alpha of a sample without a counted row")
    require(bool(np.isfinite(alpha).all()), "alpha", "finite", alpha)


def _degenerate(trial: Trial) -> None:
    pair = _pair(trial, 149)
    equal = {**pair, "probs_q": pair["probs_p"].copy()}
    cancelled = {**pair, "value_outputs_q": -pair["value_outputs_p"]}
    blind = {
        **pair,
        "value_outputs_p": np.ones_like(pair["value_outputs_p"]),
        "value_outputs_q": np.ones_like(pair["value_outputs_q"]),
    }
    cases = {"equal maps": equal, "value outputs that cancel": cancelled, "constant value outputs": blind}
    for name, degenerate in cases.items():
        for per in ("map", "row"):
            exactly(_alpha(trial, degenerate, alpha_per=per), 0.5, f"the alpha of a pair with {name}")


def _threshold(trial: Trial) -> None:
    # Maps that differ by delta change an output of 4 to 5 by delta: ||M||^2 is about delta^2 / 40 of its scale.
    for exponent, expected in ((4, 0.25), (7, 0.25), (12, 0.25), (20, 0.5)):
        delta = 2.0**-exponent
        pair = {
            "probs_p": trial.rounded([[[0.5, 0.5]]]),
            "probs_q": trial.rounded([[[0.5 + delta, 0.5 - delta]]]),
            "value_outputs_p": trial.rounded([[[1.0], [1.25]]]),
            "value_outputs_q": trial.rounded([[[3.0], [3.75]]]),
        }
        if exponent == 12:  # 1.5e-9 of the scale: too flat to ask for the value, but no reason for 1/2
            require(bool(_alpha(trial, pair) < 0.4), "alpha above the threshold", "about 0.25", _alpha(trial, pair))
        else:
            trial.agree(_alpha(trial, pair), [expected], "alpha", f"alpha of maps that differ by {delta:g}")


def _alpha_batch(trial: Trial) -> None:
    pair = _pair(trial, 153)
    for per in ("map", "row"):
        together = _alpha(trial, pair, alpha_per=per)
        for sample in range(3):
            alone = _alpha(trial, {name: array[sample : sample + 1] for name, array in pair.items()}, alpha_per=per)
            trial.agree(alone, together[sample : sample + 1], "alpha", f"alpha of sample {sample} alone")


def _widened(trial: Trial) -> None:
    # Longer than a half-precision sum can count: its steps are 1 from 256 (bfloat16) or 2048 (float16) on.
    rows, keys = 96, 24
    pair = _pair(trial, 157, batch=1, rows=rows, keys=keys, width=48)
    _judge_alpha(trial, _solved(pair), _alpha(trial, pair), "alpha over many rows")


def _gram(trial: Trial) -> None:
    maps, values, projection = trial.probs(241, 2, 3, 4, 5), trial.numbers(242, 2, 3, 5, 2), trial.numbers(243, 6, 3)
    inputs = {"teacher_probs": maps, "values": values, "output_projection": projection}
    mask = np.array([[True] * 4, [True, True, False, True]])
    W = projection.astype(np.float64).reshape(3, 2, 3)
    X = np.einsum("bhsv,hvd->bhsd", values.astype(np.float64), W)
    products = np.einsum("bils,bjsd->bijld", maps.astype(np.float64), X)
    for per in ("map", "row"):
        weight = mask.astype(np.float64)
        terms = "bijld,bmnld,bl->bijmn" if per == "map" else "bijld,bmnld,bl->bijmnl"
        gram = trial.numbers_of("gram_tensor", **inputs, query_mask=mask, alpha_per=per)
        expected = np.einsum(terms, products, products, weight)
        # Its entries are squared outputs: relative to the largest.
        size = float(np.abs(expected).max())
        trial.agree(
            gram / size, expected / size, "probs", f"the gram tensor per {per}, relative to its largest entry,"
        )


def _gram_alpha(trial: Trial) -> None:
    maps, values, projection = trial.probs(245, 2, 3, 4, 5), trial.numbers(246, 2, 3, 5, 2), trial.numbers(247, 6, 3)
    outputs = np.einsum("bhsv,hvd->bhsd", values.astype(np.float64), projection.astype(np.float64).reshape(3, 2, 3))
    A = maps.astype(np.float64)
    for per in ("map", "row"):
        gram = trial.numbers_of(
            "gram_tensor", teacher_probs=maps, values=values, output_projection=projection, alpha_per=per
        )
        alpha = trial.numbers_of("solve_alpha_from_gram", gram=gram, p=0, q=1)
        first = Pair.of(A[:, 0], A[:, 1], outputs[:, 0], outputs[:, 1], None, per_row=per == "row")
        _judge_alpha(trial, first, alpha, f"alpha from the gram tensor, per {per},")
        merged = trial.numbers_of("merge_gram", gram=gram, p=0, q=1, alpha=alpha)
        exactly(list(merged.shape[1:5]), [2, 2, 2, 2], "the heads of the merged gram tensor")
        a = alpha.reshape(2, -1, 1)
        second = Pair.of(
            a * A[:, 0] + (1 - a) * A[:, 1],
            A[:, 2],
            outputs[:, 0] + outputs[:, 1],
            outputs[:, 2],
            None,
            per_row=per == "row",
        )
        again = trial.numbers_of("solve_alpha_from_gram", gram=merged, p=0, q=1)
        _judge_alpha(trial, second, again, f"alpha of the second merge from the gram tensor, per {per},")


def _gram_cancelled(trial: Trial) -> None:
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
        made = trial.numbers_of(
            "gram_tensor", teacher_probs=maps, values=values, output_projection=trial.rounded([[1.0], [1.0]])
        )
        alpha = trial.numbers_of("solve_alpha_from_gram", gram=made, p=0, q=1)
        within = (alpha >= 0) & (alpha <= 1)  # not where it is NaN
        require(bool(within.all()), "the alpha of a gram tensor", "a number from 0 to 1", alpha)


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
    names = "probs_p", "probs_q", "value_outputs_p", "value_outputs_q"
    return dict(zip(names, (*maps, *outputs), strict=True))


def _ends(trial: Trial) -> None:
    pair = near_ends(trial)
    for per in ("map", "row"):
        alpha = _alpha(trial, pair, alpha_per=per)
        _judge_alpha(trial, _solved(pair, per_row=per == "row"), alpha, f"alpha near 0, 1/2 or 1, per {per},")


def _gram_ends(trial: Trial) -> None:
    pair = near_ends(trial)
    p, q, x, y = (array.astype(np.float64) for array in pair.values())
    products = np.einsum("bils,bjsd->bijld", np.stack([p, q], axis=1), np.stack([x, y], axis=1))
    gram = np.einsum("bijld,bmnld->bijmn", products, products)
    right = _solved(pair).clipped[:, 0]
    # All samples of one size, and each of another: a threshold that is a number, or that of the batch, shows.
    spread = 2.0 ** (np.arange(len(gram)) * 5 % 9 * 8 - 32)
    for factor in (2.0**-40, 1.0, 2.0**40, spread[:, None, None, None, None]):
        alpha = trial.numbers_of("solve_alpha_from_gram", gram=trial.rounded(gram * factor), p=0, q=1)
        size = f"{np.min(factor):g} to {np.max(factor):g}"
        trial.agree(alpha, right, "alpha", f"alpha near 0, 1/2 or 1 from gram tensors times {size}")


def _counted_scale(trial: Trial) -> None:
    # As in law/alpha-threshold; the last row of the first sample does not count, and the second sample is far larger.
    maps = []
    for delta in (0.0, 2.0**-7):
        row = [0.5 + delta, 0.5 - delta, 0.0]
        maps.append(trial.rounded([[row, [0.25, 0.5, 0.25] if delta else [0.0, 0.0, 1.0]], [row, row]]))
    last = 2.0**12
    x, y = np.array([[1.0], [1.25], [last]]), np.array([[3.0], [3.75], [last]])
    outputs = [trial.rounded(np.stack([array, array * 2.0**20])) for array in (x, y)]
    mask = np.array([[True, False], [True, True]])
    pair = dict(zip(("probs_p", "probs_q", "value_outputs_p", "value_outputs_q"), (*maps, *outputs), strict=True))
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


LAWS = (
    law("alpha-antisymmetric", "solve_alpha", "ALPHA-2 ALPHA-3 ALPHA-11", "alpha(p, q) + alpha(q, p) = 1.",
        _antisymmetric),
    law("alpha-value-bias", "solve_alpha", "ALPHA-2 ALPHA-4",
        "A constant row added to the value outputs of a head does not move alpha.", _value_bias),
    law("alpha-scale", "solve_alpha", "ALPHA-2 ALPHA-6",
        "Value outputs times a constant leave alpha as it is: degenerate is a relative notion.", _scale),
    law("alpha-minimum", "solve_alpha", "ALPHA-2 ALPHA-3 ALPHA-9 NUM-4",
        "No weight in [0, 1] gives a smaller error than alpha.", _minimum),
    law("alpha-clipped", "solve_alpha", "ALPHA-3 ALPHA-10", "An optimum outside of [0, 1] becomes 0 or 1.",
        _clipped),
    law("alpha-as-printed", "solve_alpha", "ALPHA-4",
        "The rule as_printed minimises the error with the misprinted N.", _printed),
    law("alpha-uncounted-rows", "solve_alpha", "ALPHA-7 ALPHA-9",
        "Rows where query_mask is False do not matter, and have alpha 1/2 per row.", _uncounted),
    law("alpha-no-counted-row", "solve_alpha", "ALPHA-7", "A sample without a counted row is degenerate: 1/2.",
        _no_counted_row),
    law("alpha-degenerate", "solve_alpha", "ALPHA-6 ALPHA-10", "Where every weight is as good, alpha is 1/2.",
        _degenerate),
    law("alpha-threshold", "solve_alpha", "ALPHA-6",
        "A pair is degenerate at the threshold of the specification, neither earlier nor later.", _threshold,
        dtypes=("float64", "float32")),
    law("alpha-batch", "solve_alpha", "ALPHA-8 MIX-10 NUM-3", "A sample has the same alpha alone as in a batch.",
        _alpha_batch),
    law("alpha-accumulates-wide", "solve_alpha", "ALPHA-8 NUM-1",
        "Sums over many rows are accumulated in float32 or wider.", _widened),
    law("alpha-near-ends", "solve_alpha", "ALPHA-2 ALPHA-3 ALPHA-6",
        "An alpha that is nearly 0, 1/2 or 1 is what it is.", _ends),
    law("gram-near-ends", "solve_alpha_from_gram", "GRAM-2 GRAM-3",
        "So is one from a gram tensor, for entries of any size.", _gram_ends, dtypes=("float64", "float32")),
    law("alpha-scale-of-counted-rows", "solve_alpha squeeze_heads gram_tensor solve_alpha_from_gram",
        "ALPHA-6 ALPHA-7 MIX-10 GRAM-3",
        "Whether a pair is degenerate is decided by its own counted rows, in its own sample.", _counted_scale,
        dtypes=("float64", "float32")),
    law("gram-tensor", "gram_tensor", "GRAM-1 GRAM-6",
        "The gram tensor holds the inner products of all A_i X_j.", _gram),
    law("gram-alpha", "gram_tensor solve_alpha_from_gram merge_gram", "GRAM-2 GRAM-3 GRAM-4 GRAM-5",
        "Alphas from the gram tensor are those of the value outputs, also after a merge.", _gram_alpha,
        dtypes=("float64", "float32")),
    law("gram-cancelled", "gram_tensor solve_alpha_from_gram", "GRAM-3 GRAM-7",
        "Value outputs of any size that cancel up to a rounding have an alpha from 0 to 1, and equal maps 1/2.",
        _gram_cancelled, dtypes=("float64", "float32")),
)  # fmt: skip
