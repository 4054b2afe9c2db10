"""Golden cases of the losses (``kd``), recipes and closed forms (``shrink``), by an oracle in exact fractions.

They stand in ``tests/goldens``, one folder each and one file an operation, in the form of the method's vectors, and
are never edited.
"""

from pathlib import Path
from typing import Any

import pytest

from shd_ref import ShdError
from support.products import PRODUCTS
from support.recipes import decode_input
from support.vectors import Vector, agrees, load_vectors, take_output

FOLDER = Path(__file__).resolve().parents[1] / "goldens"


def golden_cases(page: str) -> list[Any]:
    """The cases of a folder, as parameters of a test."""
    return [pytest.param(case, id=case.id) for case in load_vectors(FOLDER / page)]


def check_golden(case: Vector, implementation: Any, dtype: str = "float64") -> None:
    """Assert that an implementation gives a case's answer within the published tolerance, or refuses it by its code.

    Args:
        case: a golden.
        implementation: an adapter, or a function like its ``run_operation``.
        dtype: of the arrays.
    """

    run = getattr(implementation, "run_operation", implementation)
    inputs = {name: _argument(value, dtype) for name, value in case.arguments.items()}
    if case.codes:
        with pytest.raises(ShdError) as refusal:
            run(case.operation, inputs, dtype)
        assert refusal.value.code in case.codes
        return
    answer = run(case.operation, inputs, dtype)
    for name, rule in case.compare.items():
        output = PRODUCTS[name](answer, inputs) if name in PRODUCTS else take_output(answer, name, case.outputs)
        assert agrees(rule, case.expected[name], output, dtype), name


def _argument(value: Any, dtype: str) -> Any:
    """One with named fields as a mapping, any other as the method's vectors have it."""
    if isinstance(value, dict) and "record" in value:
        return {name: decode_input(item, dtype) for name, item in value["record"].items()}
    return decode_input(value, dtype)
