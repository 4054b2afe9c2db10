"""Laws in which two options of an operation on maps meet: softmax to the gram form."""

from __future__ import annotations

from typing import Any

import numpy as np

from shd_ref.conformance.laws.law import WIDE, Array, Trial
from shd_ref.conformance.laws.pair_rows import (
    AXES,
    GROUPED,
    POOLS,
    SAMPLES,
    TEMPERATURES,
    Calls,
    Row,
    covering,
    maps_of,
    numbers_of,
    options_of,
    present,
    row_mask,
    shape_of,
    weights_of,
)
from shd_ref.conformance.variants import gram_of


def _fewer_axes(row: Row) -> bool:
    """A mask has no more axes than the logits, and with two axes ``(L, S)`` is the full one."""
    if row.get("axes") in ("2", "3") and row.get("attn_mask") == "(B, 1, 1, S)":
        return False
    return not (row.get("axes") == "2" and row.get("attn_mask") == "(L, S)")


@covering("softmax", "axes, attn_mask, -inf, temperature, size, numbers", _fewer_axes)
def _softmax(trial: Trial, number: int, row: Row) -> Calls:
    seed = 2001 + 7 * number
    shape = (*AXES[row["axes"]], *((19, 23) if row["size"] == "large" else (3, 5)))
    logits = numbers_of(trial, seed, row, *shape)
    if row["-inf"] == "some":
        drawn = trial.numbers(seed + 1, *shape, low=0, high=3, shift=0)
        logits = np.where(drawn == 0, -np.inf, logits).astype(logits.dtype)
    inputs: dict[str, Any] = {"attn_logits": logits}
    if row["attn_mask"] != "none":
        mask_shape = {
            "full": shape,
            "(L, S)": shape[-2:],
            "(B, 1, 1, S)": (shape[-4] if len(shape) > 3 else 1, 1, 1, shape[-1]),
            "other": (shape[-2], 1) if number % 2 else (shape[-1],),
        }[row["attn_mask"]]
        inputs["attn_mask"] = trial.numbers(seed + 2, *mask_shape, low=0, high=3, shift=0) > 0
    temperature = TEMPERATURES[row["temperature"], row["numbers"]]
    yield {**inputs, "temperature": temperature} if temperature != 1.0 or number % 2 else inputs


@covering("soften", "axes, row_sums, temperature, zero rows, small mass, size, numbers")
def _soften(trial: Trial, number: int, row: Row) -> Calls:
    shape = (*AXES[row["axes"]], *((19, 23) if row["size"] == "large" else (4, 5)))
    maps = maps_of(trial, 2501 + 7 * number, row, *shape)
    temperature = TEMPERATURES[row["temperature"], row["numbers"]]
    yield {"attn_probs": maps, "temperature": temperature, **options_of(row, row_sums="one")}


def _values(trial: Trial, seed: int, row: Row, keys: int | None = None) -> dict[str, Array]:
    heads, kv = GROUPED[row["grouped"]]
    size = 19 if row.get("size") == "large" else 3
    keys = keys or (size if row["widths"] != "different" else size + 2)
    width, out = (keys, keys) if row["widths"] != "different" else (2 if keys != 2 else 3, size + 1)
    return {
        "values": numbers_of(trial, seed, row, SAMPLES[row["samples"]], kv, keys, width),
        "output_projection": numbers_of(trial, seed + 1, row, heads * width, out),
    }


@covering("value_outputs", "grouped, samples, widths, size, numbers")
def _value_outputs(trial: Trial, number: int, row: Row) -> Calls:
    yield _values(trial, 2701 + 7 * number, row)


@covering("solve_alpha", "rule, alpha_per, row_sums, query_mask, zero rows, samples, shape, size, numbers")
def _alphas(trial: Trial, number: int, row: Row) -> Calls:
    seed = 3501 + 11 * number
    batch, rows, keys = shape_of(row)
    maps = maps_of(trial, seed, row, batch, 2, rows, keys)
    outputs = numbers_of(trial, seed + 1, row, batch, 2, keys, 21 if row["size"] == "large" else 4)
    yield {
        **{f"probs_{name}": maps[:, head].copy() for head, name in enumerate("pq")},
        **{f"value_outputs_{name}": outputs[:, head].copy() for head, name in enumerate("pq")},
        **options_of(row, rule="least_squares", alpha_per="map", row_sums="one"),
        **present(query_mask=row_mask(row["query_mask"], batch, rows)),
    }


@covering("gram_tensor", "grouped, alpha_per, row_sums, query_mask, zero rows, samples, shape, widths, numbers")
def _grams(trial: Trial, number: int, row: Row) -> Calls:
    seed = 4001 + 11 * number
    batch, rows, keys = shape_of(row)
    yield {
        "teacher_probs": maps_of(trial, seed + 2, row, batch, GROUPED[row["grouped"]][0], rows, keys),
        **_values(trial, seed, row, keys),
        **present(query_mask=row_mask(row["query_mask"], batch, rows)),
        **options_of(row, alpha_per="map", row_sums="one"),
    }


_POOL = "alpha_per, heads of the pool, positions, samples, numbers"


def _has_third(row: Row) -> bool:
    return not (row.get("heads of the pool") == "2" and "not" in row.get("positions", ""))


def _pool(trial: Trial, seed: int, row: Row) -> tuple[tuple[int, ...], list[dict[str, Any]]]:
    """The shape of an alpha, and a gram tensor with every two positions that a row asks for."""
    heads, batch = POOLS[row["heads of the pool"]], SAMPLES[row["samples"]]
    # Halves and small integers, so that bfloat16 holds their products too.
    maps = trial.probs(seed, batch, heads, 2, 4, bits=1)
    outputs = trial.numbers(seed + 1, batch, heads, 4, 2, low=-3, high=3, shift=0)
    if row["numbers"] == "full":
        maps, outputs = trial.shares(seed, batch, heads, 3, 4), trial.quotients(seed + 1, batch, heads, 4, 3)
    gram = trial.rounded(gram_of(maps.astype(np.float64), outputs.astype(np.float64), per=row["alpha_per"]))
    order, last = row["positions"].split(", ")
    calls = [
        {"gram": gram, "p": p, "q": q}
        for p in range(heads)
        for q in range(heads)
        if p != q and (p < q) == (order == "p < q") and (heads - 1 in (p, q)) == (last == "the last")
    ]
    return (batch, maps.shape[2]) if row["alpha_per"] == "row" else (batch,), calls


@covering("solve_alpha_from_gram", _POOL, _has_third)
def _gram_alphas(trial: Trial, number: int, row: Row) -> Calls:
    _, calls = _pool(trial, 4501 + 11 * number, row)
    yield from calls


@covering("merge_gram", _POOL, _has_third)
def _merged_grams(trial: Trial, number: int, row: Row) -> Calls:
    seed = 5001 + 11 * number
    shape, calls = _pool(trial, seed, row)
    for inputs in calls:
        yield {**inputs, "alpha": weights_of(trial, seed + 3, row, *shape)}


LAWS = (
    _softmax.law("MAP-1 MAP-2 MAP-10 TEMP-2"),
    _soften.law("TEMP-2 TEMP-5 TEMP-6 TEMP-7 MAP-9"),
    _value_outputs.law("MAP-6 MAP-11"),
    _alphas.law("ALPHA-2 ALPHA-4 ALPHA-7 ALPHA-9 MIX-17", WIDE),
    _grams.law("GRAM-1 GRAM-6 MAP-6"),
    _gram_alphas.law("GRAM-2 GRAM-5 GRAM-6", WIDE),
    _merged_grams.law("GRAM-4 GRAM-6"),
)
