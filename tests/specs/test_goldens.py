"""Closed forms, losses and recipes give the goldens' answers and refusals."""

from importlib import import_module
from typing import Any

import pytest
from support.goldens import check_golden, golden_cases

ADAPTERS = {"kd": "kd_adapter.KdAdapter", "recipes": "recipes_adapter.RecipesAdapter"}


def implementation_of(page: str) -> Any:
    if page == "shrink":
        return import_module("support.closed_forms").run
    pytest.importorskip("torch", reason="the PyTorch binding needs torch")
    module, name = ADAPTERS[page].split(".")
    return getattr(import_module(f"support.binding.{module}"), name)()


@pytest.mark.parametrize(
    ("page", "case"),
    [pytest.param(page, *case.values, id=case.id) for page in ("shrink", *ADAPTERS) for case in golden_cases(page)],
)
def test_golden(page: str, case: Any) -> None:
    if case.operation == "grouped_plan":
        pytest.importorskip("networkx", reason="matched plans need the extra 'oracles'")
    implementation = implementation_of(page)
    for dtype in case.dtypes:
        check_golden(case, implementation, dtype)
