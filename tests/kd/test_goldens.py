"""The losses of the binding give the goldens' values, gradients and refusals."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the PyTorch binding needs torch")

from support.binding.kd_adapter import KdAdapter
from support.goldens import check_golden, golden_cases

from shd_ref.conformance.vectors import Case


@pytest.mark.parametrize("case", golden_cases("kd"))
def test_golden(case: Case) -> None:
    for dtype in case.dtypes:
        check_golden(case, KdAdapter(), dtype)
