"""The constant matrix that an operator multiplies a tensor by, in any form that a graph may hold it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.graph.nodes import constant_of, float_attribute, int_attribute, is_constant
from shd_ref.teacher.opening.operators import INTEGER_PRODUCTS, PRODUCTS
from shd_ref.teacher.packages import ir


@dataclass(frozen=True)
class Weight:
    """A constant factor.

    Attributes:
        matrix: ``(in, out)``; ``(N, in, out)`` for a product of stacked matrices.
        axis: of the other factor, over which the product sums; from the end, so negative.
        out_axis: of the product, where it has the matrix's columns; from the end, so negative.
    """

    matrix: NDArray[Any]
    axis: int = -1
    out_axis: int = -1


def product_weight(node: ir.Node, place: int) -> Weight | None:
    """What an operator multiplies its input at this place by; None where it does something else."""
    if node.op_type == "Conv":
        return _pointwise_weight(node) if place == 0 else None
    if node.op_type in PRODUCTS and place == 1:
        return _left_weight(node)
    if node.op_type in ("Gemm", *PRODUCTS) and place == 0:
        return _right_weight(node)
    if (node.op_type in INTEGER_PRODUCTS or node.op_type == "DynamicQuantizeMatMul") and place == 0:
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


def _left_weight(node: ir.Node) -> Weight | None:
    """``W x`` on columns: ``(out, in)`` on the left."""
    weight = constant_of(node.inputs[0])
    plain = node.op_type == "MatMul"
    return Weight(_wide(weight.T), -2, -2) if plain and weight is not None and weight.ndim == 2 else None


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
        constant_of(_input(node, place)) if place >= 0 else None
        for place in {
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
        for scaled, place in cast.outputs[0].uses() if cast.op_type == "Cast" else ():
            if scaled.op_type != "Mul":
                continue
            scales = _input(scaled, 1 - place)
            node = None if scales is None else scales.producer()
            sources = (scales,) if node is None or node.op_type != "Mul" else node.inputs
            return next((constant_of(source) for source in sources if is_constant(source)), None)
    return None


def _input(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None
