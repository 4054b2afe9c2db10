"""The benchmark of the GPU runs through without one, and says what it lacks."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "attention_kl_cuda.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_kl_cuda", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    script.main()


def test_every_form_and_rival_on_the_processor(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--device cpu --dtype float32 --lengths 64 --backends dense sdpa triton eager"
    shape = "--rounds 2 --batch 1 --heads 2 --width 8"
    run(script, monkeypatch, *options.split(), *shape.split(), "--output", str(tmp_path / "figures.json"))
    report = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert report["machine"]["device"] == "cpu"
    rows = {(row["form"], row["name"]): row for row in report["rows"]}
    assert set(rows) == {(f, n) for f in ("factored", "coded") for n in ("plain", "dense", "sdpa", "triton", "eager")}
    for (_, name), row in rows.items():
        if name == "triton":
            assert "need a CUDA device" in row["refused"]
        else:
            assert row["time_ratio"] > 0
    assert "the kernels do not pay, or were not measured" in capsys.readouterr().out


def test_ways_compute_one_loss(script: ModuleType) -> None:
    """The rivals' figures count only if they compute the same."""
    step = script.Step(torch.device("cpu"), torch.float32, 33, "factored", batch=2, heads=2, members=2, width=8)
    found = [step.run_with(loss_of) for loss_of in script.losses(["dense", "sdpa", "eager"], "exact").values()]
    torch.testing.assert_close(found, [found[0]] * 3)


def test_without_a_cuda_device_it_says_so(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"--device cuda needs a CUDA device; torch .* finds none"):
        run(script, monkeypatch)


def test_the_plan_is_read_at_its_lengths(script: ModuleType) -> None:
    assert script.plan_ratio("sdpa", 2048) == pytest.approx(1 + 1.8 / 0.55)
    assert script.plan_ratio("plain", 2048) == 1.0
    assert script.plan_ratio("sdpa", 64) is None
    assert script.plan_ratio("dense", 2048) is None
