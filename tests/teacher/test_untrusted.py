"""Damaged graphs: whatever is wrong with a file, the answer is one error or a graph that runs, never a crash."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from teacher.attention_graphs import GraphBuilder, attention_operator, encoder_layer

from shd_ref.errors import ShdError
from shd_ref.teacher.find import find_sites
from shd_ref.teacher.load import load_teacher
from shd_ref.teacher.session import open_session
from shd_ref.teacher.squeeze import squeeze_graph

CODES = {"graph-invalid", "graph-unsupported"}
GRAPHS = {
    "encoder": encoder_layer(mask="where", nan_guard=True).SerializeToString(),
    "folded": encoder_layer(layout="batch-folded").SerializeToString(),
    "operator": attention_operator().SerializeToString(),
}


def use(path: Path) -> str:
    """Load, walk, squeeze and open a graph; the code of the error, or ``ok``."""
    try:
        model = load_teacher(path)
        sites = [site for site in find_sites(model) if site.supported]
        if sites:
            squeezed = squeeze_graph(model, tuple(enumerate(sites)), num_student_heads=1)
            open_session(squeezed.model, num_threads=1)
    except ShdError as error:
        return error.code
    return "ok"


@pytest.mark.parametrize("name", GRAPHS)
def test_flipped_bits_never_crash(name: str, tmp_path: Path) -> None:
    whole, path = GRAPHS[name], tmp_path / "teacher.onnx"
    codes = []
    for seed in range(40):
        random = Random(seed)
        damaged = bytearray(whole)
        for _ in range(random.choice([1, 2, 4, 32])):
            damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
        path.write_bytes(damaged)
        codes.append(use(path))
    assert set(codes) <= {"ok", *CODES}
    assert "graph-invalid" in codes, "the flips hit nothing that matters"


@pytest.mark.parametrize("name", GRAPHS)
def test_truncated_files_never_crash(name: str, tmp_path: Path) -> None:
    whole, path = GRAPHS[name], tmp_path / "teacher.onnx"
    for length in np.linspace(0, len(whole) - 1, 25, dtype=int):
        path.write_bytes(whole[:length])
        assert use(path) == "graph-invalid"


def refused(model: onnx.ModelProto, folder: Path) -> str:
    (folder / "teacher.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ShdError) as caught:
        load_teacher(folder / "teacher.onnx")
    assert caught.value.code == "graph-invalid"
    return str(caught.value)


def test_tensors_without_a_source_are_named(tmp_path: Path) -> None:
    model = encoder_layer()
    model.graph.node[-1].input[0] = "nowhere"
    assert "'nowhere', which has no source" in refused(model, tmp_path)
    model = encoder_layer()
    model.graph.output[0].name = "nothing"
    assert "output 'nothing' has no source" in refused(model, tmp_path)


def test_tensors_with_two_sources_are_refused(tmp_path: Path) -> None:
    model = encoder_layer()
    model.graph.node.append(model.graph.node[0])
    assert "two sources" in refused(model, tmp_path)


def test_bodies_are_checked_too(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "elsewhere"], ["sum"])]
    value = helper.make_tensor_value_info("sum", TensorProto.FLOAT, None)
    body = helper.make_graph(nodes, "body", [], [value])
    build = GraphBuilder()
    output = build.op("If", "wanted", then_branch=body, else_branch=body)
    inputs = {"x": (TensorProto.FLOAT, ["batch"]), "wanted": (TensorProto.BOOL, [])}
    assert "'elsewhere', which has no source" in refused(build.model(inputs, [output]), tmp_path)


def test_weights_beyond_reason_are_refused() -> None:
    for number in (np.nan, np.inf, 1e30):
        model = encoder_layer()
        weight = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [12, 14])
        array = onnx.numpy_helper.to_array(weight).copy()
        array[3, 4] = number
        weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
        (site,) = find_sites(model)
        assert not site.supported
        assert "beyond reason" in str(site.reason)
