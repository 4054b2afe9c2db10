"""The programs compiled for devices that are not here, and what they take of them."""

from __future__ import annotations

import pytest
import torch

from shd_torch.kernels.resources import Resources, Variant, measure
from shd_torch.kernels.tiles import MAX_WIDTH, Tile, choose_tile, count_unrolled, pad_width

KIB = 1024
SHARED = {80: 99 * KIB, 90: 227 * KIB}
"""What a program may have on every device of the architecture (8.6 has less than 8.0)."""


@pytest.mark.parametrize(
    ("variant", "capability"),
    [
        (Variant("lse", 64), 90),
        (Variant("rows", 64), 80),
        (Variant("rows", 64), 90),
        (Variant("rows", 64, atomic=True), 90),
        (Variant("rows", 64, members=None), 90),
        (Variant("keys", 64), 80),
        (Variant("keys", 64), 90),
        (Variant("rows", 128, torch.float16), 90),
    ],
    ids=lambda value: value.name if isinstance(value, Variant) else f"sm_{value}",
)
def test_programs_stay_in_registers_and_shared_memory(variant: Variant, capability: int) -> None:
    taken = measure(variant, capability)
    assert 0 < taken.registers <= 255
    assert taken.spilled_bytes == 0
    assert 0 < taken.shared_bytes <= SHARED[capability]
    if variant.width == 64:
        # Half of what a multiprocessor has, so that two programs share it.
        assert taken.shared_bytes <= 113 * KIB


def test_a_tile_that_is_too_large_shows() -> None:
    """The measure is one: it must see spills where there are some."""
    taken = measure(Variant("rows", 64), 90, Tile(128, 64, 4, 2))
    assert taken == Resources(255, taken.spilled_bytes, taken.shared_bytes)
    assert taken.spilled_bytes > 100


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("program", ["lse", "rows", "keys"])
def test_every_head_size_has_a_tile(program: str, capability: tuple[int, int]) -> None:
    for width in range(1, MAX_WIDTH + 1):
        assert width <= pad_width(width) <= max(2 * width, 16)
        for item_size in (2, 4):
            for members in (0, 2, 4):
                tile = choose_tile(program, pad_width(width) * item_size, members, capability)
                assert min(tile.rows, tile.keys) >= 16


def test_groups_are_unrolled_where_they_are_alike_and_small() -> None:
    assert count_unrolled({2}, 128) == 2
    assert count_unrolled({4}, 256) == 4
    assert count_unrolled({4}, 512) == 0
    assert count_unrolled({2, 3}, 128) == 0
    assert count_unrolled({0}, 128) == 0
