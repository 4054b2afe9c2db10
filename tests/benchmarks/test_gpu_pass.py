"""What waits for a GPU runs through without one, within its time, and goes on where it stopped."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the kernels are PyTorch's")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  (after the skip)

from benchmarks import gpu_pass, gpu_pieces  # noqa: E402  (after the path)

MACHINE = {"device": "a card", "capability": [9, 0]}
NAMES = ("kernels", "loss", "tests")


class Call:
    """Calls of fake pieces of two cases on a fake clock: ``plan`` says what each does, and how long it would take."""

    def __init__(self, out: Path, earlier: Path | None = None) -> None:
        self.out, self.earlier, self.now = out, earlier or out, 0.0
        self.plan: dict[str, tuple[str, float]] = {}
        self.tried: list[str] = []

    def start(self, piece: str, seconds: float) -> tuple[str, str]:
        does, takes = self.plan.get(piece, ("passes", 60.0))

        def case(name: str) -> dict[str, Any]:
            self.tried.append(f"{piece} {name}")
            if does == "fails" and name == "a":
                raise RuntimeError("out of memory")
            if does == "hangs" and name == "a":
                raise SystemExit  # here the process ends
            return {"passed": True, "ms": 1.0}

        self.now += min(takes, seconds)
        if does == "crashes":
            return "crashed", "no module\n"
        try:
            gpu_pass.run_cases(piece, {name: lambda name=name: case(name) for name in "ab"}, self.out)  # type: ignore[misc]
        except SystemExit:
            return "timed out", ""
        return ("ended" if takes <= seconds else "timed out"), ""

    def run(self, machine: dict[str, Any] | None = None, seconds: float = 540.0) -> bool:
        started, self.tried = self.now, []
        pieces = {name: gpu_pieces.Piece(540.0, lambda sizes: {}) for name in NAMES}
        keywords: dict[str, Any] = {"seconds": seconds, "earlier": self.earlier, "clock": lambda: self.now}
        done = gpu_pass.run_call(pieces, self.out, machine or MACHINE, self.start, **keywords)
        assert self.now - started <= seconds
        return done

    @property
    def statuses(self) -> list[str]:
        return [gpu_pass.read(name, self.out)["status"] for name in NAMES]


@pytest.mark.parametrize(
    ("does", "status", "first", "second"),
    [
        ("fails", "failed", ["a", "b"], ["a"]),
        ("hangs", "timed out", ["a"], ["b", "a"]),  # what was never begun goes first
        ("crashes", "crashed", [], ["a", "b"]),
    ],
)
def test_what_did_not_pass_is_repeated_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], does: str, status: str, first: list[str], second: list[str]
) -> None:
    call = Call(tmp_path)
    call.plan["loss"] = (does, 60.0)
    assert not call.run()
    assert call.statuses == ["passed", status, "passed"]
    assert [name for name in call.tried if name.startswith("loss")] == [f"loss {name}" for name in first]
    table = capsys.readouterr().out.split("the next call\n")[1].splitlines()
    assert max(map(len, table)) <= 80
    assert table[0].endswith("nothing")
    assert table[1].startswith(f"loss     {status}")
    call.plan.clear()
    assert call.run()
    assert call.tried == [f"loss {name}" for name in second]
    assert call.run()
    assert call.tried == []


def test_a_call_never_outlasts_its_time(tmp_path: Path) -> None:
    """A piece that outlasts its time is ended and not done, though all of its cases passed."""
    call = Call(tmp_path)
    call.plan |= {"kernels": ("passes", 400.0), "loss": ("passes", 200.0)}
    assert not call.run()
    assert call.statuses == ["passed", "timed out", "not reached"]
    assert call.now == 540.0 - gpu_pass.MARGIN
    assert not any(path.suffix != ".json" for path in tmp_path.iterdir())
    assert not call.run(seconds=gpu_pass.MARGIN + gpu_pass.LEAST - 1)
    assert call.tried == []


def test_a_piece_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    command = ["sh", "-c", f"(sleep 2; touch {mark}) & sleep 60"]
    started = time.monotonic()
    assert gpu_pass.start_process(command, "kernels", 0.5) == ("timed out", "")
    assert time.monotonic() - started < 30
    time.sleep(2.5)
    assert not mark.exists()
    assert gpu_pass.start_process(["sh", "-c", "echo no module >&2; exit 3"], "kernels", 9) == (
        "crashed",
        "no module\n",
    )


def test_only_what_the_same_machine_found_counts(tmp_path: Path) -> None:
    """A call goes on from results that were brought back, but not from those of another card or of other code."""
    first = Call(tmp_path / "first")
    first.plan["loss"] = ("fails", 60.0)
    assert not first.run()
    second = Call(tmp_path / "second", earlier=tmp_path / "first")
    assert second.run()
    assert second.tried == ["loss a"]
    assert second.run({"device": "another"})
    assert len(second.tried) == 6


def test_after_an_error_of_the_device_nothing_else_is_tried(tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpu_pass.write(tmp_path, "loss", {"cases": {}})
    with pytest.raises(SystemExit, match="illegal memory access"):
        gpu_pass.run_cases("loss", {"a": broken, "b": lambda: {"passed": True}}, tmp_path)
    assert gpu_pass.read("loss", tmp_path)["cases"]["b"] == {}


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ({512: 3.0, 2048: 2.0, 8192: 2.0}, 2048),
        ({512: 1.0, 2048: 4.0, 8192: 2.0}, 8192),  # all that are longer pay
        ({512: 1.0, 2048: 1.0, 8192: 4.0}, None),
        (None, "unwritten"),  # they are wrong
    ],
)
def test_from_where_on_the_kernels_pay(tmp_path: Path, kernels: dict[int, float] | None, expected: Any) -> None:
    times = {
        "triton": kernels or dict.fromkeys((512, 2048, 8192), 1.0),
        "sdpa": dict.fromkeys((512, 2048, 8192), 2.5),
    }
    cases = {
        f"{way} {form} {length}": {"ms": ms}
        for way, by_length in times.items()
        for form in ("factored", "coded")
        for length, ms in by_length.items()
    }
    status = "failed" if kernels is None else "passed"
    gpu_pass.write(tmp_path, "kernels", {"status": status})
    gpu_pass.write(tmp_path, "loss", {"status": "passed", "machine": MACHINE, "cases": cases})
    gpu_pass.write_measured(tmp_path, gpu_pieces.GPU)
    devices = gpu_pass.read("measured", tmp_path).get("devices", [{"triton_from": "unwritten"}])
    assert devices[-1]["triton_from"] == expected


@pytest.mark.parametrize(
    ("backend", "passed"),
    [({"backend": "dense"}, True), ({"backend": "sdpa", "product_dtype": torch.float16}, False)],
    ids=["subtracted first", "rounded first"],
)
def test_kernels_are_judged_near_the_teacher(
    monkeypatch: pytest.MonkeyPatch, backend: dict[str, Any], passed: bool
) -> None:
    import shd_torch

    real = shd_torch.attention_kl
    monkeypatch.setattr(shd_torch, "attention_kl", lambda *given, **keywords: real(*given, **(keywords | backend)))
    for form in ("padding", "16 heads to 6"):
        facts = gpu_pieces.compare_kernels(gpu_pieces.REHEARSAL, "float16", **gpu_pieces.FORMS[form])
        assert [facts[f"KL {name}"]["KL"] for name in gpu_pieces.NOISE] == pytest.approx([1.0, 0.03, 0.001], rel=0.3)
        assert facts["passed"] == facts["KL 0.001"]["passed"] == passed
        assert facts["KL 1"]["passed"]


def test_ways_of_the_loss_compute_one() -> None:
    """The rivals' figures count only if they compute the same gradients."""
    for form in ("factored", "coded"):
        loss = gpu_pieces.make_loss(gpu_pieces.REHEARSAL, form, 32, 2)
        (_, *expected), *others = (loss(way) for way in ("dense", "sdpa", "eager"))
        for _, *gradients in others:
            torch.testing.assert_close(gradients, expected)


@pytest.mark.slow
@pytest.mark.nightly  # tests/torch_path/kernels interprets the same programs
def test_the_rehearsal(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the kernels are interpreted by Triton")
    pytest.importorskip("transformers", reason="its decoders are timed")
    command = [sys.executable, "-m", "benchmarks.gpu_pass", "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(path.read_text()) for path in sorted((tmp_path / "rehearsal").iterdir())]
    assert {each["piece"]: each["status"] for each in found} == dict.fromkeys(sorted(gpu_pieces.PIECES), "passed")


def test_what_is_packed_is_complete_and_brings_no_pytorch() -> None:
    found = gpu_pass.needed(["pytest", "xxhash"])
    assert {"pytest", "xxhash", "pluggy", "iniconfig", "packaging"} <= found
    pytest.importorskip("accelerate", reason="it requires PyTorch")
    assert not gpu_pass.needed(["accelerate"]) & set(gpu_pass.THERE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so() -> None:
    with pytest.raises(SystemExit, match=r"needs a CUDA device; .* try --rehearse"):
        gpu_pass.main([])
