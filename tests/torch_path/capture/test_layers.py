"""Layers are known by the modules that attend, not by the place of a call in a queue."""

from collections.abc import Callable

import pytest
import torch
from support.binding.models import PlainViT
from support.refusals import refusal
from torch import Tensor, nn
from torch.nn import functional as F

from shd_ref import ShdError
from shd_torch import OnlineTeacher, capture_attention
from shd_torch.capture.outputs import read_hidden_states
from shd_torch.supervision import TaughtLayers

WIDTH = 32


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention in one fused call or several, or one query for all positions."""

    def __init__(self, way: str = "once") -> None:
        super().__init__()
        self.way = way
        self.probe = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (split(part) for part in self.qkv(x).chunk(3, -1))
        attend = F.scaled_dot_product_attention
        if self.way == "differential":
            heads = attend(query, key, value) - 0.5 * attend(query + 1, key, value)
        elif self.way == "chunks":
            heads = torch.cat([attend(*part) for part in zip(*(t.split(4, 2) for t in (query, key, value)))], 2)  # noqa: B905
        elif self.way == "pool":
            heads = attend(split(self.probe.expand(len(x), -1, -1)), key, value)
        else:
            heads = attend(query, key, value)
        merged: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return merged


class Model(nn.Module):
    """Layers in turn, by their numbers, then a head."""

    def __init__(self, *ways: str, order: tuple[int, ...] | None = None, head: str | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(way) for way in ways])
        self.order = tuple(range(len(ways))) if order is None else order
        self.head = None if head is None else Attention(head)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = x + self.layers[number](x)
        return x if self.head is None else self.head(x)


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a layer a module": (lambda: Model("once", "once"), ["layers.0", "layers.1"]),
    "a shared module, each time it runs": (lambda: Model("once", order=(0, 0, 0)), ["layers.0"] * 3),
    "no pooling head": (lambda: Model("once", "once", head="pool"), ["layers.0", "layers.1"]),
    "a head with a query for each position": (lambda: Model("once", head="once"), ["layers.0", "head"]),
    "one query in a layer": (lambda: Model("once", "pool"), ["layers.0", "layers.1"]),
    "a pooling head by itself": (lambda: Attention("pool"), [""]),
    "what the model itself attends to": (lambda: Attention("differential"), ["", ""]),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own
@pytest.mark.parametrize(("case", "compiled"), [*((case, False) for case in CASES), ("no pooling head", True)])
def test_layers_are_the_modules_that_attend(case: str, compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    make, paths = CASES[case]
    model = make()
    student = torch.compile(model, backend="aot_eager") if compiled else model
    with capture_attention(student) as captured:
        student(torch.randn(2, 8, WIDTH))
    names = {module: name for name, module in model.named_modules()} | {None: ""}
    assert [names[call.module] for call in captured.calls] == paths
    assert captured.num_calls == len(paths)


@pytest.mark.parametrize("way", ["differential", "chunks"])
def test_a_layer_of_several_calls_is_refused_by_its_name(way: str) -> None:
    model, x = Model(way, way), torch.randn(2, 8, WIDTH)
    for layers in ([0, 1], [1], None, 2, TaughtLayers((1,), 2)):
        number = 0 if layers in ([0, 1], None, 2) else 1
        refused = pytest.raises(ShdError, match=rf"layers\.{number}.*, layer {number} of .*; got 2, .*layers=4")
        with refused as error, capture_attention(model, layers):
            model(x)
        assert error.value.code == "capture-failed"
    for layer_map in (2, [(0, 1)]):
        with pytest.raises(ShdError, match=r"layers\.[01].*one attention call each time it runs; got 2"):
            OnlineTeacher(model.eval(), 2, layer_map)(x)
    with capture_attention(model, 4) as captured:  # each call by itself, where that is asked for
        model(x)
    assert len(captured.calls) == 4


def test_another_layer_under_the_same_number_is_refused() -> None:
    """A layer that is dropped in each pass, and not the same one: there are as many calls, and others."""
    torch.manual_seed(0)
    model, x = Model("once", "once", "once", order=(0, 1)).eval(), torch.randn(2, 8, WIDTH)
    teacher = OnlineTeacher(model, 2, [(0, 0), (1, 1)])
    with capture_attention(model, TaughtLayers((0, 1), 2)) as captured:
        teacher(x)
        model(x)
        model.order = (0, 2)
        with refusal("capture-failed", r"layer 1 of Model must be layers\.1 in every forward pass.*got layers\.2"):
            model(x)
    assert captured.num_calls == 0
    with pytest.raises(ShdError, match=r"got layers\.2"):
        teacher(x)


class Hand(nn.Module):
    """A layer named after attention, whose products no tap sees."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = type("OwnAttention", (nn.Identity,), {})()

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


def test_a_teacher_with_an_unseen_layer_needs_pairs() -> None:
    torch.manual_seed(0)
    model, x = Model("once", "once", "once").eval(), torch.randn(2, 8, WIDTH)
    model.layers[0] = Hand()
    with refusal("capture-failed", r"among the unseen.*layers\.0.*name the pairs"):
        OnlineTeacher(model, 2, 2)(x)
    assert len(OnlineTeacher(model, 2, [(0, 0), (1, 1)])(x).supervise()) == 2


class Mixed(nn.Module):
    """Multi-head modules of PyTorch between fused calls."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.vit = PlainViT(num_layers=1)
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=self.need_weights)[0]
        for block in self.vit.blocks:
            x = block(x)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own
@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_modules_keep_their_place(need_weights: bool) -> None:
    """In a compiled student, which ran them past the taps; and in a teacher, which counted each twice."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Mixed(need_weights), torch.randn(2, 8, WIDTH)
    with capture_attention(model) as captured:
        expected = model(x)
    queries = [call.query for call in captured.calls]
    assert len(queries) == 3
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        with capture_attention(compiled) as captured:
            torch.testing.assert_close(compiled(x), expected)
        for call, query in zip(captured.calls, queries, strict=True):
            torch.testing.assert_close(call.query, query)
    teacher = OnlineTeacher(model.eval(), 2, [(0, 1), (1, 2)])
    for _ in range(2):
        taught = teacher(x)
    with torch.no_grad():
        for supervision, number in zip(taught.supervise(), (1, 2), strict=True):
            assert supervision.shape == (2, 2, 8, 8)
            weights = {number: _projection(model, number)}
            alone = OnlineTeacher(model, 2, [(0, number)], output_projections=weights)(x)
            assert torch.equal(alone.supervise()[0].probs(), supervision.probs())


def _projection(model: Mixed, number: int) -> Tensor:
    weight = model.layers[number].out_proj.weight if number < 2 else model.vit.blocks[0].proj.weight
    assert isinstance(weight, Tensor)
    return weight.mT


def test_the_last_hidden_state_is_after_the_final_norm() -> None:
    """As exported graphs have it, and so caches; ViTs of Hugging Face list the state before it."""
    transformers = pytest.importorskip("transformers", reason="a Hugging Face architecture")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=8, patch_size=4)).eval()
    outputs = model(pixel_values=torch.randn(2, 3, 8, 8), output_hidden_states=True)
    states = read_hidden_states(outputs, [1, 2], "ViT")
    assert torch.equal(states[1], outputs.hidden_states[1])
    assert torch.equal(states[2], outputs.last_hidden_state)
