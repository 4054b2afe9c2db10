"""The closed forms give the goldens' answers and refusals."""

from __future__ import annotations

import pytest
from support.goldens import check_golden, golden_cases

import shd_ref.shrink
from shd_ref.conformance.vectors import Case


@pytest.mark.parametrize("case", golden_cases("shrink"))
def test_golden(case: Case) -> None:
    if case.operation == "grouped_plan":
        pytest.importorskip("networkx", reason="matched plans need the extra 'oracles'")
    for dtype in case.dtypes:
        check_golden(case, shd_ref.shrink, dtype)
