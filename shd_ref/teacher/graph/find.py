"""Find the attention of a teacher's ONNX graph by following data, not by matching patterns."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, argument_value, graph_invalid, graph_unsupported, inputs_invalid
from shd_ref.teacher.graph.independence import Finding, probe_samples
from shd_ref.teacher.graph.inputs import InputSpec, Layout, Shapes, probe_shapes, static_shapes
from shd_ref.teacher.graph.nodes import (
    ancestors,
    compute,
    constant_of,
    data_inputs,
    dtype_name,
    int_attribute,
    name_of,
    values_by_name,
)
from shd_ref.teacher.graph.projection import Term
from shd_ref.teacher.graph.walk import Walk, walk_graph
from shd_ref.teacher.opening.load import MIN_OPSET, OLD_OPSET, check_inferred, opset_version
from shd_ref.teacher.opening.model import (
    ADDING_OPS,
    MOVING_OPS,
    REPEAT_OPS,
    SCALING_OPS,
    infer_shapes,
    ir,
    onnx,
    read_graph,
)

_LARGEST_WEIGHT: Final = 1e15
"""Products of larger weights leave the range of float32."""


@dataclass(frozen=True)
class AttentionSite:
    """One attention block of a teacher graph, with H heads.

    Attributes:
        layer, name: position among the sites, from 0; name of the softmax (or fused operator) node, made unique.
        op_type: ``"Softmax"``, ``"Div"`` or ``"Exp"`` for one written out, or the fused operator.
        logits, probs, values, context: names of what the softmax reads, of the map, of V as the product consumes it,
            and of the product; empty where ``supported`` is False and none exists.
        layout: how the map's and V's leading axes hold samples and heads; None where unknown.
        num_kv_heads: value heads before they are repeated for grouped queries.
        shared_values: V has a single head, which the product broadcasts to all.
        joined_values: every head reads the values of all, side by side, since maps are mixed among heads after the
            softmax by a constant (talking heads); the constant is part of W_o, and maps are those of the softmax.
        d_k, d_v, d_model: widths of a query head, of a value head (or of all, joined), and D, columns of W_o.
        dtype: of the map, such as ``"float32"``; None where shape inference does not tell.
        cross: True where queries and keys come from different tensors; None where undecided.
        row_sums: ``"one"``, or ``"at_most_one"`` where attention sinks take part of a row's mass (MAP-9).
        output_projection: W_o ``(H * d_v, D)``, rows in head order, float32 or float64.
        supported, reason: whether ``squeeze_graph`` can squeeze this site; why not, and what to do about it.
        note: of a supported site, what a probe run could not show: that its maps are those of single samples.
        row_inputs, key_inputs: of a supported site, the graph's inputs with a position for every row, and for every
            column of the map; None where no probe run told.
    """

    layer: int
    name: str
    op_type: str
    logits: str = ""
    probs: str = ""
    values: str = ""
    context: str = ""
    layout: Layout | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    shared_values: bool = False
    joined_values: bool = False
    d_k: int | None = None
    d_v: int | None = None
    d_model: int | None = None
    dtype: str | None = None
    cross: bool | None = None
    row_sums: str = "one"
    output_projection: NDArray[Any] | None = field(default=None, repr=False, compare=False)
    supported: bool = False
    reason: str | None = None
    note: str | None = None
    row_inputs: tuple[str, ...] | None = None
    key_inputs: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"attention site {self.layer} ({self.name})"

    @property
    def folded(self) -> bool:
        """Whether the heads are folded into the batch axis: maps ``(B * H, L, S)``."""
        return self.layout in ("batch-folded", "heads-folded")


def find_sites(model: onnx.ModelProto) -> tuple[AttentionSite, ...]:
    """Every attention site of a graph, in the order in which data flows; an unsupported one has its ``reason``.

    Shapes come from ONNX shape inference; where that leaves the heads undecided, one probe run with tiny inputs
    measures them. A few more such runs show that the maps are those of single samples. A softmax that never meets a
    product (a classifier's, a router's) is not a site.

    Args:
        model: a graph without local functions, see ``load_teacher``; not changed.

    Raises:
        ShdError: ``graph-invalid`` for a graph that is not well formed.
    """
    inferred = infer_shapes(model)  # a graph that inference rejects can still be probed
    check_inferred(inferred)
    graph = read_graph(inferred)
    try:
        graph.sort()
    except ValueError as error:
        raise graph_invalid(f"the graph's nodes feed one another in a circle: {error}") from error
    walks = list(walk_graph(graph))
    shapes: Shapes = static_shapes(inferred)
    measures = [measure_site(walk, shapes) for walk in walks]
    probe_error = None
    # Symbolic sizes can mislead; only heads that fit exactly are accepted without a probe.
    undecided = [
        w for w, m in zip(walks, measures, strict=True) if w.reason is None and (m is None or m.layout is None)
    ]
    if undecided:
        names = {name for walk in walks if walk.reason is None for name in walk.tensors()}
        try:
            shapes = probe_shapes(model, names)
        except ShdError as error:
            probe_error = str(error)
        else:
            measures = [measure_site(walk, shapes) for walk in walks]
    opset = opset_version(model)
    if opset < MIN_OPSET:
        walks = [replace(walk, reason=walk.reason or OLD_OPSET.format(opset)) for walk in walks]
    sites: list[AttentionSite] = []
    for layer, (walk, measure) in enumerate(zip(walks, measures, strict=True)):
        name = walk.node.name or f"{walk.node.op_type}_{layer}"
        while any(site.name == name for site in sites):
            name = f"{name}_{layer}"
        sites.append(_site(layer, walk, measure, name, probe_error, shapes))
    # Without those whose maps are not of single samples, or no distributions.
    maps = {site.probs: (site.layout, site.num_heads or 1, site.row_sums) for site in sites if site.supported}
    findings = probe_samples(model, maps) if maps else {}
    judged = []
    for site in sites:
        finding = findings.get(site.probs, Finding()) if site.supported else Finding()
        reason = site.reason or finding.reason
        judged.append(replace(site, supported=reason is None, **(vars(finding) | {"reason": reason})))
    return tuple(judged)


def _site(
    layer: int, walk: Walk, measure: Measure | None, name: str, probe_error: str | None, shapes: Shapes
) -> AttentionSite:
    reason = walk.reason
    if reason is None and measure is None:
        reason = (
            describe_contradiction(walk, shapes)
            if probe_error is None
            else f"the number of heads cannot be determined: {probe_error}"
        )
    if measure is None:
        measure = Measure(
            num_heads=int_attribute(walk.node, "num_heads", "q_num_heads"),
            num_kv_heads=int_attribute(walk.node, "kv_num_heads"),
        )
    weight, terms = measure.output_projection, walk.projection.terms
    if reason is None and measure.layout is None:
        reason = (
            "the output projection reads only a part of the heads' outputs: re-export with eager attention, so that "
            "it reads every head at every position"
        )
    if reason is None and weight is not None and not (np.abs(weight) < _LARGEST_WEIGHT).all():
        reason = "its output projection holds NaN or numbers beyond reason: copy or export the model again"
    return AttentionSite(
        layer=layer,
        name=name,
        op_type=walk.node.op_type,
        logits="" if walk.logits is None else name_of(walk.logits),
        probs="" if walk.probs is None else name_of(walk.probs),
        values="" if walk.values is None else name_of(walk.values),
        context="" if walk.context is None else name_of(walk.context),
        d_model=int(terms[0].weight.shape[-1]) if terms else None,
        dtype=dtype_name(walk.probs),
        cross=walk.cross,
        row_sums="at_most_one" if walk.sinks else "one",
        supported=reason is None,
        reason=reason,
        **vars(measure),
    )


def projection_of(site: AttentionSite) -> NDArray[Any]:
    """W_o of a supported site."""
    if site.output_projection is None:
        raise graph_unsupported(f"site {site.name} cannot be squeezed: it has no output projection")
    return site.output_projection


def select_sites(sites: Sequence[AttentionSite], wanted: str | None) -> tuple[AttentionSite, ...]:
    """The sites that a text such as ``0,2,4-7``, ``encoder*``, ``self`` or ``cross`` names, in order, each once.

    Without a text all; ``argument-value`` for a part that names none.
    """
    if wanted is None:
        return tuple(sites)
    chosen: set[int] = set()
    for term in (term.strip() for term in wanted.split(",")):
        layers = {site.layer for site in sites if _is_named(site, term)}
        if not layers:
            raise argument_value(
                f"sites must name attention sites, by number from 0 to {len(sites) - 1}, range, name or kind (self, "
                f"cross), such as 0,2,4-7; got {term!r}, which names none: see shd inspect"
            )
        chosen |= layers
    return tuple(site for site in sites if site.layer in chosen)


def _is_named(site: AttentionSite, term: str) -> bool:
    numbers = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", term)
    if numbers is not None:
        first = int(numbers[1])
        return first <= site.layer <= int(numbers[2] or first)
    if term in ("self", "cross"):
        return site.cross is (term == "cross")
    return site.name == term or fnmatchcase(site.name, term)


_MOST_INDICES: Final = 2**25  # 256 MB, several times

_EVALUATED: Final = frozenset({"Concat", "Gather", "GatherND", "Slice", "Transpose"})
_HEAD_AXES: Final[dict[Layout | None, int]] = {"batch-heads": 1, "heads-batch": 0}


@dataclass(frozen=True)
class Measure:
    """What a site's shapes tell; fields as in ``AttentionSite``."""

    layout: Layout | None = None  # None: W_o does not read every head at every position
    num_heads: int | None = None
    num_kv_heads: int | None = None
    shared_values: bool = False
    joined_values: bool = False
    d_k: int | None = None
    d_v: int | None = None
    output_projection: NDArray[Any] | None = None  # W_o (H * d_v, D), rows in head order


@dataclass(frozen=True)
class _Rows:
    """What one product reads: a row for each row of the attention output."""

    indices: NDArray[np.int64]  # (rows, in): places in the heads' outputs
    factors: NDArray[Any]  # (in,): what these numbers were multiplied by on the way
    weight: NDArray[Any]  # (in, out)


def measure_site(walk: Walk, shapes: Shapes) -> Measure | None:
    """Heads, widths and layout from the shapes; None where a shape is missing or contradicts another."""
    if walk.reason is not None or not walk.projection.terms:
        return None
    probs, values, context, query = (
        None if value is None else shapes.get(name_of(value))
        for value in (walk.probs, walk.values, walk.context, walk.query)
    )
    if probs is None or values is None or context is None or len(context) not in (3, 4) or 0 in context:
        return None
    d_v = context[-1]
    repeats = _repeat_factor(walk.repeats, shapes)
    rows = _rows_of_terms(walk, context, shapes)
    if repeats is None or rows is None:
        return None
    num_heads, rest = divmod(len(np.unique(np.concatenate([row.indices[0] for row in rows]))), d_v)
    if rest or num_heads % repeats:
        return None
    layout, weight = _layout(rows, context, num_heads)
    one_head = tuple(1 if axis == _HEAD_AXES.get(layout) else size for axis, size in enumerate(context[:-2]))
    shared = values[:-2] == one_head != context[:-2]
    if probs[:-2] != context[:-2] or not (shared or values[:-2] == context[:-2]):
        return None
    if walk.mixing is not None:
        if layout != "batch-heads" or len(walk.mixing) != num_heads or weight is None:
            return None
        # For maps before they are mixed: head h gives sum_g mixing[h, g] V_g W_g, of all values side by side.
        by_head = weight.reshape(num_heads, -1, weight.shape[1])
        unmixed = walk.mixing.astype(weight.dtype)[:, :, None, None] * by_head
        weight, d_v = unmixed.reshape(-1, weight.shape[1]), num_heads * d_v
    return Measure(
        layout=layout,
        num_heads=num_heads,
        num_kv_heads=1 if shared else num_heads // repeats,
        shared_values=shared,
        d_k=None if query is None else query[-1],
        d_v=d_v,
        output_projection=weight,
        joined_values=walk.mixing is not None,
    )


def describe_contradiction(walk: Walk, shapes: Shapes) -> str:
    """Why a site with known sizes has no measure, and what to do about it."""
    sizes = {
        name: list(shapes.get(name_of(value), ()))
        for name, value in (("map", walk.probs), ("values", walk.values), ("outputs", walk.context))
        if value is not None
    }
    probs, context = sizes.get("map", []), sizes.get("outputs", [])
    if len(context) > 4:
        return (
            f"its map has {len(probs)} axes {probs}, as those of windows of an image or of frames of a video have, "
            "and only (B, H, L, S) and (B * H, L, S) are understood: select other sites (--sites), or take a teacher "
            "whose attention spans the whole sample"
        )
    if probs[:-2] != context[:-2]:
        return (
            f"its map {probs} is one for several samples or heads, whose outputs are {context}: select other sites "
            "(--sites), as such a map is not the attention of one sample"
        )
    listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return (
        f"the number of heads cannot be determined from its sizes ({listed}): re-export with eager attention, so "
        "that the output projection reads the heads side by side, or select other sites (--sites)"
    )


def _repeat_factor(nodes: Iterable[ir.Node], shapes: Shapes) -> int | None:
    """How often value heads are repeated: elements out over elements in, on any axis; an empty past has none."""
    factor = 1
    for node in nodes:
        before, after = (
            shapes.get(name_of(value)) if (constant := constant_of(value)) is None else constant.shape
            for value in (data_inputs(node)[0], node.outputs[0])
        )
        if before is None or after is None:
            return None
        if node.op_type == "Expand" and len(before) == len(after):  # a learned value is there for every sample
            before, after = before[1:], after[1:]
        factor *= max(1, math.prod(filter(None, after)) // math.prod(filter(None, before)))
    return factor


def replay(path: Iterable[ir.Node], context: tuple[int, ...], shapes: Shapes) -> NDArray[np.int64] | None:
    """Operators that move or repeat numbers, applied to flat indices; None where that cannot be told."""
    if math.prod(context) > _MOST_INDICES:
        return None
    indices: NDArray[np.int64] = np.arange(math.prod(context)).reshape(context)
    for node in path:
        moved = _move(node, [indices] * (len(node.inputs) if node.op_type == "Concat" else 1), shapes)
        if moved is None:
            return None
        indices = moved[0]
    return indices


def _move(node: ir.Node, arrays: list[NDArray[Any]], shapes: Shapes) -> list[NDArray[Any]] | None:
    """The outputs of an operator that moves, picks or repeats numbers; None where it cannot be told."""
    array, *_ = arrays
    shape = shapes.get(name_of(node.outputs[0]))
    try:
        if node.op_type in _EVALUATED:
            return _evaluate(node, arrays)
        if node.op_type == "Split":
            axis, parts = int_attribute(node, "axis") or 0, [shapes.get(name_of(value)) for value in node.outputs]
            sizes = [output_shape[axis] for output_shape in parts if output_shape is not None]
            complete = len(sizes) == len(parts) and sum(sizes) == array.shape[axis]
            return np.split(array, np.cumsum(sizes)[:-1], axis) if complete else None
        if shape is None:
            return [array] if node.op_type not in (*MOVING_OPS, *REPEAT_OPS, *ADDING_OPS, *SCALING_OPS) else None
        if node.op_type in MOVING_OPS:
            return [array.reshape(shape)] if np.prod(shape) == array.size else None
        if node.op_type == "Expand":
            return [np.broadcast_to(array, shape)]
        if node.op_type == "Tile":
            return [np.tile(array, np.floor_divide(shape, array.shape))] if len(shape) == array.ndim else None
    except (IndexError, ValueError):  # its attributes do not fit the shapes
        return None
    return [array] if node.op_type not in ADDING_OPS | SCALING_OPS or shape == array.shape else None


def _evaluate(node: ir.Node, arrays: list[NDArray[Any]]) -> list[NDArray[Any]] | None:
    """An operator on arrays in place of what is computed; None where its other inputs are no constants."""
    inputs = [value for value in node.inputs if value is not None]
    known = {value: constant for value in inputs if (constant := constant_of(value)) is not None}
    known |= dict(zip((value for value in inputs if value not in known), arrays, strict=False))
    if len(known) < len(set(inputs)):
        return None
    try:
        return compute(node, known)
    except Exception:  # the evaluator raises what NumPy and its own operators raise
        return None


def _rows_of_terms(walk: Walk, context: tuple[int, ...], shapes: Shapes) -> list[_Rows] | None:
    """Replay what lies between the heads' outputs and the products, on flat indices and, if need be, on factors."""
    if walk.context is None or math.prod(context) > _MOST_INDICES:
        return None
    first: list[NDArray[Any]] = [np.arange(math.prod(context)).reshape(context)]
    if any(node.op_type in SCALING_OPS for node in walk.projection.path):
        first.append(np.ones(context))
    known: dict[ir.Value, list[NDArray[Any]]] = {walk.context: first}
    for node in walk.projection.path:
        sources = [known[value] for value in node.inputs if value is not None and value in known]
        moved = [made for arrays in zip(*sources, strict=True) if (made := _move(node, list(arrays), shapes))]
        if len(moved) < len(first):
            return None
        if node.op_type in SCALING_OPS:
            factor = next(array for value in node.inputs if (array := constant_of(value)) is not None)
            moved[1] = [moved[1][0] * factor if node.op_type == "Mul" else moved[1][0] / factor]
            if moved[1][0].shape != moved[0][0].shape:
                return None
        known.update(zip(node.outputs, (list(arrays) for arrays in zip(*moved, strict=True)), strict=False))
    rows = [_rows_of(term, *known[term.source]) for term in walk.projection.terms]
    return None if any(row is None for row in rows) else [row for row in rows if row is not None]


def _rows_of(term: Term, indices: NDArray[np.int64], *factors: NDArray[Any]) -> _Rows | None:
    """The rows that a product reads; a matrix a head is one matrix for the heads side by side."""
    weight, both = term.weight, [indices, *factors]
    if weight.ndim == 3:
        if indices.ndim < 3 or indices.shape[-3] != len(weight):
            return None
        both = [np.moveaxis(array, -3, -2).reshape(-1, indices.shape[-3] * indices.shape[-1]) for array in both]
        weight = weight.reshape(-1, weight.shape[-1])
    else:
        both = [np.moveaxis(array, term.axis, -1) for array in both]
    if both[0].shape[-1] != len(weight) or not both[0].size:
        return None
    both = [array.reshape(-1, len(weight)) for array in both]
    if not factors:
        return _Rows(both[0], np.ones(len(weight)), weight)
    return _Rows(both[0], both[1][0], weight) if (both[1] == both[1][0]).all() else None


def _layout(rows: list[_Rows], context: tuple[int, ...], num_heads: int) -> tuple[Layout | None, NDArray[Any] | None]:
    """The reading of the context's leading axes under which each row is all heads at one position; W_o under it."""
    indices = np.arange(np.prod(context)).reshape(context)
    batch, rest = divmod(context[0], num_heads)
    readings: dict[Layout, NDArray[np.int64]] = {}
    if len(context) == 4:
        readings = {"batch-heads": indices, "heads-batch": indices.swapaxes(0, 1)}
    elif not rest:
        readings = {
            "batch-folded": indices.reshape(batch, num_heads, *context[1:]),
            "heads-folded": indices.reshape(num_heads, batch, *context[1:]).swapaxes(0, 1),
        }
    for layout, reading in readings.items():
        if reading.shape[1] != num_heads:
            continue
        joined = reading.swapaxes(1, 2).reshape(-1, num_heads * context[-1])  # (B * L, H * d_v)
        weight = _weight_in_order(rows, joined)
        if weight is not None:
            return layout, weight
    return None, None


def _weight_in_order(rows: list[_Rows], joined: NDArray[np.int64]) -> NDArray[Any] | None:
    """W_o with a row for each column of ``joined``; None where products read other rows, or in other orders."""
    count, width = joined.shape
    row_of, column_of = np.empty((2, joined.size), dtype=np.int64)
    row_of[joined], column_of[joined] = np.arange(count)[:, None], np.arange(width)
    dtype = np.result_type(*(row.weight for row in rows))
    weight = np.zeros((width, rows[0].weight.shape[1]), dtype=np.float64)
    order = row_of[rows[0].indices[:, 0]]
    for row in rows:
        columns = column_of[row.indices[0]]
        is_same = (row_of[row.indices] == order[:, None]).all() if len(row.indices) == len(order) else False
        if not is_same or not (column_of[row.indices] == columns).all():
            return None
        # Not ``+=``, which adds a column once where a product reads it several times.
        np.add.at(weight, columns, row.factors[:, None] * row.weight)
    return weight.astype(dtype) if np.array_equal(np.sort(order), np.arange(count)) else None


DECODER_MASK: Final = "decoder_attention_mask"
"""The decoder's mask, where none is named."""


@dataclass(frozen=True)
class SiteKinds:
    """The kind of each site by number, none where there is no cross attention; ``own_keys`` are the decoder's own."""

    kinds: Mapping[int, str]
    own_keys: Collection[int] = ()
    decoder_inputs: tuple[str, ...] = ()
    decoder_mask: str | None = None

    def kind(self, site: AttentionSite) -> str | None:
        """The kind of a site; None where the graph has one alone."""
        return self.kinds.get(site.layer)

    def has_decoder_rows(self, site: AttentionSite) -> bool:
        """Whether the rows of its maps are the decoder's positions."""
        return self.kinds.get(site.layer) in ("decoder", "cross")


def find_kinds(
    model: onnx.ModelProto,
    sites: Sequence[AttentionSite],
    specs: Sequence[InputSpec] = (),
    decoder_mask: str | None = None,
) -> SiteKinds:
    """Tell the kinds of all sites of a graph apart."""
    readable = [site for site in sites if site.probs and site.values]
    crosses = [site for site in readable if site.cross]
    if not crosses:
        if decoder_mask is not None:
            raise _no_mask(decoder_mask, ())
        return SiteKinds({})
    values = values_by_name(read_graph(model))

    def upstream(tensor: str) -> frozenset[str]:
        made_of = ancestors(values[tensor]) if tensor in values else ()  # a constant is made of nothing
        return frozenset({tensor, *(value.name or "" for value in made_of)})

    below = [upstream(site.values) for site in crosses]  # what keys and values of cross attention are made from
    encoder_tensors = frozenset().union(*below)
    cross_maps = {site.probs for site in crosses}
    sequences = [spec.name for spec in specs if len(spec.shape) > 1]
    # A mask that only the logits read belongs to the inputs that are as long by name.
    lengths = {spec.shape[1] for spec in specs if spec.name in encoder_tensors and len(spec.shape) > 1} - {None}
    others = [name for name in sequences if name not in encoder_tensors and not name.startswith("encoder_")]
    # A number may be both sequences' length by chance; a name is one of them.
    lengths -= {s.shape[1] for s in specs if s.name in others and s.part != "mask" and isinstance(s.shape[1], int)}
    masks = {spec.name for spec in specs if spec.part == "mask" and spec.shape[1] in lengths}
    decoder = tuple(sorted(n for n in others if n not in masks or n.startswith("decoder_")))
    kinds: dict[int, str] = {}
    for site in readable:
        made_of = upstream(site.probs)
        if site.cross:
            kinds[site.layer] = "cross"
        elif not cross_maps.isdisjoint(made_of):
            kinds[site.layer] = "decoder"
        else:
            # Beside the encoder, as another branch on its inputs; the decoder's rows may be learned queries.
            is_beside = made_of.isdisjoint(decoder) and not made_of.isdisjoint(sequences)
            kinds[site.layer] = "encoder" if site.probs in encoder_tensors or is_beside else "decoder"
    own_keys = {s.layer for s, tensors in zip(crosses, below, strict=True) if not cross_maps.isdisjoint(tensors)}
    decoder_masks = [s.name for s in specs if s.name in decoder and len(s.shape) == 2 and s.part == "mask"]
    if decoder_mask is None:
        decoder_mask = DECODER_MASK if DECODER_MASK in decoder_masks else None
    elif decoder_mask not in [s.name for s in specs if s.name in decoder and len(s.shape) == 2]:
        raise _no_mask(decoder_mask, decoder_masks)
    return SiteKinds(kinds, own_keys, decoder, decoder_mask)


def _no_mask(name: str, masks: Sequence[str]) -> ShdError:
    return inputs_invalid(
        f"decoder_mask must be a (B, L) input that the decoder's rows alone depend on, {list(masks)}; got {name!r}"
    )
