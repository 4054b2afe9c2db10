"""Caches in an object store: the same bytes, the same refusals, and no locks to lean on."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.interrupted_writer import interrupted_job
from support.makers import (
    MEASURED,
    contents,
    job,
    key_of,
    read_everything,
    record_of,
    records_of,
    write_cache,
    write_shards,
)
from support.object_store import environment, free_port

from shd_ref import ShdError
from shd_ref.cache import CacheReader, CacheWriter, Manifest, verify_cache
from shd_ref.cache.storage.places import is_address, open_storage, subfolder
from shd_ref.cache.storage.remote import COMPARED_BYTES, RemoteStorage

pytest.importorskip("s3fs", reason="caches in object stores need the extra 'remote'")

pytestmark = pytest.mark.slow  # most tests need the S3 server, which is a process of several seconds
ROOT = Path(__file__).resolve().parents[3]
NUM_SAMPLES = 30
SHARD, RECEIPT = "shards/01/000001.safetensors", "receipts/000001.json"


def objects(address: str) -> dict[str, bytes]:
    storage = open_storage(address)
    return {name: storage.read(name) for name in storage.names()}


def change(address: str, name: str, position: int) -> None:
    storage = open_storage(address)
    data = bytearray(storage.read(name))
    data[position] ^= 0x10
    storage.write_whole(name, bytes(data))


def start_writer(address: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-m", "support.interrupted_writer", address, "1.0", str(NUM_SAMPLES), "one-sequence"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path})


@pytest.fixture
def cache(bucket: str) -> str:
    return write_cache(f"{bucket}/runs/cache", job())


def test_objects_are_the_files_of_a_local_cache(cache: str, tmp_path: Path) -> None:
    local = write_cache(tmp_path / "cache", job())
    assert objects(cache) == contents(local)
    assert read_everything(CacheReader(cache)) == read_everything(CacheReader(local))
    assert verify_cache(cache).ok
    assert CacheReader(cache).folder == cache


def test_readers_fetch_the_ranges_they_return_and_no_more(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = CacheReader(cache)
    fetched = []
    real = RemoteStorage.read_range

    def read_range(storage: RemoteStorage, name: str, start: int, end: int) -> bytes:
        data = real(storage, name, start, end)
        fetched.append((name, len(data)))
        return data

    monkeypatch.setattr(RemoteStorage, "read_range", read_range)
    monkeypatch.setattr(RemoteStorage, "read", None)
    record = reader.read(key_of(3), layers=[2])
    np.testing.assert_array_equal(record.parts["mixing"], record_of(job(), 3).parts["mixing"])
    # The two float blobs lie side by side: one request.
    assert sorted(size for _, size in fetched) == sorted(
        [record.parts["alphas"].nbytes + record.parts["mixing"].nbytes, record.parts["L02"].nbytes]
    )


@pytest.mark.parametrize(("position", "is_read"), [(-1, True), (20, False)], ids=["blob", "header"])
def test_flipped_bit_in_a_shard(cache: str, position: int, is_read: bool) -> None:
    change(cache, SHARD, position)
    assert {problem.path for problem in verify_cache(cache).problems} == {SHARD}
    if is_read:
        with pytest.raises(ShdError, match=rf"{SHARD}: record \d layer 2: .* must have XXH3-64") as caught:
            read_everything(CacheReader(cache))
        assert caught.value.code == "cache-corrupt"


def test_truncated_and_absent_objects(cache: str) -> None:
    reader, storage = CacheReader(cache), open_storage(cache)
    whole = storage.read(SHARD)
    victim = next(index for index in job().shard_samples(1))
    for length in (len(whole) - 1, 100):
        storage.write_whole(SHARD, whole[:length])
        with pytest.raises(ShdError, match=f"it must have {len(whole)} bytes and has {length}") as caught:
            CacheReader(cache)
        assert caught.value.code == "cache-incomplete"
    for problem in ("it ends at byte", "it does not exist"):
        with pytest.raises(ShdError, match=problem) as caught:
            reader.read(key_of(victim))
        assert caught.value.code == "cache-incomplete"
        storage.remove(SHARD)
    storage.write_whole(SHARD, whole)
    assert reader.read(key_of(victim)).index == victim
    storage.remove(RECEIPT)
    with pytest.raises(ShdError, match="shard 1 was never committed") as caught:
        CacheReader(cache)
    assert caught.value.code == "cache-incomplete"
    assert CacheWriter(cache, job()).missing_shards() == [1]


def test_of_racing_manifests_the_first_stays(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(f"{bucket}/cache")
    filesystem, _ = storage._connect()  # type: ignore[attr-defined]
    monkeypatch.setattr(filesystem, "exists", lambda path: False)  # both looked before either wrote
    storage.create("manifest.json", job().to_bytes())
    storage.create("manifest.json", job(temperature=2.0).to_bytes())
    assert Manifest.read(storage) == job()


def test_killed_writers_resume(bucket: str, tmp_path: Path) -> None:
    address, moments, committed = f"{bucket}/cache", random.Random(5), 0
    for _ in range(2):
        with start_writer(address) as process:
            while len(open_storage(address).names("receipts")) <= committed // 3:  # three samples a shard
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(moments.uniform(0, 0.1))
            process.kill()
        partial = CacheReader(address, allow_partial=True)
        assert committed < len(partial) < NUM_SAMPLES
        committed = len(partial)
        assert partial.read(partial.keys()[-1], layers=[1]).parts
    lengths = []
    with start_writer(address) as process:
        while process.poll() is None:  # a reader while a writer works
            partial = CacheReader(address, allow_partial=True)
            lengths.append(len(partial))
            assert partial.read(partial.keys()[-1], layers=[1]).parts
            time.sleep(0.2)
    assert process.returncode == 0
    assert lengths == sorted(lengths)
    assert objects(address) == contents(write_cache(tmp_path / "cache", interrupted_job(NUM_SAMPLES)))


def test_racing_writers_that_round_differently_do_not_mix(bucket: str) -> None:
    address, scales = f"{bucket}/cache", (1.0, 0.5, 0.25)
    start = threading.Barrier(len(scales))

    def write(scale: float) -> None:
        writer = CacheWriter(address, job())
        for shard in range(job().shards.num_shards):
            start.wait(240)  # a store retries for a while on a busy machine
            records = [
                replace(record, parts={**record.parts, "alphas": record.parts["alphas"] * np.float32(scale)})
                for record in records_of(job(), shard)
            ]
            writer.write_shard(shard, records, MEASURED)

    with ThreadPoolExecutor(len(scales)) as pool:
        outcomes = [future.exception() for future in [pool.submit(write, scale) for scale in scales]]
    assert outcomes == [None] * len(scales)  # all of them: the others' barrier breaks when one of them fails
    CacheWriter(address, job()).seal()
    assert verify_cache(address).ok
    reader = CacheReader(address)
    for index in range(len(reader)):
        written, found = (read.parts["alphas"] for read in (record_of(job(), index), reader.read(key_of(index))))
        assert any(np.array_equal(found, written * np.float32(scale)) for scale in scales)


class _Interposed(RemoteStorage):
    """Something happens right after each upload of a shard."""

    def __init__(self, root: str, events: list[Any]) -> None:
        super().__init__(root)
        self.events = events

    def upload(self, name: str, path: str) -> None:
        super().upload(name, path)
        if name.startswith("shards/") and self.events:
            self.events.pop(0)()


def test_shard_that_was_replaced_before_its_receipt_is_written_again(request: pytest.FixtureRequest) -> None:
    address = f"memory://{request.node.name}"
    other = CacheWriter(address, job())
    rounded = [
        record_of(job(), record.index, parts={"alphas": record.parts["alphas"] * np.float32(0.5)})
        for record in records_of(job(), 0)
    ]
    writer = CacheWriter(_Interposed(address, [lambda: other.write_shard(0, rounded, MEASURED)] * 2), job())
    receipt = writer.write_shard(0, records_of(job(), 0), MEASURED)
    write_shards(writer, [1, 2, 3])
    writer.seal()
    assert verify_cache(address).ok
    first = records_of(job(), 0)[0]
    found = CacheReader(address).read(key_of(first.index))
    np.testing.assert_array_equal(found.parts["alphas"], first.parts["alphas"])
    assert receipt.shard == 0


def test_writer_that_is_always_overtaken_gives_up(request: pytest.FixtureRequest) -> None:
    address = f"memory://{request.node.name}"
    storage = open_storage(address)

    def replace() -> None:
        storage.write_whole("shards/00/000000.safetensors", b"another writer's")

    writer = CacheWriter(_Interposed(address, [replace] * 100), job())
    with pytest.raises(ShdError, match=r"other writers replaced it 5 times: .*--shards i/n") as caught:
        write_shards(writer, [0])
    assert caught.value.code == "write-failed"
    assert CacheWriter(address, job()).missing_shards() == [0, 1, 2, 3]


def test_a_large_upload_stands_until_another_byte_is_in_it(request: pytest.FixtureRequest) -> None:
    storage = open_storage(f"memory://{request.node.name}")
    with storage.pending("large") as file:
        large = bytes(COMPARED_BYTES + 1)
        file.write(large)
        file.sync()
        file.commit()
        assert file.stands()
        for other in (large[:-1] + b"1", large[:-1], large + b"0"):
            storage.write_whole("large", other)
            assert not file.stands()
        storage.remove("large")
        assert not file.stands()


def test_readers_are_shared_by_threads_and_processes(cache: str) -> None:
    reader = CacheReader(cache)
    expected = read_everything(reader)
    with ThreadPoolExecutor(4) as pool:
        assert all(found == expected for found in pool.map(read_everything, [reader] * 4))
    assert read_everything(pickle.loads(pickle.dumps(reader))) == expected


def test_unreachable_store_is_no_missing_cache() -> None:
    code = """
from support.makers import job
from shd_ref.cache import CacheReader, CacheWriter
from shd_ref.errors import ShdError
for call in (CacheReader, lambda address: CacheWriter(address, job())):
    try:
        call("s3://bucket/cache")
    except ShdError as error:
        assert error.code == "read-failed", error
        assert "s3://bucket/cache/manifest.json could not be read" in str(error), error
        assert "check the address, the credentials and the network" in str(error), error
    else:
        raise SystemExit("a store that cannot be reached must be an error")
"""
    variables = environment(free_port()) | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    subprocess.run([sys.executable, "-c", code], env=os.environ | variables, check=True, timeout=120)


def test_writer_does_not_take_an_unreadable_shard_for_missing(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CacheWriter(cache, job())
    monkeypatch.setattr(RemoteStorage, "_info", _unreachable)
    with pytest.raises(ShdError, match="network") as caught:
        writer.missing_shards()
    assert caught.value.code == "read-failed"


def _unreachable(storage: RemoteStorage, name: str) -> Any:
    with storage._reads(name):
        raise ConnectionResetError(f"connection lost at {name}")


def test_missing_bucket(bucket: str) -> None:
    with pytest.raises(ShdError, match="bucket does not exist") as caught:
        CacheWriter(f"{bucket}-absent/cache", job())
    assert caught.value.code == "write-failed"
    with pytest.raises(ShdError, match="is not a cache") as caught:
        CacheReader(f"{bucket}-absent/cache")
    assert caught.value.code == "cache-incomplete"


def test_addresses() -> None:
    assert [is_address(place) for place in ("s3://b/c", "memory://x", "cache", "a/b:c", "C://x", Path("s3:/b"))] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert subfolder("s3://b/c/", "heads-2") == "s3://b/c/heads-2"
    assert subfolder("cache", "heads-2") == Path("cache/heads-2")
    with pytest.raises(ShdError, match="an address that fsspec knows") as caught:
        CacheReader("nowhere://bucket/cache")
    assert caught.value.code == "argument-value"


def test_file_addresses_are_paths(tmp_path: Path) -> None:
    folder = write_cache(tmp_path / "a cache", job())
    assert CacheReader(folder.as_uri()).folder == folder


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ShdError, match=r"pip install 'squeezing-heads\[remote\]'") as caught:
        CacheReader("s3://bucket/cache")
    assert caught.value.code == "dependency-missing"
