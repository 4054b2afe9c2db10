"""What a single node or tensor of a graph says: its constant value, its attributes, its name."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError
from shd_ref.teacher.operators import STANDARD_DOMAINS
from shd_ref.teacher.packages import ir, onnx

_CONSTANT_OPS: Final = frozenset(
    {"Cast", "DequantizeLinear", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)


def constant_of(value: ir.Value | None) -> NDArray[Any] | None:
    """The value as an array where the graph fixes it, through layout and dequantisation of weights."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return tensor.numpy()
    node = value.producer()
    if node is None or node.op_type not in _CONSTANT_OPS or node.domain not in STANDARD_DOMAINS:
        return None
    if not is_constant(value):
        return None
    inputs = [constant_of(source) for source in node.inputs]
    feeds = {name_of(s): a for s, a in zip(node.inputs, inputs, strict=True) if s is not None}
    return np.asarray(next(iter(onnx.reference.ReferenceEvaluator(ir.to_proto(node)).run(None, feeds))))


def is_constant(value: ir.Value | None) -> bool:
    """Whether ``constant_of`` gives a value, found without computing it."""
    if value is None:
        return False
    if ir.convenience.get_const_tensor(value) is not None:
        return True
    node = value.producer()
    if node is None or node.op_type not in _CONSTANT_OPS or node.domain not in STANDARD_DOMAINS:
        return False
    return all(is_constant(source) for source in node.inputs if source is not None)


def int_attribute(node: ir.Node, *names: str) -> int | None:
    """The first of these attributes that the node has."""
    return next((node.attributes[name].as_int() for name in names if name in node.attributes), None)


def float_attribute(node: ir.Node, name: str) -> float:
    """The attribute, or 1."""
    return node.attributes[name].as_float() if name in node.attributes else 1.0


def name_of(value: ir.Value) -> str:
    """A tensor's name."""
    if not value.name:
        raise ShdError("graph-invalid", "a tensor of the graph has no name: export the model again")
    return value.name


def dtype_name(value: ir.Value | None) -> str | None:
    """NumPy's name of a tensor's dtype, where inference found it."""
    return None if value is None or value.dtype is None else str(value.dtype.numpy().name)


def data_inputs(node: ir.Node) -> list[ir.Value]:
    """The input that carries the data, in operators that move or repeat it."""
    return [value for value in node.inputs[:1] if value is not None]
