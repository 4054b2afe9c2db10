"""Queries and keys behind a map: their scale, and what they do not tell."""

import numpy as np
import onnx
import pytest
from support.attention_graphs import (
    Change,
    GraphBuilder,
    attention_on_inputs,
    bare_attention,
    only_site,
    squeeze_and_compare,
)
from support.refusals import refusal

from shd_ref.teacher import find_factors
from shd_ref.teacher.opening.body import FLOAT, Body
from shd_ref.teacher.rewrite.function import add_factors

SCALED: dict[str, tuple[Change, float]] = {
    "divided": (lambda b, z: b.op("Div", z, np.float32(4.0)), 0.25),
    "multiplied twice": (lambda b, z: b.op("Mul", b.op("Mul", np.float32(3.0), z), np.float32(0.5)), 1.5),
    "by the width, computed": (
        lambda b, z: b.op("Div", z, b.op("Sqrt", b.op("Cast", b.op("Gather", b.op("Shape", "q"), 3), to=FLOAT))),
        1.0,
    ),
    "by a number per head": (lambda b, z: b.op("Mul", z, np.float32([2.0, 0.5]).reshape(1, 2, 1, 1)), 1.0),
    "made safe by hand": (lambda b, z: b.op("Sub", z, b.op("ReduceMax", z, [-1], keepdims=1)), 1.0),
    "folded and unfolded": (lambda b, z: b.op("Reshape", b.op("Reshape", z, [-1, 4, 4]), [-1, 2, 4, 4]), 1.0),
    "causal": (lambda b, z: b.op("Add", z, np.triu(np.full((4, 4), -1e9, np.float32), 1)), 1.0),
}


@pytest.mark.parametrize("form", SCALED)
def test_scales_are_read_off(form: str) -> None:
    change, scale = SCALED[form]
    model = attention_on_inputs(change)
    for value in model.graph.input:  # fixed, so that the probe has the sizes of a mask or a shape
        value.type.tensor_type.shape.dim[2].dim_value = 4
    rng = np.random.default_rng(1)
    feeds = {name: rng.normal(size=(2, 2, 4, 3)).astype(np.float32) for name in "qk"}
    _, factors = squeeze_and_compare(model, feeds)
    assert (factors.supported, factors.scale) == (True, pytest.approx(scale))


def scaled_again(build: GraphBuilder, probs: str) -> str:
    kept = build.op("Trilu", probs, upper=0)
    return build.op("Div", kept, build.op("ReduceSum", kept, [-1], keepdims=1))


LOGITS: dict[str, Change] = {
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
REFUSED: dict[str, onnx.ModelProto] = {
    **{reason: attention_on_inputs(change) for reason, change in LOGITS.items()},
    "its map is not a softmax": attention_on_inputs(change_probs=scaled_again),
    "no product": bare_attention(2),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_queries_and_keys_do_not_tell_is_refused(reason: str) -> None:
    model = REFUSED[reason]
    (factors,) = find_factors(model, (only_site(model),))
    assert factors.site.supported
    assert not factors.supported
    assert reason in str(factors.reason)
    assert "keep its maps" in str(factors.reason)
    with refusal("graph-unsupported", "cannot be stored as queries and keys"):
        add_factors(Body("test/", 18), factors)
