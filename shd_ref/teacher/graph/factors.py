"""Queries, keys, scale and mask behind a site's map: what factored supervision keeps instead of maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.graph.find import AttentionSite
from shd_ref.teacher.graph.inputs import Layout, probe_tensors
from shd_ref.teacher.graph.measure import alike_heads
from shd_ref.teacher.graph.walk import before_rounding, is_value_product, operands, repeat_chain, trace_back
from shd_ref.teacher.opening.model import ir, kinds, onnx

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


def _leads_to_product(value: ir.Value | None) -> bool:
    """Whether arithmetic that logits pass through leads back from here to a product of computed tensors."""
    return trace_back(value, _ARITHMETIC, is_value_product) is not None


def _step(node: ir.Node, logits: Logits) -> ir.Value | None:
    """Take one operator into account; its input on the side of the product."""
    inputs = [value for value in node.inputs if value is not None]
    sides = [value for value in inputs if _leads_to_product(value)]
    others = [value for value in inputs if value not in sides]
    if node.op_type == "Sub" and len(sides) == 2:
        maximum = sides[1].producer()
        if maximum is not None and maximum.op_type == "ReduceMax":
            return sides[0]  # a softmax made safe by hand, which changes nothing
    if len(sides) != 1:
        logits.reason = f"its logits join several products (by {node.op_type}), as relative positions do"
        return None
    side, is_first = sides[0], inputs[0] is sides[0]
    if node.op_type in _PASSING:
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
    read = [read_logits(site.walk.logits) if site.supported and site.logits else None for site in sites]
    names = {name for logits in read if logits is not None for name in _tensors(logits)}
    names |= {site.probs for site in sites if site.supported and site.probs}
    shaped = [list(_before_shaping(site.walk.logits)) if site.supported else [] for site in sites]
    arrays = probe_tensors(model, names.union(*shaped)) if names else {}
    return tuple(
        _factors(site, logits, arrays, next((name for name in chain if arrays[name].ndim > 2), site.logits))
        for site, logits, chain in zip(sites, read, shaped, strict=True)
    )


def _before_shaping(value: ir.Value | None) -> Iterator[str]:
    """A tensor, then what it is shaped from."""
    while value is not None and value.const_value is None:
        yield str(value.name)
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type in ("Flatten", "Reshape") else None


def _tensors(logits: Logits) -> Iterator[str]:
    values: list[ir.Value | None] = [value for _, value in (*logits.multipliers, *logits.addends, *logits.fills)]
    if logits.product is not None:
        queries, keys = operands(logits.product)
        values += [queries, keys, logits.product.outputs[0]]
        for node in repeat_chain(keys):
            values += [*node.inputs, node.outputs[0]]
    yield from (str(value.name) for value in values if value is not None and value.const_value is None)


def _factors(site: AttentionSite, logits: Logits | None, arrays: Arrays, read: str) -> SiteFactors:
    if logits is None:
        return SiteFactors(site, reason=site.reason) if site.reason else _refused(site, "its map is not a softmax")
    reason = logits.reason or _reason(logits, arrays)
    product = logits.product
    if product is None or reason is not None:
        return _refused(site, reason or "its logits come from no product of queries and keys")
    if any(map(product.attributes.get_int, ("transA", "transBatchA", "transBatchB"))):
        return _refused(site, f"its logits come from {product.op_type} with transposed queries")
    queries, keys = operands(product)
    rank = arrays[site.probs].ndim
    layout = _layout(site, rank, arrays[str(product.outputs[0].name)].ndim)
    logits_layout = _layout(site, rank, arrays[read].ndim)
    shape = array_of(keys, arrays).shape
    if layout is None or logits_layout is None or len(shape) != array_of(queries, arrays).ndim:
        return _refused(site, "queries and keys have other axes than the map")
    heads, transposed = site.num_heads or 1, not product.attributes.get_int("transB")
    shapes = {name: array.shape for name, array in arrays.items()}
    shared = layout in _FOLDED and shape[1 if layout == "batch-heads" else 0] == 1 != heads
    alike = None if shared else alike_heads(keys, layout, heads, shapes)
    share = heads // len(set(alike or range(heads)))
    is_runs = alike == tuple(head - head % share for head in range(heads))
    kept = tuple(range(0, heads, share)) if is_runs and share > 1 else ()
    return SiteFactors(
        site,
        queries=str(before_rounding(queries).name),
        keys=str(before_rounding(keys).name),
        keys_transposed=transposed,
        layout=layout,
        logits_layout=logits_layout,
        logits=read,
        num_kv_heads=1 if shared else len(kept) or heads,
        key_heads=kept,
        d=shape[-2 if transposed else -1],
        scale=logits.scale * product.attributes.get_float("alpha", 1.0),
        multipliers=tuple((op_type, str(value.name)) for op_type, value in logits.multipliers),
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
    rank = 0 if logits.product is None else arrays[str(logits.product.outputs[0].name)].ndim
    for _, value in logits.multipliers:
        factor = array_of(value, arrays)
        if factor.size != 1 and (factor.shape[-1] != 1 or factor.ndim > rank):
            return "its logits are multiplied entry by entry"
    for scale, value in logits.addends:
        added = scale * array_of(value, arrays).astype(np.float64)
        if not ((added == 0) | (added <= MASKED)).all():
            return "a bias is added to its logits"
    if any((scale * array_of(value, arrays).astype(np.float64) > MASKED).any() for scale, value in logits.fills):
        return "its masked logits are replaced by numbers that still count"
    return None


def array_of(value: ir.Value, arrays: Arrays) -> NDArray[Any]:
    """A tensor as the graph fixes it, or as a run gave it."""
    return arrays[str(value.name)] if value.const_value is None else value.const_value.numpy()


def _layout(site: AttentionSite, map_rank: int, product_rank: int) -> Layout | None:
    """The layout of the product's operands: logits may be folded, or unfolded, on their way to the softmax."""
    if map_rank == product_rank:
        return site.layout
    return (_UNFOLDED if product_rank > map_rank else _FOLDED).get(site.layout)  # type: ignore[arg-type]
