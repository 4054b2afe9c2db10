"""A teacher's large weights apart from its graphs: sessions share them, and none of its graphs holds a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.opening.skeleton import copy_skeleton, is_small, restore_weights
from shd_ref.teacher.packages import onnx

Weights: TypeAlias = Mapping[str, NDArray[Any]]
"""Initialisers by name, not writable."""

_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    onnx.TensorProto.FLOAT: np.dtype("<f4"),
    onnx.TensorProto.FLOAT16: np.dtype("<f2"),
    onnx.TensorProto.DOUBLE: np.dtype("<f8"),
    onnx.TensorProto.INT8: np.dtype("i1"),
    onnx.TensorProto.UINT8: np.dtype("u1"),
}
_LOCATION: Final = "weights in memory"  # of no file


def take_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Weights]:
    """A copy of a teacher without its large weights, to make graphs of, and these, for ``open_session``.

    What lies in files beside the graph stays there, and what NumPy has no numbers for stays in the graph.

    Args:
        model: from ``load_teacher``; not changed.
    """
    overridable = {value.name for value in model.graph.input}
    weights = {
        tensor.name: np.frombuffer(tensor.raw_data, _DTYPES[tensor.data_type]).reshape(tuple(tensor.dims))
        for tensor in model.graph.initializer
        if not is_small(tensor)
        and tensor.data_type in _DTYPES
        and tensor.HasField("raw_data")
        and tensor.name not in overridable
    }
    bare = copy_skeleton(model)
    restore_weights(bare, model, but=weights)
    for tensor in bare.graph.initializer:
        if tensor.name in weights:
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=_LOCATION)
    return bare, weights


def find_taken(model: onnx.ModelProto, weights: Weights) -> Weights:
    """Those of the weights that a graph lacks, which was made of a teacher without them."""
    return {
        tensor.name: weights[tensor.name]
        for tensor in model.graph.initializer
        if tensor.name in weights and tensor.data_location == onnx.TensorProto.EXTERNAL
    }


def put_back(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """A copy of such a graph with its weights."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    taken = find_taken(whole, weights)
    for tensor in whole.graph.initializer:
        if tensor.name in taken:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = taken[tensor.name].tobytes()
    return whole
