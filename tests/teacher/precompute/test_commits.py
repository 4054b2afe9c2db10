"""Shards are committed in a thread: nothing waits for the first, nothing is lost, and every error comes out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.makers import MEASURED, contents, job, records_of, write_cache

from shd_ref.cache import CacheWriter, Errors, NewRecord, Receipt, Skipped, list_cache
from shd_ref.errors import ShdError
from shd_ref.teacher.precompute.commits import Commits


class SlowWriter(CacheWriter):
    """Does something before each shard that it writes."""

    def __init__(self, folder: Path, before: Callable[[int], object]) -> None:
        super().__init__(folder, job())
        self._before = before

    def write_shard(
        self,
        shard: int,
        records: Sequence[NewRecord],
        errors: Errors,
        skipped: Sequence[Skipped] = (),
    ) -> Receipt:
        self._before(shard)
        return super().write_shard(shard, records, errors, skipped)


def put_shards(commits: Commits, shards: Sequence[int], then: BaseException | None = None) -> None:
    with commits:
        for shard in shards:
            commits.put(shard, records_of(job(), shard), MEASURED, [])
        if then is not None:
            raise then


def test_the_bytes_are_those_of_a_plain_writer(tmp_path: Path) -> None:
    writer, sizes = CacheWriter(tmp_path / "threaded", job()), list[int]()
    put_shards(Commits(writer, sizes.append), writer.missing_shards())
    assert writer.seal().num_samples == job().dataset.num_samples
    write_cache(tmp_path / "plain", job())
    assert contents(tmp_path / "threaded") == contents(tmp_path / "plain")
    assert sizes == [len(data) for name, data in sorted(contents(tmp_path / "plain").items()) if "shards/" in name]


def test_only_the_next_shard_waits(tmp_path: Path) -> None:
    begun, go_on, sizes = threading.Event(), threading.Event(), list[int]()

    def hold(_shard: int) -> None:
        begun.set()
        assert go_on.wait(60)

    with Commits(SlowWriter(tmp_path, hold), sizes.append) as commits:
        commits.put(0, records_of(job(), 0), MEASURED, [])
        assert begun.wait(60), "the teacher runs on while this shard is held up"
        assert list_cache(tmp_path).written == ()
        threading.Timer(0.2, go_on.set).start()
        commits.put(1, records_of(job(), 1), MEASURED, [])
        assert go_on.is_set()
        assert len(sizes) == 1
        assert 0 in list_cache(tmp_path).written
    assert len(sizes) == 2
    assert list_cache(tmp_path).written == (0, 1)


@pytest.mark.parametrize("last", [True, False])
def test_what_goes_wrong_comes_out(tmp_path: Path, last: bool) -> None:
    """With the next shard, or at the end."""

    def fail(shard: int) -> None:
        if shard == 0:
            raise ShdError("write-failed", "no space left")

    written: list[int] = []
    with pytest.raises(ShdError, match="no space left") as caught:
        put_shards(Commits(SlowWriter(tmp_path, fail), written.append), [0] if last else [0, 1])
    assert caught.value.code == "write-failed"
    assert (written, list_cache(tmp_path).written) == ([], ())


@pytest.mark.parametrize("fails", [True, False])
def test_an_error_of_the_run_waits_for_the_shard_under_way(tmp_path: Path, fails: bool) -> None:
    begun = threading.Event()

    def note(_shard: int) -> None:
        begun.set()
        if fails:
            raise ShdError("write-failed", "no space left")

    with pytest.raises(KeyboardInterrupt) as caught:
        put_shards(Commits(SlowWriter(tmp_path, note), lambda _: None), [2], KeyboardInterrupt())
    assert begun.is_set()
    assert list_cache(tmp_path).written == (() if fails else (2,))
    notes = getattr(caught.value, "__notes__", [])
    assert notes == (["the shard that was being written failed too: no space left"] if fails else [])
    assert not any(t.name.startswith("shd-commit") for t in threading.enumerate())
