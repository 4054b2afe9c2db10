"""The output projection W_o behind the heads' outputs, as floats, in whatever form the graph holds it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.nodes import constant_of, float_attribute, int_attribute, is_constant
from shd_ref.teacher.operators import INTEGER_PRODUCTS, LAYOUT_OPS, PRODUCTS
from shd_ref.teacher.packages import ir

Path = tuple[ir.Node, ...]


def follow_to_projection(context: ir.Value) -> tuple[NDArray[Any] | None, Path, frozenset[str]]:
    """W_o ``(in, out)``, the layout operators before it in order, and what else consumes the heads' outputs."""
    queue: list[tuple[ir.Value, Path]] = [(context, ())]
    met: set[str] = set()
    for current, path in queue:
        for node, place in current.uses():
            weight = projection_weight(node) if place == 0 else None
            if weight is not None:
                return weight, path, frozenset()
            if node.op_type in LAYOUT_OPS and place == 0:
                queue.append((node.outputs[0], (*path, node)))
            else:
                met.add(node.op_type)
    return None, (), frozenset(met)


def projection_weight(node: ir.Node) -> NDArray[Any] | None:
    """W_o as ``(in, out)`` if the node multiplies its first input by a constant matrix."""
    if node.op_type in ("Gemm", *PRODUCTS):
        weight = constant_of(node.inputs[1])
        if weight is None or weight.ndim != 2 or int_attribute(node, "transA"):
            return None
        matrix = weight.T if int_attribute(node, "transB") else weight
        dtype = np.float64 if weight.dtype == np.float64 else np.float32
        wide: NDArray[Any] = np.multiply(matrix, dtype(float_attribute(node, "alpha")), order="C", dtype=dtype)
        return wide
    if node.op_type in INTEGER_PRODUCTS or node.op_type == "DynamicQuantizeMatMul":
        return _quantised_weight(node)
    return None


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
