"""A teacher's graph, and what a run asks of it: which sites teach which layers, and what stands beside attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from shd_ref.cache.forms.attention import KINDS, KindLayers
from shd_ref.errors import ShdError, argument_value, graph_unsupported, need
from shd_ref.layers import layer_map
from shd_ref.teacher.graph.factors import SiteFactors, check_sinks, find_factors
from shd_ref.teacher.graph.find import AttentionSite, SiteKinds, find_kinds, find_sites, select_sites
from shd_ref.teacher.graph.inputs import TOO_MUCH, input_specs
from shd_ref.teacher.graph.targets import GraphHead, TargetTensors, dtype_of, find_targets
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.opening.model import Weights, hash_teacher, onnx, take_weights
from shd_ref.teacher.options import PrecomputeOptions, check_options
from shd_ref.teacher.run.inputs import ModelInputs
from shd_ref.teacher.session import run_beside

Chosen: TypeAlias = tuple[tuple[int, AttentionSite], ...]


@dataclass(frozen=True, eq=False)
class TeacherGraph:
    """A teacher's graph, and what of it the options of a run ask for.

    Attributes:
        path, sha256: of the file; the hash of it and of its external data, waited for when asked for.
        model, bare, weights: the graph; the same without its large weights; these, which all sessions share.
        sites, site_kinds: all its attention, supported or not, and what kind of attention each is.
        options: of the first student; those of others differ in heads and plans alone.
        layers, factors: ``(student_layer, site)`` pairs; the queries and keys of each, empty where maps are kept.
        num_student_layers, kinds: L_s and calls of each kind, where explicit pairs do not leave them open.
        num_heads: H of all layers; 0 without any.
        targets: what is asked for beside attention.
    """

    path: Path
    sha256: Callable[[], str]
    model: onnx.ModelProto
    bare: onnx.ModelProto
    weights: Weights
    sites: tuple[AttentionSite, ...]
    site_kinds: SiteKinds
    options: PrecomputeOptions
    layers: Chosen
    num_student_layers: int | None
    kinds: tuple[KindLayers, ...]
    factors: tuple[SiteFactors, ...]
    num_heads: int
    targets: TargetTensors

    @classmethod
    def open(
        cls, path: Path, options: PrecomputeOptions, decoder_mask: str | None = None, callers: int = 0
    ) -> TeacherGraph:
        """Load a file that is not trusted, find its attention, and choose what the options ask for."""
        model = load_teacher(path)
        # Beside the walk over the graph. Errors need not wait for it: it takes seconds per gigabyte.
        sha256 = run_beside(functools.partial(hash_teacher, path), callers, daemon=True)
        sites = find_sites(model)
        endless = next((site.reason for site in sites if site.reason and TOO_MUCH in site.reason), None)
        if endless is not None:  # also where no attention is asked for
            raise graph_unsupported(endless)
        kinds = find_kinds(model, sites, input_specs(model), decoder_mask)
        layers, meant, counts = choose_layers(sites, kinds, options)
        targets = choose_targets(model, sites, kinds, options)
        factors = choose_stored(model, layers, kinds, options)
        bare, weights = take_weights(model)
        return cls(
            path=path,
            sha256=sha256,
            model=model,
            bare=bare,
            weights=weights,
            sites=sites,
            site_kinds=kinds,
            options=options,
            layers=layers,
            num_student_layers=meant,
            kinds=counts,
            factors=factors,
            num_heads=max((site.num_heads or 0 for _, site in layers), default=0),
            targets=targets,
        )

    def storing(self, options: PrecomputeOptions) -> TeacherGraph:
        """The same layers and targets, stored in another way."""
        check_options(options)
        factors = choose_stored(self.model, self.layers, self.site_kinds, options)
        return replace(self, options=options, factors=factors)

    @property
    def head(self) -> GraphHead | None:
        """The head that ``exact`` targets keep."""
        return self.targets.head

    @property
    def has_decoder_rows(self) -> bool:
        """Whether rows of logits and hidden states are positions of a decoder, beside an encoder's."""
        return bool(self.site_kinds.kinds)

    @property
    def dtype(self) -> str:
        return dtype_of(self.model, [site for _, site in self.layers], self.targets)

    def masks_of(self, inputs: ModelInputs) -> dict[int, tuple[str | None, str | None]]:
        """By site the inputs that say which rows, and which keys, of its maps count; None where all do.

        Maps that have other rows or keys than their mask has positions are refused.
        """
        masks = {}
        for _, site in self.layers:
            kind = self.site_kinds.kind(site)
            rows = inputs.decoder_mask if kind in ("decoder", "cross") else inputs.mask
            keys = inputs.decoder_mask if kind == "decoder" else inputs.mask
            masks[site.layer] = rows, None if site.layer in self.site_kinds.own_keys else keys
            read = site.row_inputs, site.key_inputs
            for axis, mask, sources in zip(("rows", "keys"), masks[site.layer], read, strict=True):
                if mask is not None and sources is not None and mask not in sources:
                    raise graph_unsupported(
                        f"{site.label} must have as many {axis} as {mask} has positions, but tokens are joined to "
                        "the sequence inside the graph (a class token, registers), or it is made shorter: export a "
                        "wrapper whose inputs and mask have a position for each of them, such as a placeholder in "
                        "front, or select other sites (--sites)"
                    )
        return masks


def choose_targets(
    model: onnx.ModelProto, sites: Sequence[AttentionSite], kinds: SiteKinds, options: PrecomputeOptions
) -> TargetTensors:
    """What the options ask for beside attention."""
    of_decoder = bool(kinds.kinds)
    own = [site for site in sites if kinds.kind(site) in (None, "decoder")]
    if options.hidden_layers and of_decoder and not (own and kinds.decoder_inputs):
        raise graph_unsupported(
            "hidden states of a graph with cross attention are those of its decoder, which must have "
            "self-attention and inputs for its sequence; this graph lacks them: store its attention and logits, "
            "and run the teacher beside the student (OnlineTeacher) for hidden states",
            "CACHE-175",
        )
    if options.embeddings is not None and of_decoder:
        raise graph_unsupported(
            "embeddings are made of a single sequence, and this graph has a second one, of its decoder: export "
            "the encoder alone",
            "CACHE-181",
        )
    return find_targets(
        model,
        own,
        logits=options.logits != "none",
        output=options.logits_output,
        hidden=options.hidden_layers,
        pooled=options.embeddings is not None,
        exact=options.exact,
        of_decoder=of_decoder,
    )


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
    meant = options.num_student_layers
    pairs = options.layer_pairs
    if pairs is None and kinds.kinds:
        chosen, counts = _choose_by_kind(selected, kinds, meant)
        return _supported(chosen), sum(kind.num_student_layers for kind in counts), counts
    if isinstance(meant, Mapping):
        why = "as the graph has no cross attention" if pairs is None else "as pairs count all calls"
        message = f"num_student_layers must be one number, {why}; got {dict(meant)}"
        raise ShdError("layers-invalid", message, "CACHE-105")
    if pairs is not None:
        count = 1 + max((student for student, _ in pairs), default=0) if meant is None else meant
        given = tuple((student, sites[teacher]) for student, teacher in layer_map(len(sites), count, pairs))
        return _supported(given), meant, ()
    meant = len(selected) if meant is None else meant
    rule = f"be at most {len(selected)}, the number of attention sites"
    got = f"{meant}: leave layers out with --layer-pairs"
    need(meant <= len(selected), "layers-invalid", "num_student_layers", rule, got, spec_id="LAYER-2")
    chosen = tuple((student, selected[teacher]) for student, teacher in layer_map(len(selected), meant))
    return _supported(chosen), meant, ()


def _supported(chosen: Chosen) -> Chosen:
    for _, site in chosen:
        if not site.supported:
            raise graph_unsupported(f"{site.label} cannot be squeezed: {site.reason} (or select other sites)")
    heads = {site.num_heads or 0 for _, site in chosen}
    rule = "share one number of heads, as one plan serves all"
    need(len(heads) < 2 and 0 not in heads, "graph-unsupported", "the layers", rule, sorted(heads))
    return chosen


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
