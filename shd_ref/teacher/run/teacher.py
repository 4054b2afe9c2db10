"""A teacher graph with its attention squeezed, over a data set: what precompute and verify share."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Extent, Teacher
from shd_ref.cache.codecs.logits import check_padding
from shd_ref.errors import graph_unsupported
from shd_ref.merging.plans import MergePlan, check_counts, merge_plan, plan_groups
from shd_ref.teacher.graph.factors import find_factors
from shd_ref.teacher.graph.find import AttentionSite, find_kinds, find_sites
from shd_ref.teacher.graph.independence import SEVERAL, SHARED_SCALES, rounds_in_run, shares_scales
from shd_ref.teacher.graph.inputs import count_rows, input_specs, read_pads
from shd_ref.teacher.graph.shapes import TOO_MUCH, check_bounds, frozen_specs
from shd_ref.teacher.graph.targets import TargetTensors, dtype_of, find_head, find_logits, find_targets
from shd_ref.teacher.graph.tiles import find_tiles
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.opening.model import hash_teacher, take_weights
from shd_ref.teacher.options import MATCHED, PrecomputeOptions, RunOptions, check_options
from shd_ref.teacher.rewrite.squeeze import SqueezedGraph, SqueezedLayer, list_plans, squeeze_graph, unite_graphs
from shd_ref.teacher.rewrite.tiles import Tiling, can_fuse, choose_tile, list_slots
from shd_ref.teacher.run.averaged import LogitsTeacher, average_logits, check_teachers, count_classes
from shd_ref.teacher.run.graph import Chosen, check_lengths, choose_layers, choose_stored, common_heads
from shd_ref.teacher.run.independence import check_padded, check_samples
from shd_ref.teacher.run.inputs import Batch, ModelInputs, run_batch
from shd_ref.teacher.run.outputs import LayerOutputs, MapRows, Student, StudentOutputs, TargetOutputs
from shd_ref.teacher.run.reading import AttentionReader, calibrate_plans
from shd_ref.teacher.session import PROVIDERS, check_run, describe_session, open_session, run_beside, share_threads
from shd_ref.teacher.sources import Arrays, Source

CHECKED_BYTES: Final = 2**28
"""Maps of the teacher and merged maps, in float32, that are asked of the graph at once (but at least a sample's)."""
TARGET_BYTES: Final = 2**29
"""Logits and hidden states, in float32, that are asked of the graph at once (but at least a sample's)."""

HEAD_ROWS: Final = 64
"""Rows on which a head is compared with the graph's own logits."""


class TeacherRun:
    """A teacher graph with its attention squeezed, ready to run: what precompute and verify share.

    With ``ahead`` two threads will call ``squeeze``: sessions leave one to the second, and the file is hashed beside.

    Attributes:
        layers, factors: ``(student_layer, site)`` pairs; the queries and keys of each, empty where maps are kept.
        num_student_layers, kinds: L_s and calls of each kind, where explicit pairs do not leave them open.
        model, bare, weights: the graph; the same without its large weights; these, which all sessions share.
        logit_columns: classes that this teacher gives, padding included, once a run told.
    """

    def __init__(
        self,
        teacher: Path,
        source: Source | Arrays,
        students: Sequence[PrecomputeOptions],
        run: RunOptions,
        on_read: Callable[[int, int], None] | None = None,
        input_names: Collection[str] | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        self.path = teacher
        self.options = options = students[0]
        for student in students:
            check_options(student)
        check_run(run)
        check_teachers(teacher, options)
        self._provider = PROVIDERS.get(run.provider, run.provider)
        on_cpu = self._provider == PROVIDERS["cpu"]
        self.callers, self._session_threads = (
            share_threads(run.num_threads, on_cpu=on_cpu) if ahead else (0, run.num_threads)
        )
        # Two batches may not fit a device on which one just does.
        self._turn: AbstractContextManager[object] = nullcontext() if on_cpu else threading.Lock()
        self.model = load_teacher(teacher)
        # Beside the walk over the graph. Errors need not wait for it: it takes seconds per gigabyte.
        self._sha256 = run_beside(functools.partial(hash_teacher, teacher), self.callers, daemon=True)
        sites, specs = find_sites(self.model), input_specs(self.model)
        endless = next((site.reason for site in sites if site.reason and TOO_MUCH in site.reason), None)
        if endless is not None:  # also where no attention is asked for
            raise graph_unsupported(endless)
        self.site_kinds = find_kinds(self.model, sites, specs, run.decoder_mask)
        self.layers, self.num_student_layers, self.kinds = choose_layers(sites, self.site_kinds, options)
        self.targets = self._find_targets(sites)
        self.others = tuple(
            LogitsTeacher(path, options, replace(run, num_threads=self._session_threads))
            for path in options.with_teachers
        )
        graphs = [self.model, *(other.model for other in self.others)]
        self._session_name = describe_session() if any(map(rounds_in_run, graphs)) else ""
        # A record must be its sample's alone: in a batch, others would move the scales that round it.
        self._alone, self._asked = any(map(shares_scales, graphs)), run
        self.run = replace(run, batch_size=1, batch_tokens=None) if self._alone else run
        stated = options.vocab_size
        size = count_classes(self.model, str(self.targets.logits)) if stated is None else stated
        if size is not None:  # as far as the graphs say how many classes they have
            for other in self.others:
                other.check_classes(size, exact=stated is None)
        self.factors = choose_stored(self.model, self.layers, self.site_kinds, options)
        self.num_teacher_heads = common_heads(self.layers)
        self._sites = sites
        plans_given = [self._given_plans(student) for student in students]
        # After what can be refused at once, because it reads the whole data set.
        specs = frozen_specs(self.model, [site.probs for _, site in self.layers])
        self.inputs = ModelInputs(
            source,
            specs,
            run.mask,
            options.seed_column,
            on_read,
            input_names,
            decoder=self.site_kinds.decoder_inputs,
            decoder_mask=self.site_kinds.decoder_mask,
            rows=count_rows(self.model),
            pads=read_pads(self.model),
        )
        check_lengths(self.layers, self.mask_of_rows, self.mask_of_keys)
        read = [name for _, site in self.layers for name in (site.probs, site.values)] + list(self.targets.titles)
        check_bounds(self.model, read, lambda: self.inputs.shortest().arrays)
        for other in self.others:
            other.fit(self.inputs)
        self.bare, self.weights = take_weights(self.model)
        self.students = tuple(
            Student(number, student, plans or (self._match_plans(student) if self.layers else ()))
            for number, (student, plans) in enumerate(zip(students, plans_given, strict=True))
        )
        self.tiling = self._choose_tiling()
        self._sessions: dict[bool, _Session] = {}
        self._opening: Callable[[], _Session] | None = None
        self._part: tuple[Chosen, _Session] | None = None  # the last session of some layers
        self._whole: _Session | None = None  # with whole maps of the few samples that show that samples stay apart
        self.logit_columns: int | None = None
        self._target_columns: int | None = None  # of logits and hidden states together, once a run has told

    def storing(self, **changes: str) -> TeacherRun:
        """The same teacher on the same inputs, merged by the same plans, in new sessions: stored in another way."""
        other = copy.copy(self)
        other.students = tuple(
            replace(student, options=replace(student.options, **changes))  # type: ignore[arg-type]
            for student in self.students
        )
        other.options = other.students[0].options
        check_options(other.options)
        other.factors = choose_stored(self.model, self.layers, self.site_kinds, other.options)
        other._sessions, other._opening = {}, None
        return other

    def open(self, *, checked: bool = False) -> _Session:
        """What ``squeeze`` needs, opened when first asked for: by one thread, as two would not know of each other."""
        checked = checked and bool(self.layers)
        if checked not in self._sessions:
            begun = None if checked else self._opening
            self._sessions[checked] = self._make_session(checked) if begun is None else begun()
        return self._sessions[checked]

    def squeeze(self, batch: Batch, *, checked: bool = False) -> tuple[StudentOutputs, ...]:
        """Run a batch once, for all students; several threads may, after ``open``."""
        return self._squeeze(self.open(checked=checked), batch)

    def squeeze_parts(self, batch: Batch) -> Iterator[tuple[StudentOutputs, ...]]:
        """The same with check outputs, of some layers at a time, as many as may be held; targets are in the first."""
        most = self._count_layers(batch)
        if self.tiling is not None:  # what tiles read grows linearly with the length
            heads, size = self.num_teacher_heads, self.inputs.longest_axis(batch.indices)
            width = 4 * max((site.d_v or 0) + (site.d_k or 0) for _, site in self.layers) if self.layers else 1
            most = max(1, CHECKED_BYTES // (4 * heads * max(size, 1) * max(width, 1)))
        if most >= len(self.layers):
            yield self.squeeze(batch, checked=True)
            return
        for start in range(0, len(self.layers), most):
            # Each session ends with its run, and gives its memory back.
            yield self._squeeze(self._make_session(True, self.layers[start : start + most], start == 0), batch)

    def _squeeze(self, session: _Session, batch: Batch) -> tuple[StudentOutputs, ...]:
        count, rows = len(batch.indices), len(batch.arrays[self.inputs.names[0]])
        values = self._run_noting(session, session.names, batch)
        made_again = [[self._rows_of(layer, values, count) for layer in graph.layers] for graph in session.graphs]
        held = {name for graph in session.graphs for layer in graph.layers for name in layer.source_names}
        values = {name: array for name, array in values.items() if name not in held}
        for output, array in values.items():  # which short cuts of the samples may not have shown
            if len(array) != rows:
                reason = SEVERAL.format(number=len(array) // rows)
                raise graph_unsupported(f"what is made of attention ({output}) cannot be stored: {reason}")
        values = {name: array[:count] for name, array in values.items()}  # a fixed batch may have been filled up
        masks = {student: self.query_mask(batch, site) for student, site in self.layers}
        masks = {student: None if mask is None else mask[:count] for student, mask in masks.items()}
        targets = TargetOutputs.read(session.graphs[0].targets, values, self.row_mask(batch))
        targets = self._average(targets, batch)
        keys, outputs = tuple(map(self.inputs.key, batch.indices)), []
        for student, graph in zip(self.students, session.graphs, strict=True):
            layers = tuple(
                LayerOutputs.read(layer, values, masks[layer.student_layer], maps)
                for layer, maps in zip(graph.layers, made_again[student.number], strict=True)
            )
            extents = self._extents(batch, layers, targets)
            outputs.append(StudentOutputs(student, batch.indices, keys, extents, layers, targets))
        return tuple(outputs)

    def _rows_of(self, layer: SqueezedLayer, values: Mapping[str, NDArray[Any]], count: int) -> MapRows | None:
        if layer.rows is None:
            return None
        arrays = {role: values[layer.names[role]] for role in (*layer.rows.sources, "values")}
        return MapRows(layer.rows, arrays, self.run.provider, self._session_threads, slice(count))

    def _average(self, targets: TargetOutputs, batch: Batch) -> TargetOutputs:
        if targets.logits is None:
            return targets
        self.logit_columns = targets.logits.shape[-1]
        if not self.others:
            return targets
        with self._turn:
            mean = average_logits(targets.logits, self.others, batch, targets.row_mask, self.options)
        return replace(targets, logits=mean)

    def _extents(self, batch: Batch, layers: Sequence[LayerOutputs], targets: TargetOutputs) -> tuple[Extent, ...]:
        """Of each sample; n is what its mask says, else the positions of its maps, of its rows or of its inputs."""
        rows = targets.positions if self.has_decoder_rows else None
        positions = None if self.has_decoder_rows else targets.positions
        if layers:
            positions = layers[0].map_axes[0]
        extents = []
        for number, index in enumerate(batch.indices):
            length = batch.lengths[number]
            if self.inputs.mask is None:
                length = positions or max(length, 1)  # an image has no positions
            shapes = tuple(self.map_shape(batch, number, layer.layer.site, layer.map_axes) for layer in layers)
            decoder = rows or 0
            if decoder and self.inputs.decoder_mask is not None:
                decoder = batch.decoder_lengths[number]
            extents.append(Extent(length, int(self.inputs.firsts[index]), shapes, decoder))
        return tuple(extents)

    def check_samples(self) -> None:
        """Refuse a teacher whose maps, logits or hidden states of a sample depend on the samples that run with it."""
        if all(site.note is None for _, site in self.layers):
            opened = self._open_whole()
            sites = {layer.names["probs"]: layer.site for layer in opened.graphs[0].layers}
            check_samples(self.model, sites, self.inputs, self._run_checked, opened.graphs[0].targets.titles)
        else:  # the squeezed graph may not even run
            reader = self.read_attention()
            check_samples(self.model, reader.maps, self.inputs, reader.run)
            if self.targets:
                titles = self._open_whole().graphs[0].targets.titles
                check_samples(self.model, {}, self.inputs, self._run_checked, titles)
        if self.targets and self.run.batch_size > 1:
            check_padded(self.model, self.inputs, self._run_checked, self._open_whole().graphs[0].targets.titles)
        self._part = self._whole = None
        for other in self.others:
            other.check_samples(self.inputs)

    def _open_whole(self) -> _Session:
        """With check outputs and whole maps: short cuts of samples have small ones."""
        if self.tiling is None:
            return self.open(checked=True)
        if self._whole is None:
            self._whole = self._make_session(True, tiled=False)
        return self._whole

    def _run_checked(self, names: Sequence[str], batch: Batch) -> dict[str, NDArray[Any]]:
        """Some outputs with check outputs, by name; of long samples in a session for their layers alone."""
        opened = self._open_whole()
        named = zip(opened.graphs[0].layers, self.layers, strict=True)
        layers = tuple(chosen for layer, chosen in named if layer.names["probs"] in names)
        if self._count_layers(batch) < len(self.layers):
            if self._part is None or self._part[0] != layers:
                self._part = None  # before the next takes memory
                self._part = layers, self._make_session(True, layers, tiled=False)
            opened = self._part[1]
        return self._run_noting(opened, names, batch)

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
        return min(len(indices), self._count_held(len(self.layers), self.inputs.longest_axis(indices)))

    def _count_layers(self, batch: Batch) -> int:
        arrays = [array for array in batch.arrays.values() if array.ndim > 1]
        longest = max((array.shape[1] for array in arrays), default=1)
        return self._count_held(len(batch.arrays[self.inputs.names[0]]), longest)

    def _count_held(self, maps: int, longest: int) -> int:
        """How many things with so many maps of every head each may be among the check outputs."""
        heads = self.num_teacher_heads + max(student.options.num_student_heads for student in self.students)
        return max(1, CHECKED_BYTES // max(4 * maps * heads * longest**2, 1))

    def _count_targets(self, indices: Sequence[int]) -> int:
        """How many of these samples may give logits and hidden states at once: one, until a run told the widths."""
        if not self.targets or self.inputs.fixed_batch is not None or self._target_columns == 0:
            return len(indices)
        others = [other.columns for other in self.others]
        if self._target_columns is None or None in others:
            return 1
        # Beside the first teacher's, one other's logits are held at a time.
        columns = self._target_columns + max(filter(None, others), default=0)
        entries = columns * max(self.inputs.longest_axis(indices), 1)
        return min(len(indices), max(1, TARGET_BYTES // (4 * entries)))

    def _run_noting(self, opened: _Session, names: Sequence[str], batch: Batch) -> dict[str, NDArray[Any]]:
        """Run a batch, and note how wide logits and hidden states of positions are."""
        with self._turn:
            values = run_batch(opened.session, names, batch)
        titles = opened.graphs[0].targets.titles
        columns = [array.shape[-1] if array.ndim > 2 else 0 for name, array in values.items() if name in titles]
        if columns:
            self._target_columns = max(self._target_columns or 0, sum(columns))
        return values

    def _find_targets(self, sites: Sequence[AttentionSite]) -> TargetTensors:
        options = self.options
        own = [site for site in sites if self.site_kinds.kind(site) in (None, "decoder")]
        if options.hidden_layers and self.has_decoder_rows and not (own and self.site_kinds.decoder_inputs):
            raise graph_unsupported(
                "hidden states of a graph with cross attention are those of its decoder, which must have "
                "self-attention and inputs for its sequence; this graph lacks them: store its attention and logits, "
                "and run the teacher beside the student (OnlineTeacher) for hidden states",
                "CACHE-175",
            )
        if options.embeddings is not None and self.has_decoder_rows:
            raise graph_unsupported(
                "embeddings are made of a single sequence, and this graph has a second one, of its decoder: export "
                "the encoder alone",
                "CACHE-181",
            )
        targets = find_targets(
            self.model,
            own,
            logits=options.logits != "none",
            output=options.logits_output,
            hidden=options.hidden_layers,
            pooled=options.embeddings is not None,
            of_decoder=self.has_decoder_rows,
        )
        self.head = find_head(self.model, find_logits(self.model, options.logits_output)) if options.exact else None
        return targets if self.head is None else replace(targets, last=self.head.states)

    def run_head(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Last states ``(R, D)`` of a sample and the graph's own logits ``(R, V)``, of rows spread over it."""
        assert self.head is not None
        graph = squeeze_graph(self.bare, (), targets=TargetTensors(self.head.logits, last=self.head.states))
        run = self.run
        session = open_session(graph.model, provider=run.provider, num_threads=run.num_threads, weights=self.weights)
        batch = self.inputs.batch((index,))
        names = [str(graph.targets.last), str(graph.targets.logits)]
        values, mask = run_batch(session, names, batch), self.row_mask(batch)
        states, logits = (values[name][:1] for name in names)
        if states.ndim != 3 or logits.shape[:2] != states.shape[:2]:
            rule = "exact targets need a state and logits of each position"
            raise graph_unsupported(f"{rule}; got {states.shape} and {logits.shape}", "CACHE-187")
        counted = np.flatnonzero(np.ones(states.shape[1]) if mask is None else mask[0])
        few = counted[np.linspace(0, len(counted) - 1, min(len(counted), HEAD_ROWS)).astype(int)]
        check_padding(logits[0, few], self.options.vocab_size or logits.shape[-1], 1.0)
        return states[0, few], logits[0, few, : self.options.vocab_size]

    @property
    def has_decoder_rows(self) -> bool:
        """Whether rows of logits and hidden states are positions of a decoder, beside an encoder's."""
        return bool(self.site_kinds.kinds)

    def row_mask(self, batch: Batch) -> NDArray[np.bool_] | None:
        """``(B, L)``, the positions that a batch's targets have rows of; None where all count."""
        name = self.inputs.decoder_mask if self.has_decoder_rows else self.inputs.mask
        return None if name is None else batch.arrays[name][: len(batch.indices)].astype(np.bool_)

    def mask_of_rows(self, site: AttentionSite) -> str | None:
        """Name of the input that says which rows of a site's maps count; None where every row does."""
        return self.inputs.decoder_mask if self.site_kinds.has_decoder_rows(site) else self.inputs.mask

    def mask_of_keys(self, site: AttentionSite) -> str | None:
        """Name of the input that says which of a site's keys count; None where every key does."""
        if site.layer in self.site_kinds.own_keys:
            return None
        return self.inputs.decoder_mask if self.site_kinds.kind(site) == "decoder" else self.inputs.mask

    def query_mask(self, batch: Batch, site: AttentionSite) -> NDArray[np.bool_] | None:
        """``(B, L)``, True = the row of the site's maps counts; None where every row does."""
        name = self.mask_of_rows(site)
        return None if name is None else batch.arrays[name].astype(np.bool_)

    def map_shape(self, batch: Batch, number: int, site: AttentionSite, held: tuple[int, int]) -> tuple[int, int]:
        """Rows and keys of a sample's maps that a record keeps."""
        lengths = {self.inputs.mask: batch.lengths, self.inputs.decoder_mask: batch.decoder_lengths, None: None}
        rows, keys = (lengths[mask] for mask in (self.mask_of_rows(site), self.mask_of_keys(site)))
        return held[0] if rows is None else rows[number], held[1] if keys is None else keys[number]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user should know of the run, such as why samples run one at a time."""
        untiled = () if self.tiling is None else self.tiling.whole
        remarks = tuple(f"{tiles.site.label} is computed with whole maps: {tiles.reason}" for tiles in untiled)
        return (SHARED_SCALES, *remarks) if self.run != self._asked else remarks

    def fingerprint(self) -> Teacher:
        """The teacher's identity for the manifest: a hash of the model file and of its external data."""
        dtype = dtype_of(self.model, [site for _, site in self.layers], self.targets)
        return Teacher(self._sha256(), self.path.name, self._provider, dtype, self._session_name)

    def begin(self) -> None:
        """Start what a whole run will need, beside what comes next: the plain session."""
        # No daemon: the interpreter must not end while a session is being opened.
        if self._provider == PROVIDERS["cpu"]:
            # Others redirect stdout and change onnxruntime's log while they load, which belong to the whole process.
            self._opening = run_beside(functools.partial(self._make_session, False), self.callers)

    def _choose_tiling(self) -> Tiling | None:
        """Tiles of query rows where whole maps of a batch are large, or as asked for."""
        rows = self.run.tile
        if rows is None:
            longest = self.inputs.longest_axis(range(len(self.inputs))) if len(self.inputs) else 0
            heads = max((site.num_heads or 1 for site in self._sites), default=1)
            samples = min(self.run.batch_size, len(self.inputs))
            if self.run.batch_tokens is not None:
                samples = min(samples, max(1, self.run.batch_tokens // max(longest, 1)))
            rows = choose_tile(heads, samples, longest, longest)
        if not rows:
            return None
        sites = {tiles.site.layer: tiles for tiles in find_tiles(self.model, self._sites)}
        slots = {}
        for number, (_, site) in enumerate(self.layers):
            if sites[site.layer].reason is None:
                plans = [plan_groups(student.plans[number], self.num_teacher_heads) for student in self.students]
                mean = self.options.strategy == "mean"
                groups = [range(self.num_teacher_heads)] if mean else [group for plan in plans for group in plan]
                slots[site.layer] = list_slots(sites[site.layer], groups)
        # On other providers the operator may lack float32, and with several samples it takes no keys from before.
        alone = self.run.batch_size == 1 and self.inputs.fixed_batch in (None, 1)
        can = alone and self._provider == PROVIDERS["cpu"]
        found = find_factors(self.model, [tiles.site for tiles in sites.values() if can and tiles.reason is None])
        fused = {one.site.layer: one for one in found if can_fuse(sites[one.site.layer], one)}
        return Tiling(rows, sites, slots, fused)

    def _given_plans(self, options: PrecomputeOptions) -> tuple[MergePlan, ...]:
        """The plan of every layer; none where they are matched on the data, and without layers."""
        if self.layers:
            check_counts(self.num_teacher_heads, options.num_student_heads)
        if not self.layers or (options.plans is None and options.plan == MATCHED):
            return ()
        plans = list_plans(options, len(self.layers))
        return tuple(merge_plan(self.num_teacher_heads, options.num_student_heads, plan) for plan in plans)

    def read_attention(self) -> AttentionReader:
        """The teacher's own maps and value outputs at the chosen sites, read in a separate session."""
        sites, run = [site for _, site in self.layers], self.run
        return AttentionReader(self.bare, sites, run.provider, run.num_threads, self.weights)

    def _match_plans(self, options: PrecomputeOptions) -> tuple[MergePlan, ...]:
        return calibrate_plans(
            self.read_attention(),
            self.inputs,
            options.num_student_heads,
            by=options.matched_by,
            alpha_per=options.alpha_per,
            num_samples=options.calibration_samples,
            seed=self.run.seed,
            batch_size=self.run.batch_size,
            on_error=options.on_error,
            mask_of_rows=self.mask_of_rows,
        )

    def _make_session(
        self, checked: bool, layers: Chosen | None = None, has_targets: bool = True, *, tiled: bool = True
    ) -> _Session:
        graphs = [
            # Logits and hidden states are the same for all students.
            self._make_graph(
                student,
                self.layers if layers is None else layers,
                check_outputs=checked,
                targets=None if number or not has_targets else self.targets,
                tiling=self.tiling if tiled else None,
            )
            for number, student in enumerate(self.students)
        ]
        model, renamed = unite_graphs(graphs)
        session = open_session(
            model,
            provider=self.run.provider,
            num_threads=self._session_threads,
            weights=self.weights,
            keeps_memory=not checked,
        )
        return _Session(session, [output.name for output in model.graph.output], renamed)

    def _make_graph(
        self,
        student: Student,
        chosen: Chosen,
        *,
        check_outputs: bool,
        targets: TargetTensors | None,
        tiling: Tiling | None,
    ) -> SqueezedGraph:
        plans = {layer: plan for (layer, _), plan in zip(self.layers, student.plans, strict=True)}
        factors = {layer: one for (layer, _), one in zip(self.layers, self.factors, strict=False)}
        return squeeze_graph(
            self.bare,
            chosen,
            replace(student.options, plans=tuple(plans[layer] for layer, _ in chosen)),
            row_mask_input={layer: self.mask_of_rows(site) for layer, site in self.layers},
            check_outputs=check_outputs,
            factors=factors or None,
            targets=targets,
            tiling=tiling,
        )


class _Session(NamedTuple):
    session: Any
    names: list[str]
    graphs: tuple[SqueezedGraph, ...]
