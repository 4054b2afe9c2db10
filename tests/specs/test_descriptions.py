"""``specs/kd.md``, ``recipes.md`` and ``shrink.md``: examples run, ids have no gaps, and what is cited exists."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from shd_ref import ERROR_CODES

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / "specs" / f"{name}.md").read_text(encoding="utf-8") for name in ("kd", "recipes", "shrink")}
RETIRED = {"HEAD-21", "KD-12", "KD-13", "KD-14", "KD-19", "KD-23", "PRED-6", "PRED-7"}
of_each = pytest.mark.parametrize("name", PAGES)


def sentences(page: str) -> list[tuple[str, int]]:
    """Chapters and numbers of the page's sentences, in order."""
    return [
        (chapter, int(number)) for chapter, number in re.findall(r"^- \*\*([A-Z]+)-(\d+)\*\* ", page, re.MULTILINE)
    ]


@of_each
def test_examples_run(name: str) -> None:
    pytest.importorskip("torch", reason="examples run the PyTorch binding")
    names: dict[str, object] = {}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", PAGES[name], flags=re.DOTALL)):
        example = doctest.DocTestParser().get_doctest(block, names, f"example {number}", f"{name}.md", 0)
        report: list[str] = []
        results = doctest.DocTestRunner(verbose=False).run(example, out=report.append, clear_globs=False)
        names.update(example.globs)
        assert results.attempted
        assert not results.failed, "".join(report)


@of_each
def test_sentences_are_numbered_without_gaps(name: str) -> None:
    by_chapter: dict[str, list[int]] = {}
    for chapter, number in sentences(PAGES[name]):
        by_chapter.setdefault(chapter, []).append(number)
    assert by_chapter
    for chapter, numbers in by_chapter.items():
        last = max(numbers)
        assert numbers == [n for n in range(1, last + 1) if f"{chapter}-{n}" not in RETIRED]


@of_each
def test_sentences_that_are_cited_exist(name: str) -> None:
    chapters = "|".join({chapter for chapter, _ in sentences(PAGES[name])})
    known = {f"{chapter}-{number}" for chapter, number in sentences(PAGES[name])} | RETIRED
    texts = [PAGES[name]]
    for package in ("shd_ref", "shd_torch"):
        texts += [path.read_text(encoding="utf-8") for path in (ROOT / package / name).glob("*.py")]
    assert {found for text in texts for found in re.findall(rf"\b(?:{chapters})-\d+\b", text)} <= known


@of_each
def test_error_codes_of_the_page_exist(name: str) -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| [A-Z]+-\d", PAGES[name], flags=re.MULTILINE)
    assert set(rows) <= set(ERROR_CODES)
