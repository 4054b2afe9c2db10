"""What the teacher's graph says before any training: fidelity at the student's number of heads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from numpy.typing import NDArray

from shd_ref.errors import ShdError
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.study.fidelity import Fidelity

Arrays = Mapping[str, NDArray[Any]]
Progress = Callable[[int, int, str], None]

CALIBRATION: Final = 16
"""Samples that plans are matched on."""


def measure_graph(
    graph: Path, arrays: Arrays, heads: int, *, progress: Progress = lambda *_: None
) -> tuple[Fidelity, ...]:
    """Run a teacher graph on samples with its heads merged, in the ways of ``shd plan``.

    What the graph does not take of the arrays is left out.
    """
    from shd_ref.teacher.opening.load import load_teacher
    from shd_ref.teacher.study.fidelity import measure_fidelity

    names = {value.name for value in load_teacher(graph).graph.input}
    fed = {name: array for name, array in arrays.items() if name in names}
    count = len(next(iter(fed.values()))) if fed else 0
    options = PrecomputeOptions(heads, calibration_samples=min(CALIBRATION, max(count // 2, 1)))
    unit = "batches for fidelity"
    progress(0, 0, unit)
    run = RunOptions(batch_size=8, num_threads=torch.get_num_threads())
    return measure_fidelity(graph, fed, options, run, on_progress=lambda done, total: progress(done, total, unit))


def measure_model(
    model: Any, arrays: Arrays, heads: int, *, progress: Progress = lambda *_: None
) -> tuple[Fidelity, ...]:
    """``measure_graph`` of a Hugging Face teacher, whose graph is made for it and thrown away."""
    for package in ("onnx", "onnxruntime", "onnxscript"):
        if find_spec(package) is None:
            message = f"data is measured on the teacher's graph, which needs the package {package}"
            raise ShdError("dependency-missing", f"{message}: pip install '.[cpu]' (in a checkout)")
    from shd_torch.export import example_inputs, export_teacher

    with tempfile.TemporaryDirectory(prefix="shd-doctor-") as folder:
        path = Path(folder) / "teacher.onnx"
        progress(0, 0, "teacher is exported")
        export_teacher(model, example_inputs(model), path)
        return measure_graph(path, arrays, heads, progress=progress)
