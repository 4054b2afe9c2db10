"""Closed forms, losses and recipes give the goldens' answers and refusals."""

from importlib import import_module
from typing import Any

import pytest
from support.goldens import check_golden, golden_cases

ADAPTERS = {"kd": "LossesAdapter", "recipes": "LossesAdapter", "head": "HeadAdapter"}


def implementation_of(page: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    if page == "shrink":
        return import_module("support.closed_forms").run
    pytest.importorskip("torch", reason="the PyTorch binding needs torch")
    # A row or two of five classes at a time: every golden goes over several chunks.
    monkeypatch.setitem(import_module("shd_torch.kd.targets")._ENTRIES, "cpu", 11)
    return getattr(import_module("support.binding.losses_adapter"), ADAPTERS[page])()


CASES = [(page, *case.values) for page in ("shrink", "kd", "recipes") for case in golden_cases(page)]
CASES += [("head", case) for _, case in CASES if case.operation.startswith("kd_loss") and not case.codes]


@pytest.mark.parametrize(("page", "case"), CASES, ids=[f"{page}-{case.id}" for page, case in CASES])
def test_golden(page: str, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.operation == "grouped_plan":
        pytest.importorskip("networkx", reason="matched plans need the extra 'oracles'")
    implementation = implementation_of(page, monkeypatch)
    for dtype in case.dtypes:
        check_golden(case, implementation, dtype)
