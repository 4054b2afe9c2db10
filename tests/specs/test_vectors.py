"""The vector files: written by an independent oracle, frozen, complete, and agreed to by the reference."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import unittest
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shd_ref
from shd_ref.conformance import OUTPUTS, ConformanceError, cases, check
from shd_ref.conformance.vectors import Case, round_to

SPECS = Path(__file__).resolve().parents[2] / "specs"
FILES = sorted((SPECS / "vectors" / "v1").glob("*.json"))
DOCUMENTS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
CASES = [case for document in DOCUMENTS.values() for case in document["cases"]]
PAGE = (SPECS / "shd.md").read_text(encoding="utf-8")
SENTENCES = set(re.findall(r"^- \*\*([A-Z]+-\d+)\*\* ", PAGE, flags=re.MULTILINE)) - set(
    re.findall(r"^- \*\*(D-\d+)", PAGE, flags=re.MULTILINE)
)

# Sentences that one call with its answer cannot show, and what does.
ELSEWHERE = {
    "MAP-14": "arrays of the vectors are float64 or float32; tests/specs/test_stored_dtype.py",
    "MAP-8": "law: arguments keep their bits",
    "MAP-12": "nothing is specified",
    "MAP-15": "law: arrays laid out in other ways",
    "LOSS-9": "law: an automatic differentiator finds no gradient",
    "GRAD-7": "law: an automatic differentiator finds no gradient",
    "IDX-3": "nothing to compute",
    "IDX-15": "law: an automatic differentiator finds no gradient",
    "TOKEN-5": "law: two operations one after another",
    "TOKEN-6": "law: two operations one after another",
    "NUM-2": "law: two equal calls",
    "NUM-3": "law: a batch and its parts",
    "NUM-4": "the rule `close` itself",
    "NUM-8": "the rules `exact` and `plan` themselves",
    "NUM-9": "law: calls in a row",
    "ERR-1": "every invalid case",
    "ERR-2": "every invalid case",
    "ERR-3": "codes of the tools",
    "ERR-8": "what is not judged",
    "ERR-5": "an installation without the solver",
}


@pytest.mark.slow
def test_regenerating_gives_the_same_bytes(tmp_path: Path) -> None:
    tool = SPECS / "tools" / "make_vectors.py"
    subprocess.run([sys.executable, "-B", str(tool), "--out", str(tmp_path)], check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in FILES]
    for path in FILES:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), f"{path.name}: run {tool.name}"


def test_oracle_imports_the_standard_library_alone() -> None:
    tools = SPECS / "tools"
    files = [path.relative_to(tools) for path in (tools / "cases").rglob("*.py")]
    chapters = [".".join(path.with_suffix("").parts) for path in files if path.name != "__init__.py"]
    pending, seen = ["make_vectors", *chapters], set[str]()
    assert len(chapters) > 10

    def file_of(module: str) -> Path:
        path = tools.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    while pending:
        name = pending.pop()
        seen.add(name)
        tree = ast.parse(file_of(name).read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names} | {
            str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        }
        beside = {module for module in imported if file_of(module).is_file()}
        pending += beside - seen
        assert {module.split(".")[0] for module in imported - beside} <= sys.stdlib_module_names, name


@pytest.mark.parametrize("operation", OUTPUTS)
def test_files_are_what_they_say(operation: str) -> None:
    document = DOCUMENTS[operation]
    assert (document["operation"], document["vectors_version"]) == (operation, "1")
    assert tuple(document["outputs"]) == OUTPUTS[operation]
    used = {flag for case in document["cases"] for flag in case["flags"]}
    assert set(document["notes"]) == used
    results = {case["result"] for case in document["cases"]}
    assert results == {"valid", "invalid"}
    for case in document["cases"]:
        assert case["id"].startswith(f"{operation}/")
        assert set(case["spec"]) <= SENTENCES, case["id"]
        assert case.get("expected", {}).keys() == case.get("compare", {}).keys(), case["id"]


def test_ids_are_unique() -> None:
    assert [name for name, count in Counter(case["id"] for case in CASES).items() if count > 1] == []


def test_frozen_cases_are_withdrawn_never_edited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SPECS / "tools")
    fingerprint = importlib.import_module("book").fingerprint
    frozen = json.loads((SPECS / "vectors" / "frozen-v1.json").read_text(encoding="utf-8"))
    found = {case["id"]: fingerprint(case) for case in CASES}
    assert [name for name in frozen if frozen[name] != found.get(name)] == []
    assert [name for name in found if name not in frozen] == [], "freeze new cases: make_vectors.py --freeze"


def test_numbers_of_inputs_fit_every_dtype() -> None:
    for item in cases("*/*"):
        if not hasattr(item, "make_inputs") or item.codes or len(item.dtypes) < 4:
            continue
        for name, value in item.make_inputs().items():
            for array in value if isinstance(value, list) else [value]:
                if isinstance(array, np.ndarray) and array.dtype.kind == "f":
                    for dtype in ("float16", "bfloat16"):
                        assert (round_to(array, dtype) == array).all(), f"{item.id}: {name} at {dtype}"


FULL = [item for item in cases("*/full-*") if isinstance(item, Case)]
# Of these logits an operation reads where they are infinite, and nothing else.
UNREAD = {("intersect_support", "student_logits")}


def floats(value: Any) -> bool:
    """Whether an argument holds numbers that can be rounded."""
    if isinstance(value, list):
        return any(floats(item) for item in value)
    return isinstance(value, float) or (isinstance(value, np.ndarray) and value.dtype.kind == "f")


def shorter(value: Any, dtype: str) -> Any:
    """An argument rounded to another dtype, in containers of the one that it had."""
    if isinstance(value, list):
        return [shorter(item, dtype) for item in value]
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind != "f" else round_to(value, dtype).astype(value.dtype)
    return float(round_to(np.array(value), dtype)) if isinstance(value, float) else value


ROUNDABLE = sorted(
    {(case.operation, name) for case in FULL for name, value in case.make_inputs().items() if floats(value)}
)


@pytest.mark.parametrize(("operation", "name"), ROUNDABLE)
@pytest.mark.parametrize(
    ("dtype", "rounded"), [("float64", "float32"), ("float32", "float16"), ("float32", "bfloat16")]
)
def test_no_argument_can_be_rounded(
    operation: str, name: str, dtype: str, rounded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (operation, name) in UNREAD:
        return
    for chapter in ("attention", "merging.mixing"):  # rounded inside, rows are not looked at again
        monkeypatch.setattr(f"shd_ref.{chapter}.row_sum_tolerance", lambda _: 1.0)

    class Rounding:
        def run_operation(self, called: str, inputs: Mapping[str, Any], _: str) -> Any:
            return getattr(shd_ref, called)(**{**inputs, name: shorter(inputs[name], rounded)})

    found = []
    for case in FULL:
        if case.operation == operation and dtype in case.dtypes and name in case.make_inputs():
            try:
                check(case, Rounding(), dtype)
            except unittest.SkipTest as reason:
                pytest.skip(str(reason))
            except ConformanceError:
                found.append(case.id)
    assert found, f"{operation} may round {name} to {rounded}"


def test_every_floating_argument_has_full_numbers() -> None:
    named = {
        (case.operation, name)
        for case in cases("*/*")
        if isinstance(case, Case) and not case.codes
        for name, value in case.make_inputs().items()
        if floats(value)
    }
    assert named == set(ROUNDABLE)


def test_every_sentence_has_a_vector() -> None:
    covered = {spec_id for case in CASES if "withdrawn" not in case for spec_id in case["spec"]}
    assert SENTENCES - covered - set(ELSEWHERE) == set()
    assert {spec_id for spec_id in ELSEWHERE if spec_id not in SENTENCES} == set()


@pytest.mark.parametrize("operation", OUTPUTS)
def test_the_reference_agrees(operation: str) -> None:
    ran = 0
    for item in cases(f"{operation}/*"):
        if "float64" in item.dtypes:
            try:
                check(item, shd_ref)
            except unittest.SkipTest as reason:
                pytest.skip(str(reason))
            ran += 1
    assert ran
