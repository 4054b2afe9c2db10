"""How many rows and keys a program works on at a time, by device, head size and number of merged heads.

``benchmarks/kernel_resources.py`` compiles each entry and prints what it takes of registers and shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

MIN_WIDTH = 16
MAX_WIDTH = 256
"""The smallest and the largest head that the matrix units are given; a smaller one is padded with zeros."""

MAX_FLOAT32_WIDTH = 128
"""The largest head in float32: a product in three parts holds both halves of its operands in registers."""

UNROLLED_BYTES = 1024
"""Groups of one size are unrolled while their members' rows take at most this; others are looped over."""


class Tile(NamedTuple):
    """The shape of a program: its tile, its warps, and how many loads are in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# By bytes of a padded row; the first that is large enough holds.
_AMPERE = {128: Tile(64, 32, 4, 2), 256: Tile(64, 32, 8, 2), 512: Tile(32, 32, 8, 1)}
_HOPPER = {128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 2), 512: Tile(32, 32, 8, 2)}
_LSE = {128: Tile(64, 64, 4, 3), 256: Tile(64, 64, 8, 2), 512: Tile(64, 32, 8, 2)}
# Each warp holds sixteen whole rows of an operand, twice: more rows, or wide heads in fewer warps, would spill.
_FLOAT32 = {256: Tile(16, 32, 4, 2), 512: Tile(16, 32, 8, 1)}
# The interpreter takes its time by the tile, not by the entry.
_HOST = Tile(64, 64, 1, 1)
MASS_TILE = Tile(16, 256, 4, 2)


def choose_tile(
    program: str, row_bytes: int, members: int | None, capability: tuple[int, int] | None, *, is_float32: bool
) -> Tile:
    """The tile of the program ``"lse"``, ``"rows"`` or ``"keys"`` on a device, or a host that interprets (None).

    ``row_bytes`` are of a padded row of queries, the larger of student's and teacher's; ``members`` are teacher heads
    that are unrolled, 0 for none, None for codes; ``is_float32``, whether student or teacher is.
    """
    if capability is None:
        return _HOST
    if is_float32:
        tiles = _FLOAT32
    elif program == "lse":
        tiles = _LSE
    else:
        # Wide asynchronous products are Hopper's and data centre Blackwell's.
        tiles = _HOPPER if capability[0] in (9, 10) else _AMPERE
        if members is None:
            row_bytes = max(row_bytes, 256)  # decoding narrow heads takes more registers than their products
        elif members > 2:
            row_bytes *= 2
    return tiles[min(size for size in tiles if size >= min(row_bytes, 512))]


def pad_width(width: int) -> int:
    """The next power of two, at least ``MIN_WIDTH``."""
    return max(1 << (width - 1).bit_length(), MIN_WIDTH)


def count_unrolled(group_sizes: set[int], row_bytes: int, *, is_float32: bool) -> int:
    """How many members to unroll: the size of all groups; 0 where they differ, are too large, or fill registers."""
    (size, *others) = group_sizes
    return size if not others and not is_float32 and size * row_bytes <= UNROLLED_BYTES else 0
