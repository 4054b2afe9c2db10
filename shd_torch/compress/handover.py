"""What a user gets: the student's folder, its graphs, a page with a picture, and the figures as JSON."""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from shd_ref.cache.storage.drafts import drafting
from shd_torch.compress.costs import TEACHER, TEACHER_INT8, count_bytes
from shd_torch.compress.task import Judge, graph_run
from shd_torch.deploy import quantize_graph
from shd_torch.shrink.folders import copy_readers

PROMPT: Final = 64
"""Tokens before the one whose time is measured."""


@dataclass(frozen=True)
class Graphs:
    """A model as onnxruntime runs it, in float and perhaps in int8."""

    paths: dict[str, Path]
    quality: dict[str, dict[str, Any]]

    @classmethod
    def write(cls, path: Path, judge: Judge, int8: bool) -> Graphs:
        """From the exported graph; both are judged as they are deployed."""
        paths = {"float": path}
        if int8:
            paths["int8"] = path.with_suffix(".int8.onnx")
            quantize_graph(path, paths["int8"])
        return cls(paths, {kind: asdict(judge.measure(graph_run(graph))) for kind, graph in paths.items()})

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"quality": self.quality, "bytes": {kind: count_bytes(path) for kind, path in self.paths.items()}}


@torch.no_grad()
def time_token(model: Any, rounds: int = 25) -> float:
    """Median seconds of one more token after a prompt, with its cache of keys, in PyTorch."""
    ids = torch.ones(1, PROMPT, dtype=torch.int64, device=next(model.parameters()).device)
    seconds = []
    cache = model(input_ids=ids, use_cache=True).past_key_values
    for _ in range(rounds):
        started = time.perf_counter()
        cache = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).past_key_values
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def hand_over(home: Path, folder: Path, teacher: Path, document: dict[str, Any]) -> None:
    """The folder, whole or not at all: one student's, or one in it for each of several wishes."""
    with drafting(folder, home / "hand-over") as draft:
        draft.mkdir()
        students = document["students"]
        for student in students:
            target = draft if len(students) == 1 else draft / student["name"]
            shutil.copytree(home / f"trained-{student['name']}", target, dirs_exist_ok=True)
            _copy_graphs(home / "graphs", student["name"], target / "onnx")
        if not students:
            copy_readers(teacher, draft)
            _copy_graphs(home / "graphs", "teacher", draft / "onnx")
        (draft / "compress.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        has_picture = find_spec("matplotlib") is not None and bool(students)
        if has_picture:
            draw_front(document, draft / "front.svg")
        (draft / "README.md").write_text(write_page(document, has_picture=has_picture), encoding="utf-8")


def _copy_graphs(graphs: Path, name: str, target: Path) -> None:
    """As ``model.onnx`` and ``model.int8.onnx``; files of weights keep their names, which graphs hold."""
    target.mkdir()
    for kind in (".onnx", ".int8.onnx"):
        for file in graphs.glob(f"{name}{kind}*"):
            shutil.copyfile(file, target / (f"model{kind}" if file.name == name + kind else file.name))


@dataclass(frozen=True)
class Point:
    """One model of the front."""

    name: str
    quality: float
    speeds: list[float]  # times faster than the teacher, a number for each setting
    megabytes: float | None


def find_points(document: Mapping[str, Any]) -> list[Point]:
    """The teacher, the teacher in int8 and every student, as they were judged and timed."""
    teacher = document["teacher"]
    base = teacher["seconds"][TEACHER]
    points = [Point("teacher", 1.0, [1.0] * len(base), teacher["bytes"]["float"] / 1e6)]
    students = document["students"]
    if "int8" in teacher["quality"]:
        speeds = [before / after for before, after in zip(base, teacher["seconds"][TEACHER_INT8], strict=True)]
        if students:
            speeds = _speeds(students[0], TEACHER_INT8)
        points.append(
            Point(TEACHER_INT8, teacher["quality"]["int8"]["value"], speeds, teacher["bytes"]["int8"] / 1e6)
        )
    for student in students:
        for kind in student["quality"]:
            name = f"{student['name']}, {kind}" if len(students) > 1 else f"student, {kind}"
            quality = student["quality"][kind]["value"]
            points.append(Point(name, quality, _speeds(student, kind), student["bytes"][kind] / 1e6))
    return points


def _speeds(student: Mapping[str, Any], graph: str) -> list[float]:
    return [entry["times_faster"]["median"] for entry in student["times"] if entry["graph"] == graph]


def settings_of(document: Mapping[str, Any]) -> list[str]:
    """What was timed, in the order of the figures."""
    options = document["options"]
    has_length = document["lengths"][2] > 1
    return [
        f"batch {batch}" + (f", {length} tokens" if has_length else "")
        for batch in options["batch"]
        for length in (options["length"] if has_length else [0])
    ]


def draw_front(document: Mapping[str, Any], path: Path) -> None:
    """Quality against speed: the teacher, its int8, the candidates after their short trainings, and the students."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    base = document["teacher"]["seconds"][TEACHER]
    for student in document["students"]:
        for row in student["tried"]:
            speed = min(before / after for before, after in zip(base, row["seconds"], strict=True))
            axes.plot(speed, row["rounds"][-1]["value"], ".", color="0.6", zorder=1)
    for point in find_points(document):
        marker, colour = ("s", "black") if point.name.startswith(TEACHER) else ("o", "tab:red")
        is_float = point.name.endswith("float") or point.name == TEACHER
        axes.plot(min(point.speeds), point.quality, marker, color=colour, fillstyle="none" if is_float else "full")
        axes.annotate(
            point.name, (min(point.speeds), point.quality), xytext=(5, 5), textcoords="offset points", fontsize=8
        )
    axes.set_xlabel(f"times faster than the teacher with fused attention (the least of {len(base)} settings)")
    axes.set_ylabel(document["measure"])
    axes.set_title("Grey: candidates after a short training", fontsize=9)
    axes.grid(visible=True, alpha=0.3)
    axes.margins(0.15)
    figure.savefig(path, format="svg", metadata={"Date": None})


def write_page(document: Mapping[str, Any], *, has_picture: bool) -> str:
    """``README.md`` of the folder."""
    return "\n".join([*_page_lines(document, has_picture), ""])


def _page_lines(document: Mapping[str, Any], has_picture: bool) -> Iterator[str]:
    options, samples, students = document["options"], document["samples"], document["students"]
    yield f"# A smaller {document['task']}"
    yield ""
    yield f"Made by `shd-torch compress`. Quality: {document['measure']}, on {samples['held_out']} samples that"
    yield f"nothing else used; 1 is the teacher. Times: onnxruntime, {options['threads']} thread(s), on one machine."
    yield ""
    if not students:
        yield f"**{document['verdict'].capitalize()}**: no student was made. `--go-on` makes one all the same."
        yield ""
    settings = settings_of(document)
    yield from _table(
        ["model", "quality", *(f"times faster, {setting}" for setting in settings), "MB"],
        [
            [
                point.name,
                f"{point.quality:.4f}",
                *(f"{speed:.2f}" for speed in point.speeds),
                _number(point.megabytes),
            ]
            for point in find_points(document)
        ],
    )
    if has_picture:
        yield from ("![Quality against speed](front.svg)", "")
    for student in students:
        yield from _student_lines(document, student, settings)
    yield "## What the data did not cover"
    yield ""
    short, middle, long = document["lengths"]
    yield f"The student learned from {samples['train']:,} samples"
    if long > 1:
        yield f"of {short} to {long} tokens, half of them shorter than {middle + 1}."
    yield "It is for data like these. On other data it can be much worse, unlike the teacher in int8: measure it with"
    yield "`--held-out`, and add such data to `--data`."
    yield ""
    if document["command"]:
        yield from ("## To repeat it", "", "```bash", shlex.join(document["command"]), "```", "")


def _student_lines(document: Mapping[str, Any], student: Mapping[str, Any], settings: Sequence[str]) -> Iterator[str]:
    chosen = student["chosen"]
    yield f"## {student['wish']}"
    yield ""
    yield f"{chosen['text']}, trained for {student['steps']:,} steps. {student['shd']['why']}."
    yield ""
    if tokens := student.get("token_seconds"):
        ratio = tokens[TEACHER] / tokens["student"]
        yield f"One token after {PROMPT}, with its cache of keys, in PyTorch: {1e3 * tokens['student']:.2f} ms,"
        yield f"{ratio:.2f} times faster than the teacher."
        yield ""
    yield from _table(
        ["tried", "predicted loss", "untrained", "after training", *(f"ms, {setting}" for setting in settings)],
        [
            [
                row["text"],
                f"{row['predicted_loss']:.3f}",
                f"{row['untrained']['value']:.4f}",
                ", ".join(f"{one['value']:.4f} ({one['steps']})" for one in row["rounds"]),
                *(f"{1e3 * seconds:.3g}" for seconds in row["seconds"]),
            ]
            for row in student["tried"]
        ],
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|---" + "|--:" * (len(heads) - 1) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
