"""Maps pooled over other tokens: 40 groupings against plain loops, and what must hold of any."""

import numpy as np
import pytest
from support.pooled import draw_groups, pool_by_loops

from shd_ref import patch_groups, pool_tokens, span_groups

RNG = np.random.default_rng(47)


def draw_maps(*shape: int) -> np.ndarray:
    maps = RNG.random(shape)
    maps[RNG.random(shape[:-1]) < 0.1] = 0.0
    return np.asarray(maps / np.maximum(maps.sum(-1, keepdims=True), 1e-300))


@pytest.mark.parametrize("number", range(40))
def test_pooled_maps_are_those_of_plain_loops(number: int) -> None:
    rng = np.random.default_rng(number)
    length, keys = (int(n) for n in rng.integers(1, 9, size=2))
    maps, counted = draw_maps(2, 2, length, keys), rng.random((2, length)) < 0.9
    rows, columns = draw_groups(rng, length), draw_groups(rng, keys)
    pooled = pool_tokens(maps, rows, columns, query_mask=counted)
    probs, dropped = pool_by_loops(maps, rows, columns, counted)
    np.testing.assert_allclose(pooled.probs, probs, rtol=0, atol=1e-12)
    np.testing.assert_allclose(pooled.dropped, dropped, rtol=0, atol=1e-12)
    sums = pooled.probs.sum(-1)
    np.testing.assert_allclose(sums[sums > 0], 1.0, rtol=0, atol=1e-12)


def test_groups_of_patches() -> None:
    groups = patch_groups((14, 14), (7, 7), extra=1)
    assert groups.shape == (50, 197)
    assert groups[0].tolist() == [1.0] + [0.0] * 196
    assert np.flatnonzero(groups[1 + 7 + 2]).tolist() == [1 + 28 + 4, 1 + 28 + 5, 1 + 42 + 4, 1 + 42 + 5]
    np.testing.assert_allclose(patch_groups([3], [2]), [[2, 1, 0], [0, 1, 2]])
    uneven = patch_groups((16, 14), (7, 9))
    np.testing.assert_allclose(uneven.sum(0), uneven.sum(0)[0])  # every patch has one area


def test_groups_of_characters() -> None:
    teacher = [[0, 0], [0, 3], [3, 7], [8, 9], [0, 0], [0, 0]]  # [CLS] und erli ch [SEP] [PAD]
    student = [[0, 0], [0, 5], [5, 9], [0, 0]]
    expected = [[1, 0, 0, 0, 0, 0], [0, 3, 2, 0, 0, 0], [0, 0, 2, 1, 0, 0], [0, 0, 0, 0, 0, 1]]
    assert span_groups(teacher, student).tolist() == expected
    assert span_groups(teacher[:5], student)[3].tolist() == [0, 0, 0, 0, 1]
    assert span_groups(teacher[1:4], student).sum(1).tolist() == [0, 5, 3, 0]  # of special tokens one side has alone
    assert span_groups([[0, 0]], [[0, 0], [0, 0]]).tolist() == [[1], [0]]
