"""The bytes of format 1, frozen: what was written once is read and verified by every later release (CACHE-95).

``python -m cache.golden_jobs`` (in ``tests/``) writes folders that do not exist yet, and never changes one.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache.golden_jobs import GOLDEN, GOLDEN_JOBS, digests_of, read_digests
from support.independent_reader import read_cache, read_head
from support.makers import (
    FACTORS,
    FORMS,
    KINDS,
    WINDOWED,
    contents,
    errors_of,
    is_skipped,
    job,
    key_of,
    length_of,
    record_of,
    write_cache,
)

from shd_ref.cache import CODECS, SUPPORTS, CacheReader, Manifest, SampleInputs, verify_cache


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


ATTENTION: dict[str, dict[str, Any]] = {
    **{f"{codec} {support}": {"codec": codec, "support": support} for codec in CODECS for support in SUPPORTS},
    "own shapes": {"codec": "u4", **KINDS},
    "factors": {"codec": "int8", "factors": FACTORS, "support": "causal"},
    "factors with padding in front": {"codec": "float16", "factors": WINDOWED, "padding": "around"},
    "factors in a causal window": {"codec": "int8", "factors": WINDOWED, "padding": "around", "support": "causal"},
    "identity": {"num_student_heads": 4, "plan": ()},
    "seeds": {"inputs": SampleInputs(("input_ids",), None, "augmentation")},
    "skipped": {"on_error": "skip"},
    "none": {"attention": None},
}
JOBS = GOLDEN_JOBS | {
    f"{name}, {forms}": job(**attention, **FORMS.get(forms, {}))
    for number, (name, attention) in enumerate(ATTENTION.items())
    for forms in (list(FORMS)[number % len(FORMS)], "alone" if name != "none" else "topk")
}
"""The golden ones, and attention of every kind, alone and with other forms in turn."""


@pytest.mark.parametrize("name", JOBS)
def test_a_reader_gives_what_was_written_as_one_made_from_the_specification(tmp_path: Path, name: str) -> None:
    manifest = JOBS[name]
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    folder = GOLDEN / name if name in GOLDEN_JOBS else write_cache(tmp_path, manifest)
    assert verify_cache(folder).ok
    reader, samples = CacheReader(folder), read_cache(folder)
    wanted = [index for index in range(manifest.dataset.num_samples) if not is_skipped(manifest, index)]
    shards = [manifest.shard_samples(shard) for shard in range(manifest.shards.num_shards)]
    assert reader.keys() == [key_of(index) for shard in shards for index in shard if index in wanted]
    assert (sorted(samples), len(reader)) == (wanted, len(wanted))
    assert len(reader.skipped) == manifest.dataset.num_samples - len(wanted)
    measured = errors_of(manifest).items()
    assert reader.errors == {subject: replace(error, rows=len(shards) * error.rows) for subject, error in measured}
    if (made := read_head(folder)) is not None:
        np.testing.assert_allclose(reader.read_head().logits(np.eye(len(made))), made, rtol=1e-12, atol=1e-12)
    for index, sample in samples.items():
        record, written = reader.read(key_of(index)), record_of(manifest, index)
        assert (sample["key"], sample["length"]) == (record.key, record.length) == (key_of(index), length_of(index))
        assert (record.index, record.first, record.shapes) == (index, written.first, written.shapes)
        assert sample["seed"] == record.seed == written.seed
        assert record.parts.keys() == written.parts.keys()
        for parts in (record.parts, written.parts):
            for part in ("alphas", "mixing"):
                assert sample[part] == (parts[part].ravel().tolist() if part in parts else [])
        for layer, maps in sample["maps"].items():
            np.testing.assert_allclose(reader.decode(record, layer), maps, rtol=2.0**-20, atol=2.0**-40)
        if manifest.logits is not None:
            np.testing.assert_array_equal(record.parts["logits"], written.parts["logits"].ravel())
            decoded = reader.decode_logits(record)
            for part, values in sample["logits"].items():
                found = decoded if part == "logits" else getattr(decoded, part)
                np.testing.assert_allclose(found, values, rtol=1e-9, atol=1e-12, err_msg=part)
        for rows in sample["embedding"]:
            np.testing.assert_allclose([reader.decode_embedding(record)], rows, rtol=2.0**-23, atol=0)
        if manifest.exact is not None:
            np.testing.assert_allclose(reader.decode_last(record), sample["last"], rtol=2.0**-23, atol=0)
        for layer, rows in sample["hidden"].items():
            np.testing.assert_allclose(reader.decode_hidden(record, layer), rows, rtol=2.0**-23, atol=0)
