"""Folders that are moved, deleted or replaced under a writer: bytes appear only beside their manifest (CACHE-66)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.makers import contents, job, temporary_files, write_cache, write_shards

from shd_ref.cache import CacheWriter, merge_caches, verify_cache
from shd_ref.cache.storage.places import open_storage
from shd_ref.errors import ShdError

JOB = job(num_samples=3)

STEPS = ("write", "fsync", "rename", "link", "unlink", "mkdir")
"""Calls of the system between which the folder is disturbed."""


class Disturbance:
    """Lets something happen to a folder just before, or just after, one call of the system."""

    def __init__(self, happen: Callable[[], None], folder: Path, call: int, *, after: bool) -> None:
        self.happen, self.folder, self.left, self.after = happen, folder, call, after
        self.happened = False

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            due = not self.happened and self.folder.is_dir() and self.left == 0
            self.left -= self.folder.is_dir() and not self.happened
            if due:
                self.happened = True
            if due and not self.after:
                self.happen()
            try:
                return real(*args, **more)
            finally:
                if due and self.after:
                    self.happen()

        return call


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("whole") / "cache", JOB)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("other") / "cache", job(temperature=2.0))


def move(folder: Path, _: Path) -> None:
    folder.rename(folder.with_name("moved"))


def delete(folder: Path, _: Path) -> None:
    shutil.rmtree(folder)


def replace_by_cache(folder: Path, other: Path) -> None:
    move(folder, other)
    shutil.copytree(other, folder)


def replace_by_empty(folder: Path, other: Path) -> None:
    move(folder, other)
    folder.mkdir()


def replace_by_link(folder: Path, other: Path) -> None:
    move(folder, other)
    folder.symlink_to(other)


def replace_by_file(folder: Path, other: Path) -> None:
    move(folder, other)
    folder.write_bytes(b"")


def lose_manifest(folder: Path, _: Path) -> None:
    (folder / "manifest.json").unlink(missing_ok=True)


def change_manifest(folder: Path, other: Path) -> None:
    shutil.copy(other / "manifest.json", folder / "manifest.json")


DISTURBANCES = {
    each.__name__: each
    for each in (
        move,
        delete,
        replace_by_cache,
        replace_by_empty,
        replace_by_link,
        replace_by_file,
        lose_manifest,
        change_manifest,
    )
}


def run_disturbed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, happen: Callable[[], None], call: int, write: Callable[[], object]
) -> tuple[bool, ShdError | None]:
    """Whether the folder was disturbed, and how the writer took it."""
    disturbance = Disturbance(happen, folder, call // 2, after=bool(call % 2))
    with monkeypatch.context() as patch:
        for step in STEPS:
            patch.setattr(os, step, disturbance.wrap(getattr(os, step)))
        try:
            write()
        except ShdError as error:
            return disturbance.happened, error
    return disturbance.happened, None


@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_writer_notices_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, other: Path, name: str
) -> None:
    steps = 0
    untouched = contents(other)
    while True:
        root = tmp_path / str(steps)
        root.mkdir()
        folder, moved = root / "cache", root / "moved"
        happened, error = run_disturbed(
            monkeypatch,
            folder,
            lambda folder=folder: DISTURBANCES[name](folder, other),
            steps,
            lambda folder=folder: write_cache(folder, JOB),
        )
        if not happened:
            break
        at_work = moved if moved.exists() else folder
        if error is None:
            assert steps < 20, "a folder that a writer has just made is not a cache yet: it begins with the next one"
            assert contents(folder) == contents(whole)
        else:
            assert error.code in ("write-failed", "cache-mismatch"), error
            assert str(folder) in str(error)
        assert contents(other) == untouched
        if moved.exists():
            assert temporary_files(moved) == []
            assert contents(write_cache(moved, JOB)) == contents(whole), "what was moved can be resumed"
        if name in ("move", "delete"):
            assert not folder.exists(), "nothing appears where the cache was"
        elif name == "replace_by_cache":
            assert contents(folder) == untouched
        elif name == "replace_by_empty":
            assert error is None or list(folder.iterdir()) == []
        elif name == "replace_by_file":
            assert folder.read_bytes() == b""
        assert not at_work.is_dir() or temporary_files(at_work) == []
        steps += 1 if name in ("move", "lose_manifest") else 5
    assert steps > 60


def test_a_folder_that_is_moved_and_linked_is_still_the_same(tmp_path: Path, whole: Path) -> None:
    writer = CacheWriter(tmp_path / "cache", JOB)
    write_shards(writer, [0])
    (tmp_path / "cache").rename(tmp_path / "disk")
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    write_shards(writer, [1])
    writer.seal()
    assert contents(tmp_path / "disk") == contents(whole)


@pytest.mark.parametrize("link", [False, True])
def test_a_merge_notices_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, link: bool) -> None:
    before, steps = contents(whole), 0
    while True:
        root = tmp_path / str(steps)
        root.mkdir()
        happened, error = run_disturbed(
            monkeypatch,
            root / "cache",
            lambda root=root: (root / "cache").rename(root / "moved"),
            steps,
            lambda root=root: merge_caches([whole], root / "cache", link=link),
        )
        if not happened:
            break
        assert error is not None
        assert error.code == "write-failed"
        assert not (root / "cache").exists()
        assert merge_caches([whole], root / "moved", link=link).sealed
        assert contents(root / "moved") == before == contents(whole)
        steps += 5
    assert steps > 50


def test_a_deleted_prefix_is_noticed(bucket: str) -> None:
    pytest.importorskip("s3fs", reason="caches in object stores need the extra 'remote'")
    writer = CacheWriter(f"{bucket}/cache", job())
    write_shards(writer, [0])
    storage = open_storage(f"{bucket}/cache")
    for name in storage.names():
        storage.remove(name)
    for go_on in (lambda: write_shards(writer, [1]), lambda: write_shards(writer, [0])):
        with pytest.raises(ShdError, match=r"manifest\.json must stay until the job ends") as caught:
            go_on()
        assert caught.value.code == "write-failed"
    assert storage.names() == []
    write_cache(f"{bucket}/cache", job(temperature=2.0))
    with pytest.raises(ShdError, match="temperature") as caught:
        write_shards(writer, [1])
    assert caught.value.code == "cache-mismatch"
    assert verify_cache(f"{bucket}/cache").ok
