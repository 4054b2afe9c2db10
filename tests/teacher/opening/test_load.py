import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.attention_graphs import (
    GraphBuilder,
    attention_on_inputs,
    encoder_layer,
    only_site,
    saved,
    squeeze_and_compare,
)
from support.refusals import refusal

from shd_ref.teacher import find_sites, hash_teacher, load_teacher
from shd_ref.teacher.opening.model import data_folder


def save_external(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "teacher.onnx"
    onnx.save(model, path, save_as_external_data=True, location="teacher.data", size_threshold=0)
    return path


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


def no_protobuf(folder: Path) -> None:
    (folder / "teacher.onnx").write_bytes(b"import os\n" * 100)


def hidden_above(place: str, _: Path) -> onnx.ModelProto:
    return hide_weight(place, external_tensor("../secret.data", [3, 3]))


def located(location: str) -> onnx.ModelProto:
    model = encoder_layer()
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], location)
    return model


def external(folder: Path, change: Callable[[Path], Any]) -> None:
    """A model with its data beside it, of which ``change`` spoils the data."""
    save_external(encoder_layer(), folder)
    change(folder / "teacher.data")


def moved_behind_a_link(data: Path) -> None:
    data.rename(data.parents[1] / "secret.data")
    data.symlink_to(data.parents[1] / "secret.data")


def bad_offset(folder: Path) -> onnx.ModelProto:
    model = onnx.load(save_external(encoder_layer(), folder), load_external_data=False)
    next(e for e in model.graph.initializer[0].external_data if e.key == "offset").value = "first"
    return model


def custom_operator(_: Path) -> onnx.ModelProto:
    build = GraphBuilder()
    output = build.op("Softmaxish", "x", domain="evil.example")
    model = build.model({"x": (TensorProto.FLOAT, ["batch", 3])}, [output])
    model.opset_import.append(helper.make_opsetid("evil.example", 1))
    return model


def huge_input(_: Path) -> onnx.ModelProto:
    build = GraphBuilder()
    return build.model({"x": (TensorProto.FLOAT, ["batch", 2**40])}, [build.op("Identity", "x")])


def wrong_shape(_: Path) -> onnx.ModelProto:
    model = encoder_layer()
    model.graph.initializer[0].dims[0] += 1
    return model


HOSTILE: dict[str, tuple[Callable[[Path], onnx.ModelProto | None], str]] = {
    "no file": (lambda folder: None, "readable file"),
    "no protobuf": (no_protobuf, ""),
    "data above": (lambda folder: located("../secret.data"), "outside its own folder"),
    "data above a folder": (lambda folder: located("a/../../secret.data"), "outside its own folder"),
    "data at an absolute path": (lambda folder: located("/etc/hostname"), "outside its own folder"),
    "a link": (lambda folder: external(folder, moved_behind_a_link), "not links"),
    "short data": (lambda folder: external(folder, lambda data: os.truncate(data, 100)), "shorter"),
    "missing data": (lambda folder: external(folder, Path.unlink), "missing"),
    "a word for an offset": (bad_offset, "wrongly"),
    "a custom operator": (custom_operator, "evil.example"),
    "a huge input": (huge_input, "dynamic axes"),
    "another shape": (wrong_shape, "numbers of its shape"),
    **{f"{place} from above": (partial(hidden_above, place), "outside its own folder") for place in PLACES},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_are_no_teacher_are_refused(name: str, tmp_path: Path) -> None:
    make, words = HOSTILE[name]
    (tmp_path / "secret.data").write_bytes(bytes(10000))
    (tmp_path / "model").mkdir()
    model = make(tmp_path / "model")
    if model is not None:
        (tmp_path / "model" / "teacher.onnx").write_bytes(model.SerializeToString())
    with refusal("graph-invalid") as caught:
        load_teacher(tmp_path / "model" / "teacher.onnx")
    assert words in str(caught.value)


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


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    model = attention_on_inputs(normalise=lambda build, logits: build.op("Own", logits, domain="local"))
    inner = helper.make_node("Softmax", ["z"], ["p"], axis=-1)
    opset = [helper.make_opsetid("", 18)]
    model.functions.append(helper.make_function("local", "Own", ["z"], ["p"], [inner], opset))
    model.opset_import.append(helper.make_opsetid("local", 1))
    assert only_site(load_teacher(saved(model, tmp_path))).supported


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
    outputs = [squeeze_and_compare(model, feeds, heads=4)[0] for model in (whole, large)]
    for name, wanted in outputs[0].items():
        np.testing.assert_array_equal(outputs[1][name], wanted)


def test_a_data_folder_that_the_file_names_is_ignored(tmp_path: Path) -> None:
    model = encoder_layer()
    model.metadata_props.add(key="squeezing_heads.data_folder", value="/etc")
    onnx.save(model, tmp_path / "teacher.onnx")
    assert data_folder(load_teacher(tmp_path / "teacher.onnx")) is None
    assert data_folder(load_teacher(tmp_path / "teacher.onnx", inline_bytes=0)) == str(tmp_path.resolve())
