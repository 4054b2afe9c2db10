"""Laws in which two options of the chapters MAP and TEMP meet."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from shd_ref.conformance.chain import soften_maps
from shd_ref.conformance.laws.covering import Row, cover, each
from shd_ref.conformance.laws.law import Array, Trial, exactly
from shd_ref.conformance.laws.pairs.rows import (
    SAMPLES,
    SINKS,
    TEMPERATURES,
    maps_of,
    numbers_of,
    options_of,
    pair_law,
    say,
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
        wanted = exps / np.where(total > 0, total, 1.0)
        got = trial.numbers_of("softmax", **inputs)
        trial.agree(got, wanted, "probs", f"softmax {say(row)}")
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
        wanted = soften_maps(maps.astype(np.float64), temperature, row["row_sums"])
        trial.agree(got, wanted, "probs", f"soften {say(row)}")

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
    wanted = np.einsum("bhsv,hvd->bhsd", read, projection.astype(np.float64).reshape(heads, width, out))
    return values, projection, wanted


def _value_outputs(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        values, projection, wanted = values_of(trial, 2701 + 7 * number, row)
        got = trial.numbers_of("value_outputs", values=values, output_projection=projection)
        size = np.abs(wanted).max()
        trial.agree(got / size, wanted / size, "probs", f"value_outputs over their largest entry, {say(row)}")

    each(_value_rows(), check)


LAWS = (
    pair_law("softmax", "MAP-1 MAP-2 MAP-10 TEMP-2", _softmax),
    pair_law("soften", "TEMP-2 TEMP-5 TEMP-6 TEMP-7 MAP-9", _soften),
    pair_law("value_outputs", "MAP-6 MAP-11", _value_outputs),
)
