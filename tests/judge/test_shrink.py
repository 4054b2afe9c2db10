"""The part ``shrink`` of the judge: what conforms, what it catches, and what stands in its files."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from judge.mutants import read_chapter
from judge.mutants.mutant import Mutant, built, run

import shd_ref.shrink
from shd_ref.conformance import Status, cases, judge, specification
from shd_ref.conformance.adapter import LAYER, SHRINK_OUTPUTS
from shd_ref.conformance.program import decode, make_request
from shd_ref.conformance.report import describe
from shd_ref.conformance.specification import load_sentences, specs_folder, vectors_folder
from shd_ref.conformance.vectors import Case
from shd_ref.tolerances import load_tolerances

SPECS = specs_folder()
ITEMS = cases(part="shrink")
DTYPES = ("float64", "float32")
_, MUTANTS = read_chapter(Path(__file__).parent / "mutants" / "shrink.txt")
# What no single call and its answer can show: whole runs of the binding, whose own tests check it.
UNCOVERED = {
    *("HEAD-17", "HEAD-19", "HEAD-20", "WIDTH-6", "WIDTH-7"),
    *(name for name in load_sentences("shrink") if name.startswith(("ALIGN-", "DEPTH-", "STUDENT-"))),
} - {"ALIGN-2", "DEPTH-1", "DEPTH-2"}
# What the binding leaves to the reference: MAP's numbers, and the merged attention.
NOT_BOUND = {
    "attend",
    *("fit_predictor", "cross_validate", "choose_degree", "best_split", "change_meaning", "study_noise"),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_conforms(dtype: str) -> None:
    pytest.importorskip("networkx", reason="matched plans need the extra 'oracles'")
    report = judge(shd_ref.shrink, dtype=dtype, part="shrink")
    assert report.passed, report.summary()
    assert report.count(Status.MISSING) == 0
    assert report.count(Status.PASSED) > 200


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_binding_conforms(device: str, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="the PyTorch binding needs torch")
    pytest.importorskip("networkx", reason="matched plans need the extra 'oracles'")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    adapter = importlib.import_module("shd_torch.adapters.shrink").ShrinkAdapter(device)
    items = [item for item in ITEMS if not getattr(item, "codes", ())]
    results = run(adapter, items, dtype)
    wrong = [describe(result) for result in results if result.status is Status.FAILED]
    assert not wrong, "\n".join(wrong)
    missing = {name for result in results if result.status is Status.MISSING for name in result.operations}
    passed = {name for result in results if result.status is Status.PASSED for name in result.operations}
    assert passed == set(SHRINK_OUTPUTS) - NOT_BOUND
    assert missing & passed <= {"low_rank_heads", "concatenate_heads", "mix_queries"}  # for an option


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    if mutant.operations == ("grouped_plan",):
        pytest.importorskip("networkx", reason="matched plans need the extra 'oracles'")
    items = [item for item in ITEMS if set(mutant.operations) & set(item.operations)]
    with built(mutant.edits, "shrink") as implementation:
        results = (result for item in items for result in run(implementation, [item], "float64"))
        assert any(result.status is Status.FAILED for result in results), "no vector or law catches it"


def test_mutants_are_many_and_their_copy_is_right() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 80
    with built(part="shrink") as copy:
        assert judge(copy, part="shrink").passed


def test_tolerances_hold_ten_times_over(monkeypatch: pytest.MonkeyPatch) -> None:
    published = load_tolerances()
    tenth = {
        quantity: {name: value / 10 for name, value in pair.items()}
        for quantity, pair in published["agreement"]["float64"].items()
    }
    shrunk = {**published, "agreement": {**published["agreement"], "float64": tenth}}
    monkeypatch.setattr(specification, "load_tolerances", lambda: shrunk)
    report = judge(shd_ref.shrink, part="shrink")
    assert report.passed, report.summary()


def test_other_factors_of_the_same_products_conform() -> None:
    """Signs and bases of factors are free: each query and key entry by its own sign, values turned."""

    def turned(**inputs: Any) -> dict[str, Any]:
        found = shd_ref.shrink.low_rank_heads(**inputs)
        layer = {name: getattr(found, name) for name in LAYER}
        per = len(layer["query"]) // len(layer["key"])
        turn = np.linalg.qr(np.random.default_rng(0).normal(size=[layer["value"].shape[2]] * 2))[0]
        layer["value"], layer["output"] = layer["value"] @ turn, turn.T @ layer["output"]
        if layer["value_bias"] is not None:
            layer["value_bias"] = layer["value_bias"] @ turn
        for side in ("query", "key") if "rotary" not in inputs else ():
            shape = turn if side == "query" else np.linalg.inv(turn).T
            for name in (side, f"{side}_bias"):
                layer[name] = None if layer[name] is None else layer[name] @ shape
        assert per
        return layer

    class Turned:
        low_rank_heads = staticmethod(turned)

    report = judge(Turned, part="shrink", only="low_rank_heads/*")
    assert report.passed, report.summary()
    assert report.count(Status.PASSED) > 20


class ByWire:
    """The reference as a program would be asked: JSON in, JSON out, records and all."""

    def run_operation(self, operation: str, inputs: Any, dtype: str) -> Any:
        asked = json.loads(json.dumps(make_request(operation, inputs, dtype)))
        given = {name: self.read(value) for name, value in asked["inputs"].items()}
        return decode(json.loads(json.dumps(self.write(getattr(shd_ref.shrink, operation)(**given)))))

    def read(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.read(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "number" in value:
            return float(value["number"])
        if "record" in value:
            return {name: self.read(item) for name, item in value["record"].items()}
        kind = value["dtype"] if value["dtype"] in ("bool", "int64", "complex128") else "float64"
        numbers = [float(x) if isinstance(x, str) else x for x in value["data"]]
        return np.array(numbers, dtype=kind).reshape(value["shape"])

    def write(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {"shape": list(value.shape), "data": value.ravel().tolist()}
        if hasattr(value, "_asdict"):
            value = value._asdict()
        elif hasattr(value, "__dataclass_fields__"):
            value = vars(value)
        if isinstance(value, dict):
            return {name: self.write(item) for name, item in value.items()}
        return [self.write(item) for item in value] if isinstance(value, list | tuple) else value


def test_records_travel_to_programs_and_back() -> None:
    pytest.importorskip("networkx", reason="matched plans need the extra 'oracles'")
    report = judge(ByWire(), part="shrink", only=[item.id for item in ITEMS if isinstance(item, Case)])
    assert report.passed, report.summary()
    assert report.count(Status.MISSING) == 0


def arguments() -> list[tuple[str, str]]:
    functions = {name: getattr(shd_ref.shrink, name) for name in SHRINK_OUTPUTS}
    return [
        (operation, name)
        for operation, function in functions.items()
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty and (operation, name) not in RANDOM
    ]


RANDOM = {("study_noise", name) for name in ("trials", "deviation", "seed", "noise")}
"""Noise is given to the judged study; drawing it is the reference's own."""


@pytest.mark.parametrize(("operation", "name"), arguments())
def test_no_argument_can_be_ignored(operation: str, name: str) -> None:
    def ignoring(**inputs: Any) -> Any:
        return getattr(shd_ref.shrink, operation)(**{key: value for key, value in inputs.items() if key != name})

    items = [item for item in ITEMS if operation in item.operations]
    results = (
        result for item in items for result in run(SimpleNamespace(**{operation: ignoring}), [item], "float64")
    )
    assert any(result.status is Status.FAILED for result in results), f"{operation} may ignore {name}"


def test_every_judged_sentence_that_gives_a_code_has_an_invalid_case() -> None:
    codes = r"`((?:argument|layers|mixing)-[a-z]+|shrink-unsupported)`"
    given = {
        (code, name)
        for name, text in load_sentences("shrink").items()
        if name not in UNCOVERED and not name.startswith("DS-")
        for code in re.findall(codes, text)
    }
    shown = {(code, name) for item in ITEMS if isinstance(item, Case) for code in item.codes for name in item.spec}
    # WIDTH-2 refuses models, and HEAD-18 other cases with normed queries: both are of whole runs.
    whole_runs = {("shrink-unsupported", "WIDTH-2"), ("shrink-unsupported", "HEAD-18")}
    assert given - shown == whole_runs


def test_factors_that_do_not_fit_are_said() -> None:
    class Broken:
        @staticmethod
        def mix_queries(**inputs: Any) -> Any:
            made = shd_ref.shrink.mix_queries(**inputs)
            return {name: None if name == "output" else getattr(made, name) for name in LAYER}

        @staticmethod
        def principal_axes(**inputs: Any) -> Any:
            return "axes"

    report = judge(Broken, part="shrink", only=["mix_queries/grouped-bare", "principal_axes/rms-2"])
    assert [result.status for result in report.results] == [Status.FAILED] * 2
    assert "must answer with output" in report.summary()


def test_command_line_judges_the_part() -> None:
    command = [sys.executable, "-m", "shd_ref.conformance", "--impl", "shd_ref.shrink", "--part", "shrink"]
    done = subprocess.run([*command, "--only", "fold_norm/*"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "part shrink 0.2: conforms" in done.stdout
    half = subprocess.run([*command, "--dtype", "float16"], capture_output=True, text=True, check=False)
    assert half.returncode == 2


def test_every_sentence_has_an_item() -> None:
    sentences = {name for name in load_sentences("shrink") if not name.startswith("DS-")}
    named = {spec_id for item in ITEMS for spec_id in item.spec}
    assert sentences - named == UNCOVERED
    assert named <= sentences | set(load_sentences())
    for code in ("argument-value", "argument-shape", "argument-dtype", "not-finite", "mixing-invalid"):
        assert any(isinstance(item, Case) and code in item.codes for item in ITEMS)
    for code in ("shrink-unsupported", "layers-invalid", "plan-invalid", "not-a-distribution"):
        assert any(isinstance(item, Case) and code in item.codes for item in ITEMS)


def test_operations_have_the_signatures_of_the_table() -> None:
    page = (SPECS / "shrink.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \|", page, flags=re.MULTILINE)
    assert {name for name, _ in rows} == set(SHRINK_OUTPUTS) == set(shd_ref.shrink.__all__)
    for name, written in rows:
        parameters = inspect.signature(getattr(shd_ref.shrink, name)).parameters
        written = re.sub(r"\([\d, ]+\)", lambda found: found[0].replace(",", ";"), written)
        for argument in (a.strip() for a in written.split(",") if a.strip() != "*"):
            key, _, default = argument.partition("=")
            assert key in parameters, f"{name}: {key}"
            if default:
                wanted = ast.literal_eval(default.replace(";", ","))
                assert parameters[key].default == wanted, f"{name}: {key}"


def test_files_follow_the_schema_and_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(vectors_folder("shrink").glob("*.json"))
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    assert {document["operation"]: tuple(document["outputs"]) for document in documents} == SHRINK_OUTPUTS
    monkeypatch.syspath_prepend(SPECS / "tools")
    fingerprint = importlib.import_module("book").fingerprint
    found = {case["id"]: fingerprint(case) for document in documents for case in document["cases"]}
    frozen = json.loads((SPECS / "vectors" / "frozen-shrink-v1.json").read_text(encoding="utf-8"))
    assert found == frozen, "freeze new cases: make_vectors.py --part shrink --freeze"
    jsonschema = pytest.importorskip("jsonschema", reason="the schema is read by jsonschema")
    schema = json.loads((SPECS / "schemas" / "vectors.schema.json").read_text(encoding="utf-8"))
    for document in documents:
        jsonschema.Draft202012Validator(schema).validate(document)


@pytest.mark.slow
def test_regenerating_gives_the_same_bytes(tmp_path: Path) -> None:
    tool = SPECS / "tools" / "make_vectors.py"
    subprocess.run([sys.executable, "-B", str(tool), "--part", "shrink", "--out", str(tmp_path)], check=True)
    files = sorted(vectors_folder("shrink").glob("*.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in files]
    for path in files:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), f"{path.name}: run {tool.name}"
