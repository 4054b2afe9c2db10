"""Groups of tokens, by hand; what pooling over them gives is held by the vectors."""

import numpy as np

from shd_ref import patch_groups, span_groups


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
