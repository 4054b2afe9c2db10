"""Nodes and constants of an ONNX graph or function in the making."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.opening.model import onnx

FLOAT: Final = onnx.TensorProto.FLOAT
FUNCTION_DOMAIN: Final = "squeezing_heads"
Array32 = NDArray[np.float32]


class Body:
    """Nodes and constants of a graph or a function in the making; every method returns a tensor's name."""

    def __init__(self, prefix: str, opset: int) -> None:
        self.prefix = prefix
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.functions: dict[Hashable, onnx.FunctionProto] = {}

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append a node with one output."""
        name = self._fresh(op_type)
        self.nodes.append(onnx.helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def const(self, array: NDArray[Any] | Sequence[int] | float) -> str:
        """Append a constant: sequences of integers are int64 (shapes, indices), numbers float32."""
        dtype = {float: np.float32, list: np.int64, tuple: np.int64}.get(type(array))
        name = self._fresh("Constant")
        tensor = onnx.numpy_helper.from_array(np.asarray(array, dtype=dtype), name)
        self.nodes.append(onnx.helper.make_node("Constant", [], [name], name=name, value=tensor))
        return name

    def weight(self, array: Array32) -> str:
        """Append an initialiser, which graphs may hold and functions may not."""
        name = self._fresh("Weight")
        self.initializers.append(onnx.numpy_helper.from_array(array, name))
        return name

    def reshape(self, value: str, *shape: int) -> str:
        """Reshape; 0 keeps an axis, -1 takes the rest."""
        return self.op("Reshape", value, self.const(shape))

    def sizes(self, value: str, *axes: int) -> str:
        """Of these axes, int64 ``(len(axes),)``."""
        return self.op("Gather", self.op("Shape", value), self.const(axes))

    def reduce_max(self, value: str) -> str:
        """Maximum over the last axis, kept."""
        if self.opset < 18:
            return self.op("ReduceMax", value, axes=[-1], keepdims=1)
        return self.op("ReduceMax", value, self.const([-1]), keepdims=1)

    def or_one(self, value: str) -> str:
        """A denominator at least 0, with 1 in place of 0."""
        return self.op("Where", self.op("Greater", value, self.const(0.0)), value, self.const(1.0))

    def reduce_sum(self, value: str, axis: int, keepdims: int = 0) -> str:
        """Sum over one axis."""
        return self.op("ReduceSum", value, self.const([axis]), keepdims=keepdims)

    def concat(self, values: Sequence[str], axis: int) -> str:
        """Concatenation along an axis."""
        return self.op("Concat", *values, axis=axis)

    def rename(self, value: str, name: str) -> None:
        """Give a value a second name."""
        self.nodes.append(onnx.helper.make_node("Identity", [value], [name], name=f"{name}_name"))

    def call(self, key: Hashable, make: Callable[[], onnx.FunctionProto], inputs: Sequence[str]) -> dict[str, str]:
        """Call a function, made at its first use, one for a key; its results by the names it gives them."""
        if key not in self.functions:
            function = make()
            if any(function.name == other.name for other in self.functions.values()):  # plans differ by layer
                function.name += f"_{len(self.functions)}"
            self.functions[key] = function
        function = self.functions[key]
        results = {output: f"{self.prefix}{function.name}/{output}" for output in function.output}
        self.nodes.append(
            onnx.helper.make_node(
                function.name,
                inputs,
                list(results.values()),
                name=f"{self.prefix}{function.name}",
                domain=FUNCTION_DOMAIN,
            )
        )
        return results

    def inside(self, kind: str) -> Body:
        """A body of a graph that a node of this one will hold."""
        return Body(f"{self.prefix}{kind}{len(self.nodes)}/", self.opset)

    def output(self, value: str, name: str, elem_type: int, rank: int | None) -> None:
        """Make a value a graph output of that name; its rank may be open."""
        self.rename(value, name)
        shape = None if rank is None else [None] * rank
        self.outputs.append(onnx.helper.make_tensor_value_info(name, elem_type, shape))

    def _fresh(self, op_type: str) -> str:
        return f"{self.prefix}{op_type}_{len(self.nodes) + len(self.initializers)}"
