"""Large weights are apart from the graphs of a teacher, shared by its sessions, and found again."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.attention_graphs import language_model

from shd_ref.teacher.graph.find import find_sites
from shd_ref.teacher.graph.shapes import Probe
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.opening.model import Weights, put_back, take_weights
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.run.options import PrecomputeOptions
from shd_ref.teacher.session import open_session

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
        [*weights.values(), numpy_helper.from_array(np.array(True), "true")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def weight(dtype: str = "float32", seed: int = 1) -> TensorProto:
    values = np.random.default_rng(seed).integers(-2, 3, (WIDTH, WIDTH))
    return numpy_helper.from_array(values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


def listed() -> TensorProto:
    """Numbers as a list, not as bytes."""
    return helper.make_tensor("", TensorProto.FLOAT, [WIDTH, WIDTH], np.full(WIDTH * WIDTH, 0.5).tolist())


def run(model: onnx.ModelProto, weights: Weights | None = None) -> np.ndarray:
    return np.asarray(open_session(model, num_threads=1, weights=weights).run(None, FEEDS)[0])


@pytest.mark.parametrize("dtype", ["float16", "float64", "uint8", "int64", "bfloat16"])
def test_sessions_run_on_weights_that_no_graph_holds(dtype: str) -> None:
    tensor = weight("int8") if dtype == "uint8" else weight(dtype)
    if dtype == "uint8":
        tensor.data_type = TensorProto.UINT8  # -1 becomes 255
    model = make_model({"first": tensor, "second": weight(seed=2), "listed": listed()})
    before = model.SerializeToString(deterministic=True)
    bare, weights = take_weights(model)
    held = {"first", "second"} if dtype not in ("int64", "bfloat16") else {"second"}
    assert weights.keys() == held
    assert bare.ByteSize() < model.ByteSize() - sum(array.nbytes for array in weights.values()) + 1000
    assert model.SerializeToString(deterministic=True) == before
    expected = run(model)
    assert np.abs(expected).max() > 0
    assert np.array_equal(run(bare, weights=weights), expected)
    assert np.array_equal(run(bare, weights=weights), expected)  # another session on the same memory
    # Providers other than the CPU get the whole graph.
    assert put_back(bare, weights).SerializeToString(deterministic=True) == before
    assert np.array_equal(run(put_back(bare, weights)), expected)


def test_a_session_keeps_the_weights_that_it_reads() -> None:
    model = make_model({"first": weight(), "second": weight(seed=2)})
    expected = run(model)
    bare, weights = take_weights(model)
    session = open_session(bare, num_threads=1, weights=weights)
    held = [weakref.ref(array) for array in weights.values()]
    del weights, bare
    gc.collect()
    filled = [np.full(2**14, 7, np.uint8) for _ in range(100)]  # what is freed would be written over
    assert np.array_equal(session.run(None, FEEDS)[0], expected)
    assert all(each() is not None for each in held)
    del session, filled
    gc.collect()
    assert all(each() is None for each in held)


def test_a_weight_that_can_be_given_stays_where_it_is() -> None:
    model = make_model({"first": weight(), "second": weight(seed=2)}, inputs=("first",))
    bare, weights = take_weights(model)
    assert weights.keys() == {"second"}
    session = open_session(bare, num_threads=1, weights=weights)
    assert np.array_equal(session.run(None, FEEDS)[0], run(model))
    zeros = {"first": np.zeros((WIDTH, WIDTH), np.float32)}
    assert not session.run(None, FEEDS | zeros)[0].any()


def test_a_weight_that_nothing_reads_is_not_missed(tmp_path: Path) -> None:
    model = language_model(num_heads=12)
    onnx.save(model, tmp_path / "without.onnx")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((36, 36), np.float32), "unread"))
    onnx.save(model, tmp_path / "with.onnx")
    with_it, without = (load_teacher(tmp_path / f"{name}.onnx") for name in ("with", "without"))
    assert "unread" in take_weights(with_it)[1]
    for one, other in zip(find_sites(with_it), find_sites(without), strict=True):
        assert one.note is None
        assert (one.row_inputs, one.key_inputs) == (other.row_inputs, other.key_inputs)
        assert "input_ids" in (one.row_inputs or ())
    feeds = {"input_ids": np.zeros((2, 3), np.int64), "attention_mask": np.ones((2, 3), np.int64)}
    assert Probe(with_it, ["unread"]).run(feeds)["unread"].all()  # as an output it is
    bare, weights = take_weights(with_it)
    assert put_back(bare, weights).SerializeToString(deterministic=True) == with_it.SerializeToString(
        deterministic=True
    )


def test_a_name_that_a_body_uses_for_its_own_is_left_alone() -> None:
    model = make_model({"first": weight(), "second": weight(seed=2)})
    for attribute in model.graph.node[-1].attribute:
        inner = attribute.g
        inner.initializer.append(numpy_helper.from_array(np.eye(WIDTH, dtype=np.float32), "second"))
        inner.node.append(helper.make_node("MatMul", ["inner", "second"], ["outer"]))
        inner.output[0].name = "outer"
    bare, weights = take_weights(model)
    assert weights.keys() == {"first"}
    assert np.array_equal(run(bare, weights=weights), run(model))


def test_students_share_a_weight_that_is_named_as_ours_are(tmp_path: Path) -> None:
    model = language_model(num_heads=12)
    product = next(node for node in model.graph.node if node.op_type == "MatMul")
    product.name = "squeezing_heads/linear_0/product"
    names = {product.input[1]: "squeezing_heads/linear_0/weight", product.output[0]: product.name}
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in model.graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(value, value) for value in values]
    onnx.save(model, tmp_path / "teacher.onnx")
    ids = np.random.default_rng(0).integers(0, 50, (4, 9))
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    pair = [(tmp_path / f"both-{heads}", PrecomputeOptions(num_student_heads=heads)) for heads in (6, 4)]
    precompute(tmp_path / "teacher.onnx", inputs, pair)
    for heads in (6, 4):
        alone = tmp_path / f"alone-{heads}"
        precompute(tmp_path / "teacher.onnx", inputs, [(alone, PrecomputeOptions(num_student_heads=heads))])
        found = [
            [path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))]
            for folder in (tmp_path / f"both-{heads}", alone)
        ]
        assert found[0] == found[1]
        assert found[0]
