"""What may be at a place of a cache: links and other oddities, what cannot be read, shared files, files of a hub."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.faults import permissions_count
from support.makers import FORMS, job, read_everything, write_cache
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import CacheReader, CacheWriter, list_cache, merge_caches, verify_cache

RECEIPT, SHARD = "receipts/000001.json", "shards/01/000001.safetensors"
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


def a_pipe(place: Path, away: Path) -> None:
    place.rename(away)
    os.mkfifo(place)


def code_of(use: Callable[[], object]) -> str | None:
    try:
        use()
    except ShdError as error:
        return error.code
    return None


@pytest.mark.parametrize("replace", [to_its_twin, to_nothing, a_pipe])
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
        for use in (list_cache, lambda cache: merge_caches([cache], tmp_path / "merged")):
            code = code_of(lambda use=use: use(folder))
            assert code in refusals or (use is list_cache and list_cache(folder).damaged) or name == "SEALED.json"
    code = code_of(lambda: write_cache(folder, job()))
    if code is None:
        assert verify_cache(folder).ok, "a file is put in the place of a link to one"
    else:
        assert code in {*refusals, "write-failed"}
        assert name in (".lock", "manifest.json", "shards", "receipts", "shards/01")
    assert {path: path.read_bytes() for path in outside} == outside, "nothing is written outside"
    assert {path for path in [away, *away.rglob("*")] if path.is_file()} == set(outside)


@pytest.fixture
def private() -> Iterator[None]:
    with permissions_count():
        yield


@pytest.mark.parametrize("name", ["manifest.json", "SEALED.json", RECEIPT, SHARD])
def test_a_file_that_cannot_be_read_is_named(folder: Path, private: None, name: str) -> None:
    (folder / name).chmod(0)
    with refusal("read-failed", f"{re.escape(name)} could not be read: Permission denied"):
        read_everything(CacheReader(folder))
    report = verify_cache(folder)
    assert ("read-failed", name) in {(problem.code, problem.path) for problem in report.problems}
    if name != "manifest.json":
        assert report.shards == job().shards.num_shards - (name in (RECEIPT, SHARD)), "it goes on with the others"
    if name == RECEIPT:
        (damaged,) = list_cache(folder).damaged
        assert "could not be read" in damaged
        with pytest.raises(ShdError, match="could not be read") as caught:
            CacheWriter(folder, job()).missing_shards()
        assert caught.value.code == "read-failed", "a shard that cannot be read is not a missing one"


def test_a_read_that_fails_on_the_way_is_named(folder: Path) -> None:
    reader = CacheReader(folder)
    read_everything(reader)
    elsewhere = os.open(folder / SHARD, os.O_WRONLY)  # from which no byte can be read
    for descriptor in Path("/proc/self/fd").iterdir():
        if os.path.realpath(descriptor).startswith(str(folder / "shards")):
            os.dup2(elsewhere, int(descriptor.name))
    os.close(elsewhere)
    with refusal("read-failed", r"safetensors could not be read: Bad file descriptor"):
        reader.read(reader.keys()[0])


def test_a_folder_that_cannot_be_listed_is_not_empty(folder: Path, private: None) -> None:
    (folder / "receipts").chmod(0o100)
    with refusal("read-failed", r"receipts could not be read: Permission denied"):
        list_cache(folder)
    assert ("read-failed", "receipts") in {(problem.code, problem.path) for problem in verify_cache(folder).problems}
    (folder / "receipts").chmod(0o700)


@pytest.mark.parametrize("name", ["receipts", "shards", "manifest.json", RECEIPT, SHARD])
def test_a_file_in_place_of_a_folder_or_a_folder_of_a_file_is_named(folder: Path, name: str) -> None:
    place, kinds = folder / name, ("folder", "file")
    if place.is_file():
        kinds = ("file", "folder")
        place.unlink()
        place.mkdir()
    else:
        shutil.rmtree(place)
        place.write_bytes(b"")
    advice = rf"{re.escape(name)} must be a {kinds[0]}; it is a {kinds[1]}: move it away"
    problems = verify_cache(folder).problems
    assert any(problem.code == "cache-corrupt" and re.search(advice, problem.message) for problem in problems)
    refused: list[Callable[[], object]] = [lambda: CacheReader(folder)]
    if name in ("manifest.json", "receipts"):
        refused.append(lambda: list_cache(folder))
    else:
        assert any(re.search(advice, damaged) for damaged in list_cache(folder).damaged)
    for use in refused:
        with refusal("cache-corrupt", advice):
            use()
    assert (folder / "SEALED.json").exists(), "refused before anything is changed"
    if place.is_file():
        place.unlink()
        write_cache(folder, job())
        assert verify_cache(folder).ok, "the remedy is one"


def test_every_tool_takes_a_cache_with_hub_files_of_any_content(tmp_path: Path) -> None:
    """And none reads or changes them (CACHE-180)."""
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
    (folder / "notes.md").write_text("foreign")
    (problem,) = verify_cache(folder).problems
    assert problem.path == "notes.md"
