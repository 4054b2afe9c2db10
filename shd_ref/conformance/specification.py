"""Where the specification's files lie, its numbered sentences by id, and the well-known mistakes by name."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from shd_ref.tolerances import load_tolerances

DTYPES: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16")
VECTORS_VERSION = "1"

_PACKAGE = Path(__file__).resolve().parents[1]
_SENTENCE = re.compile(r"- \*\*([A-Z]+-[0-9]+)\*\*\s+(.*)")


def specs_folder() -> Path:
    """The wheel's copy of ``specs``, else the one in the source tree beside the package."""
    shipped = _PACKAGE / "specs"
    return shipped if (shipped / "shd.md").is_file() else _PACKAGE.parent / "specs"


def vectors_folder() -> Path:
    """The folder of the vector files that this judge understands."""
    return specs_folder() / "vectors" / f"v{VECTORS_VERSION}"


@cache
def load_sentences() -> dict[str, str]:
    """Every normative sentence of ``specs/shd.md`` by its id, each on one line, with the rows of its table."""
    sentences: dict[str, str] = {}
    current = None
    for line in _read_text().splitlines():
        match = _SENTENCE.match(line)
        if match:
            current = match[1]
            sentences[current] = match[2].strip()
        elif current and line.startswith("  "):
            sentences[current] += _continued(line.strip())
        elif line:
            current = None  # a blank line alone stands between a sentence and its table
    return sentences


def _continued(line: str) -> str:
    """More of a sentence: words, or the row of a table as ``name: formula;``."""
    if not line.startswith("|"):
        return f" {line}"
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return "" if set(line) <= set("|-") or not cells[0].startswith("`") else f" {': '.join(cells)};"


@cache
def error_codes() -> frozenset[str]:
    """The codes with which bad input is refused: those of the table of ERR-2."""
    table = _read_text().partition("- **ERR-2**")[2].partition("- **ERR-3**")[0]
    return frozenset(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE))


@cache
def load_mistakes() -> dict[str, str]:
    """Well-known mistakes by name, each as words that complete "this equals what you get if ..."."""
    loaded: dict[str, str] = json.loads((specs_folder() / "mistakes.json").read_text(encoding="utf-8"))
    return loaded


@cache
def spec_edition() -> str:
    """The edition that ``specs/shd.md`` states on its first lines."""
    match = re.search(r"^Edition ([0-9]+(?:\.[0-9]+)*)", _read_text(), re.MULTILINE)
    return match[1] if match else "unknown"


def agreement(dtype: str, quantity: str) -> tuple[float, float]:
    """``(atol, rtol)`` for one quantity computed in one dtype, from ``specs/tolerances.json``."""
    table = load_tolerances()["agreement"]
    if quantity not in table.get(dtype, {}):
        raise LookupError(f"specs/tolerances.json has no agreement for dtype {dtype!r}, quantity {quantity!r}")
    entry = table[dtype][quantity]
    return float(entry["atol"]), float(entry["rtol"])


def _read_text() -> str:
    return (specs_folder() / "shd.md").read_text(encoding="utf-8")
