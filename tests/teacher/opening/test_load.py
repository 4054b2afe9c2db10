from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.attention_graphs import GraphBuilder, attention_operator, encoder_layer, random_projection, run_session

from shd_ref.errors import ShdError
from shd_ref.teacher.graph.find import find_sites
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.opening.model import data_folder, hash_teacher
from shd_ref.teacher.precompute.compare import compare_with_reference
from shd_ref.teacher.rewrite.squeeze import squeeze_graph
from shd_ref.teacher.session import open_session


def save_external(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "teacher.onnx"
    onnx.save(model, path, save_as_external_data=True, location="teacher.data", size_threshold=0)
    return path


def refused(path: Path) -> ShdError:
    with pytest.raises(ShdError) as caught:
        load_teacher(path)
    assert caught.value.code == "graph-invalid"
    return caught.value


def test_external_data_in_the_models_folder_is_read(tmp_path: Path) -> None:
    path = save_external(encoder_layer(), tmp_path)
    assert find_sites(load_teacher(path)) == find_sites(encoder_layer())


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "readable file" in str(refused(tmp_path / "absent.onnx"))


def test_a_file_that_is_no_protobuf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.onnx"
    path.write_bytes(b"import os\n" * 100)
    refused(path)


@pytest.mark.parametrize("location", ["../secret.data", "a/../../secret.data"])
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.data").write_bytes(b"\0" * 10000)
    model = encoder_layer()
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], location)
    (folder / "teacher.onnx").write_bytes(model.SerializeToString())
    assert "outside its own folder" in str(refused(folder / "teacher.onnx"))


def test_an_absolute_location_is_refused(tmp_path: Path) -> None:
    model = encoder_layer()
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], "/etc/hostname")
    (tmp_path / "teacher.onnx").write_bytes(model.SerializeToString())
    assert "outside its own folder" in str(refused(tmp_path / "teacher.onnx"))


def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = save_external(encoder_layer(), folder)
    (folder / "teacher.data").rename(tmp_path / "moved.data")
    (folder / "teacher.data").symlink_to(tmp_path / "moved.data")
    assert "not links" in str(refused(path))


def test_external_data_that_is_missing_or_short_is_refused(tmp_path: Path) -> None:
    path = save_external(encoder_layer(), tmp_path)
    data = tmp_path / "teacher.data"
    data.write_bytes(data.read_bytes()[:-1])
    assert "shorter" in str(refused(path))
    data.unlink()
    assert "missing" in str(refused(path))


def test_external_data_of_constant_nodes_is_checked_too(tmp_path: Path) -> None:
    build = GraphBuilder()
    tensor = onnx.numpy_helper.from_array(random_projection(3, 3), "w")
    onnx.external_data_helper.set_external_data(tensor, "../w.data")
    tensor.ClearField("raw_data")
    output = build.op("MatMul", "x", build.op("Constant", value=tensor))
    model = build.model({"x": (TensorProto.FLOAT, ["batch", 3])}, [output])
    (tmp_path / "teacher.onnx").write_bytes(model.SerializeToString())
    assert "outside its own folder" in str(refused(tmp_path / "teacher.onnx"))


def test_the_hash_of_a_teacher_covers_initialisers_as_it_always_did(tmp_path: Path) -> None:
    plain = tmp_path / "plain.onnx"
    onnx.save(encoder_layer(), plain)
    assert hash_teacher(plain) == hashlib.sha256(plain.read_bytes()).hexdigest()
    path = save_external(encoder_layer(), tmp_path)
    data = hashlib.sha256((tmp_path / "teacher.data").read_bytes()).digest()
    assert hash_teacher(path) == hashlib.sha256(path.read_bytes() + data).hexdigest()


def external_tensor(location: str, dims: list[int]) -> TensorProto:
    tensor = TensorProto(name="w", dims=dims, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def hide_weight(place: str, weight: TensorProto) -> onnx.ModelProto:
    """A model whose only weight lies somewhere else than among the graph's initialisers."""
    build = GraphBuilder()
    inputs = {"x": (TensorProto.FLOAT, ["batch", 3])}
    if place == "sparse initialiser":
        model = build.model(inputs, [build.op("MatMul", "x", "w")])
        indices = helper.make_tensor("i", TensorProto.INT64, [9], list(range(9)))
        del weight.dims[1:]
        weight.dims[0] = 9
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(weight, indices, [3, 3]))
        return model
    constant = helper.make_node("Constant", [], ["w_out"], value=weight)
    result = helper.make_tensor_value_info("w_out", TensorProto.FLOAT, [3, 3])
    body = helper.make_graph([constant], "body", [], [result])
    if place == "body":
        body = helper.make_graph(
            [], "body", [], [helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 3])], [weight]
        )
    branch = helper.make_node("If", ["wanted"], ["w_out"], then_branch=body, else_branch=body)
    if place in ("body", "Constant in a body"):
        inputs["wanted"] = (TensorProto.BOOL, [])
        model = build.model(inputs, [build.op("MatMul", "x", "w_out")])
        model.graph.node.insert(0, branch)
        return model
    if place == "Constant":
        model = build.model(inputs, [build.op("MatMul", "x", "w_out")])
        model.graph.node.insert(0, constant)
        return model
    inside = (
        [constant]
        if place == "function"
        else [
            helper.make_node("Constant", [], ["wanted"], value=helper.make_tensor("t", TensorProto.BOOL, [], [True])),
            branch,
        ]
    )
    model = build.model(inputs, [build.op("MatMul", "x", build.op("weight", domain="local"))])
    opset = [helper.make_opsetid("", 18)]
    model.functions.append(helper.make_function("local", "weight", [], ["w_out"], inside, opset))
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model


PLACES = ["Constant", "body", "Constant in a body", "function", "body in a function", "sparse initialiser"]


@pytest.mark.parametrize("place", PLACES)
def test_the_hash_of_a_teacher_covers_weights_wherever_they_are(place: str, tmp_path: Path) -> None:
    """Two teachers that differ in one data file only must not be mixed into one cache (CACHE-21)."""
    path, data = tmp_path / "teacher.onnx", tmp_path / "w.data"
    path.write_bytes(hide_weight(place, external_tensor("w.data", [3, 3])).SerializeToString())
    hashes = set()
    for scale in (1, 2):
        data.write_bytes(np.full(9, scale, np.float32).tobytes())
        load_teacher(path)
        hashes.add(hash_teacher(path))
    assert len(hashes) == 2


@pytest.mark.parametrize("place", PLACES)
def test_weights_outside_the_folder_are_refused_wherever_they_are(place: str, tmp_path: Path) -> None:
    (tmp_path / "w.data").write_bytes(bytes(36))
    path = tmp_path / "model" / "teacher.onnx"
    path.parent.mkdir()
    path.write_bytes(hide_weight(place, external_tensor("../w.data", [3, 3])).SerializeToString())
    assert "outside its own folder" in str(refused(path))


def test_custom_operators_are_refused_by_name(tmp_path: Path) -> None:
    build = GraphBuilder()
    output = build.op("Softmaxish", "x", domain="evil.example")
    model = build.model({"x": (TensorProto.FLOAT, ["batch", 3])}, [output])
    model.opset_import.append(helper.make_opsetid("evil.example", 1))
    onnx.save(model, tmp_path / "teacher.onnx")
    assert "evil.example" in str(refused(tmp_path / "teacher.onnx"))


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    build = GraphBuilder()
    probs = build.op("OwnSoftmax", "logits", domain="local")
    joined = build.op("Transpose", build.op("MatMul", probs, "values"), perm=[0, 2, 1, 3])
    flat = build.op("Reshape", joined, build.const(np.array([0, 0, 6])))
    output = build.op("MatMul", flat, build.const(random_projection(6, 5)))
    inputs = {
        "logits": (TensorProto.FLOAT, ["batch", 2, "rows", "keys"]),
        "values": (TensorProto.FLOAT, ["batch", 2, "keys", 3]),
    }
    model = build.model(inputs, [output])
    inner = helper.make_node("Softmax", ["z"], ["p"], axis=-1)
    model.functions.append(
        helper.make_function("local", "OwnSoftmax", ["z"], ["p"], [inner], [helper.make_opsetid("", 18)])
    )
    model.opset_import.append(helper.make_opsetid("local", 1))
    onnx.save(model, tmp_path / "teacher.onnx")
    (site,) = find_sites(load_teacher(tmp_path / "teacher.onnx"))
    assert site.supported


def test_malformed_offsets_are_refused(tmp_path: Path) -> None:
    path = save_external(encoder_layer(), tmp_path)
    model = onnx.load(path, load_external_data=False)
    next(e for e in model.graph.initializer[0].external_data if e.key == "offset").value = "first"
    path.write_bytes(model.SerializeToString())
    assert "wrongly" in str(refused(path))


def test_large_models_leave_their_data_in_their_files(tmp_path: Path) -> None:
    """Nothing that is read, squeezed or run needs the weights in one message, which could hold 2 GB at most."""
    whole = encoder_layer(num_heads=8, d_v=24)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(2, 5, 192)).astype(np.float32), "mask": np.ones((2, 5), np.int64)}
    (tmp_path / "elsewhere").mkdir()
    path = save_external(encoder_layer(num_heads=8, d_v=24), tmp_path / "elsewhere")
    small, large = load_teacher(path), load_teacher(path, inline_bytes=0)
    assert len(large.SerializeToString()) < 20_000 < len(small.SerializeToString())
    assert find_sites(large) == find_sites(small)
    outputs = []
    for model in (whole, large):
        squeezed = squeeze_graph(model, tuple(enumerate(find_sites(model))), num_student_heads=4, check_outputs=True)
        outputs.append(run_session(open_session(squeezed.model, num_threads=1), feeds))
        compare_with_reference(squeezed, outputs[-1])
    for name, wanted in outputs[0].items():
        np.testing.assert_array_equal(outputs[1][name], wanted)


def test_a_data_folder_that_the_file_names_is_ignored(tmp_path: Path) -> None:
    model = encoder_layer()
    model.metadata_props.add(key="squeezing_heads.data_folder", value="/etc")
    onnx.save(model, tmp_path / "teacher.onnx")
    assert data_folder(load_teacher(tmp_path / "teacher.onnx")) is None
    assert data_folder(load_teacher(tmp_path / "teacher.onnx", inline_bytes=0)) == str(tmp_path.resolve())


def test_the_standard_attention_operator_is_decomposed(tmp_path: Path) -> None:
    for opset in (23, 24):
        model = attention_operator(opset)
        assert "Attention" in {node.op_type for node in model.graph.node}
        onnx.save(model, tmp_path / "teacher.onnx")
        (site,) = find_sites(load_teacher(tmp_path / "teacher.onnx"))
        assert site.supported, site.reason
        assert (site.num_heads, site.num_kv_heads, site.d_v) == (4, 2, 3)


def test_absurd_shapes_are_refused(tmp_path: Path) -> None:
    build = GraphBuilder()
    huge = build.op("ConstantOfShape", build.const(np.array([2**20, 2**20])))
    model = build.model({"x": (TensorProto.FLOAT, ["batch", 3])}, [build.op("Add", "x", huge)])
    onnx.save(model, tmp_path / "teacher.onnx")
    assert "at most 268435456 entries" in str(refused(tmp_path / "teacher.onnx"))
    build = GraphBuilder()
    model = build.model({"x": (TensorProto.FLOAT, ["batch", 2**40])}, [build.op("Identity", "x")])
    onnx.save(model, tmp_path / "teacher.onnx")
    assert "dynamic axes" in str(refused(tmp_path / "teacher.onnx"))
    model = encoder_layer()
    model.graph.initializer[0].dims[0] += 1
    onnx.save(model, tmp_path / "teacher.onnx")
    assert "numbers of its shape" in str(refused(tmp_path / "teacher.onnx"))
