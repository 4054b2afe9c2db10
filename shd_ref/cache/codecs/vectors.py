"""Vectors as codes: binary16, or eight bits with a step for each vector (CACHE-147, CACHE-148)."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError

VECTOR_CODECS: Final = ("float16", "int8")

INT8_LEVELS: Final = 127
"""Code of a vector's largest component; -128 is not used."""


def to_float16(name: str, values: NDArray[Any], remedy: str = "use int8") -> NDArray[np.float16]:
    """Finite values rounded to nearest even; ``argument-value`` where one would become infinite."""
    with np.errstate(over="ignore"):
        codes = values.astype(np.float16)
    if not np.isfinite(codes).all():
        message = f"{name} must be below 65520 for float16; got {np.abs(values).max():g}: {remedy}"
        raise ShdError("argument-value", message, "CACHE-147")
    return codes


def to_int8(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes ``(..., d)`` and steps ``(...)`` of finite vectors."""
    steps = np.abs(values).max(axis=-1) / np.float32(INT8_LEVELS)
    steps[steps < np.finfo(np.float32).tiny] = 0.0  # subnormal numbers, which accelerators flush
    divisors = np.where(steps > 0, steps, np.float32(np.inf))[..., None]
    codes = np.clip(np.rint(values / divisors), -INT8_LEVELS, INT8_LEVELS)
    return codes.astype(np.int8), steps


def largest_move(codec: str, values: NDArray[Any]) -> NDArray[np.float64]:
    """How far coding moves a component of each vector ``(..., d)`` at most: u of CACHE-151."""
    largest = np.abs(values).max(axis=-1).astype(np.float64)
    if codec == "int8":
        return np.asarray(largest / (2 * INT8_LEVELS) * (1 + 2.0**-14), dtype=np.float64)
    return np.asarray(np.maximum(largest * 2.0**-11, 2.0**-25) * (1 + 2.0**-10), dtype=np.float64)
