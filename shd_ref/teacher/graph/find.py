"""Find the attention of a teacher's ONNX graph by following data, not by matching patterns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, argument_value, graph_invalid, graph_unsupported
from shd_ref.teacher.graph.flow.walk import Walk, walk_graph
from shd_ref.teacher.graph.independence import Finding, probe_samples
from shd_ref.teacher.graph.measure import Layout, Measure, describe_contradiction, measure_site
from shd_ref.teacher.graph.nodes import dtype_name, int_attribute, name_of
from shd_ref.teacher.graph.shapes import Shapes, probe_shapes, static_shapes
from shd_ref.teacher.opening.bounds import check_inferred
from shd_ref.teacher.opening.load import old_opset_reason
from shd_ref.teacher.opening.model import infer_shapes, read_graph
from shd_ref.teacher.packages import onnx

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
            shapes = probe_shapes(model, sorted(names))
        except ShdError as error:
            probe_error = str(error)
        else:
            measures = [measure_site(walk, shapes) for walk in walks]
    too_old = old_opset_reason(model)
    if too_old is not None:
        walks = [replace(walk, reason=walk.reason or too_old) for walk in walks]
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
