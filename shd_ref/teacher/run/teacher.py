"""A teacher over a data set: its graph, the inputs, and sessions that squeeze its attention for students."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Extent, Teacher
from shd_ref.cache.codecs.logits import check_padding
from shd_ref.cache.forms.attention import KindLayers, TokenGroups
from shd_ref.errors import ShdError, graph_unsupported, need
from shd_ref.merging.plans import PLAN_KINDS, merge_plan, plan_groups
from shd_ref.teacher.graph.factors import SiteFactors, choose_stored
from shd_ref.teacher.graph.find import (
    AttentionSite,
    Chosen,
    SiteKinds,
    choose_layers,
    find_kinds,
    find_sites,
    select_sites,
)
from shd_ref.teacher.graph.independence import NOT_ITS_OWN, SEVERAL, SHARED_SCALES, rounds_in_run, shares_scales
from shd_ref.teacher.graph.inputs import (
    TOO_MUCH,
    InputSpec,
    check_bounds,
    count_rows,
    frozen_specs,
    input_specs,
    read_pads,
)
from shd_ref.teacher.graph.targets import GraphHead, TargetTensors, choose_targets, dtype_of
from shd_ref.teacher.graph.tiles import find_tiles
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.opening.model import Weights, hash_teacher, onnx, take_weights
from shd_ref.teacher.options import MATCHED, PrecomputeOptions, RunOptions, check_options
from shd_ref.teacher.rewrite.squeeze import GROUPS_INPUT, SqueezedGraph, SqueezedLayer, list_plans, squeeze_graph
from shd_ref.teacher.rewrite.tiles import Tiling, choose_tile, list_slots
from shd_ref.teacher.run.averaged import LogitsTeacher, average_logits, count_classes
from shd_ref.teacher.run.inputs import Batch, ModelInputs, run_batch
from shd_ref.teacher.run.outputs import LayerOutputs, MapRows, Student, StudentOutputs, TargetOutputs
from shd_ref.teacher.run.reading import match_plans
from shd_ref.teacher.sentence_folder import PADS_FRONT
from shd_ref.teacher.session import (
    check_run,
    describe_session,
    is_cpu,
    open_session,
    provider_name,
    run_beside,
    share_threads,
)
from shd_ref.teacher.sources import Arrays, Source
from shd_ref.tokens import id_groups, patch_groups

CHECKED_BYTES: Final = 2**28
"""Maps of the teacher and merged maps, in float32, that are asked of the graph at once (but at least a sample's)."""
TARGET_BYTES: Final = 2**29
"""Logits and hidden states, in float32, that are asked of the graph at once (but at least a sample's)."""

HEAD_ROWS: Final = 64
"""Rows on which a head is compared with the graph's own logits."""


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
                        f"{site.label} must have as many {axis} as {mask} has positions, but the graph joins tokens "
                        "to the sequence (a class token, registers), or shortens it: export a wrapper whose inputs "
                        "and mask have a position for each, a placeholder, or select other sites (--sites)"
                    )
        return masks


@dataclass(eq=False)
class TeacherRun:
    """A teacher's graph, the inputs of a data set, and sessions: what precompute, verify and the studies share.

    Several threads may call ``squeeze``, after ``sessions.open``.

    Attributes:
        graph, inputs, sessions, others: the teacher; the data; its squeezed graph as it runs; further teachers.
        students, options: whom a batch serves; options of the first.
        asked, run: how samples are to run; how they do, one at a time where a batch would move their numbers.
        callers, num_threads: batches that run at once, 0 for one on the caller's thread; threads of a session.
        logit_columns: classes that this teacher gives, padding included, once a run told.
        is_moved: whether texts that its tokenizer pads in front are then others, once ``check_company`` told.
    """

    graph: TeacherGraph
    inputs: ModelInputs
    students: tuple[Student, ...]
    asked: RunOptions
    others: tuple[LogitsTeacher, ...] = ()
    tiling: Tiling | None = None
    callers: int = 0
    num_threads: int | None = None
    logit_columns: int | None = field(default=None, init=False)
    is_moved: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        graph, asked = self.graph, self.asked
        self.options, self._alone = graph.options, _run_alone(graph, self.others)
        self.run = replace(asked, batch_size=1, batch_tokens=None) if self._alone else asked
        self._masks = graph.masks_of(self.inputs)
        row_masks = {layer: self._masks[site.layer][0] for layer, site in graph.layers}
        self.sessions = Sessions(graph, self.students, row_masks, asked.provider, self.num_threads, self.tiling)

    @classmethod
    def open(
        cls,
        teacher: Path,
        source: Source | Arrays,
        students: Sequence[PrecomputeOptions],
        run: RunOptions,
        on_read: Callable[[int, int], None] | None = None,
        input_names: Collection[str] | None = None,
        *,
        ahead: bool = False,
    ) -> TeacherRun:
        """Load a teacher, read the whole data set, and refuse what cannot run, as early as it can be told.

        With ``ahead`` two threads will call ``squeeze``: sessions leave one to the second, and the file is hashed
        beside.
        """
        options = students[0]
        for student in students:
            check_options(student)
        check_run(run)
        others = options.with_teachers
        places = [teacher.resolve(), *(other.resolve() for other in others)]
        rule = "name each teacher once, and not the first"
        distinct = len({*places}) == len(places)
        need(distinct, "argument-value", "with_teachers", rule, ", ".join(map(str, others)), spec_id="CACHE-163")
        on_cpu = is_cpu(run.provider)
        callers, num_threads = share_threads(run.num_threads, on_cpu=on_cpu) if ahead else (0, run.num_threads)
        graph = TeacherGraph.open(teacher, options, run.decoder_mask, callers)
        of_session = replace(run, num_threads=num_threads)
        averaged = [LogitsTeacher(path, options, of_session) for path in others]
        stated = options.vocab_size
        size = count_classes(graph.model, str(graph.targets.logits)) if stated is None else stated
        if size is not None:  # as far as the graphs say how many classes they have
            for other in averaged:
                other.check_classes(size, exact=stated is None)
        count, given = len(graph.layers), []
        for student in students:
            # A plan that is matched on the data comes later; its number of heads is refused now.
            known = (PLAN_KINDS[0] if plan == MATCHED else plan for plan in list_plans(student, count))
            given.append(tuple(merge_plan(graph.num_heads, student.num_student_heads, plan) for plan in known))
        # After what can be refused at once, because it reads the whole data set.
        groups = None if options.groups is None else TokenGroups.parse(options.groups)
        rule, got = "be left out for a teacher with two sequences", options.groups
        need(groups is None or not graph.kinds, "argument-value", "groups", rule, got, spec_id="CACHE-131")
        rule = "be 0, or left out, where maps are pooled"
        need(groups is None or not run.tile, "argument-value", "tile", rule, run.tile, spec_id="CACHE-131")
        own = None if groups is None or not groups.column else groups.column
        inputs = ModelInputs(
            source,
            [
                *frozen_specs(graph.model, [site.walk.probs for _, site in graph.layers]),
                *([] if groups is None else groups_specs(groups)),
            ],
            run.mask,
            options.seed_column,
            on_read,
            input_names,
            decoder=graph.site_kinds.decoder_inputs,
            decoder_mask=graph.site_kinds.decoder_mask,
            rows=count_rows(graph.model),
            pads=read_pads(graph.model),
            groups=own,
        )
        read = [name for _, site in graph.layers for name in (site.probs, site.values)] + list(graph.targets.titles)
        check_bounds(graph.model, read, lambda: inputs.shortest().arrays)
        for other in averaged:
            other.fit(inputs)
        runs = replace(run, batch_size=1) if _run_alone(graph, averaged) else run
        masks, made = graph.masks_of(inputs), []
        for number, student in enumerate(students):
            is_matched = student.plans is None and student.plan == MATCHED
            plans = match_plans(graph, inputs, masks, student, runs) if is_matched else given[number]
            made.append(Student(number, student, plans))
        tiling = _choose_tiling(graph, inputs, made, runs)
        return cls(graph, inputs, tuple(made), run, tuple(averaged), tiling, callers, num_threads)

    def storing(self, **changes: str) -> TeacherRun:
        """The same teacher on the same inputs, merged by the same plans, in new sessions: stored in another way."""
        students = tuple(
            replace(student, options=replace(student.options, **changes))  # type: ignore[arg-type]
            for student in self.students
        )
        return replace(self, graph=self.graph.storing(students[0].options), students=students)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user should know of the run, such as why samples run one at a time."""
        untiled = () if self.tiling is None else self.tiling.whole
        remarks = tuple(f"{tiles.site.label} is computed with whole maps: {tiles.reason}" for tiles in untiled)
        shared = (SHARED_SCALES,) * (self.run != self.asked)
        return (*shared, *(PADS_FRONT,) * self.is_moved, *remarks)

    def fingerprint(self) -> Teacher:
        """The teacher's identity for the manifest: a hash of the model file and of its external data."""
        graph = self.graph
        rounds = any(map(rounds_in_run, (graph.model, *(other.model for other in self.others))))
        session = describe_session() if rounds else ""
        return Teacher(graph.sha256(), graph.path.name, provider_name(self.run.provider), graph.dtype, session)

    def squeeze(self, batch: Batch, *, checked: bool = False) -> tuple[StudentOutputs, ...]:
        """Run a batch once, for all students."""
        return self._squeeze(self.sessions.open(checked=checked), batch)

    def squeeze_parts(self, batch: Batch) -> Iterator[tuple[StudentOutputs, ...]]:
        """The same with check outputs, of some layers at a time, as many as may be held; targets are in the first."""
        longest = max((array.shape[1] for array in batch.arrays.values() if array.ndim > 1), default=1)
        most = self._count_held(len(batch.arrays[self.inputs.names[0]]), longest)
        if self.tiling is not None and self.graph.layers:  # what tiles read grows linearly with the length
            heads, size = self.graph.num_heads, self.inputs.longest_axis(batch.indices)
            width = max(((site.d_v or 0) + (site.d_k or 0) for _, site in self.graph.layers), default=0)
            most = max(1, CHECKED_BYTES // (4 * heads * max(size, 1) * max(4 * width, 1)))
        if most >= len(self.graph.layers):
            yield self.squeeze(batch, checked=True)
            return
        for start in range(0, len(self.graph.layers), most):
            # Each session ends with its run, and gives its memory back.
            yield self._squeeze(self.sessions.make(True, self.graph.layers[start : start + most], start == 0), batch)

    def _squeeze(self, session: Session, batch: Batch) -> tuple[StudentOutputs, ...]:
        count, rows = len(batch.indices), len(batch.arrays[self.inputs.names[0]])
        values = self.sessions.run(session, session.names, batch)
        graph = session.graph
        made_again = [[self._rows_of(layer, values, count) for layer in layers] for layers in graph.students]
        held = {name for layers in graph.students for layer in layers for name in layer.source_names}
        values = {name: array for name, array in values.items() if name not in held}
        for output, array in values.items():  # which short cuts of the samples may not have shown
            if len(array) != rows:
                number, rest = divmod(len(array), rows)
                reason = NOT_ITS_OWN if rest or number < 2 else SEVERAL.format(number=number)
                raise graph_unsupported(f"what is made of attention ({output}) cannot be stored: {reason}")
        values = {name: array[:count] for name, array in values.items()}  # a fixed batch may have been filled up
        masks = self.row_masks(batch)
        targets = TargetOutputs.read(graph.targets, values, self.target_mask(batch))
        if targets.logits is not None:
            self.logit_columns = targets.logits.shape[-1]
            if self.others:
                with self.sessions.turn:
                    mean = average_logits(targets.logits, self.others, batch, targets.row_mask, self.options)
                targets = replace(targets, logits=mean)
        keys, outputs = tuple(map(self.inputs.key, batch.indices)), []
        for student, squeezed in zip(self.students, graph.students, strict=True):
            layers = tuple(
                LayerOutputs.read(layer, values, masks[layer.student_layer], maps)
                for layer, maps in zip(squeezed, made_again[student.number], strict=True)
            )
            extents = self._extents(batch, layers, targets)
            outputs.append(StudentOutputs(student, batch.indices, keys, extents, layers, targets))
        return tuple(outputs)

    def _rows_of(self, layer: SqueezedLayer, values: Mapping[str, NDArray[Any]], count: int) -> MapRows | None:
        if layer.rows is None:
            return None
        arrays = {role: values[layer.names[role]] for role in (*layer.rows.sources, "values")}
        return MapRows(layer.rows, arrays, self.run.provider, self.num_threads, slice(count))

    def _extents(self, batch: Batch, layers: Sequence[LayerOutputs], targets: TargetOutputs) -> tuple[Extent, ...]:
        """Of each sample; n is what its mask says, else the positions of its maps, of its rows or of its inputs."""
        rows = targets.positions if self.graph.has_decoder_rows else None
        positions = None if self.graph.has_decoder_rows else targets.positions
        if layers:
            positions = layers[0].map_axes[0]
        lengths = {self.inputs.mask: batch.lengths, self.inputs.decoder_mask: batch.decoder_lengths}
        extents = []
        for number, index in enumerate(batch.indices):
            length = batch.lengths[number]
            if self.inputs.mask is None:
                length = positions or max(length, 1)  # an image has no positions
            if self.sessions.groups is not None:
                weights = batch_groups(self.sessions.groups, batch)
                length = length if self.inputs.mask is not None else weights.shape[2]
                count = int((weights[number] >= 0).any(axis=-1).sum())
                shapes = [(count, count)] * len(layers)
                extents.append(Extent(length, int(self.inputs.firsts[index]), tuple(shapes)))
                continue
            shapes = []
            for layer in layers:
                of_rows, of_keys = self._masks[layer.layer.site.layer]
                num_rows, num_keys = layer.map_axes
                num_rows = num_rows if of_rows is None else lengths[of_rows][number]
                shapes.append((num_rows, num_keys if of_keys is None else lengths[of_keys][number]))
            decoder = rows or 0
            if decoder and self.inputs.decoder_mask is not None:
                decoder = batch.decoder_lengths[number]
            extents.append(Extent(length, int(self.inputs.firsts[index]), tuple(shapes), decoder))
        return tuple(extents)

    def target_mask(self, batch: Batch) -> NDArray[np.bool_] | None:
        """``(B, L)``, the positions that a batch's targets have rows of; None where all count."""
        name = self.inputs.decoder_mask if self.graph.has_decoder_rows else self.inputs.mask
        return None if name is None else batch.arrays[name][: len(batch.indices)].astype(np.bool_)

    def row_masks(self, batch: Batch) -> dict[int, NDArray[np.bool_] | None]:
        """By student layer ``(B, L)``, True = the row of its maps counts; None where every row does."""
        names, count = {layer: self._masks[site.layer][0] for layer, site in self.graph.layers}, len(batch.indices)
        return {
            layer: None if name is None else batch.arrays[name][:count].astype(np.bool_)
            for layer, name in names.items()
        }

    def groups(self, indices: Iterable[int]) -> Iterator[tuple[int, ...]]:
        """Samples that run together: as many as asked for, or fewer where their logits would take too much memory."""
        for chosen in self.inputs.groups(indices, self.run.batch_size, self.run.batch_tokens):
            rest = chosen
            while rest:
                size = 1 if self._alone else self._count_targets(rest)  # also of a batch that the graph fixes
                yield rest[:size]
                rest = rest[size:]

    def batches(self, indices: Iterable[int]) -> Iterator[Batch]:
        """The same with their arrays, longest first."""
        return map(self.inputs.batch, self.groups(indices))

    def checked_batches(self, indices: Iterable[int], most: int | None = None) -> Iterator[Batch]:
        """The same in batches that are small enough for check outputs, many times larger than what is stored."""
        for chosen in self.groups(indices):
            size = self.count_checked(chosen)
            size = size if most is None or self.inputs.fixed_batch is not None else min(size, most)
            for start in range(0, len(chosen), size):
                yield self.inputs.batch(chosen[start : start + size])

    def count_checked(self, indices: Sequence[int]) -> int:
        """How many of these samples may yield check outputs at once; all where no length or a fixed batch decides."""
        if self.inputs.fixed_batch is not None or not indices:
            return len(indices)
        if self.tiling is not None:  # maps are made again of one sample at a time
            return 1
        return min(len(indices), self._count_held(len(self.graph.layers), self.inputs.longest_axis(indices)))

    def _count_held(self, maps: int, longest: int) -> int:
        """How many things with so many maps of every head each may be among the check outputs."""
        heads = self.graph.num_heads + max(student.options.num_student_heads for student in self.students)
        return max(1, CHECKED_BYTES // max(4 * maps * heads * longest**2, 1))

    def _count_targets(self, indices: Sequence[int]) -> int:
        """How many of these samples may give logits and hidden states at once, by widths that a run tells."""
        if not self.graph.targets or self.inputs.fixed_batch is not None or self.sessions.target_columns == 0:
            return len(indices)
        if self.sessions.target_columns is None or any(other.columns is None for other in self.others):
            self.squeeze(self.inputs.shortest())
        # Beside the first teacher's, one other's logits are held at a time.
        columns = self.sessions.target_columns or 0
        columns += max((other.columns or 0 for other in self.others), default=0)
        if not columns:
            return len(indices)
        entries = columns * max(self.inputs.longest_axis(indices), 1)
        return min(len(indices), max(1, TARGET_BYTES // (4 * entries)))

    def run_head(self, index: int, head: GraphHead) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Last states ``(R, D)`` of a sample and the graph's own logits ``(R, V)``, of rows spread over it."""
        graph = squeeze_graph(self.graph.bare, (), targets=TargetTensors(head.logits, last=head.states))
        run = self.run
        session = open_session(
            graph.model, provider=run.provider, num_threads=run.num_threads, weights=self.graph.weights
        )
        batch = self.inputs.batch((index,))
        names = [str(graph.targets.last), str(graph.targets.logits)]
        values, mask = run_batch(session, names, batch), self.target_mask(batch)
        states, logits = (values[name][:1] for name in names)
        if states.ndim != 3 or logits.shape[:2] != states.shape[:2]:
            rule = "exact targets need a state and logits of each position"
            raise graph_unsupported(f"{rule}; got {states.shape} and {logits.shape}", "CACHE-187")
        counted = np.flatnonzero(np.ones(states.shape[1]) if mask is None else mask[0])
        few = counted[np.linspace(0, len(counted) - 1, min(len(counted), HEAD_ROWS)).astype(int)]
        check_padding(logits[0, few], self.options.vocab_size or logits.shape[-1], 1.0)
        return states[0, few], logits[0, few, : self.options.vocab_size]


def _run_alone(graph: TeacherGraph, others: Sequence[LogitsTeacher]) -> bool:
    """A record must be its sample's alone: in a batch, others would move the scales that round it."""
    return any(map(shares_scales, (graph.model, *(other.model for other in others))))


def _choose_tiling(
    graph: TeacherGraph, inputs: ModelInputs, students: Sequence[Student], run: RunOptions
) -> Tiling | None:
    """Tiles of query rows where whole maps of a batch are large, or as asked for."""
    rows = run.tile if graph.options.groups is None else 0
    if rows is None:
        longest = inputs.longest
        heads = max((site.num_heads or 1 for site in graph.sites), default=1)
        samples = min(run.batch_size, len(inputs))
        if run.batch_tokens is not None:
            samples = min(samples, max(1, run.batch_tokens // max(longest, 1)))
        rows = choose_tile(heads, samples, longest, longest)
    if not rows:
        return None
    sites = {tiles.site.layer: tiles for tiles in find_tiles(graph.model, graph.sites)}
    groups = {}
    for number, (_, site) in enumerate(graph.layers):
        plans = [plan_groups(student.plans[number], graph.num_heads) for student in students]
        mean = graph.options.strategy == "mean"
        groups[site.layer] = [range(graph.num_heads)] if mean else [group for plan in plans for group in plan]
    slots = {layer: list_slots(sites[layer], own) for layer, own in groups.items() if sites[layer].reason is None}
    return Tiling(rows, sites, slots)


def groups_specs(groups: TokenGroups) -> list[InputSpec]:
    """The column that holds a sample's groups, as if the graph took it: so it is checked, padded, and in the key."""
    axes: dict[str, tuple[str, ...]] = {"ids": ("B", "tokens"), "weights": ("B", "tokens", "groups")}
    return [InputSpec(groups.column, "int64", axes[groups.kind])] if groups.column else []


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
    own = np.arange(weights.shape[1]) <= column.max(axis=1, keepdims=True)
    return np.where(own[..., None], weights, -1)


class Session(NamedTuple):
    """A session of onnxruntime, the names of its outputs, and the graph that it runs."""

    session: Any
    names: list[str]
    graph: SqueezedGraph


@dataclass(eq=False)
class Sessions:
    """Sessions of a teacher's squeezed graph, opened when first asked for.

    ``turn`` is held while a batch runs: two may not fit a device on which one just does. ``target_columns`` of logits
    and hidden states of positions are known once a run has told them.
    """

    graph: TeacherGraph
    students: Sequence[Student]
    row_masks: Mapping[int, str | None]
    provider: str
    num_threads: int | None
    tiling: Tiling | None
    target_columns: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._opened: dict[bool, Session] = {}
        asked = self.graph.options.groups
        self.groups = None if asked is None else TokenGroups.parse(asked)
        self.turn: AbstractContextManager[object] = nullcontext() if is_cpu(self.provider) else threading.Lock()

    def open(self, *, checked: bool = False) -> Session:
        """What ``squeeze`` needs, opened by one thread, as two would not know of each other."""
        checked = checked and bool(self.graph.layers)
        if checked not in self._opened:
            self._opened[checked] = self.make(checked)
        return self._opened[checked]

    def run(self, opened: Session, names: Sequence[str], batch: Batch) -> dict[str, NDArray[Any]]:
        if self.groups is not None:
            weights = np.maximum(batch_groups(self.groups, batch), 0).astype(np.float32)
            batch = replace(batch, arrays=batch.arrays | {GROUPS_INPUT: weights})
        try:
            with self.turn:
                values = run_batch(opened.session, names, batch)
        except ShdError as error:
            if self.groups is None or "dimension mismatch" not in str(error):
                raise
            rule = f"groups {self.graph.options.groups} must have a place for each token of the teacher's maps"
            got = f"{weights.shape[2]} tokens: count those that are no patches (patches:14x14:7x7:1)"
            raise ShdError("argument-shape", f"{rule}; got {got} ({error})", "CACHE-131") from error
        titles = opened.graph.targets.titles
        columns = [array.shape[-1] if array.ndim > 2 else 0 for name, array in values.items() if name in titles]
        if columns:
            self.target_columns = max(self.target_columns or 0, sum(columns))
        return values

    def make(self, checked: bool, layers: Chosen | None = None, has_targets: bool = True) -> Session:
        """A session of all layers or some, for all students."""
        graph = self.graph
        factors = {layer: one for (layer, _), one in zip(graph.layers, graph.factors, strict=False)}
        chosen = graph.layers if layers is None else layers
        number_of = {layer: number for number, (layer, _) in enumerate(graph.layers)}
        plans = [tuple(student.plans[number_of[layer]] for layer, _ in chosen) for student in self.students]
        squeezed = squeeze_graph(
            graph.bare,
            chosen,
            [replace(one.options, plans=own) for one, own in zip(self.students, plans, strict=True)],
            row_mask_input=self.row_masks,
            check_outputs=checked,
            factors=factors or None,
            targets=graph.targets if has_targets else None,
            tiling=self.tiling,
        )
        session = open_session(
            squeezed.model,
            provider=self.provider,
            num_threads=self.num_threads,
            weights=graph.weights,
            keeps_memory=not checked,  # check outputs are many times what is stored, and asked for seldom
        )
        return Session(session, [output.name for output in squeezed.model.graph.output], squeezed)
