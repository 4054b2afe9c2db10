"""The taps share the process with other people's patches and with other threads."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.binding.models import NUM_LAYERS, PlainViT
from support.refusals import refusal
from torch import Tensor, nn

from shd_torch import OnlineTeacher, capture_attention


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Somebody puts a function in the place of PyTorch's, as libraries do."""

    def put(function: Any, name: str = "scaled_dot_product_attention", home: Any = F) -> None:
        monkeypatch.setattr(home, name, function)

    return put


class Doubled:
    """Somebody's own attention, in the place of PyTorch's."""

    def __init__(self) -> None:
        self.original, self.calls = F.scaled_dot_product_attention, 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        self.calls += 1
        return 2 * self.original(q, k, v, is_causal=is_causal)


def in_another_thread(function: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def test_a_replaced_function_runs_and_is_tapped(install: Callable[..., None]) -> None:
    torch.manual_seed(0)
    model, images, mine = PlainViT().eval(), torch.randn(2, 3, 16, 16), Doubled()
    with capture_attention(model, NUM_LAYERS) as captured:
        ordinary = model(images)
    queries = [call.query for call in captured.calls]
    install(mine)
    plain = model(images)
    assert not torch.equal(plain, ordinary)
    with capture_attention(model, NUM_LAYERS) as captured:
        assert torch.equal(model(images), plain)
    assert F.scaled_dot_product_attention is mine
    assert torch.equal(captured.calls[0].query, queries[0])
    assert torch.equal(OnlineTeacher(model, 2, NUM_LAYERS)(images).output, plain)
    assert mine.calls == 3 * NUM_LAYERS


def test_keywords_of_unknown_meaning_are_refused(install: Callable[..., None]) -> None:
    original = F.scaled_dot_product_attention
    install(lambda q, k, v, tensor_layout="HND": original(q, k, v))

    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, tensor_layout="NHD")  # type: ignore[call-arg]

    model = Other()
    with capture_attention(model), refusal("capture-failed", "got tensor_layout"):
        model(torch.randn(1, 2, 3, 4))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own
def test_a_compiled_student_is_compiled_once_for_each_function(install: Callable[..., None]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    graphs: list[object] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, images = PlainViT(num_layers=1), torch.randn(2, 3, 16, 16)
    model.blocks[0].compile(backend=count)
    ours = F.scaled_dot_product_attention

    def theirs(*args: Any, **kwargs: Any) -> Tensor:
        return 2 * ours(*args, **kwargs)

    compiled_after = []
    for function in (ours, theirs, ours, theirs):
        install(function)
        for _ in range(2):
            with capture_attention(model, 1):
                model(images)
        compiled_after.append(len(graphs))
    assert compiled_after[0] < compiled_after[1] == compiled_after[2] == compiled_after[3]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_of_another_thread_is_not_recorded(compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, other, images = PlainViT(), PlainViT(num_layers=3), torch.randn(2, 3, 16, 16)
    if compiled:
        for block in other.blocks:
            block.compile(backend="eager")
        with capture_attention(other, 3):
            other(images)  # so that there is a graph that records
    model.blocks[0].register_forward_hook(lambda *_: in_another_thread(lambda: other(images)))
    with capture_attention(model, NUM_LAYERS) as captured:
        model(images)
    assert captured.num_calls == NUM_LAYERS
