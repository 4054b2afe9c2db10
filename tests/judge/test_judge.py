"""The judge judged: wrong implementations fail, and no sentence is left out."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from judge.mutants import MUTANTS, read_chapter, table
from judge.mutants.mutant import SHOWN_BY, Mutant, apply, built, failures, items_by_id, items_on, parse_chapter, run
from judge.mutants.pattern import locals_of, rewrite

from shd_ref.conformance import OUTPUTS, Status, cases
from shd_ref.conformance.runner import MISTAKES
from shd_ref.conformance.specification import load_mistakes, load_sentences, specs_folder
from shd_ref.conformance.vectors import Case
from shd_ref.indexer import IndexerKeywords
from shd_ref.loss import LossKeywords

CASES = [item for item in items_by_id().values() if isinstance(item, Case)]
TEXT = (specs_folder() / "shd.md").read_text(encoding="utf-8")

# Sentences that neither a vector nor a law can check.
UNCOVERED = {
    "MAP-12": "says what is not specified",
    "MAP-14": "the judge gives float64 and float32 arrays alone; tests/specs/test_stored_dtype.py",
    "LOSS-9": "no operation returns a gradient of the supervision; tests of the training path check it",
    "GRAD-7": "as LOSS-9",
    "IDX-3": "says in which form a caller gives queries and keys",
    "IDX-15": "as LOSS-9",
    "TOKEN-5": "says in which order a caller uses two operations",
    "TOKEN-6": "says what a caller does before the loss",
    "ERR-8": "says what is not judged",
    "ERR-3": "speaks of the codes of tools",
    "ERR-5": "an operation whose solver is missing counts as missing",
}


def needs_solver(operations: Iterable[str]) -> None:
    """Skips where the extra ``oracles`` is not installed and nothing else shows the mistake."""
    for operation, library in (("matched_plan", "networkx"), ("diagnose", "scipy")):
        if set(operations) == {operation}:
            pytest.importorskip(library, reason=f"{operation} needs the extra 'oracles'")


def test_there_are_enough() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len(MUTANTS) >= 290
    assert sum(bool(mutant.mistake) for mutant in MUTANTS) >= 60


def test_every_mistake_is_hunted_or_recognised() -> None:
    recognised = set(MISTAKES)
    hunted = {flag for item in cases() for flag in item.flags}
    assert recognised | hunted == set(load_mistakes())
    shown = {mutant.mistake for mutant in MUTANTS} - {""}
    assert recognised == shown, f"recognised without a mutant, or the other way round: {recognised ^ shown}"


@pytest.mark.parametrize(
    "paragraph",
    [
        "name: Wrong.",
        "name\nin loss\n- a\n+ b",
        "name: Wrong.\nin loss\n  a",
        "name: Wrong.\nin loss\n+ b",
        "name: Wrong.\nin loss\n-a\n+ b",
        "name\nmistake: none\nin loss\n- a\n+ b",
        "name: Wrong.\nwhere: loss\nin loss\n- a\n+ b",
    ],
)
def test_a_paragraph_that_is_no_mutant_is_refused(tmp_path: Path, paragraph: str) -> None:
    path = tmp_path / "chapter.txt"
    path.write_text(f"# Chapter\n\n{paragraph}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"chapter\.txt, name"):
        read_chapter(path)


class Renamed(ast.NodeTransformer):
    """Calls every local of the functions of a chapter otherwise, or as before."""

    def __init__(self, locals_: Iterable[str], rename: Callable[[str], str]) -> None:
        self.locals, self.rename = set(locals_), rename

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for key in ("id", "arg", "name"):
            if isinstance(node, ast.Name | ast.arg | ast.FunctionDef) and getattr(node, key, None) in self.locals:
                setattr(node, key, self.rename(getattr(node, key)))
        return super().generic_visit(node)


@pytest.mark.parametrize("chapter", SHOWN_BY)
def test_mutants_hold_whatever_locals_are_called(chapter: str) -> None:
    """Each edit of a chapter changes the same place after every local of every function has another name."""

    tree = parse_chapter(chapter)
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            Renamed(locals_of(function), lambda name: f"{name}_renamed").visit(function)
    renamed = ast.unparse(tree)
    for edits in filter(None, ([edit for edit in one.edits if edit.chapter == chapter] for one in MUTANTS)):
        changed, other = apply(parse_chapter(chapter), edits), apply(ast.parse(renamed), edits)
        for one, same in zip(changed, other, strict=True):
            assert ast.unparse(same).replace("_renamed", "") == ast.unparse(one)


def test_an_edit_that_fits_no_place_or_several_is_an_error() -> None:
    text = "def f(x):\n    a = x + 1\n    b = a + 1\n    return a * b\n\n\ndef g(x):\n    return x + 1\n"
    for old, new, function, words in (
        ("x + 2", "x", "", "not 0 times"),
        ("x + 1", "x", "", "not 2 times"),
        ("c * c", "c", "f", "not 0 times"),
        ("c * d", "c * a", "f", "must show what a is"),
        ("c * d", "c", "h", "not 0 times"),
    ):
        with pytest.raises(LookupError, match=words):
            rewrite(ast.parse(text), old, new, function)
    tree = ast.parse(text)
    rewrite(tree, "one = x + 1\n...\nreturn one * two", "one = x\n...\nreturn two", "")
    assert ast.unparse(tree.body[0]) == "def f(x):\n    a = x\n    b = a + 1\n    return b"


def test_table_is_in_step() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.render(table.read()) == page, "write it again: cd tests && python -m judge.mutants.table"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    needs_solver(mutant.operations)
    listed = table.read()[mutant.name]
    items = [items_by_id()[name] for name in listed] or items_on(mutant.operations)
    found = failures(mutant, items)
    caught = {result.id for result in found}
    assert caught, "no vector or law catches it"
    assert caught >= set(listed), (
        f"{set(listed) - caught} pass: write the table again, cd tests && python -m judge.mutants.table"
    )
    if mutant.mistake:
        assert any(table.names_mistake(result, mutant) for result in found), f"no report names {mutant.mistake}"


def test_reference_passes_what_catches_them() -> None:
    ids = {name for names in table.read().values() for name in names}
    with built() as reference:
        results = run(reference, [items_by_id()[name] for name in sorted(ids)])
    assert [result.id for result in results if result.status is Status.FAILED] == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["alpha-in-float16", "loss-in-float16"])
def test_half_precision_sums_are_caught_in_half_precision(name: str, dtype: str) -> None:
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == name]
    assert failures(mutant, items_on(mutant.operations), dtype)


def keywords(function: Any) -> list[str]:
    """The names of the arguments that have a default."""
    found = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in found):
        shared = IndexerKeywords if function.__name__.startswith("indexer") else LossKeywords
        return list(shared.__annotations__)
    return [parameter.name for parameter in found if parameter.default is not parameter.empty]


def arguments() -> list[tuple[str, str]]:
    with built() as reference:
        return [(operation, name) for operation in OUTPUTS for name in keywords(getattr(reference, operation))]


@pytest.mark.parametrize(("operation", "name"), arguments())
def test_no_argument_can_be_ignored(operation: str, name: str) -> None:
    needs_solver([operation])
    with built() as reference:

        def ignoring(**inputs: Any) -> Any:
            return getattr(reference, operation)(**{key: value for key, value in inputs.items() if key != name})

        mutant = SimpleNamespace(**{**vars(reference), operation: ignoring})
        valid = (item for item in items_on([operation]) if not getattr(item, "codes", ()))
        results = (result for item in valid for result in run(mutant, [item]))
        assert any(result.status is Status.FAILED for result in results), f"{operation} may ignore {name}"


def test_every_sentence_is_covered() -> None:
    covered = {spec_id for item in items_by_id().values() for spec_id in item.spec}
    assert covered <= set(load_sentences())
    missing = set(load_sentences()) - covered
    assert missing == set(UNCOVERED), f"covered after all, or not: {missing ^ set(UNCOVERED)}"


def test_the_page_says_what_no_item_judges() -> None:
    page = (table.PAGE.parent / "conformance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z0-9, -]+-\d+) \| (.+) \|$", page.split("## What no item judges")[1], re.MULTILINE)
    assert {spec_id for ids, _ in rows for spec_id in ids.split(", ")} == set(UNCOVERED)


def test_every_code_has_an_invalid_case() -> None:
    codes = re.findall(r"^\| `([a-z-]+)` \| (?!.*-\d)", TEXT.split("## ERR")[1], re.MULTILINE)
    counts = Counter(code for case in CASES for code in case.codes)
    assert len(codes) == 10
    assert set(counts) == set(codes)


def test_every_sentence_that_gives_a_code_has_an_invalid_case() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| ([A-Z0-9-]+-\d.*) \|$", TEXT.split("## ERR")[1], re.MULTILINE)
    given = {(code, spec_id) for code, names in rows for spec_id in re.findall(r"[A-Z]+-\d+", names)}
    assert len(given) > 30
    shown = {(code, spec_id) for case in CASES for code in case.codes for spec_id in case.spec}
    assert given <= shown, f"no invalid case for {sorted(given - shown)}"


def test_page_of_the_table_is_linked_to_what_exists() -> None:
    folder = table.PAGE.parent
    assert all((folder / target).exists() for target in re.findall(r"\]\(([^)#]+)\)", table.PAGE.read_text("utf-8")))
    assert Path(table.__file__).parent.name == "mutants"
