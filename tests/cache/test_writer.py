import errno
import fcntl
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.faults import file_size_limit
from support.makers import (
    MEASURED,
    contents,
    job,
    key_of,
    record_of,
    records_of,
    temporary_files,
    write_cache,
    write_shards,
)
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import CacheWriter, Dataset, Errors


def test_resume_writes_what_is_missing(tmp_path: Path) -> None:
    first = CacheWriter(tmp_path / "resumed", job())
    assert first.missing_shards() == [0, 1, 2, 3]
    write_shards(first, [2])
    second = CacheWriter(tmp_path / "resumed", job())
    assert second.missing_shards() == [0, 1, 3]
    write_shards(second, [0, 1, 3])
    second.seal()
    assert contents(tmp_path / "resumed") == contents(write_cache(tmp_path / "whole", job()))


@pytest.mark.parametrize("damage", ["bad receipt", "foreign receipt", "no shard", "short shard"])
def test_damaged_shards_are_missing_and_can_be_written_again(tmp_path: Path, damage: str) -> None:
    folder = write_cache(tmp_path / "cache", job())
    whole = contents(folder)
    receipt, shard = folder / "receipts/000001.json", folder / "shards/01/000001.safetensors"
    if damage == "bad receipt":
        receipt.write_bytes(receipt.read_bytes()[:-5])
    elif damage == "foreign receipt":
        other = write_cache(tmp_path / "other", job(temperature=2.0))
        receipt.write_bytes((other / "receipts/000001.json").read_bytes())
    elif damage == "no shard":
        shard.unlink()
    else:
        os.truncate(shard, 900)
    writer = CacheWriter(folder, job())
    assert writer.missing_shards() == [1]
    write_shards(writer, [1])
    assert not (folder / "SEALED.json").exists()
    writer.seal()
    assert contents(folder) == whole


def test_another_job_is_refused(tmp_path: Path) -> None:
    CacheWriter(tmp_path, job())
    before = contents(tmp_path)
    with refusal("cache-mismatch", r"codec: 'sqrt8-row' -> 'u4'; attention.temperature: 1\.0 -> 2\.0; choose"):
        CacheWriter(tmp_path, job(temperature=2.0, codec="u4"))
    assert contents(tmp_path) == before


def test_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("do not lose this")
    with refusal("cache-exists", r"holds 'thesis\.tex' and no manifest"):
        CacheWriter(tmp_path, job())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with refusal("cache-exists", "must be a folder"):
        CacheWriter(tmp_path / "thesis.tex", job())


def test_stale_files_of_the_dead_go_and_nothing_else(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path, job())
    write_shards(writer, [0])
    stale = tmp_path / "shards/00/.000000.safetensors.0123456789abcdef.tmp"
    kept = [tmp_path / ".notes.tmp", tmp_path / "receipts/.000000.json.tmp"]
    for path in (stale, *kept):
        path.write_bytes(b"x")
    CacheWriter(tmp_path, job())
    assert not stale.exists()
    assert all(path.exists() for path in kept)


def test_files_of_the_living_stay(tmp_path: Path) -> None:
    """A writer holds a lock on what it is writing (CACHE-62)."""
    write_shards(CacheWriter(tmp_path, job()), [0])
    living = tmp_path / "shards/00/.000000.safetensors.0123456789abcdef.tmp"
    with living.open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        CacheWriter(tmp_path, job())
        assert temporary_files(tmp_path) == [living]
    CacheWriter(tmp_path, job())
    assert temporary_files(tmp_path) == []


def test_seal_needs_every_shard(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path, job())
    write_shards(writer, [0, 2])
    with refusal("cache-incomplete", "2 are missing, first shard 1"):
        writer.seal()
    assert not (tmp_path / "SEALED.json").exists()


def test_seal_refuses_another_data_set(tmp_path: Path) -> None:
    manifest = job(dataset=Dataset(key_of(0), 7))
    writer = CacheWriter(tmp_path, manifest)
    write_shards(writer, range(4))
    with refusal("cache-mismatch", "the data set or the tokenizer changed"):
        writer.seal()


WRONG_SETS: dict[str, Any] = {
    "too few": lambda records: records[:1],
    "none": lambda records: [],
    "twice": lambda records: [records[0], records[0]],
    "another's": lambda records: [records[0], record_of(job(), 6)],
}


@pytest.mark.parametrize("name", WRONG_SETS)
def test_records_of_another_shard_are_refused(tmp_path: Path, name: str) -> None:
    writer = CacheWriter(tmp_path, job())
    assert 6 not in job().shard_samples(0)
    with refusal("argument-value", "records of shard 0 must be its 2 samples"):
        writer.write_shard(0, WRONG_SETS[name](records_of(job(), 0)), MEASURED)


def test_lost_support_is_refused(tmp_path: Path) -> None:
    broken = Errors(attention=replace(MEASURED["attention"], kl_max=math.inf))
    with refusal("not-finite", r"errors\.attention must be finite"):
        CacheWriter(tmp_path, job()).write_shard(0, records_of(job(), 0), broken)


@pytest.mark.parametrize("size", [0, 700])
def test_a_full_disk_leaves_a_cache_that_can_be_resumed(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(ShdError, match="File too large") as caught, file_size_limit(size):
        write_cache(folder, job())
    assert caught.value.code == "write-failed"
    assert temporary_files(tmp_path) == []
    assert contents(write_cache(folder, job())) == contents(write_cache(tmp_path / "whole", job()))


def test_a_lock_that_is_refused_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a file server without locks."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with refusal("write-failed"):
        write_cache(tmp_path / "cache", job())
    assert temporary_files(tmp_path) == []


@pytest.mark.parametrize("kind", ["nothing", "link", "cache"])
def test_a_moved_folder_takes_its_writer_along(tmp_path: Path, kind: str) -> None:
    """Also where another is put in its place (CACHE-66)."""
    folder, moved = tmp_path / "cache", tmp_path / "moved"
    other = write_cache(tmp_path / "other", job(temperature=2.0))
    untouched = contents(other)
    writer = CacheWriter(folder, job())
    write_shards(writer, [0, 2])
    folder.rename(moved)
    if kind == "link":
        folder.symlink_to(other)
    elif kind == "cache":
        shutil.copytree(other, folder)
    write_shards(writer, [1, 3])
    writer.seal()
    assert contents(moved) == contents(write_cache(tmp_path / "whole", job()))
    assert contents(other) == untouched
    assert folder.exists() == (kind != "nothing")
    if folder.exists():
        assert contents(folder) == untouched


def test_nothing_appears_where_a_folder_was_deleted(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path / "cache", job())
    write_shards(writer, [0])
    shutil.rmtree(tmp_path / "cache")
    with refusal("write-failed"):
        write_shards(writer, [1])
    assert not (tmp_path / "cache").exists()
