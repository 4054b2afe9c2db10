"""What waits for a GPU runs through without one, within its time, and goes on where it stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels are PyTorch's")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  (after the skip)

from benchmarks import gpu_pieces  # noqa: E402  (after the path)


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
