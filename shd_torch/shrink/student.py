"""``shrink``: a teacher in, a smaller student of the same architecture out, layer by layer (specs/shrink.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_ref.plans import check_integer
from shd_torch.checks import check_finite, check_option
from shd_torch.precision import without_autocast
from shd_torch.shrink.align import RIDGE
from shd_torch.shrink.calibration import Batch, rotary_frequencies, run_layer, start_batches
from shd_torch.shrink.dropped import check_dropped, choose_dropped
from shd_torch.shrink.families import Family, base_of, family_of, find_part
from shd_torch.shrink.folders import load_teacher, new_folder, save_student
from shd_torch.shrink.heads import squeeze_attention
from shd_torch.shrink.layer import Squeezer, Work, counted_rows, fit_final, make_layer
from shd_torch.shrink.merges import PLANS
from shd_torch.shrink.sizes import Sizes, choose_layers, choose_sizes, count_parameters, make_student, sizes_of
from shd_torch.shrink.width import Turn, check_width, principal_axes, turn_ends

FORMAT = 1
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
    drop_attention: Sequence[int] = (),
    drop_activations: Sequence[int] = (),
    plan: str = "auto",
    fit_samples: int = 0,
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
        drop_attention: teacher layers whose block loses its attention; such a student loads with ``load_student``.
        drop_activations: teacher layers whose FFN becomes one linear map; also.
        plan: ``"matched"`` (needs networkx), ``"balanced"``, ``"progressive"``, or ``"auto"``.
        fit_samples: how many samples, the first ones, the weights of merged heads are fitted on by descent; 0 takes
            the closed form's (HEAD-21).
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
        ShdError: ``shrink-unsupported``, ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``,
            ``heads-exceed``, ``layers-invalid``, ``inputs-invalid``, ``dependency-missing``, ``read-failed``,
            ``write-failed``.

    Source: specs/shrink.md; the second source for the depth.
    """
    check_option("plan", plan, PLANS, "HEAD-4")
    batch_size = check_integer("batch_size", batch_size, 1, None, "STUDENT-4")
    fit_samples = check_integer("fit_samples", fit_samples, 0, None, "HEAD-21")
    if check_finite("ridge", ridge, "ALIGN-2") < 0.0:
        raise ShdError("argument-value", f"ridge must be at least 0; got {ridge!r}", "ALIGN-2")
    folder = None if out is None else new_folder(out)
    model: Any = teacher if isinstance(teacher, nn.Module) else load_teacher(teacher)
    family = family_of(model)
    stored = _stored_dtype(model, isinstance(teacher, nn.Module))
    own = sizes_of(model.config)
    kept = choose_layers(own.layers, layers)
    wanted = choose_dropped(drop_attention, drop_activations)
    check_dropped(wanted, family, model.config, kept)
    given = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "hidden": hidden, "neurons": neurons}
    sizes = choose_sizes(own, family, layers=len(kept), **given)
    if sizes.hidden != own.hidden:
        check_width(model, family)
    dropped = wanted.among(kept)
    student = make_student(model, family, sizes, kept, dropped)
    mode = model.training
    model.eval()
    try:
        batches = start_batches(model, family, data, batch_size)
        work = Work(
            teacher=model,
            student=student,
            family=family,
            batches=batches,
            kept=kept,
            dropped=dropped,
            sizes=sizes,
            plan=plan,
            align=align,
            ridge=ridge,
            squeezer=squeezer,
            fit_samples=fit_samples,
            turn=None if sizes.hidden == own.hidden else _find_turn(model, family, batches, sizes.hidden, axes),
            frequencies=rotary_frequencies(model, family),
        )
        _copy_ends(work)
        _run_layers(work, progress)
    finally:
        model.train(mode)
    report = _report(work, own)
    student.to(stored)
    if folder is not None:
        save_student(student, report, folder)
    return Shrunk(student, report)


def _report(work: Work, own: Sizes) -> dict[str, Any]:
    """What ``shrink.json`` holds (STUDENT-3); the layer map counts blocks with attention (DEPTH-8)."""
    sources = [source for number, source in enumerate(work.kept) if number not in work.dropped.attention]
    return {
        "format": FORMAT,
        "model_type": work.teacher.config.model_type,
        "teacher": own.__dict__ | {"parameters": count_parameters(work.teacher)},
        "student": work.sizes.__dict__ | {"parameters": count_parameters(work.student)},
        "aligned": work.align,
        "fit_samples": work.fit_samples,
        "calibration_rows": int(sum(int(batch.counted.sum()) for batch in work.batches)),
        "sources": list(work.kept),
        "layer_map": [[number, source] for number, source in enumerate(sources)],
        "holes": [layer for layer in range(own.layers) if layer not in sources],
        "layers": work.reports,
    }


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


def _run_layers(work: Work, progress: Progress | None) -> None:
    """Teacher and student side by side: streams of both at the current layer, nothing of the others."""
    teacher_layers = work.family.layers_of(work.teacher)
    taught = [batch.stream for batch in work.batches]
    own = [work.on_axes(stream) for stream in taught]
    for layer in range(work.kept[0]):
        taught = [stream for stream, _ in run_layer(teacher_layers[layer], taught, work.batches, layer)]
    for number, source in enumerate(work.kept):
        following = work.kept[number + 1] if number + 1 < len(work.kept) else len(teacher_layers)
        taught, own, report = make_layer(work, number, source, following, taught, own)
        work.reports.append(report)
        if progress is not None:
            progress(
                f"layer {number} of {len(work.kept)} from {source}: {report['case']}, "
                f"error {report['layer_error']:.3f}"
            )
    if work.align and work.turn is not None:
        fit_final(work, taught, own)


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


def _copy_ends(work: Work) -> None:
    """Everything outside the layers: as it is, or on the kept axes."""
    if work.turn is None:
        layers = f"{_prefix(work.teacher, work.family)}."
        rest = {name: part for name, part in work.teacher.state_dict().items() if not name.startswith(layers)}
        work.student.load_state_dict(rest, strict=False)
        return
    streams = [batch.stream for batch in work.batches]
    for number, layer in enumerate(work.family.layers_of(work.teacher)):
        streams = [stream for stream, _ in run_layer(layer, streams, work.batches, number)]
    rows = counted_rows(work, [work.turn.normalise(stream) for stream in streams])
    turn_ends(work.teacher, work.student, work.family, work.turn, rows)


def _prefix(model: nn.Module, family: Family) -> str:
    layers = family.layers_of(model)
    name: str = next(name for name, module in model.named_modules() if module is layers)
    return name
