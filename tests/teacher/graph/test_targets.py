"""Logits and hidden states: which tensors they are, and what is refused.

That they are what the model itself gives is tested with its architectures.
"""

import onnx
import pytest
from support.attention_graphs import GraphBuilder, bare_attention
from support.refusals import refusal

from shd_ref.teacher import PrecomputeOptions, find_sites, find_targets


def test_a_state_without_a_residual_connection_is_refused_by_its_site() -> None:
    model = bare_attention(4)
    with refusal("graph-unsupported", "hidden state 0 must be what is added to the output of attention site 0"):
        find_targets(model, find_sites(model), PrecomputeOptions(hidden=(0,)))
    with refusal("graph-unsupported", "hidden state 1, what leaves the last block, must be an output"):
        find_targets(model, find_sites(model), PrecomputeOptions(hidden=(1,)))


def two_outputs(names: tuple[str, str], ranks: tuple[int, int] = (3, 3)) -> onnx.ModelProto:
    """A graph of which only the outputs matter."""
    graph = GraphBuilder()
    model = graph.model({"x": (onnx.TensorProto.FLOAT, ("batch", 4))}, [])
    for name, rank in zip(names, ranks, strict=True):
        model.graph.node.append(onnx.helper.make_node("Identity", ["x"], [name]))
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None] * rank))
    return model


def logits_of(model: onnx.ModelProto, output: str | None = None) -> str:
    return find_targets(model, (), PrecomputeOptions(logits="topk", logits_output=output)).names["logits"]


def test_logits_are_the_output_of_that_name_or_the_only_one_of_their_shape() -> None:
    assert logits_of(two_outputs(("scores", "logits"))) == "logits"
    assert logits_of(two_outputs(("scores", "present"), (3, 4))) == "scores"
    assert logits_of(two_outputs(("a", "b")), "b") == "b"


@pytest.mark.parametrize(("output", "message"), [(None, "it has a, b: name it"), ("c", "one of a, b; got 'c'")])
def test_logits_that_cannot_be_told_are_refused(output: str | None, message: str) -> None:
    with refusal("argument-value", message):
        logits_of(two_outputs(("a", "b")), output)
