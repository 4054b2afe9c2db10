"""Back from a tensor to what it is made of: products, projections, what stood before rounding or repetition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from shd_ref.errors import ShdError
from shd_ref.teacher.graph.nodes import is_constant
from shd_ref.teacher.opening.operators import (
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
    return node.op_type in products and not any(is_constant(value) for value in operands(node))


def operands(product: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The two factors of a product."""
    places = (0, 3) if product.op_type == "QLinearMatMul" else (0, 1)
    left, right = (product.inputs[place] if place < len(product.inputs) else None for place in places)
    if left is None or right is None:
        raise ShdError("graph-invalid", f"node {product.name!r} ({product.op_type}) lacks an operand")
    return left, right


def _is_weight_product(node: ir.Node) -> bool:
    products = PRODUCTS | INTEGER_PRODUCTS | {"Gemm"}
    return node.op_type in products and any(is_constant(value) for value in operands(node))


def is_cross(scores: ir.Node) -> bool | None:
    """Whether Q and K are projections of different tensors; None where their projections are not found."""
    # Everything a projection may pass through on its way to Q K^T: biases, scales, head splits, rotary embedding.
    between = LAYOUT_OPS | LOGIT_OPS | REPEAT_OPS | {"Neg", "Slice", "Split"}
    projections = [trace_back(value, between, _is_weight_product) for value in operands(scores)]
    sources = [_projection_source(node) for node in projections if node is not None]
    return None if len(sources) < 2 else sources[0] is not sources[1]


def _projection_source(projection: ir.Node) -> ir.Value | None:
    value = next((value for value in operands(projection) if not is_constant(value)), None)
    while value is not None and (node := value.producer()) is not None and node.op_type in LAYOUT_OPS:
        value = node.inputs[0]
    return value


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
    """Operators behind V, back to its projection, that may repeat value heads for grouped queries."""
    found: list[ir.Node] = []
    node = values.producer()
    while node is not None and node.op_type in LAYOUT_OPS | REPEAT_OPS:
        # A Concat of different tensors joins past values or rotary halves: it repeats nothing.
        if node.op_type != "Concat" or len(set(node.inputs)) == 1:
            found.append(node)
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return tuple(node for node in found if node.op_type in REPEAT_OPS)


def repeat_chain(values: ir.Value) -> tuple[ir.Node, ...]:
    """Operators behind keys or values that move, scale or repeat them, from the last to the first."""
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
