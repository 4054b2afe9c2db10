"""What the judge's own tests share: a small set of vector files, and the reference with one thing wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shd_ref
from shd_ref.conformance import OUTPUTS

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
