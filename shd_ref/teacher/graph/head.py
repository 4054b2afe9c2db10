"""The head of a language model's graph: what it reads, and what makes logits of it (CACHE-186 to CACHE-190)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import graph_unsupported
from shd_ref.kd.head import TeacherHead
from shd_ref.teacher.graph.nodes import constant_of, is_constant, name_of, product_weight
from shd_ref.teacher.opening.model import read_graph
from shd_ref.teacher.opening.operators import PRODUCTS
from shd_ref.teacher.packages import ir, onnx

_PLAIN: Final = frozenset({"Cast", "Identity"})
_BY_NUMBERS: Final = frozenset({"Add", "Div", "Mul", "Sub"})
_ROUNDING: Final = 2.0**-22  # of two constants in binary32 that are meant to be one another's inverse


@dataclass(frozen=True, eq=False)
class GraphHead:
    """The tensor that a head reads, the tensor of its logits, and the head."""

    states: str
    logits: str
    head: TeacherHead


@dataclass
class _Behind:
    """What is done with the product, from the logits backwards: a cap, then a factor and a sum."""

    scale: float = 1.0
    bias: NDArray[np.float64] | float = 0.0
    soft_cap: float | None = None
    in_cap: bool = False  # between the cap's last factor and its tanh


def find_head(model: onnx.ModelProto, logits: str) -> GraphHead:
    """Follow the output ``logits`` back to the product with the head's matrix.

    Raises:
        ShdError: ``graph-unsupported`` for logits that are made in another way.
    """
    value = next((output for output in read_graph(model).outputs if output.name == logits), None)
    behind = _Behind()
    while value is not None:
        node = value.producer()
        if node is None:
            break
        if node.op_type in (*PRODUCTS, "Gemm"):
            return _read_product(node, logits, behind)
        value = _step(node, behind)
    raise graph_unsupported(
        "exact targets need logits that a head makes of a state: one product with a constant matrix, then at most a "
        f"bias, a scale and a soft cap; {logits!r} is made in another way: store --logits, or export the plain head",
        "CACHE-190",
    )


def _step(node: ir.Node, behind: _Behind) -> ir.Value | None:
    """The input before this operator, which is noted; None for one that a head does not have."""
    inputs = [source for source in node.inputs if source is not None]
    if node.op_type in _PLAIN:
        return inputs[0]
    if node.op_type == "Tanh" and behind.in_cap:
        behind.in_cap = False
        behind.soft_cap, behind.scale = behind.scale, 1.0
        return inputs[0]
    if node.op_type not in _BY_NUMBERS or len(inputs) != 2 or sum(map(is_constant, inputs)) != 1:
        return None
    slot = 0 if is_constant(inputs[0]) else 1
    numbers = constant_of(inputs[slot])
    if numbers is None or (slot == 0 and node.op_type in ("Div", "Sub")):
        return None
    wide = np.asarray(numbers, np.float64)
    if node.op_type in ("Add", "Sub"):
        if wide.size > 1 and wide.shape[-1] != wide.size:
            return None
        added = wide.reshape(-1) if wide.size > 1 else float(wide.reshape(()))
        behind.bias = behind.bias + behind.scale * (added if node.op_type == "Add" else -added)
        return inputs[1 - slot]
    if wide.size != 1 or not wide.all():
        return None
    factor = float(wide.reshape(-1)[0])
    source = inputs[1 - slot]
    producer = source.producer()
    behind.in_cap = producer is not None and producer.op_type == "Tanh" and behind.soft_cap is None
    if behind.in_cap and (behind.scale != 1.0 or np.any(behind.bias) or node.op_type == "Div" or factor <= 0):
        return None
    behind.scale *= factor if node.op_type == "Mul" else 1.0 / factor
    return source


def _read_product(node: ir.Node, logits: str, behind: _Behind) -> GraphHead:
    weight = product_weight(node, 0)
    if weight is None or weight.matrix.ndim != 2 or node.inputs[0] is None:
        raise graph_unsupported(
            f"exact targets need a head whose matrix is constant; that behind {logits!r} is not: store --logits",
            "CACHE-190",
        )
    matrix, bias = np.ascontiguousarray(weight.matrix.T), behind.bias
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        added = constant_of(node.inputs[2])
        beta = node.attributes["beta"].as_float() if "beta" in node.attributes else 1.0
        if added is None:
            raise graph_unsupported(f"the bias of the head behind {logits!r} must be constant", "CACHE-190")
        bias = bias + behind.scale * beta * np.asarray(added, np.float64).reshape(-1)
    scale, cap = behind.scale, behind.soft_cap
    if cap is not None:  # what came before the tanh was divided by it
        scale, bias = scale * cap, bias * cap
        scale = 1.0 if abs(scale - 1) < _ROUNDING else scale
    is_biased = bool(np.any(bias))
    head = TeacherHead(
        _narrow(matrix), np.broadcast_to(bias, (len(matrix),)).astype(np.float32) if is_biased else None, scale, cap
    )
    return GraphHead(name_of(node.inputs[0]), logits, head)


def _narrow(matrix: NDArray[Any]) -> NDArray[Any]:
    """In binary16 where that loses nothing, as of a teacher that was exported in it."""
    with np.errstate(over="ignore"):
        half = matrix.astype(np.float16)
    return half if np.array_equal(half, matrix) else matrix.astype(np.float32)
