"""Matched plans beyond what the judge asks: which of equal sets is taken, bad calibration, a missing library."""

from typing import Any

import numpy as np
import pytest

from shd_ref import matched_plan, softmax

pytest.importorskip("networkx", reason="matched plans need networkx")


def teacher(heads: int = 6, seed: int = 0, *, batch: int = 2, keys: int = 6) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return softmax(rng.normal(size=(batch, heads, 5, keys)) * 2), rng.normal(size=(batch, heads, keys, 7))


@pytest.mark.parametrize("by", ["residual", "similarity"])
def test_of_equal_sets_the_first_is_taken(by: str) -> None:
    """Three copies each of two heads: which pairs meet is all the same, so rounding must not say it."""
    probs, outputs = teacher(2, batch=3)
    order = [0, 1, 0, 1, 0, 1]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        samples = rng.permutation(3)
        maps, values = (part[samples][:, order] for part in (probs, outputs))
        maps = maps * (1 + 1e-9 * rng.normal(size=maps.shape))
        assert matched_plan([(maps, values)], 3, by) == (((0, 1), (2, 4), (3, 5)),)
        assert matched_plan([(maps[:, [0] * 6], values[:, [0] * 6])], 3, by) == (((0, 1), (2, 3), (4, 5)),)
