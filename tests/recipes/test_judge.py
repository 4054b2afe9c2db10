"""The part ``recipes`` of the judge: what conforms, what it catches, and what stands in its files."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from judge.mutants import read_chapter
from judge.mutants.mutant import Mutant, built, run

import shd_ref.recipes
from shd_ref import ERROR_CODES
from shd_ref.conformance import Status, cases, judge
from shd_ref.conformance.adapter import RECIPES_OUTPUTS
from shd_ref.conformance.specification import DTYPES, load_sentences, specs_folder, vectors_folder
from shd_ref.conformance.vectors import Case

SPECS = specs_folder()
ITEMS = cases(part="recipes")
_, MUTANTS = read_chapter(Path(__file__).parent / "mutants.txt")
# SHD as one more term is the binding's, whose own tests check it.
UNCOVERED = {"REC-3"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["shd_ref", "shd_torch-cpu", pytest.param("shd_torch-cuda", marks=pytest.mark.gpu)])
def test_implementation_conforms(name: str, dtype: str) -> None:
    implementation: Any = shd_ref.recipes
    if name != "shd_ref":
        torch = pytest.importorskip("torch", reason="the PyTorch binding needs torch")
        device = name.removeprefix("shd_torch-")
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("torch finds no CUDA device")
        implementation = importlib.import_module("shd_torch.adapters.recipes").RecipesAdapter(device)
    report = judge(implementation, dtype=dtype, part="recipes", name=name)
    assert report.passed, report.summary()
    assert report.count(Status.MISSING) == 0
    assert report.count(Status.PASSED) > 250


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    items = [item for item in ITEMS if set(mutant.operations) & set(item.operations)]
    with built(mutant.edits, "recipes") as implementation:
        results = (result for item in items for result in run(implementation, [item], "float64"))
        assert any(result.status is Status.FAILED for result in results), "no vector or law catches it"


def test_mutants_are_many_and_their_copy_is_right() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 70
    with built(part="recipes") as copy:
        assert judge(copy, part="recipes").passed


def arguments() -> list[tuple[str, str]]:
    return [
        (operation, name)
        for operation in RECIPES_OUTPUTS
        for name, parameter in inspect.signature(getattr(shd_ref.recipes, operation)).parameters.items()
        if parameter.default is not parameter.empty
    ]


@pytest.mark.parametrize(("operation", "name"), arguments())
def test_no_argument_can_be_ignored(operation: str, name: str) -> None:
    def ignoring(**inputs: Any) -> Any:
        return getattr(shd_ref.recipes, operation)(**{key: value for key, value in inputs.items() if key != name})

    # Valid cases alone: that what is wrong is refused shows nothing of what the argument does.
    items = [item for item in ITEMS if operation in item.operations and not getattr(item, "codes", ())]
    results = (
        result for item in items for result in run(SimpleNamespace(**{operation: ignoring}), [item], "float64")
    )
    assert any(result.status is Status.FAILED for result in results), f"{operation} may ignore {name}"


def test_every_sentence_that_gives_a_code_has_an_invalid_case() -> None:
    codes = "|".join(ERROR_CODES)
    given = {
        (code, name)
        for name, text in load_sentences("recipes").items()
        if name.startswith("REC-")
        for code in re.findall(f"`({codes})`", text)
    }
    shown = {(code, name) for item in ITEMS if isinstance(item, Case) for code in item.codes for name in item.spec}
    # What adds terms, and what weighs SHD, is the binding's.
    assert given - shown == {("argument-value", "REC-1"), ("argument-value", "REC-3")}


def test_command_line_judges_the_part() -> None:
    command = [sys.executable, "-m", "shd_ref.conformance", "--impl", "shd_ref.recipes", "--part", "recipes"]
    done = subprocess.run([*command, "--only", "gkd/*"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "part recipes 1.0: conforms" in done.stdout


def test_every_sentence_has_an_item() -> None:
    sentences = {name for name in load_sentences("recipes") if name.startswith("REC-")}
    named = {spec_id for item in ITEMS for spec_id in item.spec}
    assert sentences - named == UNCOVERED
    assert named <= sentences | set(load_sentences())
    for code in ("argument-value", "argument-shape", "argument-dtype", "not-finite", "not-a-distribution"):
        assert any(isinstance(item, Case) and code in item.codes for item in ITEMS)


def test_files_follow_the_schema_and_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(vectors_folder("recipes").glob("*.json"))
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    assert {document["operation"]: tuple(document["outputs"]) for document in documents} == RECIPES_OUTPUTS
    monkeypatch.syspath_prepend(SPECS / "tools")
    fingerprint = importlib.import_module("book").fingerprint
    found = {case["id"]: fingerprint(case) for document in documents for case in document["cases"]}
    frozen = json.loads((SPECS / "vectors" / "frozen-recipes-v1.json").read_text(encoding="utf-8"))
    assert found == frozen, "freeze new cases: make_vectors.py --part recipes --freeze"
    jsonschema = pytest.importorskip("jsonschema", reason="the schema is read by jsonschema")
    schema = json.loads((SPECS / "schemas" / "vectors.schema.json").read_text(encoding="utf-8"))
    for document in documents:
        jsonschema.Draft202012Validator(schema).validate(document)


@pytest.mark.slow
def test_regenerating_gives_the_same_bytes(tmp_path: Path) -> None:
    tool = SPECS / "tools" / "make_vectors.py"
    subprocess.run([sys.executable, "-B", str(tool), "--part", "recipes", "--out", str(tmp_path)], check=True)
    files = sorted(vectors_folder("recipes").glob("*.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in files]
    for path in files:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), f"{path.name}: run {tool.name}"
