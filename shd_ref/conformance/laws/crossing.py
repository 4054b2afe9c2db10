"""Calls of the student's operations in which every two values of two options meet, with inputs to fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from math import prod
from typing import Any, TypeAlias

import numpy as np

from shd_ref.conformance.laws.law import Array, Trial
from shd_ref.conformance.vectors import draw_integers

Choice: TypeAlias = Mapping[str, str]  # an option's name to the value taken

_CANDIDATES = 8
_LOSS: dict[str, tuple[str, ...]] = {
    "divergence": ("kl", "reverse_kl", "js", "mse"),
    "reduction": ("sum", "mean"),
    "support": ("error", "intersect"),
    "row_sums": ("one", "at_most_one"),
    "temperature": ("one", "whole", "above", "below"),
    "beta": ("one", "other", "other", "other", "zero"),  # nothing else shows where it is zero
    "layers": ("one array", "a list of one", "alike", "of different shapes", "many"),
    "loss_mask": ("none", "some rows", "an empty sample"),
    "samples": ("1", "few", "more"),
    "zero rows": ("none", "some"),
    "shape": ("L < S", "L = S", "L > S"),
    "numbers": ("short", "full", "full"),
    "attn_mask": ("none", "full", "(L, S)", "(B, 1, 1, S)", "(S)", "(H, 1, S)", "(B, 1, L, S)", "(1, H, L, 1)"),
}
_FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    "logits": {**_LOSS, "-inf": ("none", "some")},
    "queries and keys": {
        **_LOSS,
        "scale": ("one", "positive", "positive", "negative", "zero"),
        "grouped": ("own", "two", "three", "one for all"),
    },
    "intersect_support": {
        **{name: _LOSS[name] for name in ("row_sums", "loss_mask", "samples", "zero rows", "shape", "attn_mask")},
        "numbers": ("short", "full"),
        "-inf": ("none", "some"),
        "small mass": ("none", "some"),
    },
    "align_tokens": {
        "rows": ("not given", "all of them", "some in order", "some out of order"),
        "columns": ("not given", "all of them", "some in order", "some out of order"),
        "query_mask": _LOSS["loss_mask"],
        "row_sums": _LOSS["row_sums"],
        "zero rows": ("none", "some"),
        "small mass": ("none", "some"),
        "samples": _LOSS["samples"],
        "shape": _LOSS["shape"],
        "numbers": ("short", "full"),
    },
}


@cache
def choices(kind: str, count: int) -> tuple[Choice, ...]:
    """So many choices of a value for each option; of a few drawn at random, the one with the most new pairs."""
    factors = _FACTORS[kind]
    draws = iter(draw_integers(sum(map(ord, kind)), count * _CANDIDATES * len(factors)).tolist())
    seen: set[Any] = set()
    result = []
    for _ in range(count):
        drawn = [
            {name: values[next(draws) % len(values)] for name, values in factors.items()} for _ in range(_CANDIDATES)
        ]
        result.append(max(drawn, key=lambda choice: len(set(combinations(choice.items(), 2)) - seen)))
        seen.update(combinations(result[-1].items(), 2))
    return tuple(result)


@dataclass
class Maker:
    """Makes the arrays of one call: seeded, in the dtype under judgement, of short numbers or of all its bits."""

    trial: Trial
    seed: int
    full: bool
    _used: int = field(default=0, init=False)

    def draws(self, *shape: int) -> Array:
        """Integers of 0..65535."""
        self._used += 1
        seed = self.trial.shifted(self.seed * 7919 + self._used * 104729)
        drawn: Array = draw_integers(seed, prod(shape)).reshape(shape)
        return drawn

    def fractions(self, *shape: int) -> Array:
        """Numbers of [0, 1): multiples of 1/16, or with all bits of a float64."""
        if not self.full:
            return self.draws(*shape) % 16 / 16.0
        return sum((self.draws(*shape) / 2.0 ** (16 * digit) for digit in (1, 2, 3, 4)), np.zeros(shape))

    def number(self, low: float, high: float) -> float:
        """A Python number in between: of a few bits, or of all."""
        draw = float(self.fractions(1)[0])
        return low + (high - low) * draw if self.full else round(8 * low + 0.5) / 8 + int(8 * (high - low) * draw) / 8

    def distributions(self, weights: Array) -> Array:
        """Rows of weights (whole numbers) as distributions; rows without a weight are zero."""
        total = weights.sum(-1, keepdims=True)
        if self.full:
            finer = np.where(weights > 0, weights + self.fractions(*weights.shape), 0.0)
            return np.asarray(finer / np.where(total > 0, finer.sum(-1, keepdims=True), 1.0))
        units = 64 * 2 ** max(0, (weights.shape[-1] - 1).bit_length() - 3)
        counts = weights * units // np.where(total > 0, total, 1)
        missing = np.where(total[..., 0] > 0, units - counts.sum(-1), 0)
        rank = np.cumsum(weights > 0, axis=-1)
        return np.asarray((counts + ((weights > 0) & (rank <= missing[..., None]))) / units)

    def shares(self, *shape: int) -> Array:
        """What part of a row's mass its keys have where a sink takes the rest: 1, 3/4, 1/2 or 1/4, or any."""
        if self.full:
            return 0.05 + 0.95 * self.fractions(*shape)
        return (1 + self.draws(*shape) % 4) / 4.0


def loss_call(
    trial: Trial, seed: int, choice: Choice, shapes: Sequence[tuple[int, int, int, int]] | None = None
) -> dict[str, Any]:
    """Inputs with the options of a choice, of shapes drawn or given ``(B, H, L, S)``."""
    # Half precision rounds the sums of full numbers further than float32 arrays may be off (MAP-3).
    exact = trial.subject.dtype in ("float64", "float32")
    make = Maker(trial, seed, choice["numbers"] == "full" and exact)
    shapes = _shapes(make, choice) if shapes is None else shapes
    options = loss_options(make, choice)
    loss_mask = row_mask(make, choice["loss_mask"], shapes[0])
    attn_mask = _attn_mask(make, choice, shapes[0])
    maps: list[Array] = []
    logits: list[Array] = []
    for shape in shapes:
        z = 6.0 * make.fractions(*shape) - 3.0
        if choice.get("-inf") == "some":
            z = np.where((make.draws(*shape) % 4 == 0) & ((np.arange(shape[3]) > 0) | _zero(choice)), -np.inf, z)
        logits.append(trial.rounded(z))
        may = np.broadcast_to(~np.isneginf(z) & (True if attn_mask is None else attn_mask), shape)
        maps.append(trial.rounded(_maps(make, choice, shape, may, loss_mask)))
    listed = choice["layers"] != "one array"
    inputs: dict[str, Any] = {"supervision": maps if listed else maps[0]}
    if "grouped" in choice:
        queries, keys = _queries_and_keys(make, choice, shapes)
        inputs |= {"queries": queries if listed else queries[0], "keys": keys if listed else keys[0]}
        inputs["scale"] = _scale(make, choice["scale"])
    else:
        inputs["student_logits"] = logits if listed else logits[0]
    masks = {"loss_mask": loss_mask, "attn_mask": attn_mask}
    return {**inputs, **options, **{name: mask for name, mask in masks.items() if mask is not None}}


def loss_options(make: Maker, choice: Choice) -> dict[str, Any]:
    """The options that are not arrays; those at their defaults are left out."""
    words = {"divergence": "kl", "reduction": "sum", "support": "error", "row_sums": "one"}
    options: dict[str, Any] = {name: choice[name] for name, default in words.items() if choice[name] != default}
    temperature, beta = choice["temperature"], choice["beta"]
    if temperature != "one":
        whole = float(2 + make.draws(1)[0] % 4)
        low, high = (1.05, 2.95) if temperature == "above" else (0.4, 0.95)
        options["temperature"] = whole if temperature == "whole" else make.number(low, high)
    if beta != "one":
        options["beta"] = make.number(0.3, 5.0) if beta == "other" else 0.0
    return options


def row_mask(make: Maker, kind: str, shape: Sequence[int]) -> Array | None:
    """A mask ``(B, L)``: rows at random, or none of the first or of the last sample."""
    if kind == "none":
        return None
    mask: Array = make.draws(shape[0], shape[2]) % 3 > 0
    mask[:, make.draws(1)[0] % shape[2]] = True
    if kind == "an empty sample":
        mask[make.draws(1)[0] % 2 - 1] = False
    else:
        mask[-1, make.draws(1)[0] % shape[2]] = shape[2] == 1
    return mask


def _zero(choice: Choice) -> bool:
    return choice["zero rows"] == "some"


def shape_of(make: Maker, choice: Choice) -> tuple[int, int, int, int]:
    """``(B, H, L, S)`` with the number of samples and the form of the maps that were chosen."""
    drawn = make.draws(4)
    batch = {"1": 1, "few": 2 + int(drawn[0]) % 2, "more": 5 + int(drawn[0]) % 2}[choice["samples"]]
    small, large = 2 + int(drawn[1]) % 2, 4 + int(drawn[2]) % 2
    rows, keys = {"L < S": (small, large), "L = S": (large - 1, large - 1), "L > S": (large, small)}[choice["shape"]]
    return batch, 1 + int(drawn[3]) % 3, rows, keys


def _shapes(make: Maker, choice: Choice) -> list[tuple[int, int, int, int]]:
    batch, heads, rows, keys = shape_of(make, choice)
    count = {"one array": 1, "a list of one": 1, "alike": 2, "of different shapes": 3, "many": 6}[choice["layers"]]
    group = {"own": 1, "two": 2, "three": 3, "one for all": 1}[choice.get("grouped", "own")]
    if choice["layers"] == "of different shapes":
        # A mask of all layers has one head, and keys differ where it does not name them.
        fewest = 2 if group > 1 else 1
        wide = choice["attn_mask"] in ("none", "(1, H, L, 1)")
        return [(batch, (fewest + i) * group, rows, keys + wide * i) for i in range(count)]
    return [(batch, (max(2, heads) if group > 1 else heads) * group, rows, keys)] * count


def _attn_mask(make: Maker, choice: Choice, shape: Sequence[int]) -> Array | None:
    batch, heads, rows, keys = shape
    if choice["layers"] == "of different shapes":
        heads = 1
    kind = choice["attn_mask"]
    if kind == "none":
        return None
    mask_shape = {
        "full": (batch, heads, rows, keys),
        "(L, S)": (rows, keys),
        "(B, 1, 1, S)": (batch, 1, 1, keys),
        "(S)": (keys,),
        "(H, 1, S)": (heads, 1, keys),
        "(B, 1, L, S)": (batch, 1, rows, keys),
        "(1, H, L, 1)": (1, heads, rows, 1),
    }[kind]
    mask: Array = make.draws(*mask_shape) % 3 > 0
    if kind == "(1, H, L, 1)":
        mask[..., 0, :] = True
        return mask if _zero(choice) else np.ones_like(mask)
    mask.reshape(-1, keys)[0, -1] = False
    if not _zero(choice):
        mask[..., 0] = True
    return mask


def _maps(make: Maker, choice: Choice, shape: Sequence[int], may: Array, loss_mask: Array | None) -> Array:
    """Supervision that these options allow, with anything but a distribution where rows do not count."""
    everywhere = choice["divergence"] == "reverse_kl"
    drawn = make.draws(*shape)
    weights = 1 + drawn % 8 if everywhere else drawn // 8 % 5
    if choice["support"] == "error":
        weights = np.where(may, weights, 0)
        weights[..., 0] += (weights.sum(-1) == 0) & may[..., 0]
    else:
        weights[..., -1] += weights.sum(-1) == 0
    maps = make.distributions(weights)
    if choice["row_sums"] == "at_most_one":
        maps = maps * make.shares(*shape[:3])[..., None]
    if _zero(choice):
        maps = np.where(make.draws(*shape[:3])[..., None] % 4 == 0, 0.0, maps)
    if loss_mask is not None:
        other = make.distributions(1 + make.draws(*shape) % 3) * 1.5
        maps = np.where(loss_mask[:, None, :, None], maps, other)
    return maps


def _scale(make: Maker, kind: str) -> float:
    number = make.number(0.3, 0.9)
    return {"one": 1.0, "positive": number, "negative": -number, "zero": 0.0}[kind]


def _queries_and_keys(
    make: Maker, choice: Choice, shapes: Sequence[tuple[int, int, int, int]]
) -> tuple[list[Array], list[Array]]:
    queries, keys = [], []
    for batch, heads, rows, columns in shapes:
        width = 2 + int(make.draws(1)[0]) % 3
        shared = {"own": heads, "two": heads // 2, "three": heads // 3, "one for all": 1}[choice["grouped"]]
        queries.append(make.trial.rounded(4.0 * make.fractions(batch, heads, rows, width) - 2.0))
        keys.append(make.trial.rounded(4.0 * make.fractions(batch, shared, columns, width) - 2.0))
    return queries, keys


def option_calls(operation: str, trial: Trial, count: int) -> Iterator[dict[str, Any]]:
    """Calls in which every two values of two options meet."""
    if operation == "intersect_support":
        return _intersect_calls(trial, count)
    if operation == "align_tokens":
        return _align_calls(trial, count)
    kind = "queries and keys" if operation.endswith("qk") else "logits"
    return (loss_call(trial, number, choice) for number, choice in enumerate(choices(kind, count)))


def _intersect_calls(trial: Trial, count: int) -> Iterator[dict[str, Any]]:
    for number, choice in enumerate(choices("intersect_support", count)):
        whole = {**choice, "divergence": "kl", "support": "intersect", "layers": "one array", "reduction": "sum"}
        whole |= {"temperature": "one", "beta": "one"}
        inputs = loss_call(trial, 1000 + number, whole)
        del inputs["support"]
        if choice["small mass"] == "some":
            inputs["supervision"] = trial.rounded(_thinned(inputs["supervision"], inputs.get("loss_mask")))
        yield inputs


def _align_calls(trial: Trial, count: int) -> Iterator[dict[str, Any]]:
    exact = trial.subject.dtype in ("float64", "float32")
    for number, choice in enumerate(choices("align_tokens", count)):
        make = Maker(trial, 2000 + number, choice["numbers"] == "full" and exact)
        shape = shape_of(make, choice)
        mask = row_mask(make, choice["query_mask"], shape)
        whole = {**choice, "divergence": "kl", "support": "intersect"}
        maps = _maps(make, whole, shape, np.ones(shape, dtype=np.bool_), mask)
        if choice["small mass"] == "some":
            maps = _thinned(maps, mask)
        inputs: dict[str, Any] = {"attn_probs": trial.rounded(maps), "row_sums": choice["row_sums"]}
        for name, axis in (("rows", 2), ("columns", 3)):
            kept = positions(make, choice[name], shape[axis])
            if kept is not None:
                inputs[name] = kept
        yield inputs if mask is None else {**inputs, "query_mask": mask}


def positions(make: Maker, kind: str, size: int) -> list[int] | None:
    """A list of positions of an axis, in order or not."""
    if kind == "not given":
        return None
    order = [int(i) for i in np.argsort(make.draws(size), kind="stable")]
    if kind == "all of them":
        return order
    kept = order[: max(1, size - 1 - int(make.draws(1)[0]) % 2)]
    if kind == "some in order":
        return sorted(kept)
    return sorted(kept, reverse=True) if kept == sorted(kept) else kept


def _thinned(maps: Array, mask: Array | None) -> Array:
    """The maps with all but 2^-14 of a row's mass moved to one of its keys, a different one from row to row."""
    thinned = maps.astype(np.float64) * 2.0**-14
    rows, keys = maps.shape[2:]
    where = np.arange(rows) % keys
    thinned[:, :, np.arange(rows), where] += maps.astype(np.float64).sum(-1) * (1 - 2.0**-14)
    return thinned if mask is None else np.where(mask[:, None, :, None], thinned, maps)
