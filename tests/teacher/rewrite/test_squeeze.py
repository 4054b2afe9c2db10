"""The squeeze in the graph computes what the reference computes; the judge also runs it in ONNX's own evaluator."""

from typing import Any, TypeAlias

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from support.attention_graphs import GraphBuilder, bare_attention, run_session
from support.refusals import refusal

from shd_ref import squeeze_heads, value_outputs
from shd_ref.cache import encode
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import (
    PrecomputeOptions,
    SqueezedGraph,
    compare_with_reference,
    find_sites,
    open_session,
    squeeze_graph,
)

Arrays: TypeAlias = dict[str, NDArray[Any]]

BATCH, ROWS, KEYS, D_V, D_MODEL = 3, 5, 7, 4, 10
MASK = np.array([[1] * 5, [1] * 3 + [0] * 2, [1] + [0] * 4])
PLANS = [(9, 3), (4, 4), (5, 1)]
CROSSED = (((0, 3), (5, 1)), ((0, 2), (1, 3)))  # explicit: pairs far apart, then groups of two with single heads
TOLERANCE = load_tolerances()["agreement"]["float32"]


def random_inputs(num_heads: int, seed: int = 0, num_layers: int = 1) -> Arrays:
    """Maps with an empty row, a causal sample and a nearly one-hot head."""
    rng = np.random.default_rng(seed)
    feeds: Arrays = {"mask": MASK}
    for layer in range(num_layers):
        logits = 2 * rng.normal(size=(BATCH, num_heads, ROWS, KEYS))
        logits[0, :, 2] = -np.inf  # a fully masked row
        logits[1, :, np.triu(np.ones((ROWS, KEYS), bool), 1)] = -np.inf
        logits[2, 0] *= 40  # nearly one-hot: tiny probabilities
        feeds[f"logits_{layer}"] = logits.astype(np.float32)
        feeds[f"values_{layer}"] = rng.normal(size=(BATCH, num_heads, KEYS, D_V)).astype(np.float32)
    return feeds


def squeeze(
    model: onnx.ModelProto, num_student_heads: int, *, row_mask_input: str | None = None, **options: Any
) -> SqueezedGraph:
    layers, asked = tuple(enumerate(find_sites(model))), PrecomputeOptions(num_student_heads, **options)
    return squeeze_graph(model, layers, asked, row_mask_input=row_mask_input, check_outputs=True)


def run(graph: SqueezedGraph, feeds: Arrays) -> Arrays:
    inputs = {value.name: feeds[value.name] for value in graph.model.graph.input}
    return run_session(open_session(graph.model.SerializeToString(), num_threads=1), inputs)


def assert_agrees(graph: SqueezedGraph, outputs: Arrays, *, mask: bool) -> None:
    """Maps, codes, alphas and degenerate flags against the reference, given the same maps and values."""
    query_mask = MASK.astype(bool) if mask else None
    for layer in graph.layers:
        rule = layer.rule
        assert layer.site.output_projection is not None
        expected = squeeze_heads(
            outputs[layer.names["probs"]],
            value_outputs(outputs[layer.names["values"]], layer.site.output_projection),
            len(rule.groups),
            plan=rule.rounds,
            strategy=rule.strategy,
            query_mask=query_mask,
            temperature=rule.temperature,
        )
        np.testing.assert_allclose(outputs[layer.names["merged"]], expected.probs, **TOLERANCE["probs"])
        alphas = outputs[layer.names["alphas"]]
        clipped = np.clip(alphas, 0, 1)
        if expected.alphas:
            np.testing.assert_allclose(clipped, np.concatenate(expected.alphas, axis=1), **TOLERANCE["alpha"])
            assert int(((alphas < 0) | (alphas > 1)).sum()) == expected.num_clipped
        if "degenerate" in layer.names:
            assert outputs[layer.names["degenerate"]].shape == alphas.shape
            assert int(outputs[layer.names["degenerate"]].sum()) == expected.num_degenerate
        codes = outputs[layer.names["codes"]]
        assert codes.dtype == np.uint8
        # The same quantiser, bit by bit, on the graph's own maps; the reference's maps within tolerance.
        np.testing.assert_array_equal(codes, encode("sqrt8-row", outputs[layer.names["merged"]]))
        wrong = np.mean(codes != encode("sqrt8-row", expected.probs))
        assert wrong <= load_tolerances()["graph"]["code_mismatch"]["float32"]


@pytest.mark.parametrize("heads", PLANS, ids=lambda heads: f"{heads[0]}to{heads[1]}")
@pytest.mark.parametrize("strategy", ["shd", "hard", "constant", "mean"])
def test_the_graph_equals_the_reference(heads: tuple[int, int], strategy: str) -> None:
    num_heads, num_student_heads = heads
    model = bare_attention(num_heads, D_V, D_MODEL)
    feeds = random_inputs(num_heads)
    # Each value beside each other value of another option.
    for plan, mask, temperature in (
        ("progressive", None, 1.0),
        ("progressive", "mask", 2.5),
        ("balanced", None, 2.5),
        ("balanced", "mask", 1.0),
    ):
        graph = squeeze(
            model, num_student_heads, plan=plan, strategy=strategy, row_mask_input=mask, temperature=temperature
        )
        masked = mask is not None and strategy in ("shd", "hard")  # the others read no values and no mask
        assert_agrees(graph, run(graph, feeds), mask=masked)


def test_explicit_plans() -> None:
    model, feeds = bare_attention(6, D_V, D_MODEL), random_inputs(6)
    for temperature in (1.0, 0.5):
        graph = squeeze(model, 2, plan=CROSSED, temperature=temperature, row_mask_input="mask")
        assert_agrees(graph, run(graph, feeds), mask=True)


def test_layers_share_one_function_and_keep_their_own_weights() -> None:
    graph = squeeze(bare_attention(4, num_layers=3), 2)
    assert len(graph.model.functions) == 1
    assert_agrees(graph, run(graph, random_inputs(4, num_layers=3)), mask=False)


def test_equal_heads_are_degenerate_and_merge_to_themselves() -> None:
    feeds = random_inputs(4)
    feeds["logits_0"][:, 1] = feeds["logits_0"][:, 0]
    graph = squeeze(bare_attention(4), 2, row_mask_input="mask")
    outputs = run(graph, feeds)
    (layer,) = graph.layers
    assert outputs[layer.names["degenerate"]][:, 0].all()
    np.testing.assert_array_equal(outputs[layer.names["alphas"]][:, 0], np.full(BATCH, 0.5, np.float32))
    np.testing.assert_allclose(outputs[layer.names["merged"]][:, 0], outputs[layer.names["probs"]][:, 0], atol=1e-7)
    assert_agrees(graph, outputs, mask=True)


def test_probabilities_below_the_smallest_normal_number_get_code_zero() -> None:
    feeds = random_inputs(2)
    feeds["logits_0"][:] = np.array([0, -80, -86, -88, -95, -200, -np.inf], np.float32)
    graph = squeeze(bare_attention(2), 2)
    outputs = run(graph, feeds)
    (layer,) = graph.layers
    np.testing.assert_array_equal(outputs[layer.names["codes"]], encode("sqrt8-row", outputs[layer.names["merged"]]))
    np.testing.assert_array_equal(outputs[layer.names["codes"]][0, 0, 0], [255, 1, 1, 0, 0, 0, 0])


def test_what_no_output_needs_is_pruned() -> None:
    model = bare_attention(4, num_layers=2)
    sites, before = find_sites(model), model.SerializeToString()
    graph = squeeze_graph(model, [(0, sites[0])], PrecomputeOptions(2))
    names = {value.name for value in graph.model.graph.output}
    (layer,) = graph.layers
    assert names == {layer.names["codes"], layer.names["alphas"], layer.names["degenerate"]}
    assert [value.name for value in graph.model.graph.input] == ["logits_0", "values_0"]
    projections = [tensor for tensor in graph.model.graph.initializer if list(tensor.dims) == [16, 10]]
    assert projections == []
    assert model.SerializeToString() == before, "the teacher is not changed"
    assert "logits_1" not in {name for node in graph.model.graph.node for name in node.input}
    onnx.checker.check_model(graph.model, full_check=True)


def test_a_wrong_squeeze_is_found_out() -> None:
    graph = squeeze(bare_attention(4), 2)
    outputs = run(graph, random_inputs(4))
    (layer,) = graph.layers
    for name, broken in (
        (layer.names["merged"], outputs[layer.names["merged"]] + np.float32(1e-4)),
        (layer.names["merged"], np.full_like(outputs[layer.names["merged"]], np.nan)),
        (layer.names["codes"], outputs[layer.names["codes"]] + np.uint8(1)),
    ):
        with refusal("graph-mismatch", "agree with the reference"):
            compare_with_reference(graph, {**outputs, name: broken})


@pytest.mark.parametrize("strategy", ["shd", "hard"])
def test_a_teacher_with_nan_shows_it_in_its_alphas(strategy: str) -> None:
    feeds = random_inputs(4)
    feeds["values_0"][0, 0, 0] = np.nan
    graph = squeeze(bare_attention(4), 2, strategy=strategy)
    outputs = run(graph, feeds)
    assert np.isnan(outputs[graph.layers[0].names["alphas"]][0, 0])
    with refusal("not-finite"):
        compare_with_reference(graph, outputs)


def test_a_single_value_head_that_the_product_broadcasts() -> None:
    model = bare_attention(4)
    model.graph.input[2].type.tensor_type.shape.dim[1].dim_value = 1
    (site,) = find_sites(model)
    assert (site.num_heads, site.num_kv_heads, site.shared_values, site.supported) == (4, 1, True, True)
    graph = squeeze(model, 2)
    feeds = random_inputs(4)
    feeds["values_0"] = feeds["values_0"][:, :1]
    assert_agrees(graph, run(graph, feeds), mask=False)


def test_layers_of_different_width_have_their_own_functions() -> None:
    """A constant merge reads no values, so there the same function serves both."""
    build = GraphBuilder()
    inputs: dict[str, tuple[int, list[str | int]]] = {}
    outputs = []
    for layer, d_v in enumerate((3, 5)):
        inputs[f"logits_{layer}"] = (TensorProto.FLOAT, ["batch", 4, "rows", "keys"])
        inputs[f"values_{layer}"] = (TensorProto.FLOAT, ["batch", 4, "keys", d_v])
        context = build.op("MatMul", build.op("Softmax", f"logits_{layer}", axis=-1), f"values_{layer}")
        outputs.append(build.project(context, 4 * d_v, 6))
    model = build.model(inputs, outputs)
    rng = np.random.default_rng(0)
    widths = {"logits_0": 3, "logits_1": 3, "values_0": 3, "values_1": 5}
    feeds = {name: rng.normal(size=(2, 4, 3, width)).astype(np.float32) for name, width in widths.items()}
    for strategy, num_functions in (("shd", 2), ("constant", 1)):
        graph = squeeze(model, 2, strategy=strategy)
        assert len(graph.model.functions) == num_functions
        assert_agrees(graph, run(graph, feeds), mask=False)
