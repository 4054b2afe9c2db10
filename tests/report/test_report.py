"""The page about a cache: right numbers, nothing trusted, nothing fetched."""

import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.attention_graphs import encoder_layer, read_site, vector_samples
from support.commands import shd
from support.makers import ALONE, FORMS, OTHER_PLAN, PLAN, job, write_cache
from support.refusals import refusal

pytest.importorskip("jinja2", reason="the report is a jinja2 template")

from shd_ref import squeeze_heads
from shd_ref.cache import CacheReader, Matching
from shd_ref.report.page import read_content, read_evidence, render_page
from shd_ref.teacher import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute

NUM_SAMPLES, LENGTH = 9, 12
HOSTILE = "<script>alert(1)</script>\"'&{{ 7 * 7 }}$\\frac{a}{b}$"
make_inputs = partial(vector_samples, NUM_SAMPLES, LENGTH, least=6)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a teacher, its inputs and its cache."""
    folder = tmp_path_factory.mktemp("report")
    onnx.save(encoder_layer(num_heads=4, mask="where"), folder / "teacher.onnx")
    np.savez(folder / "data.npz", **make_inputs())
    run = RunOptions(mask="mask", samples_per_shard=4)
    precompute(folder / "teacher.onnx", make_inputs(), folder / "cache", PrecomputeOptions(2), run)
    return folder


class Page(HTMLParser):
    """What a page consists of; parsing checks that elements close in order."""

    VOID = frozenset({"meta", "img", "br", "link", "path", "use", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def check_page(text: str) -> Page:
    """What holds for every page: it asks for nothing, runs nothing, and can be found one's way in."""
    page = Page(text)
    assert not page.tags.keys() & {"script", "iframe", "object", "embed", "link", "base", "form"}
    assert "default-src 'none'" in text
    assert not any(word in text for word in ("url(http", "@import"))
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value)
        assert name != "style" or "http" not in value
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for tag, name, value in page.attributes if (tag, name) == ("a", "href")} <= set(ids)
    assert page.tags["h1"] == page.tags["main"] == page.tags["title"] == 1
    assert page.tags["img"] == sum(
        (tag, name) == ("img", "alt") and value != "" for tag, name, value in page.attributes
    )
    assert page.tags["table"] == page.tags["caption"]
    return page


def test_a_page_from_the_cache_alone(made: Path, tmp_path: Path) -> None:
    shd("report", made / "cache", "--out", tmp_path / "report.html")
    page = check_page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "give --teacher and --inputs" in page.text
    assert "4 -> 2" in page.text
    assert CacheReader(made / "cache").manifest.id in page.text
    assert page.tags["img"] == 2  # one layer of two merged maps


def test_with_the_teacher_it_shows_what_was_merged(made: Path, tmp_path: Path) -> None:
    """Maps are those of the graph."""
    teacher = ("--teacher", made / "teacher.onnx", "--inputs", made / "data.npz")
    shd("report", made / "cache", "--out", tmp_path / "report.html", *teacher)
    page = check_page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.tags["img"] == 2 + 4
    reader = CacheReader(made / "cache")
    evidence = read_evidence(reader, made / "teacher.onnx", make_inputs())
    record, model = reader.read(evidence.example), onnx.load(made / "teacher.onnx")
    maps, outputs = read_site(model, {name: array[record.index][None] for name, array in make_inputs().items()})
    size = record.length
    np.testing.assert_array_equal(evidence.maps[0], maps[0, :, :size, :size])
    merged = squeeze_heads(maps[..., :size, :size], outputs[:, :, :size], 2).probs[0]
    assert np.abs(reader.decode(record, 0) - merged).max() < 0.02


@pytest.mark.parametrize("forms", [FORMS["topk"], *ALONE.values()], ids=["with maps", *ALONE])
def test_the_page_says_what_shd_ls_says(tmp_path: Path, forms: dict[str, Any]) -> None:
    reader = CacheReader(write_cache(tmp_path / "cache", job(num_samples=7, **forms)))
    page = check_page(render_page(reader, read_content(reader), None))
    facts = [line.strip("│ ").split("│", 1) for line in shd("ls", tmp_path / "cache").splitlines() if "│" in line]
    assert len(facts) > 8
    for name, text in facts[1:]:  # the first is whether it is complete
        assert f"{name.strip()} {text.strip()}" in page.text


def test_layers_with_plans_of_their_own_name_their_own_heads(tmp_path: Path) -> None:
    manifest = job(num_samples=3, plan=(), plans=(PLAN, OTHER_PLAN), matching=Matching("residual", 2, 17))
    reader = CacheReader(write_cache(tmp_path / "cache", manifest))
    content = read_content(reader)
    assert [layer.groups for layer in content] == [((0, 1), (2, 3)), ((1, 3, 2), (0,))]
    labels = [[merge.label for merge in layer.merges] for layer in content]
    assert labels == [["0 + 1", "2 + 3"], ["1 + 3", "1 3 + 2"]]
    page = check_page(render_page(reader, content, None))
    assert "1 3 | 2" not in page.text
    assert "1 3 2 | 0" in page.text


@pytest.mark.parametrize("plan", [(((0, 1),), ((3, 0),)), (((0, 1), (0, 2)),), (((0, 1),),)])
def test_a_plan_that_leads_elsewhere_is_refused(tmp_path: Path, plan: Any) -> None:
    reader = CacheReader(write_cache(tmp_path / "cache", job(num_samples=3, plan=plan)))
    with refusal("plan-invalid"):
        read_content(reader)


def test_what_a_cache_says_is_escaped(tmp_path: Path) -> None:
    manifest = job(num_samples=3)
    manifest = replace(
        manifest,
        created_by=HOSTILE,
        forms=(
            replace(
                manifest.attention,
                strategy="shd" + HOSTILE,
                alpha_rule=HOSTILE,
                layers=tuple(replace(layer, site=HOSTILE) for layer in manifest.attention.layers),
            ),
        ),
        teacher=replace(manifest.teacher, name=HOSTILE, provider=HOSTILE, dtype=HOSTILE),
        inputs=replace(manifest.inputs, names=(HOSTILE,), mask=HOSTILE),
    )
    reader = CacheReader(write_cache(tmp_path / "cache", manifest))
    text = render_page(reader, read_content(reader), None)
    page = check_page(text)
    assert "<script" not in text
    assert page.text.count("<script>alert(1)</script>") >= 4  # as words
    assert "{{ 7 * 7 }}" in page.text


def test_a_partial_cache_says_so(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "cache", tmp_path / "cache")
    (tmp_path / "cache" / "SEALED.json").unlink()
    (tmp_path / "cache" / "receipts" / "000001.json").unlink()
    shd("report", tmp_path / "cache", "--out", tmp_path / "report.html")
    assert "not complete: 2 of 3 shards" in check_page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    for receipt in (tmp_path / "cache" / "receipts").glob("*.json"):
        receipt.unlink()
    with refusal("cache-incomplete", "at least one committed sample"):
        read_content(CacheReader(tmp_path / "cache", allow_partial=True))
