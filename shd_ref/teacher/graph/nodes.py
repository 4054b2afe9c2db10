"""What a single node or tensor of a graph says: its constant value or factor, its attributes, its name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, graph_invalid
from shd_ref.teacher.opening.operators import INTEGER_PRODUCTS, PRODUCTS, STANDARD_DOMAINS, kinds
from shd_ref.teacher.packages import ir, onnx

_LAYOUT: Final = frozenset({"Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_SHRINKING: Final = kinds("LpNormalization ReduceL2 ReduceMean ReduceSum ReduceSumSquare Slice Split")
_BY_ENTRY: Final = kinds(
    "Abs Add Cast Clip DequantizeLinear Div Exp Log Max Min Mul Neg Pow Reciprocal Sigmoid Softplus Sqrt Sub Sum Tanh"
)
_CONSTANT_OPS: Final = _LAYOUT | _SHRINKING | _BY_ENTRY | {"Concat", "Gemm", "MatMul"}
"""What weights are computed with in graphs that no optimiser has folded: adapters that are merged as the graph runs,
norms and scales of weights, gates that are learned numbers."""

_MOST_HELD: Final = 2**27  # entries of all constants that one of them is computed from; more for large weights
_MOST_PRODUCTS: Final = 2**38  # multiplications of one product: ten seconds or so
_VERDICT: Final = "shd_ref.is_constant"


def constant_of(value: ir.Value | None) -> NDArray[Any] | None:
    """The value as an array where the graph fixes it, computed from its constants where it has to be."""
    if value is None or not is_constant(value):
        return None
    arrays: dict[ir.Value, NDArray[Any]] = {}
    held, most = 0, _MOST_HELD
    waiting = [value]  # not by recursion: a graph may be as deep as its author likes
    while waiting:
        node = waiting[-1].producer()
        stated = ir.convenience.get_const_tensor(waiting[-1])
        inputs = (
            [] if node is None or stated is not None else [source for source in node.inputs if source is not None]
        )
        unknown = [source for source in inputs if source not in arrays]
        if unknown:
            waiting += unknown
            continue
        current = waiting.pop()
        if current in arrays:
            continue
        try:
            if stated is not None:
                arrays[current] = stated.numpy()
                most += 8 * arrays[current].size
            elif node is not None:
                held = _count_held(node, [arrays[source] for source in inputs], held, most)
                arrays.update(zip(node.outputs, compute(node, arrays), strict=False))
        except ShdError:
            raise
        except Exception as error:  # the evaluator raises what NumPy and its own operators raise
            name = "a constant" if node is None else f"node {node.name!r} ({node.op_type})"
            raise graph_invalid(
                f"constants of the graph must be what its operators take; {name} cannot be computed: {error}: copy "
                "or export the model again"
            ) from error
    return arrays[value]


def compute(node: ir.Node, known: dict[ir.Value, NDArray[Any]]) -> list[NDArray[Any]]:
    """The outputs of an operator on constants."""
    feeds = {name_of(source): known[source] for source in node.inputs if source is not None}
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
            left = left[::-1] if int_attribute(node, "transA") else left
            right = right[::-1] if int_attribute(node, "transB") else right
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


def is_constant(value: ir.Value | None) -> bool:
    """Whether ``constant_of`` gives a value; the answer is kept with the value, as every later value asks for it."""
    if value is None:
        return False
    waiting, begun = [value], {value}
    while waiting:
        current = waiting[-1]
        node = current.producer()
        if ir.convenience.get_const_tensor(current) is not None:
            verdict = True
        elif node is None or node.op_type not in _CONSTANT_OPS or node.domain not in STANDARD_DOMAINS:
            verdict = False
        else:
            sources = [source for source in node.inputs if source is not None]
            known = [source.meta.get(_VERDICT) for source in sources]
            unknown = [source for source, one in zip(sources, known, strict=True) if one is None]
            if False not in known and unknown and unknown[0] not in begun:
                waiting.append(unknown[0])
                begun.add(unknown[0])
                continue
            verdict = False not in known and not unknown and bool(sources)  # unknown: it feeds itself
        waiting.pop()
        current.meta[_VERDICT] = verdict
    return bool(value.meta[_VERDICT])


def int_attribute(node: ir.Node, *names: str) -> int | None:
    """The first of these attributes that the node has."""
    name = next((name for name in names if name in node.attributes), None)
    if name is None:
        return None
    try:
        return node.attributes[name].as_int()
    except TypeError as error:
        raise _mistyped(node, name) from error


def float_attribute(node: ir.Node, name: str) -> float:
    """The attribute, or 1."""
    try:
        return node.attributes[name].as_float() if name in node.attributes else 1.0
    except TypeError as error:
        raise _mistyped(node, name) from error


def _mistyped(node: ir.Node, name: str) -> ShdError:
    return graph_invalid(
        f"attribute {name!r} of node {node.name!r} ({node.op_type}) is of another type than the operator's: copy or "
        "export the model again"
    )


def name_of(value: ir.Value) -> str:
    """A tensor's name."""
    if not value.name:
        raise graph_invalid("a tensor of the graph has no name: export the model again")
    return value.name


def dtype_name(value: ir.Value | None) -> str | None:
    """NumPy's name of a tensor's dtype, where inference found it."""
    return None if value is None or value.dtype is None else str(value.dtype.numpy().name)


def data_inputs(node: ir.Node) -> list[ir.Value]:
    """The input that carries the data, in operators that move or repeat it."""
    return [value for value in node.inputs[:1] if value is not None]


@dataclass(frozen=True)
class Weight:
    """A constant ``(in, out)``, ``(N, in, out)``; summed over ``axis``, columns on ``out_axis``, from the end."""

    matrix: NDArray[Any]
    axis: int = -1
    out_axis: int = -1


def product_weight(node: ir.Node, slot: int) -> Weight | None:
    """What an operator multiplies its input at this place by; None where it does something else."""
    if node.op_type == "Conv":
        return _pointwise_weight(node) if slot == 0 else None
    if node.op_type in PRODUCTS and slot == 1:  # W x on columns: (out, in) on the left
        weight = constant_of(node.inputs[0])
        plain = node.op_type == "MatMul"
        return Weight(_wide(weight.T), -2, -2) if plain and weight is not None and weight.ndim == 2 else None
    if node.op_type in ("Gemm", *PRODUCTS) and slot == 0:
        return _right_weight(node)
    if (node.op_type in INTEGER_PRODUCTS or node.op_type == "DynamicQuantizeMatMul") and slot == 0:
        matrix = _quantised_weight(node)
        return None if matrix is None else Weight(matrix)
    return None


def _right_weight(node: ir.Node) -> Weight | None:
    weight = constant_of(node.inputs[1])
    if weight is None or any(int_attribute(node, flag) for flag in ("transA", "transBatchA", "transBatchB")):
        return None
    while weight.ndim > 2 and len(weight) == 1:
        weight = weight[0]
    if weight.ndim not in (2, 3):
        return None
    matrix = weight.swapaxes(-1, -2) if int_attribute(node, "transB") else weight
    dtype = np.float64 if weight.dtype == np.float64 else np.float32
    wide: NDArray[Any] = np.multiply(matrix, dtype(float_attribute(node, "alpha")), order="C", dtype=dtype)
    return Weight(wide)


def _pointwise_weight(node: ir.Node) -> Weight | None:
    """A convolution of width one: ``(out, in, 1, ...)`` on the second axis."""
    weight = constant_of(node.inputs[1])
    if weight is None or weight.ndim < 3 or weight[0, 0].size != 1 or (int_attribute(node, "group") or 1) != 1:
        return None
    lists = {name: node.attributes[name].as_ints() for name in ("pads", "strides") if name in node.attributes}
    if any(lists.get("pads", ())) or any(step != 1 for step in lists.get("strides", ())):
        return None
    return Weight(_wide(weight.reshape(weight.shape[:2]).T), 1 - weight.ndim, 1 - weight.ndim)


def _wide(weight: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(weight, dtype=np.float64 if weight.dtype == np.float64 else np.float32)


def _quantised_weight(node: ir.Node) -> NDArray[np.float32] | None:
    """``(codes - zero) * scale`` of a product of integers."""
    codes, scale, zero = (
        constant_of(_input(node, position)) if position >= 0 else None
        for position in {
            "DynamicQuantizeMatMul": (1, 2, 3),
            "MatMulInteger": (1, -1, 3),
            "MatMulIntegerToFloat": (1, 3, 5),
            "QLinearMatMul": (3, 4, 5),
        }[node.op_type]
    )
    if node.op_type == "MatMulInteger":
        scale = _scale_behind(node)
    if codes is None or codes.ndim != 2 or scale is None:
        return None
    offset = codes.astype(np.float32) - (0.0 if zero is None else zero.astype(np.float32))
    weight: NDArray[np.float32] = offset * scale.astype(np.float32)
    return weight


def _scale_behind(product: ir.Node) -> NDArray[Any] | None:
    """The weight's scale, which follows a product of integers: ``Cast``, then ``Mul`` by both operands' scales."""
    for cast, _ in product.outputs[0].uses():
        for scaled, number in cast.outputs[0].uses() if cast.op_type == "Cast" else ():
            if scaled.op_type != "Mul":
                continue
            scales = _input(scaled, 1 - number)
            node = None if scales is None else scales.producer()
            sources = (scales,) if node is None or node.op_type != "Mul" else node.inputs
            return next((constant_of(source) for source in sources if is_constant(source)), None)
    return None


def _input(node: ir.Node, slot: int) -> ir.Value | None:
    return node.inputs[slot] if slot < len(node.inputs) else None
