"""The dataset card: true, escaped, tolerated by every tool and trusted by none (CACHE-180)."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.makers import ALONE, FORMS, OTHER_PLAN, PLAN, job, read_everything, records_of, write_cache, write_shards

from shd_ref.cache import (
    CacheReader,
    CacheWriter,
    Manifest,
    SampleInputs,
    export_webdataset,
    list_cache,
    merge_caches,
    verify_cache,
    write_card,
)
from shd_ref.errors import ShdError

JOBS = {
    "maps": job(),
    "plans": job(plan=(), plans=(PLAN, OTHER_PLAN), compression="zstd"),
    "all forms": job(**FORMS["sampled"], on_error="skip"),
    "without attention": job(**ALONE["topk"]),
}
HOSTILE = (
    "\n---\nlicense: mit\n| <script>alert(1)</script> ``` [x](javascript:1) \ud800 \x1b[0m \u202e \U0001f600 # *" * 3
)


def front_matter(card: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="reading a card's YAML needs pyyaml")
    empty, front, rest = card.split("---\n", 2)
    assert empty == ""
    assert rest
    loaded: dict[str, Any] = yaml.safe_load(front)
    return loaded


@pytest.mark.parametrize("name", JOBS)
def test_a_card_says_what_the_cache_says(tmp_path: Path, name: str) -> None:
    manifest = JOBS[name]
    write_cache(tmp_path, manifest)
    path = write_card(tmp_path)
    assert path == tmp_path / "README.md"
    card = Path(path).read_text(encoding="utf-8")
    extents = [each.extent for shard in range(manifest.shards.num_shards) for each in records_of(manifest, shard)]
    listing, about = list_cache(tmp_path), front_matter(card)["supervision_cache"]
    assert (about["id"], about["teacher_sha256"]) == (manifest.id, manifest.teacher.sha256)
    assert about["data_fingerprint"] == manifest.dataset.fingerprint
    assert (about["samples"], about["positions"], about["skipped"]) == (
        listing.samples,
        listing.positions,
        listing.skipped,
    )
    assert "license" not in front_matter(card)
    counted = {form.SUBJECT: sum(map(form.num_rows, extents)) for form in manifest.forms}
    assert list(about["forms"]) == [form.SUBJECT for form in manifest.forms]
    for form in manifest.forms:
        found = about["forms"][form.SUBJECT]
        each = listing.coded_by_form[form.SUBJECT] / counted[form.SUBJECT]
        assert found.pop("bytes_a_row") == pytest.approx(each, abs=0.005)
        assert f"{each:.1f} a {found.pop('row_of')}" in card
        assert found.pop("codec") == form.codec
        assert found == pytest.approx(vars(listing.errors.measured()[form.SUBJECT]), rel=1e-3)
        assert listing.errors.measured()[form.SUBJECT].describe() in card
    assert manifest.id in card
    write_card(tmp_path, replace=True)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == card


def test_every_tool_takes_a_cache_with_a_card_of_any_content(tmp_path: Path) -> None:
    manifest = job(**FORMS["topk"])
    folder = write_cache(tmp_path / "cache", manifest)
    expected = read_everything(CacheReader(folder))
    (folder / "README.md").write_bytes(b"\xff\x00 not even text" * 1000)
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert verify_cache(folder).ok
    assert read_everything(CacheReader(folder)) == expected
    assert CacheWriter(folder, manifest).missing_shards() == []
    CacheWriter(folder, manifest).seal()
    merge_caches([folder], tmp_path / "merged")
    assert not (tmp_path / "merged/README.md").exists()
    export_webdataset(folder, tmp_path / "export")
    (folder / "notes.md").write_text("foreign")
    (problem,) = verify_cache(folder).problems
    assert problem.path == "notes.md"


@pytest.mark.parametrize("name", ["README.md", ".gitattributes"])
def test_links_and_folders_in_its_place_are_reported(tmp_path: Path, name: str) -> None:
    folder = write_cache(tmp_path / "cache", job())
    (folder / name).symlink_to("/etc/passwd")
    (problem,) = verify_cache(folder).problems
    assert (problem.code, problem.path) == ("path-unsafe", name)
    if name == "README.md":
        with pytest.raises(ShdError) as caught:
            write_card(folder)
        assert caught.value.code == "path-unsafe"
    (folder / name).unlink()
    (folder / name).mkdir()
    (problem,) = verify_cache(folder).problems
    assert (problem.code, problem.path) == ("cache-corrupt", name)


def test_what_was_edited_stays_unless_asked(tmp_path: Path) -> None:
    write_cache(tmp_path, job())
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(ShdError, match=r"README\.md is there, and may have been edited.*--replace") as caught:
        write_card(tmp_path)
    assert caught.value.code == "cache-exists"
    assert (tmp_path / "README.md").read_text() == "mine"
    write_card(tmp_path, replace=True)
    assert "supervision_cache" in (tmp_path / "README.md").read_text()
    assert not list(tmp_path.glob(".README*"))


def test_a_cache_that_is_not_whole_gets_none(tmp_path: Path) -> None:
    write_shards(CacheWriter(tmp_path / "partial", job()), [1])
    folder = write_cache(tmp_path / "damaged", job())
    (folder / "receipts/000001.json").write_text("{}")
    for name, code in (("partial", "cache-incomplete"), ("damaged", "cache-corrupt")):
        with pytest.raises(ShdError) as caught:
            write_card(tmp_path / name)
        assert caught.value.code == code
        assert not (tmp_path / name / "README.md").exists()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/README.md").write_text("a repository")
    with pytest.raises(ShdError, match=r"holds 'README\.md' and no manifest"):
        CacheWriter(tmp_path / "foreign", job())


def test_a_cache_in_a_store_has_one_too(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("fsspec", reason="caches in object stores need the extra 'remote'")
    manifest = job(**FORMS["topk"])
    address = write_cache(f"memory://{request.node.name}", manifest)
    assert write_card(address) == f"{address}/README.md"
    assert verify_cache(address).ok
    local = write_cache(tmp_path / "cache", manifest)
    assert read_everything(CacheReader(address)) == read_everything(CacheReader(local))
    with pytest.raises(ShdError) as caught:
        write_card(address)
    assert caught.value.code == "cache-exists"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)


def hostile(manifest: Manifest) -> Manifest:
    attention = replace(manifest.attention, strategy=HOSTILE, alpha_rule=HOSTILE)
    teacher = replace(manifest.teacher, name=HOSTILE, provider=HOSTILE, dtype=HOSTILE)
    inputs = SampleInputs(names=(HOSTILE,), mask=None)
    return replace(manifest, attention=attention, teacher=teacher, inputs=inputs, created_by=HOSTILE)


def test_what_a_cache_says_is_escaped(tmp_path: Path) -> None:
    write_card(write_cache(tmp_path, hostile(job(**FORMS["topk"]))))
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    found = front_matter(card)
    assert "license" not in found
    assert "\U0001f600" in found["supervision_cache"]["teacher"]
    parser = Tags()
    parser.feed(card)
    assert parser.found == []
    _, _, body = card.split("---\n", 2)
    assert "---\nlicense" not in body
    assert body.count("```") == 2
    assert "](javascript" not in body.replace("\\](", "")
    for character in ("\x1b", "\u202e"):
        assert character not in card
    rows = [line for line in body.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {3, 7}


def test_the_command_writes_it(tmp_path: Path) -> None:
    pytest.importorskip("typer", reason="shd needs the extra 'teacher'")
    from typer.testing import CliRunner

    from shd_ref.cli import load_app

    write_cache(tmp_path, job())
    for arguments, code in ((["card"], 0), (["card"], 1), (["card", "--replace"], 0)):
        result = CliRunner().invoke(load_app(), [*arguments, str(tmp_path)], env={"COLUMNS": "300"})
        assert result.exit_code == code, result.output
    assert "fill in the licence" in result.output
