"""What do the kernels take of a device? Registers, spills and shared memory of every variant, cross-compiled.

Needs Triton but no GPU. Shows which tiles fit; says nothing about time. Prints a table and writes
``kernel_resources.json`` beside this file. Compiling all of them takes a quarter of an hour; what Triton has in its
cache is not compiled again.

    python benchmarks/kernel_resources.py [--capability 80 90] [--width 32 64 128 256] [--dtype bfloat16 float32]
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from shd_torch.kernels.launch import DTYPES
from shd_torch.kernels.resources import Variant, choose_variant_tile, measure
from shd_torch.kernels.tiles import MAX_FLOAT32_WIDTH, MAX_WIDTH, count_unrolled

RESULT = Path(__file__).with_suffix(".json")


def variants(width: int, dtype: torch.dtype) -> list[Variant]:
    """Every form of every program for one head size: groups of 1, 2 and 4 where they are unrolled, loops, codes."""
    is_float32 = dtype == torch.float32
    if width > (MAX_FLOAT32_WIDTH if is_float32 else MAX_WIDTH):
        return []
    sizes = (count_unrolled({size}, width * dtype.itemsize, is_float32=is_float32) for size in (1, 2, 4))
    forms: tuple[int | None, ...] = (*filter(None, sizes), 0, None)
    rows = [Variant("rows", width, dtype, members, atomic) for members in forms for atomic in (False, True)]
    return [Variant("lse", width, dtype), *rows, *(Variant("keys", width, dtype, members) for members in forms)]


def describe(variant: Variant) -> dict[str, Any]:
    """A variant's fields, for the report."""
    return asdict(variant) | {"dtype": str(variant.dtype).removeprefix("torch.")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90], help="80 for compute capability 8.0")
    parser.add_argument("--width", type=int, nargs="+", default=[32, 64, 128, 256], help="head sizes")
    parser.add_argument(
        "--dtype",
        choices=[str(dtype).removeprefix("torch.") for dtype in DTYPES],
        nargs="+",
        default=["bfloat16", "float32"],
    )
    arguments = parser.parse_args()
    report: list[dict[str, Any]] = []
    heads = ("sm", 4), ("rows", 6), ("keys", 6), ("warps", 7), ("stages", 8), ("regs", 6), ("spill B", 9), ("KiB", 8)
    print(f"{'program':36}" + "".join(f"{name:>{size}}" for name, size in heads))
    for width, dtype in itertools.product(arguments.width, arguments.dtype):
        for variant in variants(width, getattr(torch, dtype)):
            for capability in arguments.capability:
                tile, taken = choose_variant_tile(variant, capability), measure(variant, capability)
                report.append(describe(variant) | {"capability": capability} | tile._asdict() | asdict(taken))
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
