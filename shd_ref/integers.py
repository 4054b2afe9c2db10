"""Numbers and options among arguments (spec chapter ERR, ERR-6): booleans are no numbers, NumPy's scalars are."""

from __future__ import annotations

import math
from numbers import Real

import numpy as np

from shd_ref.errors import ShdError


def check_integer(name: str, value: object, low: int, high: int | None, spec_id: str | None = None) -> int:
    """An integer from ``low`` to ``high``, or without an end; booleans and floats are refused (ERR-6)."""
    try:
        number = as_index(value)
        valid = number >= low and (high is None or number <= high)
    except TypeError:
        valid = False
    if not valid:
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ShdError("argument-value", f"{name} must be an integer {bounds}; got {value!r}", spec_id)
    return number


def check_number(
    name: str,
    value: object,
    spec_id: str | None = None,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> float:
    """A finite number as a float: Python's or NumPy's, above ``above`` and from ``least`` to ``most`` (ERR-6)."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer or a fraction beyond all floats
        number = math.inf
    if not (math.isfinite(number) and above < number and least <= number <= most):
        words = f" above {above:g}" * (above > -math.inf) + f" of at least {least:g}" * (least > -math.inf)
        words += f" and at most {most:g}" * (most < math.inf)
        raise ShdError("argument-value", f"{name} must be a finite number{words}; got {value!r}", spec_id)
    return number


def check_option(name: str, value: object, options: tuple[str, ...], spec_id: str | None = None) -> None:
    if value not in options:
        raise ShdError("argument-value", f"{name} must be one of {', '.join(options)}; got {value!r}", spec_id)


def as_index(value: object) -> int:
    """An integer as an ``int``; TypeError for booleans, floats and arrays (ERR-6)."""
    if isinstance(value, bool | np.bool_ | np.ndarray) or not hasattr(value, "__index__"):
        raise TypeError(f"not an integer: {value!r}")
    return int(value.__index__())
