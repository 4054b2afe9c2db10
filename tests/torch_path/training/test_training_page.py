"""The examples of docs/training.md run as written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the examples train Hugging Face students")
pytest.importorskip("accelerate", reason="one example uses accelerate")
pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
pytest.importorskip("onnxscript", reason="export needs onnxscript")

from support.binding.trainer_cases import make_model, make_samples, pad, write_cache  # noqa: E402

import shd_torch  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs" / "training.md"
LOOP, TRAINER, LIGHTNING, LIVE, FREE, FREE_TRAINER = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
)


@pytest.fixture(scope="module")
def whole_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``shd precompute --logits topk --hidden 1,2`` writes."""
    return write_cache(tmp_path_factory.mktemp("whole"), logits="topk", logits_top=8, hidden=(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("example", [FREE, FREE_TRAINER], ids=["loop", "trainer"])
def test_example_trains_without_a_teacher(example: str, whole_cache: Path, tmp_path: Path) -> None:
    names = run_example(example, whole_cache, tmp_path)
    if "trainer" in names:
        logged = names["trainer"].state.log_history[0]
        assert min(logged[f"{term}_loss"] for term in ("shd", "kd", "hidden")) > 0
    else:
        assert float(names["kd"].detach()) > 0 < float(names["states"].detach())


@pytest.mark.slow
@pytest.mark.parametrize("example", [LOOP, TRAINER, LIVE], ids=["loop", "trainer", "live"])
def test_example_trains(example: str, trainer_cache: Path, tmp_path: Path) -> None:
    names = run_example(example, trainer_cache, tmp_path)
    if "trainer" in names:
        assert names["trainer"].state.log_history[0]["shd_loss"] > 0
    else:
        assert all(torch.isfinite(term) for term in names["terms"].values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:lightning")  # advice on workers of the loader
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # lightning's own
def test_lightning_example_trains(trainer_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="this example uses lightning")
    names = run_example(LIGHTNING, trainer_cache, tmp_path)
    logged = names["module"].trainer.callback_metrics
    assert set(logged) == {"base_loss", "shd_loss", "shd_loss_layer_0", "shd_loss_layer_1"}
    layers = sum(logged[f"shd_loss_layer_{layer}"].item() for layer in (0, 1))
    assert logged["shd_loss"].item() == pytest.approx(layers, rel=1e-5)
    assert names["module"].trainer.global_step == 2


def run_example(example: str, cache: Path, folder: Path) -> dict[str, Any]:
    """The names that an example leaves, after a look at whether the student learned."""
    student = make_model(2, seed=2)
    before = {name: value.detach().clone() for name, value in student.named_parameters()}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    )
    names: dict[str, Any] = {
        "torch": torch,
        "arguments": arguments,
        "joined": shd_torch.SupervisedDataset(make_samples(), cache),
        "loader": torch.utils.data.DataLoader(make_samples(), 4, collate_fn=pad),
        "model": make_model(4, seed=1),
        "optimizer": torch.optim.SGD(student.parameters(), 0.1),
        "pad": pad,
        "student": student,
    }
    exec(compile(example, PAGE.name, "exec"), names)
    trained = names["trainer"].model if "trainer" in names else student
    changed = [name for name, value in trained.named_parameters() if not torch.equal(value, before[name])]
    assert any("q_proj" in name for name in changed)
    return names
