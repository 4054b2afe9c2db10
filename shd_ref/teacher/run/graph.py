"""A teacher's graph with all that a run needs, and sessions of onnxruntime that run it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.forms.attention import KindLayers, TokenGroups
from shd_ref.errors import ShdError, argument_value, graph_unsupported
from shd_ref.merging.plans import MergePlan
from shd_ref.teacher.graph.factors import SiteFactors, choose_stored
from shd_ref.teacher.graph.find import (
    AttentionSite,
    Chosen,
    SiteKinds,
    check_kinds,
    choose_layers,
    find_kinds,
    find_sites,
    select_sites,
)
from shd_ref.teacher.graph.inputs import TOO_MUCH, InputSpec, count_rows, frozen_specs, input_specs, read_pads
from shd_ref.teacher.graph.targets import TargetTensors, dtype_of, find_targets
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.opening.model import Weights, hash_teacher, onnx, shares_scales, take_weights
from shd_ref.teacher.options import PrecomputeOptions, check_options
from shd_ref.teacher.rewrite.squeeze import GROUPS_INPUT, SqueezedGraph, squeeze_graph
from shd_ref.teacher.rewrite.tiles import Tiling
from shd_ref.teacher.run.averaged import OtherTeacher, join_graphs, open_others
from shd_ref.teacher.run.inputs import Batch, ModelInputs, run_batch
from shd_ref.teacher.session import is_cpu, open_session, run_in_background
from shd_ref.tokens import id_groups, patch_groups


@dataclass(frozen=True, eq=False)
class TeacherGraph:
    """A teacher's graph, and the parts of it that the options of a run request.

    Attributes:
        path, sha256: of the file; the hash of it and of its external data, computed in the background.
        model, bare, weights: the graph; the same without its large weights; these, which all sessions share.
        runs_alone: whether samples that run together would share the scales that round them.
        specs, rows, pads: its inputs, with groups of tokens where maps are pooled; of some inputs the
            rows of the table that they choose from, and their padding.
        sites, site_kinds: all its attention, supported or not, and what kind of attention each is.
        options, groups: what to make of the teacher; how its tokens are pooled, if they are.
        layers, factors: ``(student_layer, site)`` pairs; the queries and keys of each, empty where maps are kept.
        num_student_layers, kinds: L_s and calls of each kind, where explicit pairs do not leave them open.
        num_heads: H of all layers; 0 without any.
        targets, others: tensors that are needed next to attention; further teachers, whose graphs are in the model.
    """

    path: Path
    sha256: Callable[[], str]
    model: onnx.ModelProto
    bare: onnx.ModelProto
    weights: Weights
    runs_alone: bool
    specs: tuple[InputSpec, ...]
    rows: Mapping[str, int]
    pads: Mapping[str, int]
    sites: tuple[AttentionSite, ...]
    site_kinds: SiteKinds
    options: PrecomputeOptions
    groups: TokenGroups | None
    layers: Chosen
    num_student_layers: int | None
    kinds: tuple[KindLayers, ...]
    factors: tuple[SiteFactors, ...]
    num_heads: int
    targets: TargetTensors
    others: tuple[OtherTeacher, ...]

    @classmethod
    def open(cls, path: Path, options: PrecomputeOptions, callers: int = 0) -> TeacherGraph:
        """Load a file that is not trusted, find its attention, and choose the layers that the options name."""
        model = load_teacher(path)
        # During the walk over the graph. Errors need not wait for it: it takes seconds per gigabyte.
        sha256 = run_in_background(functools.partial(hash_teacher, path), callers, daemon=True)
        taken, sites = input_specs(model), find_sites(model)
        endless = next((site.reason for site in sites if site.reason and TOO_MUCH in site.reason), None)
        if endless is not None:  # also where no attention is requested
            raise graph_unsupported(endless)
        kinds = find_kinds(sites, taken)
        check_kinds(sites, taken, kinds)
        selected = select_sites(sites, options.sites) if sites and options.has_attention else ()
        layers, num_student_layers, counts = choose_layers(sites, selected, kinds, options)
        targets = find_targets(model, sites, options, kinds)
        factors = choose_stored(model, layers, kinds, options)
        groups = None if options.groups is None else TokenGroups.parse(options.groups)
        if groups is not None and kinds.kinds:
            message = f"groups must be left out for a teacher with two sequences; got {options.groups}"
            raise argument_value(message, "CACHE-131")
        others = open_others(path, options)
        # After the walk, which would find their attention too; what follows is of all teachers together.
        names = {**targets.names, **join_graphs(model, others)}
        specs = (*frozen_specs(model, [site.walk.probs for _, site in layers]), *groups_specs(groups))
        rows, pads = count_rows(model), read_pads(model)
        bare, weights = take_weights(model)
        return cls(
            path=path,
            sha256=sha256,
            model=model,
            bare=bare,
            weights=weights,
            runs_alone=shares_scales(model),
            specs=specs,
            rows=rows,
            pads=pads,
            sites=sites,
            site_kinds=kinds,
            options=options,
            groups=groups,
            layers=layers,
            num_student_layers=num_student_layers,
            kinds=counts,
            factors=factors,
            num_heads=max((site.num_heads or 0 for _, site in layers), default=0),
            targets=replace(targets, names=names),
            others=others,
        )

    def storing(self, options: PrecomputeOptions) -> TeacherGraph:
        """The same layers and targets, stored in another way."""
        check_options(options)
        factors = choose_stored(self.model, self.layers, self.site_kinds, options)
        return replace(self, options=options, factors=factors)

    @property
    def has_decoder_rows(self) -> bool:
        """Whether rows of logits and hidden states are positions of a decoder, with an encoder's besides."""
        return bool(self.site_kinds.kinds)

    @property
    def dtype(self) -> str:
        return dtype_of(self.model, [site for _, site in self.layers], self.targets)

    def masks_of(self, inputs: ModelInputs) -> dict[int, tuple[str | None, str | None]]:
        """By site the inputs that say which rows, and which keys, of its maps count; None where all do."""
        masks = {}
        for _, site in self.layers:
            kind = self.site_kinds.kind(site)
            rows = inputs.decoder_mask if kind in ("decoder", "cross") else inputs.mask
            keys = inputs.decoder_mask if kind == "decoder" else inputs.mask
            masks[site.layer] = rows, None if site.layer in self.site_kinds.own_keys else keys
        return masks


def groups_specs(groups: TokenGroups | None) -> list[InputSpec]:
    """The column that holds a sample's groups, as if the graph took it: so it is checked, padded, and in the key."""
    if groups is None or not groups.column:
        return []
    axes: dict[str, tuple[str, ...]] = {"ids": ("B", "tokens"), "weights": ("B", "tokens", "groups")}
    return [InputSpec(groups.column, "int64", axes[groups.kind])]


def batch_groups(groups: TokenGroups, batch: Batch) -> NDArray[Any]:
    """Weights ``(B, l, L)`` of a batch, with its fill; -1 in all of a row behind a sample's own groups."""
    if not groups.column:
        weights = patch_groups(groups.teacher_grid, groups.student_grid, extra=groups.extra)
        count = len(next(iter(batch.arrays.values())))
        return np.broadcast_to(weights, (count, *weights.shape))
    column = batch.arrays[groups.column]
    if groups.kind == "weights":
        return column.swapaxes(1, 2)
    weights = id_groups(column)
    is_group = np.arange(weights.shape[1]) <= column.max(axis=1, keepdims=True)
    return np.where(is_group[..., None], weights, -1)


class Session(NamedTuple):
    """A session of onnxruntime, the names of its outputs, and the graph that it runs."""

    session: Any
    names: list[str]
    graph: SqueezedGraph


@dataclass(eq=False)
class Sessions:
    """Sessions of a teacher's squeezed graph, opened at first use.

    ``turn`` is held while a batch runs: two may not fit a device on which one just does. ``target_columns`` of logits
    and hidden states of positions are known after a run.
    """

    graph: TeacherGraph
    plans: Sequence[MergePlan]
    row_masks: Mapping[int, str | None]
    provider: str
    num_threads: int | None
    tiling: Tiling | None
    target_columns: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._opened: dict[bool, Session] = {}
        self.turn: AbstractContextManager[object] = nullcontext() if is_cpu(self.provider) else threading.Lock()

    def open(self, *, checked: bool = False) -> Session:
        """The session for ``squeeze``, opened by one thread, as two would open it twice."""
        checked = checked and bool(self.graph.layers)
        if checked not in self._opened:
            self._opened[checked] = self.make(checked)
        return self._opened[checked]

    def run(self, opened: Session, names: Sequence[str], batch: Batch) -> dict[str, NDArray[Any]]:
        if self.graph.groups is not None:
            weights = np.maximum(batch_groups(self.graph.groups, batch), 0).astype(np.float32)
            batch = replace(batch, arrays=batch.arrays | {GROUPS_INPUT: weights})
        try:
            with self.turn:
                values = run_batch(opened.session, names, batch)
        except ShdError as error:
            if self.graph.groups is None or "dimension mismatch" not in str(error):
                raise
            rule = f"groups {self.graph.options.groups} must have a place for each token of the teacher's maps"
            got = f"{weights.shape[2]} tokens: count those that are no patches (patches:14x14:7x7:1)"
            raise ShdError("argument-shape", f"{rule}; got {got} ({error})", "CACHE-131") from error
        targets = opened.graph.targets.names.values()
        columns = [array.shape[-1] if array.ndim > 2 else 0 for name, array in values.items() if name in targets]
        if columns:
            self.target_columns = max(self.target_columns or 0, sum(columns))
        return values

    def make(
        self, checked: bool, layers: Chosen | None = None, has_targets: bool = True, *, whole: bool = False
    ) -> Session:
        """A session of all layers or some, with ``whole`` maps also where others run in tiles."""
        graph = self.graph
        factors = {layer: of_layer for (layer, _), of_layer in zip(graph.layers, graph.factors, strict=False)}
        chosen = graph.layers if layers is None else layers
        plan_of = {layer: plan for (layer, _), plan in zip(graph.layers, self.plans, strict=True)}
        squeezed = squeeze_graph(
            graph.bare,
            chosen,
            replace(graph.options, plans=tuple(plan_of[layer] for layer, _ in chosen)),
            row_mask_input=self.row_masks,
            check_outputs=checked,
            factors=factors or None,
            targets=graph.targets if has_targets else None,
            tiling=None if whole else self.tiling,
        )
        session = open_session(
            squeezed.model,
            provider=self.provider,
            num_threads=self.num_threads,
            weights=graph.weights,
            keeps_memory=not checked,  # check outputs are many times the records, and run seldom
        )
        return Session(session, [output.name for output in squeezed.model.graph.output], squeezed)
