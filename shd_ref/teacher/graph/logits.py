"""What a softmax's logits are made of: the product ``Q K^T``, and what is done to it on the way.

Backward from the softmax every operator is read as arithmetic on the product, so that queries, keys and a scale can
stand for the map. What cannot be read so is named; nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from shd_ref.teacher.graph.flow.tracing import is_value_product
from shd_ref.teacher.graph.nodes import constant_of, int_attribute
from shd_ref.teacher.packages import ir

_PASSING: Final = frozenset({"Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Reshape"})
_ARITHMETIC: Final = _PASSING | {
    "Add",
    "Clip",
    "Concat",
    "Div",
    "Max",
    "Mul",
    "ReduceMax",
    "Sub",
    "Tanh",
    "Transpose",
    "Where",
}


@dataclass
class Logits:
    """``softmax(scale * multipliers * Q K^T + addends)``, as it was read.

    Attributes:
        product: the node of ``Q K^T``; None where it was not reached.
        scale: all constant factors of the product together.
        multipliers: computed factors, each with the operator (``Mul`` or ``Div``) that applies it.
        addends: tensors that are added, masks or biases, each with the factor of all that follows.
        fills: tensors that replace masked entries, each with the factor of all that follows.
        softcap: c of ``c * tanh(z / c)``.
        sinks: whether columns without a key join the softmax.
        reason: why this form cannot be read.
    """

    product: ir.Node | None = None
    scale: float = 1.0
    multipliers: list[tuple[str, ir.Value]] = field(default_factory=list)
    addends: list[tuple[float, ir.Value]] = field(default_factory=list)
    fills: list[tuple[float, ir.Value]] = field(default_factory=list)
    softcap: float | None = None
    sinks: bool = False
    reason: str | None = None


def read_logits(value: ir.Value | None) -> Logits:
    """Read what leads to a softmax, from its input back to ``Q K^T``."""
    found = Logits()
    while found.reason is None:
        node = None if value is None else value.producer()
        if node is None or not _leads_to_product(value):
            found.reason = "its logits come from no product of queries and keys"
        elif is_value_product(node):
            found.product = node
            break
        else:
            value = _step(node, found)
    return found


def _step(node: ir.Node, found: Logits) -> ir.Value | None:
    """Take one operator into account; its input on the side of the product."""
    inputs = [value for value in node.inputs if value is not None]
    sides = [value for value in inputs if _leads_to_product(value)]
    others = [value for value in inputs if not any(value is side for side in sides)]
    shift = [side for side in sides if _is_row_maximum(side)]
    if node.op_type == "Sub" and len(sides) == 2 and sides[1] in shift:
        return sides[0]  # a softmax made safe by hand, which changes nothing
    if len(sides) != 1:
        found.reason = f"its logits join several products (by {node.op_type}), as relative positions do"
        return None
    side = sides[0]
    if node.op_type in _PASSING:
        pass
    elif node.op_type in ("Mul", "Div") and not (node.op_type == "Div" and inputs[0] is not side):
        _multiply(node.op_type, others[0], found)
    elif node.op_type in ("Add", "Sub") and not (node.op_type == "Sub" and inputs[0] is not side):
        found.addends.append((found.scale if node.op_type == "Add" else -found.scale, others[0]))
    elif node.op_type == "Where" and inputs[0] is not side:
        found.fills.append((found.scale, next(value for value in inputs[1:] if value is not side)))
    elif node.op_type == "Max":
        found.fills.extend((found.scale, value) for value in others)
    elif node.op_type == "Tanh":
        if found.softcap is not None or found.multipliers:
            found.reason = "its logits are bounded in a way that is not a softcap"
        found.softcap = found.scale
    elif node.op_type == "Concat" and int_attribute(node, "axis") in (-1, 3):
        found.sinks = True
    else:
        found.reason = f"its logits pass through {node.op_type}"
    return side


def _multiply(op_type: str, factor: ir.Value, found: Logits) -> None:
    constant = constant_of(factor)
    if constant is not None and constant.size == 1:
        number = float(constant.astype(np.float64).reshape(()))
        found.scale = found.scale * number if op_type == "Mul" else found.scale / number
    else:
        found.multipliers.append((op_type, factor))


def _is_row_maximum(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "ReduceMax"


def _leads_to_product(value: ir.Value | None) -> bool:
    """Whether arithmetic that logits pass through leads back from here to a product of computed tensors."""
    queue = [value]
    for current in queue:
        node = None if current is None else current.producer()
        if node is None:
            continue
        if is_value_product(node):
            return True
        if node.op_type in _ARITHMETIC:
            # The condition of a Where decides who may attend; it is not a logit.
            sources = node.inputs[1:] if node.op_type == "Where" else node.inputs
            queue.extend(source for source in sources if source not in queue)
    return False
