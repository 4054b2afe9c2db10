"""One run: a teacher with its data, timing, and results of stages, which a killed run finds again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from shd_torch.compress.labels import Labelled
from shd_torch.compress.options import CompressOptions
from shd_torch.compress.samples import Samples
from shd_torch.compress.space import find_space
from shd_torch.compress.task import Decoder, Judge, check_causal, find_task, model_run
from shd_torch.deploy import GraphTime, quantize_graph, time_graphs
from shd_torch.deploy.timing import find_busy
from shd_torch.export import example_inputs, export_student
from shd_torch.shrink.families import family_of
from shd_torch.shrink.folders import load_teacher, padding_of
from shd_torch.shrink.sizes import sizes_of
from shd_torch.shrink.unfinished import Unfinished

Progress = Callable[[int, int, str], None]
JUDGED: Final = 64
"""Samples on which parts are weighed."""
INT8_SAMPLES: Final = 128
"""Of the training set, which int8 graphs are made for."""
ROUNDS: Final = 9
TEACHER: Final = "teacher"
TEACHER_INT8: Final = "teacher, int8"


class Run:
    """What all stages read; each result is kept, as JSON, when it is finished."""

    def __init__(
        self,
        teacher: Path,
        options: CompressOptions,
        keeper: Unfinished,
        progress: Progress,
        samples: Samples,
        labels: Labelled | None = None,
    ) -> None:
        self.teacher, self.options, self.keeper, self.labels = teacher, options, keeper, labels
        self.progress, self.samples, self.folder = progress, samples, keeper.folder
        self.model = load_teacher(teacher).float()  # a folder may keep halves, which graphs and NumPy do not take
        self.family = family_of(self.model, None)
        self.sizes = sizes_of(self.model.config, self.family)
        self.space = find_space(self.sizes, self.family, self.model.config)
        self.task = find_task(teacher, self.model.config)
        if isinstance(self.task, Decoder):
            check_causal(model_run(self.model))
        self.remarks: list[str] = []
        self.graphs = keeper.folder / "graphs"
        self.graphs.mkdir(exist_ok=True)
        self._judges: dict[tuple[str, int | None], Judge] = {}

    def find(self, name: str, make: Callable[[], Any], files: str = "") -> Any:
        """What an earlier run found, or what is found now, with files that it makes in the run's folder."""
        piece = self.keeper.get(name)
        if piece is None:
            self.keeper.put(name, {}, make(), files)
            piece = self.keeper.require(name)  # also now as a run that goes on gets it
        return piece[1]

    def judge(self, use: str, most: int | None = None) -> Judge:
        self.progress(0, 0, "quality is measured")
        if (use, most) not in self._judges:
            rows, pad_id = getattr(self.samples, use)[:most], padding_of(self.model.config)
            labels = self.labels if use == "held_out" else None
            self._judges[use, most] = Judge(self.task, rows, model_run(self.model), pad_id, labels)
            if use == "held_out":
                self._judges[use, most].check()
        return self._judges[use, most]

    def tell(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(done, total, what)

    @property
    def teacher_graphs(self) -> dict[str, Path]:
        paths = {TEACHER: self.graphs / "teacher.onnx", TEACHER_INT8: self.graphs / "teacher.int8.onnx"}
        return paths if self.options.int8 else {TEACHER: paths[TEACHER]}

    def write_graphs(self, model: Any, name: str) -> dict[str, Path]:
        """A model as it is deployed: ``float``, and ``int8`` if asked for, the last being the one to run."""
        path = self.graphs / f"{name}.onnx"
        for file in self.graphs.glob(f"{name}.*"):  # an earlier student's graphs and their weight files
            file.unlink()
        export_student(model, example_inputs(model, list(self.samples.train[0])), path)
        if not self.options.int8:
            return {"float": path}
        rows = self.samples.calibration(INT8_SAMPLES, padding_of(self.model.config))
        quantize_graph(path, path.with_suffix(".int8.onnx"), rows)
        return {"float": path, "int8": path.with_suffix(".int8.onnx")}

    def time(self, graphs: Mapping[str, Path], rounds: int = ROUNDS) -> list[GraphTime]:
        """Graphs by turns at every setting, the first being the reference."""
        options = self.options
        length = options.length if "input_ids" in self.samples.train[0] else None
        settings: Any = {"batch": options.batch, "length": length, "threads": (options.threads,), "rounds": rounds}
        times = time_graphs(graphs, **settings, progress=self.tell("graphs are timed"))
        if (remark := find_busy(times)) is not None:
            self.keeper.put("busy", {}, [remark])  # also for a run that goes on
        return times

    def price(self, graphs: Mapping[str, Path]) -> dict[str, list[float]]:
        """Median seconds of a run of each graph, one for each batch and length, in order; then its bytes."""
        prices: dict[str, list[float]] = {name: [] for name in graphs}
        for entry in self.time(graphs):
            prices[entry.graph].append(entry.wall.median)
        for name, path in graphs.items():
            prices[name].append(float(count_bytes(path)))
        return prices


def count_bytes(graph: Path) -> int:
    """Of a graph with its weights, which may lie beside it."""
    return sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*"))
