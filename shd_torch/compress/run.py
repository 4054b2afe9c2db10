"""``compress``: from a teacher and a wish to a student that is deployed, in stages that a killed run keeps."""

from __future__ import annotations

import copy
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from shd_ref.cache.storage.drafts import part_folder
from shd_ref.errors import ShdError
from shd_ref.teacher.study.intervals import half_width
from shd_torch.compress.candidates import find_candidates
from shd_torch.compress.costs import (
    TEACHER,
    TEACHER_INT8,
    Costs,
    Setting,
    measure_costs,
    random_student,
    require_scipy,
    write_graphs,
)
from shd_torch.compress.handover import Graphs, hand_over, time_token
from shd_torch.compress.options import FASTEST, CompressOptions, Wish
from shd_torch.compress.samples import Samples, divide, length_of, read_rows
from shd_torch.compress.space import Design, Space, find_space
from shd_torch.compress.task import Decoder, Judge, Task, find_task, model_run
from shd_torch.compress.training import (
    BATCH,
    Lesson,
    attention_targets,
    half_is_faster,
    time_step,
    train,
    write_cache,
)
from shd_torch.compress.worth import Worths, measure_worths
from shd_torch.export import example_inputs, export_student, export_teacher
from shd_torch.shrink.families import family_of
from shd_torch.shrink.folders import load_teacher, new_folder, save_student
from shd_torch.shrink.sentences import read_modules
from shd_torch.shrink.sizes import sizes_of
from shd_torch.shrink.student import Shrunk, read_made, shrink
from shd_torch.shrink.unfinished import Unfinished, run_key

Progress = Callable[[int, int, str], None]

SHORT_STEPS: Final = (100, 300)
"""Of the rounds in which candidates are compared; the better half goes on."""
SHD_SEEDS: Final = 3
JUDGED_WORTHS: Final = 64
"""Samples on which parts are weighed."""


@dataclass
class Run:
    """A teacher with its data, and what earlier stages found."""

    teacher: Path
    options: CompressOptions
    stages: Stages
    progress: Progress
    samples: Samples
    model: Any = field(init=False)
    task: Task = field(init=False)
    space: Space = field(init=False)

    def __post_init__(self) -> None:
        self.model = load_teacher(self.teacher)
        self.family = family_of(self.model, None)
        self.own = sizes_of(self.model.config, self.family)
        self.space = find_space(self.own, self.family, self.model.config)
        self.task = find_task(self.teacher, self.model)
        is_text = "input_ids" in self.samples.train[0]
        self.setting = Setting(
            self.options.batch, self.options.length if is_text else None, self.options.threads, self.options.int8
        )
        self._judges: dict[str, Judge] = {}

    def judge(self, use: str, most: int | None = None) -> Judge:
        """Of the samples for one use."""
        key = f"{use} {most}"
        if key not in self._judges:
            rows = getattr(self.samples, use)[:most]
            self._judges[key] = Judge(self.task, rows, model_run(self.model))
        return self._judges[key]

    @property
    def graphs(self) -> Path:
        """Folder of graphs."""
        folder = self.stages.folder / "graphs"
        folder.mkdir(exist_ok=True)
        return folder


class Stages:
    """Results of stages as JSON, each kept when it is finished; and the folder for everything larger."""

    def __init__(self, keeper: Unfinished) -> None:
        self.keeper, self.folder = keeper, keeper.folder

    def find(self, name: str, make: Callable[[], Any]) -> Any:
        """What an earlier run found, or what is found now."""
        piece = self.keeper.get(name)
        if piece is not None:
            return piece[1]
        result = make()
        self.keeper.put(name, {}, result)
        kept = self.keeper.get(name)
        assert kept is not None
        return kept[1]  # as a run that goes on gets it


@dataclass(frozen=True)
class Compressed:
    """What ``compress`` returns.

    Attributes:
        path: the folder.
        document: what ``compress.json`` holds.
    """

    path: Path
    document: dict[str, Any]


def compress(
    teacher: str | os.PathLike[str],
    data: str | os.PathLike[str],
    options: CompressOptions,
    *,
    out: str | os.PathLike[str],
    held_out: str | os.PathLike[str] | None = None,
    progress: Progress = lambda done, total, what: None,
    command: Sequence[str] = (),
) -> Compressed:
    """Find, train and write the student that loses least at the wanted speed, and say what was found.

    Costs of parts are measured in onnxruntime, worths by replacing one at a time, an integer programme chooses, short
    trainings compare the candidates, and the best is trained from a cache of the teacher's outputs.

    Args:
        teacher: folder of a Hugging Face model, or of sentence-transformers.
        data: texts or arrays without labels, in any file that ``shd precompute`` reads.
        options: what is wanted.
        out: a new folder. Finished stages are kept next to it in ``.NAME.part``; a killed run goes on there.
        held_out: other data to judge on; default: a tenth of the data, at most 500 samples.
        progress: called with steps that are done, all steps, and what is done now.
        command: the words that repeat this, for the page.

    Returns:
        The folder and what its ``compress.json`` says.

    Raises:
        ShdError: ``argument-value`` for wishes that contradict each other or that no student meets, with the fastest
            that is possible; what ``shrink``, ``export_student``, ``precompute`` and ``SHDTrainer`` raise.
    """
    started = time.monotonic()
    folder, source = new_folder(out), Path(teacher)
    with _open_run(source, Path(data), held_out, options, part_folder(folder), progress) as run:
        document = _compress(run) | {"command": list(command)}
        document["seconds"] = time.monotonic() - started
        hand_over(run.stages.folder, folder, source, document)
    return Compressed(folder, document)


@contextmanager
def _open_run(
    teacher: Path,
    data: Path,
    held_out: str | os.PathLike[str] | None,
    options: CompressOptions,
    folder: Path,
    progress: Progress,
) -> Iterator[Run]:
    """Everything that is read, and the stages of an earlier run in the folder."""
    require_scipy()
    progress(0, 0, "data are read")
    rows = read_rows(data, teacher, options.max_length)
    judged = None if held_out is None else read_rows(Path(held_out), teacher, options.max_length, "held_out")
    samples = divide(rows, judged, options.seed)
    with Unfinished(folder, run_key(teacher, asdict(options) | {"samples": samples.digest})) as keeper:
        yield Run(teacher, options, Stages(keeper), progress, samples)


def forecast(
    teacher: Path,
    data: Path,
    options: CompressOptions,
    *,
    held_out: Path | None = None,
    progress: Progress = lambda done, total, what: None,
) -> list[str]:
    """What ``compress`` would try, and about how long each stage takes on this machine, a line each."""
    opened = teacher, data, held_out, options
    with tempfile.TemporaryDirectory() as folder, _open_run(*opened, Path(folder) / "run", progress) as run:
        return _forecast(run)


def _forecast(run: Run) -> list[str]:
    space, samples, options = run.space, run.samples, run.options
    started = time.monotonic()
    study = _study_teacher(run)
    export = time.monotonic() - started
    rows = samples.train[:BATCH]
    model = copy.deepcopy(run.model)
    forward, step = time_step(model, rows)
    wishes = max(len(options.faster) + len(options.ms) + len(options.mb), 1)
    graphs = 2 + len(space.heads[1:]) + len(space.neurons[1:]) + 3
    parts = space.num_layers * (len(space.heads) + len(space.neurons) - 1)
    tried = options.candidates * wishes
    short = SHORT_STEPS[0] + SHORT_STEPS[1] / 2
    minutes = {
        f"costs: {graphs} graphs, heads {_words(space.heads)}, neurons {_words(space.neurons)}": graphs * export,
        f"worths: {parts} parts": parts * forward * 8,
        f"candidates: {tried}": tried * (export + 50 * forward),
        f"cache: {len(samples.train):,} samples": forward * len(samples.train) / BATCH,
        f"short trainings: {tried}, and SHD": (tried * short + 6 * SHORT_STEPS[0]) * step,
        f"training: {wishes}": 60 * options.budget,
        "graphs, times and the page": wishes * 2 * export,
    }
    lines = [f"{run.task.NAME}; quality: {run.task.MEASURE}, on {len(samples.held_out)} held-out samples"]
    for kind, quality in study["quality"].items():
        lines.append(f"the teacher in {kind}: quality {quality['value']:.4f}")
    lines += [f"{what}: about {math.ceil(seconds / 60)} min" for what, seconds in minutes.items()]
    return [*lines, f"in all about {math.ceil(sum(minutes.values()) / 60)} min"]


def _words(counts: Sequence[int]) -> str:
    return ", ".join(str(count or "none") for count in counts)


def _compress(run: Run) -> dict[str, Any]:
    """Everything but the hand-over."""
    teacher = run.stages.find("teacher", lambda: _study_teacher(run))
    document = _describe(run) | {"teacher": teacher}
    if _teacher_suffices(run, teacher):
        return document | {"verdict": "the teacher in int8 is fast enough", "students": []}
    costs = Costs(**run.stages.find("costs", lambda: asdict(_find_costs(run))))
    wishes = run.options.wishes(costs)
    worths = Worths(**run.stages.find("worths", lambda: _find_worths(run)))
    document |= {"costs": asdict(costs), "worths": asdict(worths)}
    candidates = {}
    for wish in wishes:
        asked = run.space, costs, worths, wish, run.options.candidates, partial(_price, run)
        candidates[wish.name] = run.stages.find(f"candidates-{wish.name}", partial(find_candidates, *asked))
    lesson = _prepare_lesson(run)
    students = []
    for wish in wishes:
        tried, best = _compare(run, wish, candidates[wish.name], lesson)
        students.append(_train_best(run, wish, best, lesson, len(wishes)) | {"tried": tried})
    return document | {"students": students}


def _describe(run: Run) -> dict[str, Any]:
    samples = run.samples
    lengths = sorted(map(length_of, samples.train))
    return {
        "format": 1,
        "options": asdict(run.options),
        "task": run.task.NAME,
        "measure": run.task.MEASURE,
        "samples": {name: len(getattr(samples, name)) for name in ("train", "choices", "held_out")},
        "lengths": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
        "space": asdict(run.space),
    }


def _study_teacher(run: Run) -> dict[str, Any]:
    """The teacher as it would be deployed without a student: time, size and quality of its graphs."""
    run.progress(0, 0, "the teacher is exported")
    path = run.graphs / "teacher.onnx"
    export_student(run.model, example_inputs(run.model), path)
    graphs = Graphs.write(path, run.judge("held_out"), run.options.int8)
    names = {"float": TEACHER, "int8": TEACHER_INT8}
    prices = run.setting.price({names[kind]: path for kind, path in graphs.paths.items()}, run.progress)
    return {"seconds": {name: row[:-1] for name, row in prices.items()}, **graphs.document()}


def _teacher_suffices(run: Run, teacher: Mapping[str, Any]) -> bool:
    """Whether int8 alone gives what is asked for."""
    options = run.options
    if options.go_on or not options.int8 or len(options.faster) + len(options.ms) + len(options.mb) > 1:
        return False
    if "int8" not in teacher["quality"] or teacher["quality"]["int8"]["value"] < (options.at_least or 0.99):
        return False
    pairs = list(zip(*(teacher["seconds"][name] for name in (TEACHER, TEACHER_INT8)), strict=True))
    fast = all(before / after >= speed for speed in options.faster for before, after in pairs)
    short = all(1e3 * after <= ms for ms in options.ms for _, after in pairs)
    small = all(teacher["bytes"]["int8"] <= 1e6 * mb for mb in options.mb)
    return bool(options.faster or options.ms or options.mb) and fast and short and small


def _find_costs(run: Run) -> Costs:
    graphs = {TEACHER: run.graphs / "teacher.onnx"}
    if run.options.int8:
        graphs[TEACHER_INT8] = run.graphs / "teacher.int8.onnx"
    return measure_costs(run.model, run.family, run.space, run.setting, graphs, run.graphs, run.progress)


def _find_worths(run: Run) -> dict[str, Any]:
    calibration = {name: array[:JUDGED_WORTHS] for name, array in run.samples.calibration.items()}
    judge = run.judge("choices", JUDGED_WORTHS)
    given = run.space, calibration, judge, run.stages.keeper, run.progress
    return asdict(measure_worths(run.model, run.family, *given))


def _price(run: Run, designs: Sequence[Design]) -> list[list[float]]:
    """Costs of students with random weights."""
    graphs = {}
    for number, design in enumerate(designs):
        run.progress(number, len(designs), "candidates are exported")
        student = random_student(run.model, run.family, design, run.space)
        graphs[str(number)] = write_graphs(student, run.graphs / f"candidate-{number}.onnx", int8=run.options.int8)
    return list(run.setting.price(graphs, run.progress).values())


def _prepare_lesson(run: Run) -> Lesson:
    """The cache of the teacher's outputs for the training set."""
    graph, cache = run.graphs / "maps.onnx", run.stages.folder / "cache"
    if not graph.exists():
        run.progress(0, 0, "the teacher is exported")
        export_teacher(run.model, example_inputs(run.model), graph)
    options = run.task.targets(run.space.num_layers)
    tell = _teller(run, "the teacher runs")
    write_cache(graph, run.samples.train, options, cache, tell)
    half = run.stages.find("half", lambda: half_is_faster(copy.deepcopy(run.model), run.samples.train))
    return Lesson(run.samples.train, cache, 0, run.options.seed, half, run.options.learning_rate)


def _teller(run: Run, what: str) -> Callable[[int, int], None]:
    return lambda done, total: run.progress(done, total, what)


def _make(run: Run, wish: Wish, number: int, row: Mapping[str, Any]) -> Shrunk:
    """A candidate as shrunk, before any training."""
    folder = run.stages.folder / f"shrunk-{wish.name}-{number}"
    if not (folder / "shrink.json").is_file():
        design = Design(**{name: tuple(counts) for name, counts in row["design"].items()})
        shrink(
            str(run.teacher),
            run.samples.calibration,
            out=folder,
            studies=run.stages.keeper,
            progress=lambda done, total, what: run.progress(done, total, f"student {number}, {what}"),
            **design.options(run.space),
        )
    return read_made(folder)


def _compare(
    run: Run, wish: Wish, rows: list[dict[str, Any]], lesson: Lesson
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All candidates, after short trainings; and the best, of which only the better half gets the longer one."""
    judge = run.judge("choices")
    tried = []
    for number, row in enumerate(rows):
        student = _make(run, wish, number, row).student
        quality = run.stages.find(
            f"untrained-{wish.name}-{number}",
            lambda: asdict(judge.measure(model_run(student))),  # noqa: B023
        )
        tried.append(row | {"number": number, "untrained": quality, "rounds": []})
    running = tried
    for steps in SHORT_STEPS:
        for row in running:
            row["rounds"].append(_train_short(run, wish, row, replace(lesson, steps=steps)))
        running = sorted(running, key=lambda row: row["rounds"][-1]["value"], reverse=True)
        if wish.name != FASTEST:
            running = running[: max(1, (len(running) + 1) // 2)]
    if wish.name == FASTEST:  # it gets better still, which only makes the answer safe
        least = run.options.at_least or 0.0
        good = [row for row in running if row["rounds"][-1]["value"] >= least]
        return tried, min(good, key=lambda row: row["seconds"][0]) if good else running[0]
    return tried, running[0]


def _train_short(run: Run, wish: Wish, row: Mapping[str, Any], lesson: Lesson) -> dict[str, Any]:
    """A candidate's quality after some steps, from its start."""
    name = f"{wish.name}-{row['number']}-{lesson.steps}-{lesson.seed}{'-shd' if lesson.shd else ''}"

    def measure() -> dict[str, Any]:
        student = _make(run, wish, row["number"], row).student
        folder = run.stages.folder / f"short-{name}"
        pace = train(run.task, student, run.space.num_layers, lesson, folder, _teller(run, f"student {name} trains"))
        shutil.rmtree(folder, ignore_errors=True)
        return asdict(run.judge("choices").measure(model_run(student))) | {"steps": lesson.steps, "pace": pace}

    found: dict[str, Any] = run.stages.find(f"short-{name}", measure)
    return found


def _probe_shd(run: Run, wish: Wish, row: Mapping[str, Any], lesson: Lesson) -> dict[str, Any]:
    """What SHD adds to a short training: losses of pairs with the same order of samples, an interval over seeds."""
    report = _make(run, wish, row["number"], row).report
    if not isinstance(report["student"]["heads"], int):
        return {"is_used": False, "why": "SHD was not tried, since it needs equally many heads in every layer"}
    options = attention_targets(report, run.task.targets(run.space.num_layers))

    def measure() -> dict[str, Any]:
        steps = SHORT_STEPS[0]
        rows = lesson.rows[: steps * BATCH]
        cache = run.stages.folder / f"probe-{wish.name}"
        try:
            write_cache(run.graphs / "maps.onnx", rows, options, cache, _teller(run, "maps are merged"))
        except ShdError as error:  # of a graph whose attention cannot be found
            return {"is_used": False, "why": f"SHD was not tried: {error}"}
        gains = []
        for seed in range(SHD_SEEDS):
            pair = [
                _train_short(
                    run, wish, row, replace(lesson, rows=rows, cache=cache, steps=steps, seed=1000 + seed, shd=shd)
                )
                for shd in (False, True)
            ]
            gains.append(pair[0]["loss"] - pair[1]["loss"])
        shutil.rmtree(cache, ignore_errors=True)
        mean, margin = sum(gains) / len(gains), half_width(np.array(gains))
        assert margin is not None
        why = f"SHD lowers the loss by {mean:.2g} ± {margin:.2g} after {steps} steps, {len(gains)} seeds"
        return {"is_used": mean > margin, "why": why, "gains": gains}

    found: dict[str, Any] = run.stages.find(f"shd-{wish.name}", measure)
    return found


def _train_best(run: Run, wish: Wish, row: dict[str, Any], lesson: Lesson, num_wishes: int) -> dict[str, Any]:
    """The chosen student after its whole training, with its graphs judged and timed."""
    shd = _probe_shd(run, wish, row, lesson)
    if shd["is_used"]:
        report = _make(run, wish, row["number"], row).report
        cache = run.stages.folder / f"cache-{wish.name}"
        options = attention_targets(report, run.task.targets(run.space.num_layers))
        write_cache(run.graphs / "maps.onnx", lesson.rows, options, cache, _teller(run, "maps are merged"))
        lesson = replace(lesson, cache=cache, shd=True)
    pace = row["rounds"][-1]["pace"]
    steps = max(SHORT_STEPS[0], int(60 * run.options.budget / num_wishes / max(pace, 1e-6)))
    lesson = replace(lesson, steps=steps)
    folder = run.stages.folder / f"trained-{wish.name}"
    if not (folder / "shrink.json").is_file():
        made = _make(run, wish, row["number"], row)
        checkpoints = run.stages.folder / f"training-{wish.name}"
        train(
            run.task, made.student, run.space.num_layers, lesson, checkpoints, _teller(run, f"{wish.text}: training")
        )
        save_student(
            made.student, made.report, folder, run.teacher, read_modules(run.teacher, run.own.hidden, run.own.hidden)
        )
        shutil.rmtree(checkpoints, ignore_errors=True)
    student = read_made(folder).student
    result = run.stages.find(f"result-{wish.name}", lambda: _judge_student(run, wish, student))
    student = {"wish": wish.text, "name": wish.name, "chosen": row, "shd": shd, "steps": steps, **result}
    return student | {"missed": _find_missed(run, wish, student)}


def _find_missed(run: Run, wish: Wish, student: Mapping[str, Any]) -> list[str]:
    """What was asked for and is not there: of times, by more than they differ from run to run."""
    kind = "int8" if run.options.int8 else "float"
    missed = []
    own = [entry["wall"]["median"] for entry in student["times"] if entry["graph"] == kind]
    teacher = [entry["wall"]["median"] for entry in student["times"] if entry["graph"] == TEACHER]
    for speed in run.options.faster if wish.name.endswith("x") else ():
        reached = min(before / after for before, after in zip(teacher, own, strict=True))
        if wish.name == f"{speed:g}x" and reached < 0.97 * speed:
            missed.append(f"{wish.text} was asked for; the student is {reached:.2f} times faster")
    quality = student["quality"][kind]["value"]
    if run.options.at_least is not None and quality < run.options.at_least:
        missed.append(f"quality of {run.options.at_least:g} was asked for; the student has {quality:.4f}")
    return missed


def _judge_student(run: Run, wish: Wish, student: Any) -> dict[str, Any]:
    """Its graphs, judged on samples that no choice saw, and timed by turns with the teacher's."""
    path = run.graphs / f"{wish.name}.onnx"
    run.progress(0, 0, "the student is exported")
    export_student(student, example_inputs(student), path)
    graphs = Graphs.write(path, run.judge("held_out"), run.options.int8)
    named = {TEACHER: run.graphs / "teacher.onnx"} | graphs.paths
    if run.options.int8:
        named[TEACHER_INT8] = run.graphs / "teacher.int8.onnx"
    times = run.setting.time(named, run.progress, rounds=15)
    tokens = {}
    if isinstance(run.task, Decoder):
        tokens = {"token_seconds": {TEACHER: time_token(run.model), "student": time_token(student)}}
    return {**graphs.document(), "times": [asdict(entry) for entry in times], **tokens}
