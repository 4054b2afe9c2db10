"""``shd-torch time``, and the timing of ``shd-torch export``: graphs by turns with their teacher, float and int8."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray

from shd_ref.commands.program import Document, require_packages
from shd_ref.commands.terminal import console, narrow_table, print_remarks, show_progress
from shd_ref.errors import ShdError
from shd_ref.teacher.options import INTEGERS, OPTIONS, at_least
from shd_torch.shrink.folders import check_model, count_positions, find_folder, read_config
from shd_torch.shrink_command import read_inputs

if TYPE_CHECKING:
    from shd_torch.deploy import GraphTime, Int8Report, Interval
    from shd_torch.export import ExportReport

QUALITY_SAMPLES = 64
"""Samples of ``--data`` on which int8 graphs are compared with float ones, the first."""


@OPTIONS
@dataclass(frozen=True)
class Timing:
    """What is timed, and at which settings.

    Attributes:
        beside: The teacher, a folder or an .onnx file: time it too, with fused attention (a folder), and in int8.
        batch: Samples per run. Default: 1,32.
        length: Tokens per sample; not for images. Default: 64.
        threads: Threads per run (intra_op_num_threads).
        rounds: Turns of each graph at each setting.
    """

    beside: Annotated[str | None, Parameter(metavar="TEACHER")] = None
    batch: Annotated[tuple[int, ...] | None, INTEGERS] = None
    length: Annotated[tuple[int, ...] | None, INTEGERS] = None
    threads: Annotated[tuple[int, ...], INTEGERS] = (1,)
    rounds: Annotated[int, at_least(6)] = 15


_USUAL = Timing()


def time_models(
    models: Annotated[list[str], Parameter(name="MODEL...")],
    /,
    *,
    timing: Timing = _USUAL,
    int8: bool = False,
    data: Path | None = None,
) -> Document:
    """Time models in onnxruntime on the CPU, as a loop of your own would see it.

    shd-torch time student.onnx student.int8.onnx --beside teacher --batch 1,32 --length 16,64 --threads 1,2

    Graphs run by turns. Printed are medians over rounds with their 95% intervals, wall time and processor time, and
    how many times faster each is than the teacher (without --beside: than the first model), paired by round. Folders
    are exported with fused attention first; int8 as by shd-torch export --int8.

    Args:
        models: ONNX graphs, or folders of Hugging Face models, such as students.
        int8: Also time each model with its products in int8.
        data: Samples on which int8 is compared with float, as for shrink. Default: random inputs.
    """
    require_packages("onnx", "onnxruntime")
    if len(set(models)) < len(models):
        raise ShdError("argument-value", f"each model must be given once; got {', '.join(models)}")
    if data is not None and not int8 and timing.beside is None:
        raise ShdError("argument-value", f"--data must go with --beside or --int8; got {data} without them")
    folders = [name for name in (timing.beside, *models) if name is not None and _is_folder(name)]
    for model in models:
        check_model(model, model, or_graph=True)
    samples = read_samples(data, folders[0] if folders else None)
    check_timing(timing, *models)
    with tempfile.TemporaryDirectory() as temporary:
        graphs = Graphs(Path(temporary), samples)
        with show_progress("models") as (on_model,):
            for model in models:
                on_model(0, 0, says=f"{model} is prepared")
                graphs.add(model, int8=int8)
        return graphs.time(timing)


class Graphs:
    """Graphs by the names of their rows; those of folders and in int8 are made in a temporary place."""

    def __init__(self, folder: Path, inputs: dict[str, NDArray[np.generic]] | None) -> None:
        self.paths: dict[str, Path] = {}
        self.reports: dict[str, Int8Report] = {}
        self._folder = folder
        self._inputs = inputs

    def add(self, model: str, *, name: str | None = None, int8: bool = False) -> str:
        """Add a graph as it is, or a folder exported with fused attention, and perhaps its int8; returns its row."""
        base = name or model
        if _is_folder(model):
            path = self._folder / f"{len(self.paths)}.onnx"
            row = f"{base}, {'fused' if export_folder(model, path).num_fused else 'attention not fused'}"
        else:
            path, row = Path(model), f"{base}, as it is" if name else base
        self.paths[row] = path
        if int8:
            self._add_int8(f"{base}, int8", path)
        return row

    def _add_int8(self, row: str, path: Path) -> None:
        from shd_torch.deploy import quantize_graph

        try:
            report = quantize_graph(path, self._folder / f"{len(self.paths)}.int8.onnx", self._inputs)
        except ShdError as error:
            if error.code not in ("export-failed", "not-finite"):
                raise
            print_remarks(f"{row} is left out: {error}")
        else:
            self.paths[row], self.reports[row] = report.path, report

    def time(self, timing: Timing) -> Document:
        """Time all, the teacher and its int8 among them, and print a table for each setting."""
        from shd_torch.deploy import time_graphs
        from shd_torch.deploy.timing import find_busy

        reference = next(iter(self.paths))
        with show_progress("turns") as (on_turn,):
            if timing.beside is not None:
                on_turn(0, 0, says="the teacher is prepared")
                reference = self.add(timing.beside, name="teacher", int8=True)
            on_turn(0, 0)
            settings = {name: value for name, value in asdict(timing).items() if name != "beside"}
            times = time_graphs(self.paths, reference=reference, progress=on_turn, **settings)
        print_times(times, reference, timing.rounds)
        print_remarks(find_busy(times))
        for name, report in self.reports.items():
            console.say(f"{name}: {report.describe()}")
        return {
            "rounds": timing.rounds,
            "reference": reference,
            "times": [asdict(entry) for entry in times],
            "int8": {name: asdict(report) for name, report in self.reports.items()},
        }


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
    """The model of a folder or hub id as a graph with fused attention."""
    require_packages("torch")
    from shd_torch.export import example_inputs, export_student, hide_weight_bars, load_hf_model

    hide_weight_bars()
    loaded = load_hf_model(model)
    return export_student(loaded, example_inputs(loaded), out)


def read_samples(data: Path | None, tokenizer: str | None) -> dict[str, NDArray[np.generic]] | None:
    """What int8 is compared on: the first samples of a file, or None for random inputs."""
    if data is None:
        return None
    return read_inputs(data, QUALITY_SAMPLES, None if tokenizer is None else Path(tokenizer))


def check_timing(timing: Timing, *models: str) -> None:
    """Refuse a teacher that is none, and lengths beyond its positions or a model's, before any is exported."""
    if timing.beside is not None:
        check_model(timing.beside, "beside", or_graph=True)
    from shd_torch.deploy.inputs import GraphInputs
    from shd_torch.deploy.timing import check_length

    lengths = timing.length or ()
    for model in (*models, *filter(None, [timing.beside])) if lengths else ():
        if _is_folder(model):
            require_packages("torch", "transformers")
            most = count_positions(read_config(find_folder(model, "model"), "model"))
        else:
            most = GraphInputs(model).longest(max(lengths))
        check_length(model, most, lengths)


def _is_folder(model: str) -> bool:
    return not model.endswith(".onnx")
