"""What the judge reads of the specification: operations and results, tolerances, sentences, codes, mistakes.

``load_everything`` reads every file once. The judge calls it before an implementation starts, so that nothing that an
implementation writes to disk reaches a verdict.
"""

from __future__ import annotations

import importlib
import json
import re
from functools import cache
from pathlib import Path

from shd_ref.tolerances import load_tolerances

DTYPES: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16")
VECTORS_VERSION = "1"

OUTPUTS: dict[str, tuple[str, ...]] = {
    "softmax": ("attn_probs",),
    "value_outputs": ("value_outputs",),
    "merge_plan": ("plan",),
    "solve_alpha": ("alpha",),
    "mix_heads": ("probs",),
    "squeeze_heads": ("probs", "mixing", "alphas", "residual", "num_clipped", "num_degenerate", "plan"),
    "shd_loss": ("loss",),
    "soften": ("attn_probs",),
    "plan_groups": ("groups",),
    "compose_mixing": ("mixing",),
    "shd_loss_gradient": ("dz",),
    "shd_loss_gradient_qk": ("dq", "dk"),
    "intersect_support": ("supervision", "dropped"),
    "layer_map": ("pairs",),
    "align_tokens": ("probs", "dropped"),
    "gram_tensor": ("gram",),
    "solve_alpha_from_gram": ("alpha",),
    "merge_gram": ("gram",),
    "matched_plan": ("plan",),
    "diagnose": ("plan", "unconstrained", "stochastic", "strategies"),
    "indexer_target": ("target",),
    "indexer_loss": ("loss",),
    "indexer_loss_gradient": ("dq", "dk", "dw"),
}
"""The operations of ``specs/shd.md`` with the names of their results, in the order of a tuple that holds them."""

CORE: tuple[str, ...] = tuple(OUTPUTS)[:7]
"""The operations of the profile ``core``, with masks and no other option."""

_PACKAGE = Path(__file__).resolve().parents[1]
_SENTENCE = re.compile(r"- \*\*([A-Z]+-[0-9]+)\*\*\s+(.*)")


def specs_folder() -> Path:
    """The wheel's copy of ``specs``, else the one in the source tree beside the package."""
    shipped = _PACKAGE / "specs"
    return shipped if (shipped / "shd.md").is_file() else _PACKAGE.parent / "specs"


@cache
def read_text() -> str:
    """The specification's page."""
    return (specs_folder() / "shd.md").read_text(encoding="utf-8")


@cache
def load_sentences() -> dict[str, str]:
    """Every normative sentence of ``specs/shd.md`` by its id, on one line."""
    sentences: dict[str, str] = {}
    current = None
    for line in read_text().splitlines():
        if match := _SENTENCE.match(line):
            current = match[1]
            sentences[current] = match[2].strip()
        elif current and line.startswith("  ") and not line.lstrip().startswith("|"):
            sentences[current] += f" {line.strip()}"
        elif line:
            current = None
    return sentences


@cache
def error_codes() -> frozenset[str]:
    """The codes with which bad input is refused: those of the table of ERR-2."""
    table = read_text().partition("- **ERR-2**")[2].partition("- **ERR-3**")[0]
    return frozenset(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE))


@cache
def load_mistakes() -> dict[str, str]:
    """Well-known mistakes by name, each as words that complete "this equals what you get if ..."."""
    loaded: dict[str, str] = json.loads((specs_folder() / "mistakes.json").read_text(encoding="utf-8"))
    return loaded


@cache
def spec_edition() -> str:
    """The edition that ``specs/shd.md`` states on its first lines."""
    match = re.search(r"^Edition ([0-9]+(?:\.[0-9]+)*)", read_text(), re.MULTILINE)
    return match[1] if match else "unknown"


def agreement(dtype: str, quantity: str) -> tuple[float, float]:
    """``(atol, rtol)`` for one quantity computed in one dtype, from ``specs/tolerances.json``."""
    table = load_tolerances()["agreement"]
    if quantity not in table.get(dtype, {}):
        raise LookupError(f"specs/tolerances.json has no agreement for dtype {dtype!r}, quantity {quantity!r}")
    entry = table[dtype][quantity]
    return float(entry["atol"]), float(entry["rtol"])


def load_everything() -> None:
    """Read every file and import every module that a verdict can depend on."""
    for load in (load_tolerances, load_sentences, error_codes, load_mistakes, spec_edition):
        load()
    for module in ("networkx", "scipy.optimize"):  # solvers of optional operations
        try:
            importlib.import_module(module)
        except ImportError:
            continue
