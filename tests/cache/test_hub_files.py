"""Files of a hub in a cache: every tool tolerates them, and none reads or changes them (CACHE-180)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.makers import FORMS, job, read_everything, write_cache
from support.refusals import refusal

from shd_ref.cache import CacheReader, CacheWriter, export_webdataset, merge_caches, verify_cache


def test_every_tool_takes_a_cache_with_hub_files_of_any_content(tmp_path: Path) -> None:
    manifest = job(**FORMS["topk"])
    folder = write_cache(tmp_path / "cache", manifest)
    expected = read_everything(CacheReader(folder))
    page = b"\xff\x00 not even text" * 1000
    (folder / "README.md").write_bytes(page)
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert verify_cache(folder).ok
    assert read_everything(CacheReader(folder)) == expected
    assert CacheWriter(folder, manifest).missing_shards() == []
    CacheWriter(folder, manifest).seal()
    assert (folder / "README.md").read_bytes() == page
    merge_caches([folder], tmp_path / "merged")
    assert not (tmp_path / "merged/README.md").exists()
    export_webdataset(folder, tmp_path / "export")
    (folder / "notes.md").write_text("foreign")
    (problem,) = verify_cache(folder).problems
    assert problem.path == "notes.md"


@pytest.mark.parametrize("name", ["README.md", ".gitattributes"])
def test_links_and_folders_in_their_place_are_reported(tmp_path: Path, name: str) -> None:
    folder = write_cache(tmp_path / "cache", job())
    (folder / name).symlink_to("/etc/passwd")
    (problem,) = verify_cache(folder).problems
    assert (problem.code, problem.path) == ("path-unsafe", name)
    (folder / name).unlink()
    (folder / name).mkdir()
    (problem,) = verify_cache(folder).problems
    assert (problem.code, problem.path) == ("cache-corrupt", name)


def test_a_cache_does_not_begin_with_them(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a repository")
    with refusal("cache-exists", r"holds 'README\.md' and no manifest"):
        CacheWriter(tmp_path, job())
