"""Depth by training: gates that change nothing while open, importance by gradient, and points for the predictor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refusal
from support.shrink.models import logits_of, make_data, make_teacher
from torch import Tensor

from shd_ref import ShdError
from shd_ref.shrink import best_split, fit_predictor
from shd_torch.shrink import Ranking, choose_splits, gate_layers, measure_splits, rank_layers, shrink

PLAIN = ["gpt2", "bert", "vit", "deit", "dinov2"]


def square(model: Any, batch: Any) -> Tensor:
    """Any loss with a gradient."""
    out: Tensor = model(**batch).logits.square().mean()
    return out


@pytest.mark.parametrize("name", [*PLAIN, "llama", "qwen3"])
def test_open_gates_change_nothing_and_go(name: str) -> None:
    teacher, data = make_teacher(name), make_data(name)
    before = logits_of(teacher, data)
    with gate_layers(teacher) as gates:
        assert torch.equal(logits_of(teacher, data), before)
        gates.keep(attention=1)
        assert not torch.equal(logits_of(teacher, data), before)
        assert len(gates.activations) == (3 if name in PLAIN else 0)
    assert torch.equal(logits_of(teacher, data), before)


@pytest.mark.parametrize("name", PLAIN)
def test_closed_gates_are_what_shrink_makes(name: str) -> None:
    teacher, data = make_teacher(name), make_data(name)
    with gate_layers(teacher) as gates:
        with torch.no_grad():
            gates.attention.copy_(torch.tensor([0.1, 0.9, 0.5]))
            gates.activations.copy_(torch.tensor([0.9, 0.1, 0.2]))
        gates.keep(attention=2, activations=1)
        wanted = logits_of(teacher, data)
    student = shrink(teacher, data, drop_attention=[0], drop_activations=[1, 2], align=False).student
    torch.testing.assert_close(logits_of(student, data), wanted, atol=1e-10, rtol=0.0)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_importance_is_the_slope_of_the_loss(name: str) -> None:
    """Against differences: a gate between open and closed, by hand."""
    teacher, data = make_teacher(name), make_data(name)
    ranking = rank_layers(teacher, [data], square)
    output = {"gpt2": "attn.c_proj", "bert": "attention.output.dense", "llama": "self_attn.o_proj"}[name]
    layers = next(part for part in teacher.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == 3)
    for number, layer in enumerate(layers):
        values = []
        for gate in (1.0 - 1e-3, 1.0 + 1e-3):
            handle = layer.get_submodule(output).register_forward_hook(lambda *got, gate=gate: gate * got[2])
            with torch.no_grad():
                values.append(float(square(teacher, data)))
            handle.remove()
        assert ranking.attention[number] == pytest.approx(abs(values[1] - values[0]) / 2e-3, rel=1e-3)
    assert all(part.grad is None for part in teacher.parameters())


def test_a_part_that_says_nothing_goes_first() -> None:
    teacher, data = make_teacher("gpt2"), make_data("gpt2")
    with torch.no_grad():
        for part in teacher.transformer.h[1].attn.c_proj.parameters():
            part.zero_()
        for part in teacher.transformer.h[2].mlp.c_proj.parameters():
            part.zero_()
    ranking = rank_layers(teacher, [{**data, "labels": data["input_ids"]}] * 2)
    assert ranking.attention[1] == ranking.activations[2] == 0.0
    dropped = ranking.drop(attention=2, activations=2)
    assert (dropped.attention, dropped.activations) == ((1,), (2,))
    assert ranking.disparity is not None
    assert ranking.disparity > 0.0
    student = shrink(
        teacher, data, drop_attention=dropped.attention, drop_activations=dropped.activations, align=False
    )
    torch.testing.assert_close(logits_of(student.student, data), logits_of(teacher, data), atol=1e-10, rtol=0.0)


def test_kinds_are_ranked_apart() -> None:
    """The scale of one kind does not touch the other."""
    for scale in (1e-3, 1.0):
        ranking = Ranking((3 * scale, 1 * scale, 2 * scale), (0.5, 0.4, 0.6), None)
        dropped = ranking.drop(attention=2, activations=1)
        assert (dropped.attention, dropped.activations) == ((1,), (0, 1))
    equal = Ranking((2.0, 1.0, 3.0, 1.0 - 1e-9, 1.0, 0.5, 1.0 + 1e-9), (), None)  # but for rounding
    assert equal.drop(attention=4).attention == (4, 5, 6)
    for bad in ({"attention": 0}, {"attention": 4}, {"activations": -1}, {"activations": 1.5}):
        with refusal("argument-value"):
            ranking.drop(**bad)


def test_a_closed_gate_can_open_again() -> None:
    """Straight through: the teacher's own outputs are the target, and layer 1 adds nothing to them."""
    teacher, data = make_teacher("vit"), make_data("vit")
    with torch.no_grad():
        for part in teacher.vit.layers[1].attention.o_proj.parameters():
            part.zero_()
        wanted = teacher(**data).logits
    with gate_layers(teacher) as gates:
        gates.keep(attention=2)  # of equal numbers the first two: layer 2 is closed
        optimizer = torch.optim.SGD(gates.parameters(), lr=0.5)
        losses = []
        for _ in range(12):
            optimizer.zero_grad()
            loss = (teacher(**data).logits - wanted).square().mean()
            loss.backward()
            gates.observe()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] > 1e-6
        assert losses[-1] < 1e-20
        assert gates.attention[2] > gates.attention[1]
        assert len(gates.rank().attention) == 3


def test_refusals_of_gates() -> None:
    teacher, data = make_teacher("bert"), make_data("bert")
    for batches, loss in (([], square), ([data], None), ([data], lambda *_: torch.ones(2)), ([data], lambda *_: 1.0)):
        with refusal("argument-value"):
            rank_layers(teacher, batches, loss)
    with refusal("not-finite"):
        rank_layers(teacher, [data], lambda model, batch: square(model, batch) * torch.nan)
    with gate_layers(teacher) as gates, pytest.raises(ShdError, match="backward"):
        gates.observe()
    with gate_layers(teacher) as gates, pytest.raises(ShdError, match="attention"):
        gates.keep(attention=4)
    del teacher.bert.encoder.layer[0].intermediate.intermediate_act_fn
    teacher.bert.encoder.layer[0].intermediate.intermediate_act_fn = torch.tanh
    with pytest.raises(ShdError, match="modules"), gate_layers(teacher):
        pass
    assert not teacher.bert.encoder.layer[0].attention.output.dense._forward_hooks


def test_splits_are_those_of_the_second_source(shared_data: Path) -> None:
    points = json.loads((shared_data / "map_deitb" / "points.json").read_text(encoding="utf-8"))["points"]
    published = {(round(12 * a), round(12 * t)) for a, t, _ in points}
    found = choose_splits(12)
    assert set(found) == published
    assert len(found) == len(published) == 22
    assert all(1 <= a <= 3 and 1 <= t <= 3 for a, t in choose_splits(3))
    assert choose_splits(1) == [(1, 1)]


def test_points_go_on_where_they_stopped(tmp_path: Path) -> None:
    teacher, data = make_teacher("gpt2"), make_data("gpt2")
    ranking = rank_layers(teacher, [data], square)
    splits = [(a, t) for a in (1, 2, 3) for t in (0, 2, 3)]
    wanted = logits_of(teacher, data)
    calls: list[float] = []

    def quality(model: Any) -> float:
        """A fine-tune of one step; it stops the first run at the fourth split."""
        if len(calls) == 3:
            calls.append(0.0)
            raise KeyboardInterrupt
        assert not model.training
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        square(model.train(), data).backward()
        optimizer.step()
        calls.append(-float((logits_of(model.eval(), data) - wanted).square().mean()) + float(torch.rand(())) * 1e-6)
        return calls[-1]

    out = tmp_path / "points.json"
    with pytest.raises(KeyboardInterrupt):
        measure_splits(teacher, data, ranking, splits, quality, out)
    assert len(json.loads(out.read_text(encoding="utf-8"))["points"]) == 3
    lines: list[str] = []
    points = measure_splits(teacher, data, ranking, splits, quality, out, progress=lines.append)
    assert len(calls) == 1 + len(splits)
    assert len(lines) == len(splits)
    assert [(round(3 * a), round(3 * t)) for a, t, _ in points] == splits
    again = measure_splits(teacher, data, ranking, splits[::-1], quality, out)
    assert again == points[::-1]
    assert len(calls) == 1 + len(splits)
    whole = measure_splits(teacher, data, ranking, splits[3:5], quality, tmp_path / "other.json")
    assert whole == points[3:5]  # a point does not depend on those before it
    found = best_split(fit_predictor(points, 1), num_layers=3, budget=4)
    assert found.attention + found.activation == 4
    with refusal("argument-value", "options"):
        measure_splits(teacher, data, ranking, splits, quality, out, heads=2)
    assert {path.name for path in tmp_path.iterdir()} == {"points.json", "other.json"}


@pytest.mark.parametrize(
    ("name", "splits", "quality", "text", "code"),
    [
        ("gpt2", [(0, 3)], 1.0, None, "argument-value"),
        ("gpt2", [(4, 3)], 1.0, None, "argument-value"),
        ("gpt2", [(3, 3)], float("nan"), None, "argument-value"),
        ("gpt2", [(3, 3)], None, None, "argument-value"),
        ("gpt2", [(3, 3)], 1.0, "{}", "read-failed"),
        ("gpt2", [(3, 3)], 1.0, "no JSON", "read-failed"),
        ("llama", [(2, 2)], 1.0, None, "shrink-unsupported"),
    ],
)
def test_refusals_of_points(
    name: str, splits: list[tuple[int, int]], quality: Any, text: str | None, code: str, tmp_path: Path
) -> None:
    out = tmp_path / "points.json"
    if text is not None:
        out.write_text(text, encoding="utf-8")
    teacher, data = make_teacher(name), make_data(name)
    ranking = Ranking((1.0, 2.0, 3.0), () if name == "llama" else (1.0, 2.0, 3.0), None)
    with refusal(code):
        measure_splits(teacher, data, ranking, splits, lambda _: quality, out)
    with pytest.raises(ShdError, match="ranking"):
        measure_splits(teacher, data, Ranking((1.0,), (), None), [(1, 3)], lambda _: 1.0, tmp_path / "new.json")
