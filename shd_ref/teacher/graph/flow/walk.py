"""Follow data, no pattern and no size: from a softmax to ``map @ V`` and W_o, and back to ``Q K^T``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from numpy.typing import NDArray

from shd_ref.teacher.graph.flow.projection import NO_PROJECTION, Projection, follow_to_projection
from shd_ref.teacher.graph.flow.tracing import (
    before_rounding,
    is_cross,
    is_over_last_axis,
    is_value_product,
    list_repeats,
    operands,
    trace_back,
)
from shd_ref.teacher.graph.flow.variants import Quotient, find_remade, read_log_softmax, read_quotient
from shd_ref.teacher.graph.nodes import (
    data_inputs,
    float_attribute,
    int_attribute,
    is_constant,
    name_of,
    product_weight,
)
from shd_ref.teacher.opening.operators import (
    CONTRIB_DOMAIN,
    FUSED_OPS,
    INTEGER_PRODUCTS,
    LAYOUT_OPS,
    LOGIT_OPS,
    MAP_CARRIERS,
    OPAQUE_PRODUCTS,
    PRODUCTS,
    STANDARD_DOMAINS,
)
from shd_ref.teacher.packages import ir

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
    if meetings[0].slot != 0 or not _is_plain(product):
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


def _is_plain(product: ir.Node) -> bool:
    flags = ("transA", "transB", "transBatchA", "transBatchB")
    return not any(int_attribute(product, flag) for flag in flags) and float_attribute(product, "alpha") == 1.0
