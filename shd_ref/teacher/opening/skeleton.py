"""A graph without its weights, which are most of a model and need not be copied to change the rest."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from shd_ref.teacher.packages import Message, onnx

_SMALL: Final = 2**10  # entries of a constant that may be a shape, whose numbers count
_DATA: Final = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")


def copy_skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which large initialisers have a name, a type and a shape, and no data."""
    skeleton = onnx.ModelProto()
    _copy_fields(model, skeleton, "graph")
    _copy_fields(model.graph, skeleton.graph, "initializer")
    for tensor in model.graph.initializer:
        copied = skeleton.graph.initializer.add()
        if is_small(tensor):
            copied.CopyFrom(tensor)
        else:
            _copy_fields(tensor, copied, *_DATA)
    return skeleton


def restore_weights(skeleton: onnx.ModelProto, model: onnx.ModelProto, *, but: Collection[str] = frozenset()) -> None:
    """Copy the model's large weights back into a skeleton, in place.

    Args:
        skeleton: from ``copy_skeleton``; nodes and initialisers may have been added or removed since.
        model: the one it was copied from.
        but: names of those that are left out.
    """
    whole = {tensor.name: tensor for tensor in model.graph.initializer if not is_small(tensor)}
    for tensor in skeleton.graph.initializer:
        if tensor.name in whole and tensor.name not in but:
            tensor.CopyFrom(whole[tensor.name])


def is_small(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor is small enough to stay: it may be a shape, whose values matter."""
    return bool(math.prod(tensor.dims) <= _SMALL)


def _copy_fields(source: Message, target: Message, *left_out: str) -> None:
    """Set the fields of a new message to another's, but for those named."""
    for field, value in source.ListFields():
        if field.name in left_out:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif isinstance(value, Message):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)
