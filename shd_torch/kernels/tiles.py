"""How many rows and keys a program works on at a time, by head size.

Chosen so that no variant spills registers and that its shared memory fits every device from sm_80 on (99 KiB a
program): see ``benchmarks/kernel_resources.py``, which compiles each entry and prints what it takes.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_WIDTH = 256
MIN_WIDTH = 16
"""The smallest and largest head that the matrix units are given; a smaller one is padded with zeros."""


class Tile(NamedTuple):
    """The shape of a program: its tile, its warps, and how many loads are in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


_TILES: dict[str, dict[int, Tile]] = {
    "lse": {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 2)},
    "rows": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 1), 256: Tile(32, 32, 8, 1)},
    "keys": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 1), 256: Tile(32, 32, 8, 1)},
}
MASS_TILE = Tile(16, 256, 4, 2)


def choose_tile(program: str, width: int, item_size: int) -> Tile:
    """The tile of a program.

    Args:
        program: ``"lse"``, ``"rows"`` or ``"keys"``.
        width: the larger of the padded head sizes of student and teacher, at most ``MAX_WIDTH``.
        item_size: bytes of one number that the matrix unit is fed with.
    """
    tiles = _TILES[program]
    # Numbers twice as wide take the memory of heads twice as wide.
    effective = min(width * max(item_size // 2, 1), MAX_WIDTH)
    tile = tiles[min(size for size in tiles if size >= effective)]
    if width * item_size > 2 * MAX_WIDTH:
        return Tile(min(tile.rows, 32), min(tile.keys, 16), tile.num_warps, 1)
    return tile


def pad_width(width: int) -> int:
    """The next power of two, at least ``MIN_WIDTH``."""
    return max(1 << (width - 1).bit_length(), MIN_WIDTH)
