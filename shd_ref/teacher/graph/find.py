"""Find the attention of a teacher's ONNX graph by following data, not by matching patterns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.forms.attention import KINDS, KindLayers
from shd_ref.errors import ShdError, argument_value, graph_unsupported
from shd_ref.layers import layer_map
from shd_ref.teacher.graph.inputs import InputSpec, Shapes, probe_tensors
from shd_ref.teacher.graph.measure import Measure, describe_contradiction, measure_site, static_shapes
from shd_ref.teacher.graph.walk import Walk, ancestors, walk_graph
from shd_ref.teacher.opening.model import MIN_OPSET, OLD_OPSET, infer_shapes, ir, onnx, opset_version, read_graph
from shd_ref.teacher.options import PrecomputeOptions

_LARGEST_WEIGHT: Final = 1e15
"""Gram matrices hold products of two weights in float32, up to 3.4e38: 1e30 leaves their sums a factor of 1e8."""


@dataclass(frozen=True, kw_only=True)
class AttentionSite(Measure):
    """One attention block of a teacher graph, with H heads.

    Attributes:
        layer, name: position among the sites, from 0; name of the softmax (or fused operator) node, made unique.
        op_type: ``"Softmax"``, ``"Div"`` or ``"Exp"`` for one written out, or the fused operator.
        walk: its tensors in the graph, with all that leads to them and away.
        logits, probs, values, context: names of the input of the softmax, of the map, of V as the product reads it,
            and of the product; empty where ``supported`` is False and none exists.
        layout: how the map's and V's leading axes hold samples and heads; None where unknown.
        num_kv_heads, value_heads: value heads before they are repeated for grouped queries; of each head the first
            that has the same values.
        shared_values: V has a single head, which the product broadcasts to all.
        joined_values: every head reads the values of all, side by side, since maps are mixed among heads after the
            softmax by a constant (talking heads); the constant is part of W_o, and maps are those of the softmax.
        d_k, d_v, d_model: widths of a query head, of a value head (or of all, joined), and D, columns of W_o.
        dtype: of the map, such as ``"float32"``; None where shape inference leaves it open.
        cross: True where queries and keys come from different tensors; None where undecided.
        row_sums: ``"one"``, or ``"at_most_one"`` where attention sinks take part of a row's mass (MAP-9).
        output_projection: W_o ``(H * d_v, D)``, rows in head order, float32 or float64.
        supported, reason: whether ``squeeze_graph`` can squeeze this site; why not, and the remedy.
    """

    layer: int
    name: str
    op_type: str
    walk: Walk = field(repr=False, compare=False)
    logits: str = ""
    probs: str = ""
    values: str = ""
    context: str = ""
    d_model: int | None = None
    dtype: str | None = None
    cross: bool | None = None
    row_sums: str = "one"
    supported: bool = False
    reason: str | None = None

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"attention site {self.layer} ({self.name})"


def find_sites(model: onnx.ModelProto) -> tuple[AttentionSite, ...]:
    """Every attention site of a graph, in the order in which data flows; an unsupported one has its ``reason``.

    Shapes come from ONNX shape inference; where that leaves the heads undecided, one probe run with tiny inputs
    measures them. A softmax that never meets a product (a classifier's, a router's) is not a site. Whether the maps
    are those of single samples, precompute finds on its data.

    Args:
        model: a graph without local functions, see ``load_teacher``; not changed.

    Raises:
        ShdError: ``graph-invalid`` for a graph that is not well formed.
    """
    inferred = infer_shapes(model)  # a graph that inference rejects can still be probed
    opset = opset_version(model)
    graph = read_graph(model, inferred)
    walks = list(walk_graph(graph))
    shapes: Shapes = static_shapes(inferred)
    measures = [measure_site(walk, shapes) for walk in walks]
    probe_error = None
    # Symbolic sizes can mislead; only heads that fit exactly are accepted without a probe.
    if any(w.reason is None and (m is None or m.layout is None) for w, m in zip(walks, measures, strict=True)):
        names = {name for walk in walks if walk.reason is None for name in walk.tensors()}
        try:
            _, shapes = probe_tensors(model, (), names)
        except ShdError as error:
            probe_error = f"the number of heads cannot be determined: {error}"
        else:
            measures = [measure_site(walk, shapes) for walk in walks]
    sites: list[AttentionSite] = []
    for layer, (walk, measure) in enumerate(zip(walks, measures, strict=True)):
        name = walk.node.name or f"{walk.node.op_type}_{layer}"
        while any(site.name == name for site in sites):
            name = f"{name}_{layer}"
        reason = walk.reason or (OLD_OPSET.format(opset) if opset < MIN_OPSET else None)
        if reason is None:
            reason = _why_unfit(measure) if measure else probe_error or describe_contradiction(walk, shapes)
        sites.append(_site(layer, name, walk, measure, reason))
    return tuple(sites)


def _why_unfit(measure: Measure) -> str | None:
    if measure.layout is None:
        return "the output projection reads only a part of the heads' outputs: re-export with eager attention"
    weight = measure.output_projection
    if weight is not None and not (np.abs(weight) < _LARGEST_WEIGHT).all():
        return "its output projection holds NaN or numbers beyond reason: copy or export the model again"
    return None


def _site(layer: int, name: str, walk: Walk, measure: Measure | None, reason: str | None) -> AttentionSite:
    if measure is None:  # a fused operator's attributes: num_heads in com.microsoft, q_num_heads in ONNX
        head_counts = [walk.node.attributes.get_int(key) for key in ("num_heads", "q_num_heads", "kv_num_heads")]
        measure = Measure(num_heads=head_counts[0] or head_counts[1], num_kv_heads=head_counts[2])
    logits, probs, values, context = (
        "" if value is None else str(value.name) for value in (walk.logits, walk.probs, walk.values, walk.context)
    )
    kind = None if walk.probs is None or walk.probs.dtype is None else walk.probs.dtype
    return AttentionSite(
        layer=layer,
        name=name,
        op_type=walk.node.op_type,
        logits=logits,
        probs=probs,
        values=values,
        context=context,
        d_model=int(walk.projection.terms[0].weight.shape[-1]) if walk.projection.terms else None,
        dtype=None if kind is None else str(kind.numpy().name),
        cross=walk.cross,
        row_sums="at_most_one" if walk.sinks else "one",
        supported=reason is None,
        reason=reason,
        walk=walk,
        **vars(measure),
    )


def projection_of(site: AttentionSite) -> NDArray[Any]:
    if site.output_projection is None:
        raise graph_unsupported(f"site {site.name} cannot be squeezed: it has no output projection")
    return site.output_projection


def select_sites(sites: Sequence[AttentionSite], selection: str | None) -> tuple[AttentionSite, ...]:
    """The sites that a selection such as ``0,2,4-7``, ``encoder*``, ``self`` or ``cross`` names, in order, each once.

    None selects all; ``argument-value`` for a part that names none.
    """
    if selection is None:
        return tuple(sites)
    chosen: set[int] = set()
    for term in (term.strip() for term in selection.split(",")):
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


DECODER_MASK: Final = "decoder_attention_mask"
"""The decoder's mask, as exporters name it."""


@dataclass(frozen=True)
class SiteKinds:
    """The kind of each site by number, none where there is no cross attention.

    ``own_keys`` are the cross sites that read the decoder's keys, which the encoder's mask does not cover.
    """

    kinds: Mapping[int, str]
    own_keys: Collection[int] = ()
    decoder_inputs: tuple[str, ...] = ()
    decoder_mask: str | None = None

    def kind(self, site: AttentionSite) -> str | None:
        """The kind of a site; None where the graph has one alone."""
        return self.kinds.get(site.layer)


def find_kinds(sites: Sequence[AttentionSite], specs: Sequence[InputSpec]) -> SiteKinds:
    """The kinds of all sites, from the tensors that each map is computed from and ``specs`` of the graph's inputs."""
    readable = [site for site in sites if site.walk.probs is not None and site.walk.values is not None]
    cross_maps = {site.probs for site in readable if site.cross}
    if not cross_maps:
        return SiteKinds({})
    # Cross attention reads its values from the encoder, so their sources are the encoder's tensors.
    value_sources = {site.layer: _sources(site.walk.values) for site in readable if site.cross}
    encoder_tensors = frozenset().union(*value_sources.values())
    decoder_inputs = _find_decoder_inputs(specs, encoder_tensors)
    sequences = {spec.name for spec in specs if len(spec.shape) > 1}

    def kind_of(site: AttentionSite) -> str:
        if site.cross:
            return "cross"
        sources = _sources(site.walk.probs)
        if cross_maps & sources:
            return "decoder"
        # Another branch on the encoder's inputs. A map of no sequence at all is the decoder's: learned queries.
        is_branch = bool(sequences & sources) and sources.isdisjoint(decoder_inputs)
        return "encoder" if site.probs in encoder_tensors or is_branch else "decoder"

    # Values made behind another cross attention are the decoder's.
    own_keys = {layer for layer, sources in value_sources.items() if cross_maps & sources}
    masks = {spec.name for spec in specs if spec.part == "mask"}
    decoder_mask = DECODER_MASK if DECODER_MASK in masks.intersection(decoder_inputs) else None
    return SiteKinds({site.layer: kind_of(site) for site in readable}, own_keys, decoder_inputs, decoder_mask)


def check_kinds(sites: Sequence[AttentionSite], specs: Sequence[InputSpec], kinds: SiteKinds) -> None:
    """Refuse a graph of two sequences, by the names of its inputs, whose cross attention was not read."""
    unread = [site for site in sites if site.cross is None]
    of_decoder = {spec.name.startswith("decoder_") for spec in specs if len(spec.shape) > 1 and spec.part != "past"}
    if unread and len(of_decoder) == 2 and not kinds.kinds:
        site, rule = unread[0], "masks of two sequences must be those of their sites"
        why = site.reason or "its queries and keys were not found"
        raise graph_unsupported(f"{rule}; {site.label} may be cross attention: {why}", "CACHE-105")


def _sources(tensor: ir.Value | None) -> frozenset[str]:
    return frozenset() if tensor is None else frozenset(str(value.name) for value in ancestors(tensor))


def _find_decoder_inputs(specs: Sequence[InputSpec], encoder_tensors: Collection[str]) -> tuple[str, ...]:
    sequences = [spec for spec in specs if len(spec.shape) > 1]
    others = [spec for spec in sequences if spec.name not in encoder_tensors and not spec.name.startswith("encoder_")]
    # The encoder's mask may reach the logits alone, so no value comes from it: it has the encoder's length, by name.
    lengths = {spec.shape[1] for spec in sequences if spec.name in encoder_tensors} - {None}
    # A number may be both sequences' length by chance; a name is one of them.
    lengths -= {spec.shape[1] for spec in others if spec.part != "mask" and isinstance(spec.shape[1], int)}
    masks = {spec.name for spec in others if spec.part == "mask" and spec.shape[1] in lengths}
    return tuple(sorted({spec.name for spec in others if spec.name not in masks or spec.name.startswith("decoder_")}))


Chosen: TypeAlias = tuple[tuple[int, AttentionSite], ...]
"""Student layers with the sites that teach them."""


def choose_layers(
    sites: Sequence[AttentionSite], selected: Sequence[AttentionSite], kinds: SiteKinds, options: PrecomputeOptions
) -> tuple[Chosen, int | None, tuple[KindLayers, ...]]:
    """The sites by student layer, the student's number of layers (None where pairs leave it open), and by kind."""
    if not options.has_attention:
        return (), None, ()
    if not sites:
        raise graph_unsupported(
            "teacher graph must hold an attention site (a softmax whose map multiplies values); found none: export "
            "it with eager attention, or store only its logits (--no-attention)"
        )
    pairs, num_layers = options.layer_pairs, options.num_student_layers
    if options.sites is not None and pairs is not None:
        raise argument_value("sites must not be given with layer pairs, which select sites themselves", "LAYER-4")
    counts: tuple[KindLayers, ...] = ()
    if pairs is None and kinds.kinds:
        # A site whose map was not found has no kind, and would be left out without a word.
        _check_supported(site for site in selected if kinds.kind(site) is None)
        chosen, counts = _choose_by_kind(selected, kinds, num_layers)
        num_layers = sum(kind.num_student_layers for kind in counts)
    elif isinstance(num_layers, Mapping):
        why = "as the graph has no cross attention" if pairs is None else "as pairs count all calls"
        message = f"num_student_layers must be one number, {why}; got {dict(num_layers)}"
        raise ShdError("layers-invalid", message, "CACHE-105")
    else:
        teachers = selected if pairs is None else sites  # pairs count all sites
        count = len(teachers) if pairs is None else 1 + max((student for student, _ in pairs), default=0)
        count = count if num_layers is None else num_layers
        if pairs is None and count > len(teachers):
            rule = f"num_student_layers must be at most {len(teachers)}, the number of attention sites"
            raise ShdError("layers-invalid", f"{rule}; got {count}: leave layers out with --layer-pairs", "LAYER-2")
        chosen = tuple((student, teachers[teacher]) for student, teacher in layer_map(len(teachers), count, pairs))
        num_layers = count if pairs is None else num_layers
    _check_supported(site for _, site in chosen)
    heads = {site.num_heads or 0 for _, site in chosen}
    if len(heads) > 1 or 0 in heads:
        rule = "the layers must share one number of heads, as one plan serves all"
        raise graph_unsupported(f"{rule}; got {sorted(heads)}")
    return chosen, num_layers, counts


def _check_supported(sites: Iterable[AttentionSite]) -> None:
    for site in sites:
        if not site.supported:
            raise graph_unsupported(f"{site.label} cannot be squeezed: {site.reason} (or select other sites)")


def _choose_by_kind(
    sites: Sequence[AttentionSite], kinds: SiteKinds, num_layers: int | Mapping[str, int] | None
) -> tuple[Chosen, tuple[KindLayers, ...]]:
    """A layer map for each kind; student layers are numbered kind after kind (CACHE-105)."""
    of_kind = {kind: [site for site in sites if kinds.kind(site) == kind] for kind in KINDS}
    numbers = {kind: len(members) for kind, members in of_kind.items() if members}
    if isinstance(num_layers, int) and len(numbers) == 1:
        num_layers = dict.fromkeys(numbers, num_layers)
    if isinstance(num_layers, int) or (
        num_layers is not None and not (num_layers and num_layers.keys() <= numbers.keys())
    ):
        example = ",".join(f"{kind}={count}" for kind, count in numbers.items())
        got = num_layers if isinstance(num_layers, int) else dict(num_layers)
        rule = f"be a number for each kind of attention that is taught, of {', '.join(numbers)}"
        remedy = f"give --student-layers {example}, or choose one kind with --sites"
        message = f"num_student_layers must {rule}; got {got}: {remedy}"
        raise ShdError("layers-invalid", message, "CACHE-105")
    chosen: list[tuple[int, AttentionSite]] = []
    counts: list[KindLayers] = []
    layers = numbers if num_layers is None else num_layers
    for kind in (kind for kind in KINDS if kind in layers):
        offset = sum(entry.num_student_layers for entry in counts)
        pairs = layer_map(numbers[kind], layers[kind])
        chosen += [(offset + student, of_kind[kind][teacher]) for student, teacher in pairs]
        counts.append(KindLayers(kind, layers[kind]))
    return tuple(chosen), tuple(counts)
