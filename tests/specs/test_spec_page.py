"""The page itself: its examples run, its ids are in order, its tables are those of the reference."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shd_ref
from shd_ref import ERROR_CODES, SPEC_VERSION

PAGE = (Path(__file__).resolve().parents[2] / "specs" / "shd.md").read_text(encoding="utf-8")
CHAPTERS = {
    match[1]: match[2]
    for match in re.finditer(r"^## ([A-Z]+): [^\n]*\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
}
OPTIONAL = {"ORACLE": "scipy"}
RETIRED = {"MIX-7", "MIX-15"}  # numbers that no other sentence takes


def sentences(chapter: str) -> list[str]:
    return re.findall(rf"^- \*\*{chapter}-(\d+)\*\* ", CHAPTERS[chapter], flags=re.MULTILINE)


def table(heading: str, text: str) -> dict[str, str]:
    rows = re.findall(r"^\| `(.+?)` .*?\| (.*) \|$", text[text.index(heading) :].split("\n\n")[0], flags=re.MULTILINE)
    return dict(rows)


def test_edition() -> None:
    assert f"\nEdition {SPEC_VERSION}." in PAGE
    assert f"\n- {SPEC_VERSION}: " in PAGE[PAGE.index("## Changelog") :]


@pytest.mark.parametrize("chapter", CHAPTERS)
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


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_ids_are_numbered_without_gaps(chapter: str) -> None:
    ids = [f"{chapter}-{number}" for number in range(1, int(sentences(chapter)[-1]) + 1)]
    assert [f"{chapter}-{number}" for number in sentences(chapter)] == [one for one in ids if one not in RETIRED]


def test_ids_that_the_page_and_the_reference_cite_exist() -> None:
    known = RETIRED | {f"{chapter}-{number}" for chapter in CHAPTERS for number in sentences(chapter)}
    known |= {f"D-{number}" for number in re.findall(r"^- \*\*D-(\d+)", PAGE, flags=re.MULTILINE)}
    texts = {"shd.md": PAGE}
    folder = Path(shd_ref.__file__).parent
    texts |= {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    cited = {
        (name, f"{chapter}-{number}")
        for name, text in texts.items()
        for chapter, number in re.findall(rf"\b({'|'.join(CHAPTERS)}|D)-(\d+)\b", text)
    }
    assert {(name, spec_id) for name, spec_id in cited if spec_id not in known} == set()


def test_error_table_is_the_reference_s() -> None:
    listed = table("| code | when |", PAGE)
    tools = list(ERROR_CODES)[len(listed) :]
    assert listed == {code: text for code, text in ERROR_CODES.items() if code not in tools}
    assert tools[0] == "dependency-missing"


def test_every_code_of_the_meaning_has_a_sentence() -> None:
    given_by = table("| code | given by |", PAGE)
    assert set(given_by) == set(table("| code | when |", PAGE))
    for code, ids in given_by.items():
        named = set(re.findall(r"[A-Z]+-\d+", ids))
        assert named
        for spec_id in named:
            chapter, number = spec_id.split("-")
            sentence = re.search(
                rf"^- \*\*{chapter}-{number}\*\* (.*?)(?=^- \*\*|^$)", CHAPTERS[chapter], re.M | re.S
            )
            assert sentence, spec_id
            # An id may also send the reader to the sentence that has the code.
            assert code in sentence[1] or "as in MIX-2" in sentence[1], f"{spec_id} does not name {code}"


def test_operations_have_the_signatures_of_the_table() -> None:
    text = PAGE[PAGE.index("## Operations") : PAGE.index("## MAP")]
    rows = re.findall(r"^\| `(\w+)\((.*?)\)`", text, flags=re.MULTILINE)
    missing = set(shd_ref.__all__) - {name for name, _ in rows}
    types = {name for name in shd_ref.__all__ if name[0].isupper() and not name.isupper()}
    assert "SqueezeResult" in types
    assert missing == {"ERROR_CODES", "SPEC_VERSION", "__version__"} | types
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


def test_the_reference_imports_numpy_alone() -> None:
    script = "import sys, shd_ref; print(sorted({'scipy', 'networkx', 'torch', 'onnx'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
