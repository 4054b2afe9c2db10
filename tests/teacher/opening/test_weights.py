"""Large weights are apart from the graphs of a teacher, shared by its sessions, and found again."""

import gc
import weakref

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from shd_ref.teacher import open_session
from shd_ref.teacher.opening.model import Weights, put_back, take_weights

WIDTH = 64
FEEDS = {"x": np.random.default_rng(0).normal(size=(2, WIDTH)).astype(np.float32)}


def make_model(weights: dict[str, TensorProto], *, inputs: tuple[str, ...] = ()) -> onnx.ModelProto:
    """The input times each weight, one after another; those in ``inputs`` may be given in place of the weight."""
    nodes, last = [], "x"
    for number, (name, tensor) in enumerate(weights.items()):
        tensor.name = name
        nodes.append(helper.make_node("Cast", [name], [f"cast-{number}"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("MatMul", [last, f"cast-{number}"], [f"y-{number}"]))
        last = f"y-{number}"
    # A body that reads a weight from around it.
    shape = ["batch", WIDTH]
    branch = helper.make_graph(
        [helper.make_node("MatMul", [last, "cast-0"], ["inner"])],
        "branch",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, shape)],
    )
    nodes.append(helper.make_node("If", ["true"], ["out"], then_branch=branch, else_branch=branch))
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    given += [helper.make_tensor_value_info(name, weights[name].data_type, weights[name].dims) for name in inputs]
    graph = helper.make_graph(
        nodes,
        "products",
        given,
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, shape)],
        [*weights.values(), numpy_helper.from_array(np.array(True), "true"), weight(seed=3, name="unread")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def weight(dtype: str = "float32", seed: int = 1, name: str = "") -> TensorProto:
    values = np.random.default_rng(seed).integers(-2, 3, (WIDTH, WIDTH))
    return numpy_helper.from_array(values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype), name)


def listed() -> TensorProto:
    """Numbers as a list, not as bytes."""
    return helper.make_tensor("", TensorProto.FLOAT, [WIDTH, WIDTH], np.full(WIDTH * WIDTH, 0.5).tolist())


def run(model: onnx.ModelProto, weights: Weights | None = None) -> np.ndarray:
    return np.asarray(open_session(model, num_threads=1, weights=weights).run(None, FEEDS)[0])


def with_own_name() -> onnx.ModelProto:
    """A body that uses the name of a weight for its own."""
    model = make_model({"first": weight(), "second": weight(seed=2)})
    for attribute in model.graph.node[-1].attribute:
        inner = attribute.g
        inner.initializer.append(numpy_helper.from_array(np.eye(WIDTH, dtype=np.float32), "second"))
        inner.node.append(helper.make_node("MatMul", ["inner", "second"], ["outer"]))
        inner.output[0].name = "outer"
    return model


def of_type(dtype: str) -> onnx.ModelProto:
    return make_model({"first": weight(dtype), "second": weight(seed=2), "listed": listed()})


@pytest.mark.parametrize(
    ("model", "taken"),
    [
        *((of_type(dtype), {"first", "second"}) for dtype in ("float16", "float64", "int8")),
        *((of_type(dtype), {"second"}) for dtype in ("int64", "bfloat16")),
        (make_model({"first": weight(), "second": weight(seed=2)}, inputs=("first",)), {"second"}),
        (with_own_name(), {"first"}),
    ],
    ids=["float16", "float64", "int8", "int64", "bfloat16", "one that may be given", "a body's own name"],
)
def test_sessions_run_on_weights_that_no_graph_holds(model: onnx.ModelProto, taken: set[str]) -> None:
    before = model.SerializeToString(deterministic=True)
    bare, weights = take_weights(model)
    assert weights.keys() == taken | {"unread"}
    assert bare.ByteSize() < model.ByteSize() - sum(array.nbytes for array in weights.values()) + 1000
    assert model.SerializeToString(deterministic=True) == before
    expected = run(model)
    assert np.abs(expected).max() > 0
    assert np.array_equal(run(bare, weights=weights), expected)
    assert np.array_equal(run(bare, weights=weights), expected)  # another session on the same memory
    # Providers other than the CPU get the whole graph.
    assert put_back(bare, weights).SerializeToString(deterministic=True) == before


def test_a_session_keeps_the_weights_that_it_reads() -> None:
    model = make_model({"first": weight(), "second": weight(seed=2)})
    expected = run(model)
    bare, weights = take_weights(model)
    session = open_session(bare, num_threads=1, weights=weights)
    held = [weakref.ref(array) for name, array in weights.items() if name != "unread"]
    del weights, bare
    gc.collect()
    filled = [np.full(2**14, 7, np.uint8) for _ in range(100)]  # what is freed would be written over
    assert np.array_equal(session.run(None, FEEDS)[0], expected)
    assert all(each() is not None for each in held)
    del session, filled
    gc.collect()
    assert all(each() is None for each in held)
