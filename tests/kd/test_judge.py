"""The part ``kd`` of the judge: what conforms, what it catches, and what stands in its files."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from judge.mutants import read_chapter
from judge.mutants.mutant import Mutant, built, run

import shd_ref.kd
from shd_ref.conformance import Status, cases, judge
from shd_ref.conformance.adapter import KD_OUTPUTS
from shd_ref.conformance.program import encode
from shd_ref.conformance.specification import DTYPES, load_sentences, vectors_folder
from shd_ref.conformance.vectors import Case

SPECS = Path(__file__).resolve().parents[2] / "specs"
ITEMS = cases(part="kd")
_, MUTANTS = read_chapter(Path(__file__).parent / "mutants.txt")
# What no call and its answer can show: tests of the binding ask an automatic differentiator.
UNCOVERED = {"KD-24", "HID-7"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["shd_ref", "shd_torch-cpu", pytest.param("shd_torch-cuda", marks=pytest.mark.gpu)])
def test_implementation_conforms(name: str, dtype: str) -> None:
    implementation: Any = shd_ref.kd
    if name != "shd_ref":
        torch = pytest.importorskip("torch", reason="the PyTorch binding needs torch")
        device = name.removeprefix("shd_torch-")
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("torch finds no CUDA device")
        implementation = importlib.import_module("shd_torch.adapters.kd").KdAdapter(device)
    report = judge(implementation, dtype=dtype, part="kd", name=name)
    assert report.passed, report.summary()
    assert report.count(Status.MISSING) == 0
    assert report.count(Status.PASSED) > 400


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    items = [item for item in ITEMS if set(mutant.operations) & set(item.operations)]
    with built(mutant.edits, "kd") as implementation:
        results = (result for item in items for result in run(implementation, [item], "float64"))
        assert any(result.status is Status.FAILED for result in results), "no vector or law catches it"


def test_mutants_are_many_and_their_copy_is_right() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 35
    with built(part="kd") as copy:
        assert judge(copy, part="kd", only="*/*").passed


def test_a_part_that_is_not_offered_is_missing_and_said() -> None:
    report = judge(shd_ref, part="kd")
    assert report.empty
    assert "no function kd_loss" in report.summary()
    assert "not judged: the optional part --part kd" in judge(shd_ref, only="softmax/*").summary()
    assert not {item.id for item in cases()} & {item.id for item in ITEMS}


def test_command_line_judges_a_part() -> None:
    command = [
        sys.executable,
        "-m",
        "shd_ref.conformance",
        "--impl",
        "shd_ref.kd",
        "--part",
        "kd",
        "--only",
        "mean_logits/*",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "part kd 1.0: conforms" in done.stdout


def test_every_sentence_has_an_item() -> None:
    sentences = set(load_sentences("kd"))
    named = {spec_id for item in ITEMS for spec_id in item.spec}
    assert sentences - named == UNCOVERED
    assert named <= sentences | set(load_sentences())
    for code in ("argument-value", "argument-shape", "argument-dtype", "not-finite", "not-a-distribution"):
        assert any(isinstance(item, Case) and code in item.codes for item in ITEMS)


def test_files_follow_the_schema_and_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(vectors_folder("kd").glob("*.json"))]
    assert {document["operation"]: tuple(document["outputs"]) for document in documents} == KD_OUTPUTS
    monkeypatch.syspath_prepend(SPECS / "tools")
    fingerprint = importlib.import_module("book").fingerprint
    found = {case["id"]: fingerprint(case) for document in documents for case in document["cases"]}
    frozen = json.loads((SPECS / "vectors" / "frozen-kd-v1.json").read_text(encoding="utf-8"))
    assert found == frozen, "freeze new cases: make_vectors.py --part kd --freeze"
    jsonschema = pytest.importorskip("jsonschema", reason="the schema is read by jsonschema")
    schema = json.loads((SPECS / "schemas" / "vectors.schema.json").read_text(encoding="utf-8"))
    for document in documents:
        jsonschema.Draft202012Validator(schema).validate(document)


@pytest.mark.slow
def test_regenerating_gives_the_same_bytes(tmp_path: Path) -> None:
    tool = SPECS / "tools" / "make_vectors.py"
    subprocess.run([sys.executable, "-B", str(tool), "--part", "kd", "--out", str(tmp_path)], check=True)
    files = sorted(vectors_folder("kd").glob("*.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in files]
    for path in files:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), f"{path.name}: run {tool.name}"


def test_records_travel_to_programs() -> None:
    (case,) = cases("kd_loss/kl-topk", part="kd")
    assert isinstance(case, Case)
    sent = encode(case.make_inputs("float32")["targets"])
    assert set(sent["record"]) == {"ids", "log_probs", "log_tail", "temperature", "vocab_size"}
    assert (sent["record"]["ids"]["dtype"], sent["record"]["log_probs"]["dtype"]) == ("int64", "float64")
    assert sent["record"]["temperature"] == 1
