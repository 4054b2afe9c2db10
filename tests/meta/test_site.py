"""The site says every public name, its hooks make the right links, and no link of a page is dead."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = [path.stem for path in sorted((ROOT / "docs" / "api").glob("*.md"))]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for folder in ("specs", "docs", "examples") for page in ROOT.glob(f"{folder}/**/*.md")),
]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_on_its_page(module: str) -> None:
    needed = "xxhash" if module == "shd_ref.cache" else "torch" if module.startswith("shd_torch") else "numpy"
    pytest.importorskip(needed, reason=f"{module} needs it")
    page = (ROOT / "docs" / "api" / f"{module}.md").read_text(encoding="utf-8")
    said = re.findall(rf"^::: {re.escape(module)}\.(?:\w+\.)?(\w+)$", page, re.MULTILINE)
    assert len(said) == len(set(said)), "a name is there twice"
    public = set(importlib.import_module(module).__all__)
    missing, gone = public - set(said), {name for name in set(said) - public if module != "shd_torch"}
    assert not missing, f"docs/api/{module}.md lacks a line such as '::: {module}.{min(missing)}'"
    assert not gone, f"docs/api/{module}.md names what {module} does not offer"


def test_links_become_those_of_the_site(hooks: ModuleType) -> None:
    def relinked(link: str, here: str) -> str:
        return str(hooks.relink(f"[x]({link})", here, hooks.folder_of(here)))[4:-1]

    assert relinked("../specs/shd.md#decisions", "training.md") == "specs/shd.md#decisions"
    assert relinked("../../specs/shd.md", "api/shd_ref.md") == "../specs/shd.md"
    assert relinked("../docs/shrink.md#train-the-student", "specs/shd.md") == "../shrink.md#train-the-student"
    assert relinked("shd.md", "specs/conformance.md") == "shd.md"
    assert relinked("backends.md#accuracy", "training.md") == "backends.md#accuracy"
    assert relinked("data-flow.svg", "idea.md") == "data-flow.svg"
    assert relinked("notebooks/tour.ipynb", "idea.md") == "notebooks/tour.md"
    assert relinked("../examples", "training.md") == "examples/README.md"
    for link, here in (("../noxfile.py", "training.md"), ("vectors", "specs/README.md")):  # of no page of the site
        assert hooks.relink(f"see [`x`]({link}).", here, hooks.folder_of(here)) == "see `x`."
    assert relinked("gone.md", "training.md") == "gone.md"  # left to MkDocs, which refuses it
    for outside in ("https://a.b/c", "#here", "mailto:a@b"):
        assert relinked(outside, "training.md") == outside


def test_ids_become_links_outside_of_code(hooks: ModuleType) -> None:
    urls = {"specs/shd.md": "../specs/shd/"}
    link = '<a class="sentence" href="../specs/shd/#alpha-3">ALPHA-3</a>'
    assert hooks.link_ids("<p>Source: ALPHA-3, UTF-8.</p>", "training.md", urls) == f"<p>Source: {link}, UTF-8.</p>"
    for kept in ("<code>ALPHA-3</code>", '<a href="x">ALPHA-3</a>', '<img alt="ALPHA-3">', "<h2>ALPHA-3</h2>"):
        assert hooks.link_ids(kept, "training.md", urls) == kept


def test_sentences_have_one_anchor_on_their_page(hooks: ModuleType) -> None:
    html = "<li><strong>D-1 (erratum) N.</strong> As <strong>D-1</strong> says.</li><strong>MAP-1</strong>"
    made = hooks.link_ids(html, "specs/shd.md", {})
    assert made.count('id="d-1"') == 1
    assert '<strong id="map-1"><a class="sentence" href="#map-1">MAP-1</a></strong>' in made
    assert 'id="map-1"' not in hooks.link_ids(html, "specs/conformance.md", {"specs/shd.md": "../shd/"})


def anchors(page: Path) -> set[str]:
    """As GitHub and the site name them: lower case, punctuation left out, blanks as dashes, repeats numbered."""
    found: dict[str, int] = {}
    names = set()
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return names


def links(page: Path) -> Iterator[tuple[str, str]]:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img[^>]* src="([^"]+)"', text):
        if not re.match(r"\w+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_local_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert target.is_relative_to(ROOT), f"{path} leaves the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{path}#{anchor}"
