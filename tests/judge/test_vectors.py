"""Reading vector files: schemas, recipes, rounding, and files that are not for this judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shd_ref.conformance import OUTPUTS, judge
from shd_ref.conformance.laws import LAWS
from shd_ref.conformance.specification import DTYPES, load_sentences, vectors_folder
from shd_ref.conformance.vectors import VectorError, load_cases, make_array, round_to

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "specs" / "schemas"


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def schema_errors(document: Any, schema: str) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(load(SCHEMAS / schema))
    return [error.message for error in validator.iter_errors(document)]


def test_vector_files_follow_their_schema(vectors: Path) -> None:
    files = [*vectors.glob("*.json"), *vectors_folder().glob("*.json")]
    assert files
    for path in files:
        document = load(path)
        assert schema_errors(document, "vectors.schema.json") == [], path
        assert tuple(document["outputs"]) == OUTPUTS[document["operation"]]
        assert path.stem == document["operation"]
        assert all(case["id"].startswith(document["operation"] + "/") for case in document["cases"])


def test_schema_refuses(vectors: Path) -> None:
    document = load(vectors / "merge_plan.json")
    valid, invalid = document["cases"]
    for change in (
        {"code": "heads-exceed"},
        {"spec": []},
        {"id": "merge_plan five"},
        {"compare": {"plan": {"rule": "close"}}},
        {"inputs": {"x": {"shape": [1], "recipe": {"kind": "random", "seed": 1}}}},
        {"tolerance": 1e-3},
    ):
        assert schema_errors({**document, "cases": [{**valid, **change}]}, "vectors.schema.json"), change
    assert schema_errors({**document, "cases": [{**invalid, "expected": {"plan": []}}]}, "vectors.schema.json")


def test_report_follows_its_schema(vectors: Path, wrong: Any) -> None:
    report = judge(wrong(solve_alpha=lambda **inputs: 7), vectors=vectors, only=["solve_alpha/*", "law/alpha-*"])
    assert report.failures
    assert schema_errors({"runs": [report.to_json()]}, "report.schema.json") == []


def test_items_name_sentences_of_the_specification(vectors: Path) -> None:
    sentences = load_sentences()
    assert sentences["ALPHA-3"].startswith("`a*` is clipped to [0, 1]")
    assert "rows where `query_mask` is False get 1/2" in sentences["ALPHA-9"]
    assert sentences["GRAD-1"].endswith("where a product with `Q_j = 0` is 0.")
    assert "`mse`: `2 w rho Q_j (r_j - sum_k Q_k r_k)` with `r_j = Q_j - P_j`;" in sentences["GRAD-1"]
    assert all(f"`{name}`" in sentences["LOSS-11"] for name in ("reverse_kl", "js", "mse"))
    for item in (*LAWS, *load_cases(vectors)):
        assert set(item.spec) <= set(sentences), item.id
        assert set(item.operations) <= set(OUTPUTS), item.id
    assert len({law.id for law in LAWS}) == len(LAWS)


def test_withdrawn_cases_do_not_run(vectors: Path) -> None:
    assert "solve_alpha/old" not in {case.id for case in load_cases(vectors)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vectors_version": "2"}, "vectors_version must be '1'; got '2'"),
        ({"cases": [{"id": "merge_plan/x"}]}, "is not a vector file"),
        ({"notes": {}}, "is not a vector file"),
    ],
)
def test_files_for_another_judge(vectors: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    document = {**load(vectors / "merge_plan.json"), **change}
    (tmp_path / "merge_plan.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(VectorError, match=words):
        load_cases(tmp_path)


def test_ids_are_unique_over_files(vectors: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_bytes((vectors / "merge_plan.json").read_bytes())
    with pytest.raises(VectorError, match="merge_plan/five-to-four, merge_plan/too-many more than once"):
        load_cases(tmp_path)


def test_recipes_by_plain_integers() -> None:
    state, draws = 5, []
    for _ in range(24):
        state = (1664525 * state + 1013904223) % 2**32
        draws.append(state >> 16)
    numbers = {"kind": "numbers", "seed": 5, "low": -3, "high": 4, "shift": 2}
    wanted = [(-3 + draw % 8) / 4 for draw in draws]
    assert make_array([2, 3, 4], numbers).reshape(-1).tolist() == wanted
    causal = make_array([2, 3, 4], {**numbers, "causal": True})
    assert np.isneginf(causal[:, 0, 1:]).all()
    assert causal[1, 2, 2] == wanted[12 + 8 + 2]

    probs = make_array([2, 3, 4], {"kind": "probs", "seed": 5, "levels": 5, "power": 2, "bits": 4, "zero_rows": [1]})
    for row in range(6):
        weights = [(draw % 5) ** 2 for draw in draws[4 * row : 4 * row + 4]]
        weights = weights if any(weights) else [1, 0, 0, 0]
        counts = [16 * w // sum(weights) for w in weights]
        for key in [k for k in range(4) if weights[k] > 0][: 16 - sum(counts)]:
            counts[key] += 1
        got = probs.reshape(6, 4)[row].tolist()
        assert got == ([0.0] * 4 if row % 3 == 1 else [count / 16 for count in counts])

    mask = make_array([2, 3, 4], {"kind": "mask", "seed": 5, "true": 2, "of": 3})
    assert mask.reshape(-1).tolist() == [draw % 3 < 2 for draw in draws]
    assert make_array([2, 3], {"kind": "lengths", "lengths": [3, 1]}).tolist() == [[True] * 3, [True, False, False]]
    with pytest.raises(ValueError, match="recipe kind"):
        make_array([1], {"kind": "gauss", "seed": 1})


def test_probs_recipes_are_distributions_of_every_dtype() -> None:
    recipe = {"kind": "probs", "seed": 3, "levels": 16, "power": 2, "bits": 8, "causal": True}
    exact = make_array([2, 3, 9, 9], recipe)
    assert (exact.sum(-1) == 1.0).all()
    for dtype in DTYPES:
        assert (round_to(exact, dtype) == exact).all()


def test_rounding() -> None:
    numbers = np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1e-3, -np.inf, np.nan, 3.4e38])
    rounded = round_to(numbers, "bfloat16")
    assert rounded.dtype == np.float32
    assert rounded[:3].tolist() == [1.0, 1.0, 1 + 2.0**-6]  # ties to even
    assert np.isneginf(rounded[4])
    assert np.isnan(rounded[5])
    torch = pytest.importorskip("torch")
    grid = np.random.default_rng(0).normal(size=1000)
    for dtype in ("float16", "bfloat16"):
        wanted = torch.tensor(grid).float().to(getattr(torch, dtype)).float().numpy()
        np.testing.assert_array_equal(round_to(grid.astype(np.float32), dtype), wanted)
    with pytest.raises(LookupError, match="float8"):
        round_to(numbers, "float8")
