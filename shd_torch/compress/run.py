"""``compress``: from a teacher and a target to a student that is deployed, in stages that a killed run keeps."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

from shd_ref.cache.storage.drafts import part_folder
from shd_ref.errors import ShdError, import_package
from shd_torch.compress.faithful import CHECKED, check_teacher
from shd_torch.compress.handover import hand_over, judge_graphs
from shd_torch.compress.measures import read_labels
from shd_torch.compress.options import CompressOptions
from shd_torch.compress.samples import BATCH, Columns, divide, length_of, read_rows, read_texts, typical_batch
from shd_torch.compress.search import Costs, Worths, find_candidates, measure_costs, measure_worths
from shd_torch.compress.stages import Paces, Progress, Run, Schedule, in_minutes, time_step
from shd_torch.compress.static import check_static, judge_static
from shd_torch.compress.task import SentenceEncoder, find_task, read_measure
from shd_torch.deploy.inputs import require_runtime
from shd_torch.deploy.timing import LEAST_ROUNDS, check_length, estimate_round
from shd_torch.shrink.families import check_config
from shd_torch.shrink.folders import count_positions, forward_inputs, new_folder, read_config
from shd_torch.shrink.unfinished import Unfinished, run_key

ENOUGH: Final = 0.99
"""Quality of the teacher in int8 that needs no student, unless another is asked for."""


FAITHFUL: Final = 0.999
"""Quality that a graph of the teacher in float has at least, or it is of another model."""


def compress(
    teacher: str | os.PathLike[str],
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    options: CompressOptions,
    *,
    out: str | os.PathLike[str],
    held_out: str | os.PathLike[str] | None = None,
    progress: Progress = lambda done, total, what: None,
    command: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Find, train and write the student that loses least at the wanted speed (docs/compress.md says how).

    Args:
        teacher: folder of a Hugging Face model, or of sentence-transformers.
        data: texts, pairs of texts or arrays without labels, in any file that ``shd precompute`` reads, or a .npy;
            of several files the page has the quality by file.
        options: the targets, and how to search.
        out: a new folder. Finished stages are kept next to it in ``.NAME.part``; a killed run resumes there.
        held_out: other data to judge on, with labels or without; default: a tenth of the data, at most 500 samples.
        progress: called with steps that are done, all steps, and what is done now.
        command: the words that repeat this, for the page.
        say: called before each stage with what it will take, and what is left of the whole time.

    Returns:
        What ``compress.json`` in the folder says; times in seconds, ``times_faster`` than the teacher with fused
        attention, sizes in bytes.

    Raises:
        ShdError: ``argument-value`` for targets that contradict each other or that no student meets, with the fastest
            that is possible; what ``shrink``, ``export_student``, ``precompute`` and ``SHDTrainer`` raise.
    """
    folder, source, judged = new_folder(out), Path(teacher), None if held_out is None else Path(held_out)
    with _open_run(source, data, judged, options, part_folder(folder), progress, say) as run:
        document = _compress(run) | {"command": list(command)}
        document |= {"remarks": [*run.remarks, *run.find("busy", list)], "seconds": run.spent}
        progress(0, 0, "the folder is written")
        hand_over(run.folder, folder, source, document)
    return document


@contextmanager
def _open_run(
    teacher: Path,
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    held_out: Path | None,
    options: CompressOptions,
    folder: Path,
    progress: Progress,
    say: Callable[[str], None] = lambda text: None,
    *,
    is_dry: bool = False,
) -> Iterator[Run]:
    """Everything that is read, and the stages of an earlier run in the folder.

    ``is_dry`` leaves out the comparison with the model's own library, whose import takes longer than to read all.
    """
    began = time.monotonic()
    import_package("scipy", "compress needs the package scipy: pip install '.[cpu]' (in a checkout)")
    progress(0, 0, "data are read")
    config = read_config(teacher)
    check_config(config)
    task = find_task(teacher, config)
    takes, most = forward_inputs(config), count_positions(config)
    if options.static:
        check_static(task, teacher)
    is_apart = isinstance(task, SentenceEncoder)
    columns = Columns(options.text_column, options.pair_column, task.READS_PAIRS, is_apart)
    check_length("the teacher", most, options.length)
    paths = [data] if isinstance(data, str | os.PathLike) else data
    parts = [read_rows(Path(path), teacher, options.max_length, "data", takes, most, columns) for path in paths]
    rows = list(chain.from_iterable(parts))
    names = [str(path) for path, part in zip(paths, parts, strict=True) for _ in part] if len(parts) > 1 else None
    judged, labels = None, None
    if held_out is not None:
        judged = read_rows(held_out, teacher, options.max_length, "held_out", takes, most, columns)
        labels = read_labels(held_out, judged, task, config)
    samples = divide(rows, judged, options.seed, names)
    inputs = {"samples": samples.digest, "onnxruntime": require_runtime().__version__}
    inputs["labels"] = "" if labels is None else labels.digest
    with Unfinished(folder, run_key(teacher, asdict(options) | inputs)) as keeper:
        run = Run(teacher, options, keeper, progress, samples, labels, say, began)
        texts = [] if is_dry else read_texts(Path(paths[0]), CHECKED, columns)
        if texts:
            checked = run.task, run.model, teacher, texts, rows[: len(texts)], options.max_length
            run.remarks = [remark] if (remark := check_teacher(*checked)) else []
        run.remarks += run.thin_files()
        yield run


def forecast(
    teacher: Path,
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    options: CompressOptions,
    *,
    held_out: Path | None = None,
    progress: Progress = lambda done, total, what: None,
) -> list[str]:
    """Students that ``compress`` would try, and about how long each stage takes on this machine, a line each."""
    opened = teacher, data, held_out, options
    with (
        tempfile.TemporaryDirectory() as folder,
        _open_run(*opened, Path(folder) / "run", progress, is_dry=True) as run,
    ):
        started = time.monotonic()
        turns = run.time(run.write_graphs(run.model, "teacher"), 1)
        # Later turns of a graph take as long as the first one: the time of one round is known after it.
        graph = time.monotonic() - started + (LEAST_ROUNDS - 1) * estimate_round(turns)
        schedule = run.schedule(_measure_paces(run, run.model, graph))
        space, count = run.space, options.most_candidates * options.num_targets
        heads, neurons = (", ".join(str(n or "none") for n in counts) for counts in (space.heads, space.neurons))
        words = {
            "costs": f"heads {heads}; neurons {neurons}",
            "parts": f"of {space.num_layers} layers, on {run.search.judged} samples",
            "candidates": f"{count} students",
            "cache": f"{schedule.samples:,} of {len(run.samples.train):,} samples",
            "short trainings": f"{run.search.steps[0]} and {run.search.steps[1]} steps"
            + ("; with and without SHD" if run.search.tries_shd else ""),
            "graphs": "times, quality, the page",
        }
        lines = [f"{run.task.NAME}; quality: {run.task.MEASURE}, on {len(run.samples.held_out)} held-out samples"]
        for stage, seconds in schedule.seconds.items():
            lines.append(f"{stage}{f' ({words[stage]})' if stage in words else ''}: about {in_minutes(seconds)}")
        total = f"in all about {in_minutes(sum(schedule.seconds.values()))}"
        return [*lines, *run.remarks, *run.find("busy", list), total]


def _measure_paces(run: Run, model: Any, graph: float) -> Paces:
    """On a model that nothing else reads after; ``graph``: seconds that the teacher's graphs took."""
    run.progress(0, 0, "steps are timed")
    return Paces(graph, *time_step(model, typical_batch(run.samples.train, BATCH)))


def _compress(run: Run) -> dict[str, Any]:
    """Everything but the hand-over."""
    from shd_torch.compress.students import compare, prepare_training, train_best  # seconds that a dry run saves

    teacher = run.find("teacher", lambda: study_teacher(run), "graphs/teacher.*")
    graph = teacher.pop("graph_seconds")
    figures = teacher["quality"]["float"]
    # Without a target it also chooses among candidates, on samples without labels.
    read_measure(figures if run.options.requests else figures | {"labels": {}}, run.options.least[0])
    lengths = sorted(map(length_of, run.samples.train))
    document: dict[str, Any] = {
        "format": 1,
        "options": asdict(run.options),
        "task": run.task.NAME,
        "measure": run.task.MEASURE,
        "details": dict(run.task.DETAILS),
        "samples": {name: len(getattr(run.samples, name)) for name in ("train", "choices", "held_out")},
        "lengths": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
        "space": asdict(run.space),
        "teacher": teacher,
        "students": [],
        "static": None,
    }
    if _teacher_suffices(run.options, teacher):
        return document
    schedule = run.follow(
        Schedule.read(
            run.find("schedule", lambda: asdict(run.schedule(_measure_paces(run, copy.deepcopy(run.model), graph))))
        )
    )
    document["space"] = asdict(run.space)
    document["samples"]["train"] = schedule.samples  # that there is time for
    run.announce("costs", "costs")
    costs = Costs(**run.find("costs", lambda: asdict(measure_costs(run))))
    run.announce("parts", "worths")
    worths = Worths(**run.find("worths", lambda: asdict(measure_worths(run))))
    targets = run.options.targets(costs.teacher)
    run.announce("candidates")
    candidates = [
        run.find(f"candidates-{target.name}", partial(find_candidates, run, costs, worths, target))
        for target in targets
    ]
    run.announce("cache")
    shared = prepare_training(run, schedule.samples)
    document["static"] = judge_static(run, shared)
    for number, (target, rows) in enumerate(zip(targets, candidates, strict=True)):
        end = run.spent + run.left / (len(targets) - number)
        run.announce("short trainings")
        tried, best = compare(run, target, rows, shared)
        rivals = [row for row in tried if row["keeps_layers"] and row is not best and run.options.kept_layers]
        middle = run.spent + (end - run.spent) / (1 + len(rivals))
        document["students"].append(train_best(run, target, best, shared, middle) | {"tried": tried})
        for row in rivals:  # as long
            document["students"].append(train_best(run, target, row, shared, end, is_rival=True) | {"tried": []})
    return document | {"costs": asdict(costs), "worths": asdict(worths)}


def study_teacher(run: Run) -> dict[str, Any]:
    """The teacher as it would be deployed without a student: time, size and quality of its graphs."""
    run.progress(0, 0, "the teacher is exported")
    started = time.monotonic()
    graphs = run.write_graphs(run.model, "teacher")
    seconds = {kind: row[:-1] for kind, row in run.price(graphs).items()}
    pace = time.monotonic() - started
    judged = judge_graphs(graphs, run.judge("held_out"), run.judges_by_file())
    judged |= {"seconds": seconds, "graph_seconds": pace}
    if not abs(1 - (value := judged["quality"]["float"]["value"])) <= 1 - FAITHFUL:
        rule = f"the teacher's graph must have a quality of {FAITHFUL} or more of the teacher itself"
        raise ShdError(
            "export-failed", f"{rule}; got {value:.4f}: its export loses something; report it with its config"
        )
    return judged


def _teacher_suffices(options: CompressOptions, teacher: Mapping[str, Any]) -> bool:
    """Whether int8 alone gives what is asked for."""
    if options.go_on or options.static or not options.int8 or len(options.requests) != 1:
        return False
    before, after = ([*teacher["seconds"][kind], teacher["bytes"][kind]] for kind in ("float", "int8"))
    (target,) = options.targets(before)
    is_reached = all(cost <= limit for cost, limit in zip(after, target.limits, strict=True))
    name, least = options.least
    return is_reached and bool(read_measure(teacher["quality"]["int8"], name) >= (least or ENOUGH))
