"""Links and other oddities in the place of a cache's files and folders; shared files; impossible paths (CACHE-7)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import shd
from support.makers import contents, job, read_everything, write_cache
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import CacheReader, CacheWriter, export_webdataset, list_cache, merge_caches, verify_cache

PLACES = (
    "manifest.json",
    "SEALED.json",
    "receipts",
    "receipts/000001.json",
    "shards",
    "shards/01",
    "shards/01/000001.safetensors",
    ".lock",
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("pristine") / "cache", job())


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "cache")


def to_its_twin(place: Path, away: Path) -> None:
    """What was there, by way of a link."""
    place.rename(away)
    place.symlink_to(away)


def to_nothing(place: Path, away: Path) -> None:
    place.rename(away)
    place.symlink_to(away.with_name("nothing"))


def to_itself(place: Path, away: Path) -> None:
    place.rename(away)
    place.symlink_to(place)


def a_pipe(place: Path, away: Path) -> None:
    place.rename(away)
    os.mkfifo(place)


def code_of(use: Callable[[], object]) -> str | None:
    try:
        use()
    except ShdError as error:
        return error.code
    return None


@pytest.mark.parametrize("replace", [to_its_twin, to_nothing, to_itself, a_pipe])
@pytest.mark.parametrize("name", PLACES)
def test_nothing_is_followed(folder: Path, tmp_path: Path, name: str, replace: Callable[[Path, Path], None]) -> None:
    away = tmp_path / "away"
    replace(folder / name, away)
    outside = {path: path.read_bytes() for path in [away, *away.rglob("*")] if path.is_file()}
    refusals = {"path-unsafe"} if replace is not a_pipe else {"path-unsafe", "cache-corrupt"}
    report = verify_cache(folder)
    assert refusals & {problem.code for problem in report.problems}
    if name != ".lock":  # readers take no lock
        with pytest.raises(ShdError) as caught:
            read_everything(CacheReader(folder))
        assert caught.value.code in refusals
        for use in (list_cache, export_webdataset, lambda cache, _: merge_caches([cache], tmp_path / "merged")):
            used = () if use is list_cache else (tmp_path / "export",)
            code = code_of(lambda use=use, used=used: use(folder, *used))
            assert code in refusals or (use is list_cache and list_cache(folder).damaged) or name == "SEALED.json"
    code = code_of(lambda: write_cache(folder, job()))
    if code is None:
        assert verify_cache(folder).ok, "a file is put in the place of a link to one"
    else:
        assert code in refusals
        assert name in (".lock", "manifest.json", "shards", "receipts", "shards/01")
    assert {path: path.read_bytes() for path in outside} == outside, "nothing is written outside"
    assert {path for path in [away, *away.rglob("*")] if path.is_file()} == set(outside)


def test_a_cache_of_hard_links_is_as_good_as_its_twin(pristine: Path, folder: Path, tmp_path: Path) -> None:
    """As ``cp -al`` makes it."""
    twin = shutil.copytree(folder, tmp_path / "twin", copy_function=os.link)
    before = contents(pristine)
    assert read_everything(CacheReader(twin)) == read_everything(CacheReader(pristine))
    assert verify_cache(twin).ok
    assert list_cache(twin).sealed
    assert merge_caches([folder, twin], tmp_path / "merged", link=True).sealed
    export_webdataset(twin, tmp_path / "export")
    for shard in range(job().shards.num_shards):
        (twin / f"receipts/{shard:06d}.json").unlink()
    write_cache(twin, job())
    assert contents(folder) == before == contents(twin)
    (twin / "receipts/000002.json").unlink()
    assert merge_caches([folder], twin, link=True).sealed
    assert contents(folder) == before == contents(twin)
    with refusal("cache-mismatch"):
        CacheWriter(twin, job(temperature=2.0))
    assert contents(folder) == before


IMPOSSIBLE = {"long": "x" * 256, "longer": "/".join(["x" * 200] * 30), "nul": "a\0b", "surrogate": "a\ud800b"}


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize("command", ["ls", "verify", "seal", "report", "export", "merge", "export-to", "merge-to"])
def test_paths_that_no_file_system_has_are_refused(folder: Path, tmp_path: Path, name: str, command: str) -> None:
    impossible, out = os.path.join(tmp_path, IMPOSSIBLE[name]), str(tmp_path / "out")  # noqa: PTH118
    arguments = {
        "ls": ["ls", impossible],
        "verify": ["verify", impossible],
        "seal": ["seal", impossible],
        "report": ["report", impossible, "--out", out],
        "export": ["export", impossible, "--out", out],
        "merge": ["merge", impossible, "--out", out],
        "export-to": ["export", str(folder), "--out", impossible],
        "merge-to": ["merge", str(folder), "--out", impossible],
    }[command]
    said = shd(*arguments, code=1)
    assert any(code in said for code in ("read-failed", "write-failed", "argument-value"))
    assert not (tmp_path / "out").exists()
