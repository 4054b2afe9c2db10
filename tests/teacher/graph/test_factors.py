from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from support.attention_graphs import (
    GraphBuilder,
    attention_on_inputs,
    attention_operator,
    bare_attention,
    encoder_layer,
)
from support.refusals import refusal

from shd_ref.conformance import load_tolerances
from shd_ref.teacher import find_factors, find_sites, load_teacher, open_session
from shd_ref.teacher.graph.factors import SiteFactors
from shd_ref.teacher.opening.body import FLOAT, Body
from shd_ref.teacher.rewrite.function import add_factors, site_tensors
from shd_ref.teacher.rewrite.squeeze import assemble_graph

HEADS = 4


def only_factors(model: onnx.ModelProto) -> SiteFactors:
    (factors,) = find_factors(model, find_sites(model))
    return factors


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: NDArray[np.float64] = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def check_factors(model: onnx.ModelProto, feeds: dict[str, NDArray[Any]], allowed: NDArray[np.bool_] | bool) -> None:
    """The map of the site is the softmax of its queries and keys, for whoever may attend."""
    factors = only_factors(model)
    assert factors.supported, factors.reason
    body = Body("test/", 18)
    names = ("queries", "keys", "probs")
    for name, tensor in zip(names, (*add_factors(body, factors), site_tensors(body, factors.site)[0]), strict=True):
        body.output(body.op("Cast", tensor, to=FLOAT), name, FLOAT, rank=4)
    grown = assemble_graph(model, body)
    session = open_session(grown.SerializeToString(), num_threads=1)
    inputs = {value.name for value in session.get_inputs()}
    outputs = session.run(list(names), {name: array for name, array in feeds.items() if name in inputs})
    queries, keys, probs = (output.astype(np.float64) for output in outputs)
    heads = factors.site.num_heads
    assert heads is not None
    assert queries.shape == (*probs.shape[:3], factors.d)
    assert keys.shape == (probs.shape[0], factors.num_kv_heads, probs.shape[3], factors.d)
    logits = factors.scale * queries @ keys.repeat(heads // factors.num_kv_heads, axis=1).swapaxes(2, 3)
    half = str(factors.site.dtype) == "float16" or "float16" in str(session.get_inputs())
    limit = load_tolerances()["graph"]["probs"]["float16" if half else "float32"]
    np.testing.assert_allclose(softmax(np.where(allowed, logits, -np.inf)), probs, atol=limit)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"mask": "where", "nan_guard": True},
        {"mask": None},
        {"num_kv_heads": 2},
        {"num_kv_heads": 2, "kv_repeat": "tile"},
        {"num_kv_heads": 2, "kv_repeat": "gather"},
        {"num_kv_heads": 1},
        *({"layout": name} for name in ("heads-batch", "batch-folded", "heads-folded")),
        {"opset": 13},
    ],
    ids=str,
)
def test_maps_follow_from_queries_and_keys(form: dict[str, Any]) -> None:
    model = encoder_layer(num_heads=HEADS, **form)
    rng = np.random.default_rng(0)
    lengths = np.array([5, 3, 1])
    mask = np.arange(5) < lengths[:, None]
    feeds = {"x": rng.normal(size=(3, 5, 12)).astype(np.float32), "mask": mask.astype(np.int64)}
    masked = form.get("mask", "add") is not None and form.get("layout", "batch-heads") == "batch-heads"
    check_factors(model, feeds, mask[:, None, None, :] if masked else True)
    assert only_factors(model).num_kv_heads == form.get("num_kv_heads", HEADS)


@pytest.mark.parametrize("attributes", [{}, {"scale": 0.3}, {"is_causal": 1}], ids=str)
def test_the_attention_operator_gives_queries_and_keys(attributes: dict[str, Any], tmp_path: Path) -> None:
    onnx.save(attention_operator(num_kv_heads=2, **attributes), tmp_path / "teacher.onnx")
    model = load_teacher(tmp_path / "teacher.onnx")
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 4, 12)).astype(np.float32)}
    check_factors(model, feeds, np.tri(4, dtype=bool) if "is_causal" in attributes else True)
    assert only_factors(model).num_kv_heads == 2


def test_past_keys_are_part_of_the_keys() -> None:
    def joined(build: GraphBuilder, keys: str) -> str:
        return build.op("Gather", build.op("Concat", "past", keys, axis=2), [0, 0], axis=1)

    shapes: dict[str, Any] = {
        name: (TensorProto.FLOAT, ["batch", 1, axis, 3]) for name, axis in (("k", "rows"), ("past", "past"))
    }
    model = attention_on_inputs(change_keys=joined, **shapes)
    rng = np.random.default_rng(0)
    sizes = {"q": (2, 2, 3, 3), "k": (2, 1, 3, 3), "past": (2, 1, 4, 3)}
    check_factors(model, {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}, True)
    assert only_factors(model).num_kv_heads == 1


def scaled_again(build: GraphBuilder, probs: str) -> str:
    kept = build.op("Trilu", probs, upper=0)
    return build.op("Div", kept, build.op("ReduceSum", kept, [-1], keepdims=1))


def test_maps_that_are_no_softmax_of_their_logits_are_refused() -> None:
    site = find_sites(attention_on_inputs(change_probs=scaled_again))[0]
    assert site.supported, site.reason
    assert "its map is not a softmax: keep its maps" in str(
        only_factors(attention_on_inputs(change_probs=scaled_again)).reason
    )


def feeds_of(*shape: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(1)
    batch, rows, keys = shape
    return {
        "q": rng.normal(size=(batch, 2, rows, 3)).astype(np.float32),
        "k": rng.normal(size=(batch, 2, keys, 3)).astype(np.float32),
    }


SCALED = {
    "divided": (lambda b, z: b.op("Div", z, np.float32(4.0)), 0.25),
    "multiplied twice": (lambda b, z: b.op("Mul", b.op("Mul", np.float32(3.0), z), np.float32(0.5)), 1.5),
    "by the width, computed": (
        lambda b, z: b.op("Div", z, b.op("Sqrt", b.op("Cast", b.op("Gather", b.op("Shape", "q"), 3), to=FLOAT))),
        1.0,
    ),
    "by a number per head": (lambda b, z: b.op("Mul", z, np.float32([2.0, 0.5]).reshape(1, 2, 1, 1)), 1.0),
    "made safe by hand": (lambda b, z: b.op("Sub", z, b.op("ReduceMax", z, [-1], keepdims=1)), 1.0),
    "folded and unfolded": (lambda b, z: b.op("Reshape", b.op("Reshape", z, [-1, 4, 4]), [-1, 2, 4, 4]), 1.0),
}


@pytest.mark.parametrize("form", SCALED)
def test_scales_are_read_off(form: str) -> None:
    change, scale = SCALED[form]
    model = attention_on_inputs(change)
    rows = 3 if "folded" not in form else 4
    if "folded" in form:  # the sizes are fixed, so that the probe must have them too
        for value in model.graph.input:
            value.type.tensor_type.shape.dim[2].dim_value = 4
    assert only_factors(model).scale == pytest.approx(scale)
    check_factors(model, feeds_of(2, rows, 4), True)


def test_causal_masks_and_multiplied_masks_are_no_bias() -> None:
    def causal(build: GraphBuilder, product: str) -> str:
        low = np.triu(np.full((3, 3), -1e9, np.float32), 1)
        return build.op("Add", product, low)

    model = attention_on_inputs(causal)
    check_factors(model, feeds_of(2, 3, 3), np.tri(3, dtype=bool))


REFUSED = {
    "softcapped at 30": lambda b, z: b.op("Mul", b.op("Tanh", b.op("Div", z, np.float32(30))), np.float32(30)),
    "a bias": lambda b, z: b.op("Add", z, np.linspace(0, 1, 9, dtype=np.float32).reshape(3, 3)),
    "several products": lambda b, z: b.op("Add", z, b.op("MatMul", "q", b.op("Transpose", "k", perm=[0, 1, 3, 2]))),
    "pass through Clip": lambda b, z: b.op("Clip", z, np.float32(-1.0), np.float32(1.0)),
    "entry by entry": lambda b, z: b.op("Mul", z, np.linspace(1, 2, 3, dtype=np.float32)),
    "a bias is added": lambda b, z: b.op(
        "Mul", b.op("Add", z, np.triu(np.full((3, 3), -1e4, np.float32), 1)), np.float32(0.01)
    ),
    "a bias is added to its": lambda b, z: b.op(  # which a run on a few samples does not show
        "Add", z, b.op("Where", b.op("Greater", z, np.float32(-1e30)), np.float32(0.0), np.float32(-5.0))
    ),
    "still count": lambda b, z: b.op("Where", b.op("Greater", z, np.float32(0.0)), z, np.float32(-1.0)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_queries_and_keys_do_not_tell_is_refused(reason: str) -> None:
    factors = only_factors(attention_on_inputs(REFUSED[reason]))
    assert factors.site.supported
    assert not factors.supported
    assert reason in str(factors.reason)
    assert "maps" in str(factors.reason)
    with refusal("graph-unsupported", "cannot be stored as queries and keys"):
        add_factors(Body("test/", 18), factors)


def test_logits_that_are_inputs_have_no_queries() -> None:
    assert "no product" in str(only_factors(bare_attention(2)).reason)
