"""``shrink``: a teacher in, a smaller student of the same architecture out, layer by layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shd_ref.cache.storage.documents import read_json
from shd_ref.cache.storage.drafts import part_folder
from shd_ref.errors import ShdError, need
from shd_ref.shrink.kept import kept_layers, principal_axes
from shd_torch.checks import without_autocast
from shd_torch.shrink.basis import Basis, check_ends, rotate_ends
from shd_torch.shrink.calibration import (
    join_rows,
    read_data,
    rotary_frequencies,
    run_layer,
    start_batches,
    sum_moments,
)
from shd_torch.shrink.families import Family, base_of, family_of, find_part
from shd_torch.shrink.folders import (
    check_positions,
    count_positions,
    load_student,
    load_teacher,
    new_folder,
    read_modules,
    save_student,
)
from shd_torch.shrink.layer import AttentionStatistics, Work, fit_final, make_layer, share_merge
from shd_torch.shrink.options import ShrinkOptions
from shd_torch.shrink.sizes import (
    Sizes,
    as_dropped,
    check_dropped,
    check_refused,
    choose_sizes,
    count_parameters,
    find_remarks,
    make_student,
    sizes_of,
)
from shd_torch.shrink.unfinished import Unfinished, run_key

FORMAT = 1
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Shrunk:
    """The result of ``shrink``.

    Attributes:
        student: in evaluation mode, with the teacher's dtype and device.
        report: the contents of ``shrink.json``.
    """

    student: Any
    report: dict[str, Any]


@torch.no_grad()
@without_autocast
def shrink(
    teacher: nn.Module | str | os.PathLike[str],
    data: Mapping[str, Any],
    options: ShrinkOptions | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    studies: dict[int, AttentionStatistics] | None = None,
    **changes: Any,
) -> Shrunk:
    """Create a smaller student from the squeezed teacher: fewer heads, fewer layers or a narrower stream.

    Args:
        teacher: a Hugging Face model of a known family, or its folder.
        data: the calibration set: inputs of the model by name, ``(N, ...)`` each; a 2-D ``attention_mask`` says which
            rows count. The documentation's figures use 64 sequences.
        options: what to make of it.
        out: a new folder for the student, with ``shrink.json``. Finished layers are saved next to it in
            ``.NAME.part``, and a killed run resumes with the same bytes.
        progress: called with the numbers of finished and of all steps, and the next layer.
        studies: statistics of the teacher's layers by number, read and added: one dictionary for all students of the
            same teacher, stack, data and batch size.
        **changes: fields of ``ShrinkOptions`` by name, as in ``shrink(model, data, heads=4, layers=3)``.

    Returns:
        The student and the report. A teacher stored in half precision is computed in float32.

    Raises:
        ShdError: ``shrink-unsupported``, ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``,
            ``heads-exceed``, ``layers-invalid``, ``inputs-invalid``, ``dependency-missing``, ``read-failed``,
            ``write-failed``.

    Source: the second source for the depth; formulas stand in ``shd_ref.shrink``.
    """
    options = (options or ShrinkOptions()).changed(changes)
    folder = None if out is None else new_folder(out)
    keeps_head = options.hidden is not None  # which then reads the narrower states
    model: Any = teacher if isinstance(teacher, nn.Module) else load_teacher(teacher, keeps_head=keeps_head)
    check_positions({name: tensor.cpu() for name, tensor in read_data(data).items()}, count_positions(model.config))
    family = family_of(model, options.stack)
    options = options.changed({"align": options.align and family.is_aligned})
    stored = _stored_dtype(model, isinstance(teacher, nn.Module))
    teacher_sizes = sizes_of(model.config, family)
    sizes, sources = plan_student(model, family, options)
    if sizes.hidden != teacher_sizes.hidden:
        check_ends(model, family)
    source = None if isinstance(teacher, nn.Module) else Path(teacher)
    modules = {} if source is None else read_modules(source, teacher_sizes.hidden, sizes.hidden)
    student = make_student(model, family, sizes, sources)
    keeper: AbstractContextManager[Unfinished | None] = nullcontext()
    if folder is not None:
        settings = {name: getattr(options, name) for name in ("batch_size", "plan", "align", "ridge")}
        settings |= {"stack": family.stack, **sizes.report(), "kept": sources, **vars(sizes.dropped)}
        keeper = Unfinished(part_folder(folder), run_key(teacher, settings, data=read_data(data)))
    mode = model.training
    model.eval()
    try:
        with keeper as saved:
            work = Work(
                teacher=model,
                student=student,
                family=family,
                batches=start_batches(model, family, data, options.batch_size),
                sources=sources,
                sizes=sizes,
                options=options,
                frequencies=rotary_frequencies(model, family),
                studies=studies,
                tell=_teller(progress, len(sources) + (sizes.hidden != teacher_sizes.hidden) * teacher_sizes.layers),
            )
            _make_ends(work, saved)
            _run_layers(work, saved)
            report = _report(work, teacher_sizes)
            student.to(stored)
            if folder is not None:
                work.tell("the folder is written")
                save_student(student, report, folder, source, modules)
    finally:
        model.train(mode)
    return Shrunk(student, report)


def plan_student(model: Any, family: Family, options: ShrinkOptions) -> tuple[Sizes, tuple[int, ...]]:
    """A student's sizes and the teacher layers that it keeps, or an error."""
    teacher_sizes = sizes_of(model.config, family)
    sources = kept_layers(teacher_sizes.layers, teacher_sizes.layers if options.layers is None else options.layers)
    dropped = as_dropped(options.drop_attention, options.drop_activations)
    check_dropped(dropped, family, model.config, sources)
    sizes = choose_sizes(options, teacher_sizes, family, model.config.model_type, len(sources))
    sizes = replace(sizes, dropped=dropped.among(sources))
    check_refused(family, model.config.model_type, teacher_sizes, sizes, sources)
    return sizes, sources


def read_made(folder: str | os.PathLike[str]) -> Shrunk:
    """The result of ``shrink`` from the folder that it wrote, or ``read-failed``."""
    student = load_student(folder)
    try:
        report = read_json(Path(folder) / "shrink.json")
    except (OSError, ValueError) as error:
        raise ShdError("read-failed", f"{str(folder)!r} must hold a student and shrink.json: {error}") from error
    return Shrunk(student, report)


def _report(work: Work, teacher_sizes: Sizes) -> dict[str, Any]:
    """The contents of ``shrink.json``; the layer map counts blocks with attention."""
    stack = {} if work.family.stack is None or work.family.is_alone else {"stack": work.family.stack}
    sources = [source for number, source in enumerate(work.sources) if number not in work.sizes.dropped.attention]
    return {
        "format": FORMAT,
        "model_type": work.teacher.config.model_type,
        **stack,
        "teacher": teacher_sizes.report() | {"parameters": count_parameters(work.teacher)},
        "student": work.sizes.report() | {"parameters": count_parameters(work.student)},
        "aligned": work.options.align,
        "remarks": find_remarks(teacher_sizes, work.sizes),
        **({} if work.basis is None else {"stream": {"kept": "axes"}}),
        "calibration_rows": int(sum(int(batch.counted.sum()) for batch in work.batches)),
        "sources": list(work.sources),
        "layer_map": [[number, source] for number, source in enumerate(sources)],
        "holes": [layer for layer in range(teacher_sizes.layers) if layer not in sources],
        "layers": work.reports,
    }


def _stored_dtype(model: Any, is_given: bool) -> torch.dtype:
    """The dtype of the stored student; a loaded teacher of half precision is widened, a given one is left alone."""
    stored: torch.dtype = next(model.parameters()).dtype
    if stored in (torch.float32, torch.float64):
        return stored
    rule, remedy = "be float32 or float64 while it is shrunk, since streams are subtracted", "give its folder"
    need(not is_given, "argument-dtype", "teacher", rule, stored, remedy=f"{remedy}, or teacher.float()")
    model.float()
    return stored


def _teller(progress: Progress | None, total: int) -> Callable[..., None]:
    """Counts steps for ``progress``."""
    done = 0

    def tell(what: str, skipped: int = 0) -> None:
        nonlocal done
        done += skipped
        if progress is not None:
            progress(done, total, what)
        done += 1

    return tell


def _run_layers(work: Work, saved: Unfinished | None) -> None:
    """Teacher and student side by side: streams of both at the current layer, nothing of the others."""
    teacher_layers = work.family.layers_of(work.teacher)
    done = 0
    if saved is not None and saved.get("layer-0") is not None:
        done, teacher_streams, student_streams = _resume_layers(work, saved)
    else:
        teacher_streams = [batch.stream for batch in work.batches]
        student_streams = [work.on_axes(stream) for stream in teacher_streams]
        for layer in range(work.sources[0]):
            teacher_streams = [
                stream for stream, _ in run_layer(teacher_layers[layer], teacher_streams, work.batches, layer)
            ]
    for number in range(done, len(work.sources)):
        following = work.sources[number + 1] if number + 1 < len(work.sources) else len(teacher_layers)
        teacher_streams, student_streams, report = make_layer(
            work, number, work.sources[number], following, teacher_streams, student_streams
        )
        work.reports.append(report)
        if saved is not None:  # the layer last: with it, its streams are there
            streams = {f"taught.{batch}": tensor for batch, tensor in enumerate(teacher_streams)}
            streams |= {f"own.{batch}": tensor for batch, tensor in enumerate(student_streams)}
            saved.put(f"streams-{number}", streams)
            saved.put(f"layer-{number}", work.family.layers_of(work.student)[number].state_dict(), report)
            saved.drop(f"streams-{number - 1}")
    if work.basis is not None and work.options.align:
        fit_final(work, teacher_streams, student_streams)


def _resume_layers(work: Work, saved: Unfinished) -> tuple[int, list[Tensor], list[Tensor]]:
    """How many layers an earlier run finished, which are put in place, and both streams after the last of them."""
    number = 0
    with saved.reading():
        while number < len(work.sources) and (piece := saved.get(f"layer-{number}")) is not None:
            work.family.layers_of(work.student)[number].load_state_dict(piece[0])
            work.reports.append(piece[1])
            number += 1
        streams = saved.require(f"streams-{number - 1}")[0]
        teacher_streams, student_streams = (
            [streams[f"{name}.{batch}"].to(work.device) for batch in range(len(work.batches))]
            for name in ("taught", "own")
        )
    work.tell(f"layer {number}/{len(work.sources)} found", number - 1)
    return number, teacher_streams, student_streams


def _make_ends(work: Work, saved: Unfinished | None) -> None:
    """Everything outside the layers: as it is, or on the kept axes, which are found first."""
    family = work.family
    modules = work.teacher.named_modules()
    layers = next(name for name, module in modules if module is family.layers_of(work.teacher)) + "."
    if work.sizes.hidden == work.teacher.config.hidden_size:
        without = family.biases or layers  # a table of position biases is mixed as the heads
        everything = work.teacher.state_dict().items()
        rest = {
            name: tensor for name, tensor in everything if not name.startswith(layers) and not name.endswith(without)
        }
        work.student.load_state_dict(rest, strict=False)
        share_merge(work)
        return
    assert family.final_norm is not None  # check_ends
    norm = find_part(base_of(work.teacher), family.final_norm)
    eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))
    width = work.teacher.config.hidden_size
    whole = torch.eye(width, dtype=torch.float64, device=work.device)
    basis = Basis(whole, family.norm, eps)
    if saved is not None and (piece := saved.get("axes")) is not None:
        with saved.reading():
            work.basis = replace(basis, kept=piece[0].pop("basis").to(work.device))
            work.student.load_state_dict(piece[0], strict=False)
        work.tell("axes found", len(family.layers_of(work.teacher)) - 1)
        return
    work.basis = _find_basis(work, basis)
    if saved is not None:
        rest = {name: tensor for name, tensor in work.student.state_dict().items() if not name.startswith(layers)}
        saved.put("axes", rest | {"basis": work.basis.kept})


def _find_basis(work: Work, whole: Basis) -> Basis:
    """The kept axes, one rotation for all layers, and what precedes the layers on them."""
    family = work.family
    assert family.norms is not None  # check_ends

    def moment_of(rows: Tensor) -> Tensor:
        normal = whole.normalise(rows)
        return normal.mT @ normal

    summed, streams = sum_moments(work.teacher, family, work.batches, family.norms[1], moment_of, work.tell)
    axes = principal_axes(summed, work.sizes.hidden, "layer" if family.norm == "layer" else "rms")
    basis = replace(whole, kept=torch.from_numpy(axes).to(work.device))
    rows = basis.normalise(join_rows(streams, work.batches))
    rotate_ends(work.teacher, work.student, family, basis, rows)
    return basis
