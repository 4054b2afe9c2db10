"""Every function of the reference with one argument of a kind that never fits: an error of chapter ERR."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shd_ref
from shd_ref import ShdError
from shd_ref.conformance.generator import FACTORS, OUTPUTS, draw_call
from shd_ref.conformance.sessions import options_of


def misfits(value: Any) -> Iterator[Any]:
    """Others in the place of one argument, each of which must be refused."""
    if isinstance(value, np.ndarray):
        yield from (value.astype(complex), value.astype(str))
        yield from (value.ravel(),) * (value.size > value.shape[-1])
        if value.dtype == bool:
            yield from (value.astype(kind) for kind in (int, np.uint8, np.int8, object))
        else:
            broken = value.astype(float)
            broken.flat[0] = np.nan
            yield from (broken, value.astype(bool))
    elif isinstance(value, bool):
        yield from (2, 1.0, "yes", [value])
    elif isinstance(value, int | float):
        yield from (True, np.True_, np.nan, np.inf, -np.inf, "2", 1j, [value], np.array(value, dtype=float))
        yield from (10**400,) * isinstance(value, float)
    elif isinstance(value, str):
        yield from ("nope", 7)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from ([*value[:place], other, *value[place + 1 :]] for other in misfits(item))


@pytest.mark.parametrize("operation", sorted(set(OUTPUTS) - {"matched_plan", "diagnose"}))
@pytest.mark.parametrize("level", [0, 1])
def test_a_misfit_is_an_error_of_chapter_err(operation: str, level: int) -> None:
    factors = {
        name: values for name, values in FACTORS[operation].items() if name in options_of(operation) or all(values)
    }
    options = {name: [one for one in values if one] for name, values in factors.items()}
    levels = {name: values[min(level, len(values) - 1)] for name, values in options.items()}
    inputs, function = draw_call(operation, [8], "float64", levels), getattr(shd_ref, operation)
    function(**inputs)
    for argument, value in inputs.items():
        for other in misfits(value):
            with pytest.raises(ShdError):
                print(argument, repr(other)[:200], function(**{**inputs, argument: other}))
