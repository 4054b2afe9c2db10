"""Queries, keys, scale and mask behind a site's map: what factored supervision keeps instead of maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.graph.find import AttentionSite, replay
from shd_ref.teacher.graph.inputs import Layout, by_sample, probe_tensors
from shd_ref.teacher.graph.nodes import (
    before_rounding,
    constant_of,
    float_attribute,
    int_attribute,
    is_value_product,
    name_of,
    operands,
    repeat_chain,
    values_by_name,
)
from shd_ref.teacher.opening.model import SCALING_OPS, ir, kinds, onnx, read_graph

_PASSING: Final = frozenset({"Cast", "DequantizeLinear", "Flatten", "Identity", "QuantizeLinear", "Reshape"})
_ARITHMETIC: Final = _PASSING | kinds("Add Clip Concat Div Max Mul ReduceMax Sub Tanh Transpose Where")


@dataclass
class Logits:
    """``softmax(scale * multipliers * Q K^T + addends)``, as it was read."""

    product: ir.Node | None = None
    scale: float = 1.0
    multipliers: list[tuple[str, ir.Value]] = field(default_factory=list)
    addends: list[tuple[float, ir.Value]] = field(default_factory=list)
    fills: list[tuple[float, ir.Value]] = field(default_factory=list)
    conditions: list[tuple[bool, ir.Value]] = field(default_factory=list)  # under which a logit stays
    softcap: float | None = None
    capped: tuple[int, int] | None = None  # addends and conditions that act behind the softcap
    sinks: bool = False
    reason: str | None = None


def read_logits(value: ir.Value | None) -> Logits:
    """Read what leads to a softmax, from its input back to ``Q K^T``."""
    logits = Logits()
    while logits.reason is None:
        node = None if value is None else value.producer()
        if node is None or not _leads_to_product(value):
            logits.reason = "its logits come from no product of queries and keys"
        elif is_value_product(node):
            logits.product = node
            break
        else:
            value = _step(node, logits)
    return logits


def _step(node: ir.Node, logits: Logits) -> ir.Value | None:
    """Take one operator into account; its input on the side of the product."""
    inputs = [value for value in node.inputs if value is not None]
    sides = [value for value in inputs if _leads_to_product(value)]
    others = [value for value in inputs if not any(value is side for side in sides)]
    if node.op_type == "Sub" and len(sides) == 2:
        maximum = sides[1].producer()
        if maximum is not None and maximum.op_type == "ReduceMax":
            return sides[0]  # a softmax made safe by hand, which changes nothing
    if len(sides) != 1:
        logits.reason = f"its logits join several products (by {node.op_type}), as relative positions do"
        return None
    side = sides[0]
    if node.op_type in _PASSING:
        pass
    elif node.op_type in ("Mul", "Div") and not (node.op_type == "Div" and inputs[0] is not side):
        _multiply(node.op_type, others[0], logits)
    elif node.op_type in ("Add", "Sub") and not (node.op_type == "Sub" and inputs[0] is not side):
        logits.addends.append((logits.scale if node.op_type == "Add" else -logits.scale, others[0]))
    elif node.op_type == "Where" and inputs[0] is not side:
        logits.fills.append((logits.scale, next(value for value in inputs[1:] if value is not side)))
        logits.conditions.append((inputs[1] is side, inputs[0]))
    elif node.op_type == "Max":
        logits.fills.extend((logits.scale, value) for value in others)
    elif node.op_type == "Tanh":
        if logits.softcap is not None or logits.multipliers:
            logits.reason = "its logits are bounded in a way that is not a softcap"
        logits.softcap = logits.scale
        logits.capped = len(logits.addends), len(logits.conditions)
    elif node.op_type == "Concat" and int_attribute(node, "axis") in (-1, 3):
        logits.sinks = True
    else:
        logits.reason = f"its logits pass through {node.op_type}"
    return side


def _multiply(op_type: str, factor: ir.Value, logits: Logits) -> None:
    constant = constant_of(factor)
    if constant is not None and constant.size == 1:
        number = float(constant.astype(np.float64).reshape(()))
        logits.scale = logits.scale * number if op_type == "Mul" else logits.scale / number
    else:
        logits.multipliers.append((op_type, factor))


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


# exp(-1000) is 0 beside any other logit, in every precision that teachers run in.
MASKED: Final = -1e3
"""What is added to a logit that is masked, at most."""
_FOLDED: Final[dict[Layout | None, Layout]] = {"batch-heads": "batch-folded", "heads-batch": "heads-folded"}
_UNFOLDED: Final = {folded: split for split, folded in _FOLDED.items()}

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class SiteFactors:
    """Where a site's queries and keys are: its map is ``softmax(scale * q @ k^T)`` over the keys its mask allows.

    Attributes:
        queries, keys: names of the product's operands, after rotary embedding; ``(d, S)`` if ``keys_transposed``.
        layout, logits_layout: as of the site, but of the product's operands, and of ``logits``.
        logits: name of what its softmax reads, before it is flattened to rows, as operators before opset 13 take it.
        key_heads: which of the product's key heads to keep, one of each repeated; empty for all.
        multipliers: names of computed factors ``(..., 1)`` with their operators, applied to the queries.
        reason: why queries and keys cannot stand for the map, and what to do about it; None where ``supported``.
    """

    site: AttentionSite
    queries: str = ""
    keys: str = ""
    keys_transposed: bool = True
    layout: Layout | None = None
    logits_layout: Layout | None = None
    logits: str = ""
    num_kv_heads: int = 0
    key_heads: tuple[int, ...] = ()
    d: int = 0
    scale: float = 1.0
    multipliers: tuple[tuple[str, str], ...] = ()
    supported: bool = False
    reason: str | None = None


def find_factors(model: onnx.ModelProto, sites: Sequence[AttentionSite]) -> tuple[SiteFactors, ...]:
    """Queries, keys and scale of each site, or the reason why there are none; the graph is not changed.

    Masks are told from biases by their numbers, in one probe run with tiny inputs that mask nothing: a mask adds
    zero, or so little that nothing is left. Maps with a bias, a softcap or attention sinks are refused.
    """
    graph = read_graph(model)
    values = values_by_name(graph)
    read = [read_logits(values[site.logits]) if site.supported and site.logits else None for site in sites]
    names = {name_of(value) for logits in read if logits is not None for value in _tensors(logits)}
    names |= {site.probs for site in sites if site.supported and site.probs}
    shaped = [list(_before_shaping(values.get(site.logits))) if site.supported else [] for site in sites]
    arrays = probe_tensors(model, names.union(*shaped)) if names else {}
    return tuple(
        _factors(site, logits, arrays, next((name for name in chain if arrays[name].ndim > 2), site.logits))
        for site, logits, chain in zip(sites, read, shaped, strict=True)
    )


def _before_shaping(value: ir.Value | None) -> Iterator[str]:
    """A tensor, then what it is shaped from."""
    while value is not None and constant_of(value) is None:
        yield name_of(value)
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type in ("Flatten", "Reshape") else None


def _tensors(logits: Logits) -> Iterator[ir.Value]:
    values = [value for _, value in (*logits.multipliers, *logits.addends, *logits.fills)]
    if logits.product is not None:
        queries, keys = operands(logits.product)
        values += [queries, keys, logits.product.outputs[0]]
        for node in repeat_chain(keys):
            values += [value for value in (*node.inputs, node.outputs[0]) if value is not None]
    yield from (value for value in values if constant_of(value) is None)


def _factors(site: AttentionSite, logits: Logits | None, arrays: Arrays, read: str) -> SiteFactors:
    if logits is None:
        return SiteFactors(site, reason=site.reason) if site.reason else _refused(site, "its map is not a softmax")
    reason = logits.reason or _reason(logits, arrays)
    product = logits.product
    if product is None or reason is not None:
        return _refused(site, reason or "its logits come from no product of queries and keys")
    if any(int_attribute(product, flag) for flag in ("transA", "transBatchA", "transBatchB")):
        return _refused(site, f"its logits come from {product.op_type} with transposed queries")
    queries, keys = operands(product)
    wide_queries, wide_keys = before_rounding(queries), before_rounding(keys)
    layout = _layout(site, arrays[site.probs].ndim, arrays[name_of(product.outputs[0])].ndim)
    transposed = not int_attribute(product, "transB")
    shape = arrays[name_of(keys)].shape
    logits_layout = _layout(site, arrays[site.probs].ndim, arrays[read].ndim)
    if layout is None or logits_layout is None or len(shape) != arrays[name_of(queries)].ndim:
        return _refused(site, "queries and keys have other axes than the map")
    heads = site.num_heads or 1
    kept = distinct_heads(keys, layout, heads, arrays)
    shared = layout in _FOLDED and shape[1 if layout == "batch-heads" else 0] == 1 != heads
    return SiteFactors(
        site,
        queries=name_of(wide_queries),
        keys=name_of(wide_keys),
        keys_transposed=transposed,
        layout=layout,
        logits_layout=logits_layout,
        logits=read,
        num_kv_heads=1 if shared else len(kept) or heads,
        key_heads=() if shared else kept,
        d=shape[-2 if transposed else -1],
        scale=logits.scale * float_attribute(product, "alpha"),
        multipliers=tuple((op_type, name_of(value)) for op_type, value in logits.multipliers),
        supported=True,
    )


def _refused(site: AttentionSite, reason: str) -> SiteFactors:
    return SiteFactors(site, reason=f"{reason}: keep its maps instead of queries and keys")


def _reason(logits: Logits, arrays: Arrays) -> str | None:
    """Why the map is not a function of queries, keys and a mask."""
    if logits.sinks:
        return "attention sinks take part of each row"
    if logits.softcap is not None:
        return f"its logits are softcapped at {logits.softcap:g}"
    rank = 0 if logits.product is None else arrays[name_of(logits.product.outputs[0])].ndim
    for _, value in logits.multipliers:
        factor = _value(value, arrays)
        if factor.size != 1 and (factor.shape[-1] != 1 or factor.ndim > rank):
            return "its logits are multiplied entry by entry"
    for scale, value in logits.addends:
        added = scale * _value(value, arrays).astype(np.float64)
        if not ((added == 0) | (added <= MASKED)).all():
            return "a bias is added to its logits"
    if any((scale * _value(value, arrays).astype(np.float64) > MASKED).any() for scale, value in logits.fills):
        return "its masked logits are replaced by numbers that still count"
    return None


def _value(value: ir.Value, arrays: Arrays) -> NDArray[Any]:
    constant = constant_of(value)
    return arrays[name_of(value)] if constant is None else constant


def _layout(site: AttentionSite, map_rank: int, product_rank: int) -> Layout | None:
    """The layout of the product's operands: logits may be folded, or unfolded, on their way to the softmax."""
    if map_rank == product_rank:
        return site.layout
    return (_UNFOLDED if product_rank > map_rank else _FOLDED).get(site.layout)  # type: ignore[arg-type]


def distinct_heads(keys: ir.Value, layout: Layout, heads: int, arrays: Arrays) -> tuple[int, ...]:
    """The first of each run of equal key heads, by replay on indices, where runs are equally long; else none."""
    chain = repeat_chain(keys)
    scaled = (number for number, node in enumerate(chain) if node.op_type in SCALING_OPS)
    uneven = (number for number in scaled if _value(operands(chain[number])[1], arrays).size != 1)
    chain = tuple(reversed(chain[: next(uneven, None)]))
    source = None if not chain else chain[0].inputs[0]
    if source is None or constant_of(source) is not None:
        return ()
    shapes = {name: array.shape for name, array in arrays.items()}
    indices = replay(chain, shapes[name_of(source)], shapes)
    if indices is None:
        return ()
    indices = by_sample(indices, layout, heads)
    if not len(indices) or indices.shape[1] != heads:
        return ()
    first = [head for head in range(heads) if not head or (indices[:, head] != indices[:, head - 1]).any()]
    return tuple(first) if heads % len(first) == 0 and first == list(range(0, heads, heads // len(first))) else ()
