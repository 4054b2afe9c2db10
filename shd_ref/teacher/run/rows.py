"""Maps of a layer that ran in tiles, computed again for some rows at a time, for checks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.rewrite.tiles import TiledRows
from shd_ref.teacher.session import open_session

TILE_BYTES: Final = 2**24
"""Maps of the teacher that are in float64 at once (but at least a row of every head)."""
COMPARED_ENTRIES: Final = 2**24
"""Entries of a layer's maps that are compared before anything is written, of a sample that ran in tiles."""
MEASURED_ENTRIES: Final = 2**19
"""Entries of a layer's maps of which a sample's coding errors are measured."""


@dataclass(frozen=True, eq=False)
class MapRows:
    """The maps of a batch at one layer: ``arrays`` are what they are made of, of which ``samples`` are looked at."""

    rows: TiledRows
    arrays: Mapping[str, NDArray[Any]]
    provider: str
    num_threads: int | None
    samples: int | slice | Sequence[int]

    def __getitem__(self, samples: int | slice | Sequence[int]) -> MapRows:
        chosen = np.arange(len(self.arrays["values"]))[self.samples][samples]
        return replace(self, samples=int(chosen) if np.ndim(chosen) == 0 else chosen.tolist())

    def read(self, rows: slice) -> dict[str, NDArray[Any]]:
        """``probs`` ``(B, H_t, rows, S)`` and ``merged`` ``(B, H_s, rows, S)``, without B of a single sample."""
        feeds = {role: self.arrays[role] for role in self.rows.sources}
        feeds |= {"start": np.array([rows.start]), "stop": np.array([rows.stop])}
        maps = self._session.run(["probs", "merged"], feeds)
        return {role: array[self.samples] for role, array in zip(("probs", "merged"), maps, strict=True)}

    def products(self, sums: NDArray[Any], heads: Sequence[int], other: int) -> NDArray[Any]:
        """From sums ``(H, L, W)`` those of some heads' maps with the values of another ``(heads, L, d_v)``."""
        of_other, width = self.rows.tiles.value_heads[other], self.arrays["values"].shape[-1]
        places = [self.rows.slots[head].index(of_other) * width for head in heads]
        return np.stack([sums[head, :, at : at + width] for head, at in zip(heads, places, strict=True)])

    @functools.cached_property
    def _session(self) -> Any:
        graph = self.rows.graph({role: self.arrays[role].dtype for role in self.rows.sources})
        return open_session(graph, provider=self.provider, num_threads=self.num_threads, keeps_memory=False)


def choose_rows(heads: int, rows: int, keys: int, entries: int | None, seed: int) -> list[slice]:
    """Tiles of rows, all of them; or of as many entries, the first, the last, and others that a seed chooses."""
    row = heads * max(keys, 1)
    size = max(1, TILE_BYTES // (8 * row) if entries is None else min(TILE_BYTES // 8, entries // 8) // row)
    tiles = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
    most = len(tiles) if entries is None else max(2, entries // (size * row))
    if len(tiles) <= most:
        return tiles
    between = np.random.default_rng(seed).choice(np.arange(1, len(tiles) - 1), most - 2, replace=False).tolist()
    return [tiles[number] for number in (0, *sorted(between), len(tiles) - 1)]
