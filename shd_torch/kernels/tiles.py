"""How many rows and keys a program works on at a time, by device, head size and number of merged heads.

Chosen so that programs hold their numbers in registers and fit into the shared memory of every device of their
architecture; ``benchmarks/kernel_resources.py`` compiles each entry and prints what it takes.
"""

from __future__ import annotations

from typing import NamedTuple

MIN_WIDTH = 16
MAX_WIDTH = 256
"""The smallest and the largest head that the matrix units are given; a smaller one is padded with zeros."""

UNROLLED_BYTES = 1024
"""Groups of one size are unrolled while their members' rows take at most this; others are looped over."""


class Tile(NamedTuple):
    """The shape of a program: its tile, its warps, and how many loads are in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# By bytes of a padded row; the first that is large enough holds.
_AMPERE = {
    128: Tile(64, 32, 4, 2),
    256: Tile(64, 32, 8, 2),
    512: Tile(32, 32, 8, 1),
    1024: Tile(16, 16, 4, 1),
}
_HOPPER = {
    128: Tile(64, 64, 8, 2),
    256: Tile(64, 32, 8, 2),
    512: Tile(32, 32, 8, 2),
    1024: Tile(16, 16, 4, 1),
}
_LSE = {128: Tile(64, 64, 4, 3), 256: Tile(64, 64, 8, 2), 512: Tile(64, 32, 8, 2), 1024: Tile(32, 16, 4, 1)}
MASS_TILE = Tile(16, 256, 4, 2)


def choose_tile(program: str, row_bytes: int, members: int, capability: tuple[int, int]) -> Tile:
    """The tile of a program.

    Args:
        program: ``"lse"``, ``"rows"`` or ``"keys"``.
        row_bytes: of a padded row of queries, the larger of student's and teacher's; at most 1024.
        members: teacher heads that are unrolled, 0 for none.
        capability: of the device.
    """
    if program == "lse":
        tiles = _LSE
    else:
        # Wide asynchronous products are Hopper's and data centre Blackwell's.
        tiles = _HOPPER if capability[0] in (9, 10) else _AMPERE
        row_bytes *= 2 if members > 2 else 1
    return tiles[min(size for size in tiles if size >= min(row_bytes, 1024))]


def pad_width(width: int) -> int:
    """The next power of two, at least ``MIN_WIDTH``."""
    return max(1 << (width - 1).bit_length(), MIN_WIDTH)


def count_unrolled(group_sizes: set[int], row_bytes: int) -> int:
    """How many members to unroll: the size of all groups, or 0 where they differ or are too large."""
    (size, *others) = group_sizes
    return size if not others and size * row_bytes <= UNROLLED_BYTES else 0
