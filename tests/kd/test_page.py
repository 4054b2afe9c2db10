"""The page ``specs/kd.md``: its examples run, its ids are in order, its table is that of the reference."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from pathlib import Path

import pytest

import shd_ref.kd
from shd_ref import ERROR_CODES

PAGE = (Path(__file__).resolve().parents[2] / "specs" / "kd.md").read_text(encoding="utf-8")
IDS = re.findall(r"^- \*\*((?:KD|HID)-\d+)\*\* ", PAGE, flags=re.MULTILINE)


def test_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        report: list[str] = []
        example = doctest.DocTestParser().get_doctest(block, {}, "kd.md", "kd.md", 0)
        results = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
        assert results.attempted
        assert not results.failed, "".join(report)


@pytest.mark.parametrize("chapter", ["KD", "HID"])
def test_ids_are_numbered_without_gaps(chapter: str) -> None:
    numbers = [name.split("-")[1] for name in IDS if name.startswith(f"{chapter}-")]
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]


@pytest.mark.parametrize("package", ["shd_ref", "shd_torch"])
def test_ids_that_are_cited_exist(package: str) -> None:
    root = Path(__file__).resolve().parents[2] / package / "kd"
    known = {*IDS, *re.findall(r"KD-D-\d+", PAGE)}
    for text in [PAGE, *(path.read_text(encoding="utf-8") for path in root.glob("*.py"))]:
        assert set(re.findall(r"\b(?:KD|HID)-(?:D-)?\d+", text)) <= known


def test_codes_name_sentences_that_name_them() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| ((?:KD|HID)-.*?) \|$", PAGE, flags=re.MULTILINE)
    sentences = dict(
        re.findall(r"^- \*\*((?:KD|HID)-\d+)\*\* (.*?)(?=^- \*\*|^\S|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    )
    assert {code for code, _ in rows} <= set(ERROR_CODES)
    listed = {(code, name) for code, ids in rows for name in ids.split(", ")}
    said = {
        (code, name)
        for name, text in sentences.items()
        for code in ERROR_CODES
        if f"`{code}`" in text.replace("\n", "")
    }
    assert listed == said


def test_operations_have_the_signatures_of_the_table() -> None:
    text = PAGE[PAGE.index("## Operations") : PAGE.index("## KD")]
    rows = re.findall(r"^\| `(\w+)\((.*?)\)`", text, flags=re.MULTILINE)
    functions = {name for name in shd_ref.kd.__all__ if name[0].islower()} - {"systematic_uniforms"}
    assert {name for name, _ in rows} == functions
    for name, written in rows:
        arguments = [a.strip() for a in written.split(",")]
        parameters = inspect.signature(getattr(shd_ref.kd, name)).parameters
        given = [a.partition("=")[0] for a in arguments if a not in ("*", "...")]
        actual = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
        if "..." in arguments or len(given) > len(actual):  # keywords that several operations share
            assert given[: len(actual)] == actual, name
        else:
            assert given == actual, name
            for argument in arguments:
                key, _, default = argument.partition("=")
                if default:
                    assert parameters[key].default == ast.literal_eval(default), f"{name}: {key}"


@pytest.mark.parametrize(
    ("operation", "checked"), [("kd_loss", "loss.kd_rows"), ("hidden_loss", "hidden._check_layers")]
)
def test_keywords_of_the_losses_have_the_defaults_of_the_table(operation: str, checked: str) -> None:
    (written,) = re.findall(rf"^\| `{operation}\(.*?\*, (.*?)\)`", PAGE, flags=re.MULTILINE)
    wanted = {
        key: ast.literal_eval(value) for key, _, value in (a.strip().partition("=") for a in written.split(","))
    }
    module, name = checked.split(".")
    home = __import__(f"shd_ref.kd.{module}", fromlist=[name])
    parameters = inspect.signature(getattr(home, name)).parameters.values()
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == wanted
