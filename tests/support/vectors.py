"""Vector files with their answers: the anchor that the reference must meet, and the goldens of other pages.

Inputs are decoded by ``recipes.py``; here are expected outputs and the rules that compare them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shd_ref.conformance.comparison import as_numbers, as_plain, outputs_of
from shd_ref.conformance.specification import DTYPES, agreement
from support.recipes import decode_input


@dataclass(frozen=True)
class Vector:
    """One case of a vector file."""

    id: str
    operation: str
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...]
    arguments: Mapping[str, Any]
    expected: Mapping[str, Any]
    compare: Mapping[str, Mapping[str, Any]]
    codes: tuple[str, ...]
    flags: tuple[str, ...]

    def make_inputs(self, dtype: str = "float64") -> dict[str, Any]:
        """The arguments by name, fresh arrays at every call."""
        return {name: decode_input(value, dtype) for name, value in self.arguments.items()}


def load_vectors(folder: Path) -> list[Vector]:
    """Every case of a folder's files that is not withdrawn."""
    found = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        for case in document["cases"]:
            if "withdrawn" not in case:
                codes = case.get("code", [])
                found.append(
                    Vector(
                        case["id"],
                        document["operation"],
                        tuple(document["outputs"]),
                        tuple(case.get("dtypes", DTYPES)),
                        case["inputs"],
                        case.get("expected", {}),
                        case.get("compare", {}),
                        (codes,) if isinstance(codes, str) else tuple(codes),
                        tuple(case["flags"]),
                    )
                )
    return found


def take_output(answer: Any, name: str, outputs: tuple[str, ...]) -> Any:
    """One output of an answer; with dots a path into a record (``strategies.shd.residual``)."""
    first, *path = name.split(".")
    fields = answer if isinstance(answer, Mapping) else getattr(answer, "_asdict", lambda: None)()
    fields = fields or (vars(answer) if hasattr(answer, "__dict__") else {})
    if first in fields:
        value = fields[first]
    elif len(outputs) == 1:
        value = answer
    else:
        value = dict(zip(outputs, answer, strict=True))[first]
    for step in path:
        value = value[step] if isinstance(value, Mapping) else getattr(value, step)
    return value


def wrong_outputs(vector: Vector, answer: Any, dtype: str) -> list[str]:
    """The outputs of an answer that break their rules."""
    answer = outputs_of(vector.operation, answer)
    return [
        name
        for name, rule in vector.compare.items()
        if not agrees(rule, vector.expected[name], take_output(answer, name, vector.outputs), dtype)
    ]


def agrees(rule: Mapping[str, Any], expected: Any, got: Any, dtype: str) -> bool:
    """Whether an output is right under its rule (``specs/vectors/README.md``)."""
    kind = rule["rule"]
    if kind == "plan" or (kind == "exact" and not _holds_numbers(expected)):
        return bool(as_plain(got) == expected) and isinstance(got, bool) == isinstance(expected, bool)
    atol, rtol = (0.0, 0.0) if kind == "exact" else agreement(dtype, "alpha" if kind == "alpha" else rule["quantity"])
    return _close(expected, got, atol, rtol, bool(rule.get("exact_zeros")))


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


def _holds_numbers(expected: Any) -> bool:
    if isinstance(expected, list):
        return bool(expected) and all(isinstance(item, Mapping) for item in expected)
    if isinstance(expected, str):  # "inf", or a word that stands for itself
        return expected.lstrip("+-")[:1].isdigit() or expected in ("inf", "-inf", "nan")
    return isinstance(expected, Mapping)


def _close(expected: Any, got: Any, atol: float, rtol: float, exact_zeros: bool) -> bool:
    if isinstance(expected, list):
        same = isinstance(got, list | tuple) and len(got) == len(expected)
        return same and all(_close(*each, atol, rtol, exact_zeros) for each in zip(expected, got, strict=True))
    numbers, right = as_numbers(got), np.asarray(decode_expected(expected), np.float64)
    shape = tuple(expected["shape"]) if isinstance(expected, Mapping) else ()
    if numbers is None or numbers.shape != shape:
        return False
    if isinstance(expected, Mapping) and "at" in expected:
        numbers = numbers.reshape(-1)[expected["at"]]
    with np.errstate(all="ignore"):
        near = np.where(np.isfinite(right), np.abs(numbers - right) <= atol + rtol * np.abs(right), numbers == right)
    return bool((near & ~(exact_zeros & (right == 0) & (numbers != 0))).all())
