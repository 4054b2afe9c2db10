"""The dozen chooses on validation, reports on test, pairs seeds, and goes on where it stopped."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
for package in ("matplotlib", "networkx", "rich", "scipy", "transformers"):
    pytest.importorskip(package, reason="the study needs the extras 'plot', 'oracles' and 'hf'")

PROTOCOL = """
seeds = [0, 1, 2]
fresh_seeds = [6, 7, 8]
first_seed = 100
final_seed = 101
growth = [2, 4]
betas = [0.1]
order = ["scores toy", "compare toy", "fresh toy", "curves toy", "betas toy", "compare absent"]
[arms.kd]
method = "base"
[arms.shd]
method = "shd"
[tasks.toy]
kind = "language"
steps = 30
batch = 1
measure = "loss"
start = "random"
settings = {}
kd = { kd_weight = [0.5, 1.0], rate = [1.0, 2.0] }
term = { kd_weight = [1.0], rate = [1.0, 2.0] }
weights = [0.1, 0.3]
[[comparisons]]
name = "toy"
question = "?"
task = "toy"
arm = "shd"
baseline = "kd"
[[comparisons]]
name = "absent"
question = "?"
task = "toy"
arm = "kd"
baseline = "shd"
"""


@pytest.fixture(autouse=True)
def importable() -> Iterator[None]:
    sys.path.append(str(ROOT))
    yield
    sys.path.remove(str(ROOT))


def test_a_toy_comparison_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import dozen

    @dataclass
    class Toys:
        kd: float
        is_shd: bool
        evaluate: Any = None

    class Toy:
        teacher_loss, windows = 0.5, torch.tensor([[0, 1, 0, 1]])
        valid = test = windows

        def __init__(self, *_: Any) -> None:
            self.data = torch.zeros(1)

        def course(self, arm: Any, _: int) -> Any:
            return Toys(arm.options["kd_weight"], arm.options["method"] == "shd")

    made = []

    def train(course: Any, *, beta: float, rate: float, steps: int, seed: int, marks: Any = (), **_: Any) -> Any:
        if steps == dozen.PACE_STEPS:
            return {"step_seconds": 0.15 if course.is_shd else 0.1}
        if len(made) == 7:
            made.append(None)
            raise KeyboardInterrupt
        made.append((course.is_shd, steps, seed))
        # Validation prefers rate 2 and, once the training is whole, a weight of .1 or KD 1; the test set does not.
        late = (0.3 if beta == 0.3 else -0.1) if steps >= 30 else 0.0
        valid = 3.0 - rate + late - course.kd
        # Seeds differ by 10; the term is worth 1, .1 more or less by seed; more steps help KD up to 60.
        gain = (1.0 + 0.1 * (seed % 3 - 1)) * course.is_shd + (0.4 if steps == 45 else 0.7 if steps == 60 else 0.0)
        test = 10.0 * seed + 5.0 * (rate - 2.0) ** 2 - gain + 100.0 * (rate == 1.0) - 9.0 * (beta == 0.3)
        figures = {"valid_loss": valid, "test_loss": test}
        curve = {str(mark): figures for mark in (*marks, steps)}
        return {**figures, "start": f"{seed} {steps}", "data": "", "curve": curve, "step_seconds": 0.1}

    monkeypatch.setattr(dozen, "train", train)
    monkeypatch.setattr(dozen, "load_task", lambda _: Toy)
    (tmp_path / "toy.toml").write_text(PROTOCOL)
    words = ["--protocol", str(tmp_path / "toy.toml"), "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        dozen.main(words)
    lines = (tmp_path / "dozen.jsonl").read_bytes()
    (tmp_path / "dozen.jsonl").write_bytes(lines + lines[:50])  # torn by a kill
    dozen.main(words)
    assert (tmp_path / "dozen.jsonl").read_bytes().startswith(lines)
    runs = [run for run in made if run is not None]
    assert len(runs) == len(set(runs)) + 4 + 4  # tries of one seed apart, no run was made twice
    result = json.loads((tmp_path / "dozen.json").read_text())
    toy = result["compare"]["toy"]
    assert [setting["weight"] for setting in toy["settings"]] == [0.1, 0.0]
    assert [setting["rate"] for setting in toy["settings"]] == [2.0, 2.0]
    assert toy["settings"][1]["kd"] == ["kd_weight", 1.0]
    assert toy["equal steps"]["gains"] == pytest.approx([0.9, 1.0, 1.1])
    # The t quantile of two degrees of freedom times .1 / sqrt(3); unpaired seeds would give thirty times as much.
    assert toy["equal steps"]["half"] == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-5)
    assert toy["equal time"]["steps"] == [30, 45]
    assert toy["equal time"]["mean"] == pytest.approx(0.6)
    assert toy["equal steps"]["holm"] == pytest.approx(2 * toy["equal steps"]["p"])
    assert result["fresh"]["toy"]["agrees"] is True
    assert list(result["curves"]["toy"]) == ["30", "60", "120"]  # the first budget that no longer gains is the last
    assert result["scores"]["toy"]["teacher"] == 0.5
