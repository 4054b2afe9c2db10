"""The files that a user gets: the student's folder, its graphs, a page, and the figures as JSON."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shd_ref.cache.storage.drafts import drafting
from shd_torch.compress.stages import STATIC, TEACHER, TEACHER_INT8
from shd_torch.compress.task import Judge, Task, graph_run
from shd_torch.deploy.int8 import count_bytes
from shd_torch.shrink.folders import copy_readers


def judge_graphs(
    paths: Mapping[str, Path], judge: Judge, by_file: Mapping[str, Judge], task: Task | None = None
) -> dict[str, Any]:
    """Quality and bytes of a model's graphs, as onnxruntime runs them; ``task``: one that pools in its own way."""
    quality = {kind: asdict(judge.measure(graph_run(path), task)) for kind, path in paths.items()}
    *_, deployed = paths.values()
    files = {name: judge.measure(graph_run(deployed), task).value for name, judge in by_file.items()}
    return {"quality": quality, "by_file": files, "bytes": {kind: count_bytes(path) for kind, path in paths.items()}}


def hand_over(home: Path, folder: Path, teacher: Path, document: dict[str, Any]) -> None:
    """The folder, whole or not at all: one student's, or one in it for each of several targets."""
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
        if document["options"]["static"]:
            shutil.copytree(home / STATIC, draft / STATIC)
        (draft / "compress.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (draft / "README.md").write_text("\n".join([*_page(document), ""]), encoding="utf-8")


def _copy_graphs(graphs: Path, name: str, target: Path) -> None:
    """As ``model.onnx`` and ``model.int8.onnx``; files of weights keep their names, which graphs hold."""
    target.mkdir()
    for kind in (".onnx", ".int8.onnx"):
        for file in graphs.glob(f"{name}{kind}*"):
            shutil.copyfile(file, target / (f"model{kind}" if file.name == name + kind else file.name))


@dataclass(frozen=True)
class Point:
    """One model, in float or int8, as it was judged and timed."""

    name: str
    quality: float
    others: dict[str, float]  # other figures by name
    speeds: list[float]  # times faster than the teacher, a number for each setting
    megabytes: float

    @property
    def cells(self) -> list[str]:
        """Its row of a table."""
        figures = [self.quality, *self.others.values()]
        cells = [f"{figure:.4f}" for figure in figures] + [f"{speed:.{_digits(speed)}f}" for speed in self.speeds]
        return [self.name, *cells, f"{self.megabytes:.1f}"]


def find_points(document: Mapping[str, Any]) -> list[Point]:
    """The teacher and every student, in float and int8, as they were judged and timed."""
    teacher, students, points = document["teacher"], document["students"], []
    for kind, name in (("float", TEACHER), ("int8", TEACHER_INT8)):
        if kind in teacher["quality"]:
            pairs = zip(teacher["seconds"]["float"], teacher["seconds"][kind], strict=True)
            speeds = _speeds(students[0], name) if students else [before / after for before, after in pairs]
            points.append(_point(document, name, teacher, kind, speeds))
    for student in students:
        for kind in student["quality"]:
            name = f"{student['name'] if len(students) > 1 else 'student'}, {kind}"
            points.append(_point(document, name, student, kind, _speeds(student, kind)))
    if (table := document["static"]) and students:
        points.append(_point(document, f"{STATIC} table", table, "float", _speeds(students[0], STATIC)))
    return points


def describe_regions(points: Sequence[Point]) -> str:
    """Which model is the best of those that are as fast, by speeds at the slowest setting; in words."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (min(point.speeds), point.quality), reverse=True):
        if not best or point.quality > best[-1].quality:
            best.append(point)
    speeds = [min(point.speeds) for point in best]
    regions = [
        f"{point.name} (up to {speed:,.{_digits(speed)}f} times)" for point, speed in zip(best, speeds, strict=True)
    ]
    others = [point.name for point in points if point not in best]
    never = f". Never: {'; '.join(others)}" * bool(others)
    return f"Best by speed, at the slowest setting: {'; '.join(reversed(regions))}{never}."


def _digits(speed: float) -> int:
    return 2 if speed < 100 else 0


def _point(document: Mapping[str, Any], name: str, model: Mapping[str, Any], kind: str, speeds: list[float]) -> Point:
    quality, size = model["quality"][kind], model["bytes"][kind] / 1e6
    details = {name: quality["details"][name] for name in document["details"] if name in quality["details"]}
    return Point(name, quality["value"], details | quality["labels"], speeds, size)


def _speeds(student: Mapping[str, Any], graph: str) -> list[float]:
    return [entry["times_faster"]["median"] for entry in student["times"] if entry["graph"] == graph]


def settings_of(document: Mapping[str, Any]) -> list[str]:
    """Names of the timed settings, in the order of the figures."""
    options, has_length = document["options"], document["lengths"][2] > 1
    ends = [f", {length} tokens" for length in options["length"]] if has_length else [""]
    return [f"batch {batch}{end}" for batch in options["batch"] for end in ends]


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    """Lines of ``README.md``."""
    samples, students, settings = document["samples"], document["students"], settings_of(document)
    threads, (short, middle, long) = document["options"]["threads"], document["lengths"]
    yield from (f"# A smaller {document['task']}", "")
    yield f"Made by `shd-torch compress`. Quality: {document['measure']}, on {samples['held_out']} samples that"
    yield f"nothing else used; 1 is the teacher. Times: onnxruntime, threads: {threads}, on one machine."
    yield from ("", *(f"**Note**: {remark}." for remark in document["remarks"]), "")
    if not students:
        yield "**The teacher in int8 is fast enough**: no student was made. `--go-on` makes one all the same."
        yield ""
    points = find_points(document)
    others, labels = list(points[0].others), document["teacher"]["quality"]["float"]["labels"]
    yield from _table(
        ["model", "quality", *others, *(f"times faster, {setting}" for setting in settings), "MB"],
        [point.cells for point in points],
    )
    yield from (f"- {name}: {words}." for name, words in document["details"].items() if name in others)
    yield from (f"- {name}: by the labels of `--held-out`." for name in labels)
    yield from ("", describe_regions(points), "")
    if names := list(document["teacher"]["by_file"]):
        models = [("teacher", document["teacher"]), *((student["name"], student) for student in students)]
        models += [(f"{STATIC} table", table)] if (table := document["static"]) else []
        rows = [[name, *(f"{model['by_file'][file]:.4f}" for file in names)] for name, model in models]
        yield from ("Quality by file of `--data`, on its held-out samples, as deployed:", "")
        yield from _table(["model", *names], rows)
    for student in students:
        yield from _student_lines(student, settings)
    if students:
        yield "`shd_torch.load_student(folder)` loads it; after that, in the same process, also the Auto classes and"
        yield "`SentenceTransformer` or `CrossEncoder`. The graphs in `onnx/` need onnxruntime alone; they give"
        yield from ("logits, before any sigmoid.", "")
    yield from ("## What the data did not cover", "")
    yield f"The student learned from {samples['train']:,} samples"
    if long > 1:
        yield f"of {short} to {long} tokens, half of them shorter than {middle + 1}."
    yield "It is for data like these. On other data it can be much worse, unlike the teacher in int8: measure it with"
    yield "`--held-out`, and add such data to `--data`."
    if document["command"]:
        yield from ("", "## To repeat it", "", "```bash", shlex.join(document["command"]), "```")


def _student_lines(student: Mapping[str, Any], settings: Sequence[str]) -> Iterator[str]:
    yield from (f"## {student['wish'].capitalize()}", "")
    trained = f"trained for {student['steps']:,} steps at a learning rate of {student['learning_rate']:g}"
    yield f"{student['chosen']['text']}, {trained}. {student['shd']['why']}."
    yield from (f"**Missed**: {reason}." for reason in student["missed"])
    yield ""
    if not student["tried"]:
        return
    yield from _table(
        ["tried", "predicted loss", "untrained", "rate", "quality (steps)", *(f"ms, {end}" for end in settings)],
        [
            [
                row["text"] + " (kept layers)" * row["keeps_layers"],
                f"{row['predicted_loss']:.3f}",
                f"{row['untrained']['value']:.4f}",
                f"{row['learning_rate']:g}",
                ", ".join(f"{result['value']:.4f} ({result['steps']})" for result in row["rounds"]),
                *(f"{1e3 * seconds:.3g}" for seconds in row["seconds"]),
            ]
            for row in student["tried"]
        ],
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|---" + "|--:" * (len(heads) - 1) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""
