"""The subcommands of ``shd-torch``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.text import Text

from shd_ref.cache.storage.outputs import output_file, output_path
from shd_ref.errors import ShdError

app = typer.Typer(
    name="shd-torch",
    help="The PyTorch side of squeezing-heads: export a teacher to ONNX, train students from a cache.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
# Paths and messages may hold brackets and colons: neither is markup.
console = Console(markup=False, emoji=False)
messages = Console(stderr=True, markup=False, emoji=False)


@contextmanager
def reported_errors() -> Iterator[None]:
    """A ``ShdError`` becomes one message and exit code 1; anything else is a bug and keeps its traceback."""
    try:
        yield
    except ShdError as error:
        messages.print(Text.assemble(("error", "bold red"), f" ({error.code}): {error}"), soft_wrap=True)
        raise typer.Exit(1) from None


@app.command()
def export(
    model: Annotated[str, typer.Option(help="A Hugging Face model: a local folder, or a hub id.")],
    out: Annotated[Path, typer.Option(help="Where to write the graph, such as teacher.onnx.")],
    opset: Annotated[int, typer.Option(help="ONNX opset.", min=18, max=22)] = 18,
) -> None:
    """Export a Hugging Face teacher with its attention maps in the graph, and check it against the model.

    Eager attention, dynamic batch and sequence axes; the graph is compared with the model at two sizes. For any other
    PyTorch module use shd_torch.export_teacher.
    """
    from shd_torch.export import example_inputs, export_teacher, load_hf_model

    with reported_errors():
        teacher = load_hf_model(model)
        report = export_teacher(teacher, example_inputs(teacher), out, opset=opset)
    console.print(
        f"{report.path}: {report.num_softmax} softmax nodes, opset {report.opset}, inputs {report.inputs}",
        soft_wrap=True,
    )
    if report.max_difference is None:
        console.print("not compared with the model: onnxruntime is not installed")
    else:
        console.print(
            f"differs from the model by at most {report.max_difference:.2g} (allowed {report.tolerance:.2g})"
        )
    console.print(f"next: shd inspect {out}", highlight=False, soft_wrap=True)


@app.command()
def train(
    data: Annotated[
        Path,
        typer.Option(help=".npz with image, label, test_image, test_label and, for KD, teacher_logits."),
    ],
    cache: Annotated[
        str | None,
        typer.Option(help="Supervision from shd precompute, a folder or address; needed for --beta above 0."),
    ] = None,
    beta: Annotated[float, typer.Option(help="Weight of the SHD term; 0 switches it off.", min=0)] = 1.0,
    kd_weight: Annotated[float, typer.Option(help="Share of KD in the base loss.", min=0, max=1)] = 0.5,
    labels: Annotated[int | None, typer.Option(help="Use only so many labelled images; default all.", min=10)] = None,
    heads: Annotated[int, typer.Option(help="Heads of the student.", min=1)] = 2,
    layers: Annotated[int, typer.Option(help="Layers of the student.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = 300,
    seed: Annotated[int, typer.Option(help="Of initial weights, labelled images and batches.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    out: Annotated[str | None, typer.Option(help="Write weights (.pt) and history (.json) under this name.")] = None,
) -> None:
    """Train one of the demo's students: a small vision transformer, on images, from a cache.

    Run the demo first: it writes digits.npz and cache/. For your own model, copy the loop in shd_torch/demo/train.py.
    """
    from shd_ref.cache import CacheReader
    from shd_torch.demo.digits import choose_labelled
    from shd_torch.demo.students import make_student
    from shd_torch.demo.train import ArrayDataset, TrainOptions, load_training_arrays, measure_accuracy, train_student

    with reported_errors():
        files = None if out is None else _result_files(out, cache)  # before the training, which may be long
        arrays = load_training_arrays(data)
        chosen = choose_labelled(arrays["label"], labels or len(arrays["label"]), seed)
        names = [name for name in ("image", "label", "teacher_logits") if name in arrays]
        student = make_student(seed, heads=heads, layers=layers)
        options = TrainOptions(steps=steps, seed=seed, beta=beta, kd_weight=kd_weight)
        history = train_student(
            student,
            ArrayDataset({name: np.ascontiguousarray(arrays[name][chosen]) for name in names}),
            options,
            cache=None if cache is None else CacheReader(cache),
            device=device,
        )
        student.cpu()
        accuracy = measure_accuracy(
            student, torch.from_numpy(arrays["test_image"]), torch.from_numpy(arrays["test_label"])
        )
        counts = f"{len(chosen)} labels, {steps} steps"
        console.print(f"{counts}: {accuracy:.1%} of {len(arrays['test_label'])} test images")
        if files is not None:
            record = {"options": asdict(options), "accuracy": accuracy, "history": asdict(history)}
            try:
                torch.save(student.state_dict(), files[0])
                files[1].write_text(json.dumps(record) + "\n", encoding="utf-8")
            except (OSError, RuntimeError) as error:  # torch raises the latter, whatever the system said
                message = f"{files[0]} and {files[1]} could not be written: {error}: make room, or name another --out"
                raise ShdError("write-failed", message) from error
            console.print(f"wrote {files[0]} and {files[1]}", soft_wrap=True)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = Path("demo_out"),
    seeds: Annotated[int, typer.Option(help="Students per method and number of labels.", min=1)] = 5,
    labels: Annotated[str, typer.Option(help="Numbers of labelled images, with commas.")] = "50,100,300",
    steps: Annotated[int, typer.Option(help="Optimiser steps per student.", min=1)] = 240,
    teacher_epochs: Annotated[int, typer.Option(help="Epochs of the teacher.", min=1)] = 30,
    workers: Annotated[int, typer.Option(help="Students trained side by side.", min=1)] = 2,
) -> None:
    """The whole path on handwritten digits: teacher, graph, cache, students, a table and pictures."""
    for package in ("sklearn", "matplotlib", "scipy", "onnxruntime"):
        _require(package)
    from shd_torch.demo.run import run_demo

    with reported_errors():
        try:
            counts = tuple(int(count) for count in labels.split(","))
        except ValueError:
            raise ShdError("argument-value", f"--labels must be numbers such as 50,100; got {labels!r}") from None
        run_demo(
            out,
            num_labels=counts,
            seeds=seeds,
            steps=steps,
            teacher_epochs=teacher_epochs,
            workers=workers,
            console=console,
        )


def _result_files(out: str, cache: str | None) -> tuple[Path, Path]:
    """Where weights and history go; refuses places that cannot be written."""
    name = output_path(out, cache=cache)
    if not name.name:
        raise ShdError("argument-value", f"--out must name files such as runs/student; got {out!r}")
    return output_file(name.with_suffix(".pt"), cache=cache), output_file(name.with_suffix(".json"), cache=cache)


def _require(package: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        messages.print(f"the demo needs the package {package}: pip install 'squeezing-heads[all]'", soft_wrap=True)
        raise typer.Exit(1)
