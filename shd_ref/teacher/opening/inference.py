"""Shape inference without the weights, which onnx would otherwise write out and read again at every call."""

from __future__ import annotations

from shd_ref.teacher.opening.skeleton import copy_skeleton, restore_weights
from shd_ref.teacher.packages import onnx


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
    inferred = onnx.shape_inference.infer_shapes(copy_skeleton(model), data_prop=data_prop)
    restore_weights(inferred, model)
    return inferred
