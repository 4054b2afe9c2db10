"""The demo runs from teacher to pictures, through the commands that a user types; here with hardly any training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the demo draws pictures")
pytest.importorskip("scipy", reason="the demo computes intervals")
pytest.importorskip("sklearn", reason="the demo's digits come with scikit-learn")
pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
pytest.importorskip("onnxscript", reason="export needs onnxscript")

from shd_torch.demo.run import run_demo
from shd_torch.demo.students import METHODS


@pytest.mark.slow
def test_demo_runs(tmp_path: Path) -> None:
    summary = run_demo(tmp_path, num_labels=(50,), seeds=1, steps=2, teacher_epochs=1, workers=1)
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["seeds"] == 1
    assert [row["method"] for row in summary["rows"]] == list(METHODS)
    assert all(0 <= row["accuracy"] <= 1 for row in summary["rows"])
    for picture in ("accuracy", "maps", "alphas", "losses"):
        assert (tmp_path / f"{picture}.png").read_bytes().startswith(b"\x89PNG"), picture
