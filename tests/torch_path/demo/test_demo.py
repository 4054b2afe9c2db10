"""The demo runs from teacher to pictures, through the commands that a user types; here with hardly any training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the demo draws pictures")
pytest.importorskip("sklearn", reason="the demo's digits come with scikit-learn")
pytest.importorskip("transformers", reason="the demo's teacher is a model of transformers")
pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
pytest.importorskip("onnxscript", reason="export needs onnxscript")

from typer.testing import CliRunner

from shd_torch.cli import load_app
from shd_torch.demo.page import COMPARISONS, render_page, summarise
from shd_torch.demo.students import METHODS, Outcome

DOCS = Path(__file__).resolve().parents[3] / "docs" / "demo"
PICTURES = ("accuracy", "alphas", "losses")


@pytest.mark.slow
@pytest.mark.nightly  # test_commands and the examples run the same commands
def test_demo_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    few = ["--labels", "50", "--seeds", "1", "--steps", "2", "--teacher-epochs", "1", "--workers", "1"]
    result = CliRunner().invoke(load_app(), ["demo", "--out", str(out), *few])
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in summary["accuracy"]] == list(map(str, METHODS))
    assert all(0 <= row["mean"] <= 1 for row in summary["accuracy"])
    assert summary["squeezed_start"]["heads"] < summary["squeezed_start"]["teacher_heads"]
    for picture in PICTURES:
        assert (out / f"{picture}.png").read_bytes().startswith(b"\x89PNG"), picture


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "student").mkdir()
    result = CliRunner().invoke(load_app(), ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "--out must be a new folder" in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == [tmp_path / "student"]


def test_comparisons_are_paired_by_seed() -> None:
    """Seeds that differ by far more than the methods do: the interval of the difference does not see it."""
    seeds = np.array([0.2, 0.5, 0.8])
    outcomes = [
        Outcome(method, 50, seed, float(level + 0.1 * method.shd), {})
        for seed, level in enumerate(seeds)
        for method in METHODS
    ]
    rows = {row["name"]: row for row in summarise(outcomes[::-1])["gain"]}
    assert rows.keys() == COMPARISONS.keys()
    added = rows["adding SHD to KD, random start"]
    assert added["mean"] == pytest.approx(0.1)
    assert added["interval"] == pytest.approx(0.0, abs=1e-12)
    accuracy = {row["name"]: row for row in summarise(outcomes)["accuracy"]}[str(METHODS[0])]
    # 4.303 standard errors of three values whose standard deviation is 0.3.
    assert (accuracy["mean"], accuracy["interval"]) == pytest.approx((0.5, 4.3027 * 0.3 / 3**0.5), rel=1e-4)


def test_the_page_in_docs_is_that_of_its_results() -> None:
    found = json.loads((DOCS / "results.json").read_text(encoding="utf-8"))
    assert (DOCS / "README.md").read_text(encoding="utf-8") == render_page(found)
    for picture in PICTURES:
        assert (DOCS / f"{picture}.png").is_file()
