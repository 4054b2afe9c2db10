"""The subcommands of ``shd-torch`` but those of ``shrink_command.py``; PyTorch is imported when one of them runs."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray

from shd_ref.cache.storage.drafts import output_path
from shd_ref.commands.program import Document, Program, require_packages
from shd_ref.commands.terminal import (
    console,
    marked,
    narrow_table,
    plus_minus,
    print_remarks,
    print_stage,
    show_progress,
)
from shd_ref.errors import ShdError, need
from shd_ref.integers import check_number
from shd_ref.teacher.options import FROM_0, FROM_1, INTEGERS, PATHS, Needs, at_least
from shd_torch.compress.options import CompressOptions
from shd_torch.compress.samples import Columns, open_rows
from shd_torch.shrink.folders import check_files, check_model, count_positions, find_folder, new_folder, read_config
from shd_torch.shrink_command import read_inputs, shrink

if TYPE_CHECKING:
    from shd_torch.deploy import GraphTime, Int8Report, Interval
    from shd_torch.doctor import Diagnosis
    from shd_torch.export import ExportReport

_STYLES: Final = {"yes": "bold green", "probably not": "bold yellow", "no": "bold red"}


def doctor(
    teacher: str,
    student: str,
    /,
    *,
    data: Path | None = None,
    samples: Annotated[int, FROM_1, Needs("data")] = 512,
    probe: Annotated[int, FROM_0, Needs("data")] = 0,
    seeds: Annotated[int, at_least(2), Needs("probe")] = 5,
    batch_size: Annotated[int, FROM_1, Needs("data")] = 16,
    learning_rate: Annotated[float, Needs("data")] = 1e-3,
    beta: Annotated[float | None, Needs("probe")] = None,
    max_length: Annotated[int | None, FROM_1, Needs("data")] = None,
) -> Document:
    """Will attention supervision work for this teacher and student? Prints an answer and its evidence.

    shd-torch doctor teacher student --data train.jsonl --probe 200

    Compares the models' parts and tokenizers, and finds a range for beta on your batches. --probe trains pairs of
    students, with and without SHD, on the same batches, and reports the gain with its 95% interval. shd plan says
    what the teacher loses with its heads merged.

    Args:
        teacher: A Hugging Face folder or hub id with safetensors.
        student: A folder or hub id; a config.json without weights means random initialisation.
        data: Your samples: .npz of the models' inputs by name, with optional labels; .npy of token ids or pixels; or
            .jsonl with a column text, for the tokenizer in the teacher's folder, else the student's. Without data,
            only the configurations are compared.
        samples: Number of samples to use, from the start of the data.
        probe: Steps of a paired training with and without SHD; 0: no training.
        seeds: Pairs of students in the probe.
        batch_size: Samples per training step.
        learning_rate: Learning rate of AdamW, in the probe and when estimating beta; above 0.
        beta: Weight of SHD in the probe. Default: the middle of the estimated range.
        max_length: Tokens to keep of a text. Default: as the tokenizer's folder says.
    """
    require_packages("torch", "transformers")
    check_number("learning_rate", learning_rate, above=0)
    rule = "be a Hugging Face folder or hub id, whose parts are compared"
    remedy = "give its folder, or make a cache (shd precompute) and train with and without it (docs/doctor.md)"
    need(not teacher.endswith(".onnx"), "argument-value", "teacher", rule, repr(teacher), remedy=remedy)
    check_model(teacher, "teacher")
    check_model(student, "student")
    arrays = None if data is None else read_data(data, samples, (teacher, student), max_length)
    from transformers.utils import logging

    from shd_torch.doctor import DiagnosisOptions, diagnose

    quiet: Any = logging
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    options = DiagnosisOptions(probe, seeds, batch_size, learning_rate, beta)
    with show_progress("models are read") as (on_progress,):
        diagnosis = diagnose(
            teacher, student, arrays, options, progress=lambda done, total, what: on_progress(done, total, says=what)
        )
    print_diagnosis(diagnosis)
    return diagnosis.document()


def read_data(
    path: Path, samples: int, models: Sequence[str] = (), max_length: int | None = None
) -> dict[str, NDArray[Any]]:
    """The first samples of the models' inputs, and ``labels`` ``(N,)`` or ``(N, L)`` of an .npz.

    The first model that is a folder with a tokenizer.json tokenises the texts of a .jsonl.
    """
    from shd_ref.teacher.sources.files import open_npz

    folder = next((Path(model) for model in models if Path(model, "tokenizer.json").is_file()), None)
    arrays = read_inputs(path, samples, folder, max_length=max_length)
    if path.suffix == ".npz" and "labels" in (source := open_npz(path)).columns:
        count = len(next(iter(arrays.values())))
        labels = np.stack([row["labels"] for _, row in zip(range(count), source.rows(["labels"]), strict=False)])
        if labels.dtype.kind not in "iu" or labels.ndim > 2:
            message = f"data must hold labels as integers (N,) or (N, L); got {labels.dtype} {labels.shape}"
            raise ShdError("argument-shape", message)
        arrays["labels"] = labels.astype(np.int64)
    return arrays


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """The verdict, then a table of what it rests on, then what to do."""
    verdict, teacher, student = diagnosis.verdict, diagnosis.teacher, diagnosis.student
    console.print(marked(verdict.answer, _STYLES[verdict.answer], f", because {verdict.because}"), highlight=False)
    console.print()
    table = narrow_table()
    for name in ("", "teacher", "student", ""):
        table.add_column(name, overflow="fold")
    start = "weights from its folder" if diagnosis.has_weights else "random weights"
    table.add_row("model", teacher.name, f"{student.name}, {'squeezed' if diagnosis.is_squeezed else start}", "")
    parts = {difference.part for difference in diagnosis.differences}
    for name in sorted({"layers", "heads"} - parts, reverse=True):
        table.add_row(name, str(getattr(teacher, name)), str(getattr(student, name)), "")
    for difference in diagnosis.differences:
        table.add_row(difference.part, difference.teacher, difference.student, difference.effect)
    console.print(table)
    console.print()
    lines = [f"{difference.part}: {difference.remedy}" for difference in diagnosis.differences]
    if diagnosis.failure is not None:
        lines.append(f"together: not possible: {diagnosis.failure}")
    if diagnosis.untried is not None:
        lines.append(f"together: not tried: {diagnosis.untried}")
    if (beta := diagnosis.beta) is not None and diagnosis.objective is not None:
        norm = f"{beta.middle:.1g} has a gradient norm of {beta.first:.1%} of all else's at the first step"
        later = f"{beta.later:.0%} after {beta.steps} steps without it"
        lines.append(
            f"beta: {beta.low:.1g} to {beta.high:.1g} with {diagnosis.objective.recipe}; {norm}, and {later}"
        )
    if (probe := diagnosis.probe) is not None:
        means = f"{np.mean(probe.without):.4g} without, {np.mean(probe.with_shd):.4g} with SHD"
        gain = f"gain {plus_minus(probe.gain, probe.margin)} ({probe.measure} on {probe.held_out} held-out samples"
        run = f"{probe.seeds} pairs of {probe.steps} steps, beta {probe.beta:.1g}"
        lines.append(f"probe: {gain}: {means}; {run}; 95% over seeds)")
    for line in lines:
        console.print(line, highlight=False)


QUALITY_SAMPLES = 256
"""Samples of ``--data``, the first, that int8 graphs are made for and compared with float ones on."""

_TEXT = """The PyTorch commands of squeezing-heads: make a faster student by one command; export a teacher to ONNX
for shd; create a smaller student from the squeezed teacher; run a small example.

shd-torch export teacher --out teacher.onnx

shd-torch compress teacher --data texts.jsonl --faster 4 --out student

shd-torch shrink teacher --data train.jsonl --heads 4 --out student

shd-torch doctor teacher student --data train.jsonl

shd-torch time student --beside teacher

Then create the cache with shd precompute, and train the student with SHDTrainer or your own loop
(docs/training.md).
"""


def time_models(
    models: Annotated[list[str], Parameter(name="MODEL...")],
    /,
    *,
    beside: Annotated[str | None, Parameter(metavar="TEACHER")] = None,
    batch: Annotated[tuple[int, ...] | None, INTEGERS] = None,
    length: Annotated[tuple[int, ...] | None, INTEGERS] = None,
    threads: Annotated[tuple[int, ...], INTEGERS] = (1,),
    rounds: Annotated[int, at_least(6)] = 15,
    int8: bool = False,
    data: Path | None = None,
    max_length: Annotated[int | None, FROM_1, Needs("data")] = None,
) -> Document:
    """Time models in onnxruntime on the CPU, as your own loop would see it.

    shd-torch time student.onnx student.int8.onnx --beside teacher --batch 1,32 --length 16,64 --threads 1,2

    Graphs run by turns. Printed are medians over rounds with their 95% intervals, wall time and processor time, and
    how many times faster each is than the teacher (without --beside: than the first model), paired by round. Folders
    are exported with fused attention first; int8 as by shd-torch export --int8.

    Args:
        models: ONNX graphs, or folders of Hugging Face models, such as students.
        beside: The teacher, a folder or an .onnx file: time it too, with fused attention (a folder), and in int8.
        batch: Samples per run. Default: 1,32.
        length: Tokens per sample; not for images. Default: 64.
        threads: Threads per run (intra_op_num_threads).
        rounds: Turns of each graph at each setting.
        int8: Also time each model with its products in int8.
        data: Samples like those to come, as for shrink: int8 is made for them, and compared with float.
            Default: random inputs, which make it worse.
        max_length: Tokens to keep of a text of --data. Default: as the tokenizer's folder says.
    """
    require_packages("onnx", "onnxruntime")
    is_once = len(set(models)) == len(models)
    need(is_once, "argument-value", "each model", "be given once", ", ".join(models))
    is_used = data is None or int8 or beside is not None
    need(is_used, "argument-value", "--data", "go with --beside or --int8", f"{data} without them")
    for model in models:
        check_model(model, model, or_graph=True)
    everyone = [*models] if beside is None else [beside, *models]
    folders = [model for model in everyone if not model.endswith(".onnx")]
    samples = read_samples(data, folders[0] if folders else None, max_length)
    if beside is not None:
        check_model(beside, "beside", or_graph=True)
    from shd_torch.deploy import time_graphs
    from shd_torch.deploy.timing import find_busy

    _check_lengths(everyone, length or ())  # before any is exported
    paths: dict[str, Path] = {}
    reports: dict[str, Int8Report] = {}

    with tempfile.TemporaryDirectory() as temporary, show_progress("turns") as (on_turn,):
        for model in models:
            on_turn(0, 0, says=f"{model} is prepared")
            _add_graphs(paths, reports, Path(temporary), model, model, samples, int8=int8)
        reference = next(iter(paths))
        if beside is not None:
            on_turn(0, 0, says="the teacher is prepared")
            reference = _add_graphs(paths, reports, Path(temporary), beside, "teacher", samples, int8=True)
        on_turn(0, 0)
        settings: dict[str, Any] = {"batch": batch, "length": length, "threads": threads, "rounds": rounds}
        times = time_graphs(paths, reference=reference, progress=on_turn, **settings)
    print_times(times, reference, rounds)
    print_remarks(find_busy((entry.wall.median, entry.processor.median) for entry in times))
    for name, report in reports.items():
        console.say(f"{name}: {report.describe()}")
    return {
        "rounds": rounds,
        "reference": reference,
        "times": [asdict(entry) for entry in times],
        "int8": {name: asdict(report) for name, report in reports.items()},
    }


def _check_lengths(models: Sequence[str], lengths: Sequence[int]) -> None:
    """Refuse samples that a graph or a model has no positions for."""
    from shd_torch.deploy.inputs import GraphInputs
    from shd_torch.deploy.timing import check_length

    for model in models if lengths else ():
        if model.endswith(".onnx"):
            most: int | None = GraphInputs(model).longest(max(lengths))
        else:
            require_packages("torch", "transformers")
            most = count_positions(read_config(find_folder(model, "model"), "model"))
        check_length(model, most, lengths)


def _add_graphs(
    paths: dict[str, Path],
    reports: dict[str, Int8Report],
    folder: Path,
    model: str,
    base: str,
    samples: dict[str, NDArray[np.generic]] | None,
    *,
    int8: bool,
) -> str:
    """Add a graph, that of a model's folder, and perhaps its int8, by the names of their rows; returns the first."""
    from shd_torch.deploy import quantize_graph

    path, row = Path(model), model if base == model else f"{base}, as it is"
    if not model.endswith(".onnx"):
        path = folder / f"{len(paths)}.onnx"
        row = f"{base}, {'fused' if export_folder(model, path).num_fused else 'attention not fused'}"
    paths[row], name = path, f"{base}, int8"
    if int8:
        try:
            reports[name] = quantize_graph(path, folder / f"{len(paths)}.int8.onnx", samples)
            paths[name] = reports[name].path
        except ShdError as error:
            if error.code not in ("export-failed", "not-finite"):
                raise
            print_remarks(f"{name} is left out: {error}")
    return row


def print_times(times: Sequence[GraphTime], reference: str, rounds: int) -> None:
    """A table for each setting, in milliseconds."""
    for setting in dict.fromkeys((entry.threads, entry.batch, entry.length) for entry in times):
        threads, batch, length = setting
        words = [f"batch {batch}"] * (batch is not None) + [f"length {length}"] * (length is not None)
        words.append(f"{threads} thread" + "s" * (threads > 1))
        table = narrow_table(", ".join(words))
        for number, heading in enumerate(("graph", "ms", "processor ms", "times faster")):
            table.add_column(heading, justify="right" if number else "left", no_wrap=bool(number), overflow="fold")
        for entry in times:
            if (entry.threads, entry.batch, entry.length) == setting:
                ratio = "1" if entry.graph == reference else _say_interval(entry.times_faster)
                columns = _say_interval(entry.wall, 1e3), _say_number(1e3 * entry.processor.median), ratio
                table.add_row(entry.graph, *columns)
        console.print(table)
    console.say(f"medians of {rounds} rounds by turns, in brackets 95% intervals; times faster than {reference}")


def _say_interval(interval: Interval, scale: float = 1.0) -> str:
    median, low, high = (_say_number(scale * value) for value in (interval.median, interval.low, interval.high))
    return f"{median} ({low}-{high})"


def _say_number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def export_folder(model: str, out: Path) -> ExportReport:
    require_packages("torch")
    from shd_torch.export import example_inputs, export_student, hide_weight_bars, load_hf_model

    hide_weight_bars()
    loaded = load_hf_model(model)
    return export_student(loaded, example_inputs(loaded), out)


def read_samples(
    data: Path | None, tokenizer: str | None, max_length: int | None
) -> dict[str, NDArray[np.generic]] | None:
    """What int8 is made for and compared on: the first samples of a file, or None for random inputs."""
    if data is None:
        return None
    folder = None if tokenizer is None else Path(tokenizer)
    return read_inputs(data, QUALITY_SAMPLES, folder, max_length=max_length, as_model=True)


def export(
    model: str,
    /,
    *,
    out: Path,
    student: bool = False,
    int8: Annotated[bool, Needs("student")] = False,
    data: Annotated[Path | None, Needs("int8")] = None,
    max_length: Annotated[int | None, FROM_1, Needs("data")] = None,
) -> Document:
    """Export a Hugging Face teacher with its attention maps in the graph, and check it against the model.

    shd-torch export teacher --out teacher.onnx

    Uses eager attention and dynamic batch and sequence axes; the graph is compared with the model at two sizes. For
    other PyTorch modules use shd_torch.export_teacher. With --student, export a trained student for inference
    instead, which shd-torch time measures.

    Args:
        model: A Hugging Face model with safetensors: a folder, or a hub id.
        out: The graph to write, such as teacher.onnx.
        student: Export a trained student for inference: one fused operator per attention.
        int8: Also write OUT.int8.onnx, its products in int8, and compare.
        data: Samples like those to come, as for shrink: int8 is made for them, and compared with float.
            Default: random inputs, which make it worse.
        max_length: Tokens to keep of a text of --data. Default: as the tokenizer's folder says.
    """
    if int8:
        require_packages("onnxruntime")
    require_packages("torch", "transformers", "onnx", "onnxscript")
    check_model(model, "model")
    is_file = not output_path(out).is_dir()
    need(is_file, "write-failed", "out", "be a file, such as teacher.onnx", f"{out}, which is a folder")
    samples = read_samples(data, model, max_length)
    from shd_torch.export import example_inputs, export_student, export_teacher, hide_weight_bars, load_hf_model

    hide_weight_bars()
    with show_progress("model") as (on_progress,):
        on_progress(0, 0, says="model is loaded")
        loaded = load_hf_model(model)
        on_progress(0, 0, says="graph is made")
        report = (export_student if student else export_teacher)(loaded, example_inputs(loaded), out)
    attention = f"{report.num_fused} fused attention nodes, " if student else ""
    attention += f"{report.num_softmax} softmax nodes"
    console.say(f"{report.path}: {attention}, opset {report.opset}, inputs {report.inputs}")
    if report.max_difference is None:
        console.say("not compared with the model: onnxruntime is not installed")
    else:
        console.say(f"differs from the model by at most {report.max_difference:.2g} (allowed {report.tolerance:.2g})")
    quantized, following = None, [] if student else [shlex.join(["shd", "inspect", str(out)])]
    if int8:
        from shd_torch.deploy import quantize_graph

        quantized = quantize_graph(out, out.with_suffix(".int8.onnx"), samples)
        sizes = " to ".join(f"{size / 1e6:.1f} MB" for size in (quantized.bytes_before, quantized.bytes_after))
        console.say(f"{quantized.path}: {quantized.num_products} products in int8, {sizes}; {quantized.describe()}")
    for command in following:
        console.say(f"next: {command}")
    return asdict(report) | {"int8": None if quantized is None else asdict(quantized), "next": following}


def compress(
    teacher: Path,
    /,
    *,
    data: Annotated[tuple[Path, ...], PATHS],
    options: CompressOptions | None = None,
    out: Path | None = None,
    held_out: Path | None = None,
    dry_run: bool = False,
) -> Document:
    """Make the student that loses least at the speed that you want, and write it ready to deploy.

    shd-torch compress teacher --data texts.jsonl --faster 4 --out student

    The teacher in int8 is tried first: if it is fast enough, it is the answer. Otherwise the costs of heads, neurons
    and layers are measured in onnxruntime, a few students with the best predicted loss are trained shortly, and the
    best is trained from a cache of the teacher's outputs. The folder has the model, ONNX graphs in float and int8, a
    page with the figures, and compress.json. If a run is stopped, the same command resumes it.

    Args:
        teacher: Folder of a Hugging Face model, or of sentence-transformers.
        data: Texts (a column text), pairs (text and text_pair) or arrays, in any file that shd precompute reads, or
            .npy; no labels are needed. Of several, a.jsonl,b.jsonl, the page has each quality.
        out: A new folder for the student, its graphs and a page; only --dry-run needs none.
        held_out: Other data to judge on; a column label or score there gives MAP, accuracy or the like. Default: a
            tenth of the data, at most 500 samples.
        dry_run: Say what would be tried, and for how long.
    """
    require_packages("torch", "transformers", "accelerate", "scipy", "onnxruntime", "tokenizers")
    has_place = dry_run or out is not None
    need(has_place, "argument-value", "--out", "be given, a new folder for the student", "none")
    out = None if dry_run else out
    search_options = options or CompressOptions()  # which refuses to have no target
    check_files(teacher, "teacher")
    for argument, path in [*(("data", path) for path in data), ("held_out", held_out)]:
        if path is not None:
            columns = Columns(search_options.text_column, search_options.pair_column)
            open_rows(path, teacher, search_options.max_length, argument, columns=columns)
    if out is not None:
        new_folder(out)
    from shd_torch.compress.run import compress as run
    from shd_torch.compress.run import forecast
    from shd_torch.export import hide_weight_bars

    hide_weight_bars()
    with show_progress("stages") as (on_step,):
        settings: dict[str, Any] = {"options": search_options, "held_out": held_out}
        settings["progress"] = lambda done, total, what: on_step(done, total, says=what)
        if out is None:
            lines = forecast(teacher, data, **settings)
        else:
            document = run(teacher, data, out=out, command=["shd-torch", *sys.argv[1:]], say=print_stage, **settings)
    if out is None:
        console.say("\n".join(lines))
        return {"stages": lines}
    _print_front(document)
    print_remarks(*document["remarks"])
    console.say(f"{out}: the page README.md, compress.json, and graphs in onnx/")
    return document | {"path": out}


def _print_front(document: dict[str, Any]) -> None:
    from shd_torch.compress.handover import find_points, settings_of

    table = narrow_table(caption=f"quality: {document['measure']}; times faster: {'; '.join(settings_of(document))}")
    points = find_points(document)
    for number, heading in enumerate(("model", "quality", *points[0].others, "times faster", "MB")):
        table.add_column(heading, justify="right" if number else "left")
    for point in points:
        speeds = 2 + len(point.others)
        *figures, megabytes = point.cells
        table.add_row(*figures[:speeds], ", ".join(figures[speeds:]), megabytes)
    console.print(table)
    if not document["students"]:
        console.say("the teacher in int8 is fast enough; --go-on makes a student all the same")
    for student in document["students"]:
        console.say(f"{student['wish']}: {student['chosen']['text']}")
        print_remarks(*student["missed"])


def make_program() -> Program:
    program = Program("shd-torch", _TEXT)
    resumes = "the same command resumes: finished {} are kept next to --out, in .NAME.part"
    program.add(compress, after=resumes.format("stages"))
    program.add(export)
    program.add(doctor)
    program.add(shrink, after=resumes.format("layers"))
    program.add(time_models, name="time")
    return program
