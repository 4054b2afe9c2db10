"""The comparison rules of the vector files: exact, plan, close, alpha."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance.specification import agreement
from shd_ref.conformance.vectors import decode_expected


@dataclass(frozen=True)
class Difference:
    """How an output differs from what was expected, in words and numbers that need no knowledge of the judge."""

    problem: str
    expected: str
    got: str


def compare_output(rule: Mapping[str, Any], expected: Any, got: Any, dtype: str) -> Difference | None:
    """One output against the vector file's expectation under its rule; None where they agree."""
    kind = rule["rule"]
    if kind == "plan":
        return compare_plans(expected, got)
    if kind == "exact":
        return compare_exact(expected, got)
    quantity = "alpha" if kind == "alpha" else rule["quantity"]
    atol, rtol = agreement(dtype, quantity)
    exact_zeros = bool(rule.get("exact_zeros"))
    return _compare_nested(
        expected, got, lambda right, numbers: compare_close(right, numbers, atol, rtol, exact_zeros=exact_zeros)
    )


def compare_close(
    expected: NDArray[Any], got: NDArray[np.float64], atol: float, rtol: float, *, exact_zeros: bool = False
) -> Difference | None:
    """Entries within ``atol + rtol * abs(expected)``; infinities must be equal and NaN never passes."""
    reference = np.asarray(expected, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        limit = atol + rtol * np.abs(reference)
        # Most answers are right and finite; an infinite limit would let every number pass.
        if not exact_zeros and bool(((np.abs(got - reference) <= limit) & (limit < np.inf)).all()):
            return None
    finite = np.isfinite(reference)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(finite, np.abs(got - reference), np.where(got == reference, 0.0, np.inf))
    distance = np.where(np.isnan(distance), np.inf, distance)
    allowed = np.where(finite, atol + rtol * np.abs(np.where(finite, reference, 0.0)), 0.0)
    wrong = distance > allowed
    if exact_zeros:
        wrong |= (reference == 0.0) & (got != 0.0)
    if not wrong.any():
        return None
    excess = np.where(wrong, distance - allowed, -np.inf)
    where = tuple(int(i) for i in np.unravel_index(int(excess.argmax()), reference.shape))
    if np.isnan(got[where]):
        problem = "is NaN"
    elif exact_zeros and reference[where] == 0.0 and distance[where] <= allowed[where]:
        problem = f"must be exactly 0; got {got[where]:.17g}"
    else:
        problem = f"differs by {distance[where]:.6g}, allowed {allowed[where]:.6g}"
    position = f" at index {list(where)}" if reference.ndim else ""
    count = f"; {int(wrong.sum())} of {reference.size} entries are wrong" if reference.size > 1 else ""
    return Difference(
        f"{problem}{position} (expected {reference[where]:.17g}, got {got[where]:.17g}){count}",
        abbreviate(reference),
        abbreviate(got),
    )


def compare_exact(expected: Any, got: Any) -> Difference | None:
    """Equal integers, booleans, strings, lists (a tuple is a list) or entries of an array."""
    if (
        (isinstance(expected, str) and not _is_word(expected))
        or isinstance(expected, Mapping)
        or (isinstance(expected, list) and _holds_mappings(expected))
    ):
        return _compare_nested(expected, got, lambda reference, numbers: compare_close(reference, numbers, 0.0, 0.0))
    plain = as_plain(got)
    if _is_equal(plain, expected):
        return None
    return Difference("is not equal to what was expected", abbreviate(expected), abbreviate(plain))


def _is_equal(plain: Any, expected: Any) -> bool:
    """True == 1 in Python, but a count is not a boolean."""
    return bool(plain == expected and _kinds(plain) == _kinds(expected))


def compare_plans(expected: Any, got: Any) -> Difference | None:
    """The same rounds of the same pairs in the same order."""
    plain = as_plain(got)
    if _is_equal(plain, expected):
        return None
    problem = f"must have {len(expected)} rounds of pairs"
    if isinstance(plain, list):
        for number, (right, actual) in enumerate(zip(expected, plain, strict=False)):
            if right != actual:
                problem = f"differs first in round {number}: expected {abbreviate(right)}, got {abbreviate(actual)}"
                break
        else:
            problem += f"; got {len(plain)}"
    return Difference(problem, abbreviate(expected), abbreviate(plain))


def as_plain(value: Any) -> Any:
    """Tuples and arrays as lists, NumPy numbers as Python's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value


def as_numbers(value: Any) -> NDArray[np.float64] | None:
    """The value as a float64 array, or None where it is not numbers."""
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "fiub" and "float" not in array.dtype.name:
            return None
        return np.asarray(array, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        return None


def abbreviate(value: Any, limit: int = 12) -> str:
    """A value on one line: its shape and first entries."""
    if isinstance(value, np.ndarray):
        numbers = ", ".join(_number(item) for item in value.reshape(-1)[:limit].tolist())
        more = f", ... {value.size - limit} more" if value.size > limit else ""
        return f"{value.dtype.name}{list(value.shape)} [{numbers}{more}]" if value.ndim else numbers
    if isinstance(value, list | tuple) and _holds_arrays(value):
        return "[" + "; ".join(abbreviate(item, limit) for item in value) + "]"
    text = _number(value) if isinstance(value, float) else repr(value)
    return text if len(text) <= 300 else text[:297] + "..."


def _holds_arrays(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (isinstance(value, list | tuple) and any(map(_holds_arrays, value)))


def _holds_mappings(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, Mapping) for item in value)


def _is_word(text: str) -> bool:
    """Whether a string stands for itself, and not for a number."""
    try:
        float(text)
    except ValueError:
        return True
    return False


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _compare_nested(expected: Any, got: Any, compare: Any) -> Difference | None:
    """Lists item by item; arrays by shape, then by ``compare``; ``at`` picks entries first."""
    if isinstance(expected, list):
        if not isinstance(got, list | tuple) or len(got) != len(expected):
            actual = f"{len(got)} items" if isinstance(got, list | tuple) else abbreviate(got)
            return Difference(f"must be a list of {len(expected)} arrays", f"{len(expected)} items", actual)
        for number, (expected_item, item) in enumerate(zip(expected, got, strict=True)):
            difference = _compare_nested(expected_item, item, compare)
            if difference:
                return Difference(f"item {number}: {difference.problem}", difference.expected, difference.got)
        return None
    numbers = as_numbers(got)
    if numbers is None:
        return Difference("must be numbers", abbreviate(decode_expected(expected)), abbreviate(got))
    reference = np.asarray(decode_expected(expected))
    shape = tuple(expected["shape"]) if isinstance(expected, Mapping) else ()
    if numbers.shape != shape:
        return Difference(
            f"must have the shape {list(shape)}; got {list(numbers.shape)}",
            abbreviate(reference),
            abbreviate(numbers),
        )
    if isinstance(expected, Mapping) and "at" in expected:
        # Entries that the file does not list are taken as they came, so that indices in the report are true.
        listed, reference = reference, numbers.copy()
        reference.reshape(-1)[expected["at"]] = listed
    result: Difference | None = compare(reference, numbers)
    return result


def _kinds(value: Any) -> Any:
    return [_kinds(item) for item in value] if isinstance(value, list) else isinstance(value, bool)
