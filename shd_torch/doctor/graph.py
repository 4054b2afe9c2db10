"""What the teacher's graph says before any training: fidelity at the student's heads, sinks, and what ways cost."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from shd_ref.errors import ShdError
from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.study.options import FidelityOptions, PlanOptions
from shd_ref.teacher.study.ranking import FidelityReport

Arrays = Mapping[str, NDArray[Any]]
Progress = Callable[[int, int, str], None]

SAMPLES: Final = 32
"""Samples on which fidelity is measured, besides those that plans are matched on."""
CALIBRATION: Final = 16
"""Samples that plans are matched on."""
READ: Final = 8
"""Samples whose maps are read."""


@dataclass(frozen=True)
class GraphStudy:
    """What was measured on a teacher's graph.

    Attributes:
        fidelity: of the teacher with the student's number of heads.
        sinks: share of attention on the first token, by site.
        even: what that share would be if every row looked alike at all that it may see.
        forecast: ``shd_ref.teacher.study.forecast.Forecast``; None for a student with more layers than sites,
            or of several kinds of attention.
    """

    fidelity: FidelityReport
    sinks: tuple[float, ...]
    even: float
    forecast: Any


def study_graph(
    graph: Path,
    arrays: Arrays,
    *,
    heads: int,
    layers: int | None,
    plan: PlanOptions,
    next_token: bool = False,
    progress: Progress = lambda *_: None,
) -> GraphStudy:
    """Measure a teacher graph on samples.

    Args:
        graph: an ``.onnx`` file.
        arrays: inputs by name ``(N, ...)``; what the graph does not take is left out.
        heads: of the student.
        layers: of the student; None makes no forecast.
        plan: what training is forecast.
        next_token: judge by the teacher's own loss on the next tokens, not by the cosine of its output.
        progress: gets the numbers of batches done and in all, 0 where nothing is counted, and what is done.

    Raises:
        ShdError: as ``measure_fidelity`` and ``forecast_cache``.
    """
    from shd_ref.teacher.opening.load import load_teacher
    from shd_ref.teacher.study.fidelity import measure_fidelity
    from shd_ref.teacher.study.forecast import forecast_cache

    model = load_teacher(graph)
    names = {value.name for value in model.graph.input}
    fed = {name: array for name, array in arrays.items() if name in names}
    run = RunOptions(batch_size=8, num_threads=torch.get_num_threads())
    count = len(next(iter(fed.values()))) if fed else 0
    options = FidelityOptions(
        (heads,),
        targets="input_ids" if next_token and "input_ids" in fed else None,
        samples=SAMPLES,
        calibration_samples=min(CALIBRATION, max(count // 2, 1)),
    )
    progress(0, 0, "batches for fidelity")
    fidelity = measure_fidelity(
        graph, fed, options, run, on_progress=lambda done, total: progress(done, total, "batches for fidelity")
    )
    progress(0, 0, "maps are read")
    sinks, even = read_sinks(model, fed, run)
    forecast = None
    if layers is not None and layers <= len(sinks):
        progress(0, 0, "caches are forecast")
        forecast = forecast_cache(graph, fed, PrecomputeOptions(heads, num_student_layers=layers), run, plan)
    return GraphStudy(fidelity, sinks, even, forecast)


def read_sinks(model: Any, arrays: Arrays, run: RunOptions) -> tuple[tuple[float, ...], float]:
    """By site the mean share of a row's attention on the sample's first token, and that of even rows.

    The first row, which may see itself alone, is left out.

    Args:
        model: the teacher, from ``load_teacher``.
        arrays: its inputs.
        run: how to run it.
    """
    from shd_ref.teacher.graph.find import find_sites
    from shd_ref.teacher.graph.shapes import frozen_specs
    from shd_ref.teacher.run.inputs import ModelInputs
    from shd_ref.teacher.run.reading import AttentionReader
    from shd_ref.teacher.sources import ArraySource

    sites = [site for site in find_sites(model) if site.supported]
    reader = AttentionReader(model, sites, num_threads=run.num_threads)
    source = ArraySource({name: array[:READ] for name, array in arrays.items()})
    inputs = ModelInputs(source, frozen_specs(model, [site.probs for site in sites]), run.mask)
    sums, even, rows = np.zeros(len(sites)), 0.0, 0
    for batch in inputs.batches(list(range(len(inputs))), run.batch_size, None):
        for number in range(len(sites)):
            maps = np.asarray(reader.read_values(number, batch)[0], dtype=np.float64).mean(1)
            counted = _rows(batch, inputs.mask, maps.shape)
            each = np.arange(len(maps))
            first = counted.argmax(1)
            counted[each, first] = False
            sums[number] += float(maps.transpose(0, 2, 1)[each, first][counted].sum())
            if number == 0:
                even += float((1 / np.maximum((maps > 0).sum(-1), 1))[counted].sum())
                rows += int(counted.sum())
    return tuple((sums / max(rows, 1)).tolist()), even / max(rows, 1)


def _rows(batch: Any, mask: str | None, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """``(B, L)``, True = a position of the sample."""
    counted = np.ones(shape[:2], dtype=bool)
    if mask is not None and batch.arrays[mask].shape[1:] == shape[1:2]:
        counted = batch.arrays[mask][: shape[0]].astype(bool)
    return counted


def study_model(model: Any, arrays: Arrays, progress: Progress = lambda *_: None, **options: Any) -> GraphStudy:
    """``study_graph`` of a Hugging Face teacher, whose graph is made for it and thrown away.

    Raises:
        ShdError: ``dependency-missing``; as ``study_graph``, ``export_teacher`` and ``example_inputs``.
    """
    for package in ("onnx", "onnxruntime", "onnxscript"):
        if find_spec(package) is None:
            raise ShdError(
                "dependency-missing",
                f"data is measured on the teacher's graph, which needs the package {package}: pip install "
                "'squeezing-heads[all]'",
            )
    from shd_torch.export import example_inputs, export_teacher

    with tempfile.TemporaryDirectory(prefix="shd-doctor-") as folder:
        path = Path(folder) / "teacher.onnx"
        progress(0, 0, "teacher is exported")
        export_teacher(model, example_inputs(model), path)
        return study_graph(path, arrays, progress=progress, **options)
