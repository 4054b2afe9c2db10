"""Back from a tensor to what it is made of: products, projections, what stood before rounding or repetition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from shd_ref.errors import graph_invalid
from shd_ref.teacher.graph.inputs import InputSpec
from shd_ref.teacher.graph.nodes import constant_of, int_attribute, is_constant
from shd_ref.teacher.opening.operators import (
    ADDING_OPS,
    INTEGER_PRODUCTS,
    LAYOUT_OPS,
    LOGIT_OPS,
    OPAQUE_PRODUCTS,
    PRODUCTS,
    REPEAT_OPS,
    SCALING_OPS,
)
from shd_ref.teacher.packages import ir

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
        if node is None or node.op_type in ("Shape", "Size"):
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
    nodes: list[ir.Node] = []
    node = values.producer()
    while node is not None and node.op_type in LAYOUT_OPS | REPEAT_OPS:
        # A Concat of different tensors joins past values or rotary halves: it repeats nothing.
        if node.op_type in REPEAT_OPS and (node.op_type != "Concat" or len(set(node.inputs)) == 1):
            nodes.append(node)
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return tuple(nodes)


def repeat_chain(values: ir.Value) -> tuple[ir.Node, ...]:
    """Operators that move, scale or repeat keys or values, from the last to the first."""
    chain: list[ir.Node] = []
    node = values.producer()
    while node is not None:
        joins = node.op_type == "Concat" and len(set(node.inputs)) == 1
        if not (joins or node.op_type in (LAYOUT_OPS | REPEAT_OPS | SCALING_OPS) - {"Concat"}):
            break
        chain.append(node)
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return tuple(chain)
