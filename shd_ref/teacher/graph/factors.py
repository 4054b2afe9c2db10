"""Queries, keys, scale and mask behind a site's map, which factored supervision keeps instead of maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import graph_unsupported, need
from shd_ref.teacher.graph.find import AttentionSite, SiteKinds
from shd_ref.teacher.graph.inputs import Layout, Shapes, probe_tensors
from shd_ref.teacher.graph.measure import alike_heads
from shd_ref.teacher.graph.walk import before_rounding, is_value_product, operands, repeat_chain, trace_back
from shd_ref.teacher.opening.model import fixed_input, ir, is_computed, kinds, onnx
from shd_ref.teacher.options import PrecomputeOptions

# exp(-1000) is 0 next to any other logit, in every precision that teachers run in.
MASKED: Final = -1e3
"""The most that is added to a masked logit."""
_FOLDED: Final[dict[Layout | None, Layout]] = {"batch-heads": "batch-folded", "heads-batch": "heads-folded"}
_UNFOLDED: Final = {folded: split for split, folded in _FOLDED.items()}

_PASSING: Final = frozenset({"Cast", "DequantizeLinear", "Flatten", "Identity", "QuantizeLinear", "Reshape"})
_ARITHMETIC: Final = _PASSING | kinds("Add Clip Concat Div Max Mul ReduceMax Sub Tanh Transpose Where")

Arrays = Mapping[str, NDArray[Any]]


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


@dataclass(frozen=True)
class SiteFactors:
    """Where a site's queries and keys are: its map is ``softmax(scale * q @ k^T)`` over the keys its mask allows.

    Attributes:
        queries, keys: names of the product's operands, after rotary embedding; ``(d, S)`` if ``keys_transposed``.
        layout, logits_layout: as of the site, but of the product's operands, and of ``logits``.
        logits: name of its softmax's input, before it is flattened to rows, as operators before opset 13 take it.
        key_heads: which of the product's key heads to keep, one of each repeated; empty for all.
        multipliers: names of computed factors ``(..., 1)`` with their operators, applied to the queries.
        reason: why queries and keys cannot stand for the map, and the remedy; None where ``supported``.
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


def check_sinks(site: AttentionSite, codec: str, temperature: float) -> None:
    """Refuse lossy codecs and softening where there are attention sinks: both scale rows to one."""
    need(
        site.row_sums == "one" or (codec == "float32" and temperature == 1.0),
        "graph-unsupported",
        f"{site.label}, with attention sinks,",
        "be stored with codec 'float32' and temperature 1, which keep sums of rows below one",
        f"codec {codec!r}, temperature {temperature:g}",
        spec_id="MAP-9",
    )


def choose_stored(
    model: onnx.ModelProto, layers: Sequence[tuple[int, AttentionSite]], kinds: SiteKinds, options: PrecomputeOptions
) -> tuple[SiteFactors, ...]:
    """Queries and keys of the layers where these are stored; refuse a form or a codec that cannot hold the layers."""
    for _, site in layers:
        if options.is_factored and kinds.kinds and kinds.kind(site) != "encoder":
            why = "its rows are those of a decoder with cross attention (--form maps)"
            raise graph_unsupported(f"{site.label} cannot be stored as queries and keys: {why}", "CACHE-128")
        check_sinks(site, "float32" if options.is_factored else options.codec, options.temperature)
    stored = find_factors(model, [site for _, site in layers]) if options.is_factored else ()
    for factors in stored:
        reason = factors.reason if factors.scale > 0 or not factors.supported else f"its scale is {factors.scale:g}"
        if reason is not None:
            raise graph_unsupported(
                f"{factors.site.label} cannot be stored as queries and keys: {reason} (--form maps)", "CACHE-143"
            )
    return stored


def find_factors(model: onnx.ModelProto, sites: Sequence[AttentionSite]) -> tuple[SiteFactors, ...]:
    """Queries, keys and scale of each site, or the reason why there are none; the graph is not changed.

    Masks differ from biases in their numbers, read in one probe run with tiny inputs that mask nothing: a mask adds
    zero, or so little that nothing is left. Maps with a bias, a softcap or attention sinks are refused.
    """
    read = [read_site(site) if site.supported else None for site in sites]
    names = {site.probs for site in sites if site.supported and site.probs}
    masks: set[str] = set()
    for logits in filter(None, read):
        masks |= _computed([value for _, value in (*logits.multipliers, *logits.addends, *logits.fills)])
        product = [] if logits.product is None else [logits.queries, logits.keys, logits.product.outputs[0]]
        names |= _computed(product + [value for node in logits.repeats for value in (*node.inputs, node.outputs[0])])
    shaped = [list(_before_shaping(site.walk.logits)) if site.supported else [] for site in sites]
    arrays, shapes = probe_tensors(model, masks, names.union(*shaped))
    return tuple(
        _factors(site, logits, arrays, shapes, next((name for name in chain if len(shapes[name]) > 2), site.logits))
        for site, logits, chain in zip(sites, read, shaped, strict=True)
    )


def read_site(site: AttentionSite) -> Logits | None:
    """The operators before a site's softmax; None where its map is no softmax."""
    return None if site.walk.logits is None else read_logits(site.walk.logits, is_value_product, _PASSING)


def read_logits(value: ir.Value | None, is_product: Callable[[ir.Node], bool], passing: frozenset[str]) -> Logits:
    """Read the operators before a softmax back to ``Q K^T``, or before a head's logits back to its product."""
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


def _computed(values: Iterable[ir.Value | None]) -> set[str]:
    return {str(value.name) for value in values if is_computed(value)}


def _before_shaping(value: ir.Value | None) -> Iterator[str]:
    """A tensor, then those that it is reshaped from."""
    while value is not None and value.const_value is None:
        yield str(value.name)
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type in ("Flatten", "Reshape") else None


def _factors(site: AttentionSite, logits: Logits | None, arrays: Arrays, shapes: Shapes, read: str) -> SiteFactors:
    if logits is None:
        return SiteFactors(site, reason=site.reason) if site.reason else _refused(site, "its map is not a softmax")
    product, queries, keys = logits.product, logits.queries, logits.keys
    product_rank = 0 if product is None else len(shapes[str(product.outputs[0].name)])
    reason = logits.reason or _reason(logits, arrays, product_rank)
    if product is None or queries is None or keys is None or reason is not None:
        return _refused(site, reason or "its logits come from no product of queries and keys")
    if any(map(product.attributes.get_int, ("transA", "transBatchA", "transBatchB"))):
        return _refused(site, f"its logits come from {product.op_type} with transposed queries")
    layout, logits_layout = (
        _layout(site, len(shapes[site.probs]), rank) for rank in (product_rank, len(shapes[read]))
    )
    queries_shape, shape = (
        shapes[str(value.name)] if value.const_value is None else value.const_value.numpy().shape
        for value in (queries, keys)
    )
    if layout is None or logits_layout is None or len(shape) != len(queries_shape):
        return _refused(site, "queries and keys have other axes than the map")
    heads, transposed = site.num_heads or 1, not product.attributes.get_int("transB")
    shared = layout in _FOLDED and shape[1 if layout == "batch-heads" else 0] == 1 != heads
    alike = None if shared else alike_heads(logits.repeats, layout, heads, shapes)
    share = heads // len(set(alike or range(heads)))
    is_runs = alike == tuple(head - head % share for head in range(heads))
    first_heads = tuple(range(0, heads, share)) if is_runs and share > 1 else ()
    return SiteFactors(
        site,
        queries=logits.wide[0],
        keys=logits.wide[1],
        keys_transposed=transposed,
        layout=layout,
        logits_layout=logits_layout,
        logits=read,
        num_kv_heads=1 if shared else len(first_heads) or heads,
        key_heads=first_heads,
        d=shape[-2 if transposed else -1],
        scale=logits.scale * product.attributes.get_float("alpha", 1.0),
        multipliers=tuple((op_type, str(value.name)) for op_type, value in logits.multipliers),
        supported=True,
    )


def _refused(site: AttentionSite, reason: str) -> SiteFactors:
    return SiteFactors(site, reason=f"{reason}: keep its maps instead of queries and keys")


def _reason(logits: Logits, arrays: Arrays, product_rank: int) -> str | None:
    """Why the map is not a function of queries, keys and a mask."""
    if logits.sinks:
        return "attention sinks take part of each row"
    if logits.softcap is not None:
        return f"its logits are softcapped at {logits.softcap:g}"
    for _, value in logits.multipliers:
        factor = _array_of(value, arrays)
        if factor.size != 1 and (factor.shape[-1] != 1 or factor.ndim > product_rank):
            return "its logits are multiplied entry by entry"
    return why_no_mask(logits, arrays)


def why_no_mask(logits: Logits, arrays: Arrays) -> str | None:
    """Why numbers that are added to logits, or replace them, are more than a mask."""
    for scale, value in logits.addends:
        added = scale * _numbers_of(value, arrays)
        if not ((added == 0) | (added <= MASKED)).all():
            return "a bias is added to its logits"
    if any((scale * _numbers_of(value, arrays) > MASKED).any() for scale, value in logits.fills):
        return "its masked logits are replaced by numbers that still count"
    return None


def _numbers_of(value: ir.Value, arrays: Arrays) -> NDArray[np.float64]:
    """The constants of a mask or those it chooses between, since a run may not show all; else a run's numbers."""
    node = value.producer()
    chosen = [fixed_input(node, slot) for slot in (1, 2)] if node is not None and node.op_type == "Where" else [None]
    fixed = [numbers.ravel() for numbers in chosen if numbers is not None]
    return (np.concatenate(fixed) if len(fixed) == 2 else _array_of(value, arrays)).astype(np.float64)


def _array_of(value: ir.Value, arrays: Arrays) -> NDArray[Any]:
    """A tensor as the graph fixes it, or as a run gave it."""
    return arrays[str(value.name)] if value.const_value is None else value.const_value.numpy()


def _layout(site: AttentionSite, map_rank: int, product_rank: int) -> Layout | None:
    """The layout of the product's operands: logits may be folded, or unfolded, on their way to the softmax."""
    if map_rank == product_rank:
        return site.layout
    return (_UNFOLDED if product_rank > map_rank else _FOLDED).get(site.layout)  # type: ignore[arg-type]


def condition_of(value: ir.Value, scale: float) -> tuple[bool, ir.Value] | None:
    """The condition that chooses between 0 and a number far below it, and whether rows see keys where it is True."""
    node = value.producer()
    if node is None or node.op_type != "Where" or node.inputs[0] is None:
        return None
    numbers = [fixed_input(node, slot) for slot in (1, 2)]
    seen = [None if number is None or number.size != 1 else bool(scale * number.item() == 0) for number in numbers]
    return (seen[0], node.inputs[0]) if seen in ([True, False], [False, True]) and seen[0] is not None else None
