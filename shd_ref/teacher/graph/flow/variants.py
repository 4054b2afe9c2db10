"""Maps that no softmax operator gives: quotients are read, and what need be no distribution is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from shd_ref.teacher.graph.flow.tracing import is_over_last_axis, is_value_product, trace_back
from shd_ref.teacher.graph.nodes import constant_of, is_constant
from shd_ref.teacher.opening.operators import (
    ADDING_OPS,
    LAYOUT_OPS,
    MAP_CARRIERS,
    PRODUCTS,
    REPEAT_OPS,
    SCALING_OPS,
    STANDARD_DOMAINS,
    kinds,
)
from shd_ref.teacher.packages import ir

_SHAPING: Final = frozenset({"Cast", "Dropout", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_CONDITIONS: Final = kinds("And Equal Greater GreaterOrEqual IsNaN Less LessOrEqual Not Or")
_POSITIVE: Final = _CONDITIONS | {"Abs", "Exp", "HardSigmoid", "Relu", "Sigmoid", "Softmax", "Softplus", "Sqrt"}
_OF_FIRST: Final = _SHAPING | {"Gather", "GatherND", "Slice", "Split", "Transpose", "Trilu"}
_OF_ALL: Final = frozenset({"Add", "AveragePool", "Concat", "Div", "MaxPool", "Min", "Mul"})
"""Operators that give numbers of at least zero, in all cases or where their first input or all of them do."""

_NEGLIGIBLE: Final = 1e-6
"""Beside a sum of about one: it keeps the quotient finite and takes nothing from a row."""
_DEEPEST: Final = 8


@dataclass(frozen=True)
class Quotient:
    """Numbers of at least zero over their sum along the last axis, or over more: then ``sums_to_one`` is False."""

    numbers: ir.Value
    sums_to_one: bool

    @property
    def logits(self) -> ir.Value | None:
        """The input of the softmax that this spells out; None where it is not a softmax."""
        node = _before_casts(self.numbers).producer()
        return node.inputs[0] if node is not None and node.op_type == "Exp" and self.sums_to_one else None

    def is_of_map(self) -> bool:
        """Whether the numbers are a map that a softmax or another quotient gave."""
        return trace_back(self.numbers, MAP_CARRIERS, _gives_map) is not None


def read_quotient(node: ir.Node) -> Quotient | None:
    """An operator as a quotient; None where it does something else, or where numbers may be negative."""
    for numbers, total in _operands(node):
        sums_to_one = _read_sum(total, _before_casts(numbers))
        if sums_to_one is not None and _is_positive(numbers):
            return Quotient(numbers, sums_to_one)
    return None


def read_log_softmax(node: ir.Node) -> ir.Value | None:
    """The logits of a softmax that is the exponential of its own logarithm; None for any other operator."""
    log = _before_casts(node.inputs[0]).producer() if node.op_type == "Exp" and node.inputs[0] is not None else None
    if log is None or len(log.inputs) == 0:
        return None
    if log.op_type == "LogSoftmax":
        return log.inputs[0] if is_over_last_axis(log) else None
    total = None if log.op_type != "Sub" or log.inputs[1] is None else _before_casts(log.inputs[1]).producer()
    is_log_of_sum = total is not None and total.op_type == "ReduceLogSumExp" and _is_over_last_axis(total)
    return log.inputs[0] if total is not None and is_log_of_sum and total.inputs[0] is log.inputs[0] else None


def _gives_map(node: ir.Node) -> bool:
    if node.op_type == "Softmax":
        return is_over_last_axis(node)
    return read_quotient(node) is not None or read_log_softmax(node) is not None


def _operands(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
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
        source = node.inputs[0]
        if source is None:
            break
        value = source
    return value


def _read_sum(value: ir.Value, numbers: ir.Value, depth: int = 0) -> bool | None:
    """Whether a tensor is the sum of the numbers over their last axis, and nothing else; None for no such sum."""
    node = value.producer()
    if node is None or depth > _DEEPEST:
        return None
    if node.op_type in ("ReduceL1", "ReduceSum"):
        source = node.inputs[0]
        is_sum = source is not None and _before_casts(source) is numbers and _is_over_last_axis(node)
        return True if is_sum else None
    if node.op_type not in (*_SHAPING, "Add", "Clip", "Max", "Where"):
        return None
    inputs = list(node.inputs[1:] if node.op_type == "Where" else node.inputs)
    inputs = inputs[:1] if node.op_type in _SHAPING else inputs
    read = [None if operand is None else _read_sum(operand, numbers, depth + 1) for operand in inputs]
    others = [
        operand for operand, reading in zip(inputs, read, strict=True) if reading is None and operand is not None
    ]
    sums = [reading for reading in read if reading is not None]
    is_bounded = node.op_type == "Clip" and len(inputs) > 2 and inputs[2] is not None
    if len(sums) != 1 or is_bounded or (node.op_type == "Add" and not all(map(_is_positive, others))):
        return None
    constants = [constant_of(operand) for operand in others]
    if node.op_type == "Where":  # another denominator for rows without any
        return sums[0] if all(operand is not None and (operand > 0).all() for operand in constants) else None
    return sums[0] and all(operand is not None and (np.abs(operand) <= _NEGLIGIBLE).all() for operand in constants)


def _is_over_last_axis(total: ir.Node) -> bool:
    axes = list(total.attributes["axes"].as_ints()) if "axes" in total.attributes else None
    if axes is None and len(total.inputs) > 1:
        constant = constant_of(total.inputs[1])
        axes = None if constant is None else constant.ravel().tolist()
    source = total.inputs[0]
    last = (-1,) if source is None or source.shape is None else (-1, len(source.shape) - 1)
    return axes is not None and len(axes) == 1 and axes[0] in last


def _is_positive(value: ir.Value) -> bool:
    waiting, seen = [value], {value}
    while waiting:
        current = waiting.pop()
        node, constant = current.producer(), constant_of(current)
        if constant is not None:
            if not (constant >= 0).all():
                return False
            continue
        if node is None or current.dtype == ir.DataType.BOOL or node.op_type in _POSITIVE or _has_floor(node):
            continue
        if node.op_type not in (*_OF_FIRST, *_OF_ALL, "Where"):
            return False
        sources = {"Where": node.inputs[1:]}.get(node.op_type, node.inputs[:1])
        sources = node.inputs if node.op_type in _OF_ALL else sources
        waiting += [source for source in sources if source is not None and source not in seen]
        seen.update(source for source in sources if source is not None)
    return True


def _has_floor(node: ir.Node) -> bool:
    """Whether it fills with a number of at least zero, squares, or cuts numbers off there."""
    if node.op_type == "ConstantOfShape":
        return "value" not in node.attributes or bool((node.attributes["value"].as_tensor().numpy() >= 0).all())
    if node.op_type == "Pow":
        exponent = constant_of(node.inputs[1])
        return exponent is not None and bool((exponent % 2 == 0).all())
    if node.op_type == "Mul":
        return node.inputs[0] is node.inputs[1]
    if node.op_type not in ("Clip", "Max"):
        return False
    floors = [constant_of(operand) for operand in (node.inputs[1:2] if node.op_type == "Clip" else node.inputs)]
    return any(floor is not None and bool((floor >= 0).all()) for floor in floors)


_WEIGHING: Final = SCALING_OPS | kinds(
    "Abs Elu Erf Exp Gelu HardSigmoid Neg Pow Reciprocal Relu Sigmoid Softplus Sqrt Tanh ThresholdedRelu"
)
"""What makes numbers between 0 and 1, or other weights, of the products of queries and keys."""

_BY_ENTRY: Final = ADDING_OPS | _WEIGHING | {"Clip", "Max", "Mean", "Min", "Where"}
_FOLLOWED: Final = (
    _BY_ENTRY | LAYOUT_OPS | MAP_CARRIERS | REPEAT_OPS | {"GatherElements", "GatherND", "Split", "Trilu"}
)
_CUTTING: Final = frozenset({"Pad", "Slice"})
_WINDOWS: Final = frozenset({"AveragePool", "Conv", "MaxPool"})
_SMOOTHING: Final = PRODUCTS | _WINDOWS | {"CumSum", "Pad", "ReduceMean", "ReduceSum"}


def find_remade(
    graph: ir.Graph, walked: Collection[ir.Node], met: Collection[ir.Node]
) -> Iterator[tuple[ir.Node, str]]:
    """Softmaxes and scores whose numbers multiply values in another form, and why that is refused."""
    told = set(met)
    softmaxes = [node for node in graph if node.op_type == "Softmax" and node.domain in STANDARD_DOMAINS]
    scores = [node for node in graph if node not in told and is_value_product(node)]
    for node in sorted(softmaxes, key=lambda node: node in walked) + scores:
        is_softmax = node.op_type == "Softmax"
        for product, passed in () if node in told else _products_behind(node, is_softmax):
            if product not in told and (is_softmax or not passed.isdisjoint(_WEIGHING)):
                told.add(product)
                yield node, _remade(passed) if is_softmax else _without_softmax(passed)
                break


def _products_behind(start: ir.Node, is_map: bool) -> Iterator[tuple[ir.Node, frozenset[str]]]:
    """Products with values of all that has the axes of a map, and the operators on the way there."""
    first = start.outputs[0]
    queue: list[tuple[ir.Value, Counter[str] | None, frozenset[str]]] = [(first, _sizes(first, 2), frozenset())]
    seen = {first}
    for value, axes, passed in queue:
        for node, number in value.uses():
            if is_value_product(node):
                if number == 0 or is_map:
                    yield node, passed
                continue
            for output in node.outputs if _is_followed(node, value, axes) else ():
                sizes = _sizes(output)
                # Inference gives the axes of windows new names, where they had any.
                is_cut = node.op_type in _CUTTING or (node.op_type in _WINDOWS and axes == _sizes(value, 2))
                is_kept = axes is None or sizes is None or is_cut or axes <= sizes
                if output in seen or not is_kept:  # rows and keys are axes no more
                    continue
                seen.add(output)
                cut = _sizes(output, 2) if is_cut and _last(value) != _last(output) else None
                queue.append((output, None if sizes is None else cut or axes, passed | {node.op_type}))


def _is_followed(node: ir.Node, value: ir.Value, axes: Counter[str] | None) -> bool:
    if node.op_type in _SMOOTHING:
        return axes is not None or (node.op_type in _WINDOWS and _is_like_a_map(value))
    # Without known axes, what a computed tensor joins may be anything, such as the stream after a router.
    known = axes is not None or node.op_type not in (*_BY_ENTRY, "Concat")
    joined = known or all(operand is None or operand is value or _is_like_a_map(operand) for operand in node.inputs)
    return node.op_type in _FOLLOWED and joined


def _is_like_a_map(value: ir.Value) -> bool:
    return is_constant(value) or trace_back(value, MAP_CARRIERS, lambda node: node.op_type == "Softmax") is not None


def _sizes(value: ir.Value, last: int = 0) -> Counter[str] | None:
    """How often each size stands among the axes, or the last ones; None where one is unknown."""
    if value.shape is None or len(value.shape) < 2:
        return None
    sizes = Counter(str(size) for size in list(value.shape)[-last:])
    return None if "None" in sizes or "" in sizes else sizes


def _last(value: ir.Value) -> str | None:
    return None if value.shape is None or not len(value.shape) else str(value.shape[-1])


def _remade(passed: frozenset[str]) -> str:
    return (
        f"what multiplies its values is made of its map by {_listed(passed)}, as in differential attention or with "
        "smoothed maps, and need not be distributions over keys: choose other layers (--sites), or a teacher whose "
        "softmax multiplies the values itself"
    )


def _without_softmax(passed: frozenset[str]) -> str:
    return (
        f"its weights are made of queries and keys by {_listed(passed)} and by no softmax, so they need be no "
        "distribution over keys: choose other layers (--sites), or a teacher whose softmax multiplies the values"
    )


def _listed(passed: frozenset[str]) -> str:
    return ", ".join(sorted(passed - LAYOUT_OPS - REPEAT_OPS) or sorted(passed))
