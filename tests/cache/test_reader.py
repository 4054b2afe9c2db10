import multiprocessing
import os
import re
import shutil
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.makers import job, key_of, read_everything, write_cache, write_shards
from support.refusals import refusal

from shd_ref.cache import CacheReader, CacheWriter, verify_cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "cache", job())


def test_partial_cache_is_refused_unless_allowed(tmp_path: Path) -> None:
    write_shards(CacheWriter(tmp_path, job()), [1])
    with refusal("cache-incomplete", r"SEALED\.json must exist: 1 of 4 shards are committed") as caught:
        CacheReader(tmp_path)
    assert "give the same shd precompute again" in str(caught.value)
    reader = CacheReader(tmp_path, allow_partial=True)
    assert not reader.sealed
    assert reader.keys() == [key_of(index) for index in job().shard_samples(1)]
    absent = key_of(job().shard_samples(0)[0])
    assert absent not in reader
    with refusal("sample-missing", "the cache is partial"):
        reader.read(absent)
    missing = [problem.path for problem in verify_cache(tmp_path).problems if problem.code == "cache-incomplete"]
    assert missing == ["SEALED.json", "receipts/000000.json"]


def test_missing_receipt_of_a_sealed_cache(folder: Path) -> None:
    (folder / "receipts/000002.json").unlink()
    with refusal("cache-incomplete", r"receipts/000002\.json must exist"):
        CacheReader(folder, allow_partial=True)


@pytest.mark.parametrize(
    ("size", "problem", "sealed"), [(None, "does not exist", True), (700, "has 700", False), (9999, "has 9999", True)]
)
def test_missing_or_cut_shard_is_found_when_opening(
    folder: Path, size: int | None, problem: str, sealed: bool
) -> None:
    shard = folder / "shards/02/000002.safetensors"
    if size is None:
        shard.unlink()
    else:
        os.truncate(shard, size)
    if not sealed:
        (folder / "SEALED.json").unlink()
    with refusal("cache-incomplete", rf"000002\.safetensors: it .*{problem}"):
        CacheReader(folder, allow_partial=True)


@pytest.mark.parametrize("size", [None, 700])
def test_shard_lost_while_reading(folder: Path, size: int | None) -> None:
    reader = CacheReader(folder)
    key = key_of(job().shard_samples(2)[-1])
    shard = folder / "shards/02/000002.safetensors"
    if size is None:
        shard.unlink()
    else:
        os.truncate(shard, size)
    with refusal("cache-incomplete", r"000002\.safetensors: it (does not exist|ends at byte)"):
        reader.read(key)


@pytest.mark.parametrize(
    ("source", "name", "code", "said"),
    [
        ("other/receipts/000001.json", "receipts/000001.json", "cache-mismatch", "must belong to manifest"),
        ("cache/receipts/000001.json", "receipts/000002.json", "cache-corrupt", "shard must be 2, as its name says"),
        ("other/SEALED.json", "SEALED.json", "cache-mismatch", "must belong to manifest"),
    ],
)
def test_documents_from_elsewhere(folder: Path, tmp_path: Path, source: str, name: str, code: str, said: str) -> None:
    write_cache(tmp_path / "other", job(temperature=2.0))
    shutil.copy(tmp_path / source, folder / name)
    with refusal(code, f"{re.escape(Path(name).name)}.* {said}"):
        CacheReader(folder)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list open files there")
def test_reader_keeps_few_files_open(tmp_path: Path) -> None:
    reader = CacheReader(write_cache(tmp_path / "cache", job(80)))
    assert reader.manifest.shards.num_shards == 40
    before = open_descriptors()
    assert len(read_everything(reader)) == 80
    assert open_descriptors() == before + 32
    del reader
    assert open_descriptors() == before


def test_relative_folder_survives_a_change_of_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    reader = CacheReader("cache")
    monkeypatch.chdir("/")
    assert len(read_everything(reader)) == 7


def test_other_processes_read(folder: Path) -> None:
    reader = CacheReader(folder)
    expected = read_everything(reader)  # with descriptors open when the processes start
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        assert list(pool.map(read_everything, [reader] * 6)) == [expected] * 6
    assert read_everything(reader) == expected


def test_threads_share_a_reader(tmp_path: Path) -> None:
    """Of more shards than stay open: every read closes what another thread is reading."""
    reader = CacheReader(write_cache(tmp_path / "cache", job(80)))
    expected = read_everything(reader)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: read_everything(reader), range(8))) == [expected] * 8
