"""What ``shd-torch doctor`` says of the study's pairs, and what the study measured.

``python -m benchmarks.study.doctor_table`` reads the study's runs and the answers that were kept in
``results/study/doctor.json``, and writes ``results/study/doctor.csv`` and the counts in docs/doctor.md. With
``--ask`` it first runs the doctor on every pair that was run and has no answer yet (``--again``: on all), which needs
the study's data and trains its teachers if they are not there.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.study.analysis import Row, compare
from benchmarks.study.arms import ALONE, Arm, read_grid
from benchmarks.study.runs import Record
from benchmarks.study.tasks import TASKS, load_task

ANSWERS, RUNS, TABLE = (RESULTS / "study" / name for name in ("doctor.json", "runs.jsonl", "doctor.csv"))
PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
MARKS = "<!-- hits and misses -->", "<!-- end of hits and misses -->"
ASKED = ("images", "language", "instructions")
"""Tasks whose pairs the doctor is asked about."""
UNITS = {"accuracy": (100, "points"), "rouge_l": (100, "points"), "loss": (1, "nats"), "distance": (1, "of distance")}
DATA = ("labels", "base", "steps", "rate", "start_rate", "draws")
"""Options and settings that the doctor's answer does not depend on."""
PLAIN = {"method": "shd", "plan": "progressive", "alpha_per": "map", "temperature": 1.0}


@dataclass(frozen=True)
class Setting:
    """A pair with its start, data and base loss.

    Attributes:
        arm: its SHD with one of the betas.
        rows: what came out, a beta each.
    """

    arm: Arm
    rows: tuple[Row, ...]

    @property
    def pair(self) -> str:
        """What the doctor's answer depends on."""
        return self._name(without=DATA)

    @property
    def title(self) -> str:
        """The pair, and what else the setting has that the grid's defaults have not."""
        return self._name(without=())

    def _name(self, without: Sequence[str]) -> str:
        first = read_grid(self.arm.task).arms[0]
        others = {n: v for n, v in self.arm.options.items() if n not in (*PLAIN, *without, "beta", "start")}
        words = [f"{n} {v}" for n, v in others.items() if first.options.get(n, v) != v]
        for name, value in self.arm.settings.items():
            if name not in (*without, "pretraining", "rate") and value != first.settings.get(name):
                words.append(f"width {value['width']}" if name == "student" else f"{name} {value}")
        return ", ".join([f"{self.arm.task}, {self.arm.options.get('start', 'random')} start", *words])

    @property
    def can_ask(self) -> bool:
        """Whether a folder can hold the pair, and the doctor look at it: one teacher, a stock student."""
        options = self.arm.options
        usual = options.get("layer_scale", True) and options.get("teachers", 1) == 1
        return self.arm.task in ASKED and usual and "kept" not in options.get("start", "random")

    @property
    def best(self) -> Row:
        """With the beta that validation chose."""
        lower = self.rows[0].metric in ("loss", "distance")
        return min(self.rows, key=lambda row: row.valid if lower else -row.valid)

    def nearest(self, beta: float) -> Row:
        """With the beta that is nearest to another, by their ratio."""
        return min(self.rows, key=lambda row: abs(math.log(row.beta / beta)))


def read_settings(runs: Path) -> list[Setting]:
    """Every setting of which SHD and its base loss alone were run with two seeds at least."""
    record, found = Record(runs), list[Setting]()
    for task in TASKS:
        grid = read_grid(task)
        groups: dict[str, tuple[Arm, dict[float, Row]]] = {}
        rows = {(row.part, row.method, row.beta, row.options): row for row in compare(grid, record)}
        for arm in grid.arms:
            if any(arm.options.get(name, value) != value for name, value in PLAIN.items()) or arm.method == ALONE:
                continue
            same = [row for key, row in rows.items() if key[:3] == (arm.part, arm.method, arm.options["beta"])]
            row = next((one for one in same if one.options == _varied(grid.arms, arm)), None)
            if row is not None and not math.isnan(row.gain_interval):
                key = str([arm.settings, {n: v for n, v in arm.options.items() if n != "beta"}])
                groups.setdefault(key, (arm, {}))[1][row.beta] = row
        found += [Setting(arm, tuple(by_beta.values())) for arm, by_beta in groups.values()]
    return found


def _varied(arms: Sequence[Arm], arm: Arm) -> str:
    """``Row.options`` of an arm."""
    names = (n for n in arm.options if n not in ("method", "beta"))
    return ", ".join(
        f"{n}={arm.options[n]}" for n in names if any(one.options.get(n) != arm.options[n] for one in arms)
    )


def ask(setting: Setting, work: Path) -> dict[str, Any]:
    """The doctor's answer on the study's own samples, without a probe."""
    from shd_torch.doctor import diagnose
    from shd_torch.shrink import shrink

    arm = setting.arm
    task: Any = load_task(arm.task)(work / arm.task, arm.settings)
    sizes = {"hidden": arm.settings["student"]["width"], "layers": arm.settings["student"]["layers"]} if (
        arm.task != "language"
    ) else {"layers": [0, 2, 4]}  # fmt: skip
    if arm.task == "images":
        teacher, data = task.teacher, {"pixel_values": task.train_images[:512], "labels": task.train_labels[:512]}
    elif arm.task == "language":
        teacher, data = task.teachers[0], {"input_ids": task.windows[:512]}
    else:
        teacher, data = task.teacher, {"input_ids": task.ids[:512], "labels": task.labels[:512]}
    with tempfile.TemporaryDirectory() as place:
        folders = Path(place, "teacher"), Path(place, "student")
        teacher.save_pretrained(folders[0])
        if arm.options.get("start", "random") == "squeezed":
            inputs = {name: part[:64] for name, part in data.items() if name != "labels"}
            shrink(teacher, inputs, heads=arm.options["heads"], **sizes, out=folders[1])
        else:
            if arm.task == "instructions" and arm.options["start"] == "random":
                given = arm.settings["student"]
                student = task._make_model(given["width"], arm.options["heads"], given["layers"])
            else:
                student = task._make_student(arm.options if arm.task == "instructions" else arm, 0)
            student.config.architectures = [type(student).__name__]
            # With weights where they matter: the doctor draws random ones itself.
            has_weights = arm.options.get("start") == "pretrained"
            (student if has_weights else student.config).save_pretrained(folders[1])
        found = diagnose(*map(str, folders), {name: part.numpy() for name, part in data.items()})
    beta, looks = found.beta, None
    if beta is not None:
        # How long SHD's gradient is beside all others with the middle beta, at the start and after some training.
        looks = [beta.first, beta.later]
    return {
        "answer": found.verdict.answer,
        "because": found.verdict.because,
        "beta": beta and [beta.low, beta.middle, beta.high],
        "looks": looks,
        "from": "--ask",
    }


def make_table(settings: Sequence[Setting], answers: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each setting with an answer; the gain is that of the tried beta nearest to the advice."""
    table = []
    for setting in settings:
        answer = answers.get(setting.pair)
        if answer is not None:
            low, middle, high = answer["beta"]
            row = setting.nearest(middle)
            table.append(
                {
                    "setting": setting.title,
                    "answer": answer["answer"],
                    "beta advised": f"{low:.1g} to {high:.1g}",
                    "gain by SHD": _gain(row),
                    "answer: hit": _judge(answer["answer"], row, setting.rows),
                    "beta: hit": _judge_beta(setting, row),
                }
            )
    return table


def _gain(row: Row) -> str:
    factor, unit = UNITS[row.metric]
    half = factor * row.gain_interval
    digits = max(1 - math.floor(math.log10(half)), 0) if half else 1
    return f"{factor * row.gain:+.{digits}f} ± {half:.{digits}f} {unit} (beta {row.beta:g})"


def _judge(answer: str, row: Row, rows: Sequence[Row]) -> str:
    """An insignificant gain confirms an answer that promised none.

    It leaves a *yes* open, unless another beta does harm and none gains: then nothing speaks for the promise.
    """
    promised = answer == "yes"
    if row.gain > row.gain_interval:
        return "hit" if promised else "miss"
    harms = row.gain < -row.gain_interval
    if promised and not harms and any(other.gain < -other.gain_interval for other in rows):
        harms = not any(other.gain > other.gain_interval for other in rows)
    if harms:
        return "miss" if promised else "hit"
    return "open" if promised else "hit"


def _judge_beta(setting: Setting, row: Row) -> str:
    """Whether validation chose the tried beta that is nearest to what is advised."""
    if len(setting.rows) < 2:
        return ""
    return "hit" if row is setting.best else f"miss: {setting.best.beta:g}"


def write_table(table: Sequence[dict[str, str]], path: Path) -> None:
    """One line a setting."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def count_hits(table: Sequence[dict[str, str]], page: Path) -> str:
    """The page with the counts of this table between its two marks."""
    lines = ["| | hit | open | miss |", "|---|--:|--:|--:|"]
    for column in ("answer", "beta"):
        counts = Counter(row[f"{column}: hit"].partition(":")[0] for row in table)
        lines.append(f"| {column} | {counts['hit']} | {counts['open']} | {counts['miss']} |")
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    return "\n\n".join([before + MARKS[0], "\n".join(lines), MARKS[1] + rest.partition(MARKS[1])[2]])


def pairs_of(settings: Sequence[Setting]) -> Iterator[Setting]:
    """One setting of each pair that can be asked about."""
    yield from {one.pair: one for one in reversed(settings) if one.can_ask}.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ask", action="store_true", help="ask the doctor about pairs that have no answer yet")
    parser.add_argument("--again", action="store_true", help="about all pairs")
    parser.add_argument(
        "--work", type=Path, default=Path("build/study"), help="the study's folder of data and teachers"
    )
    parser.add_argument("--runs", type=Path, default=RUNS)
    given = parser.parse_args()
    settings = read_settings(given.runs)
    answers = json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() else {}
    for setting in pairs_of(settings) if given.ask or given.again else ():
        if given.again or setting.pair not in answers:
            answers[setting.pair] = ask(setting, given.work)
            print(setting.pair, answers[setting.pair], flush=True)
            ANSWERS.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    table = make_table(settings, answers)
    write_table(table, TABLE)
    PAGE.write_text(count_hits(table, PAGE), encoding="utf-8")
    print(*(" | ".join(row.values()) for row in table), sep="\n")


if __name__ == "__main__":
    main()
