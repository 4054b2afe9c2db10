"""Records whose maps have rows of one sequence and keys of another (CACHE-128, CACHE-33)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.makers import KINDS, job, key_of, probs_of, shapes_of, write_cache

from shd_ref.cache import CODECS, CacheReader, sample_key, trim_inputs, verify_cache


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("alpha_per", ["map", "row"])
def test_what_is_written_is_read(tmp_path: Path, codec: str, alpha_per: str) -> None:
    manifest = job(codec=codec, alpha_per=alpha_per, **KINDS)
    reader = CacheReader(write_cache(tmp_path, manifest))
    assert verify_cache(tmp_path).ok
    for index in range(manifest.dataset.num_samples):
        record = reader.read(key_of(index))
        assert record.shapes == shapes_of(manifest, index)
        for layer, shape in zip(manifest.attention.student_layers, record.shapes, strict=True):
            maps, probs = reader.decode(record, layer), probs_of(manifest, index, layer)
            assert maps.shape == probs.shape == (manifest.attention.num_student_heads, *shape)
            assert float(0.5 * np.abs(maps - probs).sum(-1).max()) < 0.2
        if alpha_per == "row":
            assert record.parts["alphas"].shape[-1] == max(rows for rows, _ in record.shapes)


def test_each_sequence_is_cut_by_its_own_mask() -> None:
    """Also where both are padded to one length."""
    sample = {
        "ids": np.array([5, 6, 0, 0]), "mask": np.array([1, 1, 0, 0]),
        "decoder_ids": np.array([7, 8, 9, 0]), "decoder_mask": np.array([1, 1, 1, 0]),
    }  # fmt: skip
    names = ("decoder_ids", "decoder_mask")
    cut, *lengths = trim_inputs(sample, "mask", names, "decoder_mask")
    assert {name: len(array) for name, array in cut.items()} == {
        "ids": 2, "mask": 2, "decoder_ids": 3, "decoder_mask": 3
    }  # fmt: skip
    assert lengths == [2, 3]
    longer = {name: np.append(array, np.zeros(5, np.int64)) for name, array in sample.items()}
    assert sample_key(trim_inputs(longer, "mask", names, "decoder_mask")[0]) == sample_key(cut)
    uncut, *lengths = trim_inputs(sample, "mask", names, None)
    assert len(uncut["decoder_ids"]) == 4
    assert lengths == [2, None]
