"""Files of the specification that the judge reads, all before an implementation starts: nothing it writes matters."""

from __future__ import annotations

import importlib
import json
import re
from functools import cache
from typing import Any

from shd_ref.tolerances import load_tolerances, read_spec

DTYPES: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16")
CORE = ("softmax", "value_outputs", "merge_plan", "solve_alpha", "mix_heads", "squeeze_heads", "shd_loss")
"""The operations of the profile ``core``, with masks and no other option."""
VECTORS_VERSION = "1"


@cache
def error_codes() -> frozenset[str]:
    """The codes with which bad input is refused: those of the table of ERR-2."""
    table = read_spec("shd.md").partition("- **ERR-2**")[2].partition("- **ERR-3**")[0]
    return frozenset(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE))


@cache
def load_mistakes() -> dict[str, dict[str, Any]]:
    """Well-known mistakes: what ``gives`` the same, and words that complete "this equals what you get if ..."."""
    loaded: dict[str, dict[str, Any]] = json.loads(read_spec("mistakes.json"))
    return loaded


@cache
def spec_edition() -> str:
    """The edition that ``specs/shd.md`` states on its first lines."""
    match = re.search(r"^Edition ([0-9]+(?:\.[0-9]+)*)", read_spec("shd.md"), re.MULTILINE)
    return match[1] if match else "unknown"


def agreement(dtype: str, quantity: str) -> tuple[float, float]:
    """``(atol, rtol)`` for one quantity computed in one dtype, from ``specs/tolerances.json``."""
    entry = load_tolerances()["agreement"].get(dtype, {}).get(quantity)
    if entry is None:
        raise LookupError(f"specs/tolerances.json has no agreement for dtype {dtype!r}, quantity {quantity!r}")
    return float(entry["atol"]), float(entry["rtol"])


def load_everything() -> None:
    """Read every file and import every module that a verdict can depend on."""
    for load in (load_tolerances, error_codes, load_mistakes, spec_edition):
        load()
    for module in ("networkx", "scipy.optimize"):  # solvers of optional operations
        try:
            importlib.import_module(module)
        except ImportError:
            continue
