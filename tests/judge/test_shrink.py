"""What only the part ``shrink`` of the judge has: layers as answers, records both ways, a binding that lacks some."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from typing import Any

import numpy as np
import pytest
from judge.mutants.mutant import run

import shd_ref.shrink
from shd_ref.conformance import Status, cases, judge
from shd_ref.conformance.adapter import LAYER, SHRINK_OUTPUTS
from shd_ref.conformance.program import decode, make_request
from shd_ref.conformance.report import describe
from shd_ref.conformance.specification import specs_folder
from shd_ref.conformance.vectors import Case

SPECS = specs_folder()
ITEMS = cases(part="shrink")
DTYPES = ("float64", "float32")
# What the binding leaves to the reference: MAP's numbers, and the merged attention.
NOT_BOUND = {
    "attend",
    *("fit_predictor", "cross_validate", "choose_degree", "best_split", "change_meaning", "study_noise"),
}


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
