"""What waits for a GPU runs through without one, goes on where it stopped, and draws the right line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the kernels are PyTorch's")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  (after the skip)

from benchmarks import attention_kl_cuda, gpu_pass  # noqa: E402  (after the path)


@pytest.mark.slow
@pytest.mark.nightly  # tests/torch_path/kernels interprets the same programs
def test_the_rehearsal(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the kernels are interpreted by Triton")
    pytest.importorskip("onnxruntime", reason="a stage times it")
    stages = [stage for stage in gpu_pass.STAGES if stage != "tests"]  # which are these
    command = [sys.executable, "-m", "benchmarks.gpu_pass", *stages, "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all is done\n")
    found = {stage: gpu_pass.read(tmp_path / "rehearsal", stage)["pieces"] for stage in stages}
    assert all(found.values())
    assert not [name for pieces in found.values() for name, facts in pieces.items() if "error" in facts]
    for facts in found["kernels"].values():
        assert max(facts["loss"], facts["dq"], facts["dk"]) < 1e-5
    for facts in found["steps"].values():
        assert {row["name"] for row in facts["rows"] if "refused" not in row} == {"plain", *gpu_pass.REHEARSAL.names}
    (judged,) = found["targets"].values()
    assert judged["met"].keys() == {"step_ratio", "faster_than_eager"}


def test_ways_of_the_loss_compute_one() -> None:
    """The rivals' figures count only if they compute the same."""
    cpu = torch.device("cpu")
    step = attention_kl_cuda.Step(cpu, torch.float32, 33, "factored", batch=2, heads=2, members=2, width=8)
    ways = attention_kl_cuda.losses(["dense", "sdpa", "eager"], "exact").values()
    losses = [step.run_with(loss_of) for loss_of in ways]
    torch.testing.assert_close(losses, [losses[0]] * 3)


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def measure(name: str) -> dict[str, Any]:
        calls.append(name)
        if name == "broken" and calls.count(name) == 1:
            raise RuntimeError("out of memory")
        if name == "absent":
            raise gpu_pass.NotHereError("no such library")
        return {"value": 1}

    def pieces(sizes: Any, out: Path) -> Iterator[gpu_pass.Piece]:
        for name, seconds in (("quick", 1.0), ("broken", 1.0), ("absent", 1.0), ("long", 90.0)):
            yield name, seconds, lambda name=name: measure(name)

    monkeypatch.setitem(gpu_pass.STAGES, "kernels", pieces)
    assert not gpu_pass.run_stages(gpu_pass.REHEARSAL, tmp_path, ["kernels"], 1.0)  # the last piece does not fit
    assert "out of memory" in json.loads((tmp_path / "kernels.json").read_text())["pieces"]["broken"]["error"]
    assert not gpu_pass.run_stages(gpu_pass.REHEARSAL, tmp_path, ["kernels"], 5.0)  # one is not there
    assert calls == ["quick", "broken", "absent", "broken", "absent", "long"]
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert {name: facts["value"] for name, facts in found["pieces"].items()} == dict.fromkeys(
        ("quick", "broken", "long"), 1
    )
    assert found["machine"]["device"] == "cpu"
    found["machine"]["device"] = "another"
    (tmp_path / "kernels.json").write_text(json.dumps(found))
    before = (tmp_path / "kernels.json").read_bytes()
    with pytest.raises(SystemExit, match="name another --out"):
        gpu_pass.run_stages(gpu_pass.REHEARSAL, tmp_path, ["kernels"], 1.0)
    assert (tmp_path / "kernels.json").read_bytes() == before


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({512: 3.0, 1024: 2.0, 2048: 2.0}, {512: 2.0, 1024: 3.0, 2048: 3.0}, 1024),
        ({512: 1.0, 1024: 4.0, 2048: 2.0}, {512: 2.0, 1024: 3.0, 2048: 3.0}, 2048),  # all that are longer pay
        ({512: 1.0, 1024: 1.0, 2048: 4.0}, {512: 2.0, 1024: 3.0, 2048: 3.0}, None),
        ({512: 1.0, 1024: 1.0, 2048: None}, {512: 2.0, 1024: 3.0, 2048: 3.0}, None),  # refused
    ],
)
def test_from_where_on_the_kernels_pay(
    ours: dict[int, float | None], theirs: dict[int, float], expected: int | None
) -> None:
    rows = [
        {"form": form, "length": length, "name": name, **({} if ratio is None else {"time_ratio": ratio})}
        for form in ("factored", "coded")
        for name, ratios in (("triton", ours), ("sdpa", theirs))
        for length, ratio in ratios.items()
    ]
    assert gpu_pass.find_threshold(rows) == expected


def test_what_is_packed_is_complete_and_brings_no_pytorch() -> None:
    found = gpu_pass.needed(["pytest", "xxhash"])
    assert {"pytest", "xxhash", "pluggy", "iniconfig", "packaging"} <= found
    pytest.importorskip("accelerate", reason="it requires PyTorch")
    assert not gpu_pass.needed(["accelerate"]) & set(gpu_pass.THERE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so() -> None:
    with pytest.raises(SystemExit, match=r"needs a CUDA device; .* try --rehearse"):
        gpu_pass.main([])
