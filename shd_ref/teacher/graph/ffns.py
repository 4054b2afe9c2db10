"""Find the feed-forward layers of a teacher's graph: two constant matrices, and an activation between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.graph.flow.walk import walk_graph
from shd_ref.teacher.graph.nodes import constant_of, float_attribute, int_attribute, is_constant
from shd_ref.teacher.opening.operators import CONTRIB_DOMAIN, STANDARD_DOMAINS, kinds
from shd_ref.teacher.packages import ir

_KEEPING: Final = frozenset({"Cast", "Dropout", "Identity", "Reshape"})
"""What changes no number, and where it has a shape of rows, not their order."""
_CURVES: Final = kinds(
    "BiasGelu Celu Elu Erf FastGelu Gelu HardSigmoid HardSwish LeakyRelu Mish PRelu QuickGelu Relu Selu "
    "Sigmoid Softplus Softsign Swish Tanh ThresholdedRelu"
)
"""What an activation is made of."""
_BY_ENTRY: Final = _CURVES | kinds(
    "Abs Add Clip Div Exp Greater GreaterOrEqual Less LessOrEqual Log Max Min Mul Neg Pow Reciprocal Sqrt Sub "
    "Sum Where"
)
_AFFINE: Final = frozenset({"Add", "Div", "Mul", "Neg", "Sub", "Sum"})
"""What bends nothing where it joins a tensor with constants."""
_PARTING: Final = frozenset({"Gather", "Slice", "Split"})
_MOST_NODES: Final = 64  # of one activation, however it is written out


@dataclass(frozen=True, eq=False)
class Ffn:
    """A feed-forward layer behind a site; ``out`` has the second bias; ``reason`` is why it must stay as it is."""

    layer: int
    first: ir.Node
    second: ir.Node
    first_bias: NDArray[Any] | None
    second_bias: NDArray[Any] | None
    out: ir.Value
    reason: str | None


@dataclass(frozen=True, eq=False)
class _Region:
    """Operators between a product and the products that it leads back to; ``parted``: a tensor is cut on the way."""

    nodes: frozenset[ir.Node]
    sources: tuple[ir.Node, ...]
    parted: bool


def find_ffns(graph: ir.Graph) -> list[Ffn]:
    """Every feed-forward layer behind an attention site, in the graph's order; a site may have none, or several."""
    places = {node: position for position, node in enumerate(graph)}
    sites = [places[walk.node] for walk in walk_graph(graph) if walk.node in places]
    ffns = []
    for second, position in places.items():
        layer = sum(site < position for site in sites) - 1
        region = _region_before(second) if layer >= 0 and _is_linear(second) else None
        if region is not None:
            ffn = _read_ffn(layer, second, region)
            if ffn is not None:
                ffns.append(ffn)
    return ffns


def _is_linear(node: ir.Node) -> bool:
    return node.op_type in ("Gemm", "MatMul") and node.domain in STANDARD_DOMAINS and is_constant(node.inputs[1])


def _region_before(second: ir.Node) -> _Region | None:
    """The operators by entry that a product reads, where they lead back to other such products and nothing else."""
    nodes: set[ir.Node] = set()
    sources: dict[ir.Node, None] = {}
    parted = False
    waiting = [second.inputs[0]]
    while waiting:
        value = waiting.pop()
        node = None if value is None else value.producer()
        if node is None or node.domain not in (*STANDARD_DOMAINS, CONTRIB_DOMAIN):
            return None
        if node in nodes:
            continue
        if _is_linear(node):
            sources[node] = None
            continue
        carries = node.op_type in _PARTING or node.op_type in _KEEPING
        if not carries and node.op_type not in _BY_ENTRY:
            return None
        parted |= node.op_type in _PARTING
        nodes.add(node)
        if len(nodes) > _MOST_NODES:
            return None
        waiting += [node.inputs[0]] if carries else [source for source in node.inputs if not is_constant(source)]
    return _Region(frozenset(nodes), tuple(sources), parted) if nodes and sources else None


def _read_ffn(layer: int, second: ir.Node, region: _Region) -> Ffn | None:
    """None for what is no feed-forward layer: it must give as many channels as it reads, and bend on the way."""
    widths = [_sizes(node) for node in (*region.sources, second)]
    if any(size is None for size in widths):
        return None
    reads, gives = widths[0], widths[-1]
    if reads is None or gives is None or reads[0] != gives[1]:
        return None
    out, second_bias = _with_bias(second, gives[1])
    if len(region.sources) > 1 or region.parted:
        reason = (
            "it is gated, or adds up two products: it joins two functions of its input, and no matrix equals that "
            "without the activation"
        )
        return Ffn(layer, region.sources[0], second, None, None, out, reason)
    if reads[1] != gives[0]:
        return None
    (first,) = region.sources
    hidden, first_bias = _with_bias(first, reads[1])
    own = region.nodes - ({hidden.producer()} if hidden is not first.outputs[0] else set())
    if all(_is_straight(node) for node in own):
        return None  # linear already, as a scaled adapter is
    return Ffn(layer, first, second, first_bias, second_bias, out, _find_reason(own, first, second, hidden))


def _is_straight(node: ir.Node) -> bool:
    if node.op_type in _KEEPING:
        return True
    varying = [number for number, value in enumerate(node.inputs) if not is_constant(value)]
    return node.op_type in _AFFINE and len(varying) == 1 and (node.op_type != "Div" or varying == [0])


def _find_reason(own: frozenset[ir.Node], first: ir.Node, second: ir.Node, hidden: ir.Value) -> str | None:
    constants = [value for node in own if node.op_type not in _KEEPING for value in node.inputs if is_constant(value)]
    wide = [array for value in constants if (array := constant_of(value)) is None or array.size != 1]
    raw = first.outputs[0]
    if not (_adds_bias(first) and _adds_bias(second)):
        return "one of its products adds other numbers to each row, which is no bias"
    if wide or (hidden is not raw and any(raw in node.inputs for node in own)):
        return "its activation has weights: other numbers for each neuron"
    if first.op_type != second.op_type and any(node.op_type == "Reshape" for node in own):
        return "its two products read rows of different shapes: re-export the model with linear layers of one kind"
    return None


def _sizes(node: ir.Node) -> tuple[int, int] | None:
    """Channels that a product reads and gives, without reading its matrix; None where that is none."""
    matrix = node.inputs[1]
    stated = None if matrix is None else ir.convenience.get_const_tensor(matrix)
    if stated is None:  # it is computed from constants
        constant = constant_of(matrix)
        shape = () if constant is None else constant.shape
    else:
        shape = tuple(stated.shape.numpy())
    if len(shape) != 2 or int_attribute(node, "transA"):
        return None
    return (shape[1], shape[0]) if int_attribute(node, "transB") else (shape[0], shape[1])


def _adds_bias(product: ir.Node) -> bool:
    if product.op_type != "Gemm" or len(product.inputs) < 3 or product.inputs[2] is None:
        return True
    bias = constant_of(product.inputs[2])
    return bias is not None and bias.size == (bias.shape[-1] if bias.ndim else 1)


def _with_bias(product: ir.Node, width: int) -> tuple[ir.Value, NDArray[Any] | None]:
    """A product's result with the bias that is added to it, in the operator or right after it, and that bias."""
    out = product.outputs[0]
    biases = []
    if product.op_type == "Gemm" and len(product.inputs) > 2 and product.inputs[2] is not None:
        bias = constant_of(product.inputs[2])
        if bias is None or bias.size not in (1, width):
            return out, None
        beta = float_attribute(product, "beta")
        biases.append(np.broadcast_to(beta * bias.reshape(-1).astype(np.float64), (width,)))
    uses = list(out.uses())
    if len(uses) == 1 and not out.is_graph_output() and uses[0][0].op_type == "Add":
        node, number = uses[0]
        other = node.inputs[1 - number]
        constant = constant_of(other) if is_constant(other) else None
        if constant is not None and constant.size == width and constant.ndim and constant.shape[-1] == width:
            out = node.outputs[0]
            biases.append(constant.reshape(-1).astype(np.float64))
    return out, np.sum(biases, axis=0) if biases else None
