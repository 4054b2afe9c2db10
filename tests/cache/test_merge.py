"""Shards that were made in several places become one cache, byte for byte, or are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.makers import MEASURED, contents, job, records_of, write_cache, write_shards
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import CacheReader, CacheWriter, Errors, Manifest, list_cache, merge_caches, verify_cache

NUM_SHARDS = 4


def part(folder: Path, shards: list[int], manifest: Manifest | None = None) -> Path:
    write_shards(CacheWriter(folder, manifest or job()), shards)
    return folder


def test_parts_become_the_cache_that_one_writer_makes(tmp_path: Path) -> None:
    whole = write_cache(tmp_path / "whole", job())
    parts = [part(tmp_path / "a", [0, 3]), part(tmp_path / "b", [1]), part(tmp_path / "c", [2])]
    before = [contents(folder) for folder in parts]
    seen: list[tuple[int, int]] = []
    summary = merge_caches(parts, tmp_path / "out", on_progress=lambda *step: seen.append(step))
    assert (summary.copied, summary.present, summary.missing, summary.sealed) == (4, 0, (), True)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert contents(tmp_path / "out") == contents(whole)
    assert [contents(folder) for folder in parts] == before
    assert verify_cache(tmp_path / "out").ok


def test_merging_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first, second = part(tmp_path / "a", [0, 1]), part(tmp_path / "b", [1, 3])
    summary = merge_caches([first], tmp_path / "out")
    assert (summary.copied, summary.missing, summary.sealed) == (2, (2, 3), False)
    # Shard 1 was half taken over when the power went: its bytes without its receipt.
    (tmp_path / "out/receipts/000001.json").unlink()
    again = merge_caches([first, second], tmp_path / "out")
    assert (again.copied, again.present, again.missing, again.sealed) == (2, 1, (2,), False)
    write_shards(CacheWriter(tmp_path / "out", job()), [2])
    assert merge_caches([second], tmp_path / "out").sealed
    assert contents(tmp_path / "out") == contents(write_cache(tmp_path / "whole", job()))


def test_caches_of_other_jobs_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    other = part(tmp_path / "b", [1], job(temperature=2.0))
    with refusal("cache-mismatch", r"temperature: 1\.0 -> 2\.0"):
        merge_caches([part(tmp_path / "a", [0]), other], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["sources", "out"])
def test_a_shard_that_was_made_twice_is_named(tmp_path: Path, place: str) -> None:
    first, manifest = part(tmp_path / "a", [0, 2]), job()
    writer = CacheWriter(tmp_path / "b", manifest)
    writer.write_shard(2, records_of(manifest, 2), Errors(attention=replace(MEASURED["attention"], kl_mean=0.5)))
    if place == "out":
        sources, out = [first], tmp_path / "b"
    else:
        sources, out = [first, tmp_path / "b"], tmp_path / "out"
    before = contents(out) if out.exists() else {}
    with refusal("cache-mismatch", "shard 2 must be the same wherever it is held"):
        merge_caches(sources, out)
    after = contents(out)
    assert {name for name in after if name != "manifest.json"} == {n for n in before if n != "manifest.json"}


def test_a_damaged_shard_is_taken_from_where_it_is_intact(tmp_path: Path) -> None:
    damaged, intact = part(tmp_path / "a", [0, 1]), part(tmp_path / "b", [1, 2, 3])
    flip(damaged / "shards/01/000001.safetensors")
    assert merge_caches([damaged, intact], tmp_path / "out").sealed
    assert verify_cache(tmp_path / "out").ok
    flip(damaged / "shards/00/000000.safetensors")
    with refusal("cache-corrupt", r"000000\.safetensors: XXH3-128"):
        merge_caches([damaged, intact], tmp_path / "again")
    assert list_cache(tmp_path / "again").written == ()
    flip(damaged / "receipts/000000.json")
    with refusal("cache-corrupt", r"000000\.json"):
        merge_caches([damaged, intact], tmp_path / "third")
    flip(tmp_path / "out/SEALED.json")
    (problem,) = list_cache(tmp_path / "out").damaged
    assert problem.startswith("SEALED.json: ")


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    source = part(tmp_path / "a", [0])
    with pytest.raises(ShdError, match="out must be none of the sources"):
        merge_caches([source], source)
    with pytest.raises(ShdError, match="sources must be at least one cache"):
        merge_caches([], tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("dear")
    with pytest.raises(ShdError, match=r"thesis\.txt"):
        merge_caches([source], tmp_path / "full")


def test_listing_an_unfinished_cache(tmp_path: Path) -> None:
    manifest = job(num_samples=21)
    folder = part(tmp_path / "cache", [0, 4, 5, 9], manifest)
    listing = list_cache(folder)
    assert listing.written == (0, 4, 5, 9)
    assert listing.missing == (1, 2, 3, 6, 7, 8, 10)
    stable = listing.to_json()
    assert stable["shards"] == {"total": 11, "written": 4, "missing": [[1, 3], [6, 8], [10, 10]]}
    assert not stable["sealed"]
    assert stable["bytes"]["shards"] == sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    reader = CacheReader(folder, allow_partial=True)
    records = [reader.read(key) for key in reader]
    assert stable["samples"] == {
        "total": 21,
        "written": len(records),
        "skipped": 0,
        "positions": sum(record.length for record in records),
    }
    assert stable["bytes"]["coded"] == sum(len(record.parts[name]) for record in records for name in ("L01", "L02"))
    maps = [reader.decode(record, layer) for record in records for layer in (1, 2)]
    assert stable["bytes"]["as_float32"] == sum(array.nbytes for array in maps)


def test_parts_in_an_object_store(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="object stores need the extra 'remote'")
    address = f"memory://{tmp_path.name}"
    write_shards(CacheWriter(f"{address}/a", job()), [0, 1])
    part(tmp_path / "b", [2, 3])
    partial = merge_caches([tmp_path / "b"], f"{address}/all")
    assert (partial.folder, partial.missing) == (f"{address}/all", (0, 1))
    assert list_cache(f"{address}/all").written == (2, 3)
    assert merge_caches([f"{address}/a", tmp_path / "b"], f"{address}/all").sealed
    assert verify_cache(f"{address}/all").ok
    merge_caches([f"{address}/all"], tmp_path / "local")
    assert contents(tmp_path / "local") == contents(write_cache(tmp_path / "whole", job()))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
