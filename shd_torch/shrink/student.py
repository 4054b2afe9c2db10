"""``shrink``: a teacher in, a smaller student of the same architecture out, layer by layer (specs/shrink.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_torch.checks import check_option
from shd_torch.precision import without_autocast
from shd_torch.shrink.align import RIDGE, OutputFit
from shd_torch.shrink.calibration import Batch, LayerTrace, rotary_frequencies, run_layer, start_batches, study_layer
from shd_torch.shrink.families import Family, base_of, family_of, find_part, read_linear, write_linear
from shd_torch.shrink.heads import Squeezed, squeeze_attention
from shd_torch.shrink.merges import PLANS, HeadMerge, merge_heads
from shd_torch.shrink.sizes import Sizes, choose_layers, choose_sizes, count_parameters, make_student, sizes_of
from shd_torch.shrink.weights import AttentionWeights
from shd_torch.shrink.width import Turn, check_width, final_readers, principal_axes, turn_ends

FORMAT = 1
Squeezer = Callable[..., Squeezed]
Axes = Callable[[Tensor, int, str], Tensor]
Progress = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Shrunk:
    """What ``shrink`` returns.

    Attributes:
        student: in evaluation mode, with the teacher's dtype and device.
        report: what ``shrink.json`` holds (STUDENT-3).
    """

    student: Any
    report: dict[str, Any]


@dataclass(eq=False)
class _Work:
    """What the layers of one run share."""

    teacher: Any
    student: Any
    family: Family
    batches: list[Batch]
    kept: tuple[int, ...]
    sizes: Sizes
    plan: str
    align: bool
    ridge: float
    squeezer: Squeezer
    turn: Turn | None
    frequencies: Tensor | None
    reports: list[dict[str, Any]] = field(default_factory=list)

    def on_axes(self, stream: Tensor) -> Tensor:
        """The teacher's stream where the student's is compared with it (ALIGN-3)."""
        return stream if self.turn is None else (stream.double() @ self.turn.basis).to(stream.dtype)


@torch.no_grad()
@without_autocast
def shrink(
    teacher: nn.Module | str | os.PathLike[str],
    data: Mapping[str, Any],
    *,
    heads: int | None = None,
    layers: int | Sequence[int] | None = None,
    hidden: int | None = None,
    neurons: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    plan: str = "auto",
    align: bool = True,
    ridge: float = RIDGE,
    batch_size: int = 16,
    out: str | os.PathLike[str] | None = None,
    squeezer: Squeezer = squeeze_attention,
    axes: Axes = principal_axes,
    progress: Progress | None = None,
) -> Shrunk:
    """A student with fewer heads, fewer layers or a narrower stream, which starts as its squeezed teacher.

    Args:
        teacher: a Hugging Face model of a known family, or its folder.
        data: the calibration set: inputs of the model by name, ``(N, ...)`` each; a 2-D ``attention_mask`` says which
            rows count. 64 sequences were enough for the figures of the documentation.
        heads: query heads of the student; default the teacher's.
        layers: how many, or which of the teacher's; default all.
        hidden: channels of the stream; default the teacher's.
        neurons: of each FFN, the most important ones; default the teacher's.
        kv_heads: key and value heads; see HEAD-17.
        head_dim: entries of a head, where the family's configuration may say so.
        plan: ``"matched"`` (needs networkx), ``"balanced"``, ``"progressive"``, or ``"auto"``.
        align: refit last matrices on the student's own stream.
        ridge: of the alignment.
        batch_size: samples that run together.
        out: a new folder for the student, with ``shrink.json`` beside it.
        squeezer: what makes a layer's attention; another than the default is for comparison.
        axes: what chooses the kept axes from the moment of WIDTH-3, also.
        progress: gets a line a layer.

    Returns:
        The student and the report. A teacher that a folder stores in half precision is computed with in float32.

    Raises:
        ShdError: ``shrink-unsupported``, ``argument-value``, ``argument-shape``, ``heads-exceed``,
            ``layers-invalid``, ``dependency-missing``, ``read-failed``, ``write-failed``.

    Source: specs/shrink.md; the second source for the depth.
    """
    check_option("plan", plan, PLANS, "HEAD-4")
    folder = None if out is None else _new_folder(out)
    model: Any = teacher if isinstance(teacher, nn.Module) else load_teacher(teacher)
    family = family_of(model)
    stored = _stored_dtype(model, isinstance(teacher, nn.Module))
    own = sizes_of(model.config)
    kept = choose_layers(own.layers, layers)
    sizes = choose_sizes(
        own,
        family,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=len(kept),
        hidden=hidden,
        neurons=neurons,
    )
    narrower = sizes.hidden != own.hidden
    if narrower:
        check_width(model, family)
    student = make_student(model, family, sizes, kept)
    mode = model.training
    model.eval()
    try:
        batches = start_batches(
            model, family, {name: torch.as_tensor(part) for name, part in data.items()}, batch_size
        )
        turn = _find_turn(model, family, batches, sizes.hidden, axes) if narrower else None
        work = _Work(
            teacher=model,
            student=student,
            family=family,
            batches=batches,
            kept=kept,
            sizes=sizes,
            plan=plan,
            align=align,
            ridge=ridge,
            squeezer=squeezer,
            turn=turn,
            frequencies=rotary_frequencies(model, family),
        )
        _copy_ends(work)
        _run_layers(work, progress)
    finally:
        model.train(mode)
    report = {
        "format": FORMAT,
        "model_type": model.config.model_type,
        "teacher": own.__dict__ | {"parameters": count_parameters(model)},
        "student": sizes.__dict__ | {"parameters": count_parameters(student)},
        "aligned": align,
        "calibration_rows": int(sum(int(batch.counted.sum()) for batch in batches)),
        "layer_map": [[number, source] for number, source in enumerate(kept)],
        "holes": [layer for layer in range(own.layers) if layer not in kept],
        "layers": work.reports,
    }
    student.to(stored)
    if folder is not None:
        _save(student, report, folder)
    return Shrunk(student, report)


def _stored_dtype(model: Any, is_given: bool) -> torch.dtype:
    """What the student is stored in; a loaded teacher of half precision is widened, a given one is left alone."""
    stored: torch.dtype = next(model.parameters()).dtype
    if stored in (torch.float32, torch.float64):
        return stored
    if is_given:
        raise ShdError(
            "argument-dtype",
            f"teacher must be float32 or float64 while it is shrunk, since streams are subtracted; got {stored}: "
            "give its folder, or teacher.float()",
        )
    model.float()
    return stored


def load_teacher(source: str | os.PathLike[str]) -> Any:
    """A Hugging Face model of the class that its configuration names; code from the folder is not run."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ShdError(
            "read-failed", f"teacher must be a Hugging Face model; got {str(source)!r}: {error}"
        ) from error
    name = (getattr(config, "architectures", None) or [None])[0]
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    kind = (
        kind if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) else transformers.AutoModel
    )
    try:
        return kind.from_pretrained(source, trust_remote_code=False, use_safetensors=True).eval()
    except (OSError, ValueError) as error:
        raise ShdError("read-failed", f"{str(source)!r} must hold a model with safetensors: {error}") from error


def _run_layers(work: _Work, progress: Progress | None) -> None:
    """Teacher and student side by side: streams of both at the current layer, nothing of the others."""
    teacher_layers = work.family.layers_of(work.teacher)
    taught = [batch.stream for batch in work.batches]
    own = [work.on_axes(stream) for stream in taught]
    for layer in range(work.kept[0]):
        taught = [stream for stream, _ in run_layer(teacher_layers[layer], taught, work.batches, layer)]
    for number, source in enumerate(work.kept):
        following = work.kept[number + 1] if number + 1 < len(work.kept) else len(teacher_layers)
        taught, own, report = _make_layer(work, number, source, following, taught, own)
        work.reports.append(report)
        if progress is not None:
            progress(
                f"layer {number} of {len(work.kept)} from {source}: {report['case']}, "
                f"error {report['layer_error']:.3f}"
            )
    if work.align and work.turn is not None:
        _fit_final(work, taught, own)


def _make_layer(
    work: _Work, number: int, source: int, following: int, taught: list[Tensor], own: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """One student layer; returns the streams of teacher and student after it, and its report."""
    family = work.family
    layer, target = family.layers_of(work.teacher)[source], family.layers_of(work.student)[number]
    given = sizes_of(work.teacher.config)
    weights = family.read_attention(layer, given.heads, given.kv_heads)
    statistics, trace = study_layer(work.teacher, family, source, taught, work.batches, weights)
    merge = merge_heads(statistics.gram, work.sizes.heads, _choose_plan(work, given), given.kv_heads)
    squeezed = work.squeezer(
        weights,
        merge,
        statistics,
        work.sizes.kv_heads,
        work.sizes.head_dim,
        frequencies=work.frequencies,
        query_norm=family.query_norm is not None,
    )
    ffn = _read_ffn(work, layer, trace.neuron_squares)
    _fill_layer(work, layer, target, squeezed, ffn, taught, trace.middles)
    if work.align and work.turn is not None:
        wanted = _input_matrix(squeezed.weights)
        _fit_readers(work, target, source, own, family.projections[:-1], trace.inputs, *wanted)
    after, ends, last = _advance(work, source, following, trace)
    if work.align and family.end is not None and last is not layer:
        find_part(target, family.end).load_state_dict(find_part(last, family.end).state_dict())
    if work.align:
        _fit(work, target, source, own, family.projections[-1], family.middle, trace.middles)
    if work.align and work.turn is not None:
        _fit_readers(work, target, source, own, family.ffn[0], trace.ffn_inputs, *_side_by_side(ffn.readers))
    if work.align:
        _fit(work, target, source, own, family.ffn[1], family.end, ends)
    streams, attention_error, layer_error = _measure(work, target, source, own, trace.middles, ends)
    report = _report_layer(merge, squeezed, attention_error, layer_error)
    return after, streams, report if ffn.kept is None else report | {"neurons": ffn.kept}


def _advance(
    work: _Work, source: int, following: int, trace: LayerTrace
) -> tuple[list[Tensor], list[Tensor], nn.Module]:
    """The teacher's stream before the next source layer, what the last norm on it read, and the last layer run."""
    layers = work.family.layers_of(work.teacher)
    taught, ends = trace.outputs, trace.ends
    for number in range(source + 1, following):
        watched = [] if work.family.end is None else [find_part(layers[number], work.family.end)]
        found = list(run_layer(layers[number], taught, work.batches, number, watched))
        taught = [stream for stream, _ in found]
        ends = [read[0] if read else stream for stream, read in found]
    return taught, ends, layers[following - 1]


class _Ffn(NamedTuple):
    """An FFN with the neurons that stay: what reads the stream, the last matrix, and which neurons; None for all."""

    readers: list[tuple[Tensor, Tensor | None]]
    last: tuple[Tensor, Tensor | None]
    kept: list[int] | None


def _read_ffn(work: _Work, layer: nn.Module, squares: Tensor) -> _Ffn:
    """The most important neurons of a teacher's FFN, in their order (FFN-4, FFN-5)."""
    readers = [read_linear(find_part(layer, name)) for name in work.family.ffn[0]]
    matrix, bias = work.family.read_last(layer)
    if work.sizes.neurons == len(matrix):
        return _Ffn(readers, (matrix, bias), None)
    importance = squares.sqrt() * torch.linalg.vector_norm(matrix, dim=1)
    best = importance.argsort(descending=True, stable=True)[: work.sizes.neurons].sort().values
    cut = [(rows[:, best], None if offset is None else offset[best]) for rows, offset in readers]
    return _Ffn(cut, (matrix[best], bias), best.tolist())


def _fill_layer(
    work: _Work,
    layer: nn.Module,
    target: nn.Module,
    squeezed: Squeezed,
    ffn: _Ffn,
    taught: list[Tensor],
    middles: list[Tensor],
) -> None:
    """The closed form in place: attention as squeezed, the rest as in the teacher, both on the kept axes."""
    family, turn = work.family, work.turn
    matrix, bias = ffn.last
    if turn is None:
        changed = tuple(f"{name}." for name in (*family.projections, *family.ffn[0], family.ffn[1]))
        rest = {name: part for name, part in layer.state_dict().items() if not name.startswith(changed)}
        target.load_state_dict(rest, strict=False)
        family.write_attention(target, squeezed.weights)
        for name, given in zip(family.ffn[0], ffn.readers, strict=True):
            write_linear(find_part(target, name), *given)
        family.write_last(target, matrix, bias)
        return
    assert family.norms is not None  # check_width
    norms = [find_part(layer, name) for name in family.norms]
    family.write_attention(target, turn.turn_attention(norms[0], squeezed.weights))
    if family.query_norm is not None:
        for name in (family.query_norm, family.query_norm.replace("q_norm", "k_norm")):
            find_part(target, name).load_state_dict(find_part(layer, name).state_dict())
    for name, given in zip(family.ffn[0], ffn.readers, strict=True):
        write_linear(find_part(target, name), *turn.read(norms[1], *given))
    family.write_last(target, matrix @ turn.basis, None if bias is None else bias @ turn.basis)
    for name, streams in zip(family.norms, (taught, middles), strict=True):
        turn.write_norm(find_part(target, name), _counted(work, [turn.normalise(stream) for stream in streams]))


def _fit(
    work: _Work, target: nn.Module, source: int, own: list[Tensor], name: str, place: str | None, wanted: list[Tensor]
) -> None:
    """Refit one matrix of the student towards the teacher's stream at a place of the layer (ALIGN-1, -2)."""
    module = find_part(target, name)
    fit = OutputFit(*read_linear(module), work.ridge)
    watched = [module] if place is None else [module, find_part(target, place)]
    for (out, read), goal, batch in zip(
        run_layer(target, own, work.batches, source, watched), wanted, work.batches, strict=True
    ):
        stream = out if place is None else read[1]
        before = stream.double() - module(read[0]).double()
        fit.add(read[0][batch.counted], (work.on_axes(goal).double() - before)[batch.counted])
    write_linear(module, *fit.solve())


def _fit_readers(
    work: _Work,
    target: nn.Module,
    source: int,
    own: list[Tensor],
    names: Sequence[str],
    inputs: list[Tensor],
    matrix: Tensor,
    bias: Tensor | None,
) -> None:
    """Refit what reads a cut stream towards what the same matrices make of the teacher's whole one (ALIGN-6)."""
    modules = [find_part(target, name) for name in names]
    fit = OutputFit(*_side_by_side([read_linear(module) for module in modules]), work.ridge)
    for (_, (read,)), given, batch in zip(
        run_layer(target, own, work.batches, source, modules[:1]), inputs, work.batches, strict=True
    ):
        goal = given[batch.counted].double() @ matrix
        fit.add(read[batch.counted], goal if bias is None else goal + bias)
    found, offset = fit.solve()
    start = 0
    for module in modules:
        columns = slice(start, start + read_linear(module)[0].shape[1])
        write_linear(module, found[:, columns], None if offset is None else offset[columns])
        start = columns.stop


def _fit_final(work: _Work, taught: list[Tensor], own: list[Tensor]) -> None:
    """Refit what reads the last norm of a cut stream (ALIGN-6)."""
    assert work.family.final_norm is not None  # check_width
    norms = [find_part(base_of(model), work.family.final_norm) for model in (work.teacher, work.student)]
    for name, module in final_readers(work.student, work.family):
        if module.in_features != work.sizes.hidden:
            continue  # it reads several rows side by side
        matrix, bias = read_linear(work.teacher.get_submodule(name))
        fit = OutputFit(*read_linear(module), work.ridge)
        for given, stream, batch in zip(taught, own, work.batches, strict=True):
            goal = norms[0](given)[batch.counted].double() @ matrix
            fit.add(norms[1](stream)[batch.counted], goal if bias is None else goal + bias)
        write_linear(module, *fit.solve())


def _side_by_side(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Several matrices that read the same rows, as one."""
    biases = [bias for _, bias in parts if bias is not None]
    return torch.cat([matrix for matrix, _ in parts], dim=1), torch.cat(biases) if biases else None


def _input_matrix(weights: AttentionWeights) -> tuple[Tensor, Tensor | None]:
    """Queries, keys and values side by side, in the order in which a layer stores them."""
    matrices = [part.movedim(0, 1).flatten(1) for part in (weights.query, weights.key, weights.value)]
    biases = [b.flatten() for b in (weights.query_bias, weights.key_bias, weights.value_bias) if b is not None]
    return torch.cat(matrices, dim=1), torch.cat(biases) if biases else None


def _measure(
    work: _Work, target: nn.Module, source: int, own: list[Tensor], middles: list[Tensor], wanted: list[Tensor]
) -> tuple[list[Tensor], float, float]:
    """The student's stream after a layer and the relative errors in it (STUDENT-3)."""
    names = [work.family.middle] + ([] if work.family.end is None else [work.family.end])
    sums = [0.0] * 4
    streams = []
    runs = run_layer(target, own, work.batches, source, [find_part(target, name) for name in names])
    for (out, read), middle, end, batch in zip(runs, middles, wanted, work.batches, strict=True):
        streams.append(out)
        pairs = ((read[0], work.on_axes(middle)), (out if len(read) == 1 else read[1], work.on_axes(end)))
        for at, (found, goal) in enumerate(pairs):
            there = goal.double()[batch.counted]
            sums[2 * at] += float((found.double()[batch.counted] - there).square().sum())
            sums[2 * at + 1] += float(there.square().sum())
    errors = [(gap / size) ** 0.5 if size > 0 else 0.0 for gap, size in (sums[:2], sums[2:])]
    return streams, errors[0], errors[1]


def _report_layer(merge: HeadMerge, squeezed: Squeezed, attention_error: float, layer_error: float) -> dict[str, Any]:
    return {
        "case": squeezed.case,
        "exact": squeezed.exact,
        "plan": [[list(pair) for pair in pairs] for pairs in merge.plan],
        "groups": [list(group) for group in merge.groups],
        "mixing": merge.mixing.tolist(),
        "attention_error": attention_error,
        "layer_error": layer_error,
    }


def _choose_plan(work: _Work, given: Sizes) -> str:
    """``auto``: matched where heads may meet freely or inside key heads; balanced where equal groups fit exactly."""
    if work.plan != "auto":
        return work.plan
    ratio = -(-given.heads // work.sizes.heads)
    if work.frequencies is None and ratio * given.head_dim <= work.sizes.head_dim:
        return "balanced"
    from importlib.util import find_spec

    return "matched" if find_spec("networkx") is not None else "balanced"


def _find_turn(model: Any, family: Family, batches: list[Batch], hidden: int, axes: Axes) -> Turn:
    """One rotation for all layers: principal axes of what all norms give (WIDTH-3)."""
    assert family.norms is not None  # check_width
    assert family.final_norm is not None
    norm = find_part(base_of(model), family.final_norm)
    eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))
    width = model.config.hidden_size
    moment = torch.zeros(width, width, dtype=torch.float64, device=batches[0].stream.device)
    whole = Turn(torch.eye(width, dtype=moment.dtype, device=moment.device), family.norm, eps)
    streams = [batch.stream for batch in batches]

    def add(parts: list[Tensor]) -> None:
        for part, batch in zip(parts, batches, strict=True):
            rows = whole.normalise(part)[batch.counted]
            moment.add_(rows.mT @ rows)

    for number, layer in enumerate(family.layers_of(model)):
        add(streams)
        found = list(run_layer(layer, streams, batches, number, [find_part(layer, family.middle)]))
        add([read[0] for _, read in found])
        streams = [stream for stream, _ in found]
    add(streams)
    if not torch.isfinite(moment).all():
        raise ShdError("not-finite", "the teacher's stream must be finite; got NaN or infinity")
    return Turn(axes(moment, hidden, family.norm), family.norm, eps)


def _copy_ends(work: _Work) -> None:
    """Everything outside the layers: as it is, or on the kept axes."""
    if work.turn is None:
        layers = f"{_prefix(work.teacher, work.family)}."
        rest = {name: part for name, part in work.teacher.state_dict().items() if not name.startswith(layers)}
        work.student.load_state_dict(rest, strict=False)
        return
    streams = [batch.stream for batch in work.batches]
    for number, layer in enumerate(work.family.layers_of(work.teacher)):
        streams = [stream for stream, _ in run_layer(layer, streams, work.batches, number)]
    rows = _counted(work, [work.turn.normalise(stream) for stream in streams])
    turn_ends(work.teacher, work.student, work.family, work.turn, rows)


def _prefix(model: nn.Module, family: Family) -> str:
    layers = family.layers_of(model)
    name: str = next(name for name, module in model.named_modules() if module is layers)
    return name


def _counted(work: _Work, streams: list[Tensor]) -> Tensor:
    return torch.cat([stream[batch.counted] for stream, batch in zip(streams, work.batches, strict=True)])


def _new_folder(out: str | os.PathLike[str]) -> Path:
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ShdError("write-failed", f"out must be a new or empty folder; got {str(folder)!r}: name another")
    return folder


def _save(student: Any, report: dict[str, Any], folder: Path) -> None:
    try:
        student.save_pretrained(folder)
        draft = folder / "shrink.json.part"
        draft.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        draft.replace(folder / "shrink.json")
    except OSError as error:
        raise ShdError(
            "write-failed", f"{folder} could not be written: {error}: make room, or name another"
        ) from error
