"""Caches in an object store: the same bytes, the same refusals, and no locks to lean on."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support.interrupted_writer import interrupted_job, start_writer
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
from support.refusals import refusal

from shd_ref.cache import CacheReader, CacheWriter, verify_cache

pytest.importorskip("s3fs", reason="caches in object stores need the extra 'remote'")
import fsspec
from fsspec.implementations.memory import MemoryFileSystem

pytestmark = pytest.mark.slow  # most tests need the S3 server, which is a process of several seconds
NUM_SAMPLES = 30
SHARD, RECEIPT = "shards/01/000001.safetensors", "receipts/000001.json"


class Store(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory, of which tests see every request and in whose uploads they may meddle."""

    protocol = "watched"
    store: ClassVar[dict[str, Any]] = {}
    fetched: ClassVar[list[tuple[str, int]]] = []
    after_upload: ClassVar[list[Callable[[], object]]] = []
    hidden, lost = False, False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("watched://")))

    def exists(self, path: str, **more: Any) -> bool:
        return not Store.hidden and bool(super().exists(path, **more))

    def info(self, path: str, **more: Any) -> Any:
        if Store.lost:
            raise ConnectionResetError(f"connection lost at {path}")
        return super().info(path, **more)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        data: bytes = super().cat_file(path, start, end, **more)
        Store.fetched.append((path, len(data)))
        return data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        if mode == "create" and self._strip_protocol(path) in self.store:
            raise FileExistsError(path)
        super().pipe_file(path, value, **more)

    def put_file(self, local: str, path: str, **more: Any) -> None:
        super().put_file(local, path, **more)
        if "/shards/" in path and Store.after_upload:
            Store.after_upload.pop(0)()


@pytest.fixture
def store() -> Iterator[str]:
    """Address of a new cache in it."""
    fsspec.register_implementation("watched", Store, clobber=True)
    yield "watched://cache"
    for left in (Store.store, Store.fetched, Store.after_upload):
        left.clear()
    Store.hidden = Store.lost = False


def files(address: str) -> tuple[Any, str]:
    filesystem, prefix = fsspec.core.url_to_fs(address)
    filesystem.invalidate_cache()
    return filesystem, prefix


def objects(address: str) -> dict[str, bytes]:
    filesystem, prefix = files(address)
    return {path[len(prefix) :].lstrip("/"): filesystem.cat_file(path) for path in filesystem.find(prefix)}


def put(address: str, name: str, data: bytes) -> None:
    filesystem, prefix = files(address)
    filesystem.pipe_file(f"{prefix}/{name}", data)


def remove(address: str, name: str) -> None:
    filesystem, prefix = files(address)
    filesystem.rm_file(f"{prefix}/{name}")


@pytest.fixture
def cache(bucket: str) -> str:
    return write_cache(f"{bucket}/runs/cache", job())


def test_objects_are_the_files_of_a_local_cache(cache: str, tmp_path: Path) -> None:
    local = write_cache(tmp_path / "cache", job())
    assert objects(cache) == contents(local)
    assert read_everything(CacheReader(cache)) == read_everything(CacheReader(local))
    assert verify_cache(cache).ok
    assert CacheReader(cache).folder == cache


def test_readers_fetch_the_ranges_they_return_and_no_more(store: str) -> None:
    reader = CacheReader(write_cache(store, job()))
    Store.fetched.clear()
    record = reader.read(key_of(3), layers=[2])
    np.testing.assert_array_equal(record.parts["mixing"], record_of(job(), 3).parts["mixing"])
    # The two float blobs lie side by side: one request.
    assert sorted(size for _, size in Store.fetched) == sorted(
        [record.parts["alphas"].nbytes + record.parts["mixing"].nbytes, record.parts["L02"].nbytes]
    )


def test_truncated_and_absent_objects(cache: str) -> None:
    reader, whole = CacheReader(cache), objects(cache)[SHARD]
    victim = next(index for index in job().shard_samples(1))
    for length in (len(whole) - 1, 100):
        put(cache, SHARD, whole[:length])
        with refusal("cache-incomplete", f"it must have {len(whole)} bytes and has {length}"):
            CacheReader(cache)
    for problem in ("it ends at byte", "it does not exist"):
        with refusal("cache-incomplete", problem):
            reader.read(key_of(victim))
        if SHARD in objects(cache):
            remove(cache, SHARD)
    put(cache, SHARD, whole)
    assert reader.read(key_of(victim)).index == victim
    remove(cache, RECEIPT)
    with refusal("cache-incomplete", "shard 1 was never committed"):
        CacheReader(cache)
    assert CacheWriter(cache, job()).missing_shards() == [1]


def test_of_racing_manifests_the_first_stays(store: str) -> None:
    Store.hidden = True  # both looked before either wrote
    CacheWriter(store, job())
    with refusal("cache-mismatch", "temperature"):
        CacheWriter(store, job(temperature=2.0))
    assert objects(store)["manifest.json"] == job().to_bytes()


def test_killed_writers_resume(bucket: str, tmp_path: Path) -> None:
    address, moments, committed = f"{bucket}/cache", random.Random(5), 0
    for _ in range(2):
        with start_writer(address, num_samples=NUM_SAMPLES) as process:
            while len(files(address)[0].find(f"{address}/receipts")) <= committed // 3:  # three samples a shard
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(moments.uniform(0, 0.1))
            process.kill()
        partial = CacheReader(address, allow_partial=True)
        assert committed < len(partial) < NUM_SAMPLES
        committed = len(partial)
        assert partial.read(partial.keys()[-1], layers=[1]).parts
    lengths = []
    with start_writer(address, num_samples=NUM_SAMPLES) as process:
        while process.poll() is None:  # a reader while a writer works
            partial = CacheReader(address, allow_partial=True)
            lengths.append(len(partial))
            assert partial.read(partial.keys()[-1], layers=[1]).parts
            time.sleep(0.2)
    assert process.returncode == 0
    assert lengths == sorted(lengths)
    assert objects(address) == contents(write_cache(tmp_path / "cache", interrupted_job(NUM_SAMPLES)))


def test_shard_that_was_replaced_before_its_receipt_is_written_again(store: str) -> None:
    writer, other = CacheWriter(store, job()), CacheWriter(store, job())
    rounded = [
        record_of(job(), record.index, parts={"alphas": record.parts["alphas"] * np.float32(0.5)})
        for record in records_of(job(), 0)
    ]
    # Each upload of the first writer is followed by one of the other, which is followed by none.
    Store.after_upload[:] = [lambda: other.write_shard(0, rounded, MEASURED), lambda: None] * 2
    receipt = writer.write_shard(0, records_of(job(), 0), MEASURED)
    write_shards(writer, [1, 2, 3])
    writer.seal()
    assert verify_cache(store).ok
    first = records_of(job(), 0)[0]
    found = CacheReader(store).read(key_of(first.index))
    np.testing.assert_array_equal(found.parts["alphas"], first.parts["alphas"])
    assert receipt.shard == 0


def test_writer_that_is_always_overtaken_gives_up(store: str) -> None:
    name = "shards/00/000000.safetensors"
    Store.after_upload[:] = [lambda: put(store, name, objects(store)[name][:-1] + b"\xff")] * 100
    writer = CacheWriter(store, job())
    with refusal("write-failed", r"other writers replaced it 5 times: .*--shards i/n"):
        write_shards(writer, [0])
    assert CacheWriter(store, job()).missing_shards() == [0, 1, 2, 3]


def test_unreachable_store_is_no_missing_cache(store: str) -> None:
    writer = CacheWriter(write_cache(store, job()), job())
    Store.lost = True
    for use in (writer.missing_shards, lambda: CacheReader(store), lambda: CacheWriter(store, job())):
        with refusal("read-failed", "could not be read: .*check the address, the credentials and the network"):
            use()


def test_missing_bucket(bucket: str) -> None:
    with refusal("write-failed", "bucket does not exist"):
        CacheWriter(f"{bucket}-absent/cache", job())
    with refusal("cache-incomplete", "is not a cache"):
        CacheReader(f"{bucket}-absent/cache")


def test_file_addresses_are_paths(tmp_path: Path) -> None:
    folder = write_cache(tmp_path / "a cache", job())
    assert CacheReader(folder.as_uri()).folder == folder
