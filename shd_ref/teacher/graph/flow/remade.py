"""Attention that has no softmax map to read: maps that are changed after their softmax, or made without one.

Such attention is named and refused, so that no layer of a model is passed over: the difference of two maps, maps
that are smoothed over positions or layers, and products of queries and keys that a sigmoid weighs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final

from shd_ref.teacher.graph.flow.tracing import is_value_product, trace_back
from shd_ref.teacher.graph.nodes import is_constant
from shd_ref.teacher.opening.operators import (
    ADDING_OPS,
    LAYOUT_OPS,
    MAP_CARRIERS,
    PRODUCTS,
    REPEAT_OPS,
    SCALING_OPS,
    STANDARD_DOMAINS,
)
from shd_ref.teacher.packages import ir

_WEIGHING: Final = SCALING_OPS | {
    "Abs",
    "Elu",
    "Erf",
    "Exp",
    "Gelu",
    "HardSigmoid",
    "Neg",
    "Pow",
    "Reciprocal",
    "Relu",
    "Sigmoid",
    "Softplus",
    "Sqrt",
    "Tanh",
    "ThresholdedRelu",
}
"""What makes numbers between 0 and 1, or other weights, of the products of queries and keys."""

_BY_ENTRY: Final = ADDING_OPS | _WEIGHING | {"Clip", "Max", "Mean", "Min", "Where"}
_FOLLOWED: Final = (
    _BY_ENTRY | LAYOUT_OPS | MAP_CARRIERS | REPEAT_OPS | {"GatherElements", "GatherND", "Split", "Trilu"}
)
_CUTTING: Final = frozenset({"Pad", "Slice"})
_SMOOTHING: Final = PRODUCTS | {"AveragePool", "Conv", "CumSum", "MaxPool", "Pad", "ReduceMean", "ReduceSum"}


def find_remade(
    graph: ir.Graph, walked: Collection[ir.Node], met: Collection[ir.Node]
) -> Iterator[tuple[ir.Node, str]]:
    """Softmaxes, or else products of queries and keys, whose numbers multiply values in another form.

    Args:
        graph: the graph, its nodes in their order.
        walked: nodes with a site already; another node is preferred to them.
        met: products of a map and values that are told otherwise.

    Yields:
        The node that the attention begins with, and why it cannot be squeezed; one for each product with values.
    """
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
        for node, place in value.uses():
            if is_value_product(node):
                if place == 0 or is_map:
                    yield node, passed
                continue
            for output in node.outputs if _is_followed(node, value, axes) else ():
                sizes = _sizes(output)
                if output in seen or (axes is not None and sizes is not None and not _keeps(node, axes, sizes)):
                    continue
                seen.add(output)
                cut = _sizes(output, 2) if node.op_type in _CUTTING and _last(value) != _last(output) else None
                queue.append((output, None if sizes is None else cut or axes, passed | {node.op_type}))


def _is_followed(node: ir.Node, value: ir.Value, axes: Counter[str] | None) -> bool:
    if node.op_type in _SMOOTHING:
        return axes is not None
    # Without known axes, what a computed tensor joins may be anything, such as the stream after a router.
    known = axes is not None or node.op_type not in (*_BY_ENTRY, "Concat")
    joined = known or all(each is None or each is value or _is_like_a_map(each) for each in node.inputs)
    return node.op_type in _FOLLOWED and joined


def _keeps(node: ir.Node, axes: Counter[str], sizes: Counter[str]) -> bool:
    """Whether rows and keys are still axes, wherever they stand."""
    return node.op_type in _CUTTING or axes <= sizes


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
