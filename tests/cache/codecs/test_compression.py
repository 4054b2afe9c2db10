"""Compressed blobs: what was written is read, and a lying frame costs no memory."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.makers import (
    MEASURED,
    contents,
    document,
    job,
    key_of,
    read_everything,
    record_of,
    records_of,
    write_cache,
)

from shd_ref.cache import CacheReader, CacheWriter, Manifest, NewRecord, Receipt, encode, verify_cache
from shd_ref.cache.codecs.compression import compress_blob, expand_blob
from shd_ref.errors import ShdError

zstandard = pytest.importorskip("zstandard", reason="compressed caches need the extra 'zstd'")


def even_records(manifest: Manifest, shard: int) -> list[NewRecord]:
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


def test_a_blob_that_does_not_shrink_is_stored_as_it_is(tmp_path: Path) -> None:
    blob = np.random.default_rng(0).integers(0, 256, 300, dtype=np.uint8)
    assert compress_blob(blob, "zstd") is blob
    assert expand_blob(blob, 300, "x") is blob
    plain = contents(write_cache(tmp_path / "plain", job(3)))
    packed = contents(write_cache(tmp_path / "zstd", job(3, compression="zstd")))
    sizes = {len(plain[name]) - len(packed[name]) for name in plain if name.endswith("safetensors")}
    assert sizes == {0}  # these random maps do not shrink


def test_a_frame_that_claims_more_is_refused_before_memory_is_taken() -> None:
    bomb = np.frombuffer(zstandard.ZstdCompressor(level=19).compress(bytes(2**28)), dtype=np.uint8)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(5000))
    assert len(bomb) < 2**16
    tracemalloc.start()
    for frame in (bomb, np.frombuffer(silent, dtype=np.uint8)):
        with pytest.raises(ShdError, match="must expand to 100000 bytes") as caught:
            expand_blob(frame, 100_000, "record 3 layer 1")
        assert caught.value.code == "cache-corrupt"
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_a_receipt_that_claims_a_longer_record_takes_no_memory(tmp_path: Path) -> None:
    """A cache from elsewhere, whole by all its checksums."""
    folder = write_cache(tmp_path, job(compression="zstd"))
    receipt, seal = folder / "receipts/000000.json", folder / "SEALED.json"
    members = json.loads(receipt.read_bytes())
    members["records"][0]["length"] = 10**7  # 200 TB a layer
    receipt.write_bytes(document(members))
    sealed = json.loads(seal.read_bytes())
    sealed["receipts"][0] = json.loads(receipt.read_bytes())["checksum"]
    seal.write_bytes(document(sealed))
    reader = CacheReader(folder)
    key = members["records"][0]["key"]
    for read in (lambda: reader.read(key), lambda: reader.read_batch([key, key])):
        with pytest.raises(ShdError, match=r"record \d+ layer 1: must") as caught:
            read()
        assert caught.value.code == "cache-corrupt"


@pytest.mark.parametrize("damage", ["noise", "cut", "more"])
def test_what_is_no_frame_is_refused(damage: str) -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(5000))
    data = {"noise": b"\x00" * 40, "cut": frame[:-3], "more": frame + b"x"}[damage]
    with pytest.raises(ShdError) as caught:
        expand_blob(np.frombuffer(data, dtype=np.uint8), 5000, "record 3 layer 1")
    assert caught.value.code == "cache-corrupt"
    assert "record 3 layer 1" in str(caught.value)


def test_memory_is_the_callers_own() -> None:
    frame = compress_blob(np.zeros(500, dtype=np.uint8), "zstd")
    blob = expand_blob(frame, 500, "x")
    blob[0] = 1
    assert expand_blob(frame, 500, "x")[0] == 0


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shd_ref.cache.codecs import compression

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    compression._zstandard.cache_clear()
    monkeypatch.setattr("importlib.import_module", missing)
    manifest = job(1, compression="zstd")
    with pytest.raises(ShdError, match=r"squeezing-heads\[zstd\]") as caught:
        CacheWriter(tmp_path, manifest).write_shard(0, [record_of(manifest, 0)], MEASURED)
    assert caught.value.code == "dependency-missing"
    assert key_of(0) not in CacheReader(tmp_path, allow_partial=True)
