"""Vector cases: what the files under ``specs/vectors`` say, as inputs, expected outputs and rules.

Recipes name large arrays instead of spelling them out (``specs/conformance.md``): every entry is an integer over a
power of two, so that any language writes the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance.adapter import OwnDtype
from shd_ref.conformance.specification import DTYPES, VECTORS_VERSION, vectors_folder

MULTIPLIER, INCREMENT, MODULUS = 1664525, 1013904223, 2**32


def draw_integers(seed: int, count: int) -> NDArray[np.int64]:
    """``count`` draws of the 32-bit generator, each in 0..65535."""
    powers, sums = _coefficients(1 << max(count - 1, 1).bit_length())
    states = powers[:count] * np.uint32(seed % MODULUS) + sums[:count]
    draws: NDArray[np.int64] = np.right_shift(states, np.uint32(16)).astype(np.int64)
    return draws


@cache
def _coefficients(count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """state_k = M^k seed + (1 + M + ... + M^(k-1)) I: the factors and the sums; uint32 is modulo 2^32."""
    powers = np.full(count, MULTIPLIER, dtype=np.uint32).cumprod(dtype=np.uint32)  # M^1 .. M^count
    sums = np.concatenate((np.ones(1, dtype=np.uint32), powers[:-1])).cumsum(dtype=np.uint32)
    return powers, sums * np.uint32(INCREMENT)


def make_array(shape: Sequence[int], recipe: Mapping[str, Any]) -> NDArray[Any]:
    """The array of a recipe: float64, or boolean for masks; the last two axes are rows and keys."""
    kind = recipe["kind"]
    if kind == "lengths":
        counted: NDArray[np.bool_] = np.arange(shape[1])[None, :] < np.asarray(recipe["lengths"])[:, None]
        return counted
    draws = draw_integers(recipe["seed"], prod(shape)).reshape(tuple(shape))
    if kind == "mask":
        chosen: NDArray[np.bool_] = draws % recipe["of"] < recipe["true"]
        return chosen
    if kind == "numbers":
        low, high = recipe["low"], recipe["high"]
        numbers = (low + draws % (high - low + 1)) / 2.0 ** recipe["shift"]
        return np.where(_future(shape), -np.inf, numbers) if recipe.get("causal") else numbers
    if kind == "probs":
        return _make_probs(draws, recipe)
    raise ValueError(f"recipe kind must be one of numbers, probs, mask, lengths; got {kind!r}")


def _make_probs(draws: NDArray[np.int64], recipe: Mapping[str, Any]) -> NDArray[np.float64]:
    weights = (draws % recipe["levels"]) ** recipe["power"]
    if recipe.get("causal"):
        weights = np.where(_future(draws.shape), 0, weights)
    weights[..., 0] += weights.sum(axis=-1) == 0
    units = 2 ** recipe["bits"]
    counts = weights * units // weights.sum(axis=-1, keepdims=True)
    missing = units - counts.sum(axis=-1, keepdims=True)
    # Fewer units are missing than keys have weight, so one each to the first of those is enough.
    rank = np.cumsum(weights > 0, axis=-1)
    counts += (weights > 0) & (rank <= missing)
    for row in recipe.get("zero_rows", ()):
        counts[..., row, :] = 0
    probs: NDArray[np.float64] = counts / units
    return probs


def _future(shape: Sequence[int]) -> NDArray[np.bool_]:
    rows, keys = shape[-2:]
    return np.arange(keys)[None, :] > np.arange(rows)[:, None]


_NUMPY_DTYPES = {"bool": np.bool_, "int64": np.int64, "complex128": np.complex128}
_OWN_DTYPES = {"float32": np.float32, "float64": np.float64}


class VectorError(ValueError):
    """A vector file that this judge cannot read: another version, or not as its schema says."""


@dataclass(frozen=True)
class Case:
    """One case of a vector file, its inputs, outputs and rules as they stand there."""

    id: str
    operation: str
    outputs: tuple[str, ...]  # in a tuple's order
    spec: tuple[str, ...]
    flags: Mapping[str, str]  # the mistakes that it hunts, with the sentence of the file's notes
    comment: str
    dtypes: tuple[str, ...]
    arguments: Mapping[str, Any] = field(repr=False)
    expected: Mapping[str, Any] = field(repr=False)
    compare: Mapping[str, Mapping[str, Any]] = field(repr=False)
    codes: tuple[str, ...]  # of an invalid case those of which any is right, else none

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations that an implementation needs for this case."""
        return (self.operation,)

    def make_inputs(self, dtype: str = "float64") -> dict[str, Any]:
        """The arguments by name, fresh arrays at every call; see ``round_to`` for what a dtype means."""
        return {name: decode_input(value, dtype) for name, value in self.arguments.items()}


def load_cases(folder: str | Path | None = None) -> list[Case]:
    """Every case of the specification's or other vector files that is not withdrawn, in the files' order."""
    directory = vectors_folder() if folder is None else Path(folder)
    cases = [case for path in sorted(directory.glob("*.json")) for case in read_cases(path)]
    if not cases:
        raise VectorError(f"no vectors found in {directory}: the judge would judge by laws alone")
    ids = [case.id for case in cases]
    twice = sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []
    if twice:
        raise VectorError(f"the ids in {directory} must be unique; got {', '.join(twice)} more than once")
    return cases


def read_cases(path: Path) -> list[Case]:
    """The cases of one file that are not withdrawn."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["vectors_version"] != VECTORS_VERSION:
            raise VectorError(
                f"{path}: vectors_version must be {VECTORS_VERSION!r}; got {document['vectors_version']!r}"
            )
        return [_make_case(document, entry) for entry in document["cases"] if "withdrawn" not in entry]
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise VectorError(f"{path} is not a vector file (specs/schemas/vectors.schema.json): {error!r}") from error


def round_to(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """A copy rounded to a dtype: float64, or float32 that holds only numbers of it, since NumPy has no bfloat16."""
    if dtype == "float64":
        return array.astype(np.float64)
    if dtype == "float32":
        return array.astype(np.float32)
    if dtype == "float16":
        return array.astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        raise LookupError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    # bfloat16 is the upper half of a float32: round to nearest, ties to even.
    single = np.ascontiguousarray(array, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(single), rounded.view(np.float32), single)


def decode_expected(value: Any) -> Any:
    """An expected output: float64 arrays, lists of them, plain values; decimal strings become numbers."""
    if isinstance(value, str):
        return float(value)
    if isinstance(value, list):
        return [decode_expected(item) for item in value]
    if isinstance(value, Mapping):
        data = np.array([decode_expected(item) for item in value["data"]])
        return data if "at" in value else data.reshape(value["shape"])
    return value


def _make_case(document: Mapping[str, Any], entry: Mapping[str, Any]) -> Case:
    valid = entry["result"] == "valid"
    codes: list[str] = [] if valid else [entry["code"]] if isinstance(entry["code"], str) else entry["code"]
    # Every refusal is also a test of the chapter on errors; one with a choice of codes, of that choice.
    errors = () if valid else ("ERR-1", "ERR-2") if len(codes) == 1 else ("ERR-1", "ERR-2", "ERR-4")
    return Case(
        id=entry["id"],
        operation=document["operation"],
        outputs=tuple(document["outputs"]),
        spec=tuple(dict.fromkeys((*entry["spec"], *errors))),
        flags={flag: document["notes"][flag] for flag in entry["flags"]},
        comment=entry.get("comment", ""),
        dtypes=tuple(entry.get("dtypes", DTYPES)),
        arguments=entry["inputs"],
        expected=entry["expected"] if valid else {},
        compare=entry["compare"] if valid else {},
        codes=tuple(codes),
    )


def decode_input(value: Any, dtype: str) -> Any:
    """An argument: an array of this dtype, a special number, a list of arguments, or a plain value."""
    if isinstance(value, list):
        return [decode_input(item, dtype) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "number" in value:
        return float(value["number"])
    if "recipe" in value:
        array = make_array(value["shape"], value["recipe"])
        return array if array.dtype == np.bool_ else round_to(array, dtype)
    kind = value.get("dtype", "float")
    if kind in _OWN_DTYPES:
        data = [float(item) for item in value["data"]]
        return np.array(data, dtype=_OWN_DTYPES[kind]).reshape(value["shape"]).view(OwnDtype)
    if kind != "float":
        return np.array(value["data"], dtype=_NUMPY_DTYPES[kind]).reshape(value["shape"])
    data = [float(item) for item in value["data"]]
    return round_to(np.array(data, dtype=np.float64).reshape(value["shape"]), dtype)
