"""The bytes of format 1, frozen: what was written once is read and verified by every later release (CACHE-95).

``python -m cache.golden_jobs`` (in ``tests/``) writes folders that do not exist yet, and never changes one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cache.golden_jobs import GOLDEN, GOLDEN_JOBS, digests_of, read_digests
from support.independent_reader import read_cache, read_head
from support.makers import contents, is_skipped, key_of, length_of, record_of, write_cache

from shd_ref.cache import CacheReader, verify_cache


@pytest.mark.parametrize("name", GOLDEN_JOBS)
def test_same_bytes_today(tmp_path: Path, name: str) -> None:
    written, golden = contents(write_cache(tmp_path, GOLDEN_JOBS[name])), contents(GOLDEN / name)
    assert written.keys() == golden.keys()
    assert [path for path in golden if written[path] != golden[path]] == []


def test_no_golden_byte_was_ever_changed() -> None:
    """Whoever changes the format must not be able to change the caches that hold it with it."""
    found = {path: digest for name in GOLDEN_JOBS for path, digest in digests_of(name).items()}
    assert found == read_digests()
    assert {folder.name for folder in GOLDEN.iterdir()} == GOLDEN_JOBS.keys()


@pytest.mark.parametrize("name", GOLDEN_JOBS)
def test_golden_cache_is_sound(name: str) -> None:
    assert verify_cache(GOLDEN / name).ok


@pytest.mark.parametrize("name", GOLDEN_JOBS)
def test_reader_agrees_with_one_made_from_the_specification(name: str) -> None:
    manifest = GOLDEN_JOBS[name]
    reader, samples = CacheReader(GOLDEN / name), read_cache(GOLDEN / name)
    wanted = range(manifest.dataset.num_samples)
    assert sorted(samples) == [index for index in wanted if not is_skipped(manifest, index)]
    if (made := read_head(GOLDEN / name)) is not None:
        np.testing.assert_allclose(reader.read_head().logits(np.eye(len(made))), made, rtol=1e-12, atol=1e-12)
    assert len(reader.skipped) == len(wanted) - len(samples)
    for index, sample in samples.items():
        record, written = reader.read(key_of(index)), record_of(manifest, index)
        assert (sample["key"], sample["length"]) == (key_of(index), length_of(index))
        assert sample["seed"] == record.seed == written.seed
        assert record.parts.keys() == written.parts.keys()
        for parts in (record.parts, written.parts):
            for name in ("alphas", "mixing"):
                assert sample[name] == (parts[name].ravel().tolist() if name in parts else [])
        for layer, maps in sample["maps"].items():
            np.testing.assert_allclose(reader.decode(record, layer), maps, rtol=2.0**-20, atol=0)
        if manifest.logits is not None:
            decoded = reader.decode_logits(record)
            for name, values in sample["logits"].items():
                found = decoded if name == "logits" else getattr(decoded, name)
                np.testing.assert_allclose(found, values, rtol=1e-9, atol=1e-12, err_msg=name)
        for rows in sample["embedding"]:
            np.testing.assert_allclose([reader.decode_embedding(record)], rows, rtol=2.0**-23, atol=0)
        if manifest.exact is not None:
            np.testing.assert_allclose(reader.decode_last(record), sample["last"], rtol=2.0**-23, atol=0)
        for layer, rows in sample["hidden"].items():
            np.testing.assert_allclose(reader.decode_hidden(record, layer), rows, rtol=2.0**-23, atol=0)
