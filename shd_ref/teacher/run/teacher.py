"""A teacher over a data set: its graph, the inputs, and sessions that squeeze its attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Extent, Teacher
from shd_ref.cache.codecs.logits import check_padding
from shd_ref.cache.documents import sample_order
from shd_ref.errors import argument_value, graph_unsupported
from shd_ref.merging.matching import match_factored
from shd_ref.merging.plans import PLAN_KINDS, MergePlan, merge_plan, plan_groups
from shd_ref.teacher.graph.find import projection_of
from shd_ref.teacher.graph.inputs import check_bounds
from shd_ref.teacher.graph.targets import LAST_ROLE, LOGITS, GraphHead, TargetTensors
from shd_ref.teacher.opening.model import rounds_in_run
from shd_ref.teacher.options import MATCHED, PrecomputeOptions, RunOptions, check_options
from shd_ref.teacher.rewrite.squeeze import SqueezedLayer, list_plans, squeeze_graph
from shd_ref.teacher.rewrite.tiles import SiteTiles, Tiling, find_tiles
from shd_ref.teacher.run.averaged import average_logits, check_masks
from shd_ref.teacher.run.graph import Session, Sessions, TeacherGraph, batch_groups
from shd_ref.teacher.run.inputs import Batch, ModelInputs, run_batch
from shd_ref.teacher.run.outputs import BatchOutputs, LayerOutputs, MapRows, TargetOutputs
from shd_ref.teacher.session import (
    check_run,
    describe_session,
    is_cpu,
    open_session,
    provider_name,
    share_threads,
    threads_for,
)
from shd_ref.teacher.sources import Arrays, Source

CHECKED_BYTES: Final = 2**28
"""Maps of the teacher and merged maps, in float32, that one run of the graph gives (but at least a sample's)."""
TARGET_BYTES: Final = 2**29
"""Logits and hidden states, in float32, that one run of the graph gives (but at least a sample's)."""

EXPORT_OTHERWISE: Final = (
    "export the model in evaluation mode (model.eval()), with the samples on the first axis of every input "
    "(batch_first=True in torch.nn.MultiheadAttention and torch.nn.TransformerEncoder), and without layers that "
    "compute over the batch"
)
_NOT_ITS_OWN: Final = (
    f"its maps of a sample change with the other samples of the batch, or from run to run: {EXPORT_OTHERWISE}"
)
_SEVERAL: Final = (
    "it has {number} maps per sample, such as for windows of an image, and a record holds one: select other sites "
    "(--sites), or take a teacher whose attention spans the whole sample"
)
_SHARED_SCALES: Final = (
    "dynamic quantisation takes scales from the whole batch, so precompute runs one sample at a time: the float form "
    "of the model runs in batches"
)

HEAD_ROWS: Final = 64
"""Rows on which a head is compared with the graph's own logits."""


@dataclass(eq=False)
class TeacherRun:
    """A teacher's graph, the inputs of a data set, and sessions, shared by precompute, verify and the studies.

    Several threads may call ``squeeze``, after ``sessions.open``.

    Attributes:
        graph, inputs, sessions: the teacher; the data; its squeezed graph as it runs.
        plans: the rounds of every layer.
        run: how samples run, one at a time where a batch would move their numbers.
        callers, num_threads: batches that run at once, 0 for one on the caller's thread; threads of a session.
        masks: by site the inputs that say which rows, and which keys, of its maps count.
        logit_columns: classes that each teacher gives, padding included, known after a run.
    """

    graph: TeacherGraph
    inputs: ModelInputs
    plans: tuple[MergePlan, ...]
    run: RunOptions
    tiling: Tiling | None = None
    callers: int = 0
    num_threads: int | None = None
    logit_columns: tuple[int, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        graph = self.graph
        self.options = graph.options
        self.masks = graph.masks_of(self.inputs)
        row_masks = {layer: self.masks[site.layer][0] for layer, site in graph.layers}
        if self.tiling is not None:
            slots = {}
            for (_, site), plan in zip(graph.layers, self.plans, strict=True):
                is_mean, heads = self.options.strategy == "mean", graph.num_heads
                groups = [tuple(range(heads))] if is_mean else plan_groups(plan, heads)
                if (tiles := self.tiling.of(site)) is not None:
                    slots[site.layer] = list_slots(tiles, groups)
            self.tiling = replace(self.tiling, slots=slots)
        self.sessions = Sessions(graph, self.plans, row_masks, self.run.provider, self.num_threads, self.tiling)

    @classmethod
    def open(
        cls,
        teacher: Path,
        source: Source | Arrays,
        options: PrecomputeOptions,
        run: RunOptions,
        on_read: Callable[[int, int], None] | None = None,
        input_names: Collection[str] | None = None,
        *,
        ahead: bool = False,
    ) -> TeacherRun:
        """Load a teacher, read the whole data set, and refuse data that cannot run, as early as that is known.

        With ``ahead`` two threads will call ``squeeze``: sessions leave one to the second, and the file is hashed
        in the background.
        """
        check_options(options)
        check_run(run)
        if options.groups is not None and run.tile:
            raise argument_value(f"tile must be 0, or left out, where maps are pooled; got {run.tile}", "CACHE-131")
        on_cpu = is_cpu(run.provider)
        callers, num_threads = share_threads(run.num_threads, on_cpu=on_cpu) if ahead else (0, run.num_threads)
        graph = TeacherGraph.open(teacher, options, callers)
        if graph.runs_alone:
            # A record must be its sample's alone: in a batch, others would move the scales that round it.
            run = replace(run, batch_size=1, batch_tokens=None)
        plans = _known_plans(graph)
        # After all that can be refused at once, because it reads the whole data set.
        inputs = ModelInputs(
            source,
            graph.specs,
            run.mask,
            options.seed_column,
            on_read,
            input_names,
            decoder=graph.site_kinds.decoder_inputs,
            decoder_mask=graph.site_kinds.decoder_mask,
            rows=graph.rows,
            pads=graph.pads,
            groups=None if graph.groups is None else graph.groups.column or None,
        )
        tensors = [name for _, site in graph.layers for name in (site.probs, site.values)]
        check_bounds(graph.model, [*tensors, *graph.targets.names.values()], lambda: inputs.shortest().arrays)
        check_masks(graph.others, (inputs.mask, inputs.decoder_mask))
        work = cls(graph, inputs, plans, run, _choose_tiling(graph, inputs, run), callers, num_threads)
        return replace(work, plans=work.match_plans()) if options.plans is None and options.plan == MATCHED else work

    def storing(self, **changes: str) -> TeacherRun:
        """The same teacher on the same inputs, merged by the same plans, in new sessions: stored in another way."""
        return replace(self, graph=self.graph.storing(replace(self.options, **changes)))  # type: ignore[arg-type]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes for the user about the run, such as why samples run one at a time."""
        untiled = () if self.tiling is None else self.tiling.whole
        remarks = tuple(f"{tiles.site.label} is computed with whole maps: {tiles.reason}" for tiles in untiled)
        shared = (_SHARED_SCALES,) * self.graph.runs_alone
        return (*shared, *remarks)

    def fingerprint(self) -> Teacher:
        """The teacher's identity for the manifest: a hash of the model file and of its external data."""
        graph = self.graph
        session = describe_session() if rounds_in_run(graph.model) else ""
        return Teacher(graph.sha256(), graph.path.name, provider_name(self.run.provider), graph.dtype, session)

    def squeeze(self, batch: Batch, *, checked: bool = False) -> BatchOutputs:
        return self._squeeze(self.sessions.open(checked=checked), batch)

    def match_plans(self) -> tuple[MergePlan, ...]:
        """The plan of every layer, matched on the first samples of CACHE-26's order (PLAN-9 to PLAN-13).

        Raises ``dependency-missing`` without networkx.
        """
        options, inputs = self.options, self.inputs
        order = sample_order(len(inputs), self.run.seed)[: options.calibration_samples]
        chosen, plans = [int(index) for index in order], []
        for number, (_, site) in enumerate(self.graph.layers):
            calibration, (rows, _) = [], self.masks[site.layer]
            for batch, probs, values in self.read_maps(number, inputs.batches(chosen, self.run.batch_size)):
                mask = None if rows is None else batch.arrays[rows][: len(probs)].astype(np.bool_)
                calibration.append((probs, values, mask))
            largest = max((probs[0, 0].size for probs, *_ in calibration), default=0)
            with threads_for(largest * 2 * (site.d_v or 0)):
                weight, heads = projection_of(site), options.num_student_heads
                plans.append(match_factored(calibration, weight, heads, options.matched_by, row_sums=site.row_sums))
        return tuple(plans)

    def read_maps(
        self, number: int, batches: Iterable[Batch]
    ) -> Iterator[tuple[Batch, NDArray[Any], NDArray[np.float32]]]:
        """Of one layer the maps ``(B, H, L, S)``, whole and in their own dtype, and V ``(B, H, S, d_v)``."""
        chosen = self.graph.layers[number : number + 1]
        session = self.sessions.make(True, chosen, has_targets=False, whole=True)
        (layer,) = session.graph.layers
        names = [layer.names["probs"], layer.names["values"]]
        for batch in batches:
            arrays = self.sessions.run(session, names, batch)
            probs, values = (arrays[name][: len(batch.indices)] for name in names)
            # The own dtype decides how exactly rows must sum to one.
            yield batch, probs.astype(layer.site.dtype or "float32"), values

    def squeeze_parts(self, batch: Batch) -> Iterator[BatchOutputs]:
        """The same with check outputs, of some layers at a time, as many as may be held; targets are in the first."""
        longest = max((array.shape[1] for array in batch.arrays.values() if array.ndim > 1), default=1)
        most = self._count_held(len(batch.arrays[self.inputs.names[0]]), longest)
        if self.tiling is not None and self.graph.layers:  # the inputs of tiles grow linearly with the length
            heads, size = self.graph.num_heads, self.inputs.longest_axis(batch.indices)
            width = max(((site.d_v or 0) + (site.d_k or 0) for _, site in self.graph.layers), default=0)
            most = max(1, CHECKED_BYTES // (4 * heads * max(size, 1) * max(4 * width, 1)))
        if most >= len(self.graph.layers):
            yield self.squeeze(batch, checked=True)
            return
        for start in range(0, len(self.graph.layers), most):
            # Each session ends with its run, and gives its memory back.
            yield self._squeeze(self.sessions.make(True, self.graph.layers[start : start + most], start == 0), batch)

    def _squeeze(self, session: Session, batch: Batch) -> BatchOutputs:
        count, rows = len(batch.indices), len(batch.arrays[self.inputs.names[0]])
        values = self.sessions.run(session, session.names, batch)
        graph = session.graph
        made_again = [self._rows_of(layer, values, count) for layer in graph.layers]
        # Outputs that only ``rows`` reads need not have a sample on their first axis.
        sources = [(layer, role) for layer in graph.layers if layer.rows for role in layer.rows.sources]
        of_rows = {layer.names[role] for layer, role in sources if role != "weights"}
        values = {name: array for name, array in values.items() if name not in of_rows}
        for output, array in values.items():  # which short cuts of the samples may not have shown
            if len(array) != rows:
                number, rest = divmod(len(array), rows)
                reason = _NOT_ITS_OWN if rest or number < 2 else _SEVERAL.format(number=number)
                raise graph_unsupported(f"what is made of attention ({output}) cannot be stored: {reason}")
        values = {name: array[:count] for name, array in values.items()}  # a fixed batch may have been filled up
        masks = self.row_masks(batch)
        mask = self.target_mask(batch)
        targets = {role: values[name] for role, name in graph.targets.names.items()}
        if LOGITS in targets:
            logits = [targets.pop(role) for role in (LOGITS, *(other.role for other in self.graph.others))]
            self.logit_columns = tuple(array.shape[-1] for array in logits)
            is_mean = bool(self.graph.others)
            targets[LOGITS] = average_logits(logits, self.graph.others, mask, self.options) if is_mean else logits[0]
        of_batch = TargetOutputs(targets, mask)
        layers = tuple(
            LayerOutputs.read(layer, values, masks[layer.student_layer], maps)
            for layer, maps in zip(graph.layers, made_again, strict=True)
        )
        if self.graph.groups is None:
            self._check_axes(batch, layers)
        keys = tuple(map(self.inputs.key, batch.indices))
        return BatchOutputs(batch.indices, keys, self._extents(batch, layers, of_batch), layers, of_batch)

    def _check_axes(self, batch: Batch, layers: Sequence[LayerOutputs]) -> None:
        """Refuse maps with other rows or keys than their masks have positions: a record would hold others of them."""
        for layer in layers:
            site = layer.layer.site
            for axis, size, mask in zip(("rows", "keys"), layer.map_axes, self.masks[site.layer], strict=True):
                if mask is not None and batch.arrays[mask].shape[1] != size:
                    raise graph_unsupported(
                        f"{site.label} must have as many {axis} as {mask} has positions, but the graph joins tokens "
                        "to the sequence (a class token, registers), or shortens it: export a wrapper whose inputs "
                        "and mask have a position for each, a placeholder, or select other sites (--sites)"
                    )

    def _rows_of(self, layer: SqueezedLayer, values: Mapping[str, NDArray[Any]], count: int) -> MapRows | None:
        if layer.rows is None:
            return None
        arrays = {role: values[layer.names[role]] for role in (*layer.rows.sources, "values")}
        return MapRows(layer.rows, arrays, self.run.provider, self.num_threads, slice(count))

    def _extents(self, batch: Batch, layers: Sequence[LayerOutputs], targets: TargetOutputs) -> tuple[Extent, ...]:
        """Of each sample; n by its mask, else the positions of its maps, of its rows or of its inputs."""
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
            if self.graph.groups is not None:
                weights = batch_groups(self.graph.groups, batch)
                length = length if self.inputs.mask is not None else weights.shape[2]
                count = int((weights[number] >= 0).any(axis=-1).sum())
                shapes = [(count, count)] * len(layers)
                extents.append(Extent(length, int(self.inputs.firsts[index]), tuple(shapes)))
                continue
            shapes = []
            for layer in layers:
                of_rows, of_keys = self.masks[layer.layer.site.layer]
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
        names, count = {layer: self.masks[site.layer][0] for layer, site in self.graph.layers}, len(batch.indices)
        return {
            layer: None if name is None else batch.arrays[name][:count].astype(np.bool_)
            for layer, name in names.items()
        }

    def groups(self, indices: Iterable[int]) -> Iterator[tuple[int, ...]]:
        """Samples that run together: as many as requested, or fewer where their logits would take too much memory."""
        for chosen in self.inputs.groups(indices, self.run.batch_size, self.run.batch_tokens):
            remaining = chosen
            while remaining:
                # One also of a batch that the graph fixes, which is filled up with it.
                size = 1 if self.graph.runs_alone else self._count_targets(remaining)
                yield remaining[:size]
                remaining = remaining[size:]

    def checked_batches(self, indices: Iterable[int], most: int | None = None) -> Iterator[Batch]:
        """The same with arrays, in batches small enough for check outputs, many times larger than the records."""
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
        heads = self.graph.num_heads + self.options.num_student_heads
        return max(1, CHECKED_BYTES // max(4 * maps * heads * longest**2, 1))

    def _count_targets(self, indices: Sequence[int]) -> int:
        """How many of these samples may give logits and hidden states at once, by widths known from a run."""
        if not self.graph.targets.names or self.inputs.fixed_batch is not None:
            return len(indices)
        if self.sessions.target_columns is None:
            self.squeeze(self.inputs.shortest())
        columns = self.sessions.target_columns
        if not columns:
            return len(indices)
        entries = columns * max(self.inputs.longest_axis(indices), 1)
        return min(len(indices), max(1, TARGET_BYTES // (4 * entries)))

    def run_head(self, index: int, head: GraphHead) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Last states ``(R, D)`` of a sample and the graph's own logits ``(R, V)``, of rows spread over it."""
        graph = squeeze_graph(
            self.graph.bare, (), targets=TargetTensors({LOGITS: head.logits, LAST_ROLE: head.states})
        )
        run = self.run
        session = open_session(
            graph.model, provider=run.provider, num_threads=run.num_threads, weights=self.graph.weights
        )
        batch = self.inputs.batch((index,))
        names = [graph.targets.names[LAST_ROLE], graph.targets.names[LOGITS]]
        values, mask = run_batch(session, names, batch), self.target_mask(batch)
        states, logits = (values[name][:1] for name in names)
        if states.ndim != 3 or logits.shape[:2] != states.shape[:2]:
            rule = "exact targets need a state and logits of each position"
            raise graph_unsupported(f"{rule}; got {states.shape} and {logits.shape}", "CACHE-187")
        counted = np.flatnonzero(np.ones(states.shape[1]) if mask is None else mask[0])
        chosen = counted[np.linspace(0, len(counted) - 1, min(len(counted), HEAD_ROWS)).astype(int)]
        check_padding(logits[0, chosen], self.options.vocab_size or logits.shape[-1], 1.0)
        return states[0, chosen], logits[0, chosen, : self.options.vocab_size]


def _known_plans(graph: TeacherGraph) -> tuple[MergePlan, ...]:
    """The plan of every layer; of one that is matched on the data, which comes later, the heads are refused now."""
    plans = (PLAN_KINDS[0] if plan == MATCHED else plan for plan in list_plans(graph.options, len(graph.layers)))
    return tuple(merge_plan(graph.num_heads, graph.options.num_student_heads, plan) for plan in plans)


TILE_BYTES: Final = 2**24
"""Maps of a tile in float32, about."""
WHOLE_BYTES: Final = 2**24
"""Maps of a batch in float32 that are made whole."""
_LEAST_ROWS: Final = 16  # fewer make a Loop of many small products
_MOST_ROWS: Final = 256  # of more, the first see few of the keys that the last of a causal map see


def _choose_tiling(graph: TeacherGraph, inputs: ModelInputs, run: RunOptions) -> Tiling | None:
    """Tiles of query rows where whole maps of a batch are large, or as requested."""
    rows = run.tile if graph.groups is None else 0
    if rows is None:
        longest, samples = max(inputs.longest_axis(), 1), min(run.batch_size, len(inputs))
        if run.batch_tokens is not None:
            samples = min(samples, max(1, run.batch_tokens // longest))
        row_bytes = 4 * max((site.num_heads or 1 for site in graph.sites), default=1) * samples * longest
        fitting = TILE_BYTES // row_bytes // _LEAST_ROWS * _LEAST_ROWS
        is_small = row_bytes * longest <= WHOLE_BYTES
        rows = 0 if is_small else min(_MOST_ROWS, max(_LEAST_ROWS, fitting))
    return Tiling(rows, {tiles.site.layer: tiles for tiles in find_tiles(graph.model, graph.sites)}) if rows else None


def list_slots(tiles: SiteTiles, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """For each head the heads whose values its map meets in its group; equally many, its own first."""
    slots = {}
    for group in groups:
        alike = [tiles.value_heads[head] for head in group]
        for head, value_head in zip(group, alike, strict=True):
            slots[head] = (value_head, *sorted({*alike} - {value_head}))
    most = max(map(len, slots.values()))
    return tuple(slots[head] + slots[head][:1] * (most - len(slots[head])) for head in range(len(slots)))
