"""One layer of a student from one of the teacher: the closed form in place, then refitted.

Alignment goes layer by layer, first the attention's output projection, then the FFN's last matrix. Their inputs are
the *student's*, with every earlier layer aligned; the target is the teacher's stream at that place less the student's
before the block. After the FFN it is the stream *before* the teacher layer that the next student layer comes from, so
that the matrix stands in for layers that were left out. Where a norm lies on the stream, the target is what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.shrink.ffn import merge_linear, most_important
from shd_ref.shrink.merges import HeadMerge, merge_heads
from shd_torch.shrink.calibration import Batch, LayerTrace, join_rows, run_layer, study_layer
from shd_torch.shrink.channels import fit_norm, predict_stream
from shd_torch.shrink.custom import Dropped, LayerSizes
from shd_torch.shrink.families import (
    Array,
    Family,
    Rows,
    as_array,
    base_of,
    find_part,
    read_linear,
    side_by_side,
    write_linear,
)
from shd_torch.shrink.heads import OutputFit, Squeezed
from shd_torch.shrink.sizes import ShrinkOptions, Sizes, sizes_of
from shd_torch.shrink.unfinished import Studies
from shd_torch.shrink.width import Turn, final_readers

STAGES = ("maps", "heads", "alignment", "errors")
"""Of a layer: what its attention says, the closed form, what is refitted, and what is measured."""


@dataclass(eq=False)
class Work:
    """What the layers of one run share."""

    teacher: Any  # in evaluation mode
    student: Any  # of the same class; its layers are filled one by one
    family: Family  # of both
    batches: list[Batch]  # the calibration set before the first layer
    kept: tuple[int, ...]  # the teacher layer of each student layer
    dropped: Dropped  # what student layers lack
    sizes: Sizes  # of the student
    options: ShrinkOptions  # of shrink
    frequencies: list[Array] | None  # of rotary positions of each teacher layer, or None
    tell: Callable[..., None]  # gets what is done now
    turn: Turn | None = None  # the kept axes; None where the stream keeps its width
    merge: HeadMerge | None = None  # of all layers, where they share position biases
    studies: Studies | None = None  # statistics of teacher layers, shared with other students
    reports: list[dict[str, Any]] = field(default_factory=list)  # one per layer, as shrink.json holds them

    @cached_property
    def own_batches(self) -> list[Batch]:
        """The calibration set as layers of the student get it: biases of positions mixed as its heads."""
        return self.batches if self.merge is None else [_mix_biases(batch, self.merge) for batch in self.batches]

    def tell_stage(self, number: int, stage: str) -> None:
        """Say which layer of the student is at which of ``STAGES``."""
        self.tell(f"layer {number + 1}/{len(self.kept)} {stage}")

    def on_axes(self, stream: Tensor) -> Tensor:
        """The teacher's stream where the student's is compared with it."""
        return stream if self.turn is None else (stream.double() @ self.turn.basis).to(stream.dtype)

    @property
    def device(self) -> torch.device:
        """Where streams are."""
        return self.batches[0].stream.device

    def project(self, matrix: Array, bias: Array | None) -> Callable[[Tensor], Tensor]:
        """A projection of rows on their device, in float64."""
        weight = torch.from_numpy(matrix).to(self.device)
        shift = 0.0 if bias is None else torch.from_numpy(bias).to(self.device)
        return lambda rows: rows.double() @ weight + shift


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
    teacher, student = (sizes_of(model.config, family).of_layer(0) for model in (work.teacher, work.student))
    if family.biases is None:
        return
    mixing = np.eye(teacher.heads)
    if student.heads != teacher.heads:
        attending = [source for number, source in enumerate(work.kept) if number not in work.dropped.attention]
        streams, gram = [batch.stream for batch in work.batches], np.zeros((teacher.heads,) * 4)
        for number, layer in enumerate(family.layers_of(work.teacher)):
            weights = family.read_attention(layer, teacher.heads, teacher.kv_heads)
            is_read = number in attending
            study = study_layer(work.teacher, family, number, streams, work.batches, weights, with_maps=is_read)
            gram, streams = gram + study[0].gram, list(study[1].outputs)
        work.merge = merge_heads(gram, student.heads, _choose_plan(work, teacher, student), teacher.kv_heads)
        mixing = work.merge.mixing
    table = as_array(find_part(base_of(work.teacher), family.biases)) @ mixing.T
    find_part(base_of(work.student), family.biases).copy_(torch.from_numpy(table))


def make_layer(
    work: Work, number: int, source: int, following: int, taught: list[Tensor], own: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """One student layer; returns the streams of teacher and student after it, and its report.

    ``source`` and ``following`` are the teacher layers that it and the next one come from; ``taught`` and ``own`` the
    streams of teacher and student before it, batch by batch.
    """
    family = work.family
    layer, target = family.layers_of(work.teacher)[source], family.layers_of(work.student)[number]
    teacher, sizes = sizes_of(work.teacher.config, family).of_layer(source), work.sizes.of_layer(number)
    weights = family.read_attention(layer, teacher.heads, teacher.kv_heads)
    work.tell_stage(number, "maps")
    merges = number not in work.dropped.attention and sizes.heads != teacher.heads
    if work.merge is not None and work.options.is_usual:  # it was chosen from the maps of all layers
        merges = False
    kept = None if work.studies is None else work.studies.read(source, with_maps=merges)
    statistics, trace = study_layer(
        work.teacher, family, source, taught, work.batches, weights, with_maps=merges, statistics=kept
    )
    if work.studies is not None and kept is None:
        work.studies.keep(source, statistics)
    work.tell_stage(number, "heads")
    report: dict[str, Any] = {"case": "dropped", "exact": False}
    squeezed = None
    if number not in work.dropped.attention:
        merge = work.merge or merge_heads(
            statistics.gram, sizes.heads, _choose_plan(work, teacher, sizes), teacher.kv_heads
        )
        frequencies = None if work.frequencies is None else work.frequencies[source]
        positions: dict[str, Any] = {"frequencies": frequencies, "query_norm": family.query_norm is not None}
        squeezed = work.options.squeezer(weights, merge, statistics, sizes.kv_heads, sizes.head_dim, **positions)
        report = {
            "case": squeezed.case,
            "exact": squeezed.exact,
            "plan": [[list(pair) for pair in pairs] for pairs in merge.plan],
            "groups": [list(group) for group in merge.groups],
            "mixing": merge.mixing.tolist(),
        }
    ffn = _read_ffn(work, layer, sizes.neurons, trace.neuron_squares, is_linear=number in work.dropped.activations)
    if ffn.kept is not None:
        report["neurons"] = ffn.kept
    if ffn.is_linear:
        report["ffn"] = "linear"
    _fill_layer(work, layer, target, squeezed, ffn, taught, trace)
    for name in family.first_only if number == 0 else ():
        find_part(target, name).load_state_dict(find_part(family.layers_of(work.teacher)[0], name).state_dict())
    work.tell_stage(number, "alignment")
    after, ends, last = _advance(work, source, following, trace)
    if work.options.align:
        if family.end is not None and last is not layer and work.turn is None:
            find_part(target, family.end).load_state_dict(find_part(last, family.end).state_dict())
        report["ridges"] = _align_layer(_Fitter(work, target, source, own), squeezed, ffn, trace, ends, after)
    work.tell_stage(number, "errors")
    streams, errors = _measure(work, target, source, own, trace.middles, ends)
    return after, streams, report | errors


def _align_layer(
    fitter: _Fitter,
    squeezed: Squeezed | None,
    ffn: _Ffn,
    trace: LayerTrace,
    ends: Sequence[Tensor],
    after: Sequence[Tensor],
) -> dict[str, float | None]:
    """Refit one matrix after the other, each on what those before it now give: their ridges."""
    family, is_cut = fitter.work.family, fitter.work.turn is not None
    ridges: dict[str, float | None] = {}
    if squeezed is not None:
        if is_cut:
            queries = side_by_side(family.attention_inputs(squeezed.weights))
            ridges["attention_inputs"] = fitter.fit_readers(family.projections[:-1], trace.inputs, queries)
        ridges["attention_output"] = fitter.fit(family.projections[-1], family.middle, trace.middles)
    if is_cut and family.end is not None:
        fitter.fit_norm(family.middle, trace.ffn_inputs)
    if is_cut and not ffn.is_linear:
        ridges["ffn_inputs"] = fitter.fit_readers(family.ffn[0], trace.ffn_inputs, side_by_side(ffn.readers))
    ridges["ffn_output"] = fitter.fit(family.ffn[1], family.end, ends)
    if is_cut and family.end is not None:
        fitter.fit_norm(family.end, after)
    return ridges


def _advance(
    work: Work, source: int, following: int, trace: LayerTrace
) -> tuple[list[Tensor], list[Tensor], nn.Module]:
    """The teacher's stream before the next source layer, what the last norm on it read, and the last layer run."""
    layers = work.family.layers_of(work.teacher)
    taught, ends = list(trace.outputs), list(trace.ends)
    for number in range(source + 1, following):
        watched = [] if work.family.end is None else [find_part(layers[number], work.family.end)]
        runs = list(run_layer(layers[number], taught, work.batches, number, watched))
        taught = [stream for stream, _ in runs]
        ends = [read[0] if read else stream for stream, read in runs]
    return taught, ends, layers[following - 1]


class _Ffn(NamedTuple):
    """An FFN as the student has it."""

    readers: list[Rows]  # what reads the stream
    last: Rows  # the last matrix
    kept: list[int] | None  # the neurons that stay, None for all
    is_linear: bool  # whether readers and last matrix become one


def _read_ffn(work: Work, layer: nn.Module, neurons: int, squares: Array, *, is_linear: bool) -> _Ffn:
    """All neurons of a teacher's linear FFN; else the most important ones, in their order."""
    readers = work.family.read_readers(layer)
    matrix, bias = work.family.read_last(layer)
    if is_linear or neurons == len(matrix):
        return _Ffn(readers, (matrix, bias), None, is_linear)
    best = list(most_important(work.options.importance(squares, matrix.T), neurons))
    cut = [(reader[:, best], None if shift is None else shift[best]) for reader, shift in readers]
    return _Ffn(cut, (matrix[best], bias), best, is_linear)


def _fill_layer(
    work: Work,
    layer: nn.Module,
    target: nn.Module,
    squeezed: Squeezed | None,
    ffn: _Ffn,
    taught: Sequence[Tensor],
    trace: LayerTrace,
) -> None:
    """The closed form in place: attention as squeezed, the rest as in the teacher, both on the kept axes."""
    family, turn = work.family, work.turn
    if turn is None:
        changed = tuple(f"{name}." for name in (*family.projections, *family.ffn[0], family.ffn[1]))
        rest = {name: tensor for name, tensor in layer.state_dict().items() if not name.startswith(changed)}
        target.load_state_dict(rest, strict=False)
        if squeezed is not None:
            family.write_attention(target, squeezed.weights)
        _write_ffn(family, target, ffn)
        return
    norms: list[Any] = []  # what Turn.read gets: a norm, or where norms lie on the stream a prediction of it
    if family.norms is not None:
        norms = [find_part(layer, name) for name in family.norms]
    else:
        held = torch.cat([batch.held_rows for batch in work.batches])
        sites = taught, trace.ffn_inputs
        norms = [predict_stream(turn.basis, join_rows(rows, work.batches), held) for rows in sites]
    if squeezed is not None:
        family.write_attention(target, turn.turn_attention(norms[0], squeezed.weights))
        if family.query_norm is not None:
            for name in (family.query_norm, family.query_norm.replace("q_norm", "k_norm")):
                find_part(target, name).load_state_dict(find_part(layer, name).state_dict())
    readers = [turn.read(norms[1], *rows) for rows in ffn.readers]
    _write_ffn(family, target, ffn._replace(readers=readers, last=turn.write(*ffn.last)))
    if family.norms is None:
        assert family.end is not None  # a norm lies there
        for name, pairs in (
            (family.middle, (trace.middles, trace.ffn_inputs)),
            (family.end, (trace.ends, trace.outputs)),
        ):
            fit_norm(find_part(target, name), *(work.on_axes(join_rows(streams, work.batches)) for streams in pairs))
        return
    for name, streams in zip(family.norms, (taught, taught if family.is_parallel else trace.middles), strict=True):
        if squeezed is not None or name != family.norms[0]:
            rows = join_rows([turn.normalise(stream) for stream in streams], work.batches)
            turn.write_norm(find_part(target, name), rows)


def _write_ffn(family: Family, target: nn.Module, ffn: _Ffn) -> None:
    if ffn.is_linear:
        (first, first_bias), (last, last_bias) = ffn.readers[0], ffn.last
        merged = merge_linear(first.T, last.T, first_bias, last_bias)
        family.write_last(target, merged.weight.T, merged.bias)
        return
    family.write_readers(target, ffn.readers)
    family.write_last(target, *ffn.last)


class _Fitter(NamedTuple):
    """Refits matrices of one student layer ``target``, whose stream is ``own``; each gives its ridge, or None."""

    work: Work
    target: nn.Module
    source: int
    own: list[Tensor]

    def fit(self, name: str, goal_path: str | None, goals: Sequence[Tensor]) -> float | None:
        """One matrix, towards the teacher's stream at a place of the layer."""
        work, module = self.work, find_part(self.target, name)
        fit = OutputFit(*read_linear(module), work.options.ridge, work.device)
        watched = [module] if goal_path is None else [module, find_part(self.target, goal_path)]
        runs = run_layer(self.target, self.own, work.own_batches, self.source, watched)
        for (out, read), own, goal, batch in zip(runs, self.own, goals, work.batches, strict=True):
            stream = out if goal_path is None else read[1]
            stream = work.family.middle_of(stream, own) if goal_path == work.family.middle else stream
            before = stream.double() - module(read[0]).double()
            fit.add(read[0][batch.counted], (work.on_axes(goal).double() - before)[batch.counted], batch.held_rows)
        write_linear(module, *fit.solve())
        return fit.chosen

    def fit_norm(self, path: str, goals: Sequence[Tensor]) -> None:
        """A norm that lies on a cut stream, towards what the teacher's stream is after it."""
        work, norm = self.work, find_part(self.target, path)
        runs = run_layer(self.target, self.own, work.batches, self.source, [norm])
        rows = join_rows([read[0] for _, read in runs], work.batches)
        fit_norm(norm, rows, work.on_axes(join_rows(goals, work.batches)))

    def fit_readers(self, names: Sequence[str], inputs: Sequence[Tensor], rows: Rows) -> float | None:
        """What reads a cut stream, towards what the same matrices make of the teacher's whole one."""
        work, modules = self.work, [find_part(self.target, name) for name in names]
        fit = OutputFit(*side_by_side([read_linear(module) for module in modules]), work.options.ridge, work.device)
        project = work.project(*rows)
        runs = run_layer(self.target, self.own, work.own_batches, self.source, modules[:1])
        for (_, (read,)), stream, batch in zip(runs, inputs, work.batches, strict=True):
            fit.add(read[batch.counted], project(stream[batch.counted]), batch.held_rows)
        matrix, bias = fit.solve()
        ends = np.cumsum([len(read_linear(module)[0].T) for module in modules])[:-1]
        biases = [None] * len(modules) if bias is None else np.split(bias, ends)
        for module, columns, shift in zip(modules, np.split(matrix, ends, axis=1), biases, strict=True):
            write_linear(module, columns, shift)
        return fit.chosen


def fit_final(work: Work, taught: list[Tensor], own: list[Tensor]) -> None:
    """Refit what reads the last norm of a cut stream."""
    assert work.family.final_norm is not None  # check_width
    norms = [find_part(base_of(model), work.family.final_norm) for model in (work.teacher, work.student)]
    for name, module in final_readers(work.student, work.family):
        if module.in_features != work.sizes.hidden:
            continue  # it reads several rows side by side
        project = work.project(*read_linear(work.teacher.get_submodule(name)))
        fit = OutputFit(*read_linear(module), work.options.ridge, work.device)
        for goal, stream, batch in zip(taught, own, work.batches, strict=True):
            fit.add(norms[1](stream)[batch.counted], project(norms[0](goal)[batch.counted]), batch.held_rows)
        write_linear(module, *fit.solve())


def _measure(
    work: Work, target: nn.Module, source: int, own: list[Tensor], middles: Sequence[Tensor], ends: list[Tensor]
) -> tuple[list[Tensor], dict[str, float]]:
    """The student's stream after a layer and the relative errors in it."""
    names = [work.family.middle] + ([] if work.family.end is None else [work.family.end])
    sums = [0.0] * 4
    streams = []
    runs = run_layer(target, own, work.own_batches, source, [find_part(target, name) for name in names])
    for (out, read), before, middle, end, batch in zip(runs, own, middles, ends, work.batches, strict=True):
        streams.append(out)
        after = work.family.middle_of(read[0], before)
        pairs = ((after, work.on_axes(middle)), (out if len(read) == 1 else read[1], work.on_axes(end)))
        for at, (stream, goal) in enumerate(pairs):
            there = goal.double()[batch.counted]
            sums[2 * at] += float((stream.double()[batch.counted] - there).square().sum())
            sums[2 * at + 1] += float(there.square().sum())
    errors = [(gap / size) ** 0.5 if size > 0 else 0.0 for gap, size in (sums[:2], sums[2:])]
    return streams, {"attention_error": errors[0], "layer_error": errors[1]}


def _choose_plan(work: Work, teacher: LayerSizes, student: LayerSizes) -> str:
    """``auto``: matched; balanced where groups fit exactly if they are of one size, and matched ones would not be."""
    if work.options.plan != "auto":
        return work.options.plan
    ratio = -(-teacher.heads // student.heads)
    fits = work.frequencies is None and ratio * teacher.head_dim <= student.head_dim
    if fits and (teacher.heads != ratio * student.heads or ratio & (ratio - 1)):
        return "balanced"
    return "matched" if find_spec("networkx") is not None else "balanced"
