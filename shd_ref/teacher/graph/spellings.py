"""The spellings of a softmax: the operator, the exponential of its logarithm, and numbers over their sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from shd_ref.teacher.opening.model import STANDARD_DOMAINS, ir

_SHAPING: Final = frozenset({"Cast", "Dropout", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_NEGLIGIBLE: Final = 1e-6
"""Beside a sum of about one: it keeps the quotient finite and takes nothing from a row."""
_DEEPEST: Final = 8  # a sum's casts, shapes and guards


@dataclass(frozen=True)
class Quotient:
    """Numbers over their sum along the last axis, or over more: then ``sums_to_one`` is False.

    That they are at least zero, a probe shows, and precompute on its data.
    """

    numbers: ir.Value
    sums_to_one: bool

    @property
    def logits(self) -> ir.Value | None:
        """The input of the softmax that this spells out; None where it is not a softmax."""
        node = _before_casts(self.numbers).producer()
        return node.inputs[0] if node is not None and node.op_type == "Exp" and self.sums_to_one else None


class Spelling(NamedTuple):
    """How a map is spelled: of logits, where it is a softmax, or as a quotient of other numbers."""

    logits: ir.Value | None
    quotient: Quotient | None = None
    over_last_axis: bool = True


def read_map(node: ir.Node) -> Spelling | None:
    """The map that an operator gives, as far as this tells; None where it gives none."""
    if node.op_type == "Softmax" and node.domain in STANDARD_DOMAINS:
        return Spelling(node.inputs[0], over_last_axis=_is_over_last_axis(node))
    logits, quotient = _read_log_softmax(node), read_quotient(node)
    if logits is not None:
        return Spelling(logits)
    return None if quotient is None else Spelling(quotient.logits, quotient)


def gives_map(node: ir.Node) -> bool:
    """Whether an operator gives a map over the last axis."""
    spelling = read_map(node)
    return spelling is not None and spelling.over_last_axis


def _is_over_last_axis(softmax: ir.Node) -> bool:
    """Whether a softmax sums over the last axis, as far as its rank is known."""
    opset = 1 if softmax.graph is None else softmax.graph.opset_imports.get("", 1)
    axis, shape = softmax.attributes.get_int("axis", -1 if opset >= 13 else 1), softmax.outputs[0].shape
    # Maps have at least three axes, so without a known rank a later axis than 1 is taken for the last.
    return axis == -1 or (axis >= 2 if shape is None else axis == len(shape) - 1)


def _read_log_softmax(node: ir.Node) -> ir.Value | None:
    """The logits of a softmax that is the exponential of its own logarithm; None for any other operator."""
    log = _before_casts(node.inputs[0]).producer() if node.op_type == "Exp" and node.inputs[0] is not None else None
    if log is None or not log.inputs:
        return None
    if log.op_type == "LogSoftmax":
        return log.inputs[0] if _is_over_last_axis(log) else None
    total = None if log.op_type != "Sub" or log.inputs[1] is None else _before_casts(log.inputs[1]).producer()
    is_log_of_sum = total is not None and total.op_type == "ReduceLogSumExp" and _sums_last_axis(total)
    return log.inputs[0] if total is not None and is_log_of_sum and total.inputs[0] is log.inputs[0] else None


def read_quotient(node: ir.Node) -> Quotient | None:
    """An operator as a quotient; None where it does something else."""
    for numbers, total in _fractions(node):
        sums_to_one = _read_sum(total, _before_casts(numbers))
        if sums_to_one is not None:
            return Quotient(numbers, sums_to_one)
    return None


def _fractions(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Numerator and denominator, also of a product with a reciprocal."""
    inputs = [value for value in node.inputs if value is not None]
    if node.op_type == "Div" and len(inputs) == 2:
        yield inputs[0], inputs[1]
    elif node.op_type == "Mul" and len(inputs) == 2:
        for numbers, other in (inputs, inputs[::-1]):
            inverse = other.producer()
            if inverse is not None and inverse.op_type == "Reciprocal" and inverse.inputs[0] is not None:
                yield numbers, inverse.inputs[0]


def _before_casts(value: ir.Value) -> ir.Value:
    while (node := value.producer()) is not None and node.op_type in ("Cast", "Identity"):
        if node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value


def _read_sum(value: ir.Value, numbers: ir.Value, depth: int = 0) -> bool | None:
    """Whether a tensor is the sum of the numbers over their last axis, and nothing else; None for no such sum."""
    node = value.producer()
    if node is None or depth > _DEEPEST:
        return None
    if node.op_type in ("ReduceL1", "ReduceSum"):
        source = node.inputs[0]
        is_sum = source is not None and _before_casts(source) is numbers and _sums_last_axis(node)
        return True if is_sum else None
    if node.op_type not in (*_SHAPING, "Add", "Clip", "Max", "Where"):
        return None
    inputs = [one for one in (node.inputs[1:] if node.op_type == "Where" else node.inputs) if one is not None]
    inputs = inputs[:1] if node.op_type in _SHAPING else inputs
    read = [_read_sum(operand, numbers, depth + 1) for operand in inputs]
    sums = [reading for reading in read if reading is not None]
    others = [operand for operand, reading in zip(inputs, read, strict=True) if reading is None]
    is_bounded = node.op_type == "Clip" and len(node.inputs) > 2 and node.inputs[2] is not None
    if len(sums) != 1 or is_bounded:
        return None
    constants = [None if operand.const_value is None else operand.const_value.numpy() for operand in others]
    if node.op_type == "Where":  # another denominator for rows without any
        return sums[0] if all(operand is not None and (operand > 0).all() for operand in constants) else None
    return sums[0] and all(operand is not None and (np.abs(operand) <= _NEGLIGIBLE).all() for operand in constants)


def _sums_last_axis(total: ir.Node) -> bool:
    axes = total.attributes.get_ints("axes")
    if axes is None and len(total.inputs) > 1 and total.inputs[1] is not None:
        listed = total.inputs[1].const_value
        axes = None if listed is None else listed.numpy().ravel().tolist()
    source = total.inputs[0]
    last = (-1,) if source is None or source.shape is None else (-1, len(source.shape) - 1)
    return axes is not None and len(axes) == 1 and axes[0] in last
