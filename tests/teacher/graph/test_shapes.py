"""Sizes and values of probes, from the names that exporters give the axes of their inputs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from support.attention_graphs import GraphBuilder, encoder_layer

from shd_ref.errors import ShdError
from shd_ref.teacher.graph.inputs import InputSizes, InputSpec, batch_axes
from shd_ref.teacher.graph.shapes import Probe, probe_feeds

SIZES = InputSizes(batch=4, length=5)
PAST = InputSpec("past_key_values.0.key", "float32", ("batch_size", 2, "past_sequence_length", 8))
IDS = InputSpec("input_ids", "int64", ("batch_size", "sequence_length"))


@pytest.mark.parametrize(
    "axis",
    [
        "past_sequence_length + sequence_length",
        "past_sequence_length+sequence_length",
        "past_sequence_length + 1",
        "total_sequence_length",
        "sequence_length",
        "attention_mask_dim_1",
        None,
    ],
)
def test_an_empty_past_leaves_the_mask_as_long_as_the_tokens(axis: str | None) -> None:
    mask = InputSpec("attention_mask", "int64", ("batch_size", axis))
    shapes = SIZES.shapes((PAST, mask, IDS))
    assert shapes == {"input_ids": (4, 5), "attention_mask": (4, 5), "past_key_values.0.key": (4, 2, 0, 8)}


@pytest.mark.parametrize("shape", [("batch", 2, None, 8), (None, 2, None, 8), ("b", 2, "past_len", 8), (4, 2, 0, 8)])
def test_the_past_is_empty_under_any_name_of_its_axis(shape: tuple[int | str | None, ...]) -> None:
    assert SIZES.shapes((InputSpec("past_key_values.3.value", "float16", shape),)) == {
        "past_key_values.3.value": (4, 2, 0, 8)
    }


@pytest.mark.parametrize("axes", [("batch", "past_len"), ("b", "p"), (None, None), ("past_dynamic_axes_2", None)])
def test_stacked_keys_and_values_stand_before_the_batch(axes: tuple[str | None, str | None]) -> None:
    batch, past = axes
    for stack in ((2,), (6, 2)):
        spec = InputSpec("past", "float32", (*stack, batch, 3, past, 8))
        assert SIZES.shapes((spec,)) == {"past": (*stack, 4, 3, 0, 8)}


def test_equal_names_are_equal_sizes_wherever_they_stand() -> None:
    first = InputSpec("tokens", "int64", ("N", "T"))
    turned = InputSpec("x", "float32", ("T", "N", 3))
    assert SIZES.shapes((turned, first)) == {"tokens": (4, 5), "x": (5, 4, 3)}
    assert batch_axes((turned, first), SIZES) == {"tokens": 0, "x": 1}


def test_sizes_that_the_graph_fixes_hold_for_all_inputs() -> None:
    fixed = InputSpec("input_ids", "int64", (1, 16))
    specs = (fixed, InputSpec("x", "float32", ("batch", "length", 3)))
    sizes = SIZES.fitted(specs)
    assert sizes == InputSizes(1, 16)
    assert sizes.shapes(specs) == {"input_ids": (1, 16), "x": (1, 16, 3)}
    assert batch_axes(specs, sizes) == {"input_ids": 0, "x": 0}


def frozen_graph(batch: int | None, length: int) -> onnx.ModelProto:
    """What a tracer makes of a reshape: axes that are open by their names, and the example's length inside."""
    build = GraphBuilder()
    shape = build.const(np.array([-1 if batch is None else batch, length, 2, 3]))
    split = build.op("Reshape", "x", shape, name="split")
    shapes = {"x": (TensorProto.FLOAT, ["batch", "sequence", 6])}
    return build.model(shapes, [split])


@pytest.mark.parametrize(("batch", "sizes"), [(None, InputSizes(2, 7)), (1, InputSizes(1, 7)), (2, InputSizes(2, 7))])
def test_a_length_frozen_into_the_constants_is_found(batch: int | None, sizes: InputSizes) -> None:
    model = frozen_graph(batch, 7)
    probe = Probe(model, [model.graph.node[-1].output[0]])
    assert probe.sizes == sizes
    assert probe.frozen_length == 7
    assert probe.frozen_batch == (1 if batch == 1 else None)
    (array,) = probe.run(probe_feeds(probe.specs, probe.sizes)).values()
    assert array.shape == (sizes.batch, 7, 2, 3)


def test_open_and_declared_lengths_are_told_apart() -> None:
    model = encoder_layer(mask="add")
    assert Probe(model, ["softmax"]).frozen_length is None
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = 3
    assert Probe(model, ["softmax"]).frozen_length == 3


def test_a_graph_that_runs_at_no_size_is_refused() -> None:
    model = frozen_graph(None, 7)
    shape = onnx.numpy_helper.from_array(np.array([-1, 5, 11, 13]), model.graph.initializer[0].name)
    model.graph.initializer[0].CopyFrom(shape)
    with pytest.raises(ShdError, match="does not run on a probe"):
        Probe(model, [model.graph.node[-1].output[0]])


def test_a_past_that_cannot_be_empty_is_named_with_the_file_to_take() -> None:
    build = GraphBuilder()
    joined = build.op("Concat", "past_key_values.0.key", "x", axis=2)
    output = build.op("Reshape", joined, build.const(np.array([-1, 11, 13])))
    axes = ["batch", 2, "sequence", 3]
    shapes = {"past_key_values.0.key": (TensorProto.FLOAT, ["batch", 2, 16, 3]), "x": (TensorProto.FLOAT, axes)}
    with pytest.raises(ShdError, match=r"cannot take past_key_values.0.key empty.*decoder_model\.onnx") as caught:
        Probe(build.model(shapes, [output]), [output])
    assert caught.value.code == "graph-unsupported"
