"""Sizes in a graph that nobody vouches for: what would fill the memory before anything is computed is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from shd_ref.errors import ShdError
from shd_ref.teacher.packages import ir, onnx
from shd_ref.teacher.parts import all_graphs, all_nodes, all_tensors

_MOST_ENTRIES: Final = 2**28  # a mask of 16384 x 16384
_SHAPE_INPUTS: Final = {"ConstantOfShape": 0, "Expand": 1, "Tile": 1}


def check_sizes(model: onnx.ModelProto, file: Path) -> None:
    """Tensors must hold what their shapes say, and no shape that the graph states may be absurd.

    Args:
        model: parsed, with its external data checked (``check_external_data``) but not read.
        file: where it is from, for messages.

    Raises:
        ShdError: ``graph-invalid``.
    """
    for tensor in all_tensors(model):
        if min(tensor.dims, default=0) < 0 or not _holds(tensor):
            raise ShdError(
                "graph-invalid",
                f"tensor {tensor.name!r} of teacher graph {file} must hold the numbers of its shape "
                f"{list(tensor.dims)[:8]}, no more and no less: copy or export it again",
            )
    for name, shape in _stated_shapes(model):
        _check_shape(file, name, shape)


def _check_shape(file: Path, name: str, shape: Sequence[int]) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) > _MOST_ENTRIES:
        raise ShdError(
            "graph-invalid",
            f"shapes of teacher graph {file} must be of at most {_MOST_ENTRIES} entries; got {list(shape)[:8]} "
            f"for {name!r}: export it again, with dynamic axes in place of large fixed ones",
        )


def _holds(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor's data has the size of its shape; a weight may be of any size that is there."""
    count = math.prod(tensor.dims)
    try:
        bits = round(ir.DataType(tensor.data_type).itemsize * 8)
        if onnx.external_data_helper.uses_external_data(tensor):
            length = onnx.external_data_helper.ExternalDataInfo(tensor).length
            return length is None or bool(length == -(-count * bits // 8))
        if tensor.HasField("raw_data"):
            return bool(len(tensor.raw_data) == -(-count * bits // 8))
        return bits < 8 or len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type))) >= count
    except (KeyError, TypeError, ValueError):  # no data type, or one without numbers
        return tensor.data_type == onnx.TensorProto.STRING


def _stated_shapes(model: onnx.ModelProto) -> Iterator[tuple[str, list[int]]]:
    for value in model.graph.input:
        yield value.name, [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
    shapes: dict[str, onnx.TensorProto] = {
        tensor.name: tensor for graph in all_graphs(model.graph) for tensor in graph.initializer
    }
    for node in all_nodes(model.graph):
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            shapes.update(dict.fromkeys(node.output, node.attribute[0].t))
    for node in all_nodes(model.graph):
        place = _SHAPE_INPUTS.get(node.op_type, len(node.input))
        tensor = shapes.get(node.input[place]) if place < len(node.input) else None
        if tensor is not None and tensor.data_type == onnx.TensorProto.INT64 and not tensor.external_data:
            stated = onnx.numpy_helper.to_array(tensor).ravel().tolist()
            yield node.name, [abs(size) for size in stated]  # Expand takes -1 for 1
