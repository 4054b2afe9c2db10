"""Capture of students as they are trained: checkpointed, compiled, in half precision, adapted, accumulated."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.binding.architectures import make_inputs
from support.binding.models import PlainViT, hf_model
from support.refusals import refusal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shd_torch import attention_kl, capture_attention, record_query_key
from shd_torch.capture import Captured


def kl_of(captured: Captured) -> Tensor:
    terms = [
        attention_kl(call.query, call.key, call.compute_logits().detach().mul(2).softmax(-1), **call.mask_keywords)
        for call in captured.calls
    ]
    return torch.stack(terms).sum()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(student: nn.Module, inputs: dict[str, Any] | Tensor, module: nn.Module | None = None) -> dict[str, Tensor]:
    """The gradients of output and attention loss together."""
    torch.manual_seed(1)
    with capture_attention(student) as captured:
        output = student(inputs) if isinstance(inputs, Tensor) else student(**inputs)[0]
    return gradients(module or student, output.float().square().mean() + kl_of(captured))


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        torch.testing.assert_close(gradient, second[name], atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_hugging_face_checkpointing_keeps_the_gradients(attn_implementation: str) -> None:
    pytest.importorskip("transformers", reason="a Hugging Face student")
    model, inputs = hf_model("llama", attn_implementation, attention_dropout=0.2).train(), make_inputs("llama")
    plain = step(model, inputs)
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert_same(plain, step(model, inputs))


class Checkpointed(nn.Module):
    def __init__(self, model: PlainViT, use_reentrant: bool) -> None:
        super().__init__()
        self.model = model
        self.use_reentrant = use_reentrant

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.model.patches(images).flatten(2).transpose(1, 2) + self.model.positions
        for block in self.model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.use_reentrant)
        logits: Tensor = self.model.head(hidden.mean(1))
        return logits


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the validation pass
def test_plain_checkpointing_keeps_the_gradients_and_reentrant_is_refused() -> None:
    torch.manual_seed(0)
    model, images = PlainViT(), torch.randn(2, 3, 16, 16)
    assert_same(step(model, images), step(Checkpointed(model, use_reentrant=False), images, model))
    with refusal("capture-failed", r"use_reentrant=False"):
        step(Checkpointed(model, use_reentrant=True), images, model)
    # A validation pass has no gradient anywhere, so nothing is hidden.
    reentrant = Checkpointed(model, use_reentrant=True)
    with torch.no_grad(), capture_attention(reentrant, 2) as captured:
        reentrant(images)
    assert len(captured.calls) == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own
@pytest.mark.parametrize("way", ["outside", "layers", "compiled later"])
def test_compiled_students(way: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, images = PlainViT(num_layers=1), torch.randn(2, 3, 16, 16)
    plain = step(model, images)
    compiled = copy.deepcopy(model)
    student: Any = compiled
    if way == "layers":
        for block in compiled.blocks:
            block.compile(backend="eager", fullgraph=True)
    else:
        student = torch.compile(compiled, backend="aot_eager" if way == "outside" else "eager")
    if way != "compiled later":
        with torch.no_grad():
            expected = student(images)
        student(images)  # a graph without a capture, which must not be used for one
    else:
        expected = model(images)
    for _ in range(3):
        with capture_attention(student, 1) as captured:
            output = student(images)
        assert torch.equal(output, expected)
        loss = output.square().mean() + kl_of(captured)
        assert_same(plain, gradients(compiled, loss))
    captured.clear()
    assert torch.equal(student(images), expected)
    assert captured.num_calls == 0


def test_a_student_that_is_wrapped_during_a_capture_keeps_its_wrapper() -> None:
    torch.manual_seed(0)
    model, images = PlainViT(), torch.randn(2, 3, 16, 16)
    with capture_attention(model) as captured:
        model(images)
        wrapped = model.forward
        model.forward = lambda images: wrapped(images)
    first = captured.calls[0].query
    model(images)
    assert captured.calls[0].query is first  # our wrapper only passes on
    del model.forward


@pytest.mark.parametrize(
    ("way", "own_forward"), [("copied", True), ("pickled", False), ("copied within a parent", False)]
)
def test_a_copy_of_a_captured_student_is_its_own(way: str, own_forward: bool) -> None:
    """Such as an average of its weights, made while a capture runs for the whole training."""
    torch.manual_seed(0)
    model, images = PlainViT(), torch.randn(2, 3, 16, 16)
    if own_forward:
        model.forward = model.forward  # an attribute of the instance, as some libraries leave one
    expected = model(images)
    with capture_attention(model, 2) as captured:
        if way == "pickled":
            copied = pickle.loads(pickle.dumps(model))
        else:
            copied = copy.deepcopy(nn.Sequential(model))[0] if "parent" in way else copy.deepcopy(model)
        model(images)
        query = captured.calls[0].query
        assert torch.equal(copied(images), expected)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert not copied(images).any()
        assert captured.calls[0].query is query
    assert not copied(images).any()
    assert torch.equal(model(images), expected)
    with capture_attention(copied, 2) as captured:
        copied(images)
    assert not captured.calls[0].query.any()


def test_a_capture_inside_a_captured_pass_is_seen_by_both_and_other_models_by_none() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = PlainViT(), PlainViT(num_layers=3)

        def forward(self, images: Tensor) -> Tensor:
            return self.one(images) + self.two(images)

    torch.manual_seed(0)
    pair, other, images = Pair(), PlainViT(), torch.randn(2, 3, 16, 16)
    with capture_attention(pair, 5) as both, capture_attention(pair.two, 3) as inner:
        pair(images)
        other(images)
    assert (both.num_calls, inner.num_calls) == (5, 3)
    assert [call.query is other.query for call, other in zip(both.calls[2:], inner.calls, strict=True)] == [True] * 3


class OwnAttention(nn.Module):
    """Attention in its own way, with the one line that makes it visible."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        record_query_key(self, query, key, scale=0.3, softcap=2.0)
        return (2.0 * torch.tanh(0.3 * query @ key.mT / 2.0)).softmax(-1) @ value


def test_record_query_key() -> None:
    torch.manual_seed(0)
    model, hidden = OwnAttention(), torch.randn(2, 5, 16)
    plain = model(hidden)
    with capture_attention(model, 1) as captured:
        assert torch.equal(model(hidden), plain)
    value = model.qkv(hidden).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)[2]
    torch.testing.assert_close(captured.probs[0] @ value, plain)
    assert captured.calls[0].mask_keywords["softcap"] == 2.0
    model.forward = lambda hidden: record_query_key(model, hidden, hidden)
    with capture_attention(model, 1), refusal("capture-failed", "of OwnAttention must be"):
        model(hidden)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of FlexAttention's own
def test_masks_of_flex_attention_are_refused() -> None:
    model, inputs = hf_model("llama", "flex_attention"), make_inputs("llama")
    eager, refused = torch.compiler.set_stance("force_eager"), refusal("capture-failed", "BlockMask of FlexAttention")
    with torch.no_grad(), eager, capture_attention(model, 2), refused:
        model(**inputs)


def test_a_function_bound_by_name_is_missed_and_said_so() -> None:
    """``from torch.nn.functional import scaled_dot_product_attention``: nothing passes where the taps are."""
    bound = F.scaled_dot_product_attention

    class Bound(nn.Module):
        def forward(self, query: Tensor) -> Tensor:
            return bound(query, query, query)

    model = Bound()
    with capture_attention(model, 1), refusal("capture-failed", r"got 0 calls: .*by that name"):
        model(torch.randn(1, 2, 3, 4))
