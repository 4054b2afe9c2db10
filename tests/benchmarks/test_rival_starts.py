"""Rival starts of the benchmarks: each is exact where its idea is the right one."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.shrink.models import logits_of, make_data, make_teacher
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.shrink.rivals import RIVALS, shrink

FAMILIES = ["llama", "qwen3", "gpt2", "bert", "vit", "dinov2"]


def heads_of(teacher: Any, name: str, part: str) -> list[Tensor]:
    """Rows of queries ``(4, 6, 24)``, or columns of the output ``(4, 6, 24)``, of every layer, as views."""
    names = {
        "llama": ("self_attn.q_proj", "self_attn.o_proj"),
        "bert": ("attention.self.query", "attention.output.dense"),
        "vit": ("attention.q_proj", "attention.o_proj"),
    }[name]
    layers = next(module for module in teacher.modules() if isinstance(module, torch.nn.ModuleList))
    modules = [layer.get_submodule(names[part == "output"]) for layer in layers]
    return [(module.weight.T if part == "output" else module.weight).unflatten(0, (4, 6)) for module in modules]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rival", RIVALS)
def test_all_heads_are_the_teacher(rival: str, name: str) -> None:
    teacher, data = make_teacher(name), make_data(name)
    student = shrink(teacher, data, **RIVALS[rival], align=False).student
    torch.testing.assert_close(logits_of(student, data), logits_of(teacher, data), atol=1e-10, rtol=0.0)


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_kept_heads_lose_nothing_where_the_others_say_nothing(name: str) -> None:
    """Heads 1 and 2 have no output; a head of another length (BERT) keeps its scale."""
    teacher, data = make_teacher(name), make_data(name)
    with torch.no_grad():
        for output in heads_of(teacher, name, "output"):
            output[1:3] = 0.0
    made = shrink(teacher, data, heads=2, plan="balanced", align=False, **RIVALS["kept heads"])
    assert {layer["case"] for layer in made.report["layers"]} == {"picked"}
    torch.testing.assert_close(logits_of(made.student, data), logits_of(teacher, data), atol=1e-10, rtol=0.0)


def test_pooled_heads_lose_nothing_where_they_are_equal() -> None:
    teacher, data = make_teacher("llama"), make_data("llama")
    with torch.no_grad():
        for query in heads_of(teacher, "llama", "query"):
            query[1::2] = query[::2]
        for module in teacher.modules():
            if hasattr(module, "q_proj"):
                module.q_proj.bias.view(4, 6)[1::2] = module.q_proj.bias.view(4, 6)[::2]
    student = shrink(teacher, data, heads=2, plan="balanced", align=False, **RIVALS["mean pooling"]).student
    torch.testing.assert_close(logits_of(student, data), logits_of(teacher, data), atol=1e-10, rtol=0.0)


def test_important_heads_are_those_with_long_outputs() -> None:
    """In BERT any two heads may stay, also of one group."""
    teacher, data = make_teacher("bert"), make_data("bert")
    with torch.no_grad():
        for layer in teacher.bert.encoder.layer:
            for part in (layer.attention.self.value.weight, layer.attention.self.value.bias):
                part[12:] = 0.0  # heads 2 and 3: their outputs are zeros
    student = shrink(teacher, data, heads=2, plan="balanced", align=False, **RIVALS["Minitron importance"]).student
    torch.testing.assert_close(logits_of(student, data), logits_of(teacher, data), atol=1e-10, rtol=0.0)
    kept = shrink(teacher, data, heads=2, plan="balanced", align=False, **RIVALS["kept heads"]).student
    assert float((logits_of(kept, data) - logits_of(teacher, data)).abs().max()) > 1e-3
