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
_CHECKED_ENTRIES: Final = 2**26
"""Entries of a layer's maps that are looked at in a sample that ran in tiles."""


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


def choose_rows(heads: int, rows: int, keys: int, *, everything: bool) -> list[slice]:
    """Tiles of rows, all of them or as many from the first to the last as may be looked at."""
    size = max(1, TILE_BYTES // (8 * heads * max(keys, 1)))
    tiles = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
    most = max(2, _CHECKED_ENTRIES // (heads * size * max(keys, 1)))
    if everything or len(tiles) <= most:
        return tiles
    return [tiles[number] for number in sorted(set(np.linspace(0, len(tiles) - 1, most).astype(int).tolist()))]
