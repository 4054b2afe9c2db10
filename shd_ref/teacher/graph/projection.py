"""The output projection: constants that multiply ``map @ V``, up to the tensor that sums all these products."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.opening.model import ADDING_OPS, LAYOUT_OPS, MOVING_OPS, PRODUCTS, SIZE_OPS, fixed_input, ir


@dataclass(frozen=True)
class Weight:
    """A constant ``(in, out)``, ``(N, in, out)``; summed over ``axis``, columns on ``out_axis``, from the end."""

    matrix: NDArray[Any]
    axis: int = -1
    out_axis: int = -1


def product_weight(node: ir.Node, slot: int) -> Weight | None:
    """The constant by which an operator multiplies its input at this place; None where it does something else."""
    if node.op_type == "MatMul" and slot == 1:  # W x on columns: (out, in) on the left
        weight = fixed_input(node, 0)
        return Weight(_as_floats(weight.T), -2, -2) if weight is not None and weight.ndim == 2 else None
    if slot != 0:
        return None
    if node.op_type == "Conv":
        return _pointwise_weight(node)
    if node.op_type in ("Gemm", *PRODUCTS):
        return _right_weight(node)
    if node.op_type in _QUANTISED:
        matrix = _quantised_weight(node)
        return None if matrix is None else Weight(matrix)
    return None


def _right_weight(node: ir.Node) -> Weight | None:
    weight = fixed_input(node, 1)
    if weight is None or any(map(node.attributes.get_int, ("transA", "transBatchA", "transBatchB"))):
        return None
    while weight.ndim > 2 and len(weight) == 1:  # axes that a product broadcasts
        weight = weight[0]
    if weight.ndim not in (2, 3):
        return None
    matrix = weight.swapaxes(-1, -2) if node.attributes.get_int("transB") else weight
    dtype = np.float64 if weight.dtype == np.float64 else np.float32
    wide: NDArray[Any] = np.multiply(matrix, dtype(node.attributes.get_float("alpha", 1.0)), order="C", dtype=dtype)
    return Weight(wide)


def _pointwise_weight(node: ir.Node) -> Weight | None:
    """A convolution of width one: ``(out, in, 1, ...)`` on the second axis."""
    weight = fixed_input(node, 1)
    if weight is None or weight.ndim < 3 or weight[0, 0].size != 1 or node.attributes.get_int("group", 1) != 1:
        return None
    pads, strides = node.attributes.get_ints("pads", ()), node.attributes.get_ints("strides", ())
    if any(pads) or any(step != 1 for step in strides):
        return None
    return Weight(_as_floats(weight.reshape(weight.shape[:2]).T), 1 - weight.ndim, 1 - weight.ndim)


def _as_floats(weight: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(weight, dtype=np.float64 if weight.dtype == np.float64 else np.float32)


_QUANTISED: Final = {
    "DynamicQuantizeMatMul": (1, 2, 3),
    "MatMulInteger": (1, -1, 3),
    "MatMulIntegerToFloat": (1, 3, 5),
    "QLinearMatMul": (3, 4, 5),
}
"""Products of integers: the places of codes, scale (-1: in a later operator) and zero point."""


def _quantised_weight(node: ir.Node) -> NDArray[np.float32] | None:
    """``(codes - zero) * scale`` of a product of integers."""
    codes, scale, zero = (fixed_input(node, slot) for slot in _QUANTISED[node.op_type])
    if node.op_type == "MatMulInteger":
        scale = _find_scale(node)
    if codes is None or codes.ndim != 2 or scale is None:
        return None
    offset = codes.astype(np.float32) - (0.0 if zero is None else zero.astype(np.float32))
    weight: NDArray[np.float32] = offset * scale.astype(np.float32)
    return weight


def _find_scale(product: ir.Node) -> NDArray[Any] | None:
    """The weight's scale, which follows a product of integers: ``Cast``, then ``Mul`` by both operands' scales."""
    for cast, _ in product.outputs[0].uses():
        for scaled, slot in cast.outputs[0].uses() if cast.op_type == "Cast" else ():
            scales = scaled.inputs[1 - slot] if scaled.op_type == "Mul" else None
            node = None if scales is None else scales.producer()
            sources = (scales,) if node is None or node.op_type != "Mul" else node.inputs
            for source in sources:
                if source is not None and source.const_value is not None:
                    return source.const_value.numpy()
    return None


_PICKING: Final = frozenset({"Gather", "GatherND", "Slice", "Split"})


@dataclass(frozen=True, eq=False)
class Term:
    """A product over ``axis`` (from the end) of heads' outputs, moved and scaled, with ``(in, out)``, one a head."""

    source: ir.Value
    axis: int
    weight: NDArray[Any]


@dataclass(frozen=True)
class Projection:
    """The terms whose sum is the attention output, the operators before them, or why there is no such sum."""

    terms: tuple[Term, ...] = ()
    path: tuple[ir.Node, ...] = ()
    reason: str | None = None


NO_PROJECTION: Final = Projection()
"""For a walk that ends before the projection."""


@dataclass(frozen=True)
class _Linear:
    """A tensor that is linear in the heads' outputs, plus anything that does not depend on them."""

    terms: tuple[Term, ...] = ()  # none: the heads' outputs themselves
    axis: int = -1  # the columns of the weights
    moves: tuple[tuple[str, tuple[int, ...]], ...] = ()  # since the products
    by_head: bool = False  # the products of the heads are not summed yet

    @property
    def is_whole(self) -> bool:
        return bool(self.terms) and not self.by_head


class _Other(Enum):
    """A tensor that is made of the heads' outputs, and not linear in them."""

    BENT = 0  # made of them before their products are summed, as by a gate: no sum is whole once it joins them again
    BEHIND = 1  # made of whole sums alone, as by the norm after the block: past the projection


def follow_to_projection(context: ir.Value) -> Projection:
    """Read forward from the heads' outputs to the first tensor that sums everything linear in them."""
    producer = context.producer()
    graph = None if producer is None else producer.graph
    readings: dict[ir.Value, _Linear | _Other] = {}
    unread: dict[ir.Value, set[ir.Node | None]] = {}  # by tensor the operators still to come; None: it is a result
    path: list[ir.Node] = []  # operators on the heads' outputs before any product
    sums: list[_Linear] = []  # whole, and read by operators that are not linear
    bends: list[ir.Node] = []  # operators on anything less than a whole sum that are not linear
    pending: list[_Linear] = []

    def add(value: ir.Value, reading: _Linear | _Other) -> None:
        readings[value] = reading
        users = {node for node, _ in value.uses() if node.op_type not in SIZE_OPS}
        bends.extend(node for node in users if node.graph is not graph)  # in the body of a control-flow operator
        readers: set[ir.Node | None] = {node for node in users if node.graph is graph}
        if value.is_graph_output() and isinstance(reading, _Linear) and reading.is_whole:
            readers.add(None)
        if readers:
            unread[value] = readers

    add(context, _Linear())
    is_bent = False
    # The graph is in order: all that an operator reads has a reading before it comes.
    for node in itertools.dropwhile(lambda node: node is not producer, graph or ()):
        sources = {value: readings[value] for value in node.inputs if value is not None and value in readings}
        if not sources or node.op_type in SIZE_OPS:
            continue
        for value in sources:
            unread[value].discard(node)
            if not unread[value]:
                del unread[value]
        linear = {value: reading for value, reading in sources.items() if isinstance(reading, _Linear)}
        result: _Linear | _Other | None = read_operator(node, linear) if len(linear) == len(sources) else None
        if isinstance(result, _Linear):
            path += [] if result.terms else [node]
        else:
            sums += [reading for reading in linear.values() if reading.is_whole]
            reads_part = any(not reading.is_whole for reading in linear.values())
            reads_bent = _Other.BENT in sources.values()
            bends += [node] if reads_part else []
            is_bent = bool(linear) and reads_bent  # it joins them again, so no sum is whole
            result = _Other.BENT if reads_part or reads_bent else _Other.BEHIND
        # A quantiser's scale and zero point are not numbers of the heads' outputs.
        for output in node.outputs[:1] if node.op_type == "DynamicQuantizeLinear" else node.outputs:
            add(output, result)
        pending = [reading for value in unread if isinstance(reading := readings[value], _Linear)]
        # Done where one whole sum is all that later operators can read.
        if is_bent or not pending or (len(unread) == 1 and pending[0].is_whole):
            break
    sums += [reading for reading in pending if reading.is_whole]
    if is_bent or not sums:
        return Projection(reason=_describe_bends(bends))
    if any(reading.terms != sums[0].terms for reading in sums):
        return Projection(
            reason="the heads' outputs meet several weights whose products are used apart, so none of them is "
            "the output projection: choose other layers, or export the model up to one of these products"
        )
    terms = sums[0].terms
    # Of the operators before any product those that lead to one, for ``replay`` to find each head's rows of W_o.
    needed, leading = {term.source for term in terms}, []
    for node in reversed(path):
        if not needed.isdisjoint(node.outputs):
            leading.append(node)
            needed.update(value for value in node.inputs if value is not None)
    return Projection(terms, tuple(reversed(leading)))


def read_operator(node: ir.Node, known: dict[ir.Value, _Linear]) -> _Linear | None:
    """The result of an operator on linear tensors; None where it is not linear in them."""
    places = {position: known[value] for position, value in enumerate(node.inputs) if value in known}
    if node.op_type in ADDING_OPS:
        if node.op_type == "Sub" and 1 in places:
            if not places[1].terms:  # without weights there is nothing that holds the sign
                return None
            places[1] = _scale(places[1], -1.0)
        return _join(list(places.values()))
    if node.op_type == "Concat":
        return _Linear() if not any(r.terms for r in places.values()) and len(places) == len(node.inputs) else None
    if node.op_type == "Gemm" and len(places) == 2 and 2 in places:
        product = _multiply(node, 0, places[0]) if 0 in places else None
        return (
            None if product is None else _join([product, _scale(places[2], node.attributes.get_float("beta", 1.0))])
        )
    if len(places) != 1:
        return None
    ((position, reading),) = places.items()
    others = [value for number, value in enumerate(node.inputs) if number != position and value is not None]
    if node.op_type in LAYOUT_OPS:
        return _move(node, reading) if position == 0 else None
    if node.op_type in _PICKING:
        is_fixed = position == 0 and all(value.const_value is not None for value in others)
        return reading if is_fixed and not reading.terms else None
    if node.op_type == "Mul" or (node.op_type == "Div" and position == 0):
        return _scale_by(node.op_type, reading, others[0])
    if node.op_type == "ReduceSum":
        return _sum_heads(node, reading)
    return _multiply(node, position, reading)


def _join(readings: list[_Linear]) -> _Linear | None:
    first, *rest = readings
    is_alike = all((r.axis, r.moves, r.by_head) == (first.axis, first.moves, first.by_head) for r in rest)
    if rest and not (is_alike and all(r.terms for r in readings)):
        return None
    return replace(first, terms=tuple(term for reading in readings for term in reading.terms))


def _scale(reading: _Linear, factor: NDArray[Any] | float) -> _Linear:
    """Multiply the weights; a reading without any is left to the replay of the path."""
    if isinstance(factor, float) and factor == 1.0:
        return reading
    terms = tuple(replace(term, weight=(term.weight * factor).astype(term.weight.dtype)) for term in reading.terms)
    return replace(reading, terms=terms)


def _scale_by(op_type: str, reading: _Linear, value: ir.Value) -> _Linear | None:
    if value.const_value is None:
        return None
    if not reading.terms:
        return reading
    factor = value.const_value.numpy()
    by_column = reading.axis == -1 and factor.shape[-1:] == (reading.terms[0].weight.shape[-1],)
    if factor.size != 1 and not (by_column and factor.size == factor.shape[-1]):
        return None
    scale = factor.astype(np.float64).reshape(-1)
    return _scale(reading, scale if op_type == "Mul" else 1.0 / scale)


def _move(node: ir.Node, reading: _Linear) -> _Linear | None:
    if not reading.terms or node.op_type not in MOVING_OPS:
        return reading
    order = tuple(node.attributes["perm"].as_ints()) if "perm" in node.attributes else ()
    axis = reading.axis
    if node.op_type == "Transpose":
        if not order:
            return None
        axis = order.index(axis % len(order)) - len(order)
    elif axis != -1:
        source, shape = node.inputs[0], node.outputs[0].shape  # axes before the columns stay
        if source is None or source.shape is None or shape is None:
            return None
        axis += len(source.shape) - len(shape)
    return replace(reading, axis=axis, moves=(*reading.moves, (node.op_type, order)))


def _sum_heads(node: ir.Node, reading: _Linear) -> _Linear | None:
    """The sum over the third last axis, which said which head's matrix was meant."""
    axes = fixed_input(node, 1)
    source = node.inputs[0]
    rank = 4 if source is None or source.shape is None else len(source.shape)
    if not reading.by_head or reading.moves or axes is None or axes.tolist() not in ([-3], [rank - 3]):
        return None
    return replace(reading, by_head=False)


def _multiply(node: ir.Node, place: int, reading: _Linear) -> _Linear | None:
    """The product with a constant; the second of two in a row multiplies the matrix of the first."""
    factor = product_weight(node, place)
    source = node.inputs[place]
    if factor is None or source is None:
        return None
    if not reading.terms:
        return _Linear((Term(source, factor.axis, factor.matrix),), factor.out_axis, by_head=factor.matrix.ndim == 3)
    if reading.axis != factor.axis or reading.by_head or factor.matrix.ndim != 2:
        return None
    if reading.terms[0].weight.shape[-1] != len(factor.matrix):
        return None
    second = factor.matrix.astype(np.float64)  # rounded once, after the product
    terms = tuple(replace(term, weight=(term.weight @ second).astype(term.weight.dtype)) for term in reading.terms)
    return replace(reading, terms=terms, axis=factor.out_axis)


def _describe_bends(bends: list[ir.Node]) -> str:
    if not bends:
        return (
            "the heads' outputs are results of the graph and reach no weight, so there is no output projection: "
            "export the model up to and including that of the attention block, with its weights inside"
        )
    between = ", ".join(sorted({node.op_type for node in bends}))
    return (
        f"the heads' outputs reach no constant weight before other operators change them (they go to {between}), so "
        "the attention output is not the sum of what the heads give: choose other layers (--sites), or export a "
        "model without a norm or a gate there, with its weights inside"
    )
