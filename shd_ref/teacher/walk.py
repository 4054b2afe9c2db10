"""Follow data through a graph, from a softmax to the output projection; no pattern, and no size.

Forward from the softmax, the first product with something that is not a weight is ``map @ V``; forward from that, the
first product with a weight is the output projection W_o. Backward from the softmax, the first product is ``Q K^T``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError
from shd_ref.teacher.load import CONTRIB_DOMAIN
from shd_ref.teacher.nodes import constant_of, data_inputs, float_attribute, int_attribute, name_of
from shd_ref.teacher.packages import ir

_Test: TypeAlias = Callable[[ir.Node], bool]

# What the map may pass through between the softmax and its product with V.
_MAP_CARRIERS: Final = frozenset(
    {"Cast", "DequantizeLinear", "Dropout", "Identity", "Mul", "QuantizeLinear", "Reshape", "Slice", "Where"}
)

# What only moves numbers, between the heads' outputs and W_o, or around V.
_LAYOUT_OPS: Final = frozenset(
    {
        "Cast",
        "DequantizeLinear",
        "Dropout",
        "Flatten",
        "Identity",
        "QuantizeLinear",
        "Reshape",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)

_REPEAT_OPS: Final = frozenset({"Concat", "Expand", "Gather", "Tile"})

# Backward from the softmax: scale, mask, softcap and sink on the way to Q K^T.
_LOGIT_OPS: Final = frozenset(
    {"Add", "Cast", "Clip", "Concat", "Div", "Identity", "Max", "Mul", "Reshape", "Sub", "Tanh", "Where"}
)

_PRODUCTS: Final = frozenset({"MatMul", "FusedMatMul"})
_INTEGER_PRODUCTS: Final = frozenset({"MatMulInteger", "QLinearMatMul", "MatMulIntegerToFloat"})
_FUSED_OPS: Final = frozenset(
    {
        "Attention",
        "DecoderAttention",
        "DecoderMaskedMultiHeadAttention",
        "DecoderMaskedSelfAttention",
        "GroupQueryAttention",
        "LongformerAttention",
        "MultiHeadAttention",
        "PackedAttention",
        "PackedMultiHeadAttention",
        "PagedAttention",
        "QAttention",
        "SparseAttention",
    }
)

_FLOATS: Final = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})


@dataclass(frozen=True)
class Walk:
    """What following the data from one node brought, before any size is known."""

    node: ir.Node
    reason: str | None = None
    probs: ir.Value | None = None
    values: ir.Value | None = None
    context: ir.Value | None = None  # the heads' outputs, map @ V
    path: tuple[ir.Node, ...] = ()  # layout operators from the context to W_o
    weight: NDArray[Any] | None = None
    query: ir.Value | None = None
    cross: bool | None = None
    repeats: tuple[ir.Node, ...] = ()  # operators that repeat V's heads

    def tensors(self) -> Iterator[str]:
        """Names of all tensors whose shapes decide the sizes."""
        values = [self.probs, self.values, self.context, self.query]
        values += [node.outputs[0] for node in (*self.path, *self.repeats)]
        values += [value for node in self.repeats for value in data_inputs(node)]
        yield from (name_of(value) for value in values if value is not None and constant_of(value) is None)


def walk_from(node: ir.Node, opset: int) -> Iterator[Walk]:
    """The walk that starts at this node, if any does."""
    if node.op_type in _FUSED_OPS and node.domain in ("", "ai.onnx", CONTRIB_DOMAIN):
        yield Walk(
            node,
            f"{node.op_type} is fused, so its attention map never exists as a tensor: "
            "re-export with attention fusion off (eager attention, opset 18, no transformer optimiser)",
        )
    elif node.op_type == "Softmax" and node.domain in ("", "ai.onnx") and _over_last_axis(node, opset):
        yield from _walk_softmax(node)


def _walk_softmax(softmax: ir.Node) -> Iterator[Walk]:
    product, place = _follow(softmax.outputs[0], _MAP_CARRIERS, is_value_product)
    if product is None:
        return
    if product.op_type in _INTEGER_PRODUCTS:
        yield Walk(softmax, f"map and values meet in {product.op_type}: use the float or the QDQ form of the model")
        return
    if place != 0 or not _is_plain(product):
        yield Walk(
            softmax,
            f"map and values meet in {product.op_type} with the map transposed or scaled: "
            "re-export with eager attention, so that the graph holds MatMul(map, values)",
        )
        return
    probs, values = (before_rounding(value) for value in operands(product))
    projection, path = _follow_path(product.outputs[0])
    common: dict[str, Any] = {"node": softmax, "probs": probs, "values": values, "context": product.outputs[0]}
    if projection is None:
        yield Walk(
            reason="the heads' outputs reach no MatMul or Gemm with a constant weight, so there is no output "
            "projection: export the model with its weights inside, up to and including the attention block",
            **common,
        )
        return
    logits = _trace_back(softmax.inputs[0], _LOGIT_OPS, is_value_product)
    yield Walk(
        path=path,
        weight=_projection_weight(projection),
        query=None if logits is None else logits.inputs[0],
        cross=None if logits is None else _is_cross(logits),
        repeats=_repeats(values),
        **common,
    )


def _over_last_axis(softmax: ir.Node, opset: int) -> bool:
    axis = int_attribute(softmax, "axis")
    axis = (-1 if opset >= 13 else 1) if axis is None else axis
    shape = softmax.outputs[0].shape
    # Maps have at least three axes, so without a known rank a later axis than 1 is taken for the last.
    return axis == -1 or (axis >= 2 if shape is None else axis == len(shape) - 1)


def _follow(value: ir.Value, carriers: frozenset[str], found: _Test) -> tuple[ir.Node | None, int]:
    """Breadth first to the nearest consumer that ``found`` accepts, and at which input it consumes."""
    queue = [value]
    for current in queue:
        for node, place in current.uses():
            if found(node):
                return node, place
            if node.op_type in carriers and place in _data_places(node) and node.outputs[0] not in queue:
                queue.append(node.outputs[0])
    return None, 0


def _follow_path(value: ir.Value) -> tuple[ir.Node | None, tuple[ir.Node, ...]]:
    """The first product with a weight behind layout operators, and those operators in order."""
    queue: list[tuple[ir.Value, tuple[ir.Node, ...]]] = [(value, ())]
    for current, path in queue:
        for node, place in current.uses():
            if place == 0 and _projection_weight(node) is not None:
                return node, path
            if node.op_type in _LAYOUT_OPS and place == 0:
                queue.append((node.outputs[0], (*path, node)))
    return None, ()


def _trace_back(value: ir.Value | None, carriers: frozenset[str], found: _Test) -> ir.Node | None:
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
    products = _PRODUCTS | _INTEGER_PRODUCTS
    return node.op_type in products and all(constant_of(value) is None for value in operands(node))


def _is_weight_product(node: ir.Node) -> bool:
    return node.op_type in ("Gemm", *_PRODUCTS) and any(constant_of(value) is not None for value in node.inputs[:2])


def operands(product: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The two factors of a product."""
    places = (0, 3) if product.op_type == "QLinearMatMul" else (0, 1)
    left, right = (product.inputs[place] for place in places)
    if left is None or right is None:
        raise ShdError("graph-invalid", f"node {product.name!r} ({product.op_type}) lacks an operand")
    return left, right


def _is_plain(product: ir.Node) -> bool:
    """Whether a product multiplies its operands as they are."""
    flags = ("transA", "transB", "transBatchA", "transBatchB")
    return not any(int_attribute(product, flag) for flag in flags) and float_attribute(product, "alpha") == 1.0


def _projection_weight(node: ir.Node) -> NDArray[Any] | None:
    """W_o as ``(in, out)`` if the node multiplies its first input by a constant matrix."""
    if node.op_type not in ("Gemm", *_PRODUCTS):
        return None
    weight = constant_of(node.inputs[1])
    if weight is None or weight.ndim != 2 or int_attribute(node, "transA"):
        return None
    matrix = weight.T if int_attribute(node, "transB") else weight
    wide: NDArray[Any] = np.array(matrix, dtype=np.float64 if weight.dtype == np.float64 else np.float32, order="C")
    wide *= float_attribute(node, "alpha")
    return wide


def _is_cross(logits: ir.Node) -> bool | None:
    """Whether Q and K are projections of different tensors; None where their projections are not found."""
    # Everything a projection may pass through on its way to Q K^T: biases, scales, head splits, rotary embedding.
    between = _LAYOUT_OPS | _LOGIT_OPS | _REPEAT_OPS | {"Neg", "Slice", "Split"}
    projections = [_trace_back(value, between, _is_weight_product) for value in operands(logits)]
    sources = [_projection_source(node) for node in projections if node is not None]
    return None if len(sources) < 2 else sources[0] is not sources[1]


def _projection_source(projection: ir.Node) -> ir.Value | None:
    value = next(value for value in projection.inputs[:2] if constant_of(value) is None)
    while value is not None and (node := value.producer()) is not None and node.op_type in _LAYOUT_OPS:
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


def _repeats(values: ir.Value) -> tuple[ir.Node, ...]:
    """Operators behind V, back to its projection, that may repeat value heads for grouped queries."""
    found: list[ir.Node] = []
    node = values.producer()
    while node is not None and node.op_type in _LAYOUT_OPS | _REPEAT_OPS:
        # A Concat of different tensors joins past values or rotary halves: it repeats nothing.
        if node.op_type != "Concat" or len(set(node.inputs)) == 1:
            found.append(node)
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return tuple(node for node in found if node.op_type in _REPEAT_OPS)


def repeat_chain(values: ir.Value) -> tuple[ir.Node, ...]:
    """Operators behind keys or values that move, scale or repeat heads as wholes, from the last to the first."""
    chain: list[ir.Node] = []
    node = values.producer()
    while node is not None:
        scales = node.op_type in ("Div", "Mul") and _is_number(node.inputs[1])
        joins = node.op_type == "Concat" and len(set(node.inputs)) == 1
        if not (scales or joins or node.op_type in _LAYOUT_OPS | _REPEAT_OPS - {"Concat"}):
            break
        chain.append(node)
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return tuple(chain)


def _is_number(value: ir.Value | None) -> bool:
    constant = constant_of(value)
    return constant is not None and constant.size == 1


def _data_places(node: ir.Node) -> tuple[int, ...]:
    return {"Where": (1, 2), "Mul": (0, 1)}.get(node.op_type, (0,))
