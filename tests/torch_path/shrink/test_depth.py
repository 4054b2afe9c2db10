"""Which parts to drop: importance by the gradient of gates, and the splits to measure."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refusal
from support.shrink.models import logits_of, make_data, make_teacher
from torch import Tensor

from shd_torch.shrink import Ranking, choose_splits, rank_layers, shrink

PARTS = {
    "gpt2": ("attn.c_proj", "mlp.act"),
    "bert": ("attention.output.dense", "intermediate.intermediate_act_fn"),
    "llama": ("self_attn.o_proj", None),
}


def square(model: Any, batch: Any) -> Tensor:
    """Any loss with a gradient."""
    out: Tensor = model(**batch).logits.square().mean()
    return out


@pytest.mark.parametrize("name", PARTS)
def test_importance_is_the_slope_of_the_loss(name: str) -> None:
    """Against differences: gates between open and closed, by hand; the model is left as it was."""
    teacher, data = make_teacher(name).train(), make_data(name)
    ranking = rank_layers(teacher, [data], square)
    assert teacher.training
    layers = next(
        part for part in teacher.eval().modules() if isinstance(part, torch.nn.ModuleList) and len(part) == 3
    )
    gates = (lambda g, x, y: g * y), (lambda g, x, y: g * y + (1 - g) * x)
    for path, scores, gate in zip(PARTS[name], (ranking.attention, ranking.activations), gates, strict=True):
        for layer, score in zip(layers, scores if path else (), strict=path is not None):
            values = []
            for g in (1.0 - 1e-3, 1.0 + 1e-3):
                hook = layer.get_submodule(path).register_forward_hook(
                    lambda _, x, y, g=g, gate=gate: gate(g, x[0], y)
                )
                with torch.no_grad():
                    values.append(float(square(teacher, data)))
                hook.remove()
            assert score == pytest.approx(abs(values[1] - values[0]) / 2e-3, rel=1e-3)
    assert all(part.grad is None for part in teacher.parameters())


@pytest.mark.parametrize("name", ["llama", "modernbert"])
def test_a_closed_gate_of_a_gated_ffn_is_what_shrink_has_in_its_place(name: str) -> None:
    teacher, data = make_teacher(name), make_data(name)
    student = shrink(teacher, data, drop_activations=[0, 1, 2], align=False).student
    gates, handles = torch.ones(3, dtype=torch.float64, requires_grad=True), []
    blocks = [[part for path, part in model.named_modules() if path.endswith("mlp")] for model in (teacher, student)]
    for gate, block, linear in zip(gates, *blocks, strict=True):
        change = lambda _, x, y, gate=gate, linear=linear: gate * y + (1 - gate) * linear(x[0])  # noqa: E731
        handles.append(block.register_forward_hook(change))
    slopes = torch.autograd.grad(square(teacher, data), gates)[0]
    for handle in handles:
        handle.remove()
    ranking = rank_layers(teacher, [data], square)
    assert ranking.activations == pytest.approx(slopes.abs().tolist(), rel=1e-6)
    assert min(ranking.activations) > 0


def test_a_part_that_says_nothing_goes_first() -> None:
    teacher, data = make_teacher("gpt2"), make_data("gpt2")
    with torch.no_grad():
        for part in (
            *teacher.transformer.h[1].attn.c_proj.parameters(),
            *teacher.transformer.h[2].mlp.c_proj.parameters(),
        ):
            part.zero_()
    ranking = rank_layers(teacher, [{**data, "labels": data["input_ids"]}] * 2)
    assert ranking.attention[1] == ranking.activations[2] == 0.0
    dropped = ranking.drop(attention=2, activations=2)
    assert (dropped.attention, dropped.activations) == ((1,), (2,))
    parts = {"drop_attention": dropped.attention, "drop_activations": dropped.activations}
    student = shrink(teacher, data, **parts, align=False).student
    torch.testing.assert_close(logits_of(student, data), logits_of(teacher, data), atol=1e-10, rtol=0.0)


def test_kinds_are_ranked_apart() -> None:
    """The scale of one kind does not touch the other."""
    for scale in (1e-3, 1.0):
        ranking = Ranking((3 * scale, 1 * scale, 2 * scale), (0.5, 0.4, 0.6))
        dropped = ranking.drop(attention=2, activations=1)
        assert (dropped.attention, dropped.activations) == ((1,), (0, 1))
    equal = Ranking((2.0, 1.0, 3.0, 1.0 - 1e-9, 1.0, 0.5, 1.0 + 1e-9), ())  # but for rounding
    assert equal.drop(attention=4).attention == (4, 5, 6)
    for bad in ({"attention": 0}, {"attention": 4}, {"activations": -1}, {"activations": 1.5}):
        with refusal("argument-value"):
            ranking.drop(**bad)


def test_refusals() -> None:
    teacher, data = make_teacher("bert"), make_data("bert")
    for batches, loss in (([], square), ([data], None), ([data], lambda *_: torch.ones(2)), ([data], lambda *_: 1.0)):
        with refusal("argument-value"):
            rank_layers(teacher, batches, loss)
    with refusal("not-finite"):
        rank_layers(teacher, [data], lambda model, batch: square(model, batch) * torch.nan)
    del teacher.bert.encoder.layer[0].intermediate.intermediate_act_fn
    teacher.bert.encoder.layer[0].intermediate.intermediate_act_fn = torch.tanh
    with refusal("shrink-unsupported", "modules"):
        rank_layers(teacher, [data], square)
    assert not teacher.bert.encoder.layer[0].attention.output.dense._forward_hooks


def test_splits_are_those_of_the_second_source(shared_data: Path) -> None:
    points = json.loads((shared_data / "map_deitb" / "points.json").read_text(encoding="utf-8"))["points"]
    splits = choose_splits(12)
    assert set(splits) == {(round(12 * a), round(12 * t)) for a, t, _ in points}
    assert len(splits) == 22
    assert all(1 <= a <= 3 and 1 <= t <= 3 for a, t in choose_splits(3))
    assert choose_splits(1) == [(1, 1)]
