"""Shape inference without the weights, which onnx would otherwise write out and read again at every call."""

from __future__ import annotations

import math
from typing import Final

from shd_ref.teacher.packages import onnx

_SMALL: Final = 2**10  # entries of a constant that may be a shape, whose numbers count
_DATA: Final = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")


def infer_shapes(model: onnx.ModelProto, *, data_prop: bool = True) -> onnx.ModelProto:
    """``onnx.shape_inference.infer_shapes``, for models of any size.

    Args:
        model: not changed.
        data_prop: follow numbers that become shapes.

    Returns:
        A copy with what could be inferred.

    Raises:
        Exception: what onnx raises for a graph that contradicts itself.
    """
    skeleton = onnx.ModelProto()
    skeleton.CopyFrom(model)
    for tensor in skeleton.graph.initializer:
        if math.prod(tensor.dims) > _SMALL:
            for field in _DATA:
                tensor.ClearField(field)
    inferred = onnx.shape_inference.infer_shapes(skeleton, data_prop=data_prop)
    for tensor, whole in zip(inferred.graph.initializer, model.graph.initializer, strict=True):
        if math.prod(tensor.dims) > _SMALL:
            tensor.CopyFrom(whole)
    return inferred
