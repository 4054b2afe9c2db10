"""A graph as it is read: its nodes in order, tensors that weights alone decide known, and what each is made from."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, graph_invalid
from shd_ref.teacher.opening.model import (
    INTEGER_PRODUCTS,
    LAYOUT_OPS,
    OPAQUE_PRODUCTS,
    PRODUCTS,
    SIZE_OPS,
    STANDARD_DOMAINS,
    data_folder,
    ir,
    kinds,
    onnx,
)

_BY_ENTRY: Final = kinds(
    "Abs Add Cast Clip DequantizeLinear Div Exp Log Max Min Mul Neg Pow Reciprocal Sigmoid Softplus Sqrt Sub Sum Tanh"
)
_CONSTANT_OPS: Final = _BY_ENTRY | kinds(
    "Concat Gemm Identity LpNormalization MatMul ReduceL2 ReduceMean ReduceSum ReduceSumSquare Reshape Slice Split "
    "Squeeze Transpose Unsqueeze"
)
"""What weights are computed with in graphs that no optimiser has folded: adapters that are merged as the graph runs,
norms and scales of weights, gates that are learned numbers."""

_MOST_HELD: Final = 2**27  # entries of all constants that one of them is computed from; more for large weights
_MOST_PRODUCTS: Final = 2**38  # multiplications of one product: ten seconds or so


def read_graph(model: onnx.ModelProto) -> ir.Graph:
    """The model's graph in the order in which data flows; ``const_value`` of a tensor wherever the graph fixes it.

    What is computed from weights is computed when its ``numpy()`` is asked for, and not kept: a copy of every weight
    that an exporter left to be transposed would fill the memory.
    """
    try:
        graph = ir.from_proto(model).graph
        graph.sort()
        for node in graph.all_nodes():
            sources = [source for source in node.inputs if source is not None]
            if node.op_type == "Constant":
                node.outputs[0].const_value = ir.convenience.get_const_tensor(node.outputs[0])
            elif node.op_type in _CONSTANT_OPS and node.domain in STANDARD_DOMAINS and sources:
                for value in node.outputs if all(source.const_value is not None for source in sources) else ():
                    shape, kind = value.shape or ir.Shape(()), value.dtype or ir.DataType.FLOAT
                    value.const_value = ir.LazyTensor(functools.partial(_compute, value), kind, shape)
    except (ir.serde.SerdeError, TypeError, ValueError) as error:  # the last also where nodes feed one another
        raise graph_invalid(
            f"the teacher graph is broken, or runs in a circle: {error}: copy or export it again"
        ) from error
    folder = data_folder(model)
    if folder is not None:
        ir.external_data.set_base_dir(graph, folder)
    return graph


def _compute(value: ir.Value) -> ir.Tensor[Any]:
    """A constant from those that the graph states."""
    arrays: dict[ir.Value, NDArray[Any]] = {}
    held, most = 0, _MOST_HELD
    waiting = [value]  # not by recursion: a graph may be as deep as its author likes
    while waiting:
        current, node = waiting[-1], waiting[-1].producer()
        stated = None if isinstance(current.const_value, ir.LazyTensor) else current.const_value
        inputs = [] if node is None or stated is not None else [one for one in node.inputs if one is not None]
        unknown = [source for source in inputs if source not in arrays]
        if unknown:
            waiting += unknown
            continue
        waiting.pop()
        if current in arrays:
            continue
        try:
            if stated is not None:
                arrays[current] = stated.numpy()
                most += 8 * arrays[current].size
            elif node is not None:
                held = _count_held(node, [arrays[source] for source in inputs], held, most)
                arrays.update(zip(node.outputs, run_operator(node, arrays), strict=False))
        except ShdError:
            raise
        except Exception as error:  # the evaluator raises what NumPy and its own operators raise
            name = "a constant" if node is None else f"node {node.name!r} ({node.op_type})"
            raise graph_invalid(
                f"constants of the graph must be what its operators take; {name} cannot be computed: {error}: copy "
                "or export the model again"
            ) from error
    return ir.Tensor(arrays[value])


def run_operator(node: ir.Node, known: dict[ir.Value, NDArray[Any]]) -> list[NDArray[Any]]:
    """The outputs of an operator on arrays in place of its inputs."""
    feeds = {str(source.name): known[source] for source in node.inputs if source is not None}
    version = None if node.graph is None else node.graph.opset_imports.get("")
    opsets = None if version is None else {"": version}
    with np.errstate(all="ignore"):  # NaN and infinity are found where they are used
        outputs = onnx.reference.ReferenceEvaluator(ir.to_proto(node), opsets=opsets).run(None, feeds)
    return [np.asarray(output) for output in outputs]


def _count_held(node: ir.Node, inputs: list[NDArray[Any]], held: int, most: int) -> int:
    """Entries that are held with this operator's result; what it costs is known before it is computed."""
    sizes = [array.size for array in inputs]
    entries, products = max(sizes, default=0), 0
    if node.op_type in _BY_ENTRY - {"DequantizeLinear"}:
        entries = math.prod(np.broadcast_shapes(*(array.shape for array in inputs)))
    elif node.op_type == "Concat":
        entries = sum(sizes)
    elif node.op_type in ("Gemm", "MatMul"):
        left, right = (array.shape for array in inputs[:2])
        if node.op_type == "Gemm":
            left = left[::-1] if node.attributes.get_int("transA") else left
            right = right[::-1] if node.attributes.get_int("transB") else right
        rows = math.prod(left[-2:-1])
        columns = right[-1] if len(right) > 1 else 1
        entries = math.prod(np.broadcast_shapes(left[:-2], right[:-2])) * rows * columns
        products = entries * left[-1]
    if held + entries > most or products > _MOST_PRODUCTS:
        raise graph_invalid(
            f"constants of the graph must be computed from one another within {most} entries and "
            f"{_MOST_PRODUCTS} multiplications; node {node.name!r} ({node.op_type}) needs more: export the model "
            "with its constants folded"
        )
    return held + entries


NodeTest: TypeAlias = Callable[[ir.Node], bool]

FLOATS: Final = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})


def trace_back(value: ir.Value | None, carriers: frozenset[str], found: NodeTest) -> ir.Node | None:
    """Breadth first to the nearest producer that ``found`` accepts."""
    queue = [value]
    for current in queue:
        node = None if current is None else current.producer()
        if node is None:
            continue
        if found(node):
            return node
        if node.op_type in carriers:
            # The condition of a Where decides who may attend; it is none of the numbers.
            sources = node.inputs[1:] if node.op_type == "Where" else node.inputs
            queue.extend(source for source in sources if source not in queue)
    return None


def ancestors(value: ir.Value) -> set[ir.Value]:
    """A tensor and all that it is made from; what only gives it a size is left out."""
    seen, waiting = {value}, [value]  # not by recursion: a graph may be as deep as its author likes
    while waiting:
        node = waiting.pop().producer()
        if node is None or node.op_type in SIZE_OPS:
            continue
        new = [source for source in node.inputs if source is not None and source not in seen]
        seen.update(new)
        waiting += new
    return seen


def before_rounding(value: ir.Value) -> ir.Value:
    """The same numbers before trailing casts and quantisers: the widest float tensor."""
    widest, current = value, value
    while (node := current.producer()) is not None and node.op_type in ("Cast", "DequantizeLinear", "QuantizeLinear"):
        if node.inputs[0] is None:
            break
        current = node.inputs[0]
        if current.dtype in FLOATS:
            widest = current
    return widest


def operands(product: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The two factors of a product."""
    places = (0, 3) if product.op_type == "QLinearMatMul" else (0, 1)
    left, right = (product.inputs[number] if number < len(product.inputs) else None for number in places)
    if left is None or right is None:
        raise graph_invalid(f"node {product.name!r} ({product.op_type}) lacks an operand")
    return left, right


def is_value_product(node: ir.Node) -> bool:
    """A product of two computed tensors, such as ``Q K^T`` and ``map @ V``."""
    if node.op_type in OPAQUE_PRODUCTS:
        return len(node.inputs) == 2 and all(one is not None and one.const_value is None for one in node.inputs)
    products = PRODUCTS | INTEGER_PRODUCTS
    return node.op_type in products and not any(_is_weight(value) for value in operands(node))


def _is_weight(value: ir.Value) -> bool:
    """Whether a constant is a matrix; learned queries and maps are computed constants, too, of more axes."""
    stated = value
    while isinstance(stated.const_value, ir.LazyTensor):
        node = stated.producer()
        if node is None or node.op_type not in LAYOUT_OPS or node.inputs[0] is None:  # it is computed of others
            return value.const_value is not None and value.const_value.numpy().ndim <= 2
        stated = node.inputs[0]
    return stated.const_value is not None
