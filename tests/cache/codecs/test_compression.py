"""Compressed blobs: what was written is read, and a lying frame costs no memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.makers import MEASURED, job, read_everything, records_of

from shd_ref.cache import CacheReader, CacheWriter, Manifest, Receipt, SampleRecord, encode, verify_cache

pytest.importorskip("zstandard", reason="compressed caches need the extra 'zstd'")


def even_records(manifest: Manifest, shard: int) -> list[SampleRecord]:
    """Every second sample has the same value everywhere, which compresses well; random ones do not."""
    records = []
    for record in records_of(manifest, shard):
        even = np.full((2, 9, 9), 1 / 9, dtype=np.float32)
        if record.index % 2:
            codes = dict.fromkeys(("L01", "L02"), encode(manifest.attention.codec, even))
            record = replace(record, parts={**record.parts, **codes}, length=9)
        records.append(record)
    return records


@pytest.mark.parametrize("codec", ["sqrt8-row", "sqrt8-abs", "u4", "bf16", "float32"])
def test_what_was_written_is_read(tmp_path: Path, codec: str) -> None:
    readers = []
    for compression in ("none", "zstd"):
        manifest = job(codec=codec, compression=compression)
        writer = CacheWriter(tmp_path / compression, manifest)
        for shard in writer.missing_shards():
            writer.write_shard(shard, even_records(manifest, shard), MEASURED)
        writer.seal()
        assert verify_cache(tmp_path / compression).ok
        readers.append(CacheReader(tmp_path / compression))
    assert read_everything(readers[0]) == read_everything(readers[1])
    for shard in range(4):
        plain, packed = (Receipt.read(reader.folder, shard, reader.manifest) for reader in readers)
        for one, two in zip(plain.records, packed.records, strict=True):
            sizes = one.sizes[2:], two.sizes[2:]
            assert all(small < full if one.index % 2 else small <= full for full, small in zip(*sizes, strict=True))
