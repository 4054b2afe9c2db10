"""Rows of sparse targets as bytes: nothing but rounding is lost, within the stated bound; damage is refused."""

from typing import Any

import numpy as np
import pytest
from support.plain_kd import topk_targets

from shd_ref import ShdError
from shd_ref.cache.codecs.logits import RowCode

RNG = np.random.default_rng(3)
SHAPES = [(512, 50, 8), (151936, 50, 8), (151936, 1, 4), (32000, 16, 6), (7, 7, 16)]


def rows_of(code: RowCode, rows: int = 16, scale: float = 3.0) -> tuple[dict[str, Any], Any]:
    """What ``encode`` takes for random rows, and their bytes."""
    logits = scale * RNG.standard_normal((rows, code.vocab_size))
    topk = topk_targets(logits, code.head)
    given = {"head_ids": topk.ids, "log_probs": topk.log_probs, "log_tail": topk.log_tail}
    return given, code.encode(**given)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0])
def test_round_trip_within_the_bound(shape: tuple[int, int, int], scale: float) -> None:
    code = RowCode(*shape)
    given, rows = rows_of(code, scale=scale)
    assert rows.shape == (16, code.row_bytes)
    got = code.decode(rows)
    np.testing.assert_array_equal(got.head_ids, given["head_ids"])
    distance = np.abs(np.exp(got.log_probs) - np.exp(given["log_probs"]))
    assert (distance <= code.bound(rows)).all()
    sums = np.exp(got.log_probs).sum(-1) + np.exp(got.log_tail)
    np.testing.assert_allclose(sums, 1.0, atol=1e-7 if scale else 1e-3)
    # What is decoded is coded to the same bytes.
    again = {**given, "log_probs": got.log_probs, "log_tail": got.log_tail}
    np.testing.assert_array_equal(code.encode(**again), rows)


def test_damaged_bytes_are_refused_or_are_rows() -> None:
    """Any bytes give what a loss can take, or ``cache-corrupt``: never an exception of another kind."""
    code = RowCode(32000, 16, 6)
    _, rows = rows_of(code, rows=1)
    refused = read = 0
    for _ in range(400):
        damaged = rows.copy()
        damaged[0, RNG.integers(code.row_bytes)] ^= 1 << RNG.integers(8)
        try:
            got = code.decode(damaged)
        except ShdError as error:
            refused += error.code == "cache-corrupt"
            continue
        read += 1
        assert (np.diff(got.head_ids) > 0).all()
        assert got.head_ids.max() < 32000
        assert np.isfinite(got.log_probs).all()
    assert refused > 50
    assert refused + read == 400
    for wrong in (rows[:, 1:], rows.astype(np.int64), rows[0]):
        with pytest.raises(ShdError, match="rows must be bytes"):
            code.decode(wrong)
