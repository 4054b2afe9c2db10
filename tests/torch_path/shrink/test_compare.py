"""Rival starts, and the table that compares them: rivals are exact where theirs is the right idea."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.refusals import refusal
from support.shrink.models import logits_of, make_data, make_teacher
from torch import Tensor

from shd_torch.shrink import shrink
from shd_torch.shrink.compare import MEASURES, RIVALS, compare_starts, count_flops, measure_loss
from shd_torch.shrink.unfinished import Unfinished

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


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rival", RIVALS)
def test_rivals_of_every_size(rival: str, name: str) -> None:
    teacher, data = make_teacher(name), make_data(name)
    options: dict[str, Any] = {"heads": 2, "layers": 2, "hidden": 16}
    student = shrink(teacher, data, **options, **RIVALS[rival], align=False).student
    assert torch.isfinite(logits_of(student, data)).all()
    assert student.config.num_attention_heads == 2


def test_students_share_statistics_of_the_same_teacher_and_data_alone(tmp_path: Path) -> None:
    teacher, data = make_teacher("bart"), make_data("bart")
    data |= {f"decoder_{name}": part for name, part in data.items()}
    other = data | {"input_ids": data["input_ids"].flip(0), "decoder_input_ids": data["input_ids"].flip(1)}
    counts = []
    with Unfinished(tmp_path / "studies", {}) as studies:
        for stack, sizes in [("encoder", {"neurons": 9}), ("encoder", {"heads": 2}), ("encoder", {"neurons": 8})]:
            _check_shared(teacher, data, studies, stack=stack, **sizes)
            counts.append(len(list(studies.folder.glob("study-*"))))
        assert len(set(counts)) == 1
        _check_shared(teacher, data, studies, stack="decoder", heads=2)
        _check_shared(teacher, other, studies, stack="encoder", heads=2)
        data["input_ids"].copy_(other["input_ids"])  # after they were studied
        _check_shared(teacher, data, studies, stack="encoder", heads=2)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(1.5)
        _check_shared(teacher, data, studies, stack="encoder", heads=2)


def _check_shared(teacher: Any, data: dict[str, Tensor], studies: Unfinished, **options: Any) -> None:
    """A student with statistics that are kept is the one without."""
    shared, alone = (shrink(teacher, data, **kept, **options) for kept in ({"studies": studies}, {}))
    for name, tensor in shared.student.state_dict().items():
        torch.testing.assert_close(tensor, alone.student.state_dict()[name], atol=1e-12, rtol=0.0)


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


def test_minitron_keeps_neurons_by_their_activations_alone() -> None:
    """The largest neuron of each layer is one that nothing reads: only Minitron keeps it."""
    teacher, data = make_teacher("vit"), make_data("vit")
    with torch.no_grad():
        for layer in teacher.vit.layers:
            layer.mlp.fc1.bias[7] = 50.0
            layer.mlp.fc2.weight[:, 7] = 0.0
    for options, kept in (({}, False), (RIVALS["Minitron importance"], True)):
        report = shrink(teacher, data, neurons=10, align=False, **options).report
        assert {7 in layer["neurons"] for layer in report["layers"]} == {kept}


@pytest.mark.parametrize(
    ("name", "measure", "options"),
    [
        ("llama", "cross entropy", {"heads": 2, "layers": [0, 2]}),
        ("bert", "KL from the teacher", {"heads": 2, "drop_attention": [1], "drop_activations": [0]}),
        ("vit", "KL from the teacher", {"hidden": 16, "align": False}),
    ],
)
def test_the_table(name: str, measure: str, options: dict[str, Any]) -> None:
    teacher, data = make_teacher(name).float().train(), make_data(name, samples=16)
    data = {key: part.float() if part.is_floating_point() else part for key, part in data.items()}
    held_out = make_data(name, samples=5, seed=9)
    made = shrink(teacher, data, **options)
    told: list[tuple[int, int, str]] = []
    starts = compare_starts(
        teacher, data, held_out, made, batch_size=2, progress=lambda *n: told.append(n), **options
    )
    rows = {start.name: start for start in starts}
    assert list(rows)[:2] == ["teacher", "this student"]
    assert list(rows)[-1] == "random"
    assert set(RIVALS) <= set(rows)
    assert ("closed form" in rows) == options.get("align", True)
    assert ("layers 0, 2 as they are" in rows) == (name == "llama")
    assert told == [(number, len(rows), start) for number, start in enumerate(rows)]
    assert {start.measure for start in starts} == {measure}
    assert teacher.training
    first, second = starts[:2]
    assert second.parameters == made.report["student"]["parameters"] < first.parameters
    assert second.flops < first.flops
    for rival in {"closed form", "kept heads"} & set(rows):  # what starts share changes none of them
        alone = shrink(teacher, data, batch_size=2, **options | RIVALS.get(rival, {}) | {"align": False}).student
        assert rows[rival].loss == measure_loss(teacher.eval(), alone, held_out, 2, measure)
    if name != "llama":
        assert first.loss == pytest.approx(0.0, abs=1e-6)
        assert 0 < second.loss < rows["random"].loss
        return
    kept = {key: part[:1] for key, part in held_out.items()}  # by hand: a row counts where it and the next are real
    logits = logits_of(teacher.eval(), kept).log_softmax(-1)
    wanted = -logits[:-1].gather(1, kept["input_ids"][:, 1 : len(logits)].T).mean()
    (alone,) = compare_starts(teacher, data, kept, made, **options)[:1]
    assert alone.loss == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_fused_attention_costs_what_its_products_cost(name: str) -> None:
    counts = []
    for attention in ("sdpa", "eager"):
        teacher = make_teacher(name).float().eval()
        teacher.set_attn_implementation(attention)
        data = {key: part.float() if part.is_floating_point() else part for key, part in make_data(name).items()}
        counts.append(count_flops(teacher, data))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("measure", MEASURES[1:])
def test_equal_outputs_are_at_no_distance(measure: str) -> None:
    """Where rounding would make the cosine of equal vectors, or the mass of equal rows, a little more than 1."""
    for row in torch.randn(100, 1, 1, 24, generator=torch.Generator().manual_seed(0)):
        near = {1.0: SimpleNamespace(logits=row, last_hidden_state=row)}
        near[3.0] = SimpleNamespace(logits=row + 3.0, last_hidden_state=3.0 * row)
        data = {"x": row}
        assert measure_loss(lambda x: near[1.0], lambda x: near[3.0], data, 1, measure) >= 0.0  # noqa: B023


def test_models_without_logits_are_compared_by_hidden_states(tmp_path: Any) -> None:
    import transformers

    torch.manual_seed(0)
    transformers.BertModel(make_teacher("bert").config).bfloat16().save_pretrained(tmp_path / "teacher")
    data = make_data("bert")
    made = shrink(tmp_path / "teacher", data, heads=2)
    starts = compare_starts(tmp_path / "teacher", data, make_data("bert", seed=3), made, heads=2)
    assert {start.measure for start in starts} == {"1 - cosine"}
    assert starts[0].loss == pytest.approx(0.0, abs=1e-6)
    # So nearly the teacher that rounding would decide between them.
    assert 0 <= starts[1].loss < starts[-1].loss / 1000
    assert isinstance(made.student, transformers.BertModel)
    for held_out in ({"input_ids": data["input_ids"] + 90}, {"pixels": data["input_ids"]}):
        with refusal("inputs-invalid"):
            compare_starts(tmp_path / "teacher", data, held_out, made, heads=2)
