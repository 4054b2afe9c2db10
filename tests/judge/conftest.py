"""What the judge's own tests share: a small set of vector files, and the reference with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shd_ref
from shd_ref.conformance import OUTPUTS, load_tolerances, specification

HERE = Path(__file__).resolve().parent
VECTORS_ALONE = [f"{operation}/*" for operation in OUTPUTS]
"""Items for a test of the judge itself; the laws, which take most of its time, are run by test_implementations."""


@pytest.fixture
def vectors() -> Path:
    return HERE / "vectors"


@pytest.fixture
def programs() -> Path:
    return HERE / "programs"


@pytest.fixture
def wrong() -> Any:
    """A maker of implementations: the reference with some functions replaced."""

    def make(**functions: Any) -> SimpleNamespace:
        right = {name: getattr(shd_ref, name) for name in OUTPUTS if hasattr(shd_ref, name)}
        return SimpleNamespace(**{**right, **functions})

    return make


@pytest.fixture
def tenfold(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets the judge allow a tenth of the published agreement at a dtype: what passes has room to spare."""

    def tighten(dtype: str) -> None:
        published = load_tolerances()
        tenth = {
            quantity: {name: value / 10 for name, value in pair.items()}
            for quantity, pair in published["agreement"][dtype].items()
        }
        tight = {**published, "agreement": {**published["agreement"], dtype: tenth}}
        monkeypatch.setattr(specification, "load_tolerances", lambda: tight)

    return tighten
