"""Groupings drawn at random, and pooled maps by plain loops over every entry."""

from typing import Any

import numpy as np

from shd_ref import id_groups, patch_groups, span_groups


def draw_groups(rng: np.random.Generator, size: int) -> Any:
    """Groups of so many tokens: merged ones, some in none; spans of another tokenizer; weights of any kind; none."""
    kind = rng.integers(4)
    if kind == 0:
        return id_groups(rng.integers(-1, 1 + rng.integers(1, size + 1), size=size))
    if kind == 1:
        cuts = [
            np.sort(rng.choice(np.arange(1, 3 * size), count - 1, replace=False)) for count in (size, 1 + size // 2)
        ]
        both = [np.r_[0, cut, 3 * size] for cut in cuts]
        return span_groups(*(np.stack([cut[:-1], cut[1:]], axis=1) for cut in both))
    if kind == 2:
        return patch_groups([size], [int(rng.integers(1, size + 1))])
    return rng.random((int(rng.integers(1, size + 1)), size)) * (rng.random(size) < 0.8)


def pool_by_loops(maps: Any, rows: Any, columns: Any, counted: Any) -> tuple[Any, Any]:
    """``(probs, dropped)`` of maps ``(B, H, L, S)`` by TOKEN-9; ``counted`` is ``(B, L)``."""
    pooled = np.zeros((*maps.shape[:2], len(rows), len(columns)))
    dropped = np.zeros(pooled.shape[:3])
    for b, h, i in np.ndindex(dropped.shape):
        total = mass = 0.0
        for j in range(maps.shape[2]):
            if rows[i, j] == 0 or not counted[b, j] or not maps[b, h, j].any():
                continue
            total += rows[i, j]
            for m in range(maps.shape[3]):
                entry = rows[i, j] * maps[b, h, j, m]
                mass += entry
                if columns[:, m].sum() == 0:
                    dropped[b, h, i] += entry
                for k in range(len(columns)):
                    if columns[k, m]:
                        pooled[b, h, i, k] += entry * columns[k, m] / columns[:, m].sum()
        if total:
            pooled[b, h, i] /= total
            dropped[b, h, i] /= total
            if pooled[b, h, i].any():
                pooled[b, h, i] *= mass / total / pooled[b, h, i].sum()
    return pooled, dropped
