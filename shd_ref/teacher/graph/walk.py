"""Follow data, no pattern and no size: from a softmax to ``map @ V`` and W_o, and back to ``Q K^T``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import graph_invalid
from shd_ref.teacher.graph.inputs import InputSpec
from shd_ref.teacher.graph.projection import NO_PROJECTION, Projection, follow_to_projection, product_weight
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
    SIZE_OPS,
    STANDARD_DOMAINS,
    ir,
    is_computed,
    kinds,
)

FLOATS: Final = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
_AXES: Final = (-4, -3, -2, -1)
_HEADS: Final = -3
"""Axes of a map (B, H, L, S), from the end."""
_FLOAT_FORM: Final = "use the float or the QDQ form of the model"
_EAGER: Final = "re-export with eager attention, so that the graph holds MatMul(Softmax(logits), values)"
_SCORE_CARRIERS: Final = LOGIT_OPS | {"Abs", "Exp", "Pow", "Relu", "Sigmoid", "Softmax", "Softplus"}
"""Between ``Q K^T`` and the numbers that are divided by their sum."""


@dataclass(frozen=True, eq=False)
class Walk:
    """The tensors found by following the data from one node, before any size is known."""

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
        values += [value for node in self.projection.path for value in node.outputs]
        values += [value for node in self.repeats for value in (*node.inputs, *node.outputs)]
        yield from (str(value.name) for value in values if value is not None and value.const_value is None)


def walk_graph(graph: ir.Graph) -> Iterator[Walk]:
    """All walks of a graph, in the order of its nodes."""
    walks: dict[ir.Node, list[Walk]] = {}
    met: set[ir.Node] = set()  # products of a map and values
    for node in graph:
        walks[node] = list(_walk_from(node, met))
        bodies = [inner for attribute in node.attributes.values() for inner in _nodes_inside(attribute)]
        inside = [walk.node for inner in bodies for walk in _walk_from(inner, met)]
        walks[node] += [Walk(inner, _inside_reason(node, graph)) for inner in inside]
    # Last: products met above are of maps as they are. A classifier's or router's softmax leads to no product at all.
    walked = {node for node, started in walks.items() if started}
    for node in _find_remade(graph, walked, met):
        walks[node].append(Walk(node, _REMADE))
    for node in graph:
        yield from walks[node]


def _nodes_inside(attribute: ir.Attr) -> Iterator[ir.Node]:
    if attribute.type == ir.AttributeType.GRAPH:
        yield from attribute.as_graph().all_nodes()
    elif attribute.type == ir.AttributeType.GRAPHS:
        for body in attribute.as_graphs():
            yield from body.all_nodes()


def _inside_reason(node: ir.Node, graph: ir.Graph) -> str:
    inside = f"it lies inside the body of {node.op_type}, which decides whether its map exists"
    chosen_by = node.inputs[0] if node.inputs else None
    if node.op_type == "If" and chosen_by is not None and chosen_by in graph.inputs:
        return (
            f"{inside}: a merged decoder, whose input {chosen_by.name!r} chooses one of two bodies: take the file "
            "with one body next to it (decoder_model.onnx), or export without merging (optimum-cli --no-post-process)"
        )
    return f"{inside}: re-export the model without control flow (one forward pass, use_cache off)"


def _walk_from(node: ir.Node, met: set[ir.Node]) -> Iterator[Walk]:
    """The walk that starts at this node, if any does; products of a map and values are added to those met."""
    if node.op_type in FUSED_OPS and node.domain in (*STANDARD_DOMAINS, CONTRIB_DOMAIN):
        yield Walk(
            node,
            f"{node.op_type} is fused, so its attention map never exists as a tensor: "
            "re-export with attention fusion off (eager attention, opset 18, no transformer optimiser)",
        )
    elif node.op_type == "QLinearSoftmax":
        yield Walk(node, f"its softmax gives integers (QLinearSoftmax): {_FLOAT_FORM}")
    elif (spelling := read_map(node)) is not None:
        numbers = None if spelling.quotient is None else spelling.quotient.numbers
        if trace_back(numbers, MAP_CARRIERS, gives_map) is None:  # else a map is scaled, and the first is reported
            yield from _walk_map(node, spelling, met)


def _walk_map(softmax: ir.Node, spelling: Spelling, all_met: set[ir.Node]) -> Iterator[Walk]:
    logits, quotient, over_last_axis = spelling
    meetings = _meet_values(softmax.outputs[0])
    if not meetings or (meetings[0].trail.quotient is not None and not over_last_axis):
        return  # of the latter the quotient is reported
    all_met.update(meeting.product for meeting in meetings)
    reason = _why_unreadable(meetings) if over_last_axis else f"its softmax is not over the last axis: {_EAGER}"
    if reason is not None:
        yield Walk(softmax, reason)
        return
    product, trail = meetings[0].product, meetings[0].trail
    raw_map, raw_values = operands(product)
    raw_map = trail.source if trail.is_mixed else raw_map
    probs, values = before_rounding(raw_map), before_rounding(raw_values)
    projection = follow_to_projection(product.outputs[0])
    scores = trace_back(logits if quotient is None else quotient.numbers, _SCORE_CARRIERS, is_value_product)
    reason = projection.reason
    producer = trace_back(values, LAYOUT_OPS, lambda node: node.op_type not in LAYOUT_OPS)
    if scores is None and producer is not None and is_value_product(producer):
        reason = (
            "it is linear attention, whose keys and values are multiplied first, so its softmax gives no attention "
            "to keys: choose other layers (--sites), or another teacher"
        )
    walk = Walk(softmax, reason, probs=probs, values=values, context=product.outputs[0])
    if reason is not None:
        yield walk
        return
    quotients = [step for step in (quotient, trail.quotient) if step is not None]
    cut = trace_back(raw_map, MAP_CARRIERS - {"Slice"} | {"Transpose"}, lambda node: node.op_type == "Slice")
    logits = logits if trail.quotient is None else None
    yield replace(
        walk,
        logits=logits,
        projection=projection,
        query=None if scores is None else scores.inputs[0],
        cross=None if scores is None else _is_cross(scores),
        sinks=cut is not None or (bool(quotients) and not quotients[-1].sums_to_one),
        repeats=repeat_chain(values),
        mixing=trail.mixing,
    )


def _why_unreadable(meetings: list[_Meeting]) -> str | None:
    product, trail = meetings[0].product, meetings[0].trail
    if product.op_type in INTEGER_PRODUCTS | OPAQUE_PRODUCTS:
        form = _FLOAT_FORM if product.op_type in INTEGER_PRODUCTS else _EAGER
        return f"map and values meet in {product.op_type}: {form}"
    if trail.is_mixed and (trail.mixing is None or trail.axes != _AXES):
        return (
            "its maps are mixed after the softmax by what is not a matrix over heads: choose other layers, or export "
            "a model without it"
        )
    if trail.axes[-1] != -1:
        return f"the map is transposed on its way to the values: {_EAGER}"
    turned = any(product.attributes.get_int(flag) for flag in ("transA", "transB", "transBatchA", "transBatchB"))
    if meetings[0].slot != 0 or turned or product.attributes.get_float("alpha", 1.0) != 1.0:
        return f"map and values meet in {product.op_type} with the map transposed or scaled: {_EAGER}"
    # Alphas weigh a map by one V and one W_o; the result of a second product would be left out.
    tensors = {meeting.values for meeting in meetings}
    if len(tensors) > 1:
        return (
            f"its map multiplies {len(tensors)} tensors, so what one of them gives is not all that the map makes: "
            "choose other layers (--sites), or export the model with one product of map and values"
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
        if len(order) > len(_AXES):  # windows and frames: whose axes these are is not known
            return None
        turned = tuple(trail.axes[number - len(order)] for number in order)
        return replace(trail, value=output, axes=trail.axes[: -len(order)] + turned)
    quotient = None if trail.is_mixed or not in_order else read_quotient(node)
    if quotient is not None and quotient.numbers is trail.value and node.inputs[slot] is trail.value:
        return replace(trail, value=output, source=output, quotient=quotient)
    if node.op_type in MAP_CARRIERS and slot in {"Where": (1, 2), "Mul": (0, 1)}.get(node.op_type, (0,)):
        if node.op_type == "Reshape" and trail.axes[-1] != -1:  # keys are no longer where they can be followed
            return None
        keeps = node.op_type in ("Cast", "Dropout", "Identity")
        source = output if in_order and not trail.is_mixed else trail.source
        return replace(trail, value=output, source=source, mixing=trail.mixing if keeps else None)
    if trail.is_mixed and node.op_type in ("Add", "BatchNormalization"):
        is_bias = node.op_type == "Add" and any(
            value is not None and value.const_value is not None for value in node.inputs
        )
        return replace(trail, value=output, mixing=trail.mixing if is_bias else None)
    weight = product_weight(node, slot)
    # Square, as many heads as before: a router's or a classifier's weight sums over its classes.
    if weight is None or weight.matrix.ndim != 2 or len(set(weight.matrix.shape)) != 1 or weight.axis < -len(_AXES):
        return None
    axis = trail.axes[weight.axis]
    mixing = weight.matrix if axis == _HEADS and not trail.is_mixed else None
    return None if axis == -1 else replace(trail, value=output, is_mixed=True, mixing=mixing)


def repeat_chain(values: ir.Value | None) -> tuple[ir.Node, ...]:
    """Operators that move, scale or repeat keys or values, from the first that repeats to the last; or none."""
    chain, first = [], 0
    while values is not None and (node := values.producer()) is not None:
        # A Concat of different tensors joins past values or rotary halves: it repeats nothing.
        joins = node.op_type == "Concat" and len(set(node.inputs)) > 1
        if joins or node.op_type not in LAYOUT_OPS | REPEAT_OPS | SCALING_OPS:
            break
        chain.append(node)
        first = len(chain) if node.op_type in REPEAT_OPS else first
        values = node.inputs[0]
    return tuple(reversed(chain[:first]))


def _is_cross(scores: ir.Node) -> bool:
    """Whether Q and K are of different sequences: of another map, or of another input, than one another.

    Within one sequence the ancestors of only one of them are its projections, norms and rotations.
    """
    queries, keys = (ancestors(value) for value in operands(scores))
    return any(map(_is_of_a_sequence, queries ^ keys))


def _is_of_a_sequence(value: ir.Value) -> bool:
    if value.is_graph_input() and value.name and value.const_value is None:
        shape = (None,) * (0 if value.shape is None else len(value.shape))
        spec = InputSpec(value.name, "float32" if value.dtype in FLOATS else "int64", shape)
        return spec.part == "data" and len(shape) > 1
    node = value.producer()
    return node is not None and gives_map(node)


_FOLLOWED: Final = (ADDING_OPS | SCALING_OPS | LAYOUT_OPS | MAP_CARRIERS | REPEAT_OPS) | kinds(
    "Abs AveragePool Clip Conv CumSum Elu Erf Exp GatherElements GatherND Gelu HardSigmoid Max MaxPool Mean Min Neg "
    "Pad Pow Reciprocal Relu Sigmoid Softplus Split Sqrt Tanh ThresholdedRelu"
)
"""Operators that may remake a map. No product with a weight: the stream behind it, as of a router, is no map."""

_REMADE: Final = (
    "what multiplies its values is made of its map by other operators, as in differential attention or with smoothed "
    "maps, and need not be distributions over keys: choose other layers (--sites), or a teacher whose softmax "
    "multiplies the values itself"
)


def _find_remade(graph: ir.Graph, walked: Collection[ir.Node], met: Collection[ir.Node]) -> Iterator[ir.Node]:
    """Softmaxes whose numbers multiply values in another form; of several the one that starts no walk itself."""
    remade: dict[ir.Node, None] = {}
    for product in (node for node in graph if is_value_product(node) and node not in met):
        factors = operands(product)
        apart = (
            trace_back(factor, _FOLLOWED, lambda node: _is_softmax(node) and node not in walked) for factor in factors
        )
        softmaxes = (*apart, *(trace_back(factor, _FOLLOWED, _is_softmax) for factor in factors))
        remade |= dict.fromkeys([softmax for softmax in softmaxes if softmax is not None][:1])
    yield from remade


def _is_softmax(node: ir.Node) -> bool:
    return node.op_type == "Softmax" and node.domain in STANDARD_DOMAINS


def trace_back(
    value: ir.Value | None, carriers: frozenset[str], is_sought: Callable[[ir.Node], bool]
) -> ir.Node | None:
    """Breadth first to the nearest producer that ``is_sought`` accepts."""
    queue = [value]
    for current in queue:
        node = None if current is None else current.producer()
        if node is None:
            continue
        if is_sought(node):
            return node
        if node.op_type in carriers:
            # The condition of a Where decides who may attend; it is none of the numbers.
            sources = node.inputs[1:] if node.op_type == "Where" else node.inputs
            queue.extend(source for source in sources if source not in queue)
    return None


def ancestors(value: ir.Value) -> set[ir.Value]:
    """A tensor and all that it is computed from, without operators that only give it a size."""
    seen, waiting = {value}, [value]  # not by recursion: a graph may be as deep as its author likes
    while waiting:
        node = waiting.pop().producer()
        if node is None or node.op_type in SIZE_OPS:
            continue
        new = [source for source in node.inputs if source is not None and source not in seen]
        seen.update(new)
        waiting += new
    return seen


def before_rounding(value: ir.Value) -> ir.Value:
    """The same numbers before trailing casts and quantisers: the widest float tensor."""
    widest, current = value, value
    while (node := current.producer()) is not None and node.op_type in ("Cast", "DequantizeLinear", "QuantizeLinear"):
        if node.inputs[0] is None:
            break
        current = node.inputs[0]
        if current.dtype in FLOATS:
            widest = current
    return widest


def operands(product: ir.Node) -> tuple[ir.Value, ir.Value]:
    places = (0, 3) if product.op_type == "QLinearMatMul" else (0, 1)
    left, right = (product.inputs[number] if number < len(product.inputs) else None for number in places)
    if left is None or right is None:
        raise graph_invalid(f"node {product.name!r} ({product.op_type}) lacks an operand")
    return left, right


def is_value_product(node: ir.Node) -> bool:
    """A product of two computed tensors, such as ``Q K^T`` and ``map @ V``."""
    if node.op_type in OPAQUE_PRODUCTS:
        return len(node.inputs) == 2 and all(map(is_computed, node.inputs))
    products = PRODUCTS | INTEGER_PRODUCTS
    return node.op_type in products and not any(_is_weight(value) for value in operands(node))


def _is_weight(value: ir.Value) -> bool:
    """Whether a constant is a matrix; learned queries and maps are computed constants, too, of more axes."""
    source = value
    while isinstance(source.const_value, ir.LazyTensor):
        node = source.producer()
        if node is None or node.op_type not in LAYOUT_OPS or node.inputs[0] is None:  # it is computed of others
            return value.const_value is not None and value.const_value.numpy().ndim <= 2
        source = node.inputs[0]
    return source.const_value is not None


# The spellings of a softmax: the operator, the exponential of its logarithm, and numbers over their sum.

_SHAPING: Final = frozenset({"Cast", "Dropout", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_NEGLIGIBLE: Final = 1e-6
"""Added to a sum of about one, it keeps the quotient finite and takes nothing from a row."""
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
    """The map that an operator gives, as far as its type and inputs show; None where it gives none."""
    if _is_softmax(node):
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
    """The logits of a softmax that is written as ``exp(log_softmax(logits))``; None for any other operator."""
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
    inputs = [value for value in node.inputs[node.op_type == "Where" :] if value is not None]
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
