"""``python -m benchmarks.dozen``: the twelve comparisons of ``dozen.toml``, which says how they are made.

Each finished run is a line of ``results/dozen.jsonl``: a kill loses the current run, and the same command resumes.
A run counts as made while its setting, its data and the benchmarks' code are the same. ``--report`` only reads the
lines again. Either way ``dozen.json`` then holds the comparisons. Seconds are processor time of one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import HERE, RESULTS, save
from benchmarks.study.analysis import half_interval, p_value
from benchmarks.study.arms import ALONE, Arm
from benchmarks.study.digits import UnavailableError, fit_linear
from benchmarks.study.origin import fingerprint, hash_code, name_processor
from benchmarks.study.pictures import KINDS, draw_dozen
from benchmarks.study.runs import Record
from benchmarks.study.tasks import load_task
from benchmarks.study.training import train

GROUPS = ("compare", "fresh", "curves", "betas", "scores")
DEFAULTS = {"plan": "progressive", "alpha_per": "map", "temperature": 1.0}
PACE_TURNS, PACE_STEPS = 5, 12


class OutOfTimeError(Exception):
    """No run starts after the budget."""


class NotRunError(Exception):
    """A run that a report needs and that no line holds."""


@dataclass(frozen=True)
class Setting:
    """One of an arm's tries: a KD weight or temperature by its name, a rate, the weight of the term, or 0."""

    kd: tuple[str, float]
    rate: float
    weight: float

    @property
    def group(self) -> float:
        """The weight of the term, or without one KD's: one of each is trained to the end."""
        return self.weight or self.kd[1]


@dataclass(frozen=True)
class Side:
    """An arm on a task."""

    task: str
    arm: str


class Protocol:
    """What ``dozen.toml`` says, with every ``like`` filled in."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.page = tomllib.load(file)
        self.tasks = {name: self._resolve(name) for name in self.page["tasks"]}
        self.comparisons = {one["name"]: one for one in self.page["comparisons"]}

    def _resolve(self, name: str) -> dict[str, Any]:
        task: dict[str, Any] = self.page["tasks"][name]
        if "like" not in task:
            return task
        other = self._resolve(task["like"])
        return {**other, **task, "settings": other["settings"] | task.get("settings", {})}

    def sides(self, name: str) -> tuple[Side, Side]:
        """The arm and the baseline of a comparison."""
        one = self.comparisons[name]
        return Side(one["task"], one["arm"]), Side(one["task"], one["baseline"])

    def tries(self, side: Side) -> list[Setting]:
        """All of an arm, equally many for every arm."""
        task, arm = self.tasks[side.task], self.page["arms"][side.arm]
        (name, kds), (_, rates) = task["kd" if arm["method"] == ALONE else "term"].items()
        weights = [0.0] if arm["method"] == ALONE else arm.get("weights", task["weights"])
        return [Setting((name, kd), rate, weight) for kd, rate, weight in itertools.product(kds, rates, weights)]

    def signed(self, task: str, value: float) -> float:
        """Larger is better."""
        return -value if self.tasks[task]["measure"] == "loss" else value


class Runs:
    """Finds runs among the lines, and makes those that are missing, or names them.

    Args:
        protocol: what is run.
        record: the lines.
        work: folder of data and teachers.
        mode: ``run`` makes what is missing, ``report`` raises ``NotRunError``, ``count`` only counts it.
        end: after which no run starts, by ``time.monotonic``; None for no end.
    """

    def __init__(
        self, protocol: Protocol, record: Record, work: Path, mode: str = "run", end: float | None = None
    ) -> None:
        self.any_code = False  # True: a run of other code of the benchmarks counts as made too
        self.protocol, self.record, self.work, self.mode, self.end = protocol, record, work, mode, end
        self.loaded: dict[str, tuple[Any, str]] = {}
        self.missing: dict[str, tuple[Side, int]] = {}
        self.started = time.perf_counter(), time.process_time()

    def load(self, name: str) -> tuple[Any, str]:
        """A task, and a hash of its data and of the benchmarks' code that trains."""
        task = self.protocol.tasks[name]
        key = json.dumps([task["kind"], task["settings"]], sort_keys=True)
        if key not in self.loaded:
            loaded = load_task(task["kind"])(self.work / task["kind"], task["settings"], "cpu")
            members = vars(loaded).values()
            values = (value for member in members for value in (member if isinstance(member, list) else [member]))
            data = fingerprint(*(value for value in values if isinstance(value, Tensor | nn.Module)))
            self.loaded[key] = loaded, f"{data} {hash_code('benchmark_code', task['kind'])}"
        return self.loaded[key]

    def find(
        self, side: Side, changes: Mapping[str, Any], seed: int, make: Callable[[Arm], Mapping[str, Any]]
    ) -> Any:
        """The line of an arm with these options; it is run where it is missing or of another origin."""
        page, arm = self.protocol.tasks[side.task], self.protocol.page["arms"][side.arm]
        options = DEFAULTS | page.get("options", {}) | {name: page[name] for name in ("start", "batch")}
        run = Arm(side.task, side.arm, options | {"method": arm["method"]} | changes, page["settings"])
        line = self.record.found.get(run.key(seed))
        if self.mode == "report" and line is None:
            raise NotRunError
        if line is not None and (self.mode != "run" or self._is_current(line["origin"], side.task)):
            return line
        if self.mode == "count":
            self.missing[run.key(seed)] = side, changes.get("steps", 0)
            return {"valid": 0.0, "test": 0.0, "start": "", "data": "", "curve": {}, "pace": 1.3, "scores": {}}
        if self.end is not None and time.monotonic() >= self.end:
            raise OutOfTimeError
        started, origin = time.process_time(), self.load(side.task)[1]
        result = make(run)
        versions = {"torch": torch.__version__, "product": hash_code("rival_code", "")}
        fields = {"arm": side.arm, "origin": origin, "processor": name_processor("cpu"), **versions}
        self.record.add(run, seed, {**result, **fields, "seconds": time.process_time() - started})
        shown = [f"{name} {value}" for name, value in changes.items()]
        shown += [f"{name} {result[name]:.4f}" for name in ("valid", "test", "pace") if name in result]
        print(f"{side.task}, {side.arm}, seed {seed}: {', '.join(shown)}; {self.say_left()}", flush=True)
        return self.record.found[run.key(seed)]

    def _is_current(self, origin: str, task: str) -> bool:
        now = self.load(task)[1]
        return origin == now or (self.any_code and origin.split()[0] == now.split()[0])

    def run(self, side: Side, setting: Setting, steps: int, seed: int) -> Any:
        """A line with ``valid`` and ``test`` and what ``train`` returns."""
        page = self.protocol.tasks[side.task]
        taught = self.protocol.page["arms"][side.arm].get("taught", 1.0)

        def make(arm: Arm) -> Mapping[str, Any]:
            course = self.load(side.task)[0].course(arm, seed)
            fields = {"rate": setting.rate, "beta": setting.weight, "batch": page["batch"], "steps": steps}
            marks = (0,) if seed in self.protocol.page["seeds"] else ()
            result = train(course, seed=seed, taught=taught, marks=marks, **fields)
            return {**result, **{name: result[f"{name}_{page['measure']}"] for name in ("valid", "test")}}

        changes = {"rate": setting.rate, "beta": setting.weight, "steps": steps, "taught": taught}
        return self.find(side, dict([setting.kd]) | changes, seed, make)

    def pace(self, side: Side, setting: Setting) -> float:
        """Processor seconds of an arm's step over those of a step of KD alone, by turns."""
        arm = self.protocol.page["arms"][side.arm]
        if arm["method"] == ALONE:
            return 1.0

        def make(timed: Arm) -> Mapping[str, Any]:
            task, batch = self.load(side.task)[0], self.protocol.tasks[side.task]["batch"]
            fields = {setting.kd[0]: setting.kd[1], "beta": setting.weight}
            arms = [replace(timed, options=timed.options | fields | {"method": m}) for m in (ALONE, arm["method"])]
            courses = [replace(task.course(arm_of_two, 0), evaluate=lambda _: {}) for arm_of_two in arms]
            turns = [
                [train(course, **sizes, rate=setting.rate, batch=batch, seed=0)["step_seconds"] for course in courses]
                for sizes in [{"beta": setting.weight, "steps": PACE_STEPS}] * PACE_TURNS
            ]
            return {"turns": turns, "pace": statistics.median(second / first for first, second in turns)}

        line = self.find(side, {"question": "pace"}, 0, make)
        return 1.0 + float(arm.get("taught", 1.0)) * (float(line["pace"]) - 1.0)

    def tune(self, side: Side) -> Setting:
        """The setting of an arm, chosen on validation as the protocol says."""
        page, steps = self.protocol.page, self.protocol.tasks[side.task]["steps"]

        def best(settings: Sequence[Setting], length: int, seed: int) -> Setting:
            values = [self.protocol.signed(side.task, self.run(side, s, length, seed)["valid"]) for s in settings]
            return settings[max(range(len(values)), key=values.__getitem__)]

        groups: dict[float, list[Setting]] = {}
        for setting in self.protocol.tries(side):
            groups.setdefault(setting.group, []).append(setting)
        finalists = [best(group, steps // 3, page["first_seed"]) for group in groups.values()]
        return best(finalists, steps, page["final_seed"])

    def say_left(self) -> str:
        """Processor time of all that is missing, by what was measured so far, and what the clock will show."""
        count = Runs(self.protocol, self.record, self.work, "count")
        for _ in work(count):
            pass
        lines = [line for line in self.record.found.values() if "steps" in line["options"]]
        seconds, steps = dict[Side, float](), dict[Side, float]()
        for line in lines:
            side = Side(line["task"], line["arm"])
            seconds[side] = seconds.get(side, 0.0) + line["seconds"]
            steps[side] = steps.get(side, 0.0) + line["options"]["steps"]
        usual = sum(seconds.values()) / sum(steps.values()) if lines else 0.04
        rates = {side: seconds[side] / steps[side] for side in steps}
        left = sum(number * rates.get(side, usual) for side, number in count.missing.values()) / 60
        wall, cpu = time.perf_counter() - self.started[0], time.process_time() - self.started[1]
        return f"{left:.0f} processor minutes left, {left * wall / cpu:.0f} by the clock at this share of a core"


def compare(runs: Runs, name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """A comparison at equal steps and at equal time, before Holm's adjustment."""
    protocol, comparison, sides = runs.protocol, runs.protocol.comparisons[name], runs.protocol.sides(name)
    task, measure = protocol.tasks[comparison["task"]], protocol.tasks[comparison["task"]]["measure"]
    settings = [runs.tune(side) for side in sides]
    paces = [runs.pace(side, setting) for side, setting in zip(sides, settings, strict=True)]
    ratio = paces[0] / paces[1]
    longer = [1.0, 1.0] if abs(math.log(ratio)) <= math.log(1.02) else [max(1.0, 1 / ratio), max(1.0, ratio)]
    report: dict[str, Any] = {"pace": ratio, "settings": [asdict(setting) for setting in settings]}
    report |= {"question": comparison["question"], "measure": measure, "task": comparison["task"]}
    for kind, more in zip(KINDS, ([1.0, 1.0], longer), strict=True):
        steps = [round(task["steps"] * times) for times in more]
        # One side after the other, as what the teacher says is kept for one method at a time.
        first, second = (
            [runs.run(side, setting, length, seed) for seed in seeds]
            for side, setting, length in zip(sides, settings, steps, strict=True)
        )
        pairs = list(zip(first, second, strict=True))
        for a, b in pairs:
            is_same = a["data"] == b["data"] and (steps[0] != steps[1] or a["start"] == b["start"])
            if not is_same and runs.mode != "count":
                raise RuntimeError(f"{name}: two runs of a seed must start from the same weights and samples")
        gains = [protocol.signed(comparison["task"], a["test"] - b["test"]) for a, b in pairs]
        before = [run["curve"]["0"][f"test_{measure}"] for run in second if "0" in run["curve"]]
        figures = {"arm": [run["test"] for run in first], "baseline": [run["test"] for run in second]}
        report[kind] = {"steps": steps, **figures, "start": before, "gains": gains}
    if "minus" in comparison:
        other = compare(runs, comparison["minus"], seeds)
        for kind in KINDS:
            report[kind]["own gains"] = gains = report[kind]["gains"]
            report[kind]["gains"] = [a - b for a, b in zip(gains, other[kind]["gains"], strict=True)]
    for kind in KINDS:
        gains = report[kind]["gains"]
        report[kind] |= {"mean": statistics.fmean(gains), "half": half_interval(gains), "p": p_value(gains)}
    return report


def grow(runs: Runs, name: str) -> dict[str, list[float]]:
    """Test figures of the baseline for more steps, until it no longer gains."""
    _, side = runs.protocol.sides(name)
    setting, steps = runs.tune(side), runs.protocol.tasks[side.task]["steps"]
    curve: dict[str, list[float]] = {}
    for times in (1, *runs.protocol.page["growth"]):
        curve[str(times * steps)] = [runs.run(side, setting, times * steps, seed)["test"] for seed in (0, 1)]
        values = [runs.protocol.signed(side.task, statistics.fmean(figures)) for figures in curve.values()]
        if values[-1] < max(values):
            break
    return curve


def try_betas(runs: Runs, name: str) -> dict[str, dict[str, list[float]]]:
    """SHD's gain over KD by beta, both at KD's chosen weight and rate, and its share of the first gradient."""
    arm, baseline = runs.protocol.sides(name)
    alone, steps = runs.tune(baseline), runs.protocol.tasks[arm.task]["steps"]
    rows: dict[str, dict[str, list[float]]] = {}
    for beta in runs.protocol.page["betas"]:
        for seed in runs.protocol.page["seeds"][:3]:
            pair = runs.run(arm, replace(alone, weight=beta), steps, seed), runs.run(baseline, alone, steps, seed)
            gain = runs.protocol.signed(arm.task, pair[0]["test"] - pair[1]["test"])
            row = rows.setdefault(f"{beta:g}", {"gains": [], "shares": []})
            row["gains"].append(gain)
            row["shares"].append(pair[0].get("gradient_share", {}).get("first"))
    return rows


def score(runs: Runs, name: str) -> dict[str, float]:
    """Of a comparison's task, the teacher's own figure and the simple baseline's."""
    side = runs.protocol.sides(name)[1]

    def make(_: Arm) -> Mapping[str, Any]:
        task, kind = runs.load(side.task)[0], runs.protocol.tasks[side.task]["kind"]
        if kind == "language":
            figures = task.teacher_loss, fit_bigrams(task.windows, task.valid, task.test)
        elif kind == "images":
            with torch.no_grad():
                logits = [task.teacher(pixel_values=part).logits for part in task.train_images.split(250)]
            labels = torch.cat(logits).argmax(-1)
            figures = task.teacher_accuracy, fit_linear(task.train_images, labels, task.test_images, task.test_labels)
        else:
            words = task.teacher.embeddings.word_embeddings
            means = task.judge(lambda inputs: SimpleNamespace(last_hidden_state=words(inputs["input_ids"])), "test")
            figures = task.judge(lambda inputs: task.teacher(**inputs), "test"), means
        return {"scores": dict(zip(("teacher", "simple"), figures, strict=True))}

    return dict(runs.find(side, {"question": "scores"}, 0, make)["scores"])


def fit_bigrams(windows: Tensor, valid: Tensor, test: Tensor) -> float:
    """Nats a token of ``a P(w | v) + b P(w) + (1 - a - b) / V``; a and b are chosen on validation windows."""
    size = int(max(windows.max(), valid.max(), test.max())) + 1
    pairs = torch.zeros(size, size, dtype=torch.float64)
    pairs.index_put_((windows[:, :-1].flatten(), windows[:, 1:].flatten()), pairs.new_ones(()), accumulate=True)
    both, single = pairs / pairs.sum(1, keepdim=True).clamp(min=1), pairs.sum(0) / pairs.sum()

    def measure(part: Tensor, a: float, b: float) -> float:
        before, after = part[:, :-1].flatten(), part[:, 1:].flatten()
        return float(-(a * both[before, after] + b * single[after] + (1 - a - b) / size).log().mean())

    shares = [(a, b) for a in (0.7, 0.8, 0.9, 0.95, 0.98) for b in (0.01, 0.02, 0.05, 0.1, 0.2) if a + b < 1]
    return measure(test, *min(shares, key=lambda pair: measure(valid, *pair)))


def work(runs: Runs) -> Iterator[tuple[str, str, Any]]:
    """Group, name and figures, in the protocol's order; what a report lacks is left out."""
    page = runs.protocol.page
    seeds = {"compare": page["seeds"], "fresh": page["fresh_seeds"]}
    others = {"curves": grow, "betas": try_betas, "scores": score}
    for entry in page["order"]:
        group, name = entry.split()
        try:
            yield group, name, compare(runs, name, seeds[group]) if group in seeds else others[group](runs, name)
        except NotRunError:
            continue
        except UnavailableError as error:
            print(f"{entry}: not run. {error}")


def summarise(runs: Runs) -> dict[str, Any]:
    """All that the lines hold."""
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for group, name, figures in work(Runs(runs.protocol, runs.record, runs.work, "report")):
        groups[group][name] = figures
    size = len(runs.protocol.comparisons)  # those that were not run count as P = 1
    for kind in KINDS:
        least = 0.0
        for place, one in enumerate(sorted((one[kind] for one in groups["compare"].values()), key=lambda x: x["p"])):
            least = one["holm"] = max(least, min(1.0, (size - place) * one["p"]))
    for name, one in groups["fresh"].items():
        first = groups["compare"][name]
        one["agrees"] = all(
            abs(one[kind]["mean"] - first[kind]["mean"]) <= 1.4 * first[kind]["half"] for kind in KINDS
        )
    lines = list(runs.record.found.values())
    return {
        **{f"{name}s": sorted({line[name] for line in lines}) for name in ("processor", "torch", "product")},
        "minutes": sum(line["seconds"] for line in lines) / 60,
        "runs": sum("steps" in line["options"] for line in lines),
        "not run": [name for name in runs.protocol.comparisons if name not in groups["compare"]],
        "questions": {name: one["question"] for name, one in runs.protocol.comparisons.items()},
        **groups,
    }


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then write what all lines say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dozen", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, help="start no run after so many minutes")
    parser.add_argument("--any-code", action="store_true", help="keep runs of other versions of the code that trains")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--protocol", type=Path, default=HERE / "dozen.toml")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of dozen.jsonl and dozen.json")
    parser.add_argument("--work", type=Path, default=Path("build/study"), help="folder of data and teachers")
    parser.add_argument("--picture", type=Path, help="draw the gains there, such as docs/study/dozen.svg")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    runs = Runs(Protocol(options.protocol), Record(options.out / "dozen.jsonl"), options.work, end=end)
    runs.any_code = options.any_code

    def write() -> dict[str, Any]:
        result = summarise(runs)
        save(result, options.out / "dozen.json")
        return result

    try:
        for group, name, _ in () if options.report else work(runs):
            print(f"{group} {name}: done", flush=True)
            write()
    except OutOfTimeError:
        print("the time is over; the same command resumes")
    result = write()
    if options.picture:
        draw_dozen(result["compare"], options.picture)
    for name, one in result["compare"].items():
        for kind in KINDS:
            row = one[kind]
            print(f"{name}, {kind}: {row['mean']:+.4f} ± {row['half']:.4f}, Holm's P {row['holm']:.3g}")


if __name__ == "__main__":
    main()
