"""One run: a teacher with its data, its minutes divided among stages, and their results, which a killed run finds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from shd_torch.compress.measures import Labelled
from shd_torch.compress.options import CompressOptions
from shd_torch.compress.samples import BATCH, LEAST, Row, Samples, collate, inputs_of, length_of
from shd_torch.compress.space import FRACTIONS, Space, find_space
from shd_torch.compress.task import Decoder, Judge, SentenceEncoder, check_causal, find_task, model_run
from shd_torch.deploy.int8 import count_bytes, quantize_graph
from shd_torch.deploy.timing import Turns, find_busy, median_runs, take_turns
from shd_torch.export import example_inputs, export_student
from shd_torch.shrink.families import family_of
from shd_torch.shrink.folders import count_positions, load_teacher, padding_of
from shd_torch.shrink.layer import AttentionStatistics
from shd_torch.shrink.sizes import sizes_of
from shd_torch.shrink.unfinished import Unfinished

STAGES: Final = ("teacher", "costs", "parts", "candidates", "cache", "short trainings", "training", "graphs")
"""Names of the stages, in order; several targets go through the last three one by one."""

_TRAINED: Final = 0.4
"""Share of the time that the long training shall have; the search is made smaller until it leaves as much."""
_CACHED: Final = 0.2
"""Share of the time in which the teacher may run over the training set."""
_RATES: Final = 4  # learning rates that are tried
_RATED: Final = 100  # steps of each
_PROBES: Final = 6  # short trainings that tell whether SHD gains
_SHRUNK: Final = 50  # passes of a batch through the teacher, from which a student is made
_WEIGHED: Final = 8  # such passes to make a part of a layer smaller, and to judge it
_ENDING: Final = 4  # graphs that are written and timed, as long as the last judgement takes
_WARMING: Final = 4  # samples of a step that does not count
_STUDENT: Final = 0.4  # of the teacher's time that a step takes a student, at about five times its speed in int8


@dataclass(frozen=True)
class Paces:
    """Seconds on this machine, measured on the teacher.

    Attributes:
        graph: to export a model, round it to int8, and time both at every setting.
        forward: of a batch of 32 samples through the teacher.
        step: of training on such a batch.
    """

    graph: float
    forward: float
    step: float


@dataclass(frozen=True)
class Search:
    """How much is looked at before the long training."""

    fractions: tuple[float, ...] = FRACTIONS  # of heads and neurons
    judged: int = 64  # samples on which parts are weighed
    steps: tuple[int, int] = (100, 300)  # of short trainings; the better half of the candidates has the longer one
    tries_shd: bool = True

    @property
    def rate_steps(self) -> int:
        """Of a training that compares learning rates: fewer prefer low ones, which barely leave the start."""
        return min(_RATED, self.steps[1])


def _searches() -> Iterator[Search]:
    """From the widest to the one that takes least; what is least informative for its time goes first."""
    search = Search()
    yield search
    for change in (
        {"tries_shd": False},
        {"fractions": FRACTIONS[:2]},
        {"judged": 32},
        {"steps": (50, 150)},
        {"fractions": FRACTIONS[1:2]},
        {"judged": 16, "steps": (25, 75)},
    ):
        search = replace(search, **change)
        yield search


@dataclass(frozen=True)
class Schedule:
    """The extent of the search, and about how many seconds each stage takes.

    Attributes:
        search: the widest that leaves the long training its share.
        samples: of the training set, that the teacher has time for.
        seconds: of each stage, by name, in order.
    """

    search: Search
    samples: int
    seconds: dict[str, float]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Schedule:
        """From what ``asdict`` and JSON made of it."""
        lists = document["search"]
        search = Search(**lists | {name: tuple(lists[name]) for name in ("fractions", "steps")})
        return cls(search, document["samples"], document["seconds"])


def plan_schedule(
    options: CompressOptions,
    paces: Paces,
    spent: float,
    num_samples: int,
    space_of: Callable[[tuple[float, ...]], Space],
    may_gain: bool,
) -> Schedule:
    """Divide what is left of the minutes after ``spent`` seconds; ``may_gain``: whether SHD is worth a trial."""
    whole = 60 * options.most_minutes
    # More than the long trainings read once would be the teacher's time for nothing.
    students = options.num_targets * (1 + options.kept_layers)
    read = _TRAINED * whole / (students * _STUDENT * paces.step)
    samples = min(num_samples, max(int(min(_CACHED * whole / paces.forward, read)), 1) * BATCH)
    schedule = None
    for search in _searches():
        if search.tries_shd and (options.quick or not may_gain):
            continue
        space = space_of(search.fractions)
        seconds = {"teacher": spent} | _estimate(options, paces, search, space, max(samples, BATCH * search.steps[0]))
        left = whole - sum(seconds.values())
        seconds["training"] = max(left, _STUDENT * search.steps[0] * paces.step)
        ordered = {name: seconds[name] for name in STAGES}
        schedule = Schedule(search, min(num_samples, max(samples, BATCH * search.steps[0])), ordered)
        if left >= _TRAINED * whole:
            break
    assert schedule is not None
    return schedule


def _estimate(options: CompressOptions, paces: Paces, search: Search, space: Space, samples: int) -> dict[str, float]:
    """Seconds of all stages but the teacher's and the long training."""
    targets = options.num_targets
    # Kept layers are one more candidate, with its own choice of a learning rate.
    tried, parts = (options.most_candidates + 1) * targets, len(space.heads) + len(space.neurons) - 1
    first, second = search.steps
    trainings = (tried + targets * _PROBES * search.tries_shd) * first + tried / 2 * second
    trainings += 2 * targets * (_RATES - 1) * search.rate_steps
    return {
        "costs": (len(space.heads) + len(space.neurons)) * paces.graph,
        "parts": _WEIGHED * parts * space.num_layers * paces.forward * search.judged / 64,
        "candidates": tried * (paces.graph + _SHRUNK * paces.forward),
        "cache": samples / BATCH * paces.forward,
        "short trainings": _STUDENT * trainings * paces.step,
        "graphs": _ENDING * targets * paces.graph,
    }


def half_is_faster(model: Any, rows: Sequence[Row]) -> bool:
    """Whether a step is faster here with products in bfloat16, by a fifth or more; on many CPUs it is not."""
    return time_step(model, rows, half=True)[1] < 0.8 * time_step(model, rows)[1]


def time_step(model: Any, rows: Sequence[Row], *, half: bool = False) -> tuple[float, float]:
    """Seconds of a forward pass and of a step over one batch, where training will run; a small one comes before."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model.to(device)
    for some in (rows[:_WARMING], rows[:BATCH]):
        arrays = collate([inputs_of(row) for row in some], padding_of(model.config))
        batch = {name: tensor.to(device) for name, tensor in arrays.items()}
        started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            output = model(**batch)[0]
        forward = time.perf_counter() - started
        output.float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        step = time.perf_counter() - started
    return forward, step


Progress = Callable[[int, int, str], None]
INT8_SAMPLES: Final = 128
"""Of the training set, which int8 graphs are made for."""
ROUNDS: Final = 9
_THIN: Final = 0.05  # of the training samples, a share of a file that is worth a remark
_ROUNDED: Final = 8
"""Lengths to time are multiples of it."""
TEACHER: Final = "teacher"
TEACHER_INT8: Final = "teacher, int8"
STATIC: Final = "static"
"""Folder of the static table."""


class Run:
    """State that all stages read; each finished result is stored as JSON."""

    def __init__(
        self,
        teacher: Path,
        options: CompressOptions,
        keeper: Unfinished,
        progress: Progress,
        samples: Samples,
        labels: Labelled | None = None,
        say: Callable[[str], None] = lambda text: None,
        began: float | None = None,
    ) -> None:
        self.teacher, self.options, self.keeper, self.labels = teacher, options, keeper, labels
        self.progress, self.samples, self.folder = progress, samples, keeper.folder
        self.model = load_teacher(teacher).float()  # a folder may keep halves, which graphs and NumPy do not take
        if "input_ids" in samples.train[0] and not options.length:
            middle = statistics.median_high(map(length_of, samples.train))
            length = -(-middle // _ROUNDED) * _ROUNDED
            self.options = replace(options, length=(min(length, count_positions(self.model.config) or length),))
        self.family = family_of(self.model, None)
        self.sizes = sizes_of(self.model.config, self.family)
        self.space = self._space_of()
        self.search = Search()
        self.task = find_task(teacher, self.model.config)
        if isinstance(self.task, Decoder):
            check_causal(model_run(self.model))
        self.remarks: list[str] = []
        self.graphs = keeper.folder / "graphs"
        self.graphs.mkdir(exist_ok=True)
        self.studies: dict[int, AttentionStatistics] = {}  # of the teacher's layers, for all candidates
        self._judges: dict[tuple[str, int | None], Judge] = {}
        self._say, self.seconds = say, dict.fromkeys(STAGES, 0.0)
        earlier = keeper.get("spent")
        self._begun = (time.monotonic() if began is None else began) - (0.0 if earlier is None else earlier[1])

    def _space_of(self, *fractions: float) -> Space:
        chosen = {"fractions": fractions} if fractions else {}
        return find_space(self.sizes, self.family, self.model.config, **chosen)

    @property
    def spent(self) -> float:
        """Seconds, those of a killed run up to its last finished stage included."""
        return time.monotonic() - self._begun

    @property
    def left(self) -> float:
        """Seconds of the minutes that were given."""
        return 60 * self.options.most_minutes - self.spent

    def schedule(self, paces: Paces) -> Schedule:
        """How the minutes are divided; it sets what is looked at."""
        schedule = plan_schedule(
            self.options,
            paces,
            self.spent,
            len(self.samples.train),
            lambda fractions: self._space_of(*fractions),
            may_gain=not isinstance(self.task, SentenceEncoder),  # none did (docs/compress.md)
        )
        return self.follow(schedule)

    def follow(self, schedule: Schedule) -> Schedule:
        self.search, self.seconds = schedule.search, schedule.seconds
        self.space = self._space_of(*self.search.fractions)
        return schedule

    def announce(self, stage: str, name: str = "", seconds: float | None = None) -> None:
        """Say how long a stage, and the rest of the command, will take, before it starts.

        Nothing, if the result of that ``name`` is there; ``seconds`` in place of what was planned, if they are known.
        """
        if name and self.keeper.get(name) is not None:
            return
        expected, *later = (self.seconds[following] for following in STAGES[STAGES.index(stage) :])
        expected = expected if seconds is None else seconds
        left = in_minutes(max(self.left, expected + sum(later)))
        self._say(f"{stage}: about {in_minutes(expected)}; about {left} left in all")

    def find(self, name: str, make: Callable[[], Any], files: str = "") -> Any:
        """The stored result of an earlier run, or that of ``make``, with files that it makes in the run's folder."""
        piece = self.keeper.get(name)
        if piece is None:
            self.keeper.put(name, {}, make(), files)
            self.keeper.put("spent", {}, self.spent)
            piece = self.keeper.require(name)  # as a resumed run reads it, also now
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

    def judges_by_file(self) -> dict[str, Judge]:
        """Where the data are of several files: held-out samples of each that has enough."""
        files, judges = self.samples.held_files, {}
        for name in sorted(set(files)):
            rows = [row for row, file in zip(self.samples.held_out, files, strict=True) if file == name]
            if len(rows) >= LEAST // 2:
                judges[name] = Judge(self.task, rows, model_run(self.model), padding_of(self.model.config))
        return judges

    def thin_files(self) -> list[str]:
        """Remarks on files that the student learns little from."""
        files, remarks = self.samples.train_files, []
        for name in sorted(set(files)):
            count = files.count(name)
            if count < _THIN * len(files):
                rule = f"{name} has {count:,} of {len(files):,} training samples"
                remarks.append(f"{rule}: quality on data like it is uncertain; add more of them")
        return remarks

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

    def time(self, graphs: Mapping[str, Path], rounds: int = ROUNDS) -> Turns:
        """Graphs by turns at every setting."""
        options = self.options
        length = options.length if "input_ids" in self.samples.train[0] else None
        settings: Any = {"batch": options.batch, "length": length, "threads": (options.threads,), "rounds": rounds}
        turns = take_turns(graphs, **settings, progress=self.tell("graphs are timed"))
        if (remark := find_busy((wall, processor) for _, wall, processor in median_runs(turns))) is not None:
            self.keeper.put("busy", {}, [remark])  # also for a resumed run
        return turns

    def price(self, graphs: Mapping[str, Path]) -> dict[str, list[float]]:
        """Median seconds of a run of each graph, one for each batch and length, in order; then its bytes.

        Of one thread it is the processor's time, which other programs move less; the last judgement is by the clock.
        """
        prices: dict[str, list[float]] = {name: [] for name in graphs}
        for name, wall, processor in median_runs(self.time(graphs)):
            prices[name].append(processor if self.options.threads == 1 else wall)
        for name, path in graphs.items():
            prices[name].append(float(count_bytes(path)))
        return prices


def in_minutes(seconds: float) -> str:
    """As people say it."""
    return f"{math.ceil(seconds)} s" if seconds < 90 else f"{round(seconds / 60)} min"
