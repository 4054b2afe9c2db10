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
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.shrink.heads import HeadMerge, merge_heads
from shd_ref.shrink.kept import most_important, score_neurons
from shd_torch.shrink.basis import Basis, OutputFit, final_readers, fit_norm
from shd_torch.shrink.calibration import Batch, join_rows, run_layer
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
from shd_torch.shrink.heads import LayerTrace, Squeezed, squeeze_attention, study_layer
from shd_torch.shrink.options import ShrinkOptions
from shd_torch.shrink.sizes import Sizes, sizes_of
from shd_torch.shrink.unfinished import Studies

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
    basis: Basis | None = None  # the kept axes; None where the stream keeps its width
    merge: HeadMerge | None = None  # of all layers, where they share position biases
    studies: Studies | None = None  # statistics of teacher layers, shared with other students
    reports: list[dict[str, Any]] = field(default_factory=list)  # one per layer, as shrink.json holds them

    @cached_property
    def own_batches(self) -> list[Batch]:
        """The calibration set as layers of the student get it: biases of positions mixed as its heads."""
        return self.batches if self.merge is None else [_mix_biases(batch, self.merge) for batch in self.batches]

    def tell_stage(self, number: int, stage: str) -> None:
        self.tell(f"layer {number + 1}/{len(self.kept)} {stage}")

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

    def choose_merge(self, gram: Array, teacher: LayerSizes, student: LayerSizes) -> HeadMerge:
        """By the plan that was asked for; ``auto``: matched where networkx is there, but for exact groups.

        Those are balanced if they fit a student's head only when they are of one size.
        """
        plan, ratio = self.options.plan, -(-teacher.heads // student.heads)
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
        work.merge = work.choose_merge(gram, teacher, student)
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
    attends = number not in work.dropped.attention
    # A merge of all layers was chosen from their maps already.
    with_maps = attends and sizes.heads != teacher.heads and work.merge is None
    kept = None if work.studies is None else work.studies.read(source, with_maps=with_maps)
    statistics, trace = study_layer(
        work.teacher, family, source, taught, work.batches, weights, with_maps=with_maps, statistics=kept
    )
    if work.studies is not None and kept is None:
        work.studies.keep(source, statistics)
    work.tell_stage(number, "heads")
    report: dict[str, Any] = {"case": "dropped", "exact": False}
    squeezed = None
    if attends:
        merge = work.merge or work.choose_merge(statistics.gram, teacher, sizes)
        frequencies = None if work.frequencies is None else work.frequencies[source]
        positions: dict[str, Any] = {"frequencies": frequencies, "query_norm": family.query_norm is not None}
        squeezed = squeeze_attention(weights, merge, statistics, sizes.kv_heads, sizes.head_dim, **positions)
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
    (_copy_layer if work.basis is None else _turn_layer)(work, layer, target, squeezed, ffn, taught, trace)
    for name in family.first_only if number == 0 else ():
        find_part(target, name).load_state_dict(find_part(family.layers_of(work.teacher)[0], name).state_dict())
    work.tell_stage(number, "alignment")
    after, ends, last = _advance(work, source, following, trace)
    if work.options.align:
        if family.end is not None and last is not layer and work.basis is None:
            find_part(target, family.end).load_state_dict(find_part(last, family.end).state_dict())
        report["ridges"] = _align_layer(work, target, source, own, squeezed, ffn, trace, ends, after)
    work.tell_stage(number, "errors")
    streams, errors = _measure(work, target, source, own, trace.middles, ends)
    return after, streams, report | errors


class _Ffn(NamedTuple):
    """An FFN as the student has it."""

    readers: list[Rows]  # what reads the stream
    last: Rows  # the last matrix
    kept: list[int] | None  # the neurons that stay, None for all
    is_linear: bool  # whether readers and last matrix become one

    def write(self, family: Family, target: nn.Module) -> None:
        """Into a student's layer; without its activation as one map, ``W = W1 W2``, ``b = b1 W2 + b2``."""
        readers, (last, bias) = self.readers, self.last
        if not self.is_linear:
            family.write_readers(target, readers)
        else:
            (first, shift), *_ = readers
            terms = [term for term in (None if shift is None else last.T @ shift, bias) if term is not None]
            last, bias = (last.T @ first.T).T, np.sum(terms, axis=0) if terms else None
        family.write_last(target, last, bias)


def _read_ffn(work: Work, layer: nn.Module, neurons: int, squares: Array, *, is_linear: bool) -> _Ffn:
    """All neurons of a teacher's linear FFN; else the most important ones, in their order."""
    readers = work.family.read_readers(layer)
    matrix, bias = work.family.read_last(layer)
    if is_linear or neurons == len(matrix):
        return _Ffn(readers, (matrix, bias), None, is_linear)
    best = list(most_important(score_neurons(squares, matrix.T), neurons))
    cut = [(reader[:, best], None if shift is None else shift[best]) for reader, shift in readers]
    return _Ffn(cut, (matrix[best], bias), best, is_linear)


def _copy_layer(
    work: Work, layer: nn.Module, target: nn.Module, squeezed: Squeezed | None, ffn: _Ffn, *_: Any
) -> None:
    """The closed form in place on a stream of the teacher's width: all but attention and FFN as they are."""
    family = work.family
    changed = tuple(f"{name}." for name in (*family.projections, *family.ffn[0], family.ffn[1]))
    rest = {name: tensor for name, tensor in layer.state_dict().items() if not name.startswith(changed)}
    target.load_state_dict(rest, strict=False)
    if squeezed is not None:
        family.write_attention(target, squeezed.weights)
    ffn.write(family, target)


def _turn_layer(
    work: Work,
    layer: nn.Module,
    target: nn.Module,
    squeezed: Squeezed | None,
    ffn: _Ffn,
    taught: Sequence[Tensor],
    trace: LayerTrace,
) -> None:
    """The closed form in place on the kept axes: all that reads or writes the stream changes its basis."""
    family, basis, batches = work.family, work.basis, work.batches
    assert basis is not None
    if family.norms is not None:
        readings = [basis.through(find_part(layer, name)) for name in family.norms]
    else:
        held = torch.cat([batch.held_rows(stream) for batch, stream in zip(batches, taught, strict=True)])
        readings = [basis.predicted(join_rows(rows, batches), held) for rows in (taught, trace.ffn_inputs)]
    if squeezed is not None:
        family.write_attention(target, basis.turn_attention(readings[0], squeezed.weights))
        if family.query_norm is not None:
            for name in (family.query_norm, family.query_norm.replace("q_norm", "k_norm")):
                find_part(target, name).load_state_dict(find_part(layer, name).state_dict())
    readers = [readings[1](*rows) for rows in ffn.readers]
    ffn._replace(readers=readers, last=basis.write(*ffn.last)).write(family, target)
    if family.norms is None:
        assert family.end is not None  # a norm lies there
        sites = (family.middle, trace.middles, trace.ffn_inputs), (family.end, trace.ends, trace.outputs)
        for name, *pair in sites:
            fit_norm(find_part(target, name), *(work.on_axes(join_rows(streams, batches)) for streams in pair))
        return
    for name, streams in zip(family.norms, (taught, taught if family.is_parallel else trace.middles), strict=True):
        if squeezed is not None or name != family.norms[0]:
            rows = join_rows([basis.normalise(stream) for stream in streams], batches)
            basis.write_norm(find_part(target, name), rows)


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


def _align_layer(
    work: Work,
    target: nn.Module,
    source: int,
    own: list[Tensor],
    squeezed: Squeezed | None,
    ffn: _Ffn,
    trace: LayerTrace,
    ends: Sequence[Tensor],
    after: Sequence[Tensor],
) -> dict[str, float | None]:
    """Refit one matrix after the other, each on what those before it now give: their ridges."""
    family, is_cut = work.family, work.basis is not None

    def run(watched: Sequence[nn.Module]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        return run_layer(target, own, work.own_batches, source, watched)

    def fit_writer(name: str, path: str | None, goals: Sequence[Tensor]) -> float | None:
        """What writes to the stream, towards the teacher's at a place of the layer."""
        module = find_part(target, name)

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            runs = run([module] if path is None else [module, find_part(target, path)])
            for (out, read), before, goal in zip(runs, own, goals, strict=True):
                stream = out if path is None else read[1]
                stream = family.middle_of(stream, before) if path == family.middle else stream
                left = stream.double() - module(read[0]).double()
                yield read[0], work.on_axes(goal).double() - left

        return _refit(work, [module], pairs())

    def fit_readers(names: Sequence[str], inputs: Sequence[Tensor], rows: Rows) -> float | None:
        """What reads a cut stream, towards what the same matrices make of the teacher's whole one."""
        modules, project = [find_part(target, name) for name in names], work.project(*rows)
        runs = zip(run(modules[:1]), inputs, work.batches, strict=True)
        return _refit(work, modules, ((read[0], project(batch.rows(stream))) for (_, read), stream, batch in runs))

    def fit_norm_at(path: str, goals: Sequence[Tensor]) -> None:
        """A norm that lies on a cut stream, towards what the teacher's stream is after it."""
        norm = find_part(target, path)
        rows = join_rows([read[0] for _, read in run([norm])], work.batches)
        fit_norm(norm, rows, work.on_axes(join_rows(goals, work.batches)))

    ridges: dict[str, float | None] = {}
    if squeezed is not None:
        if is_cut:
            queries = side_by_side(family.attention_inputs(squeezed.weights))
            ridges["attention_inputs"] = fit_readers(family.projections[:-1], trace.inputs, queries)
        ridges["attention_output"] = fit_writer(family.projections[-1], family.middle, trace.middles)
    if is_cut and family.end is not None:
        fit_norm_at(family.middle, trace.ffn_inputs)
    if is_cut and not ffn.is_linear:
        ridges["ffn_inputs"] = fit_readers(family.ffn[0], trace.ffn_inputs, side_by_side(ffn.readers))
    ridges["ffn_output"] = fit_writer(family.ffn[1], family.end, ends)
    if is_cut and family.end is not None:
        fit_norm_at(family.end, after)
    return ridges


def _refit(work: Work, modules: Sequence[Any], pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """One matrix, or several that read the same, from what they read and should give in each batch; the ridge."""
    fit = OutputFit(*side_by_side([read_linear(module) for module in modules]), work.options.ridge, work.device)
    for (read, goal), batch in zip(pairs, work.batches, strict=True):
        fit.add(batch.rows(read), batch.rows(goal), batch.held_rows(read))
    matrix, bias = fit.solve()
    ends = np.cumsum([read_linear(module)[0].shape[1] for module in modules])[:-1]
    biases = [None] * len(modules) if bias is None else np.split(bias, ends)
    for module, columns, shift in zip(modules, np.split(matrix, ends, axis=1), biases, strict=True):
        write_linear(module, columns, shift)
    return fit.chosen


def fit_final(work: Work, taught: list[Tensor], own: list[Tensor]) -> None:
    """Refit what reads the last norm of a cut stream."""
    assert work.family.final_norm is not None  # check_ends
    whole, cut = (find_part(base_of(model), work.family.final_norm) for model in (work.teacher, work.student))
    for name, module in final_readers(work.student, work.family):
        if module.in_features == work.sizes.hidden:  # else it reads several rows side by side
            project = work.project(*read_linear(work.teacher.get_submodule(name)))
            runs = zip(own, taught, work.batches, strict=True)
            _refit(work, [module], ((cut(stream), project(batch.rows(whole(goal)))) for stream, goal, batch in runs))


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
