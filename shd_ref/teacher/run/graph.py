"""A teacher's graph, and what a run asks of it: which sites teach which layers, and what stands beside attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from shd_ref.cache.forms.attention import KINDS, KindLayers
from shd_ref.errors import ShdError, argument_value, graph_unsupported
from shd_ref.layers import layer_map
from shd_ref.teacher.graph.factors import SiteFactors, choose_stored
from shd_ref.teacher.graph.find import AttentionSite, SiteKinds, find_kinds, find_sites, select_sites
from shd_ref.teacher.graph.inputs import TOO_MUCH, input_specs
from shd_ref.teacher.graph.targets import GraphHead, TargetTensors, choose_targets, dtype_of
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
        specs, sites = input_specs(model), find_sites(model)
        endless = next((site.reason for site in sites if site.reason and TOO_MUCH in site.reason), None)
        if endless is not None:  # also where no attention is asked for
            raise graph_unsupported(endless)
        kinds = find_kinds(model, sites, specs, decoder_mask)
        selected = select_sites(sites, options.sites) if sites and options.has_attention else ()
        layers, meant, counts = choose_layers(sites, selected, kinds, options)
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


def choose_layers(
    sites: Sequence[AttentionSite], selected: Sequence[AttentionSite], kinds: SiteKinds, options: PrecomputeOptions
) -> tuple[Chosen, int | None, tuple[KindLayers, ...]]:
    """The sites by student layer, how many layers the student was meant to have, and how many of each kind."""
    if not options.has_attention:
        return (), None, ()
    if not sites:
        raise graph_unsupported(
            "teacher graph must hold an attention site (a softmax whose map multiplies values); found none: "
            "export the model with eager attention, or store only its logits (--no-attention)"
        )
    pairs, meant = options.layer_pairs, options.num_student_layers
    if options.sites is not None and pairs is not None:
        raise argument_value("sites must not be given with layer pairs, which select sites themselves", "LAYER-4")
    counts: tuple[KindLayers, ...] = ()
    if pairs is None and kinds.kinds:
        chosen, counts = _choose_by_kind(selected, kinds, meant)
        meant = sum(kind.num_student_layers for kind in counts)
    elif isinstance(meant, Mapping):
        why = "as the graph has no cross attention" if pairs is None else "as pairs count all calls"
        message = f"num_student_layers must be one number, {why}; got {dict(meant)}"
        raise ShdError("layers-invalid", message, "CACHE-105")
    else:
        taught = selected if pairs is None else sites
        count = len(taught) if pairs is None else 1 + max((student for student, _ in pairs), default=0)
        count = count if meant is None else meant
        if pairs is None and count > len(taught):
            rule = f"num_student_layers must be at most {len(taught)}, the number of attention sites"
            raise ShdError("layers-invalid", f"{rule}; got {count}: leave layers out with --layer-pairs", "LAYER-2")
        chosen = tuple((student, taught[teacher]) for student, teacher in layer_map(len(taught), count, pairs))
        meant = count if pairs is None else meant
    for _, site in chosen:
        if not site.supported:
            raise graph_unsupported(f"{site.label} cannot be squeezed: {site.reason} (or select other sites)")
    heads = {site.num_heads or 0 for _, site in chosen}
    if len(heads) > 1 or 0 in heads:
        rule = "the layers must share one number of heads, as one plan serves all"
        raise graph_unsupported(f"{rule}; got {sorted(heads)}")
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
