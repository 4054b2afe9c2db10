"""Rivals that merge maps against their divergence, on small models; gradients of all reach the student alone."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.binding.architectures import make_inputs
from support.binding.models import hf_model
from torch import Tensor

from shd_torch.maps import softmax, squeeze_heads, value_outputs
from shd_torch.recipes import language_kd

pytest.importorskip("transformers", reason="the two models are from transformers")
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks.study.rivals import RIVALS, ForwardPass, Rival, RivalTerm, TeacherOutputs, make_rival  # noqa: E402  (a folder of the repository, in no wheel)

BATCH = make_inputs("llama")
COUNTED = BATCH["attention_mask"].bool()
MERGES = ("shd", "hard", "constant", "mean", "as_printed")


def make_model(width: int, heads: int, layers: int) -> Any:
    model = hf_model("llama", hidden_size=width, num_attention_heads=heads, num_hidden_layers=layers)
    with torch.no_grad():
        for layer in model.model.layers:  # maps that differ from one another
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.v_proj.weight.mul_(20)
    return model


@pytest.fixture(scope="module")
def teacher() -> Any:
    return make_model(32, 4, 4)


def run(rival: Rival, student: Any) -> tuple[ForwardPass, TeacherOutputs]:
    outputs = rival.teach(**BATCH)
    with rival.capture(student, outputs) as own_pass:
        student(**BATCH)
    return own_pass, outputs


def taught(teacher: Any, name: str, heads: int = 2, **options: Any) -> tuple[Rival, ForwardPass, TeacherOutputs]:
    """A rival, and one pass of a student of two layers with it."""
    student = make_model(16, heads, 2)
    rival = make_rival(name, teacher, student, BATCH, **options)
    return rival, *run(rival, student)


def rows_mean(values: Tensor) -> Tensor:
    """The mean over counted rows of ``(B, H, L)``, then the sum over heads."""
    return values.movedim(1, -1)[COUNTED].mean(0).sum()


def student_maps(own_pass: ForwardPass) -> list[Tensor]:
    return [own_pass.captured.probs[layer] for layer in (0, 1)]


def attention_maps(call: Any) -> Tensor:
    return softmax(call.compute_logits(), check=False)


def teacher_maps(outputs: TeacherOutputs) -> list[Tensor]:
    """Student layers 0 and 1 of 2 meet teacher layers 1 and 3 of 4."""
    return [attention_maps(outputs.calls[layer]) for layer in (1, 3)]


def merged_maps(teacher: Any, outputs: TeacherOutputs, name: str) -> list[Tensor]:
    keywords = {"alpha_rule": "as_printed"} if name == "as_printed" else {"strategy": name}
    found = []
    for layer, maps in zip((1, 3), teacher_maps(outputs), strict=True):
        value = outputs.calls[layer].value
        assert value is not None
        projection = teacher.model.layers[layer].self_attn.o_proj.weight.detach().mT
        products = value_outputs(value, projection)
        found.append(squeeze_heads(maps, products, 2, query_mask=COUNTED, check=False, **keywords).probs)
    return found


@pytest.mark.parametrize("name", MERGES)
def test_merged_maps_are_taught_by_their_divergence(teacher: Any, name: str) -> None:
    rival, own_pass, outputs = taught(teacher, name)
    merged = merged_maps(teacher, outputs, name)
    kls = (
        torch.where(p > 0, p * (p / q).log(), 0.0).sum(-1)
        for p, q in zip(merged, student_maps(own_pass), strict=True)
    )
    torch.testing.assert_close(rival(own_pass, outputs, loss_mask=COUNTED), sum(map(rows_mean, kls)))


@pytest.mark.parametrize("name", RIVALS)
def test_gradients_reach_the_student_alone(teacher: Any, name: str) -> None:
    student = make_model(16, 2, 2)
    rival = make_rival(name, teacher, student, BATCH)
    outputs = rival.teach(**BATCH)
    with rival.capture(student, outputs) as own_pass:
        logits = student(**BATCH).logits
    value = rival(own_pass, outputs, loss_mask=COUNTED)
    labels = BATCH["input_ids"].masked_fill(~COUNTED, -100)
    term = RivalTerm(own_pass.captured, (), 0.5, value=value)
    terms = language_kd(logits, labels, teacher(**BATCH).logits.detach(), shift=True, shd=term)
    assert terms["shd"].weight == 0.5
    terms.total.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    query = student.model.layers[1].self_attn.q_proj.weight.grad
    if name == "attention_copy":
        assert query is None
    else:
        assert query.abs().max() > 0
        assert all(parameter.grad.abs().max() > 0 for parameter in rival.parameters() if parameter.ndim > 1)
