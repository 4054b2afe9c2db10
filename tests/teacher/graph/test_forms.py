"""Forms of attention as exporters write them: each understood and equal to the reference, or refused for a reason."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from support.attention_graphs import (
    Change,
    GraphBuilder,
    attention_on_inputs,
    attention_operator,
    encoder_layer,
    only_site,
    random_projection,
    reason_of,
    run_session,
    saved,
    squeeze_and_compare,
)
from support.refusals import refusal

from shd_ref.teacher import find_factors, find_sites, load_teacher, open_session, projection_of
from shd_ref.teacher.graph import walk
from shd_ref.teacher.rewrite.tiles import find_tiles

Feeds = Mapping[str, NDArray[Any]]


def loaded(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return load_teacher(saved(model, folder))


def check_outputs(model: onnx.ModelProto, feeds: Feeds, *, added: NDArray[Any] | float = 0.0) -> NDArray[Any]:
    """The only attention's map, of which values, projection and what is added behind it make the graph's output."""
    tensors, factors = squeeze_and_compare(model, feeds, codec="float32")
    weight = projection_of(factors.site).reshape(2, factors.site.d_v, -1)
    result = (tensors["probs"] @ tensors["values"] @ weight).sum(axis=1) + added
    np.testing.assert_allclose(result, open_session(model, num_threads=1).run(None, feeds)[0], atol=1e-5)
    return tensors["probs"]


def inputs_of(rows: int = 4, keys: int = 4) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    return {
        "q": 2 * rng.normal(size=(3, 2, rows, 3)).astype(np.float32),
        "k": 2 * rng.normal(size=(3, 2, keys, 3)).astype(np.float32),
    }


@pytest.mark.parametrize(
    "form",
    [
        {"mask": "add"},
        {"mask": "where"},
        {"mask": None},
        {"mask": "where", "nan_guard": True},
        {"float16": True},
        {"float16": True, "mask": "where", "nan_guard": True},
        {"projection": "transposed"},
        {"projection": "gemm"},
        {"num_kv_heads": 2},
        {"num_kv_heads": 2, "kv_repeat": "tile"},
        {"num_kv_heads": 2, "kv_repeat": "gather"},
        {"num_kv_heads": 1},
        {"head_mask": True},
        {"opset": 13},
        *({"layout": layout} for layout in ("heads-batch", "batch-folded", "heads-folded")),
    ],
    ids=str,
)
def test_layers_of_every_form(form: dict[str, Any]) -> None:
    model, mask = encoder_layer(**form), (np.arange(5) < np.array([[5], [3], [1]])).astype(np.int64)
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 5, 12)).astype(np.float32), "mask": mask}
    tensors, factors = squeeze_and_compare(model, feeds, heads=2, codec="float32")
    site = factors.site
    assert (site.num_heads, site.num_kv_heads) == (4, form.get("num_kv_heads", 4))
    assert (site.d_k, site.d_v, site.d_model, site.cross) == (3, 3, 14, False)
    assert site.layout == form.get("layout", "batch-heads")
    tolerance = 1e-3 if form.get("float16") else 0.0
    np.testing.assert_allclose(projection_of(site), random_projection(12, 14, 4), atol=tolerance)
    assert factors.num_kv_heads == site.num_kv_heads
    if "num_kv_heads" not in form:  # the same weights in the plainest form give the same maps
        plain = encoder_layer(mask=None if "layout" in form else form.get("mask", "add"))
        maps = squeeze_and_compare(plain, feeds, heads=2, codec="float32")[0]["merged"]
        np.testing.assert_allclose(tensors["merged"], maps, atol=5e-3 if "float16" in form else 1e-6)


CAUSAL = np.tri(4, dtype=np.float32)
FIXED: dict[str, Any] = {name: (TensorProto.FLOAT, ["batch", 2, 4, 3]) for name in ("q", "k")}
"""Inputs of as many rows and keys as constants have."""


def row_sum(build: GraphBuilder, tensor: str) -> str:
    return build.op("ReduceSum", tensor, [-1], keepdims=1)


def written_out(build: GraphBuilder, logits: str) -> str:
    powers = build.op("Exp", build.op("Sub", logits, build.op("ReduceMax", logits, [-1])))
    return build.op("Div", powers, row_sum(build, powers))


def plus_one(build: GraphBuilder, logits: str) -> str:
    powers = build.op("Exp", logits)
    return build.op("Div", powers, build.op("Add", np.float32(1), row_sum(build, powers)))


def plus_one_from_the_maximum(build: GraphBuilder, logits: str) -> str:
    highest = build.op("ReduceMax", logits, [-1])
    powers = build.op("Exp", build.op("Sub", logits, highest))
    return build.op("Div", powers, build.op("Add", build.op("Exp", build.op("Neg", highest)), row_sum(build, powers)))


def competing_rows(build: GraphBuilder, logits: str) -> str:
    """Slot attention: rows compete for keys, and each row's share is scaled to one."""
    shares = build.op("Softmax", logits, axis=-2)
    return build.op("Div", shares, row_sum(build, shares))


def masked_powers(build: GraphBuilder, logits: str) -> str:
    powers = build.op("Mul", build.op("Exp", logits), CAUSAL)
    return build.op("Div", powers, build.op("Clip", row_sum(build, powers), np.float32(1e-6)))


def masked_behind(build: GraphBuilder, logits: str) -> str:
    kept = build.op("Mul", build.op("Softmax", logits, axis=-1), CAUSAL)
    return build.op("Div", kept, build.op("Add", row_sum(build, kept), np.float32(1e-12)))


def squares(build: GraphBuilder, logits: str) -> str:
    positive = build.op("Relu", build.op("Add", logits, np.float32(1)))
    squared = build.op("Mul", positive, positive)
    return build.op("Div", squared, build.op("Add", row_sum(build, squared), np.float32(1e-8)))


NORMALISED: dict[str, tuple[Change, str]] = {
    "written out": (written_out, "one"),
    "plus one": (plus_one, "at_most_one"),
    "plus one from the maximum": (plus_one_from_the_maximum, "at_most_one"),
    "competing rows": (competing_rows, "one"),
    "masked powers": (masked_powers, "one"),
    "masked behind": (masked_behind, "one"),
    "squares": (squares, "one"),
    "log-softmax": (lambda b, z: b.op("Exp", b.op("LogSoftmax", z, axis=-1)), "one"),
    "log-sum-exp": (lambda b, z: b.op("Exp", b.op("Sub", z, b.op("ReduceLogSumExp", z, [-1]))), "one"),
}


@pytest.mark.parametrize("form", NORMALISED)
def test_rows_that_are_scaled_to_one_in_every_form(form: str) -> None:
    normalise, row_sums = NORMALISED[form]
    model = attention_on_inputs(normalise=normalise, **FIXED)
    site = only_site(model)
    assert site.row_sums == row_sums
    (tiles,) = find_tiles(model, [site])
    assert str(tiles.reason).startswith("Softmax stands on the way") == (form == "competing rows")
    sums = check_outputs(model, inputs_of()).sum(axis=-1)
    assert (sums < 0.99).any() if row_sums == "at_most_one" else np.allclose(sums, 1, atol=1e-5)


def test_a_form_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another spelling of a softmax touches one function: maps, values, queries and keys follow from it."""

    def spell(build: GraphBuilder, logits: str) -> str:
        return build.op("Exp", build.op("Sub", logits, build.op("Log", row_sum(build, build.op("Exp", logits)))))

    model = attention_on_inputs(normalise=spell, **FIXED)
    assert not find_sites(model)
    read_known = walk.read_map

    def read_map(node: Any) -> walk.Spelling | None:
        steps, value = [], node.outputs[0] if node.op_type == "Exp" else None
        for slot in (0, 1, 0, 0):  # into the exponential, the subtracted logarithm, its sum
            producer = None if value is None else value.producer()
            steps.append("" if producer is None else producer.op_type)
            value = None if producer is None or len(producer.inputs) <= slot else producer.inputs[slot]
        if steps == ["Exp", "Sub", "Log", "ReduceSum"]:
            return walk.Spelling(node.inputs[0].producer().inputs[0])
        return read_known(node)

    monkeypatch.setattr(walk, "read_map", read_map)
    check_outputs(model, inputs_of())


LOGITS: dict[str, Change] = {
    "Where": lambda b, z: b.op("Where", b.op("Cast", CAUSAL, to=TensorProto.BOOL), z, np.float32(-np.inf)),
    "Mul and Sub": lambda b, z: b.op(
        "Sub", b.op("Mul", z, CAUSAL), b.op("Mul", np.float32(1e4), b.op("Sub", np.float32(1), CAUSAL))
    ),
    "Add": lambda b, z: b.op("Add", z, np.triu(np.full((4, 4), -1e9, np.float32), 1)),
    "Max": lambda b, z: b.op("Max", b.op("Add", z, np.float32(-1.0)), np.float32(-3e38)),
    "softcap": lambda b, z: b.op("Mul", b.op("Tanh", b.op("Div", z, np.float32(5))), np.float32(5)),
    "relative positions": lambda b, z: b.op(
        "Add",
        z,
        b.op(
            "Transpose",
            b.op("Gather", random_projection(7, 2), np.abs(np.arange(4)[:, None] - np.arange(4))),
            perm=[2, 0, 1],
        ),
    ),
    "ALiBi": lambda b, z: b.op(
        "Add",
        z,
        b.op(
            "Mul",
            np.float32([0.5, 0.25]).reshape(2, 1, 1),
            -np.abs(np.arange(4, dtype=np.float32)[:, None] - np.arange(4, dtype=np.float32)),
        ),
    ),
    "cast to half and back": lambda b, z: b.op("Cast", b.op("Cast", z, to=TensorProto.FLOAT16), to=TensorProto.FLOAT),
}


@pytest.mark.parametrize("form", LOGITS)
def test_logits_of_every_form(form: str) -> None:
    squeeze_and_compare(attention_on_inputs(LOGITS[form], **FIXED), inputs_of())


def guard(build: GraphBuilder, probs: str) -> str:
    return build.op("Where", build.op("IsNaN", probs), np.float32(0), probs)


@pytest.mark.parametrize("opset", range(13, 25))
def test_every_operator_set(opset: int) -> None:
    model = attention_on_inputs(LOGITS["Where"], guard, opset=opset, **FIXED)
    squeeze_and_compare(model, inputs_of())


def add_sink(build: GraphBuilder, logits: str) -> str:
    sinks = build.const(np.float32([1.0, 0.0]).reshape(1, 2, 1, 1))
    shape = build.op("Shape", logits)
    wanted = build.op("Concat", build.op("Slice", shape, [0], [3]), [1], axis=0)
    return build.op("Concat", logits, build.op("Expand", sinks, wanted), axis=-1)


def cut_sink(build: GraphBuilder, probs: str) -> str:
    first, last, axis = (build.const(np.array([place])) for place in (0, -1, 3))
    return build.op("Slice", probs, first, last, axis)


def test_rows_with_attention_sinks_keep_their_sums() -> None:
    model = attention_on_inputs(add_sink, cut_sink)
    assert only_site(model).row_sums == "at_most_one"
    squeeze_and_compare(model, inputs_of(), codec="float32")
    for options in ({"codec": "sqrt8-row"}, {"codec": "float32", "temperature": 2.0}):
        with refusal("graph-unsupported", "attention sinks"):
            squeeze_and_compare(model, inputs_of(), **options)


@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_past_keys_and_values(num_kv_heads: int) -> None:
    def joined(build: GraphBuilder, keys: str) -> str:
        both = build.op("Concat", "past", keys, axis=2)
        return both if num_kv_heads == 2 else build.op("Gather", both, [0, 0], axis=1)

    shapes: dict[str, Any] = {
        name: (TensorProto.FLOAT, ["batch", num_kv_heads, axis, 3])
        for name, axis in (("k", "rows"), ("past", "past"))
    }
    model, feeds = attention_on_inputs(change_keys=joined, **shapes), inputs_of()
    site = only_site(model)
    assert (site.num_heads, site.num_kv_heads) == (2, num_kv_heads)
    past = np.ones((3, num_kv_heads, 5, 3), np.float32)
    check_outputs(model, {"q": feeds["q"], "k": feeds["k"][:, :num_kv_heads], "past": past})


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"rank": 4},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"masked": True},
        {"is_causal": 1},
        {"softcap": 2.0},
        {"scale": 2.0},
    ],
    ids=str,
)
def test_the_standard_attention_operator(form: dict[str, Any], opset: int, tmp_path: Path) -> None:
    model = attention_operator(opset, **form)
    plain_model = loaded(model, tmp_path)
    feeds: Feeds = {
        "x": 2 * np.random.default_rng(0).normal(size=(3, 4, 12)).astype(np.float32),
        "mask": (np.arange(4) < np.array([[4], [3], [1]])).astype(np.int64),
    }
    _, factors = squeeze_and_compare(plain_model, feeds, heads=2)
    assert factors.num_kv_heads == (0 if "softcap" in form else form.get("num_kv_heads", 2))
    fed = {value.name: feeds[value.name] for value in model.graph.input}
    runs = [run_session(open_session(one, num_threads=1), fed) for one in (model, plain_model)]
    for fused, plain in zip(*(run.values() for run in runs), strict=True):
        np.testing.assert_allclose(fused, plain, atol=1e-5)


def test_weights_that_are_also_inputs() -> None:
    """As graphs of the first IR versions list every initialiser among the inputs."""
    model = encoder_layer()
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    assert only_site(model).supported, only_site(model).reason
    rng = np.random.default_rng(0)
    feeds = {"x": 3 * rng.normal(size=(2, 5, 12)).astype(np.float32), "mask": np.ones((2, 5), np.int64)}
    squeeze_and_compare(model, feeds, heads=2)


def test_bfloat16_teachers_are_found() -> None:
    model = encoder_layer(float16=True, mask="where")
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            numbers = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.BFLOAT16, numbers.shape, numbers.ravel()))
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.BFLOAT16
    site = only_site(model)
    assert site.supported, site.reason
    assert (site.num_heads, site.d_v, site.dtype) == (4, 3, "float32")
    assert site.output_projection is not None
    np.testing.assert_allclose(site.output_projection, random_projection(12, 14, 4), atol=1e-2)


def in_branch(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same computation in both branches of an If."""
    nodes, tensors = list(model.graph.node), list(model.graph.initializer)
    output = model.graph.output[0]
    then = helper.make_graph(nodes, "then", [], [output], tensors)
    other = helper.make_graph(nodes, "else", [], [output], tensors)
    node = helper.make_node("If", ["cached"], ["result"], then_branch=then, else_branch=other)
    inputs = [*model.graph.input, helper.make_tensor_value_info("cached", TensorProto.BOOL, [])]
    result = helper.make_tensor_value_info("result", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "merged", inputs, [result])
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


@pytest.mark.parametrize("merged", [True, False])
def test_attention_inside_control_flow_is_refused(merged: bool) -> None:
    """As a merged decoder it is named with the file to take: an input chooses the body."""
    model = in_branch(attention_on_inputs())
    if not merged:
        model.graph.node[0].input[0] = "first"
        model.graph.node.insert(0, helper.make_node("Not", ["cached"], ["first"]))
    words = ["merged decoder", "'cached'", "take the file with one body next to it (decoder_model.onnx"]
    sites = find_sites(model)
    assert [site.supported for site in sites] == [False, False]
    for site in sites:
        assert all(
            word in str(site.reason) for word in (words if merged else ("inside the body of If", "control flow"))
        )


@pytest.mark.parametrize("order", [1, -1], ids=["queries and maps first", "second"])
def test_both_products_by_equation(order: int, tmp_path: Path) -> None:
    def equation(build: GraphBuilder, output: str, **operands: str) -> str:
        pairs = list(operands.items())[::order]
        letters = ",".join(term for term, _ in pairs)
        return build.op("Einsum", *(name for _, name in pairs), equation=f"{letters}->{output}")

    def normalise(build: GraphBuilder, _: str) -> str:
        return build.op("Softmax", equation(build, "bhls", bhld="q", bhsd="k"), axis=-1)

    def multiply(build: GraphBuilder, probs: str) -> str:
        return build.op("Transpose", equation(build, "bhdl", bhls=probs, bhsd="k"), perm=[0, 1, 3, 2])

    model, feeds = attention_on_inputs(normalise=normalise, multiply=multiply), inputs_of(rows=3, keys=5)
    model, plain = loaded(model, tmp_path), attention_on_inputs()
    np.testing.assert_allclose(check_outputs(model, feeds), check_outputs(plain, feeds), atol=1e-5)
    (factors,) = find_factors(model, find_sites(model))
    assert factors.supported, factors.reason


MIXING = np.float32([[0.5, -1.0], [2.0, 0.25]])


def mixed_by_product(build: GraphBuilder, probs: str) -> str:
    behind = build.op("Transpose", probs, perm=[0, 2, 3, 1])
    return build.op("Transpose", build.op("MatMul", behind, MIXING), perm=[0, 3, 1, 2])


MIXED: dict[str, Change] = {
    "product": mixed_by_product,
    "convolution": lambda b, p: b.op("Conv", p, MIXING.T.reshape(2, 2, 1, 1).copy()),
    "equation": lambda b, p: b.op("Einsum", p, MIXING, equation="bhls,hg->bgls"),
    "with a bias": lambda b, p: b.op("Add", mixed_by_product(b, p), np.float32([[[1]], [[-1]]])),
}


@pytest.mark.parametrize("form", MIXED)
def test_maps_that_are_mixed_among_heads_give_joined_values(form: str, tmp_path: Path) -> None:
    """The map is the softmax's; what it gives is all that the heads which it is mixed into make of it."""
    model = loaded(attention_on_inputs(change_probs=MIXED[form]), tmp_path)
    site, feeds, added = only_site(model), inputs_of(rows=3, keys=5), 0.0
    assert (site.num_heads, site.joined_values, site.row_sums) == (2, True, "one")
    if form == "with a bias":  # which depends on no map
        weight = random_projection(6, 5).reshape(2, 3, 5)
        added = (feeds["k"].sum(axis=2)[:, :, None] @ weight * np.float32([[[1]], [[-1]]])).sum(axis=1)
    np.testing.assert_allclose(check_outputs(model, feeds, added=added).sum(axis=-1), 1.0, atol=1e-5)


def mixed_over_rows(build: GraphBuilder, probs: str) -> str:
    weight = build.const(random_projection(4, 4))
    turned = build.op("Transpose", probs, perm=[0, 1, 3, 2])
    return build.op("Transpose", build.op("MatMul", turned, weight), perm=[0, 1, 3, 2])


def test_a_layer_whose_map_takes_part_in_another_keeps_its_own() -> None:
    """Two layers; the values of the second one are multiplied by the mean of both maps."""
    build = GraphBuilder()
    maps = [
        build.op("Softmax", build.op("MatMul", "q", build.op("Transpose", keys, perm=[0, 1, 3, 2])), axis=-1)
        for keys in ("k", build.op("Tanh", "k"))
    ]
    mean = build.op("Mul", build.op("Add", *maps), np.float32(0.5))
    outputs = [
        build.project(build.op("MatMul", probs, "k"), 6, 5, seed) for seed, probs in enumerate((maps[0], mean))
    ]
    first, second = find_sites(build.model(FIXED, outputs))
    assert (first.supported, second.supported) == (True, False), first.reason
    assert [first.name, second.name] == maps
    assert "made of its map by other operators" in str(second.reason)


OPEN: dict[str, Any] = dict.fromkeys("qk", (TensorProto.FLOAT, None))


def convolved(build: GraphBuilder, probs: str) -> str:
    return build.op("Conv", probs, np.ones((2, 1, 3, 3), np.float32), pads=[1] * 4, group=2)


def less_another(build: GraphBuilder, probs: str) -> str:
    other = build.op("MatMul", build.op("Tanh", "q"), build.op("Transpose", "k", perm=[0, 1, 3, 2]))
    return build.op("Sub", probs, build.op("Mul", build.op("Softmax", other, axis=-1), np.float32(0.3)))


def gated(build: GraphBuilder, probs: str) -> str:
    gate = build.op("ReduceSum", "q", [-1], keepdims=1)
    return build.op("Mul", probs, build.op("Sigmoid", gate))


def normalised_before_projection() -> onnx.ModelProto:
    model = attention_on_inputs()
    *_, last = model.graph.node
    name = last.input[0]
    scale = numpy_helper.from_array(np.ones(6, np.float32), "norm_scale")
    model.graph.initializer.append(scale)
    node = helper.make_node("LayerNormalization", [name, "norm_scale"], ["normed"])
    model.graph.node.insert(len(model.graph.node) - 1, node)
    last.input[0] = "normed"
    return model


REFUSED: dict[str, list[tuple[str, Change]]] = {
    "the map is transposed on its way": [("change_probs", lambda b, p: b.op("Transpose", p, perm=[0, 1, 3, 2]))],
    "meet in Einsum": [("multiply", lambda b, p: b.op("Einsum", p, "k", equation="bhls,bhsd->bhld"))],
    "made of its map by other operators, as in differential attention": [
        ("change_probs", less_another),
        ("change_probs", lambda b, p: b.op("Add", b.op("Mul", p, np.float32(0.9)), np.float32(0.1 / 4))),
        ("change_probs", lambda b, p: b.op("AveragePool", p, kernel_shape=[3, 3], pads=[1] * 4)),
    ],
    "not a matrix over heads": [
        ("change_probs", lambda b, p: b.op("Mul", mixed_by_product(b, p), CAUSAL)),
        ("change_probs", lambda b, p: mixed_by_product(b, mixed_by_product(b, p))),
        ("change_probs", mixed_over_rows),
    ],
    "not over the last axis": [("normalise", lambda b, z: b.op("Softmax", z, axis=2))],
}


def linear_attention() -> onnx.ModelProto:
    """Keys and values are multiplied first; the softmax of a query is over its features."""

    def multiply(build: GraphBuilder, _: str) -> str:
        memory = build.op("MatMul", build.op("Transpose", build.op("Exp", "k"), perm=[0, 1, 3, 2]), "k")
        return build.op("MatMul", build.op("Softmax", "q", axis=-1), memory)

    return attention_on_inputs(normalise=lambda _, logits: logits, multiply=multiply)


def test_a_map_that_is_changed_after_the_softmax_is_no_distribution() -> None:
    with refusal("graph-unsupported", "changed after the softmax, as by a gate"):
        squeeze_and_compare(attention_on_inputs(change_probs=gated), inputs_of())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        *((attention_on_inputs(**{name: change}), why) for why, rows in REFUSED.items() for name, change in rows),
        *(
            (attention_on_inputs(change_probs=convolved, **shapes), "made of its map by")
            for shapes in ({}, FIXED, OPEN)
        ),
        (normalised_before_projection(), "they go to LayerNormalization"),
        (linear_attention(), "it is linear attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused_with_its_reason(model: onnx.ModelProto, reason: str) -> None:
    words = reason_of(model)
    assert reason in words
    assert "export" in words or "choose other layers" in words
