"""Folders that are moved, deleted or replaced under a writer: what it writes follows its folder (CACHE-66)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.makers import contents, job, write_cache, write_shards
from support.refusals import refusal

from shd_ref.cache import CacheWriter


@pytest.mark.parametrize("kind", ["nothing", "folder", "link", "cache"])
def test_a_moved_folder_takes_its_writer_along(tmp_path: Path, kind: str) -> None:
    folder, moved = tmp_path / "cache", tmp_path / "moved"
    other = write_cache(tmp_path / "other", job(temperature=2.0))
    untouched = contents(other)
    writer = CacheWriter(folder, job())
    write_shards(writer, [0, 2])
    folder.rename(moved)
    if kind == "folder":
        folder.mkdir()
    elif kind == "link":
        folder.symlink_to(other)
    elif kind == "cache":
        shutil.copytree(other, folder)
    write_shards(writer, [1, 3])
    writer.seal()
    assert contents(moved) == contents(write_cache(tmp_path / "whole", job()))
    assert contents(other) == untouched
    assert folder.exists() == (kind != "nothing")
    if folder.exists():
        assert contents(folder) == ({} if kind == "folder" else untouched)


def test_nothing_appears_where_a_folder_was_deleted(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path / "cache", job())
    write_shards(writer, [0])
    shutil.rmtree(tmp_path / "cache")
    with refusal("write-failed"):
        write_shards(writer, [1])
    assert not (tmp_path / "cache").exists()
