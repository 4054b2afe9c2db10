"""A teacher's large weights apart from its graphs: sessions share them, and none of its graphs holds a copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.opening.parts import all_graphs, all_nodes
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
_LOCATION: Final = "weights in memory"  # not a file: onnxruntime is given the array before it looks for one


def take_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Weights]:
    """Split a teacher into its graph and its large weights.

    External data stay in their files, and tensors of types that NumPy lacks stay in the graph.

    Args:
        model: from ``load_teacher``; not changed.

    Returns:
        A copy without these weights, to derive graphs from, and the weights, which ``open_session`` takes with any of
        them.
    """
    # An initialiser that is also an input may be overridden, and a body may define the same name for itself.
    others = {value.name for value in model.graph.input} | _names_in_bodies(model.graph)
    weights = {
        tensor.name: np.frombuffer(tensor.raw_data, _DTYPES[tensor.data_type]).reshape(tuple(tensor.dims))
        for tensor in model.graph.initializer
        if tensor.name not in others and _is_whole(tensor)
    }
    bare = copy_skeleton(model)
    restore_weights(bare, model, but=weights)
    for tensor in bare.graph.initializer:
        if tensor.name in weights:
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=_LOCATION)
    return bare, weights


def find_taken(model: onnx.ModelProto, weights: Weights) -> Weights:
    """The weights that a graph derived from ``take_weights`` needs in order to run.

    Unread ones are left out: onnxruntime drops unused initialisers first, and then fails to find the one it is given.
    """
    read = {name for node in all_nodes(model.graph) for name in node.input}
    read |= {value.name for value in model.graph.output}
    return {
        tensor.name: weights[tensor.name]
        for tensor in model.graph.initializer
        if tensor.name in weights and tensor.name in read
    }


def put_back(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """A copy of such a graph with its weights inside."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    for tensor in whole.graph.initializer:
        if tensor.name in weights:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = weights[tensor.name].tobytes()
    return whole


def _is_whole(tensor: onnx.TensorProto) -> bool:
    """Whether this is a large tensor whose data are in the graph, complete, in a type that NumPy has."""
    if is_small(tensor) or tensor.data_type not in _DTYPES or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return False
    size = math.prod(tensor.dims) * _DTYPES[tensor.data_type].itemsize
    return bool(min(tensor.dims) > 0 and len(tensor.raw_data) == size)


def _names_in_bodies(graph: onnx.GraphProto) -> set[str]:
    """What the bodies of control flow define."""
    names: set[str] = set()
    for body in all_graphs(graph):
        if body is not graph:
            names |= {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
            names |= {name for node in body.node for name in node.output}
    return names
