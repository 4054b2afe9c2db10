"""specs/shrink.md: its examples run, its ids have no gaps, and the ids that code and page cite exist."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from shd_ref.errors import ERROR_CODES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "specs" / "shrink.md").read_text(encoding="utf-8")
CHAPTERS = dict(re.findall(r"^## ([A-Z]+): [^\n]*\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
NAMES = "|".join(CHAPTERS)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_ids_are_numbered_without_gaps(chapter: str) -> None:
    found = re.findall(rf"^- \*\*{chapter}-(\d+)\*\* ", CHAPTERS[chapter], flags=re.MULTILINE)
    assert found == [str(number) for number in range(1, len(found) + 1)]
    assert found


def test_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        example = doctest.DocTestParser().get_doctest(block, names, f"example {number}", "shrink.md", 0)
        report: list[str] = []
        results = doctest.DocTestRunner(verbose=False).run(example, out=report.append, clear_globs=False)
        names.update(example.globs)
        assert results.attempted
        assert not results.failed, "".join(report)


def test_ids_that_are_cited_exist() -> None:
    known = {
        f"{name}-{number}" for name, number in re.findall(rf"^- \*\*({NAMES}|DS)-(\d+)", PAGE, flags=re.MULTILINE)
    }
    body = PAGE.split("## Changelog")[0]  # it names retired ids
    sources = [body, *(path.read_text(encoding="utf-8") for path in (ROOT / "shd_ref" / "shrink").glob("*.py"))]
    sources += [path.read_text(encoding="utf-8") for path in (ROOT / "shd_torch" / "shrink").glob("*.py")]
    cited = {"-".join(found) for text in sources for found in re.findall(rf"\b({NAMES}|DS)-(\d+)\b", text)}
    assert cited <= known


def test_codes_of_the_page_are_of_the_list() -> None:
    cited = set(re.findall(r"`([a-z]+-[a-z]+)`", PAGE)) - {"low-rank"}
    assert {code for code in cited if code in ERROR_CODES} == {
        "argument-dtype",
        "argument-shape",
        "argument-value",
        "layers-invalid",
        "mixing-invalid",
        "read-failed",
        "shrink-unsupported",
    }
    assert cited <= set(ERROR_CODES)
