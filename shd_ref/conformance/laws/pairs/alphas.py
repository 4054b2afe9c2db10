"""Laws in which two options of the chapters ALPHA and GRAM meet."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from shd_ref.conformance.chain import Pair, check_alpha
from shd_ref.conformance.laws.covering import Row, cover, each
from shd_ref.conformance.laws.law import Array, Trial, exactly
from shd_ref.conformance.laws.pairs.maps import GROUPED, values_of
from shd_ref.conformance.laws.pairs.rows import (
    MASKS,
    PER,
    SAMPLES,
    SHAPES,
    SINKS,
    WIDE,
    broken_row,
    maps_of,
    numbers_of,
    options_of,
    pair_law,
    row_mask,
    say,
    shape_of,
)


@cache
def _alpha_rows() -> list[Row]:
    return cover(
        {
            "rule": ("least_squares", "as_printed"),
            "alpha_per": PER,
            "row_sums": SINKS,
            "query_mask": MASKS,
            "zero rows": ("none", "some"),
            "samples": tuple(SAMPLES),
            "shape": tuple(SHAPES),
            "size": ("small", "large"),
            "numbers": ("short", "full"),
        }
    )


def _alphas(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        seed = 3501 + 11 * number
        batch, rows, keys = shape_of(row)
        maps = maps_of(trial, seed, row, batch, 2, rows, keys)
        outputs = numbers_of(trial, seed + 1, row, batch, 2, keys, 21 if row["size"] == "large" else 4)
        mask = row_mask(row["query_mask"], batch, rows)
        inputs: dict[str, Any] = {
            "probs_p": maps[:, 0].copy(),
            "probs_q": maps[:, 1].copy(),
            "value_outputs_p": outputs[:, 0].copy(),
            "value_outputs_q": outputs[:, 1].copy(),
            **options_of(row, {"rule": "least_squares", "alpha_per": "map", "row_sums": "one"}),
        }
        if mask is not None:
            inputs["query_mask"] = mask
        a, x = maps.astype(np.float64), outputs.astype(np.float64)
        right = Pair.of(
            a[:, 0],
            a[:, 1],
            x[:, 0],
            x[:, 1],
            mask,
            per_row=row["alpha_per"] == "row",
            printed=row["rule"] == "as_printed",
        )
        alpha = trial.numbers_of("solve_alpha", **inputs)
        exactly(list(alpha.shape), [batch] if row["alpha_per"] == "map" else [batch, rows], "the shape of alpha")
        difference = check_alpha(right, alpha.reshape(right.best.shape), trial.subject.dtype, flat=False)
        if difference:
            raise broken_row(row, difference, "alpha")

    each(_alpha_rows(), check)


@cache
def _gram_rows() -> list[Row]:
    return cover(
        {
            "grouped": tuple(GROUPED),
            "alpha_per": PER,
            "row_sums": SINKS,
            "query_mask": MASKS,
            "zero rows": ("none", "some"),
            "samples": tuple(SAMPLES),
            "shape": tuple(SHAPES),
            "widths": ("different", "S = d_v = D"),
            "numbers": ("short", "full"),
        }
    )


def _gram_of(maps: Array, outputs: Array, mask: Array | None, per: str) -> Array:
    products = np.einsum("bils,bjsd->bijld", maps.astype(np.float64), outputs)
    weight = np.ones((len(maps), maps.shape[2])) if mask is None else mask.astype(np.float64)
    terms = "bijld,bmnld,bl->bijmn" + ("l" if per == "row" else "")
    gram: Array = np.einsum(terms, products, products, weight)
    return gram


def _gram_tensor(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        seed = 4001 + 11 * number
        batch, rows, keys = shape_of(row)
        values, projection, outputs = values_of(trial, seed, row, keys)
        maps = maps_of(trial, seed + 2, row, batch, outputs.shape[1], rows, keys)
        mask = row_mask(row["query_mask"], batch, rows)
        options: dict[str, Any] = {} if mask is None else {"query_mask": mask}
        options |= options_of(row, {"alpha_per": "map", "row_sums": "one"})
        got = trial.numbers_of(
            "gram_tensor", teacher_probs=maps, values=values, output_projection=projection, **options
        )
        wanted = _gram_of(maps, outputs, mask, row["alpha_per"])
        # Its entries are squared outputs, of every sample relative to the largest.
        size = np.abs(wanted).reshape(batch, -1).max(-1).reshape(batch, *(1 for _ in wanted.shape[1:]))
        size = np.where(size > 0, size, 1.0)
        trial.agree(got / size, wanted / size, "probs", f"the gram tensor over its largest entry, {say(row)}")

    each(_gram_rows(), check)


_POOLS = {"2": 2, "3": 3, "more": 6}


@cache
def _pool_rows() -> list[Row]:
    def allowed(row: Row) -> bool:
        return not (row.get("heads of the pool") == "2" and "not" in row.get("positions", ""))

    return cover(
        {
            "alpha_per": PER,
            "heads of the pool": tuple(_POOLS),
            "positions": ("p < q, the last", "p > q, the last", "p < q, not the last", "p > q, not the last"),
            "samples": tuple(SAMPLES),
            "numbers": ("short", "full"),
        },
        allowed,
    )


def _pool(trial: Trial, seed: int, row: Row) -> tuple[Array, Array, list[tuple[int, int]]]:
    """A gram tensor with the maps and outputs that it is of, and every two positions that a row asks for."""
    heads, batch = _POOLS[row["heads of the pool"]], SAMPLES[row["samples"]]
    # Halves and small integers, so that bfloat16 holds their products too.
    maps = trial.probs(seed, batch, heads, 2, 4, bits=1)
    outputs = trial.numbers(seed + 1, batch, heads, 4, 2, low=-3, high=3, shift=0)
    if row["numbers"] == "full":
        maps, outputs = trial.shares(seed, batch, heads, 3, 4), trial.quotients(seed + 1, batch, heads, 4, 3)
    order, last = row["positions"].split(", ")
    pairs = [
        (p, q)
        for p in range(heads)
        for q in range(heads)
        if p != q and (p < q) == (order == "p < q") and (heads - 1 in (p, q)) == (last == "the last")
    ]
    return maps.astype(np.float64), outputs.astype(np.float64), pairs


def _gram_alphas(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        maps, outputs, pairs = _pool(trial, 4501 + 11 * number, row)
        gram = trial.rounded(_gram_of(maps, outputs, None, row["alpha_per"]))
        for p, q in pairs:
            right = Pair.of(
                maps[:, p], maps[:, q], outputs[:, p], outputs[:, q], None, per_row=row["alpha_per"] == "row"
            )
            alpha = trial.numbers_of("solve_alpha_from_gram", gram=gram, p=p, q=q)
            wanted = right.clipped if row["alpha_per"] == "row" else right.clipped[:, 0]
            trial.agree(alpha, wanted, "alpha", f"alpha of heads {p} and {q} from the gram tensor, {say(row)}")

    each(_pool_rows(), check)


def _merged_grams(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        seed = 5001 + 11 * number
        maps, outputs, pairs = _pool(trial, seed, row)
        gram = trial.rounded(_gram_of(maps, outputs, None, row["alpha_per"]))
        shape = (len(maps), maps.shape[2]) if row["alpha_per"] == "row" else (len(maps),)
        for p, q in pairs:
            alpha = trial.numbers(seed + 3, *shape, low=0, high=16, shift=4)
            if row["numbers"] == "full":
                alpha = trial.rounded(np.abs(trial.quotients(seed + 3, *shape)) / 3.5)
            got = trial.numbers_of("merge_gram", gram=gram, p=p, q=q, alpha=alpha)
            wanted = _merge_gram(gram.astype(np.float64), p, q, alpha.astype(np.float64))
            size = np.abs(wanted).max()
            what = f"the gram tensor after merging {p} and {q}, over its largest entry, {say(row)}"
            trial.agree(got / size, wanted / size, "probs", what)

    each(_pool_rows(), check)


def _merge_gram(gram: Array, p: int, q: int, alpha: Array) -> Array:
    """GRAM-4 as one linear map for maps and one for value outputs."""
    heads = gram.shape[1]
    rest = np.eye(heads)[[h for h in range(heads) if h not in (p, q)]]
    by_row = alpha if alpha.ndim == 2 else alpha[:, None]  # (B, L or 1)
    mix = np.zeros((*by_row.shape, heads - 1, heads))
    mix[..., 1:, :] = rest
    mix[..., 0, p], mix[..., 0, q] = by_row, 1 - by_row
    add = np.concatenate(([np.eye(heads)[p] + np.eye(heads)[q]], rest))
    wide = gram if gram.ndim == 6 else gram[..., None]
    merged: Array = np.einsum("blIi,Jj,blKk,Nn,bijknl->bIJKNl", mix, add, mix, add, wide, optimize=True)
    return merged if gram.ndim == 6 else merged[..., 0]


LAWS = (
    pair_law("solve_alpha", "ALPHA-2 ALPHA-4 ALPHA-7 ALPHA-9 MIX-17", _alphas, dtypes=WIDE),
    pair_law("gram_tensor", "GRAM-1 GRAM-6 MAP-6", _gram_tensor),
    pair_law("solve_alpha_from_gram", "GRAM-2 GRAM-5 GRAM-6", _gram_alphas, dtypes=WIDE),
    pair_law("merge_gram", "GRAM-4 GRAM-6", _merged_grams),
)
