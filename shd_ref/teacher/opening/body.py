"""Nodes and constants of an ONNX graph or function in the making, and Einsum of two operands written with them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.opening.model import MAP_CARRIERS, STANDARD_DOMAINS, infer_shapes, onnx, opset_version

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
        """Sizes of these axes, int64 ``(len(axes),)``."""
        return self.op("Gather", self.op("Shape", value), self.const(axes))

    def reduce_max(self, value: str) -> str:
        """Maximum over the last axis, kept."""
        if self.opset < 18:  # axes became an input
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
        """Call the key's function, which the first call makes; results by the names of its outputs."""
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
        """A body for the graph inside a node of this one, such as a Loop."""
        return Body(f"{self.prefix}{kind}{len(self.nodes)}/", self.opset)

    def output(self, value: str, name: str, elem_type: int, rank: int | None) -> None:
        """Make a value a graph output of that name; its rank may be open."""
        self.rename(value, name)
        shape = None if rank is None else [None] * rank
        self.outputs.append(onnx.helper.make_tensor_value_info(name, elem_type, shape))

    def _fresh(self, op_type: str) -> str:
        return f"{self.prefix}{op_type}_{len(self.nodes) + len(self.initializers)}"


_MOST_STEPS: Final = 16
"""The most operators between a softmax and the product that reads its map.

Without a bound every contraction of an untrusted graph would walk back over the whole of it.
"""
_SPARE_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NONE: Final = "-"
"""An axis of size 1, where an operand has no letter for a row or a column."""


def rewrite_einsum(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its products by equation as MatMul; the model itself where it has none."""
    if not any(_is_einsum(node) for node in model.graph.node):
        return model
    rewritten = onnx.ModelProto()
    rewritten.CopyFrom(model)
    sizes = _known_sizes(model)
    producers = {name: node for node in model.graph.node for name in node.output}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        body = Body(f"{node.output[0]}/product/", opset_version(model))
        is_product = _is_einsum(node) and _rewrite(body, node, sizes, producers)
        nodes += body.nodes if is_product else [node]
    del rewritten.graph.node[:]
    rewritten.graph.node.extend(nodes)
    return rewritten


def _is_einsum(node: onnx.NodeProto) -> bool:
    return bool(node.op_type == "Einsum" and node.domain in STANDARD_DOMAINS)


def _known_sizes(model: onnx.ModelProto) -> dict[str, list[int | None]]:
    """The size of each axis where it is a number, by tensor; tensors of unknown rank are missing."""
    inferred = infer_shapes(model, data_prop=False)
    sizes: dict[str, list[int | None]] = {
        value.name: [d.dim_value or None for d in value.type.tensor_type.shape.dim]
        for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output)
        if value.type.tensor_type.HasField("shape")
    }
    return sizes | {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}


def _rewrite(
    body: Body, node: onnx.NodeProto, sizes: Mapping[str, list[int | None]], producers: Mapping[str, onnx.NodeProto]
) -> bool:
    """Append the nodes that give the output of an Einsum; False where it stays as it is."""
    terms, output = _parse(node, sizes)
    if len(terms) != 2:
        return False
    summed = [letter for letter in terms[0] if letter in terms[1] and letter not in output]
    letter_sizes: dict[str, int] = {}
    for name, term in zip(node.input, terms, strict=True):
        for letter, size in zip(term, sizes.get(name, ()), strict=False):
            if size is not None and letter_sizes.setdefault(letter, size) != size:
                return False  # one of them is broadcast
    if not summed or not {*terms[0]} ^ {*terms[1]} <= {*output}:  # no product, or summed alone
        return False
    operands = list(zip(node.input, terms, strict=True))
    # The map is left, else queries before keys: the operand whose own letter comes first.
    first_row = next((letter for letter in output if not (letter in terms[0] and letter in terms[1])), "")
    is_map = [_comes_from_softmax(name, producers) for name in node.input]
    if is_map[1] or (not is_map[0] and first_row and first_row in terms[1]):
        operands.reverse()
    (_, left), (_, right) = operands
    batch = [letter for letter in output if letter in left and letter in right]
    rows, columns = (
        [letter for letter in output if letter in term and letter not in batch] for term in (left, right)
    )
    # Of several rows or columns all but one are axes along which the other operand is broadcast.
    broadcast = [*rows[:-1], *columns[:-1]]
    row, column = rows[-1:] or [_NONE], columns[-1:] or [_NONE]
    is_single = len(summed) == 1
    first = _arrange(body, *operands[0], [*batch, *broadcast], [*row, *summed])
    second = _arrange(
        body, *operands[1], [*batch, *broadcast], [*summed, *column] if is_single else [*column, *summed]
    )
    if not is_single:
        # Flattened to one axis by -1, whatever their sizes. A 0 copies the size of the same axis, so the flat axis is
        # last in both; the right operand is transposed afterwards.
        count = len(_trim([*batch, *broadcast], right)) + 1
        first = body.reshape(first, *[0] * (len(_trim([*batch, *broadcast], left)) + 1), -1)
        second = body.reshape(second, *[0] * count, -1)
        second = body.op("Transpose", second, perm=[*range(count - 1), count, count - 1])
    letters = [*batch, *broadcast, *row, *column]
    product = body.op("MatMul", first, second)
    if _NONE in letters:
        product = body.op("Squeeze", product, body.const([n for n, letter in enumerate(letters) if letter == _NONE]))
    letters = [letter for letter in letters if letter != _NONE]
    body.rename(_transpose(body, product, letters, list(output)), node.output[0])
    return True


def _trim(leading: Sequence[str], term: str) -> Sequence[str]:
    """The axes without the first ones that the operand lacks: MatMul broadcasts along them."""
    return leading[next((number for number, letter in enumerate(leading) if letter in term), len(leading)) :]


def _arrange(body: Body, name: str, term: str, leading: Sequence[str], last: Sequence[str]) -> str:
    """An operand with these axes, of size 1 for letters that it lacks."""
    axes = [*_trim(leading, term), *last]
    name = _transpose(body, name, list(term), [letter for letter in axes if letter in term])
    lacking = [number for number, letter in enumerate(axes) if letter not in term]
    return body.op("Unsqueeze", name, body.const(lacking)) if lacking else name


def _transpose(body: Body, name: str, letters: Sequence[str], order: Sequence[str]) -> str:
    if letters == order:
        return name
    return body.op("Transpose", name, perm=[letters.index(letter) for letter in order])


def _parse(node: onnx.NodeProto, sizes: Mapping[str, list[int | None]]) -> tuple[list[str], str]:
    """The letters of every operand and of the output, with unused ones for an ellipsis; or none at all."""
    equation = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "equation"), "")
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != len(node.input):
        return [], ""
    spare = "".join(letter for letter in _SPARE_LETTERS if letter not in equation)
    longest = 0  # axes of an ellipsis; the last letters, as shorter ones align at the right
    for number, (name, term) in enumerate(zip(node.input, terms, strict=True)):
        if "..." in term:
            count = len(sizes[name]) - len(term) + len("...") if name in sizes else -1
            if not 0 <= count <= len(spare):
                return [], ""
            longest = max(longest, count)
            terms[number] = term.replace("...", spare[len(spare) - count :])
    output = output.replace("...", spare[len(spare) - longest :])
    words = [*terms, output]
    is_plain = all((word or "a").isalpha() and word.isascii() and len({*word}) == len(word) for word in words)
    return (terms, output) if is_plain and {*output} <= {*"".join(terms)} else ([], "")


def _comes_from_softmax(name: str, producers: Mapping[str, onnx.NodeProto]) -> bool:
    for _ in range(_MOST_STEPS):
        node = producers.get(name)
        if node is None or node.op_type == "Softmax":
            return node is not None
        if node.op_type not in MAP_CARRIERS | {"Transpose"}:
            return False
        name = node.input[1 if node.op_type == "Where" else 0]  # Where(condition, map, 0)
    return False
