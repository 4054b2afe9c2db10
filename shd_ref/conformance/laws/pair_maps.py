"""Laws in which two options of an operation on maps meet: softmax to the gram form."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from shd_ref.conformance.chain import Pair, check_alpha, soften_maps
from shd_ref.conformance.laws.law import Array, Trial, exactly
from shd_ref.conformance.laws.pair_rows import (
    MASKS,
    PER,
    SAMPLES,
    SHAPES,
    SINKS,
    TEMPERATURES,
    WIDE,
    Row,
    broken_row,
    cover,
    each,
    maps_of,
    numbers_of,
    options_of,
    pair_law,
    row_mask,
    say,
    shape_of,
)

_AXES = {"2": (), "3": (3,), "4": (2, 3), "5 or more": (2, 1, 3)}


@cache
def _softmax_rows() -> list[Row]:
    def allowed(row: Row) -> bool:
        if row.get("axes") in ("2", "3") and row.get("attn_mask") == "(B, 1, 1, S)":
            return False
        return not (row.get("axes") == "2" and row.get("attn_mask") == "(L, S)")

    return cover(
        {
            "axes": tuple(_AXES),
            "attn_mask": ("none", "full", "(L, S)", "(B, 1, 1, S)", "other"),
            "-inf": ("none", "some"),
            "temperature": ("one", "whole", "above", "below"),
            "size": ("small", "large"),
            "numbers": ("short", "full"),
        },
        allowed,
    )


def _softmax(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        seed = 2001 + 7 * number
        shape = (*_AXES[row["axes"]], *((19, 23) if row["size"] == "large" else (3, 5)))
        logits = numbers_of(trial, seed, row, *shape)
        if row["-inf"] == "some":
            drawn = trial.numbers(seed + 1, *shape, low=0, high=3, shift=0)
            logits = np.where(drawn == 0, -np.inf, logits).astype(logits.dtype)
        inputs: dict[str, Any] = {"attn_logits": logits}
        mask = None
        if row["attn_mask"] != "none":
            of = {
                "full": shape,
                "(L, S)": shape[-2:],
                "(B, 1, 1, S)": (shape[-4] if len(shape) > 3 else 1, 1, 1, shape[-1]),
                "other": (shape[-2], 1) if number % 2 else (shape[-1],),
            }[row["attn_mask"]]
            mask = trial.numbers(seed + 2, *of, low=0, high=3, shift=0) > 0
            inputs["attn_mask"] = mask
        temperature = TEMPERATURES[row["temperature"], row["numbers"]]
        if temperature != 1.0 or number % 2:
            inputs["temperature"] = temperature
        wide = logits.astype(np.float64) / temperature
        if mask is not None:
            wide = np.where(mask, wide, -np.inf)
        peak = wide.max(-1, keepdims=True)
        exps = np.exp(wide - np.where(np.isneginf(peak), 0.0, peak))
        total = exps.sum(-1, keepdims=True)
        expected = exps / np.where(total > 0, total, 1.0)
        got = trial.numbers_of("softmax", **inputs)
        trial.agree(got, expected, "probs", f"softmax {say(row)}")
        exactly(got[np.isneginf(wide)], 0.0, f"the masked keys of softmax {say(row)}")

    each(_softmax_rows(), check)


@cache
def _soften_rows() -> list[Row]:
    return cover(
        {
            "axes": tuple(_AXES),
            "row_sums": SINKS,
            "temperature": ("one", "whole", "above", "below"),
            "zero rows": ("none", "some"),
            "small mass": ("none", "some"),
            "size": ("small", "large"),
            "numbers": ("short", "full"),
        }
    )


def _soften(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        shape = (*_AXES[row["axes"]], *((19, 23) if row["size"] == "large" else (4, 5)))
        maps = maps_of(trial, 2501 + 7 * number, row, *shape)
        temperature = TEMPERATURES[row["temperature"], row["numbers"]]
        options = options_of(row, {"row_sums": "one"})
        got = trial.numbers_of("soften", attn_probs=maps, temperature=temperature, **options)
        expected = soften_maps(maps.astype(np.float64), temperature, row["row_sums"])
        trial.agree(got, expected, "probs", f"soften {say(row)}")

    each(_soften_rows(), check)


GROUPED = {"own": (3, 3), "two": (6, 3), "three": (6, 2), "one for all": (4, 1)}


@cache
def _value_rows() -> list[Row]:
    return cover(
        {
            "grouped": tuple(GROUPED),
            "samples": tuple(SAMPLES),
            "widths": ("different", "S = d_v = D"),
            "size": ("small", "large"),
            "numbers": ("short", "full"),
        }
    )


def values_of(trial: Trial, seed: int, row: Row, keys: int | None = None) -> tuple[Array, Array, Array]:
    """Values, output projection, and the value outputs that they have."""
    heads, kv = GROUPED[row["grouped"]]
    size = 19 if row.get("size") == "large" else 3
    keys = keys or (size if row["widths"] != "different" else size + 2)
    width, out = (keys, keys) if row["widths"] != "different" else (2 if keys != 2 else 3, size + 1)
    values = numbers_of(trial, seed, row, SAMPLES[row["samples"]], kv, keys, width)
    projection = numbers_of(trial, seed + 1, row, heads * width, out)
    read = np.repeat(values.astype(np.float64), heads // kv, axis=1)
    outputs = np.einsum("bhsv,hvd->bhsd", read, projection.astype(np.float64).reshape(heads, width, out))
    return values, projection, outputs


def _value_outputs(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        values, projection, expected = values_of(trial, 2701 + 7 * number, row)
        got = trial.numbers_of("value_outputs", values=values, output_projection=projection)
        size = np.abs(expected).max()
        trial.agree(got / size, expected / size, "probs", f"value_outputs over their largest entry, {say(row)}")

    each(_value_rows(), check)


_MAPS = (
    pair_law("softmax", "MAP-1 MAP-2 MAP-10 TEMP-2", _softmax),
    pair_law("soften", "TEMP-2 TEMP-5 TEMP-6 TEMP-7 MAP-9", _soften),
    pair_law("value_outputs", "MAP-6 MAP-11", _value_outputs),
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
        expected = _gram_of(maps, outputs, mask, row["alpha_per"])
        # Its entries are squared outputs, of every sample relative to the largest.
        size = np.abs(expected).reshape(batch, -1).max(-1).reshape(batch, *(1 for _ in expected.shape[1:]))
        size = np.where(size > 0, size, 1.0)
        trial.agree(got / size, expected / size, "probs", f"the gram tensor over its largest entry, {say(row)}")

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
            expected = right.clipped if row["alpha_per"] == "row" else right.clipped[:, 0]
            trial.agree(alpha, expected, "alpha", f"alpha of heads {p} and {q} from the gram tensor, {say(row)}")

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
            expected = _merge_gram(gram.astype(np.float64), p, q, alpha.astype(np.float64))
            size = np.abs(expected).max()
            what = f"the gram tensor after merging {p} and {q}, over its largest entry, {say(row)}"
            trial.agree(got / size, expected / size, "probs", what)

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


_ALPHAS = (
    pair_law("solve_alpha", "ALPHA-2 ALPHA-4 ALPHA-7 ALPHA-9 MIX-17", _alphas, dtypes=WIDE),
    pair_law("gram_tensor", "GRAM-1 GRAM-6 MAP-6", _gram_tensor),
    pair_law("solve_alpha_from_gram", "GRAM-2 GRAM-5 GRAM-6", _gram_alphas, dtypes=WIDE),
    pair_law("merge_gram", "GRAM-4 GRAM-6", _merged_grams),
)


LAWS = (*_MAPS, *_ALPHAS)
