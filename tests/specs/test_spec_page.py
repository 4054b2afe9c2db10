"""The page itself: its examples run, its ids are in order, its tables are those of the reference."""

import ast
import doctest
import inspect
import re
from pathlib import Path

import pytest

import shd_ref
from shd_ref import SPEC_VERSION

PAGE = (Path(__file__).resolve().parents[2] / "specs" / "shd.md").read_text(encoding="utf-8")
CHAPTERS = {
    match[1]: match[2]
    for match in re.finditer(r"^## ([A-Z]+): [^\n]*\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
}
OPTIONAL = {"ORACLE": "scipy"}
PLAIN = {"NUM", "ERR"}  # chapters without an example


def test_edition() -> None:
    assert f"\nEdition {SPEC_VERSION}." in PAGE
    assert f"\n- {SPEC_VERSION}, " in PAGE[PAGE.index("## Changelog") :]


@pytest.mark.parametrize("chapter", sorted(set(CHAPTERS) - PLAIN))
def test_examples_of_the_page_run(chapter: str) -> None:
    if chapter in OPTIONAL:
        pytest.importorskip(OPTIONAL[chapter])
    blocks = re.findall(r"```python\n(.*?)```", CHAPTERS[chapter], flags=re.DOTALL)
    assert blocks, f"chapter {chapter} has no example"
    for block in blocks:
        example = doctest.DocTestParser().get_doctest(block, {}, chapter, "shd.md", 0)
        report: list[str] = []
        results = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
        assert results.attempted
        assert not results.failed, "".join(report)


def test_operations_have_the_signatures_of_the_table() -> None:
    text = PAGE[PAGE.index("## Operations") : PAGE.index("## MAP")]
    rows = re.findall(r"^\| `(\w+)\((.*?)\)`", text, flags=re.MULTILINE)
    missing = set(shd_ref.__all__) - {name for name, _ in rows}
    types = {name for name in shd_ref.__all__ if name[0].isupper() and not name.isupper()}
    assert "SqueezeResult" in types
    groups = {"id_groups", "patch_groups", "span_groups"}  # what makes the groups of TOKEN-8
    assert missing == {"ERROR_CODES", "SPEC_VERSION", "__version__"} | types | groups
    for name, arguments in rows:
        function = getattr(shd_ref, name)
        parameters = inspect.signature(function).parameters
        written = [a.strip() for a in arguments.split(",") if a.strip() not in ("*", "...")]
        names = [a.split("=")[0] for a in written]
        actual = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
        assert names == actual, name
        after_star = arguments.partition("*, ")[2].split(",")
        by_name = {a.strip().split("=")[0] for a in after_star if a.strip() not in ("", "...")}
        assert by_name == {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY}, name
        for argument in written:
            key, _, default = argument.partition("=")
            given = parameters[key].default
            if not default:
                assert given is inspect.Parameter.empty, f"{name}: {key}"
            elif key == "plan":
                assert given is None  # progressive (MIX-16)
            elif default != "all":
                assert given == ast.literal_eval(default), f"{name}: {key}"
