from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from support import attention_graphs
from support.attention_graphs import (
    Change,
    GraphBuilder,
    attention_on_inputs,
    encoder_layer,
    only_site,
    random_projection,
    reason_of,
)
from support.refusals import refusal

from shd_ref.teacher import PrecomputeOptions, find_sites, load_teacher, open_session, squeeze_graph


def test_sites_follow_the_data_and_have_unique_names() -> None:
    model = attention_graphs.bare_attention(3, num_layers=3)
    for node in model.graph.node:
        if node.op_type == "Softmax":
            node.name = "same"
    sites = find_sites(model)
    assert [site.layer for site in sites] == [0, 1, 2]
    assert len({site.name for site in sites}) == 3
    assert [site.probs for site in sites] == ["probs_0", "probs_1", "probs_2"]


def test_unsorted_graphs_are_walked_in_data_order() -> None:
    model = encoder_layer()
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    assert only_site(model).supported


def attention_on(build: GraphBuilder, query: str, key: str) -> onnx.ModelProto:
    """One head of width 6 on projected queries and keys; the values are those of ``x``."""
    turned = build.op("Transpose", key, perm=[0, 2, 1])
    probs = build.op("Softmax", build.op("MatMul", query, turned), axis=-1)
    context = build.op("MatMul", probs, times(build, "x", 8))
    output = build.op("MatMul", context, random_projection(6, 6, 9))
    shapes = {"x": ["batch", "length", 6], "condition": ["batch", 1, 6]}
    read = {name for node in build.nodes for name in node.input}
    inputs = {name: (TensorProto.FLOAT, shape) for name, shape in shapes.items() if name in read}
    return build.model(inputs, [output])


def times(build: GraphBuilder, value: str, seed: int) -> str:
    return build.op("MatMul", value, random_projection(6, 6, seed))


def low_rank(build: GraphBuilder, value: str) -> str:
    return times(build, times(build, value, 4), 5)


def latent(build: GraphBuilder, value: str) -> str:
    """Part of the width, normed by its mean square, projected again."""
    wide = build.op("MatMul", value, random_projection(6, 8, 6))
    cut = build.op("Slice", wide, [0], [6], [-1])
    square = build.op("ReduceMean", build.op("Mul", cut, cut), [-1], keepdims=1)
    return times(build, build.op("Div", cut, build.op("Sqrt", square)), 7)


@pytest.mark.parametrize(
    ("query", "key", "cross"),
    [
        (lambda b: low_rank(b, "x"), lambda b: times(b, "x", 1), False),
        (lambda b: b.op("Add", low_rank(b, "x"), times(b, "x", 1)), lambda b: times(b, "x", 2), False),
        (lambda b: latent(b, "x"), lambda b: latent(b, "x"), False),
        (lambda b: times(b, "condition", 1), lambda b: latent(b, "x"), True),
    ],
    ids=["low rank", "adapter", "two latents", "another input"],
)
def test_queries_and_keys_of_one_tensor_are_self_attention_however_they_are_projected(
    query: Callable[[GraphBuilder], str], key: Callable[[GraphBuilder], str], cross: bool
) -> None:
    build = GraphBuilder()
    assert only_site(attention_on(build, query(build), key(build))).cross is cross


def test_classifiers_and_routers_are_no_sites() -> None:
    build = GraphBuilder()
    scores = build.op("MatMul", "x", random_projection(6, 4))
    routed = build.op("MatMul", build.op("Softmax", scores, axis=-1), random_projection(4, 6))
    # The shares of the best experts are scaled to one, and sum what these give.
    shares = build.op("Softmax", scores, axis=-1)
    scaled = build.op("Div", shares, build.op("ReduceSum", shares, [-1], keepdims=1))
    experts = build.op("Relu", build.op("MatMul", routed, random_projection(6, 4, 2)))
    routed = build.op("Add", routed, build.op("ReduceSum", build.op("Mul", scaled, experts), [-1], keepdims=1))
    output = build.op("Softmax", build.op("MatMul", routed, random_projection(6, 3)), axis=-1)
    assert find_sites(build.model({"x": (TensorProto.FLOAT, ["batch", "length", 6])}, [output])) == ()


@pytest.mark.parametrize(
    ("op_type", "domain"),
    [("Attention", ""), ("Attention", "com.microsoft"), ("MultiHeadAttention", "com.microsoft")],
)
def test_fused_attention_is_reported_with_the_remedy(op_type: str, domain: str) -> None:
    build = GraphBuilder()
    attributes = {"q_num_heads": 2, "kv_num_heads": 1} if not domain else {"num_heads": 2}
    output = build.op(op_type, "x", "x", "x", domain=domain, **attributes)
    site = only_site(build.model({"x": (TensorProto.FLOAT, ["batch", "length", 6])}, [output], opset=24))
    assert not site.supported
    assert site.num_heads == 2
    assert site.reason is not None
    assert "attention fusion off" in site.reason


def test_a_circular_graph_is_refused() -> None:
    model = encoder_layer()
    first = next(node for node in model.graph.node if node.op_type == "MatMul")
    first.input[0] = "context"
    with refusal("graph-invalid", "circle"):
        find_sites(model)


def test_a_graph_that_does_not_run_is_refused_with_its_reason() -> None:
    model = encoder_layer(layout="batch-folded")
    product = next(node for node in model.graph.node if node.op_type == "MatMul")
    bad = onnx.numpy_helper.from_array(np.ones((7, 12), np.float32), "bad")
    model.graph.initializer.append(bad)
    product.input[1] = "bad"
    assert "number of heads" in reason_of(model)


def old_graph(last: str, **attributes: Any) -> onnx.ModelProto:
    """Attention in operator set 11, and behind it an operator that ONNX got later or does not know."""
    build = GraphBuilder()
    probs = build.op("Softmax", "logits", axis=3)
    projected = build.project(build.op("MatMul", probs, "values"), 6, 5)
    ones = build.const(np.ones(5, np.float32))
    inputs = {
        "logits": (TensorProto.FLOAT, ["batch", 2, "rows", "keys"]),
        "values": (TensorProto.FLOAT, ["batch", 2, "keys", 3]),
    }
    return build.model(inputs, [build.op(last, projected, ones, **attributes)], opset=11)


def test_old_operator_sets_are_converted_also_with_norms_that_onnx_did_not_know(tmp_path: Path) -> None:
    old = old_graph("LayerNormalization", axis=-1)
    onnx.save(old, tmp_path / "old.onnx")
    converted = load_teacher(tmp_path / "old.onnx")
    assert [(entry.domain, entry.version) for entry in converted.opset_import] == [("", 18)]
    assert only_site(converted).supported
    rng = np.random.default_rng(0)
    feeds = {
        "logits": rng.normal(size=(2, 2, 4, 4)).astype(np.float32),
        "values": rng.normal(size=(2, 2, 4, 3)).astype(np.float32),
    }
    runs = [open_session(model.SerializeToString()).run(None, feeds)[0] for model in (old, converted)]
    np.testing.assert_allclose(*runs, atol=1e-6)


def test_old_graphs_without_a_conversion_are_refused_by_inspection_too(tmp_path: Path) -> None:
    onnx.save(old_graph("SimplifiedLayerNormalization", axis=-1), tmp_path / "old.onnx")
    model = load_teacher(tmp_path / "old.onnx")
    assert "operator set 13 or later; got 11" in reason_of(model)
    with refusal("graph-unsupported", "re-export it with opset 18"):
        squeeze_graph(model, [(0, only_site(model))], PrecomputeOptions(1))


def two_tensors(build: GraphBuilder, probs: str) -> str:
    return build.op("Add", *(build.op("MatMul", probs, values) for values in ("k", build.op("Relu", "k"))))


def parts_of_the_keys(build: GraphBuilder, probs: str) -> str:
    def cut(tensor: str, first: int, last: int, axis: int) -> str:
        return build.op("Slice", tensor, [first], [last], [axis])

    bounds = ((0, 1), (1, 2**31))
    return build.op("Add", *(build.op("MatMul", cut(probs, *ends, 3), cut("k", *ends, 2)) for ends in bounds))


@pytest.mark.parametrize("multiply", [two_tensors, parts_of_the_keys])
def test_a_map_that_multiplies_two_tensors_is_refused(multiply: Change) -> None:
    assert "its map multiplies 2 tensors" in reason_of(attention_on_inputs(multiply=multiply))
