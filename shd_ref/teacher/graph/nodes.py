"""What nodes and tensors say by themselves, and back from a tensor to what it is made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, graph_invalid
from shd_ref.teacher.graph.inputs import InputSpec
from shd_ref.teacher.opening.model import (
    ADDING_OPS,
    INTEGER_PRODUCTS,
    LAYOUT_OPS,
    LOGIT_OPS,
    OPAQUE_PRODUCTS,
    PRODUCTS,
    REPEAT_OPS,
    SCALING_OPS,
    SIZE_OPS,
    STANDARD_DOMAINS,
    ir,
    kinds,
    onnx,
)

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


NodeTest: TypeAlias = Callable[[ir.Node], bool]

_LAYER_NORMS: Final = frozenset(
    {"LayerNormalization", "LpNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}
)
_NORM_STEPS: Final = frozenset({"Add", "Cast", "Clip", "Div", "Expand", "Max", "Reciprocal", "Sqrt"})
"""Between a mean of squares and what is divided by its root."""
_MEANS: Final = frozenset({"ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare"})
_FLOATS: Final = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})


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
            queue.extend(source for source in node.inputs if source not in queue)
    return None


def is_value_product(node: ir.Node) -> bool:
    """A product of two computed tensors, such as ``Q K^T`` and ``map @ V``."""
    if node.op_type in OPAQUE_PRODUCTS:
        return len(node.inputs) == 2 and not any(is_constant(value) for value in node.inputs)
    products = PRODUCTS | INTEGER_PRODUCTS
    return node.op_type in products and not any(_is_weight(value) for value in operands(node))


def _is_weight(value: ir.Value) -> bool:
    """Whether a constant is a matrix; learned queries and maps are computed constants, too, of more axes."""
    if not is_constant(value):
        return False
    current: ir.Value | None = value
    while current is not None and ir.convenience.get_const_tensor(current) is None:
        node = current.producer()
        if node is None or node.op_type not in LAYOUT_OPS:  # it is computed of others
            constant = constant_of(value)
            return constant is not None and constant.ndim <= 2
        current = node.inputs[0]
    return True


def operands(product: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The two factors of a product."""
    places = (0, 3) if product.op_type == "QLinearMatMul" else (0, 1)
    left, right = (product.inputs[number] if number < len(product.inputs) else None for number in places)
    if left is None or right is None:
        raise graph_invalid(f"node {product.name!r} ({product.op_type}) lacks an operand")
    return left, right


def _is_weight_product(node: ir.Node) -> bool:
    products = PRODUCTS | INTEGER_PRODUCTS | {"Gemm"}
    return node.op_type in products and any(is_constant(value) for value in operands(node))


def is_cross(scores: ir.Node) -> bool | None:
    """Whether Q and K are made of different tensors, or of different inputs; None where neither can be told."""
    # Everything a projection may pass through on its way to Q K^T: biases, scales, head splits, rotary embedding.
    between = LAYOUT_OPS | LOGIT_OPS | REPEAT_OPS | {"Neg", "Slice", "Split"}
    projections = [trace_back(value, between, _is_weight_product) for value in operands(scores)]
    sources = [_projected_tensors(node) for node in projections if node is not None]
    if len(sources) == 2:
        return sources[0].isdisjoint(sources[1])
    queries, keys = (_data_inputs(value) for value in operands(scores))
    return True if queries != keys else None


def _data_inputs(value: ir.Value) -> set[str]:
    """The inputs with data of a sequence that a tensor is made from; what only gives it a size is left out."""
    names = set()
    for current in ancestors(value):
        if current.is_graph_input() and current.name and not is_constant(current):
            shape = (None,) * (0 if current.shape is None else len(current.shape))
            spec = InputSpec(current.name, "float32" if current.dtype in _FLOATS else "int64", shape)
            names |= {current.name} if spec.part == "data" and len(shape) > 1 else set()
    return names


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


def _projected_tensors(projection: ir.Node) -> set[ir.Value]:
    """What a projection reads, and what that is projected from in turn: adapters and latents have two products."""
    tensors: set[ir.Value] = set()
    waiting = [value for value in operands(projection) if not is_constant(value)]
    while waiting:
        value = waiting.pop()
        if value in tensors:
            continue
        tensors.add(value)
        node = value.producer()
        waiting += [] if node is None else _other_forms(node)
    return tensors


def _other_forms(node: ir.Node) -> list[ir.Value]:
    """What a tensor is moved, normed, projected or cut from; past sums everything comes from everything."""
    sources = [value for value in node.inputs if value is not None and not is_constant(value)]
    if node.op_type in ("Slice", "Split"):
        return sources[:1] if _cuts_width(node) else []
    if node.op_type in SCALING_OPS and len(sources) == 2:  # a norm that is written out
        left, right = sources
        pairs = (left, right), (right, left)
        return [one for one, other in pairs if trace_back(other, _NORM_STEPS, lambda node: node.op_type in _MEANS)]
    if node.op_type in ADDING_OPS | SCALING_OPS:
        return sources if len(sources) == 1 else []
    kept = node.op_type in LAYOUT_OPS or node.op_type in _LAYER_NORMS or _is_weight_product(node)
    return sources if kept else []


def _cuts_width(node: ir.Node) -> bool:
    """Whether it cuts the last axis: parts of a latent, but not of the sequence."""
    source = node.inputs[0]
    rank = 0 if source is None or source.shape is None else len(source.shape)
    if node.op_type == "Split":
        axes = [int_attribute(node, "axis") or 0]
    else:
        constant = constant_of(node.inputs[3]) if len(node.inputs) > 3 else None
        axes = [0] if constant is None else constant.ravel().tolist()
    return all(axis == -1 or axis == rank - 1 for axis in axes)


def is_over_last_axis(softmax: ir.Node) -> bool:
    """Whether a softmax sums over the last axis, as far as its rank is known."""
    axis = int_attribute(softmax, "axis")
    if axis is None:
        opset = 1 if softmax.graph is None else softmax.graph.opset_imports.get("", 1)
        axis = -1 if opset >= 13 else 1
    shape = softmax.outputs[0].shape
    # Maps have at least three axes, so without a known rank a later axis than 1 is taken for the last.
    return axis == -1 or (axis >= 2 if shape is None else axis == len(shape) - 1)


def before_rounding(value: ir.Value) -> ir.Value:
    """The same numbers before trailing casts and quantisers: the widest float tensor."""
    widest, current = value, value
    while (node := current.producer()) is not None and node.op_type in ("Cast", "DequantizeLinear", "QuantizeLinear"):
        source = node.inputs[0]
        if source is None:
            break
        current = source
        if current.dtype in _FLOATS:
            widest = current
    return widest


def list_repeats(values: ir.Value) -> tuple[ir.Node, ...]:
    """Operators between V and its projection that may repeat value heads for grouped queries."""
    # A Concat of different tensors joins past values or rotary halves: it repeats nothing.
    return tuple(
        node
        for node in _back_along(values, LAYOUT_OPS | REPEAT_OPS)
        if node.op_type in REPEAT_OPS and (node.op_type != "Concat" or _repeats(node))
    )


def repeat_chain(values: ir.Value) -> tuple[ir.Node, ...]:
    """Operators that move, scale or repeat keys or values, from the last to the first."""
    chain = _back_along(values, LAYOUT_OPS | REPEAT_OPS | SCALING_OPS)
    return tuple(itertools.takewhile(lambda node: node.op_type != "Concat" or _repeats(node), chain))


def _back_along(value: ir.Value | None, carriers: frozenset[str]) -> Iterator[ir.Node]:
    while value is not None and (node := value.producer()) is not None and node.op_type in carriers:
        yield node
        value = node.inputs[0]


def _repeats(concat: ir.Node) -> bool:
    return len(set(concat.inputs)) == 1


def values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    """Every tensor that the graph takes or computes; outputs that a node leaves out have no name."""
    values = (*graph.inputs, *(value for node in graph for value in node.outputs))
    return {value.name: value for value in values if value.name}
