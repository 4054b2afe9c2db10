"""The recipes of the binding give the goldens' terms and refusals."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the PyTorch binding needs torch")

from support.binding.recipes_adapter import RecipesAdapter
from support.goldens import check_golden, golden_cases

from shd_ref.conformance.vectors import Case


@pytest.mark.parametrize("case", golden_cases("recipes"))
def test_golden(case: Case) -> None:
    for dtype in case.dtypes:
        check_golden(case, RecipesAdapter(), dtype)
