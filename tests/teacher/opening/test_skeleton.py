"""Graphs are changed without copying their weights, which come back as they were."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper
from support.attention_graphs import bare_attention

from shd_ref.teacher.opening.model import copy_skeleton, restore_weights


def make_model() -> onnx.ModelProto:
    model = bare_attention(4)
    model.producer_name = "tests"
    model.metadata_props.add(key="kept", value="as it is")
    weight = np.arange(5000, dtype=np.float32).reshape(50, 100)
    outside = onnx.TensorProto(name="outside", dims=[3000], data_type=onnx.TensorProto.FLOAT)
    outside.data_location = onnx.TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="weights.bin")
    listed = onnx.helper.make_tensor("listed", onnx.TensorProto.INT64, [2000], range(2000))  # not as raw bytes
    shape = numpy_helper.from_array(np.array([2, 3]), "shape")
    model.graph.initializer.extend([numpy_helper.from_array(weight, "weight"), outside, listed, shape])
    return model


def test_weights_stay_where_they_are_and_come_back() -> None:
    model = make_model()
    before = model.SerializeToString(deterministic=True)
    skeleton = copy_skeleton(model)
    assert len(skeleton.SerializeToString()) < len(before) - 4 * 5000 - 2000
    left = {tensor.name: tensor for tensor in skeleton.graph.initializer}
    assert list(left["weight"].dims) == [50, 100]
    assert left["weight"].data_type == onnx.TensorProto.FLOAT
    assert not left["weight"].raw_data
    assert not left["listed"].int64_data
    assert numpy_helper.to_array(left["shape"]).tolist() == [2, 3]
    assert left["outside"].external_data[0].value == "weights.bin"
    restore_weights(skeleton, model)
    assert skeleton.SerializeToString(deterministic=True) == before == model.SerializeToString(deterministic=True)


def test_what_was_added_and_removed_meanwhile_stays_so() -> None:
    model = make_model()
    skeleton = copy_skeleton(model)
    del skeleton.graph.initializer[[tensor.name for tensor in skeleton.graph.initializer].index("listed")]
    added = numpy_helper.from_array(np.ones(4000, dtype=np.float32), "added")
    skeleton.graph.initializer.append(added)
    restore_weights(skeleton, model)
    found = {tensor.name: tensor for tensor in skeleton.graph.initializer}
    assert "listed" not in found
    assert found["added"] == added
    assert found["weight"].raw_data == np.arange(5000, dtype=np.float32).tobytes()
