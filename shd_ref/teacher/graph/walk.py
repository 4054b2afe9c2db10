"""Follow data, no pattern and no size: from a softmax to ``map @ V`` and W_o, and back to ``Q K^T``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import graph_invalid
from shd_ref.teacher.graph.inputs import InputSpec
from shd_ref.teacher.graph.projection import NO_PROJECTION, Projection, follow_to_projection, product_weight
from shd_ref.teacher.graph.spellings import Quotient, Spelling, gives_map, read_map, read_quotient
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
    kinds,
)

FLOATS: Final = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
_AXES: Final = (-4, -3, -2, -1)
_HEADS: Final = -3
"""Axes of a map (B, H, L, S), from the end."""
_FLOAT_FORM: Final = "use the float or the QDQ form of the model"
_EAGER: Final = "re-export with eager attention, so that the graph holds MatMul(Softmax(logits), values)"
_SCORE_CARRIERS: Final = LOGIT_OPS | {"Abs", "Exp", "Pow", "Relu", "Sigmoid", "Softmax", "Softplus"}
"""Between ``Q K^T`` and what is divided by its sum."""
_PASSING: Final = frozenset({"Cast", "DequantizeLinear", "Flatten", "Identity", "QuantizeLinear", "Reshape"})
_ARITHMETIC: Final = _PASSING | kinds("Add Clip Concat Div Max Mul ReduceMax Sub Tanh Transpose Where")


@dataclass
class Logits:
    """``softmax(scale * multipliers * Q K^T + addends)``, as it was read."""

    product: ir.Node | None = None
    queries: ir.Value | None = None
    keys: ir.Value | None = None
    wide: tuple[str, str] = ("", "")  # their names before rounding
    repeats: tuple[ir.Node, ...] = ()  # operators that repeat the keys' heads
    scale: float = 1.0
    multipliers: list[tuple[str, ir.Value]] = field(default_factory=list)
    addends: list[tuple[float, ir.Value]] = field(default_factory=list)
    fills: list[tuple[float, ir.Value]] = field(default_factory=list)
    conditions: list[tuple[bool, ir.Value]] = field(default_factory=list)  # under which a logit stays
    softcap: float | None = None
    capped: tuple[int, int] | None = None  # addends and conditions that act behind the softcap
    sinks: bool = False
    reason: str | None = None


@dataclass(frozen=True, eq=False)
class Walk:
    """What following the data from one node brought, before any size is known."""

    node: ir.Node
    reason: str | None = None
    logits: ir.Value | None = None
    read: Logits | None = None  # what leads to the logits
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
    # Last, as what was met above is no remade map; a classifier's or router's softmax leads to no product at all.
    walked = {node for node, started in walks.items() if started}
    for node, reason in _find_remade(graph, walked, met):
        walks[node].append(Walk(node, reason))
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
            "with one body beside it (decoder_model.onnx), or export without merging (optimum-cli --no-post-process)"
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
        if trace_back(numbers, MAP_CARRIERS, gives_map) is None:  # else a map is scaled, of which the first is told
            yield from _walk_map(node, spelling, met)


def _walk_map(softmax: ir.Node, spelling: Spelling, all_met: set[ir.Node]) -> Iterator[Walk]:
    logits, quotient, over_last_axis = spelling
    meetings = _meet_values(softmax.outputs[0])
    if not meetings or (meetings[0].trail.quotient is not None and not over_last_axis):
        return  # of the latter the quotient is told
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
    quotients = [one for one in (quotient, trail.quotient) if one is not None]
    cut = trace_back(raw_map, MAP_CARRIERS - {"Slice"} | {"Transpose"}, lambda node: node.op_type == "Slice")
    logits = logits if trail.quotient is None else None
    yield replace(
        walk,
        logits=logits,
        read=None if logits is None else read_logits(logits, is_value_product, _PASSING),
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
    # Alphas weigh a map by one V and one W_o; what a second product makes of it would be left out.
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
            one is not None and one.const_value is not None for one in node.inputs
        )
        return replace(trail, value=output, mixing=trail.mixing if is_bias else None)
    weight = product_weight(node, slot)
    # Square, as many heads as before: what a router's or a classifier's weight sums over are its classes.
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


def read_logits(value: ir.Value | None, is_product: Callable[[ir.Node], bool], passing: frozenset[str]) -> Logits:
    """Read what leads to a softmax back to ``Q K^T``, or to a head's logits back to its product."""
    logits = Logits()

    def leads_to_product(value: ir.Value | None) -> bool:
        return trace_back(value, _ARITHMETIC, is_product) is not None

    while logits.reason is None:
        node = None if value is None else value.producer()
        if node is None or not leads_to_product(value):
            logits.reason = "its logits come from no product of queries and keys"
        elif is_product(node):
            logits.product, (logits.queries, logits.keys) = node, operands(node)
            logits.wide = str(before_rounding(logits.queries).name), str(before_rounding(logits.keys).name)
            logits.repeats = repeat_chain(logits.keys)
            break
        else:
            inputs = [source for source in node.inputs if source is not None]
            sides = [source for source in inputs if leads_to_product(source)]
            value = _step_back(node, inputs, sides, logits, passing)
    return logits


def _step_back(
    node: ir.Node, inputs: list[ir.Value], sides: list[ir.Value], logits: Logits, passing: frozenset[str]
) -> ir.Value | None:
    """Take one operator into account; its input on the side of the product."""
    others = [value for value in inputs if value not in sides]
    if node.op_type == "Sub" and len(sides) == 2:
        maximum = sides[1].producer()
        if maximum is not None and maximum.op_type == "ReduceMax":
            return sides[0]  # a softmax made safe by hand, which changes nothing
    if len(sides) != 1:
        logits.reason = f"its logits join several products (by {node.op_type}), as relative positions do"
        return None
    side, is_first = sides[0], inputs[0] is sides[0]
    if node.op_type in passing:
        pass
    elif node.op_type == "Mul" or (node.op_type == "Div" and is_first):
        fixed = None if others[0].const_value is None else others[0].const_value.numpy()
        if fixed is None or fixed.size != 1:
            logits.multipliers.append((node.op_type, others[0]))
        else:
            number = float(fixed.astype(np.float64).reshape(()))
            logits.scale = logits.scale * number if node.op_type == "Mul" else logits.scale / number
    elif node.op_type == "Add" or (node.op_type == "Sub" and is_first):
        logits.addends.append((logits.scale if node.op_type == "Add" else -logits.scale, others[0]))
    elif node.op_type == "Where" and not is_first:
        logits.fills.append((logits.scale, next(value for value in inputs[1:] if value is not side)))
        logits.conditions.append((inputs[1] is side, inputs[0]))
    elif node.op_type == "Max":
        logits.fills.extend((logits.scale, value) for value in others)
    elif node.op_type == "Tanh":
        if logits.softcap is not None or logits.multipliers:
            logits.reason = "its logits are bounded in a way that is not a softcap"
        logits.softcap = logits.scale
        logits.capped = len(logits.addends), len(logits.conditions)
    elif node.op_type == "Concat" and node.attributes.get_int("axis") in (-1, 3):
        logits.sinks = True
    else:
        logits.reason = f"its logits pass through {node.op_type}"
    return side


_LAYER_NORMS: Final = kinds("LayerNormalization LpNormalization RMSNormalization SimplifiedLayerNormalization")
_NORM_STEPS: Final = kinds("Add Cast Clip Div Expand Max Reciprocal Sqrt")
"""Between a mean of squares and what is divided by its root."""
_MEANS: Final = kinds("ReduceL2 ReduceMean ReduceSum ReduceSumSquare")


def _is_cross(scores: ir.Node) -> bool | None:
    """Whether Q and K are made of different tensors, or of different inputs; None where neither can be told."""
    # Everything a projection may pass through on its way to Q K^T: biases, scales, head splits, rotary embedding.
    between = LAYOUT_OPS | LOGIT_OPS | REPEAT_OPS | {"Neg", "Slice", "Split"}
    projections = [trace_back(value, between, _is_weight_product) for value in operands(scores)]
    sources = [_projected_tensors(node) for node in projections if node is not None]
    if len(sources) == 2:
        return sources[0].isdisjoint(sources[1])
    queries, keys = (_data_inputs(value) for value in operands(scores))
    return True if queries != keys else None


def _is_weight_product(node: ir.Node) -> bool:
    products = PRODUCTS | INTEGER_PRODUCTS | {"Gemm"}
    return node.op_type in products and any(value.const_value is not None for value in operands(node))


def _projected_tensors(projection: ir.Node) -> set[ir.Value]:
    """What a projection reads, and what that is projected from in turn: adapters and latents have two products."""
    tensors: set[ir.Value] = set()
    waiting = [value for value in operands(projection) if value.const_value is None]
    while waiting:
        value = waiting.pop()
        if value in tensors:
            continue
        tensors.add(value)
        node = value.producer()
        waiting += [] if node is None else _other_forms(node)
    return tensors


def _other_forms(node: ir.Node) -> list[ir.Value]:
    """What a tensor is moved, normed, projected or cut from; past sums everything comes from everything."""
    sources = [value for value in node.inputs if value is not None and value.const_value is None]
    if node.op_type in ("Slice", "Split"):
        return sources[:1] if _cuts_width(node) else []
    if node.op_type in SCALING_OPS and len(sources) == 2:  # a norm that is written out
        left, right = sources
        pairs = (left, right), (right, left)
        return [one for one, other in pairs if trace_back(other, _NORM_STEPS, lambda node: node.op_type in _MEANS)]
    if node.op_type in ADDING_OPS | SCALING_OPS:
        return sources if len(sources) == 1 else []
    kept = node.op_type in LAYOUT_OPS or node.op_type in _LAYER_NORMS or _is_weight_product(node)
    return sources if kept else []


def _cuts_width(node: ir.Node) -> bool:
    """Whether it cuts the last axis: parts of a latent, but not of the sequence."""
    source, axes = node.inputs[0], [node.attributes.get_int("axis", 0)]
    listed = node.inputs[3] if node.op_type == "Slice" and len(node.inputs) > 3 else None
    if listed is not None and listed.const_value is not None:
        axes = listed.const_value.numpy().ravel().tolist()
    rank = 0 if source is None or source.shape is None else len(source.shape)
    return all(axis == -1 or axis == rank - 1 for axis in axes)


def _data_inputs(value: ir.Value) -> set[str]:
    """The inputs with data of a sequence that a tensor is made from; what only gives it a size is left out."""
    names = set()
    for current in ancestors(value):
        if current.is_graph_input() and current.name and current.const_value is None:
            shape = (None,) * (0 if current.shape is None else len(current.shape))
            spec = InputSpec(current.name, "float32" if current.dtype in FLOATS else "int64", shape)
            names |= {current.name} if spec.part == "data" and len(shape) > 1 else set()
    return names


_WEIGHING: Final = SCALING_OPS | kinds(
    "Abs Elu Erf Exp Gelu HardSigmoid Neg Pow Reciprocal Relu Sigmoid Softplus Sqrt Tanh ThresholdedRelu"
)
"""What makes numbers between 0 and 1, or other weights, of the products of queries and keys."""

_FOLLOWED: Final = (ADDING_OPS | _WEIGHING | LAYOUT_OPS | MAP_CARRIERS | REPEAT_OPS) | kinds(
    "AveragePool Clip Conv CumSum GatherElements GatherND Max MaxPool Mean Min Pad Split"
)
"""What a map may be remade by. No product with a weight: the stream behind it, as of a router, is no map."""

_REMADE: Final = (
    "what multiplies its values is made of its map by {}, as in differential attention or with smoothed maps, and "
    "need not be distributions over keys: choose other layers (--sites), or a teacher whose softmax multiplies the "
    "values itself"
)
_WITHOUT_SOFTMAX: Final = (
    "its weights are made of queries and keys by {} and by no softmax, so they need be no distribution over keys: "
    "choose other layers (--sites), or a teacher whose softmax multiplies the values"
)


def _find_remade(
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
    """Products with values of all that is made of a map or of scores, and the operators on the way there."""
    queue: list[tuple[ir.Value, frozenset[str]]] = [(start.outputs[0], frozenset())]
    seen = {start.outputs[0]}
    for value, passed in queue:
        for node, slot in value.uses():
            if is_value_product(node):
                if slot == 0 or is_map:
                    yield node, passed
            elif node.op_type in _FOLLOWED and product_weight(node, slot) is None:
                new = [output for output in node.outputs if output not in seen]
                seen.update(new)
                queue += [(output, passed | {node.op_type}) for output in new]


def trace_back(value: ir.Value | None, carriers: frozenset[str], found: Callable[[ir.Node], bool]) -> ir.Node | None:
    """Breadth first to the nearest producer that ``found`` accepts."""
    queue = [value]
    for current in queue:
        node = None if current is None else current.producer()
        if node is None:
            continue
        if found(node):
            return node
        if node.op_type in carriers:
            # The condition of a Where decides who may attend; it is none of the numbers.
            sources = node.inputs[1:] if node.op_type == "Where" else node.inputs
            queue.extend(source for source in sources if source not in queue)
    return None


def ancestors(value: ir.Value) -> set[ir.Value]:
    """A tensor and all that it is made from; what only gives it a size is left out."""
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
    """The two factors of a product."""
    places = (0, 3) if product.op_type == "QLinearMatMul" else (0, 1)
    left, right = (product.inputs[number] if number < len(product.inputs) else None for number in places)
    if left is None or right is None:
        raise graph_invalid(f"node {product.name!r} ({product.op_type}) lacks an operand")
    return left, right


def is_value_product(node: ir.Node) -> bool:
    """A product of two computed tensors, such as ``Q K^T`` and ``map @ V``."""
    if node.op_type in OPAQUE_PRODUCTS:
        return len(node.inputs) == 2 and all(one is not None and one.const_value is None for one in node.inputs)
    products = PRODUCTS | INTEGER_PRODUCTS
    return node.op_type in products and not any(_is_weight(value) for value in operands(node))


def _is_weight(value: ir.Value) -> bool:
    """Whether a constant is a matrix; learned queries and maps are computed constants, too, of more axes."""
    stated = value
    while isinstance(stated.const_value, ir.LazyTensor):
        node = stated.producer()
        if node is None or node.op_type not in LAYOUT_OPS or node.inputs[0] is None:  # it is computed of others
            return value.const_value is not None and value.const_value.numpy().ndim <= 2
        stated = node.inputs[0]
    return stated.const_value is not None
