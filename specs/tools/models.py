"""Teachers that a generator writes, for cases of several chapters."""

from __future__ import annotations

from book import Given, numbers, probs


def random_model(batch: int, teachers: int, rows: int, keys: int, width: int, seed: int) -> dict[str, Given]:
    """Maps and value outputs that a generator writes."""
    return {
        "teacher_probs": probs([batch, teachers, rows, keys], seed, 9, 2, 6),
        "value_outputs": numbers([batch, teachers, keys, width], seed + 1, -8, 16, 2),
    }
