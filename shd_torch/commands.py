"""The subcommands of ``shd-torch``; PyTorch is imported when one of them runs."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from shd_ref.cache.storage.drafts import output_path
from shd_ref.commands.program import Document, Program, require_packages
from shd_ref.commands.terminal import console, show_progress
from shd_ref.errors import ShdError, need
from shd_ref.teacher.options import Needs, at_least
from shd_torch.compress_command import compress
from shd_torch.doctor_command import doctor
from shd_torch.shrink.folders import check_model
from shd_torch.shrink_command import shrink, vocabulary
from shd_torch.time_command import Graphs, Timing, check_timing, read_samples, time_models

TEACHER_OPSET = 18

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


def export(
    model: str,
    /,
    *,
    out: Path,
    opset: Annotated[int, at_least(18, 22)] = TEACHER_OPSET,
    student: bool = False,
    int8: bool = False,
    data: Annotated[Path | None, Needs("int8")] = None,
    timing: Timing | None = None,
) -> Document:
    """Export a Hugging Face teacher with its attention maps in the graph, and check it against the model.

    shd-torch export teacher --out teacher.onnx

    Uses eager attention and dynamic batch and sequence axes; the graph is compared with the model at two sizes. For
    other PyTorch modules use shd_torch.export_teacher. With --student, export a trained student for inference
    instead; with --beside, time it as shd-torch time does.

    Args:
        model: A Hugging Face model with safetensors: a folder, or a hub id.
        out: The graph to write, such as teacher.onnx.
        opset: ONNX opset of a teacher.
        student: Export a trained student for inference: one fused operator per attention.
        int8: With --student: also write OUT.int8.onnx, its products in int8, and compare.
        data: Samples on which int8 is compared with float, as for shrink. Default: random inputs.
    """
    if timing is not None:
        need(timing.beside is not None, "argument-value", "--beside", "be given to time a student", "none")
    for option, is_given in (("--int8", int8), ("--beside", timing is not None)):
        if is_given and not student:
            raise ShdError("argument-value", f"{option} must go with --student; got it without")
        if is_given:
            require_packages("onnxruntime")
    require_packages("torch", "transformers", "onnx", "onnxscript")
    if student and opset != TEACHER_OPSET:
        raise ShdError("argument-value", f"--opset must be left out with --student, which chooses it; got {opset}")
    check_model(model, "model")
    if output_path(out).is_dir():
        raise ShdError("write-failed", f"out must be a file, such as teacher.onnx; got {out}, which is a folder")
    samples = read_samples(data, model)
    if timing is not None:
        check_timing(timing, model)
    from shd_torch.export import example_inputs, export_student, export_teacher, hide_weight_bars, load_hf_model

    hide_weight_bars()
    with show_progress("model") as (on_progress,):
        on_progress(0, 0, says="model is loaded")
        loaded = load_hf_model(model)
        inputs = example_inputs(loaded)
        on_progress(0, 0, says="graph is made")
        report = export_student(loaded, inputs, out) if student else export_teacher(loaded, inputs, out, opset=opset)
    attention = f"{report.num_fused} fused attention nodes, " if student else ""
    attention += f"{report.num_softmax} softmax nodes"
    console.say(f"{report.path}: {attention}, opset {report.opset}, inputs {report.inputs}")
    if report.max_difference is None:
        console.say("not compared with the model: onnxruntime is not installed")
    else:
        console.say(f"differs from the model by at most {report.max_difference:.2g} (allowed {report.tolerance:.2g})")
    quantized, timed = None, None
    if int8:
        from shd_torch.deploy import quantize_graph

        quantized = quantize_graph(out, out.with_suffix(".int8.onnx"), samples)
        sizes = " to ".join(f"{size / 1e6:.1f} MB" for size in (quantized.bytes_before, quantized.bytes_after))
        console.say(f"{quantized.path}: {quantized.num_products} products in int8, {sizes}; {quantized.describe()}")
    if timing is not None:
        with tempfile.TemporaryDirectory() as temporary:
            graphs = Graphs(Path(temporary), samples)
            graphs.paths |= {str(path): path for path in (out, *([quantized.path] if quantized else []))}
            timed = graphs.time(timing)
    following = [] if student else [shlex.join(["shd", "inspect", str(out)])]
    for command in following:
        console.say(f"next: {command}")
    return asdict(report) | {
        "int8": None if quantized is None else asdict(quantized),
        "timing": timed,
        "next": following,
    }


def make_program() -> Program:
    """``shd-torch``."""
    program = Program("shd-torch", _TEXT)
    resumes = "the same command resumes: finished {} are kept beside --out, in .NAME.part"
    program.add(compress, after=resumes.format("stages"))
    program.add(export)
    program.add(doctor)
    program.add(shrink, after=resumes.format("layers"))
    program.add(vocabulary)
    program.add(time_models, name="time")
    return program
