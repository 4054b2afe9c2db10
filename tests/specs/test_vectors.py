"""The vector files: frozen, complete, and met by the reference, which answers the judge's calls."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.recipes import draw_integers, make_array
from support.vectors import Vector, load_vectors, wrong_outputs

import shd_ref
from shd_ref.conformance import OUTPUTS

SPECS = Path(__file__).resolve().parents[2] / "specs"
DOCUMENTS = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (SPECS / "vectors" / "v1").glob("*.json")
}
CASES = [case for document in DOCUMENTS.values() for case in document["cases"]]


def fingerprint(case: dict[str, Any]) -> str:
    """What is frozen of a case: all that decides whether an answer passes it."""
    parts = {key: case.get(key) for key in ("result", "dtypes", "inputs", "expected", "compare", "code")}
    parts["near-degenerate"] = "near-degenerate" in case["flags"]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("operation", OUTPUTS)
def test_files_are_what_they_say(operation: str) -> None:
    document = DOCUMENTS[operation]
    assert (document["operation"], document["vectors_version"]) == (operation, "1")
    assert tuple(document["outputs"]) == OUTPUTS[operation]
    assert {case["result"] for case in document["cases"]} == {"valid", "invalid"}
    for case in document["cases"]:
        assert case["id"].startswith(f"{operation}/")
        assert case.get("expected", {}).keys() == case.get("compare", {}).keys(), case["id"]


def test_frozen_cases_are_withdrawn_never_edited() -> None:
    frozen = json.loads((SPECS / "vectors" / "frozen-v1.json").read_text(encoding="utf-8"))
    found = {case["id"]: fingerprint(case) for case in CASES}
    assert [name for name, count in Counter(case["id"] for case in CASES).items() if count > 1] == []
    assert frozen == found


@pytest.mark.parametrize("vector", load_vectors(SPECS / "vectors" / "v1"), ids=lambda vector: vector.id)
def test_the_reference_agrees(vector: Vector) -> None:
    dtype = "float64" if "float64" in vector.dtypes else vector.dtypes[0]
    if vector.operation in ("matched_plan", "diagnose"):
        pytest.importorskip("networkx", reason="needs the extra 'oracles'")
        pytest.importorskip("scipy", reason="needs the extra 'oracles'")
    call = getattr(shd_ref, vector.operation)
    with np.errstate(all="ignore"):
        if vector.codes:
            with pytest.raises(shd_ref.ShdError) as refused:
                call(**vector.make_inputs(dtype))
            assert refused.value.code in vector.codes
        else:
            assert wrong_outputs(vector, call(**vector.make_inputs(dtype)), dtype) == []


def test_recipes_are_integers_over_powers_of_two() -> None:
    assert draw_integers(1, 3).tolist() == [15496, 24200, 33046]
    probs = make_array([2, 3, 4], {"kind": "probs", "seed": 5, "levels": 9, "power": 1, "bits": 8, "zero_rows": [1]})
    assert probs.sum(-1).tolist() == [[1.0, 0.0, 1.0]] * 2
    causal = make_array([3, 3], {"kind": "numbers", "seed": 5, "low": -8, "high": 8, "shift": 2, "causal": True})
    assert np.isneginf(causal[0]).tolist() == [False, True, True]
