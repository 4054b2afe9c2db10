"""Which sites of a teacher teach which layers of the student, kind by kind where attention is of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from shd_ref.cache.forms.attention import KINDS, KindLayers
from shd_ref.errors import ShdError, argument_value, graph_unsupported
from shd_ref.layers import layer_map
from shd_ref.teacher.graph.factors import SiteFactors, find_factors
from shd_ref.teacher.graph.find import AttentionSite, SiteKinds, select_sites
from shd_ref.teacher.opening.model import onnx
from shd_ref.teacher.rewrite.squeeze import check_sinks

if TYPE_CHECKING:
    from shd_ref.teacher.options import PrecomputeOptions


Chosen: TypeAlias = tuple[tuple[int, AttentionSite], ...]
MaskOf: TypeAlias = Callable[[AttentionSite], str | None]


def choose_layers(
    sites: Sequence[AttentionSite], kinds: SiteKinds, options: PrecomputeOptions
) -> tuple[Chosen, int | None, tuple[KindLayers, ...]]:
    """The sites by student layer, how many layers the student was meant to have, and how many of each kind."""
    if not options.has_attention:
        return (), None, ()
    if not sites:
        raise graph_unsupported(
            "teacher graph must hold an attention site (a softmax whose map multiplies values); found none: "
            "export the model with eager attention, or store only its logits (--no-attention)"
        )
    if options.sites is not None and options.layer_pairs is not None:
        raise argument_value("sites must not be given with layer pairs, which select sites themselves", "LAYER-4")
    selected = select_sites(sites, options.sites)
    counts: tuple[KindLayers, ...] = ()
    meant = options.num_student_layers
    if options.layer_pairs is not None:
        if isinstance(meant, Mapping):
            raise ShdError(
                "layers-invalid",
                f"num_student_layers must be one number with pairs, which count all calls; got {dict(meant)}",
                "CACHE-105",
            )
        pairs = options.layer_pairs
        count = 1 + max((student for student, _ in pairs), default=0) if meant is None else meant
        chosen = tuple((student, sites[teacher]) for student, teacher in layer_map(len(sites), count, pairs))
    elif kinds.kinds:
        chosen, counts = _choose_by_kind(selected, kinds, meant)
        meant = sum(kind.num_student_layers for kind in counts)
    else:
        if isinstance(meant, Mapping):
            raise ShdError(
                "layers-invalid",
                f"num_student_layers must be one number, as the graph has no cross attention; got {dict(meant)}",
                "CACHE-105",
            )
        meant = len(selected) if meant is None else meant
        if meant > len(selected):
            raise ShdError(
                "layers-invalid",
                f"num_student_layers must be at most {len(selected)}, the number of attention sites; got {meant}: "
                "leave layers out with --layer-pairs",
                "LAYER-2",
            )
        chosen = tuple((student, selected[teacher]) for student, teacher in layer_map(len(selected), meant))
    for _, site in chosen:
        if not site.supported:
            raise graph_unsupported(f"{site.label} cannot be squeezed: {site.reason} (or select other sites)")
    return chosen, meant, counts


def _choose_by_kind(
    sites: Sequence[AttentionSite], kinds: SiteKinds, meant: int | Mapping[str, int] | None
) -> tuple[Chosen, tuple[KindLayers, ...]]:
    """A layer map for each kind; student layers are numbered kind after kind (CACHE-105)."""
    of_kind = {kind: [site for site in sites if kinds.kind(site) == kind] for kind in KINDS}
    held = {kind: len(members) for kind, members in of_kind.items() if members}
    if isinstance(meant, int) and len(held) == 1:
        meant = dict.fromkeys(held, meant)
    if isinstance(meant, int) or (meant is not None and not (meant and meant.keys() <= held.keys())):
        example = ",".join(f"{kind}={count}" for kind, count in held.items())
        raise ShdError(
            "layers-invalid",
            f"num_student_layers must be a number for each kind of attention that is taught, of {', '.join(held)}, "
            f"as the graph has cross attention; got {meant if isinstance(meant, int) else dict(meant)}: give "
            f"--student-layers {example}, or choose one kind with --sites",
            "CACHE-105",
        )
    chosen: list[tuple[int, AttentionSite]] = []
    counts: list[KindLayers] = []
    for kind in KINDS:
        if kind not in (held if meant is None else meant):
            continue
        number = held[kind] if meant is None else meant[kind]
        before = sum(entry.num_student_layers for entry in counts)
        pairs = layer_map(held[kind], number)
        chosen += [(before + student, of_kind[kind][teacher]) for student, teacher in pairs]
        counts.append(KindLayers(kind, number))
    return tuple(chosen), tuple(counts)


def common_heads(layers: Chosen) -> int:
    """H of all layers; 0 without any, refused where they differ."""
    heads = {site.num_heads for _, site in layers}
    if layers and (len(heads) != 1 or None in heads):
        raise graph_unsupported(
            f"the layers must share one number of heads, as one plan serves all; got {sorted(map(str, heads))}"
        )
    return int(heads.pop() or 0) if layers else 0


def check_lengths(layers: Chosen, mask_of_rows: MaskOf, mask_of_keys: MaskOf) -> None:
    """Refuse maps that have other rows or keys than the mask that says which of them count."""
    for _, site in layers:
        masks = (("rows", site.row_inputs, mask_of_rows), ("keys", site.key_inputs, mask_of_keys))
        for axis, inputs, mask_of in masks:
            mask = mask_of(site)
            if mask is not None and inputs is not None and mask not in inputs:
                raise graph_unsupported(
                    f"{site.label} must have as many {axis} as {mask} has positions, but tokens are joined to the "
                    "sequence inside the graph (a class token, registers), or it is made shorter: export a wrapper "
                    "whose inputs and mask have a position for each of them, such as a placeholder in front, or "
                    "select other sites (--sites)"
                )


def choose_stored(
    model: onnx.ModelProto, layers: Chosen, kinds: SiteKinds, options: PrecomputeOptions
) -> tuple[SiteFactors, ...]:
    """Queries and keys of the layers where these are stored; refuse a form or a codec that cannot hold the layers."""
    for _, site in layers:
        if options.is_factored and kinds.kinds and kinds.kind(site) != "encoder":
            raise graph_unsupported(
                f"{site.label} cannot be stored as queries and keys: its rows are those of a decoder with cross "
                "attention (--form maps)",
                "CACHE-128",
            )
        check_sinks(site, "float32" if options.is_factored else options.codec, options.temperature)
    stored = find_factors(model, [site for _, site in layers]) if options.is_factored else ()
    for factors in stored:
        reason = factors.reason if factors.scale > 0 or not factors.supported else f"its scale is {factors.scale:g}"
        if reason is not None:
            raise graph_unsupported(
                f"{factors.site.label} cannot be stored as queries and keys: {reason} (--form maps)", "CACHE-143"
            )
    return stored
