"""MAP-14: maps keep the dtype that they were stored in, and with it the ROW_SUM that applies to their rows."""

from typing import Any

import numpy as np
import pytest

import shd_ref
from shd_ref.conformance import load_tolerances

OUTPUTS = np.random.default_rng(5).standard_normal((2, 4, 24, 3))
LOGITS = np.random.default_rng(6).standard_normal((2, 2, 6, 24))


def stored_maps(name: str) -> Any:
    """Softmax rows rounded to the dtype, which move their sums further than float64's ROW_SUM."""
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else np.dtype(name)
    exact = shd_ref.softmax(np.random.default_rng(7).standard_normal((2, 4, 6, 24)))
    maps = exact.astype(dtype)
    # Float32's own rounding is too small to see; a whole row moved is what a kernel's approximate division does.
    return (maps * maps.dtype.type(1 + 5e-5)).astype(dtype) if name == "float32" else maps


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_what_was_accepted_is_accepted_again(name: str) -> None:
    maps = stored_maps(name)
    error = np.abs(maps.astype(np.float64).sum(-1) - 1).max()
    allowed = load_tolerances()["row_sum"]
    assert allowed["float64"] < error < allowed[name]
    merged = shd_ref.squeeze_heads(maps, OUTPUTS, 2).probs
    with pytest.raises(shd_ref.ShdError, match="sum to 1"):
        shd_ref.shd_loss(merged.astype(np.float64), LOGITS)
    assert np.isfinite(shd_ref.shd_loss(merged, LOGITS))
    kept = shd_ref.align_tokens(merged, columns=range(12)).probs
    intersected = shd_ref.intersect_support(kept, LOGITS[..., :12]).supervision
    mixed = shd_ref.mix_heads(shd_ref.soften(intersected, 1.0), np.full((2, 1, 2), 0.5))
    assert {array.dtype for array in (merged, kept, intersected, mixed)} == {maps.dtype}
    assert np.isfinite(shd_ref.shd_loss(mixed, LOGITS[:, :1, :, :12]))


def test_integers_give_float64() -> None:
    assert shd_ref.soften(np.array([[1, 0]]), 1.0).dtype == np.float64
