"""Every claim of the sources has an answer, and every link of the page leads somewhere."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "claims.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| \*\*(yes|otherwise|no)\*\*: (.+) \|$", PAGE, re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub names those of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_claim_has_an_answer() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 70))
    answers = [answer for _, _, answer, _ in ROWS]
    for answer in ("yes", "otherwise", "no"):
        assert f"**{answers.count(answer)} {answer}**" in PAGE
    assert answers.count("no") <= 15
    assert [number for number, _, answer, text in ROWS if answer != "no" and "](" not in text] == []
    assert len(PAGE.split()) <= 1400


def test_links_resolve() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        path, _, anchor = target.partition("#")
        assert (DOCS / path).is_file(), target
        assert not anchor or anchor in anchors(DOCS / path), target
