"""Candidates as students: made, compared after short trainings, the best trained, exported and judged.

Training is from a cache of the teacher's outputs: batches of similar length, a fixed number of steps, resumable.
"""

from __future__ import annotations

import copy
import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import mode
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from shd_ref.errors import ShdError
from shd_ref.merging.plans import check_plan
from shd_ref.teacher.options import PrecomputeOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.study.intervals import half_width
from shd_torch.compress.handover import judge_graphs
from shd_torch.compress.options import FASTEST, Target
from shd_torch.compress.samples import BATCH, Row, add_crops, collate, collate_with_labels, row_source, training_order
from shd_torch.compress.space import Design
from shd_torch.compress.stages import STATIC, Run, half_is_faster
from shd_torch.compress.task import SentenceEncoder, Task, model_run, read_measure
from shd_torch.data import SupervisedDataset
from shd_torch.deploy.timing import compare_turns
from shd_torch.export import example_inputs, export_teacher
from shd_torch.shrink.folders import padding_of, read_modules, save_student
from shd_torch.shrink.student import Shrunk, read_made, shrink
from shd_torch.training.trainer import SHDTrainer, last_checkpoint

RATES: Final = (3e-3, 5e-4, 1e-4, 1e-5)
"""Learning rates, from the second to where neighbours are worse: the first suits a decoder trained on stories, the
second MiniLM, the last a pretrained vision transformer."""
SHD_SEEDS: Final = 3
MAPS: Final = "maps.onnx"
"""The graph that gives the teacher's outputs, with its maps."""
_ROUNDS: Final = 15  # of the last timing
_MISSED: Final = 0.03  # of a limit, by which times differ from run to run


def prepare_training(run: Run, samples: int | None = None) -> TrainingConfig:
    """The cache of the teacher's outputs for so many samples of the training set, or for all."""
    rows, seed = run.samples.train[:samples], run.options.seed
    if isinstance(run.task, SentenceEncoder):
        rows = add_crops(rows, seed)

    def write_maps() -> None:
        run.progress(0, 0, "the teacher is exported with its maps")
        inputs = example_inputs(run.model, list(rows[0]))
        with_states = run.task.HAS_STATES and run.task.LOGITS != "none"  # behind the head
        export_teacher(run.model, inputs, run.graphs / MAPS, with_states=with_states)

    run.find("maps", write_maps, f"graphs/{MAPS}*")
    cached = _write_cache(run, rows, run.task.targets(run.space.num_layers), "cache", "the teacher runs")
    run.progress(0, 0, "steps of training are timed")
    half = run.find("half", lambda: half_is_faster(copy.deepcopy(run.model), rows))
    return TrainingConfig(rows, cached, 0, seed, half, run.options.learning_rate or RATES[1])


def _write_cache(run: Run, rows: Sequence[Row], options: PrecomputeOptions, name: str, what: str) -> Path:
    """The teacher's outputs for samples; resumes an interrupted run."""
    folder, tell = run.folder / name, run.tell(what)
    source = row_source(rows)
    precompute(run.graphs / MAPS, source, folder, options, on_progress=lambda done, total, _: tell(done, total))
    return folder


def compare(
    run: Run, target: Target, rows: list[dict[str, Any]], config: TrainingConfig
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All candidates after short trainings, the longer one of the better half only, with learning rates; the best."""
    tried = []
    for number, row in enumerate(rows):
        student, judge = _make(run, target, number, row).student, run.judge("choices")
        quality = run.find(f"untrained-{target.name}-{number}", lambda: asdict(judge.measure(model_run(student))))  # noqa: B023
        tried.append(row | {"number": number, "untrained": quality, "rounds": []})
    rivals = [row for row in tried if row["keeps_layers"]]  # with a rate that suits them, and as many steps
    for row in [*tried[:1], *rivals]:
        row["learning_rate"] = _choose_rate(run, target, row, config)
    for row in tried:
        row.setdefault("learning_rate", tried[0]["learning_rate"])
    running = tried
    for steps in run.search.steps:
        if len(running) == 1 and running[0]["rounds"]:
            break
        for row in running:
            row["rounds"].append(_train_short(run, target, row, _short(row, config, steps)))
        running = sorted(running, key=lambda row: row["rounds"][-1]["value"], reverse=True)
        if target.name != FASTEST:
            running = running[: (len(running) + 1) // 2]
    best = running[0]
    if target.name == FASTEST:  # it gets better still, which only makes the answer safe
        name, least = run.options.least
        good = [row for row in running if read_measure(row["rounds"][-1], name) >= least]
        best = min(good, key=lambda row: row["seconds"][0], default=best)
    for row in rivals:
        for result in best["rounds"][len(row["rounds"]) :]:
            row["rounds"].append(_train_short(run, target, row, _short(row, config, result["steps"])))
    return tried, best


def _short(row: Mapping[str, Any], config: TrainingConfig, steps: int) -> TrainingConfig:
    return replace(config, steps=steps, learning_rate=row["learning_rate"])


def _choose_rate(run: Run, target: Target, row: Mapping[str, Any], config: TrainingConfig) -> float:
    """The learning rate that is best for a candidate after a short training, unless one was asked for."""

    @cache
    def quality(number: int) -> float:
        try:
            short = replace(config, steps=run.search.rate_steps, learning_rate=RATES[number])
            return float(_train_short(run, target, row, short)["value"])
        except ShdError as error:
            if error.code != "not-finite":
                raise
            return -math.inf  # it diverged; where all do, the comparison says so

    best = RATES.index(config.learning_rate) if config.learning_rate in RATES else 1
    if run.options.learning_rate is None:
        for step in (-1, 1):  # higher ones, then lower ones
            while 0 <= best + step < len(RATES) and quality(best + step) > quality(best):
                best += step
    return run.options.learning_rate or RATES[best]


def _make(run: Run, target: Target, number: int, row: Mapping[str, Any]) -> Shrunk:
    """A candidate as shrunk, before any training."""
    folder = run.folder / f"shrunk-{target.name}-{number}"

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before it recorded the folder
        design = Design(**{name: tuple(counts) for name, counts in row["design"].items()})
        shrink(
            str(run.teacher),
            run.samples.calibration(pad_id=padding_of(run.model.config)),
            out=folder,
            studies=run.studies,
            progress=lambda done, total, what: run.progress(done, total, f"candidate {number + 1}, {what}"),
            **design.options(run.space),
        )

    run.find(folder.name, make, f"{folder.name}/**/*")
    shrunk = read_made(folder)
    shrunk.student.float()  # in place; it is stored as its teacher is
    return shrunk


def _train_short(run: Run, target: Target, row: Mapping[str, Any], config: TrainingConfig) -> dict[str, Any]:
    """A candidate's quality after some steps, from its start."""
    name = f"{target.name}-{row['number']}-{config.steps}-{config.learning_rate:g}-{config.seed}{'-shd' * config.shd}"

    def measure() -> dict[str, Any]:
        student = _make(run, target, row["number"], row).student
        folder, tell = run.folder / f"short-{name}", run.tell(f"candidate {row['number'] + 1} trains")
        pace = train(run.task, student, run.space.num_layers, config, folder, tell)
        shutil.rmtree(folder, ignore_errors=True)
        return asdict(run.judge("choices").measure(model_run(student))) | {"steps": config.steps, "pace": pace}

    quality: dict[str, Any] = run.find(f"short-{name}", measure)
    return quality


def _with_maps(run: Run, target: Target, row: Mapping[str, Any], config: TrainingConfig, name: str) -> TrainingConfig:
    """The training with SHD: a cache with merged maps too, for layers with the most frequent number of heads."""
    report = _make(run, target, row["number"], row).report
    heads = [count for count in row["design"]["heads"] if count]
    frequent = mode(heads)
    plans = [layer["plan"] for layer in report["layers"] if layer["case"] != "dropped"]
    layers = [number for number, count in enumerate(heads) if count == frequent]
    options = replace(
        run.task.targets(run.space.num_layers),
        form="maps",
        num_student_heads=frequent,
        num_student_layers=len(heads),
        layer_pairs=tuple(tuple(report["layer_map"][number]) for number in layers),
        plans=tuple(check_plan(plans[number], run.space.heads[0], frequent) for number in layers),
    )
    return replace(config, cache=_write_cache(run, config.rows, options, name, "maps are merged"), shd=True)


def probe_shd(run: Run, target: Target, row: Mapping[str, Any], config: TrainingConfig) -> dict[str, Any]:
    """The gain of SHD in a short training: losses of pairs with the same order of samples, an interval over seeds."""
    steps = run.search.steps[0]
    config = replace(config, rows=config.rows[: steps * BATCH], steps=steps)
    try:
        config = _with_maps(run, target, row, config, f"probe-{target.name}")
    except ShdError as error:  # of a graph whose attention cannot be found
        return {"is_used": False, "why": f"SHD was not tried: {error}"}
    gains = []
    for seed in range(1000, 1000 + SHD_SEEDS):
        without, with_maps = (
            _train_short(run, target, row, replace(config, seed=seed, shd=has_maps)) for has_maps in (False, True)
        )
        gains.append(without["loss"] - with_maps["loss"])
    shutil.rmtree(config.cache, ignore_errors=True)
    mean, margin = sum(gains) / len(gains), half_width(np.array(gains)) or 0.0
    change = f"{'raised' if mean < 0 else 'lowered'} the loss by {abs(mean):.2g} ± {margin:.2g}"
    why = f"SHD {change} after {steps} steps ({SHD_SEEDS} seeds)"
    return {"is_used": mean > margin, "why": why, "gains": gains}


def train_best(
    run: Run, target: Target, row: dict[str, Any], config: TrainingConfig, end: float, *, is_rival: bool = False
) -> dict[str, Any]:
    """The chosen student after its whole training, with its graphs judged and timed by ``end`` seconds of the run.

    ``is_rival``: kept layers for the same target, whose results have names that end in ``-kept``.
    """
    name, title = target.name + "-kept" * is_rival, "kept layers, " * is_rival + target.text
    config = replace(config, learning_rate=row["learning_rate"])
    shd = {"is_used": False, "why": "SHD was not tried"}
    if run.search.tries_shd:
        shd = run.find(f"shd-{name}", lambda: probe_shd(run, target, row, config))

    def count_steps() -> int:
        seconds = end - run.spent - run.seconds["graphs"] / run.options.num_targets
        return max(run.search.steps[0], int(seconds / max(row["rounds"][-1]["pace"], 1e-6)))

    steps = run.find(f"steps-{name}", count_steps)
    run.announce("training", f"trained-{name}", steps * row["rounds"][-1]["pace"])
    folder, checkpoints = (run.folder / f"{kind}-{name}" for kind in ("trained", "training"))

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        used = _with_maps(run, target, row, config, f"cache-{name}") if shd["is_used"] else config
        shrunk, whole = _make(run, target, row["number"], row), replace(used, steps=steps)
        train(run.task, shrunk.student, run.space.num_layers, whole, checkpoints, run.tell(f"{title}: training"))
        modules = read_modules(run.teacher, run.sizes.hidden, run.sizes.hidden)
        save_student(shrunk.student, shrunk.report, folder, run.teacher, modules)

    run.find(folder.name, make, f"{folder.name}/**/*")
    shutil.rmtree(checkpoints, ignore_errors=True)
    trained = read_made(folder).student
    result = run.find(f"result-{name}", lambda: _judge_student(run, target, name, trained), f"graphs/{name}.*")
    student = {"wish": title, "name": name, "chosen": row, "shd": shd, "steps": steps}
    return student | {"learning_rate": config.learning_rate, **result}


def _judge_student(run: Run, target: Target, name: str, student: Any) -> dict[str, Any]:
    """Its graphs, judged on samples that no choice saw, and timed by turns with the teacher's."""
    run.progress(0, 0, "the student is exported")
    graphs = run.write_graphs(student, name)
    table = {STATIC: path} if (path := run.folder / STATIC / "onnx" / "model.onnx").exists() else {}
    times = compare_turns(run.time(run.teacher_graphs | graphs | table, _ROUNDS))
    result = judge_graphs(graphs, run.judge("held_out"), run.judges_by_file()) | {
        "times": [asdict(entry) for entry in times]
    }
    kind = [*graphs][-1]
    deployed = [entry for entry in times if entry.graph == kind]
    costs = [*(entry.wall.median for entry in deployed), result["bytes"][kind]]
    over = [cost / limit for cost, limit in zip(costs, target.limits, strict=True)]
    if target.speed is not None:  # by turns with the teacher, whose time differs from run to run too
        over = [target.speed / entry.times_faster.median for entry in deployed]
    missed = []
    if max(over) > 1 + _MISSED:
        speeds = ", ".join(f"{entry.times_faster.median:.3g}" for entry in deployed)
        got = f"{speeds} times faster, {costs[-1] / 1e6:.3g} MB"
        missed.append(f"{target.text} was asked for; the student, by the last timing, is {got}")
    figure, least = run.options.least
    if run.options.at_least is not None and (value := read_measure(result["quality"][kind], figure)) < least:
        missed.append(f"a {figure} of {least:g} was asked for; the student has {value:.4f}")
    return result | {"missed": missed}


BETA: Final = 0.02
"""Weight of SHD where it is tried."""
_CHECKPOINTS: Final = 20


@dataclass(frozen=True)
class TrainingConfig:
    """Data and settings of a training."""

    rows: Sequence[Row]  # of the training set
    cache: Path  # of the teacher's outputs for them
    steps: int  # of 32 samples
    seed: int  # of the order of samples
    half: bool  # products in bfloat16
    learning_rate: float  # at its height
    shd: bool = False  # the cache has merged maps, which are a term


def train(
    task: Task,
    student: Any,
    teacher_layers: int,
    config: TrainingConfig,
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Train a student in place; returns the seconds of a step.

    Checkpoints in ``folder`` let a killed run resume, to the same student as without the kill.
    """
    steps, embeddings = config.steps, student.get_input_embeddings()
    if task.FREEZES_EMBEDDINGS and isinstance(embeddings, nn.Embedding):
        embeddings.requires_grad_(False)
    for module in student.modules():
        if isinstance(module, nn.Dropout):  # the teacher is exact: it would only add noise
            module.p = 0.0
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=min(100, steps // 10),
        weight_decay=0.01,
        seed=config.seed,
        bf16=config.half,
        save_steps=max(50, math.ceil(steps / _CHECKPOINTS)),
        save_total_limit=1,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
        remove_unused_columns=False,
    )
    trainer = _Trainer(
        student,
        arguments,
        order=training_order(config.rows, steps, BATCH, config.seed),
        train_dataset=SupervisedDataset(config.rows, config.cache),
        data_collator=partial(collate_with_labels if task.HAS_LABELS else collate, pad_id=padding_of(student.config)),
        beta=BETA if config.shd else None,
        **task.terms(teacher_layers, student),
    )
    trainer.remove_callback(PrinterCallback)
    pace = _Pace(progress)
    trainer.add_callback(pace)
    checkpoint = last_checkpoint(folder)
    trainer.train(None if checkpoint is None else str(checkpoint))
    student.to("cpu").requires_grad_(True)  # where it is judged and exported
    return pace.seconds


class _Trainer(SHDTrainer):
    """Takes samples in a given order, the whole run as one epoch."""

    def __init__(self, *args: Any, order: Sequence[int], **kwargs: Any) -> None:
        self._order = order
        super().__init__(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self._order


class _Pace(TrainerCallback):
    """Counts steps, and measures how long one takes."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._progress = progress
        self._times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Of the trainer."""
        self._times.append(time.monotonic())
        self._progress(state.global_step, state.max_steps)

    @property
    def seconds(self) -> float:
        """Median of a step, which other programs move less than the mean."""
        steps = [after - before for before, after in pairwise(self._times)]
        return statistics.median(steps) if steps else 0.0
