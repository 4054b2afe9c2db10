"""A live teacher against the reference, which squeezes its eager maps: fused attention, no maps, the same mixing."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.binding.architectures import ARCHITECTURES, HEADS, make_inputs, make_model
from support.binding.models import PlainViT
from support.binding.twins import assert_agrees, to_float64
from support.refusals import refusal
from torch import Tensor, nn

import shd_ref
from shd_torch import OnlineTeacher, ShdError, capture_attention, layer_kls
from shd_torch.maps import shd_loss

# Of the output projection's parameter, in every attention that runs.
PROJECTIONS = {
    "distilbert": "out_lin.weight",
    "gpt2": "attn.c_proj.weight",
    "gpt_neox": "attention.dense.weight",
    "t5": "SelfAttention.o.weight",
    "bart": "self_attn.out_proj.weight",
    "whisper": "self_attn.out_proj.weight",
    "dit": "projection.weight",
    **dict.fromkeys(("vit", "deit"), "attention.o_proj.weight"),
    **dict.fromkeys(("bert", "roberta", "electra"), "attention.output.dense.weight"),
    **dict.fromkeys(("llama", "mistral", "qwen3", "gemma2"), "o_proj.weight"),
}


def projections_of(name: str, model: nn.Module) -> list[np.ndarray[Any, Any]]:
    weights = [p for key, p in model.named_parameters() if key.endswith(PROJECTIONS[name])]
    return [to_float64(p if name == "gpt2" else p.mT) for p in weights]


def maps_and_values(name: str) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """By the model's own eager attention."""
    with torch.no_grad():
        if name == "dit":
            model = make_model(name)
            with capture_attention(model, keep_values=True) as captured:
                model(**make_inputs(name))
            maps = list(captured.probs)
        else:
            model = make_model(name, "eager")
            with capture_attention(model, keep_values=True) as captured:
                maps = model(**make_inputs(name), output_attentions=True).attentions
    values = [call.value for call in captured.calls]
    return [to_float64(each) for each in maps], [to_float64(each) for each in values]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_the_squeeze_of_eager_maps(name: str) -> None:
    pytest.importorskip("transformers", reason="these are Hugging Face architectures")
    inputs = make_inputs(name)
    rows = None if "attention_mask" not in inputs else inputs["attention_mask"].bool().numpy()
    teacher = make_model(name, "eager" if name == "gemma2" else None)
    maps, values = maps_and_values(name)
    projections = projections_of(name, teacher)
    assert len(maps) == len(projections)
    online = OnlineTeacher(teacher, 3, len(maps))
    with torch.no_grad():
        expected_output = teacher(**inputs)
    for _ in range(2):  # the first batch is looked at, the second is not
        taught = online(**inputs)
        for layer, squeeze in enumerate(taught.squeezes):
            outputs = shd_ref.value_outputs(values[layer], projections[layer])
            expected = shd_ref.squeeze_heads(maps[layer], outputs, 3, query_mask=rows)
            assert squeeze.plan == expected.plan
            assert_agrees(squeeze.mixing, expected.mixing, "float32", "alpha")
            assert_agrees(squeeze.residual, expected.residual, "float32", "residual")
            merged, target = to_float64(squeeze.supervision.probs()), expected.probs
            if rows is not None:
                merged, target = (np.where(rows[:, None, :, None], each, 0) for each in (merged, target))
            np.testing.assert_allclose(merged, target, atol=1e-5)
    first = taught.output if isinstance(taught.output, Tensor) else taught.output[0]
    assert torch.equal(first, expected_output if isinstance(expected_output, Tensor) else expected_output[0])


def student_and_teacher() -> tuple[PlainViT, OnlineTeacher, Tensor]:
    torch.manual_seed(0)
    return PlainViT(), OnlineTeacher(PlainViT(num_layers=4), 2, 2), torch.randn(3, 3, 16, 16)


def two_heads(width: int = 32) -> PlainViT:
    torch.manual_seed(1)
    return PlainViT(width, num_heads=2)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_and_gradients_are_those_of_eager_maps(temperature: float) -> None:
    _, online, images = student_and_teacher()
    student = two_heads()
    with capture_attention(student, 2) as captured:
        student(images)
    taught = online(images)
    assert taught.layers == online.student_layers == (0, 1)
    maps = [supervision.probs(temperature=temperature) for supervision in taught.supervise()]
    options: dict[str, Any] = {"beta": 0.5, "temperature": temperature}
    expected = shd_loss(maps, list(captured.logits), **options)
    terms = layer_kls(captured, taught, **options)
    assert list(terms) == [0, 1]
    total = torch.stack(list(terms.values())).sum()
    torch.testing.assert_close(total, expected, atol=1e-6, rtol=2e-5)
    keys = [call.key for call in captured.calls]
    for actual, target in zip(
        torch.autograd.grad(total, keys, retain_graph=True), torch.autograd.grad(expected, keys), strict=True
    ):
        torch.testing.assert_close(actual, target, atol=1e-7, rtol=1e-4)
    assert all(p.grad is None for p in online.model.parameters())


def test_several_teachers_are_averaged() -> None:
    """Of different depth, taught layers and strategy; a layer that one of two teaches counts half."""
    _, first, images = student_and_teacher()
    second = OnlineTeacher(PlainViT(num_heads=8, num_layers=3), 2, [(1, 2)], strategy="constant")
    student = two_heads()
    with capture_attention(student) as captured:
        student(images)
    taught = [first(images), second(images)]
    together = layer_kls(captured, taught)
    alone = [layer_kls(captured, one) for one in taught]
    torch.testing.assert_close(together[0], alone[0][0] / 2)
    torch.testing.assert_close(together[1], (alone[0][1] + alone[1][1]) / 2)
    with pytest.raises(ShdError, match="at least one teacher"):
        layer_kls(captured, [])


class Stack(nn.Module):
    """Layers of ``nn.MultiheadAttention``, with or without asking it for its weights."""

    def __init__(self, batch_first: bool, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 8, batch_first=batch_first) for _ in range(2))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden, hidden, hidden, attn_mask=mask, need_weights=self.need_weights)[0]
        return hidden


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_equals_the_reference(batch_first: bool, need_weights: bool) -> None:
    torch.manual_seed(0)
    teacher = Stack(batch_first, need_weights).eval()
    hidden = torch.randn(3, 6, 32) if batch_first else torch.randn(6, 3, 32)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    squeeze = OnlineTeacher(teacher, 3, 2)(hidden, mask).squeezes[0]
    layer = teacher.layers[0]
    rows = hidden if batch_first else hidden.transpose(0, 1)
    with torch.no_grad():
        probs = layer(hidden, hidden, hidden, attn_mask=mask, average_attn_weights=False)[1]
        values = F.linear(rows, layer.in_proj_weight[64:], layer.in_proj_bias[64:])
    values = values.unflatten(-1, (8, 4)).transpose(1, 2)
    outputs = shd_ref.value_outputs(to_float64(values), to_float64(layer.out_proj.weight.mT))
    expected = shd_ref.squeeze_heads(to_float64(probs), outputs, 3)
    assert_agrees(squeeze.mixing, expected.mixing, "float32", "alpha")
    np.testing.assert_allclose(to_float64(squeeze.supervision.probs()), expected.probs, atol=1e-5)


@pytest.mark.parametrize("way", ["layers", "whole", "autocast"])
def test_compiled_and_narrow_teachers(way: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, images = PlainViT(num_layers=3), torch.randn(2, 3, 16, 16)
    expected = OnlineTeacher(model, 2, 3)(images).squeezes
    teacher: Any = model
    if way == "layers":
        for block in model.blocks:
            block.compile(backend="eager")
    elif way == "whole":
        teacher = torch.compile(model, backend="eager")
    online = OnlineTeacher(teacher, 2, 3)
    tolerance = 1e-6 if way in ("layers", "whole") else 0.03
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            actual = online(images).squeezes
        for squeeze, target in zip(actual, expected, strict=True):
            assert squeeze.mixing.dtype == torch.float32
            torch.testing.assert_close(
                squeeze.supervision.probs(), target.supervision.probs(), atol=tolerance, rtol=tolerance
            )


class Gated(nn.Module):
    """A gate between attention and its projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        context = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        output: Tensor = self.out(self.gate(hidden).sigmoid() * context)
        return output


def test_a_projection_that_is_not_seen_must_be_given() -> None:
    torch.manual_seed(0)
    model, hidden = Gated(), torch.randn(2, 5, 32)
    with refusal("capture-failed", r"one output projection; got 0: .*output_projections=\{0: \.\.\.\}"):
        OnlineTeacher(model, 2, 1)(hidden)
    online = OnlineTeacher(model, 2, 1, output_projections={0: model.out.weight.mT})
    assert online(hidden).squeezes[0].supervision.shape == (2, 2, 5, 5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
def test_an_adapter_beside_the_projection_is_not_overlooked() -> None:
    peft = pytest.importorskip("peft", reason="adapters")
    teacher = make_model("llama")
    adapted = peft.get_peft_model(teacher, peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    with pytest.raises(ShdError, match="got 2: merge adapters"):
        OnlineTeacher(adapted, 2, 1)(**make_inputs("llama"))
    OnlineTeacher(adapted.merge_and_unload(), 2, 1)(**make_inputs("llama"))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["plain", "multi-head"])
def test_a_projection_that_is_loaded_is_the_new_one(kind: str, assign: bool) -> None:
    torch.manual_seed(0)
    first, second = (PlainViT() if kind == "plain" else Stack(True, False) for _ in range(2))
    inputs = (torch.randn(2, 3, 16, 16),) if kind == "plain" else (torch.randn(2, 6, 32), torch.zeros(6, 6))
    online = OnlineTeacher(first, 2, 2)
    before = online(*inputs).squeezes
    first.load_state_dict(second.state_dict(), assign=assign)
    expected = OnlineTeacher(second, 2, 2)(*inputs).squeezes
    for actual, target, old in zip(online(*inputs).squeezes, expected, before, strict=True):
        torch.testing.assert_close(actual.mixing, target.mixing)
        assert not torch.allclose(actual.mixing, old.mixing, atol=1e-3)


def test_a_projection_whose_module_is_replaced_is_the_new_one_or_missed() -> None:
    _, online, images = student_and_teacher()
    online(images)
    block = online.model.blocks[1]
    block.proj = nn.Linear(32, 32)
    fresh = OnlineTeacher(online.model, 2, 2)(images).squeezes[0].mixing
    torch.testing.assert_close(online(images).squeezes[0].mixing, fresh)
    block.proj = nn.Sequential(block.proj)
    with refusal("capture-failed", r"output projection blocks\.1\.proj\.weight; it is gone"):
        online(images)


def test_a_student_may_teach_itself() -> None:
    """Every module is left in the mode that it was in, and the teacher's pass knows no dropout."""
    torch.manual_seed(0)
    student, images = PlainViT().train(), torch.randn(2, 3, 16, 16)
    student.blocks[0].mlp.append(nn.Dropout(0.5))
    student.blocks[1].norm.eval()  # frozen by its owner
    modes = [module.training for module in student.modules()]
    online = OnlineTeacher(student, 2, 2)
    outputs = []
    for _ in range(2):
        outputs.append(online(images).output)
        assert [module.training for module in student.modules()] == modes
    assert torch.equal(*outputs)
    assert torch.equal(outputs[0], student.eval()(images))
    student.train().blocks[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        online(images)
    assert all(module.training for module in student.modules())


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"num_student_heads": -1}, "argument-value", "num_student_heads must be an integer of at least 1; got -1"),
        ({"layer_map": [(0, 0), (0, 1)]}, "layers-invalid", "student layer 0 once"),
        ({"strategy": "best"}, "argument-value", "strategy must be one of"),
        ({"plan": "random"}, "argument-value", "plan must be one of"),
    ],
)
def test_arguments_are_checked_before_any_batch(changes: dict[str, Any], code: str, message: str) -> None:
    arguments: dict[str, Any] = {"model": PlainViT(), "num_student_heads": 2, "layer_map": 2}
    with refusal(code, message):
        OnlineTeacher(**arguments | changes)


def test_what_does_not_fit_is_refused() -> None:
    images = torch.randn(1, 3, 16, 16)
    with refusal("plan-invalid", "teacher layer 0: .*got 0 twice"):
        OnlineTeacher(PlainViT(), 2, 2, plan=[[(0, 0)], [(0, 1)]])(images)
    for arguments, code in (
        ((HEADS + 1, 2), "heads-exceed"),
        ((2, 3), "layers-invalid"),
        ((2, [(0, 2)]), "layers-invalid"),
    ):
        with refusal(code):
            OnlineTeacher(PlainViT(), *arguments)(images)
    broken = PlainViT()
    with torch.no_grad():
        broken.blocks[1].qkv.weight[0, 0] = torch.nan
    with refusal("not-finite", "teacher layer 1: "):
        OnlineTeacher(broken, 2, 2)(images)
    shrinking = PlainViT(num_layers=3)
    online = OnlineTeacher(shrinking, 2, 2)
    online(images)
    shrinking.blocks = shrinking.blocks[:2]
    with pytest.raises(ShdError, match="must make 3 attention calls, as the first one did; got 2"):
        online(images)
