"""One layer of a student from one of the teacher: the closed form in place, then refitted.

Alignment goes layer by layer, first the attention's output projection, then the FFN's last matrix. Their inputs are
the *student's*, with every earlier layer aligned; the target is the teacher's stream at that place less the student's
before the block. After the FFN it is the stream *before* the teacher layer that the next student layer comes from, so
that the matrix stands in for layers that were left out. Where a norm lies on the stream, the target is what it reads.
On a narrower stream, what reads it is refitted too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.errors import need
from shd_ref.shrink.heads import HeadMerge, HeadWeights, concatenate_heads, low_rank_heads, merge_heads, mix_queries
from shd_ref.shrink.kept import most_important, score_neurons
from shd_torch.maps.alpha import gram_tensor
from shd_torch.shrink.basis import Basis, OutputFit, final_readers
from shd_torch.shrink.calibration import GRAM_ENTRIES, Batch, join_rows, recorded_attention, run_layer
from shd_torch.shrink.families import (
    Array,
    Family,
    Rows,
    as_array,
    base_of,
    find_part,
    read_linear,
    side_by_side,
    take_columns,
    write_linear,
)
from shd_torch.shrink.options import ShrinkOptions
from shd_torch.shrink.sharing import share_attention
from shd_torch.shrink.sizes import Sizes, sizes_of

SLOW_ANGLE = 1.0
"""A rotated pair is slow whose angle grows by less than this, in radians, over a calibration sample."""

NEARER = 0.95
"""Share of the first way's error that another must stay below: errors of a layer that differ by 2% say nothing of the
whole student."""


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """Sums over the whole calibration set of what one layer's attention reads and gives."""

    length: int  # of the longest sample
    with_maps: bool  # whether maps were read; without them gram is zeros
    gram: Array  # the gram tensor, summed (H, H, H, H)
    augmented: Array  # second moment of the inputs with a one, [x, 1], (D + 1, D + 1)
    centred: Array  # of the inputs less their mean over the sample, (D, D)
    query_size: Array  # root mean square of each head's queries (H,)


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """The streams of one teacher layer, batch by batch, from which a student layer is made."""

    neuron_squares: Array  # mean over counted rows of the squares of what the FFN's last matrix reads (F,)
    inputs: tuple[Tensor, ...]  # inputs of queries, keys and values
    middles: tuple[Tensor, ...]  # the stream after the attention
    ffn_inputs: tuple[Tensor, ...]  # inputs of the FFN
    ends: tuple[Tensor, ...]  # the stream after the FFN, before a norm that lies on it
    outputs: tuple[Tensor, ...]  # the layer's outputs


@torch.no_grad()
def study_layer(
    model: nn.Module,
    family: Family,
    number: int,
    streams: Sequence[Tensor],
    batches: Sequence[Batch],
    weights: HeadWeights,
    *,
    with_maps: bool,
    statistics: AttentionStatistics | None = None,
) -> tuple[AttentionStatistics, LayerTrace]:
    """Gram tensor and input moments of one teacher layer, and its streams.

    Without maps the gram tensor is zeros: no heads merge. ``statistics`` of an earlier study are not gathered again.
    """
    layer, device = family.layers_of(model)[number], streams[0].device
    names = [family.projections[0], family.middle, family.ffn[0][0], family.ffn[1]]
    names += [name for name in (family.end, family.maps if with_maps else None) if name is not None]
    sums = None if statistics is not None else AttentionSums(weights, device)
    squares, rows, traced = torch.zeros((), dtype=torch.float64, device=device), 0, []
    masks = iter([batch.counted for batch in batches])  # the attention runs once for each batch

    def take(probs: Tensor, values: Tensor, rows: slice, *_: Tensor) -> None:
        if sums is not None:
            sums.add_maps(probs, values, next(masks) if rows.start == 0 else sums.counted, rows)

    watched = find_part(layer, family.attention) if sums is not None and with_maps else None
    with recorded_attention(model, watched, take):
        runs = run_layer(layer, streams, batches, number, [find_part(layer, name) for name in names])
        for (out, read), stream, batch in zip(runs, streams, batches, strict=True):
            if family.maps is not None and with_maps:  # an attention that transformers cannot exchange
                take(read.pop(), project(read[0], weights.value, weights.value_bias), slice(0, None))
            if sums is not None:
                sums.add(read[0], batch.counted)
            squares = squares + batch.rows(read[3]).double().square().sum(0)
            rows += int(batch.counted.sum())
            traced.append((read[0], family.middle_of(read[1], stream), read[2], read[4] if family.end else out, out))
    need(rows > 0, "argument-value", "data", "hold a row that counts", "an attention_mask of zeros")
    finite = bool(torch.isfinite(squares).all() and (sums is None or torch.isfinite(sums.gram).all()))
    need(finite, "not-finite", "the teacher", "give finite numbers", f"NaN or infinity in layer {number}")
    if sums is not None:
        statistics = sums.read(max(stream.shape[1] for stream in streams), rows, with_maps=with_maps)
    assert statistics is not None  # one of the two is there
    return statistics, LayerTrace(as_array(squares / rows), *zip(*traced, strict=True))


def project(inputs: Tensor, heads: Array, bias: Array | None) -> Tensor:
    """The output of each head for inputs ``(B, L, D)``, float64 ``(B, H, L, d)``."""
    shift = 0.0 if bias is None else torch.from_numpy(bias)[:, None].to(inputs.device)
    return inputs.double()[:, None] @ torch.from_numpy(heads).to(inputs.device) + shift


class AttentionSums:
    """Sums for ``AttentionStatistics``, batch by batch."""

    def __init__(self, weights: HeadWeights, device: torch.device) -> None:
        width, heads = weights.query.shape[1], weights.num_heads
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.gram = zeros((heads,) * 4)
        self._augmented, self._centred, self._sizes = zeros(width + 1, width + 1), zeros(width, width), zeros(heads)
        self._weights, self._projection = weights, torch.from_numpy(weights.output).to(device).flatten(0, 1)

    def add_maps(self, probs: Tensor, values: Tensor, counted: Tensor, rows: slice) -> None:
        """Some rows of a batch's maps, with the values; ``counted`` are all rows that count."""
        self.counted, row_mask = counted, counted[:, rows]
        batch, heads, height, _ = probs.shape
        size = max(1, GRAM_ENTRIES // (heads * heads * height * values.shape[3]))
        for start in range(0, batch, size):
            some = slice(start, start + size)
            gram = gram_tensor(probs[some], values[some], self._projection, query_mask=row_mask[some], check=False)
            self.gram += gram.sum(0)

    def add(self, inputs: Tensor, counted: Tensor) -> None:
        """The projections' inputs ``(B, L, D)``, and the rows that count."""
        mask = counted[..., None]
        x = inputs.double() * mask
        mean = x.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
        away = ((x - mean) * mask).flatten(0, 1)
        ones = torch.cat([x, mask.double()], dim=2).flatten(0, 1)
        self._augmented += ones.mT @ ones
        self._centred += away.mT @ away
        queries = project(x, self._weights.query, self._weights.query_bias) * mask[:, None]
        self._sizes += queries.square().sum((0, 2, 3))

    def read(self, length: int, rows: int, *, with_maps: bool) -> AttentionStatistics:
        """Over so many rows that count, of samples of at most this length."""
        query_size = (self._sizes / rows / self._weights.head_dim).sqrt()
        means = (self._augmented / rows, self._centred / rows, query_size)
        return AttentionStatistics(length, with_maps, *map(as_array, (self.gram, *means)))


@dataclass(frozen=True, eq=False)
class Squeezed:
    """A student's attention, the case that made it, and whether that is exact."""

    weights: HeadWeights
    case: str
    exact: bool


def squeeze_attention(
    weights: HeadWeights,
    merge: HeadMerge,
    statistics: AttentionStatistics,
    num_kv_heads: int,
    head_dim: int,
    *,
    frequencies: Array | None = None,
    query_norm: bool = False,
) -> Squeezed:
    """The best case that applies (``shd_ref/shrink/heads.py``), for a student of these sizes.

    ``frequencies`` are of rotary positions, one a pair of entries i and ``i + d / 2``; ``query_norm`` says whether
    queries are normed before their product with keys.
    """
    same_shape = num_kv_heads == weights.num_kv_heads and head_dim == weights.head_dim
    if len(merge.groups) == weights.num_heads and same_shape:
        return Squeezed(weights, "copied", True)
    if same_shape and merge.shares_keys(num_kv_heads):
        mixed = mix_queries(weights, merge, statistics.query_size if query_norm else None)
        return Squeezed(mixed, "queries", not query_norm)
    rule = "merge inside key and value heads where queries are normed, since keys are normed too: ask for a multiple"
    rule += f" of the teacher's {weights.num_kv_heads} key and value heads"
    need(not query_norm, "shrink-unsupported", "heads", rule, f"groups {merge.groups}")
    longest = max(len(group) for group in merge.groups)
    if frequencies is None and num_kv_heads == len(merge.groups) and longest * weights.head_dim <= head_dim:
        return Squeezed(concatenate_heads(weights, merge, head_dim), "side-by-side", True)
    slow = None if frequencies is None else frequencies * statistics.length < SLOW_ANGLE
    moments = statistics.augmented, statistics.centred
    nearest = low_rank_heads(weights, merge, num_kv_heads, head_dim, *moments, slow=slow)
    return Squeezed(nearest, "low-rank" if slow is None else "rotary", False)


@dataclass(eq=False)
class Work:
    """State that the layers of one run share."""

    teacher: Any  # in evaluation mode
    student: Any  # of the same class; its layers are filled one by one
    family: Family  # of both
    batches: list[Batch]  # the calibration set before the first layer
    sources: tuple[int, ...]  # the teacher layer of each student layer
    sizes: Sizes  # of the student
    options: ShrinkOptions  # of shrink
    frequencies: list[Array] | None  # of rotary positions of each teacher layer, or None
    tell: Callable[..., None]  # called with the current step
    basis: Basis | None = None  # the kept axes; None where the stream keeps its width
    merge: HeadMerge | None = None  # of all layers, where they share position biases
    studies: dict[int, AttentionStatistics] | None = None  # of teacher layers, shared with other students
    reports: list[dict[str, Any]] = field(default_factory=list)  # one per layer, as shrink.json holds them

    @cached_property
    def own_batches(self) -> list[Batch]:
        """The calibration set as layers of the student get it: biases of positions mixed as its heads."""
        return self.batches if self.merge is None else [_mix_biases(batch, self.merge) for batch in self.batches]

    def on_axes(self, stream: Tensor) -> Tensor:
        """The teacher's stream where the student's is compared with it."""
        return stream if self.basis is None else (stream.double() @ self.basis.kept).to(stream.dtype)

    @property
    def device(self) -> torch.device:
        return self.batches[0].stream.device

    def project(self, matrix: Array, bias: Array | None) -> Callable[[Tensor], Tensor]:
        """A projection of rows on their device, in float64."""
        weight = torch.from_numpy(matrix).to(self.device)
        shift = 0.0 if bias is None else torch.from_numpy(bias).to(self.device)
        return lambda rows: rows.double() @ weight + shift

    def study(
        self, source: int, streams: Sequence[Tensor], *, with_maps: bool
    ) -> tuple[HeadWeights, AttentionStatistics, LayerTrace]:
        """A teacher layer's attention, its statistics, of an earlier study if there is one, and its streams."""
        sizes = sizes_of(self.teacher.config, self.family).of_layer(source)
        layer = self.family.layers_of(self.teacher)[source]
        weights = self.family.read_attention(layer, sizes.heads, sizes.kv_heads)
        study = None if self.studies is None else self.studies.get(source)
        study = None if study is None or (with_maps and not study.with_maps) else study
        arguments = self.teacher, self.family, source, streams, self.batches, weights
        statistics, trace = study_layer(*arguments, with_maps=with_maps, statistics=study)
        if self.studies is not None:
            self.studies[source] = statistics
        return weights, statistics, trace

    def choose_merge(self, gram: Array, source: int, number: int) -> HeadMerge:
        """By the plan that was asked for; ``auto``: matched where networkx is there, but for exact groups.

        Those are balanced if they fit a student's head only when they are of one size.
        """
        teacher = sizes_of(self.teacher.config, self.family).of_layer(source)
        student, plan = self.sizes.of_layer(number), self.options.plan
        ratio = -(-teacher.heads // student.heads)
        if plan == "auto":
            fits = self.frequencies is None and ratio * teacher.head_dim <= student.head_dim
            uneven = teacher.heads != ratio * student.heads or ratio & (ratio - 1)
            plan = "balanced" if (fits and uneven) or find_spec("networkx") is None else "matched"
        return merge_heads(gram, student.heads, plan, teacher.kv_heads)


def _mix_biases(batch: Batch, merge: HeadMerge) -> Batch:
    """A batch whose arguments by head ``(B, H, L, L)`` are mixed; one tensor may be an argument of many layers."""
    mixing = torch.from_numpy(merge.mixing).to(batch.stream)
    mixed: dict[int, Tensor] = {}

    def mix(argument: Any) -> Any:
        if not (isinstance(argument, Tensor) and argument.ndim == 4 and argument.shape[1] == mixing.shape[1]):
            return argument
        if id(argument) not in mixed:
            mixed[id(argument)] = torch.einsum("ht,btls->bhls", mixing, argument)
        return mixed[id(argument)]

    calls = [
        (tuple(map(mix, args)), {name: mix(entry) for name, entry in named.items()}) for args, named in batch.calls
    ]
    return replace(batch, calls=calls)


def share_merge(work: Work) -> None:
    """One merge for all layers that attend, from the sum of their gram tensors; it mixes the biases too."""
    family = work.family
    if family.biases is None:
        return
    heads, count = (sizes_of(model.config, family).of_layer(0).heads for model in (work.teacher, work.student))
    mixing = np.eye(heads)
    if count != heads:
        attending = [
            source for number, source in enumerate(work.sources) if number not in work.sizes.dropped.attention
        ]
        streams, gram = [batch.stream for batch in work.batches], np.zeros((heads,) * 4)
        for number in range(len(family.layers_of(work.teacher))):
            _, statistics, trace = work.study(number, streams, with_maps=number in attending)
            gram, streams = gram + statistics.gram, list(trace.outputs)
        work.merge = work.choose_merge(gram, 0, 0)
        mixing = work.merge.mixing
    table = as_array(find_part(base_of(work.teacher), family.biases)) @ mixing.T
    find_part(base_of(work.student), family.biases).copy_(torch.from_numpy(table))


def make_layer(
    work: Work, number: int, source: int, following: int, teacher_streams: list[Tensor], student_streams: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """One student layer; returns the streams of teacher and student after it, and its report.

    ``source`` and ``following`` are the teacher layers that it and the next one come from; the streams are those
    before it, batch by batch.
    """
    family, sizes = work.family, work.sizes.of_layer(number)
    layer, target = family.layers_of(work.teacher)[source], family.layers_of(work.student)[number]
    work.tell(f"layer {number + 1}/{len(work.sources)}")
    attends = number not in work.sizes.dropped.attention
    # A merge of all layers was chosen from their maps already.
    is_merged = sizes.heads != sizes_of(work.teacher.config, family).of_layer(source).heads
    weights, statistics, trace = work.study(
        source, teacher_streams, with_maps=attends and is_merged and work.merge is None
    )
    report: dict[str, Any] = {"case": "dropped", "exact": False}
    ways: list[Squeezed | None] = [None]
    if attends:
        merge = work.merge or work.choose_merge(statistics.gram, source, number)
        ways = [*_squeeze_ways(work, source, number, teacher_streams, weights, merge, statistics)]
        report |= {
            "plan": [[list(pair) for pair in pairs] for pairs in merge.plan],
            "groups": [list(group) for group in merge.groups],
            "mixing": merge.mixing.tolist(),
        }
    if number in work.sizes.dropped.activations:
        fit = fit_ffn(work, source, teacher_streams)
        ffn = _Ffn([], fit.solve(), is_linear=True)
        report |= {"ffn": "linear", "ffn_error": fit.held_error()}
    else:
        ffn = _read_ffn(family, layer, sizes.neurons, trace.neuron_squares)
        report |= {} if ffn.kept is None else {"neurons": ffn.kept}
    for name in family.first_only if number == 0 else ():
        find_part(target, name).load_state_dict(find_part(family.layers_of(work.teacher)[0], name).state_dict())
    after, ends, last = _advance(work, trace, source, following)
    best: tuple[dict[str, Any], list[Tensor], dict[str, Tensor]] | None = None
    for squeezed in ways:
        candidate = _Layer(work, layer, target, source, squeezed, ffn, teacher_streams, student_streams, trace)
        candidate.copy() if work.basis is None else candidate.rotate(work.basis)
        result: dict[str, Any] = {} if squeezed is None else {"case": squeezed.case, "exact": squeezed.exact}
        if work.options.align:
            if family.end is not None and last is not layer:
                find_part(target, family.end).load_state_dict(find_part(last, family.end).state_dict())
            result["ridges"] = candidate.align(ends)
        streams, errors = candidate.measure(ends)
        if best is None or errors["attention_error"] < NEARER * best[0]["attention_error"]:
            state = {name: tensor.clone() for name, tensor in target.state_dict().items()} if len(ways) > 1 else {}
            best = result | errors, streams, state
    assert best is not None  # there is a way
    result, streams, state = best
    if state:
        target.load_state_dict(state)
    return after, streams, report | result


def _advance(
    work: Work, trace: LayerTrace, source: int, following: int
) -> tuple[list[Tensor], list[Tensor], nn.Module]:
    """The teacher's stream before the next source layer, what its last norm read, and the last layer run."""
    family, layers = work.family, work.family.layers_of(work.teacher)
    teacher_streams, ends = list(trace.outputs), list(trace.ends)
    for number in range(source + 1, following):
        watched = [] if family.end is None else [find_part(layers[number], family.end)]
        runs = list(run_layer(layers[number], teacher_streams, work.batches, number, watched))
        teacher_streams = [stream for stream, _ in runs]
        ends = [read[0] if read else stream for stream, read in runs]
    return teacher_streams, ends, layers[following - 1]


def _squeeze_ways(
    work: Work,
    source: int,
    number: int,
    teacher_streams: Sequence[Tensor],
    weights: HeadWeights,
    merge: HeadMerge,
    statistics: AttentionStatistics,
) -> list[Squeezed]:
    """The closed forms of a layer's attention, of which the first is taken unless another is clearly nearer.

    With rotary positions heads that are rotated towards each other come first where query heads share them, and those
    of least rank where every query head has its own.
    """
    family, sizes = work.family, work.sizes.of_layer(number)
    frequencies = None if work.frequencies is None else work.frequencies[source]
    query_norm, stays = family.query_norm is not None, len(merge.groups) == weights.num_heads
    ways = []
    if not (query_norm and stays and sizes.kv_heads != weights.num_kv_heads):
        positions: dict[str, Any] = {"frequencies": frequencies, "query_norm": query_norm}
        ways.append(squeeze_attention(weights, merge, statistics, sizes.kv_heads, sizes.head_dim, **positions))
    if not ways or ways[0].case == "rotary":
        pairs = 0 if frequencies is None else len(frequencies)
        places = work.teacher, family, source, teacher_streams, work.batches
        shared = share_attention(*places, weights, merge, statistics.augmented, sizes.kv_heads, pairs)
        ways.append(Squeezed(shared[0], "turned", shared[1]))
    return ways[::-1] if sizes.kv_heads < sizes.heads else ways


@dataclass(frozen=True, eq=False)
class _Ffn:
    """An FFN as the student has it."""

    readers: list[Rows]  # matrices that read the stream, before the last one
    last: Rows  # the last matrix
    kept: list[int] | None = None  # the neurons that stay, None for all
    is_linear: bool = False  # whether the last matrix reads the stream itself

    def write(self, family: Family, target: nn.Module) -> None:
        if not self.is_linear:
            family.write_readers(target, self.readers)
        family.write_last(target, *self.last)


def _read_ffn(family: Family, layer: nn.Module, neurons: int, squares: Array) -> _Ffn:
    readers, (matrix, bias) = family.read_readers(layer), family.read_last(layer)
    if neurons == len(matrix):
        return _Ffn(readers, (matrix, bias))
    best = list(most_important(score_neurons(squares, matrix.T), neurons))
    return _Ffn([take_columns(reader, best) for reader in readers], (matrix[best], bias), best)


def fit_ffn(work: Work, source: int, streams: Sequence[Tensor]) -> OutputFit:
    """The ridge regression of a teacher FFN's output on what it reads: one map and a bias in its place.

    Its two matrices multiplied, as in the second source, gave more error on every model tried, and do not exist
    where a gate multiplies.
    """
    family, layer = work.family, work.family.layers_of(work.teacher)[source]
    ends = [find_part(layer, name) for name in (family.ffn[0][0], family.ffn[1])]
    last = family.read_last(layer)
    width = last[0].shape[1]
    fit = OutputFit(np.zeros((width, width)), np.zeros(width), work.options.ridge, work.device)
    output, runs = work.project(*last), run_layer(layer, streams, work.batches, source, ends)
    for (_, (read, neurons)), batch in zip(runs, work.batches, strict=True):
        fit.add(batch.rows(read), output(batch.rows(neurons)), batch.held_rows(read))
    return fit


@dataclass(frozen=True, eq=False)
class _Layer:
    """A student layer at work: the closed form in place, then refitted, then measured."""

    work: Work
    layer: nn.Module  # the teacher's
    target: nn.Module  # the student's
    source: int  # the number of the teacher's
    squeezed: Squeezed | None  # the attention, None where it is dropped
    ffn: _Ffn
    teacher_streams: list[Tensor]  # the teacher's stream before the layer
    student_streams: list[Tensor]  # the student's
    trace: LayerTrace

    def copy(self) -> None:
        """The closed form in place on a stream of the teacher's width: all but attention and FFN as they are."""
        family = self.work.family
        changed = tuple(f"{name}." for name in (*family.projections, *family.ffn[0], family.ffn[1]))
        rest = {name: tensor for name, tensor in self.layer.state_dict().items() if not name.startswith(changed)}
        self.target.load_state_dict(rest, strict=False)
        if self.squeezed is not None:
            family.write_attention(self.target, self.squeezed.weights)
        self.ffn.write(family, self.target)

    def rotate(self, basis: Basis) -> None:
        """The closed form in place on the kept axes: all that reads or writes the stream changes its basis."""
        family, batches, target, trace = self.work.family, self.work.batches, self.target, self.trace
        assert family.norms is not None  # check_ends
        readings = [basis.through(find_part(self.layer, name)) for name in family.norms]
        if self.squeezed is not None:
            family.write_attention(target, basis.rotate_attention(readings[0], self.squeezed.weights))
            if family.query_norm is not None:
                for name in (family.query_norm, family.query_norm.replace("q_norm", "k_norm")):
                    find_part(target, name).load_state_dict(find_part(self.layer, name).state_dict())
        readers = [readings[1](*rows) for rows in self.ffn.readers]
        last = readings[1](*self.ffn.last) if self.ffn.is_linear else self.ffn.last
        replace(self.ffn, readers=readers, last=basis.write(*last)).write(family, target)
        middles = self.teacher_streams if family.is_parallel else trace.middles
        for name, streams in zip(family.norms, (self.teacher_streams, middles), strict=True):
            if self.squeezed is not None or name != family.norms[0]:
                rows = join_rows([basis.normalise(stream) for stream in streams], batches)
                basis.write_norm(find_part(target, name), rows)

    def run(self, watched: Sequence[nn.Module]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        return run_layer(self.target, self.student_streams, self.work.own_batches, self.source, watched)

    def align(self, ends: Sequence[Tensor]) -> dict[str, float | None]:
        """Refit one matrix after the other, each on what those before it now give: their ridges."""
        family, trace, is_cut = self.work.family, self.trace, self.work.basis is not None
        ridges: dict[str, float | None] = {}
        if self.squeezed is not None:
            if is_cut:
                queries = side_by_side(family.attention_inputs(self.squeezed.weights))
                ridges["attention_inputs"] = self.fit_readers(family.projections[:-1], trace.inputs, queries)
            ridges["attention_output"] = self.fit_writer(family.projections[-1], family.middle, trace.middles)
        if is_cut and not self.ffn.is_linear:
            readers = side_by_side(self.ffn.readers)
            ridges["ffn_inputs"] = self.fit_readers(family.ffn[0], trace.ffn_inputs, readers)
        ridges["ffn_output"] = self.fit_writer(family.ffn[1], family.end, ends)
        return ridges

    def fit_writer(self, name: str, path: str | None, goals: Sequence[Tensor]) -> float | None:
        """Refit a matrix that writes to the stream, towards the teacher's stream at a place of the layer."""
        family, module = self.work.family, find_part(self.target, name)

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            runs = self.run([module] if path is None else [module, find_part(self.target, path)])
            for (out, read), before, goal in zip(runs, self.student_streams, goals, strict=True):
                stream = out if path is None else read[1]
                stream = family.middle_of(stream, before) if path == family.middle else stream
                yield read[0], self.work.on_axes(goal).double() - (stream.double() - module(read[0]).double())

        return _refit(self.work, [module], pairs())

    def fit_readers(self, names: Sequence[str], inputs: Sequence[Tensor], rows: Rows) -> float | None:
        """Refit matrices that read a cut stream, towards their outputs for the teacher's whole one."""
        modules, project = [find_part(self.target, name) for name in names], self.work.project(*rows)
        runs = zip(self.run(modules[:1]), inputs, self.work.batches, strict=True)
        pairs = ((read[0], project(batch.rows(stream))) for (_, read), stream, batch in runs)
        return _refit(self.work, modules, pairs)

    def measure(self, ends: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, float]]:
        """The student's stream after the layer and the relative errors in it."""
        work, family = self.work, self.work.family
        names = [name for name in (family.middle, family.end) if name is not None]
        sums, streams = [0.0] * 4, []
        runs = self.run([find_part(self.target, name) for name in names])
        for (out, read), before, middle, end, batch in zip(
            runs, self.student_streams, self.trace.middles, ends, work.batches, strict=True
        ):
            streams.append(out)
            places = family.middle_of(read[0], before), (out if family.end is None else read[1])
            for place, (stream, goal) in enumerate(zip(places, (middle, end), strict=True)):
                target = batch.rows(work.on_axes(goal)).double()
                sums[2 * place] += float((batch.rows(stream).double() - target).square().sum())
                sums[2 * place + 1] += float(target.square().sum())
        errors = [(gap / size) ** 0.5 if size > 0 else 0.0 for gap, size in (sums[:2], sums[2:])]
        return streams, {"attention_error": errors[0], "layer_error": errors[1]}


def _refit(work: Work, modules: Sequence[Any], pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """One matrix, or several that read the same, from what they read and should give in each batch; the ridge."""
    fit = OutputFit(*side_by_side([read_linear(module) for module in modules]), work.options.ridge, work.device)
    for (read, goal), batch in zip(pairs, work.batches, strict=True):
        fit.add(batch.rows(read), batch.rows(goal), batch.held_rows(read))
    fitted = fit.solve()
    ends = np.cumsum([read_linear(module)[0].shape[1] for module in modules])[:-1]
    for module, columns in zip(modules, np.split(np.arange(fitted[0].shape[1]), ends), strict=True):
        write_linear(module, *take_columns(fitted, columns))
    return fit.chosen


def fit_final(work: Work, teacher_streams: list[Tensor], student_streams: list[Tensor]) -> None:
    """Refit what reads the last norm of a cut stream."""
    assert work.family.final_norm is not None  # check_ends
    whole, cut = (find_part(base_of(model), work.family.final_norm) for model in (work.teacher, work.student))
    for name, module in final_readers(work.student, work.family):
        if module.in_features == work.sizes.hidden:  # else it reads several rows side by side
            project = work.project(*read_linear(work.teacher.get_submodule(name)))
            runs = zip(student_streams, teacher_streams, work.batches, strict=True)
            _refit(work, [module], ((cut(stream), project(batch.rows(whole(goal)))) for stream, goal, batch in runs))
