"""Candidates as students: made, compared after short trainings, the best trained, exported and judged."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np

from shd_ref.errors import ShdError
from shd_ref.shrink.student import read_student
from shd_ref.teacher.study.intervals import half_width
from shd_torch.compress.handover import judge_graphs, time_token
from shd_torch.compress.options import FASTEST, Wish
from shd_torch.compress.samples import add_crops
from shd_torch.compress.space import Design
from shd_torch.compress.stages import TEACHER, Run
from shd_torch.compress.task import Decoder, SentenceEncoder, model_run
from shd_torch.compress.training import BATCH, Lesson, half_is_faster, train, write_cache
from shd_torch.export import example_inputs, export_teacher
from shd_torch.shrink.folders import save_student
from shd_torch.shrink.sentences import read_modules
from shd_torch.shrink.student import Shrunk, read_made, shrink

SHORT_STEPS: Final = (100, 300)
"""Of the rounds in which candidates are compared; the better half goes on."""
RATES: Final = (5e-4, 1e-4, 1e-5)
"""Learning rates that are tried: the first suits MiniLM, the last a pretrained vision transformer."""
SHD_SEEDS: Final = 3
_ROUNDS: Final = 15  # of the last timing
_MISSED: Final = 0.03  # of a limit, by which times differ from run to run


def prepare_lesson(run: Run) -> Lesson:
    """The cache of the teacher's outputs for the training set."""
    graph, cache, rows, seed = run.graphs / "maps.onnx", run.folder / "cache", run.samples.train, run.options.seed
    if isinstance(run.task, SentenceEncoder):
        rows = add_crops(rows, seed)
    if not graph.exists():
        run.progress(0, 0, "the teacher is exported")
        export_teacher(run.model, example_inputs(run.model), graph)
    write_cache(graph, rows, run.task.targets(run.space.num_layers), cache, run.tell("the teacher runs"))
    half = run.find("half", lambda: half_is_faster(copy.deepcopy(run.model), rows))
    return Lesson(rows, cache, 0, seed, half, run.options.learning_rate or RATES[0])


def choose_rate(run: Run, wish: Wish, row: Mapping[str, Any], lesson: Lesson) -> Lesson:
    """With the learning rate that is best for a candidate after a short training, unless one was asked for."""
    if run.options.learning_rate is not None:
        return lesson

    def quality(rate: float) -> float:
        try:
            short = replace(lesson, steps=SHORT_STEPS[0], learning_rate=rate)
            return float(_train_short(run, wish, row, short)["value"])
        except ShdError as error:
            if error.code != "not-finite":
                raise
            return -math.inf  # it diverged; where all do, the comparison says so

    return replace(lesson, learning_rate=max(RATES, key=quality))


def compare(
    run: Run, wish: Wish, rows: list[dict[str, Any]], lesson: Lesson
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All candidates, after short trainings; and the best, of which only the better half gets the longer one."""
    tried = []
    for number, row in enumerate(rows):
        student, judge = _make(run, wish, number, row).student, run.judge("choices")
        quality = run.find(f"untrained-{wish.name}-{number}", lambda: asdict(judge.measure(model_run(student))))  # noqa: B023
        tried.append(row | {"number": number, "untrained": quality, "rounds": []})
    running = tried
    for steps in SHORT_STEPS:
        if len(running) == 1 and running[0]["rounds"]:
            break
        for row in running:
            row["rounds"].append(_train_short(run, wish, row, replace(lesson, steps=steps)))
        running = sorted(running, key=lambda row: row["rounds"][-1]["value"], reverse=True)
        if wish.name != FASTEST:
            running = running[: (len(running) + 1) // 2]
    least = run.options.at_least or 0.0
    if wish.name == FASTEST:  # it gets better still, which only makes the answer safe
        good = [row for row in running if row["rounds"][-1]["value"] >= least]
        return tried, min(good, key=lambda row: row["seconds"][0]) if good else running[0]
    return tried, running[0]


def _make(run: Run, wish: Wish, number: int, row: Mapping[str, Any]) -> Shrunk:
    """A candidate as shrunk, before any training."""
    folder = run.folder / f"shrunk-{wish.name}-{number}"
    if not (folder / "shrink.json").is_file():
        design = Design(**{name: tuple(counts) for name, counts in row["design"].items()})
        shrink(
            str(run.teacher),
            run.samples.calibration,
            out=folder,
            studies=run.keeper,
            progress=lambda done, total, what: run.progress(done, total, f"candidate {number + 1}, {what}"),
            **design.options(run.space),
        )
    return read_made(folder)


def _train_short(run: Run, wish: Wish, row: Mapping[str, Any], lesson: Lesson) -> dict[str, Any]:
    """A candidate's quality after some steps, from its start."""
    name = f"{wish.name}-{row['number']}-{lesson.steps}-{lesson.learning_rate:g}-{lesson.seed}{'-shd' * lesson.shd}"

    def measure() -> dict[str, Any]:
        student = _make(run, wish, row["number"], row).student
        folder, tell = run.folder / f"short-{name}", run.tell(f"candidate {row['number'] + 1} trains")
        pace = train(run.task, student, run.space.num_layers, lesson, folder, tell)
        shutil.rmtree(folder, ignore_errors=True)
        return asdict(run.judge("choices").measure(model_run(student))) | {"steps": lesson.steps, "pace": pace}

    quality: dict[str, Any] = run.find(f"short-{name}", measure)
    return quality


def _with_maps(run: Run, wish: Wish, row: Mapping[str, Any], lesson: Lesson, name: str) -> Lesson:
    """The same lesson with merged maps for a student beside the teacher's outputs."""
    student, cache = read_student(_make(run, wish, row["number"], row).report), run.folder / name
    options = replace(
        run.task.targets(run.space.num_layers),
        form="maps",
        num_student_heads=student.num_heads,
        num_student_layers=student.num_layers,
        layer_pairs=student.layer_pairs,
        plans=student.plans,
    )
    write_cache(run.graphs / "maps.onnx", lesson.rows, options, cache, run.tell("maps are merged"))
    return replace(lesson, cache=cache, shd=True)


def _probe_shd(run: Run, wish: Wish, row: Mapping[str, Any], lesson: Lesson) -> dict[str, Any]:
    """What SHD adds to a short training: losses of pairs with the same order of samples, an interval over seeds."""
    if len({count for count in row["design"]["heads"] if count}) > 1:
        return {"is_used": False, "why": "SHD was not tried, since it needs equally many heads in every layer"}
    steps = SHORT_STEPS[0]
    lesson = replace(lesson, rows=lesson.rows[: steps * BATCH], steps=steps)
    try:
        taught = _with_maps(run, wish, row, lesson, f"probe-{wish.name}")
    except ShdError as error:  # of a graph whose attention cannot be found
        return {"is_used": False, "why": f"SHD was not tried: {error}"}
    gains = []
    for seed in range(1000, 1000 + SHD_SEEDS):
        without, with_maps = (
            _train_short(run, wish, row, replace(taught, seed=seed, shd=has_maps)) for has_maps in (False, True)
        )
        gains.append(without["loss"] - with_maps["loss"])
    shutil.rmtree(taught.cache, ignore_errors=True)
    mean, margin = sum(gains) / len(gains), half_width(np.array(gains)) or 0.0
    why = f"SHD lowered the loss by {mean:.2g} ± {margin:.2g} after {steps} steps ({SHD_SEEDS} seeds)"
    return {"is_used": mean > margin, "why": why, "gains": gains}


def train_best(run: Run, wish: Wish, row: dict[str, Any], lesson: Lesson, minutes: float) -> dict[str, Any]:
    """The chosen student after its whole training, with its graphs judged and timed."""
    shd = run.find(f"shd-{wish.name}", lambda: _probe_shd(run, wish, row, lesson))
    steps = max(SHORT_STEPS[0], int(60 * minutes / max(row["rounds"][-1]["pace"], 1e-6)))
    folder, checkpoints = (run.folder / f"{kind}-{wish.name}" for kind in ("trained", "training"))
    if not (folder / "shrink.json").is_file():
        if shd["is_used"]:
            lesson = _with_maps(run, wish, row, lesson, f"cache-{wish.name}")
        shrunk = _make(run, wish, row["number"], row)
        whole = replace(lesson, steps=steps)
        train(run.task, shrunk.student, run.space.num_layers, whole, checkpoints, run.tell(f"{wish.text}: training"))
        modules = read_modules(run.teacher, run.own.hidden, run.own.hidden)
        save_student(shrunk.student, shrunk.report, folder, run.teacher, modules)
        shutil.rmtree(checkpoints, ignore_errors=True)
    trained = read_made(folder).student
    result = run.find(f"result-{wish.name}", lambda: _judge_student(run, wish, trained))
    student = {"wish": wish.text, "name": wish.name, "chosen": row, "shd": shd, "steps": steps}
    return student | {"learning_rate": lesson.learning_rate, **result}


def _judge_student(run: Run, wish: Wish, student: Any) -> dict[str, Any]:
    """Its graphs, judged on samples that no choice saw, and timed by turns with the teacher's."""
    run.progress(0, 0, "the student is exported")
    graphs = run.write_graphs(student, wish.name)
    times = run.time(run.teacher_graphs | graphs, _ROUNDS)
    result = judge_graphs(graphs, run.judge("held_out")) | {"times": [asdict(entry) for entry in times]}
    if isinstance(run.task, Decoder):
        result["token_seconds"] = {TEACHER: time_token(run.model), "student": time_token(student)}
    kind = [*graphs][-1]
    own = [entry for entry in times if entry.graph == kind]
    deployed = [*(entry.wall.median for entry in own), result["bytes"][kind]]
    over = [value / limit for value, limit in zip(deployed, wish.limits, strict=True)]
    if wish.speed is not None:  # by turns with the teacher, whose time differs from run to run too
        over = [wish.speed / entry.times_faster.median for entry in own]
    missed = []
    if max(over) > 1 + _MISSED:
        speeds = ", ".join(f"{entry.times_faster.median:.3g}" for entry in own)
        got = f"{speeds} times faster, {deployed[-1] / 1e6:.3g} MB"
        missed.append(f"{wish.text} was asked for; the student, by the last timing, is {got}")
    quality, least = result["quality"][kind]["value"], run.options.at_least
    if least is not None and quality < least:
        missed.append(f"a quality of {least:g} was asked for; the student has {quality:.4f}")
    return result | {"missed": missed}
