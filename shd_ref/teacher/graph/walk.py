"""Follow data, no pattern and no size: from a softmax to ``map @ V`` and W_o, and back to ``Q K^T``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.graph.nodes import (
    before_rounding,
    constant_of,
    data_inputs,
    float_attribute,
    int_attribute,
    is_constant,
    is_cross,
    is_over_last_axis,
    is_value_product,
    list_repeats,
    name_of,
    operands,
    product_weight,
    trace_back,
)
from shd_ref.teacher.graph.projection import NO_PROJECTION, Projection, follow_to_projection
from shd_ref.teacher.opening.model import (
    ADDING_OPS,
    CONTRIB_DOMAIN,
    FUSED_OPS,
    INTEGER_PRODUCTS,
    LAYOUT_OPS,
    LOGIT_OPS,
    MAP_CARRIERS,
    OPAQUE_PRODUCTS,
    PRODUCTS,
    REPEAT_OPS,
    SCALING_OPS,
    STANDARD_DOMAINS,
    ir,
    kinds,
)

_AXES: Final = (-4, -3, -2, -1)
_HEADS: Final = -3
"""Axes of a map (B, H, L, S), from the end."""
_FLOAT_FORM: Final = "use the float or the QDQ form of the model"
_EAGER: Final = "re-export with eager attention, so that the graph holds MatMul(Softmax(logits), values)"
_SCORE_CARRIERS: Final = LOGIT_OPS | {"Abs", "Exp", "Pow", "Relu", "Sigmoid", "Softmax", "Softplus"}
"""Between ``Q K^T`` and what is divided by its sum."""


@dataclass(frozen=True)
class Walk:
    """What following the data from one node brought, before any size is known."""

    node: ir.Node
    reason: str | None = None
    logits: ir.Value | None = None
    probs: ir.Value | None = None
    values: ir.Value | None = None
    context: ir.Value | None = None  # the heads' outputs, map @ V
    projection: Projection = NO_PROJECTION
    query: ir.Value | None = None
    cross: bool | None = None
    sinks: bool = False  # columns of the softmax are cut off
    repeats: tuple[ir.Node, ...] = ()  # operators that repeat V's heads
    mixing: NDArray[Any] | None = None  # (H, H): what value head g reads is sum_h mixing[h, g] map_h

    def tensors(self) -> Iterator[str]:
        """Names of all tensors whose shapes decide the sizes."""
        values = [self.probs, self.values, self.context, self.query]
        values += [value for node in (*self.projection.path, *self.repeats) for value in node.outputs]
        values += [value for node in self.repeats for value in data_inputs(node)]
        yield from (name_of(value) for value in values if value is not None and not is_constant(value))


def walk_graph(graph: ir.Graph) -> Iterator[Walk]:
    """All walks of a graph, in the order of its nodes."""
    walks: dict[ir.Node, list[Walk]] = {}
    met: set[ir.Node] = set()  # products of a map and values
    for node in graph:
        walks[node] = list(_walk_from(node, met))
        walks[node] += [
            Walk(walk.node, _inside_reason(node, graph))
            for inner in _nodes_inside(node)
            for walk in _walk_from(inner, met)
        ]
    walked = {node for node, started in walks.items() if started}
    for node, reason in find_remade(graph, walked, met):
        walks[node].append(Walk(node, reason))
    for node in graph:
        yield from walks[node]


def _inside_reason(node: ir.Node, graph: ir.Graph) -> str:
    inside = f"it lies inside the body of {node.op_type}, which decides whether its map exists"
    chosen_by = node.inputs[0] if node.inputs else None
    if node.op_type == "If" and chosen_by is not None and chosen_by in graph.inputs:
        return (
            f"{inside}: this is a merged decoder, whose input {name_of(chosen_by)!r} chooses one of two bodies; "
            "take the file with one body beside it (decoder_model.onnx, or model.onnx of a newer export), or export "
            "it again unmerged (optimum-cli export onnx --no-post-process)"
        )
    return f"{inside}: re-export the model without control flow (one forward pass, use_cache off)"


def _nodes_inside(node: ir.Node) -> Iterator[ir.Node]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()
        elif attribute.type == ir.AttributeType.GRAPHS:
            for body in attribute.as_graphs():
                yield from body.all_nodes()


def _walk_from(node: ir.Node, met: set[ir.Node]) -> Iterator[Walk]:
    """The walk that starts at this node, if any does; products of a map and values are added to those met."""
    if node.op_type in FUSED_OPS and node.domain in (*STANDARD_DOMAINS, CONTRIB_DOMAIN):
        yield Walk(
            node,
            f"{node.op_type} is fused, so its attention map never exists as a tensor: "
            "re-export with attention fusion off (eager attention, opset 18, no transformer optimiser)",
        )
    elif node.op_type == "Softmax" and node.domain in STANDARD_DOMAINS:
        yield from _walk_map(_Start(node, node.inputs[0]), met)
    elif node.op_type == "QLinearSoftmax":
        yield Walk(node, f"its softmax gives integers (QLinearSoftmax): {_FLOAT_FORM}")
    elif (logits := read_log_softmax(node)) is not None:
        yield from _walk_map(_Start(node, logits), met)
    elif (quotient := read_quotient(node)) is not None and not quotient.is_of_map():
        yield from _walk_map(_Start(node, quotient.logits, quotient), met)


@dataclass(frozen=True)
class _Start:
    node: ir.Node
    logits: ir.Value | None  # None where the map is not a softmax
    quotient: Quotient | None = None

    @property
    def is_over_last_axis(self) -> bool:
        return self.node.op_type != "Softmax" or is_over_last_axis(self.node)

    @property
    def made_of(self) -> ir.Value | None:
        return self.logits if self.quotient is None else self.quotient.numbers


def _walk_map(start: _Start, all_met: set[ir.Node]) -> Iterator[Walk]:
    softmax = start.node
    meetings = _meet_values(softmax.outputs[0])
    if not meetings or (meetings[0].trail.quotient is not None and not start.is_over_last_axis):
        return  # of the latter the quotient is told
    all_met.update(meeting.product for meeting in meetings)
    reason = _why_unreadable(start, meetings)
    if reason is not None:
        yield Walk(softmax, reason)
        return
    product, trail = meetings[0].product, meetings[0].trail
    raw_map, raw_values = operands(product)
    raw_map = trail.source if trail.is_mixed else raw_map
    probs, values = before_rounding(raw_map), before_rounding(raw_values)
    projection = follow_to_projection(product.outputs[0])
    scores = trace_back(start.made_of, _SCORE_CARRIERS, is_value_product)
    reason = projection.reason
    producer = trace_back(values, LAYOUT_OPS, lambda node: node.op_type not in LAYOUT_OPS)
    if scores is None and producer is not None and is_value_product(producer):
        reason = (
            "it is linear attention: keys and values are multiplied first, so what its softmax gives is a feature of "
            "a query and no attention to keys: choose other layers (--sites), or another teacher"
        )
    walk = Walk(softmax, reason, probs=probs, values=values, context=product.outputs[0])
    if reason is not None:
        yield walk
        return
    quotients = [quotient for quotient in (start.quotient, trail.quotient) if quotient is not None]
    cut = trace_back(raw_map, MAP_CARRIERS - {"Slice"} | {"Transpose"}, lambda node: node.op_type == "Slice")
    yield replace(
        walk,
        logits=start.logits if trail.quotient is None else None,
        projection=projection,
        query=None if scores is None else scores.inputs[0],
        cross=None if scores is None else is_cross(scores),
        sinks=cut is not None or (bool(quotients) and not quotients[-1].sums_to_one),
        repeats=list_repeats(values),
        mixing=trail.mixing,
    )


def _why_unreadable(start: _Start, meetings: list[_Meeting]) -> str | None:
    product, trail = meetings[0].product, meetings[0].trail
    if product.op_type in INTEGER_PRODUCTS:
        return f"map and values meet in {product.op_type}: {_FLOAT_FORM}"
    if product.op_type in OPAQUE_PRODUCTS:
        return f"map and values meet in {product.op_type}: {_EAGER}"
    if not start.is_over_last_axis:
        return f"its softmax is not over the last axis: {_EAGER}"
    if trail.is_mixed and (trail.mixing is None or trail.axes != _AXES):
        return (
            "its maps are mixed after the softmax in a way that is not a matrix over heads, so what multiplies the "
            "values is not made of them alone: choose other layers, or export a model without it"
        )
    if trail.axes[-1] != -1:
        return f"the map is transposed on its way to the values: {_EAGER}"
    turned = any(int_attribute(product, flag) for flag in ("transA", "transB", "transBatchA", "transBatchB"))
    if meetings[0].slot != 0 or turned or float_attribute(product, "alpha") != 1.0:
        return f"map and values meet in {product.op_type} with the map transposed or scaled: {_EAGER}"
    tensors = {id(meeting.values) for meeting in meetings}
    if len(tensors) > 1:
        return (
            f"its map multiplies {len(tensors)} tensors, as where layers share a map or one attends in parts, so "
            "what one of them gives is not all that the map makes: choose other layers (--sites), or export the "
            "model with one product of map and values"
        )
    return None


@dataclass(frozen=True)
class _Trail:
    """A tensor that a map leads to; ``axes``: which of the map's its last four are; ``mixing``: over heads if any."""

    value: ir.Value
    source: ir.Value
    axes: tuple[int, ...] = _AXES
    is_mixed: bool = False
    mixing: NDArray[Any] | None = None
    quotient: Quotient | None = None


@dataclass(frozen=True)
class _Meeting:
    product: ir.Node
    slot: int  # of the map among the product's inputs
    trail: _Trail

    @property
    def values(self) -> ir.Value | None:
        """The other operand before rounding, of a product of two operands."""
        other = self.product.inputs[1 - self.slot] if self.product.op_type in PRODUCTS else None
        return None if other is None else before_rounding(other)


def _meet_values(probs: ir.Value) -> list[_Meeting]:
    """Breadth first to all products with computed tensors, the nearest first, with the map's axes in view."""
    queue, met = [_Trail(probs, probs)], []
    seen = {probs}
    for trail in queue:
        for node, number in trail.value.uses():
            if is_value_product(node):
                met.append(_Meeting(node, number, trail))
                continue
            step = _step(trail, node, number)
            if step is not None and step.value not in seen:
                seen.add(step.value)
                queue.append(step)
    return met


def _step(trail: _Trail, node: ir.Node, slot: int) -> _Trail | None:
    """Through one operator; None where its output is not a map any more."""
    output = node.outputs[0]
    in_order = trail.axes == _AXES
    if node.op_type == "Transpose" and "perm" in node.attributes:
        order = node.attributes["perm"].as_ints()
        if len(order) > len(_AXES):
            return None
        turned = tuple(trail.axes[number - len(order)] for number in order)
        return replace(trail, value=output, axes=trail.axes[: -len(order)] + turned)
    quotient = None if trail.is_mixed or not in_order else read_quotient(node)
    if quotient is not None and quotient.numbers is trail.value and node.inputs[slot] is trail.value:
        return replace(trail, value=output, source=output, quotient=quotient)
    if node.op_type in MAP_CARRIERS and slot in {"Where": (1, 2), "Mul": (0, 1)}.get(node.op_type, (0,)):
        if node.op_type == "Reshape" and trail.axes[-1] != -1:
            return None
        keeps = node.op_type in ("Cast", "Dropout", "Identity")
        source = output if in_order and not trail.is_mixed else trail.source
        return replace(trail, value=output, source=source, mixing=trail.mixing if keeps else None)
    if trail.is_mixed and node.op_type in ("Add", "BatchNormalization"):
        is_bias = node.op_type == "Add" and any(is_constant(value) for value in node.inputs)
        return replace(trail, value=output, mixing=trail.mixing if is_bias else None)
    weight = product_weight(node, slot)
    # Square, as many heads as before: what a router's or a classifier's weight sums over are its classes.
    if weight is None or weight.matrix.ndim != 2 or len(set(weight.matrix.shape)) != 1 or weight.axis < -len(_AXES):
        return None
    axis = trail.axes[weight.axis]
    mixing = weight.matrix if axis == _HEADS and not trail.is_mixed else None
    return None if axis == -1 else replace(trail, value=output, is_mixed=True, mixing=mixing)


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


_REMADE: Final = (
    "what multiplies its values is made of its map by {}, as in differential attention or with smoothed maps, and "
    "need not be distributions over keys: choose other layers (--sites), or a teacher whose softmax multiplies the "
    "values itself"
)
_WITHOUT_SOFTMAX: Final = (
    "its weights are made of queries and keys by {} and by no softmax, so they need be no distribution over keys: "
    "choose other layers (--sites), or a teacher whose softmax multiplies the values"
)


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
                shown = ", ".join(sorted(passed - LAYOUT_OPS - REPEAT_OPS) or sorted(passed))
                yield node, (_REMADE if is_softmax else _WITHOUT_SOFTMAX).format(shown)
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
