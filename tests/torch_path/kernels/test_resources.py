"""The programs compiled for devices that are not here, and what they take of them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.kernel_resources import Variant, choose_variant_tile, measure  # noqa: E402  (after the path)
from shd_torch.kernels.divergence import MAX_FLOAT32_WIDTH, MAX_WIDTH, Tile  # noqa: E402

KIB = 1024
SHARED = {80: 99 * KIB, 90: 227 * KIB}
"""What a program may have on every device of the architecture (8.6 has less than 8.0)."""

SPILLED = 64
"""Bytes a thread that any program may spill: a load or two a loop; those below, which matter most, spill none."""

REPORT = ROOT / "benchmarks" / "results" / "kernel_resources.json"

HALF, FLOAT32 = torch.float16, torch.float32


VARIANTS = [
    (Variant("rows", 32, HALF, members=None, atomic=True), 80),
    (Variant("keys", 64), 90),
    (Variant("keys", 64, FLOAT32, members=0), 80),
    (Variant("rows", 256), 90),
]
"""Every program, width, dtype and kind of groups at least once: each takes the compiler two seconds."""


@pytest.mark.parametrize(
    ("variant", "capability"), VARIANTS, ids=lambda value: value.name if isinstance(value, Variant) else f"sm_{value}"
)
def test_programs_stay_in_registers_and_shared_memory(variant: Variant, capability: int) -> None:
    taken = measure(variant, capability)
    assert 0 < taken.registers <= 255
    assert taken.spilled_bytes == 0
    assert 0 < taken.shared_bytes <= SHARED[capability]
    if variant.width <= 64:
        # Half of what a multiprocessor has, so that two programs share it.
        assert taken.shared_bytes <= 113 * KIB


def test_the_published_figures_are_those_of_the_tiles_in_use() -> None:
    """Every program, from the benchmark's report: all of them take the compiler a quarter of an hour."""
    report = json.loads(REPORT.read_text(encoding="utf-8"))["programs"]
    assert {(each["width"], each["dtype"]) for each in report} == {
        (width, dtype)
        for dtype, limit in (("bfloat16", MAX_WIDTH), ("float32", MAX_FLOAT32_WIDTH))
        for width in (32, 64, 128, 256)
        if width <= limit
    }
    for each in report:
        variant, capability = as_variant(each), each["capability"]
        tile = Tile(each["rows"], each["keys"], each["num_warps"], each["num_stages"])
        assert tile == choose_variant_tile(variant, capability), variant.name
        assert each["shared_bytes"] <= SHARED[capability], variant.name
        assert each["spilled_bytes"] <= SPILLED, variant.name


def as_variant(entry: dict[str, Any]) -> Variant:
    members, atomic = entry["members"], entry["atomic"]
    return Variant(entry["program"], entry["width"], getattr(torch, entry["dtype"]), members, atomic)
