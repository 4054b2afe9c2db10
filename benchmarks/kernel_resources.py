"""What do the kernels take of a device? Registers, spills and shared memory of every variant, cross-compiled.

Needs Triton but no GPU. Shows which tiles fit; says nothing about time. Prints a table and writes
``kernel_resources.json`` beside this file.

    python benchmarks/kernel_resources.py [--capability 80 90] [--width 64 128 256] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from shd_torch.kernels.resources import Variant, choose_variant_tile, measure

RESULT = Path(__file__).with_suffix(".json")


def variants(width: int, dtype: torch.dtype) -> list[Variant]:
    """Every form of every program for one head size; four members stand for groups that are unrolled twice as far."""
    forms: tuple[int | None, ...] = (1, 2, 4, 0, None) if width < 256 else (1, 2, 0, None)
    rows = [Variant("rows", width, dtype, members, atomic) for members in forms for atomic in (False, True)]
    return [Variant("lse", width, dtype), *rows, *(Variant("keys", width, dtype, members) for members in forms)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90], help="80 for compute capability 8.0")
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128, 256], help="head sizes")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    report: list[dict[str, Any]] = []
    heads = ("sm", 4), ("rows", 6), ("keys", 6), ("warps", 7), ("stages", 8), ("regs", 6), ("spill B", 9), ("KiB", 8)
    print(f"{'program':36}" + "".join(f"{name:>{size}}" for name, size in heads))
    for width in arguments.width:
        for variant in variants(width, getattr(torch, arguments.dtype)):
            for capability in arguments.capability:
                tile, taken = choose_variant_tile(variant, capability), measure(variant, capability)
                report.append({"program": variant.name, "capability": capability} | tile._asdict() | asdict(taken))
                print(
                    f"{variant.name:36}{capability:4}{tile.rows:6}{tile.keys:6}{tile.num_warps:7}{tile.num_stages:8}"
                    f"{taken.registers:6}{taken.spilled_bytes:9}{taken.shared_bytes / 1024:8.1f}",
                    flush=True,
                )
    RESULT.write_text(
        json.dumps({"triton": triton.__version__, "programs": report}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
