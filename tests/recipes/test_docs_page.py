"""The examples of docs/recipes.md run as written, and its table names what there is."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.binding.trainer_cases import make_model, make_samples, pad, write_cache

import shd_torch
import shd_torch.recipes

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
TRAINER, BETA, MINILLM, DIFFUSION = re.findall(r"executed by .*?```python\n(.*?)```", PAGE, flags=re.DOTALL)


class Denoiser(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Any, t: Any) -> Any:
        return self.layer(x)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> shd_torch.SupervisedDataset:
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason="a cache of a Hugging Face teacher is made")
    return shd_torch.SupervisedDataset(
        make_samples(), write_cache(tmp_path_factory.mktemp("recipes"), logits="float16")
    )


def test_the_trainer_takes_a_recipe(joined: shd_torch.SupervisedDataset, tmp_path: Path) -> None:
    import transformers

    student = make_model(2, seed=2)
    names: dict[str, Any] = {
        "joined": joined,
        "arguments": transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
        ),
        "pad": pad,
        "student": student,
    }
    exec(compile(TRAINER, "recipes.md", "exec"), names)
    logged = names["trainer"].state.log_history[0]
    assert {"cross_entropy_loss", "kd_loss", "kd_weight", "shd_loss", "base_loss"} <= set(logged)
    assert logged["kd_weight"] == pytest.approx(0.7)


def test_beta_is_chosen(joined: shd_torch.SupervisedDataset, capsys: pytest.CaptureFixture[str]) -> None:
    student = make_model(2, seed=2)
    before = [value.detach().clone() for value in student.parameters()]
    names: dict[str, Any] = {
        "joined": joined,
        "optimizer": torch.optim.SGD(student.parameters(), 0.1),
        "pad": pad,
        "student": student,
        "teacher": make_model(4, seed=1),
    }
    exec(compile(BETA, "recipes.md", "exec"), names)
    assert names["beta"] > 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "term",
        "cross_entropy",
        "kd",
        "shd",
    ]
    assert all(not torch.equal(old, new) for old, new in zip(before, student.parameters(), strict=True))


def test_minillm_trains() -> None:
    torch.manual_seed(0)
    student = make_model(2, seed=2)
    before = [value.detach().clone() for value in student.parameters()]
    prompts = torch.tensor([[0, 0, 5, 7], [9, 4, 6, 8]])
    names: dict[str, Any] = {
        "optimizer": torch.optim.SGD(student.parameters(), 0.1),
        "pretraining": pad(make_samples()),
        "prompts": {"input_ids": prompts, "attention_mask": (prompts != 0).long()},
        "student": student,
        "teacher": make_model(4, seed=1),
    }
    exec(compile(MINILLM, "recipes.md", "exec"), names)
    terms = names["terms"]
    assert list(terms) == ["policy", "reverse_kl", "shd", "pretraining_cross_entropy", "pretraining_kd"]
    assert terms.total.isfinite()
    assert all(not torch.equal(old, new) for old, new in zip(before, student.parameters(), strict=True))


def test_diffusion_trains() -> None:
    student, teacher = Denoiser(), Denoiser()
    names: dict[str, Any] = {"x0": torch.rand(3, 2, 4, 4) * 2 - 1, "denoiser": student, "teacher_denoiser": teacher}
    exec(compile(DIFFUSION, "recipes.md", "exec"), names)
    assert list(names["terms"]) == ["mse", "bound", "kd"]
    assert student.layer.weight.grad is not None
    assert teacher.layer.weight.grad is None
