"""Shared paths for tests. Real data lives beside the project and is never required."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; skips, with the reason, where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real data not found: no folder {SHARED_DATA.parent.name}/{SHARED_DATA.name} beside the project")
    return SHARED_DATA
