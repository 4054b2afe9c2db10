"""The numbers that the public codes of recipes give on fixed inputs, made from ``kd_loss`` and a cross entropy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[Any]
Goldens = tuple[dict[str, Array], dict[str, float]]


@pytest.fixture(scope="module")
def goldens(shared_data: Path) -> Goldens:
    folder = shared_data / "loss_goldens"
    if not folder.is_dir():
        pytest.skip("values of the public codes not found: no folder loss_goldens in the shared data")
    with np.load(folder / "inputs.npz") as inputs:
        return dict(inputs), json.loads((folder / "values.json").read_text(encoding="utf-8"))


@pytest.fixture(params=["shd_ref.kd", "shd_torch.kd"])
def kd(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """An operation of either implementation by name, on NumPy arrays."""
    if request.param == "shd_torch.kd":
        pytest.importorskip("torch", reason="the PyTorch binding needs torch")
    module: ModuleType = pytest.importorskip(request.param)

    def give(value: Any) -> Any:
        if isinstance(value, list):
            return [give(item) for item in value]
        if isinstance(value, np.ndarray) and request.param == "shd_torch.kd":
            return pytest.importorskip("torch").from_numpy(value)
        return value

    def run(operation: str, *arguments: Any, **keywords: Any) -> Any:
        return getattr(module, operation)(
            *map(give, arguments), **{name: give(value) for name, value in keywords.items()}
        )

    return run


def cross_entropy(logits: Array, labels: Array) -> float:
    rows = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counted = labels >= 0
    return float(-np.take_along_axis(rows, np.maximum(labels, 0)[..., None], -1)[..., 0][counted].mean())


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_image_classifier_kd(goldens: Goldens, kd: Callable[..., Any], temperature: float) -> None:
    inputs, values = goldens
    term = kd(
        "kd_loss",
        inputs["image/teacher_logits"],
        inputs["image/student_logits"],
        divergence="cross_entropy",
        temperature=temperature,
    )
    wanted = values[f"cls_KD kd temp={temperature} alpha=.5 (kd term; ori weight 0.5)"]
    assert 0.5 * float(term) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_deit_soft(goldens: Goldens, kd: Callable[..., Any], temperature: float) -> None:
    inputs, values = goldens
    token = inputs["image/distillation_token_logits"]
    term = kd("kd_loss", inputs["image/teacher_logits"], token, temperature=temperature, reduction="sum")
    hard = cross_entropy(inputs["image/student_logits"], inputs["image/labels"])
    wanted = values[f"deit soft alpha=.5 tau={temperature}"]
    assert 0.5 * hard + 0.5 * float(term) / token.size == pytest.approx(wanted, abs=1e-9)


def test_babyllama(goldens: Goldens, kd: Callable[..., Any]) -> None:
    inputs, values = goldens
    student, labels = inputs["babyllama/student_logits"], inputs["babyllama/labels"]
    teachers = [inputs["babyllama/teacher_logits_1"], inputs["babyllama/teacher_logits_2"]]
    term = float(kd("kd_loss", kd("mean_logits", teachers), student, temperature=2.0, reduction="batch_mean"))
    hard = cross_entropy(student[:, :-1], labels[:, 1:])
    assert hard == pytest.approx(values["babyllama student CE (HF shift)"], abs=1e-9)
    assert term == pytest.approx(values["babyllama kd term T=2 (batchmean: / B only)"], abs=1e-9)
    assert 0.5 * hard + 0.5 * term == pytest.approx(values["babyllama loss alpha=.5"], abs=1e-9)


def test_language_model_kd(goldens: Goldens, kd: Callable[..., Any]) -> None:
    inputs, values = goldens
    student, labels = inputs["minillm/pt_student_logits"], inputs["minillm/pt_labels"]
    term = kd(
        "kd_loss",
        inputs["minillm/pt_teacher_logits"],
        student,
        divergence="cross_entropy",
        loss_mask=labels != -100,
    )
    hard = cross_entropy(student, labels)
    # The original computes in float32.
    assert float(term) == pytest.approx(values["minillm ds_loss"], abs=1e-6)
    assert 0.5 * hard + 0.5 * float(term) == pytest.approx(values["minillm pt_loss"], abs=1e-6)
