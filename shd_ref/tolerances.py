"""Reads ``specs/tolerances.json``, the only place where closeness is a number."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent


@cache
def read_spec(name: str) -> str:
    """A file of ``specs``: the wheel's copy, else that of the source tree beside the package."""
    shipped = _PACKAGE / "specs" / name
    return (shipped if shipped.is_file() else _PACKAGE.parent / "specs" / name).read_text(encoding="utf-8")


@cache
def load_tolerances() -> dict[str, Any]:
    """The parsed file."""
    loaded: dict[str, Any] = json.loads(read_spec("tolerances.json"))
    return loaded


def degenerate_threshold() -> float:
    """Relative squared norm at or below which a pair is degenerate (ALPHA-6)."""
    return float(load_tolerances()["constants"]["degenerate"])


def tie_width() -> float:
    """How near numbers count as equal where one is chosen, relative to a size that the text names (PLAN-9)."""
    return float(load_tolerances()["constants"]["tie"])


def row_sum_tolerance(dtype_name: str) -> float:
    """How far from one a counted row of probabilities of this dtype may sum (MAP-3)."""
    table = load_tolerances()["row_sum"]
    return float(table.get(dtype_name, table["float64"]))
