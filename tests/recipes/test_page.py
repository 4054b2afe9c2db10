"""specs/recipes.md: its examples run, its ids and signatures are those of the code."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from pathlib import Path

import pytest

import shd_ref.recipes
from shd_ref import ERROR_CODES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "specs" / "recipes.md").read_text(encoding="utf-8")
SENTENCES = dict(re.findall(r"^- \*\*(REC-\d+)\*\* (.*?)(?=^- \*\*|^\S|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
TABLE = PAGE[PAGE.index("## Operations") : PAGE.index("## Terms")]
OPERATIONS = re.findall(r"^\| `(\w+)\((.*?)\)` \| (.*?) \|$", TABLE, flags=re.MULTILINE)


def test_examples_run() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    report: list[str] = []
    example = doctest.DocTestParser().get_doctest(block, {}, "recipes.md", "recipes.md", 0)
    results = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert results.attempted
    assert not results.failed, "".join(report)


def test_ids_are_numbered_without_gaps() -> None:
    assert list(SENTENCES) == [f"REC-{number}" for number in range(1, len(SENTENCES) + 1)]


@pytest.mark.parametrize("package", ["shd_ref", "shd_torch"])
def test_ids_that_are_cited_exist_and_all_are_cited(package: str) -> None:
    known = {*SENTENCES, *re.findall(r"REC-D-\d+", PAGE)}
    cited: set[str] = set()
    for path in (ROOT / package / "recipes").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        cited |= set(re.findall(r"REC-(?:D-)?\d+", text))
        for first, last in re.findall(r"REC-(\d+) to REC-(\d+)", text):
            cited |= {f"REC-{number}" for number in range(int(first), int(last) + 1)}
    assert cited <= known
    left_out = {"REC-3"} if package == "shd_ref" else set()  # the reference is the base losses alone
    assert cited >= set(SENTENCES) - left_out


def test_codes_name_sentences_that_name_them() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (REC-.*?) \|$", PAGE, flags=re.MULTILINE)
    assert {code for code, _ in rows} <= set(ERROR_CODES)
    listed = {(code, name) for code, names in rows for name in names.split(", ")}
    said = {(code, name) for name, text in SENTENCES.items() for code in ERROR_CODES if f"`{code}`" in text}
    assert listed == said


def test_operations_have_the_signatures_of_the_table() -> None:
    helpers = {"total"}
    assert {name for name, _, _ in OPERATIONS} == {n for n in shd_ref.recipes.__all__ if n[0].islower()} - helpers
    for name, written, _ in OPERATIONS:
        check(inspect.signature(getattr(shd_ref.recipes, name)), written, name)


def test_the_binding_has_the_same_ones_and_a_term_more() -> None:
    pytest.importorskip("torch", reason="the PyTorch binding needs torch")
    import shd_torch.recipes

    for name, written, result in OPERATIONS:
        if name == "vitkd":  # a module, as it has parameters
            continue
        parameters = dict(inspect.signature(getattr(shd_torch.recipes, name)).parameters)
        assert "shd" not in parameters or parameters.pop("shd").default is None
        assert ("shd" in inspect.signature(getattr(shd_torch.recipes, name)).parameters) == result.startswith("`")
        parameters.pop("check", None)
        check(inspect.Signature(list(parameters.values())), written, name)


def check(signature: inspect.Signature, written: str, name: str) -> None:
    keywords = [each for each in written.split(", ") if each != "*"]
    assert [each.partition("=")[0] for each in keywords] == list(signature.parameters), name
    for each in keywords:
        key, _, default = each.partition("=")
        if default:
            assert signature.parameters[key].default == ast.literal_eval(default), f"{name}: {key}"
