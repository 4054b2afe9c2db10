"""Integers among arguments (spec chapter ERR, ERR-6): booleans and floats are none."""

from __future__ import annotations

import numpy as np

from shd_ref.errors import ShdError


def check_integer(name: str, value: object, low: int, high: int | None, spec_id: str) -> int:
    """An integer from ``low`` to ``high``, or without an end; booleans and floats are refused (ERR-6).

    Raises:
        ShdError: ``argument-value``.
    """
    try:
        number = as_index(value)
        valid = number >= low and (high is None or number <= high)
    except TypeError:
        valid = False
    if not valid:
        wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ShdError("argument-value", f"{name} must be an integer {wanted}; got {value!r}", spec_id)
    return number


def as_index(value: object) -> int:
    """An integer as an ``int``; booleans and floats are refused (ERR-6).

    Raises:
        TypeError: not an integer.
    """
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise TypeError(f"not an integer: {value!r}")
    return int(value.__index__())
