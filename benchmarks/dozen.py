"""``python -m benchmarks.dozen``: the twelve comparisons of ``dozen.toml``, which says how they are made.

Each finished run is a line of ``dozen.jsonl``; a killed run is lost alone, and the command goes on where it stopped.
A run counts as made while its setting, its data and the benchmarks' code are the same. ``--report`` only reads the
lines again. Either way ``dozen.json`` then holds the comparisons. Seconds are processor time of one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.study.analysis import half_interval, p_value
from benchmarks.study.arms import ALONE, Arm
from benchmarks.study.digits import UnavailableError, fit_linear
from benchmarks.study.origin import fingerprint, hash_code, name_processor
from benchmarks.study.tasks import load_task
from benchmarks.study.training import train

HERE = Path(__file__).parent
DEFAULTS = {"plan": "progressive", "alpha_per": "map", "temperature": 1.0}
PACE_TURNS, PACE_STEPS = 5, 12
LOWER_IS_BETTER = ("loss",)


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

    def tries(self, side: Side) -> list[Setting]:
        """All of an arm, equally many for every arm."""
        task, arm = self.tasks[side.task], self.page["arms"][side.arm]
        grid = task["kd" if arm["method"] == ALONE else "term"]
        (name, kds), (_, rates) = grid.items()
        weights = [0.0] if arm["method"] == ALONE else arm.get("weights", task["weights"])
        return [Setting((name, kd), rate, weight) for kd, rate, weight in itertools.product(kds, rates, weights)]

    def finals(self, side: Side) -> int:
        """How many of the tries are trained to the end."""
        return len({_group(setting) for setting in self.tries(side)})

    def signed(self, task: str, value: float) -> float:
        """Larger is better."""
        return -value if self.tasks[task]["measure"] in LOWER_IS_BETTER else value


def _group(setting: Setting) -> float:
    return setting.weight or setting.kd[1]


class Runs:
    """Makes runs, or finds them among the lines."""

    def __init__(self, protocol: Protocol, path: Path, *, work: Path, end: float | None, is_report: bool) -> None:
        self.protocol, self.path, self.work, self.end, self.is_report = protocol, path, work, end, is_report
        self.lines: dict[str, dict[str, Any]] = {}
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]  # what was torn by a kill is as if it never was
        for line in whole.splitlines():
            entry = json.loads(line)
            self.lines[entry["key"]] = entry
        if whole != text:
            path.write_bytes(whole)
        self.loaded: dict[str, Any] = {}
        self.started = time.perf_counter(), time.process_time()

    def load(self, name: str) -> tuple[Any, str]:
        """A task, and a hash of its data and of the code that trains."""
        task = self.protocol.tasks[name]
        key = json.dumps([task["kind"], task["settings"]], sort_keys=True)
        if key not in self.loaded:
            made = load_task(task["kind"])(self.work / task["kind"], task["settings"], "cpu")
            values = (value for held in vars(made).values() for value in (held if isinstance(held, list) else [held]))
            data = fingerprint(*(value for value in values if isinstance(value, Tensor | nn.Module)))
            self.loaded[key] = made, f"{data} {hash_code('benchmark_code', task['kind'])}"
        return self.loaded[key]

    def find(self, task: str, what: Sequence[Any]) -> tuple[str, str, dict[str, Any] | None]:
        """Key, origin and line of something on a task; its line only if it has this origin, but for a report."""
        page = self.protocol.tasks[task]
        own = [page["kind"], page["settings"], page.get("options"), page["start"], page["batch"], *what]
        key = json.dumps(own, sort_keys=True)
        line = self.lines.get(key)
        if self.is_report:
            if line is None:
                raise NotRunError
            return key, "", line
        origin = self.load(task)[1]
        return key, origin, line if line is not None and line["origin"] == origin else None

    def add(self, key: str, origin: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line; on the disk when this returns."""
        versions = {"torch": torch.__version__, "product": hash_code("rival_code", "")}
        line = {"key": key, "origin": origin, "processor": name_processor("cpu"), **versions, **fields}
        with self.path.open("ab") as file:
            file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines[key] = line
        return line

    def run(self, side: Side, setting: Setting, steps: int, seed: int) -> dict[str, Any]:
        """A line with ``valid`` and ``test`` and what ``train`` returns."""
        page, arm = self.protocol.tasks[side.task], self.protocol.page["arms"][side.arm]
        what = [arm["method"], arm.get("taught", 1.0), setting.kd, setting.rate, setting.weight, steps, seed]
        key, origin, line = self.find(side.task, what)
        if line is not None:
            return line
        if self.end is not None and time.monotonic() >= self.end:
            raise OutOfTimeError
        started = time.process_time()
        course = self._course(side, setting, seed)
        marks = (0,) if seed in self.protocol.page["seeds"] else ()
        fields = {"rate": setting.rate, "beta": setting.weight, "batch": page["batch"], "steps": steps, "seed": seed}
        result = train(course, taught=arm.get("taught", 1.0), marks=marks, **fields)
        names = {"task": side.task, "arm": side.arm, "steps": steps, "seed": seed, "setting": vars(setting)}
        figures = {name: result[f"{name}_{page['measure']}"] for name in ("valid", "test")}
        line = self.add(key, origin, {**result, **names, **figures, "seconds": time.process_time() - started})
        self.say(
            f"{side.task}, {side.arm}, {setting.kd[1]:g} {setting.rate:g} {setting.weight:g}, {steps} steps, "
            f"seed {seed}: {line['valid']:.4f} {line['test']:.4f}"
        )
        return line

    def _course(self, side: Side, setting: Setting, seed: int) -> Any:
        page, arm = self.protocol.tasks[side.task], self.protocol.page["arms"][side.arm]
        options = DEFAULTS | page.get("options", {}) | {"start": page["start"], "method": arm["method"]}
        options |= {"beta": setting.weight, setting.kd[0]: setting.kd[1]}
        return self.load(side.task)[0].course(Arm(side.task, "dozen", options, page["settings"]), seed)

    def pace(self, side: Side, setting: Setting) -> float:
        """Processor seconds of an arm's step over those of a step of KD alone, by turns."""
        arm = self.protocol.page["arms"][side.arm]
        if arm["method"] == ALONE:
            return 1.0
        taught = arm.get("taught", 1.0)
        key, origin, line = self.find(side.task, ["pace", arm["method"]])
        if line is None:
            courses = [self._course(replace(side, arm=name), setting, 0) for name in ("kd", side.arm)]
            seconds: list[list[float]] = [[], []]
            for _ in range(PACE_TURNS):
                for course, times in zip(courses, seconds, strict=True):
                    course.evaluate = lambda _: {}
                    fields = {"rate": setting.rate, "batch": self.protocol.tasks[side.task]["batch"], "seed": 0}
                    times.append(train(course, beta=setting.weight, steps=PACE_STEPS, **fields)["step_seconds"])
            ratio = statistics.median(b / a for a, b in zip(*seconds, strict=True))
            line = self.add(key, origin, {"task": side.task, "arm": side.arm, "turns": seconds, "pace": ratio})
            self.say(f"{side.task}: a step of {arm['method']} takes {ratio:.2f} of one of KD")
        return 1.0 + taught * (float(line["pace"]) - 1.0)

    def tune(self, side: Side) -> Setting:
        """The setting of an arm, chosen on validation as the protocol says."""
        page, steps = self.protocol.page, self.protocol.tasks[side.task]["steps"]

        def best(settings: Sequence[Setting], length: int, seed: int) -> Setting:
            values = [self.protocol.signed(side.task, self.run(side, s, length, seed)["valid"]) for s in settings]
            return settings[max(range(len(values)), key=values.__getitem__)]

        groups: dict[float, list[Setting]] = {}
        for setting in self.protocol.tries(side):
            groups.setdefault(_group(setting), []).append(setting)
        finalists = [best(own, steps // 3, page["first_seed"]) for own in groups.values()]
        return best(finalists, steps, page["final_seed"])

    def say(self, text: str) -> None:
        """With what is left to do."""
        wall, processor = (
            now - then for now, then in zip((time.perf_counter(), time.process_time()), self.started, strict=True)
        )
        left = self.left() / 60
        share = f", {left * wall / processor:.0f} minutes at this share of a core" if processor > 30 else ""
        print(f"{text}; about {left:.0f} processor minutes left{share}", flush=True)

    def left(self) -> float:
        """Processor seconds of what is planned and not yet made, by what was measured so far."""
        protocol, planned, more = self.protocol, dict[Side, float](), dict[Side, float]()
        page, seeds = protocol.page, len(protocol.page["seeds"])
        for entry in page["order"]:
            group, name = entry.split()
            comparison = protocol.comparisons[name]
            arm, baseline = (Side(comparison["task"], comparison[key]) for key in ("arm", "baseline"))
            steps = protocol.tasks[arm.task]["steps"]
            # For equal time one side, mostly the baseline, trains about 1.3 times the steps.
            shares = {"compare": (seeds, 2.3 * seeds), "fresh": (seeds, 2.3 * seeds)}
            shares |= {"curves": (0, 2 * sum(page["growth"])), "betas": (3 * len(page["betas"]), 0)}
            for side, share in zip((arm, baseline), shares.get(group, (0, 0)), strict=True):
                if group == "compare":
                    tuning = len(protocol.tries(side)) / 3 + protocol.finals(side)
                    planned[side] = max(planned.get(side, 0.0), steps * (tuning + share))
                else:
                    more[side] = more.get(side, 0.0) + steps * share
        planned = {side: planned.get(side, 0.0) + more.get(side, 0.0) for side in {**planned, **more}}
        made: dict[Side, list[dict[str, Any]]] = {}
        for line in self.lines.values():
            if "seconds" in line:
                made.setdefault(Side(line["task"], line["arm"]), []).append(line)
        rates = {side: sum(x["seconds"] for x in own) / sum(x["steps"] for x in own) for side, own in made.items()}
        usual = statistics.fmean(rates.values()) if rates else 0.04
        return sum(
            max(0.0, steps - sum(x["steps"] for x in made.get(side, []))) * rates.get(side, usual)
            for side, steps in planned.items()
        )


def compare(runs: Runs, name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """A comparison at equal steps and at equal time, before Holm's adjustment."""
    protocol = runs.protocol
    comparison = protocol.comparisons[name]
    task = protocol.tasks[comparison["task"]]
    sides = [Side(comparison["task"], comparison[key]) for key in ("arm", "baseline")]
    settings = [runs.tune(side) for side in sides]
    paces = [runs.pace(side, setting) for side, setting in zip(sides, settings, strict=True)]
    ratio = paces[0] / paces[1]
    longer = [1.0, _more(ratio)] if ratio > 1 else [_more(1 / ratio), 1.0]
    found: dict[str, Any] = {"pace": ratio, "settings": [vars(setting) for setting in settings]}
    for kind, more in (("equal steps", [1.0, 1.0]), ("equal time", longer)):
        steps = [round(task["steps"] * each) for each in more]
        # One side after the other, as what the teacher says is kept for one method at a time.
        own = [
            [runs.run(side, setting, length, seed) for seed in seeds]
            for side, setting, length in zip(sides, settings, steps, strict=True)
        ]
        made = list(zip(*own, strict=True))
        for first, second in made:
            if first["data"] != second["data"] or (steps[0] == steps[1] and first["start"] != second["start"]):
                raise RuntimeError(f"{name}: seed {first['seed']} did not start from the same weights and samples")
        gains = [protocol.signed(comparison["task"], a["test"] - b["test"]) for a, b in made]
        found[kind] = {"steps": steps, "gains": gains}
        for number, side in enumerate(("arm", "baseline")):
            found[kind][side] = [pair[number]["test"] for pair in made]
            curves = [pair[number]["curve"] for pair in made]
            found[kind][f"{side} before"] = [
                curve["0"][f"test_{task['measure']}"] for curve in curves if "0" in curve
            ]
    if "minus" in comparison:
        other = compare(runs, comparison["minus"], seeds)
        for kind in ("equal steps", "equal time"):
            found[kind]["own gains"] = found[kind]["gains"]
            found[kind]["gains"] = [a - b for a, b in zip(found[kind]["gains"], other[kind]["gains"], strict=True)]
    for kind in ("equal steps", "equal time"):
        gains = found[kind]["gains"]
        found[kind] |= {"mean": statistics.fmean(gains), "half": half_interval(gains), "p": p_value(gains)}
    return found


def _more(ratio: float) -> float:
    """How many times the steps the cheaper side trains."""
    return 1.0 if ratio <= 1.02 else math.ceil(round(10 * ratio, 6)) / 10


def adjust(found: Mapping[str, dict[str, Any]], size: int) -> None:
    """Holm's adjustment over all comparisons, of which those that were not run count as P = 1."""
    for kind in ("equal steps", "equal time"):
        least = 0.0
        for place, one in enumerate(sorted((one[kind] for one in found.values()), key=lambda one: one["p"])):
            least = one["holm"] = max(least, min(1.0, (size - place) * one["p"]))


def grow(runs: Runs, name: str) -> dict[str, Any]:
    """Test figures of KD alone, or with the baseline's term, for more steps, until it no longer gains."""
    comparison = runs.protocol.comparisons[name]
    side = Side(comparison["task"], comparison["baseline"])
    setting, steps = runs.tune(side), runs.protocol.tasks[side.task]["steps"]
    curve: dict[str, list[float]] = {}
    for times in (1, *runs.protocol.page["growth"]):
        curve[str(times * steps)] = [runs.run(side, setting, times * steps, seed)["test"] for seed in (0, 1)]
        values = [runs.protocol.signed(side.task, statistics.fmean(own)) for own in curve.values()]
        if values[-1] < max(values):
            break
    return curve


def try_betas(runs: Runs, name: str) -> dict[str, list[float]]:
    """SHD's gain over KD by beta, at the chosen KD weight and rate of both."""
    comparison = runs.protocol.comparisons[name]
    sides = [Side(comparison["task"], comparison[key]) for key in ("arm", "baseline")]
    (own, alone), steps = [runs.tune(side) for side in sides], runs.protocol.tasks[comparison["task"]]["steps"]
    gains: dict[str, list[float]] = {}
    for beta in runs.protocol.page["betas"]:
        pairs = [
            [runs.run(sides[0], replace(own, weight=beta), steps, seed), runs.run(sides[1], alone, steps, seed)]
            for seed in runs.protocol.page["seeds"][:3]
        ]
        gains[f"{beta:g}"] = [runs.protocol.signed(comparison["task"], a["test"] - b["test"]) for a, b in pairs]
    return gains


def score(runs: Runs, name: str) -> dict[str, float]:
    """Of a task, the teacher's own figure and the simple baseline's."""
    key, origin, line = runs.find(name, ["scores"])
    if line is None:
        task, kind = runs.load(name)[0], runs.protocol.tasks[name]["kind"]
        if kind == "language":
            found = {"teacher": task.teacher_loss, "simple": fit_bigrams(task.windows, task.valid, task.test)}
        elif kind == "images":
            with torch.no_grad():
                logits = [task.teacher(pixel_values=part).logits for part in task.train_images.split(250)]
            choices = torch.cat(logits).argmax(-1)
            linear = fit_linear(task.train_images, choices, task.test_images, task.test_labels)
            found = {"teacher": task.teacher_accuracy, "simple": linear}
        else:
            words = task.teacher.embeddings.word_embeddings
            means = task.judge(lambda inputs: SimpleNamespace(last_hidden_state=words(inputs["input_ids"])), "test")
            found = {"teacher": task.judge(lambda inputs: task.teacher(**inputs), "test"), "simple": means}
        line = runs.add(key, origin, {"task": name, "scores": found})
    return dict(line["scores"])


def fit_bigrams(windows: Tensor, valid: Tensor, test: Tensor) -> float:
    """Nats a token of ``a P(w | v) + b P(w) + (1 - a - b) / V``; a and b are chosen on validation windows."""
    size = int(max(windows.max(), valid.max(), test.max())) + 1
    pairs = torch.zeros(size, size, dtype=torch.float64)
    pairs.index_put_((windows[:, :-1].flatten(), windows[:, 1:].flatten()), torch.ones(()).double(), accumulate=True)
    both, single = pairs / pairs.sum(1, keepdim=True).clamp(min=1), pairs.sum(0) / pairs.sum()

    def measure(part: Tensor, a: float, b: float) -> float:
        before, after = part[:, :-1].flatten(), part[:, 1:].flatten()
        return float(-(a * both[before, after] + b * single[after] + (1 - a - b) / size).log().mean())

    shares = [(a, b) for a in (0.7, 0.8, 0.9, 0.95, 0.98) for b in (0.01, 0.02, 0.05, 0.1, 0.2) if a + b < 1]
    return measure(test, *min(shares, key=lambda pair: measure(valid, *pair)))


def work(runs: Runs) -> Iterator[tuple[str, str, Any]]:
    """Group, name and figures, in the protocol's order; what a report lacks is left out."""
    page = runs.protocol.page
    actions = {
        "compare": lambda name: compare(runs, name, page["seeds"]),
        "fresh": lambda name: compare(runs, name, page["fresh_seeds"]),
        "curves": lambda name: grow(runs, name),
        "betas": lambda name: try_betas(runs, name),
        "scores": lambda name: score(runs, runs.protocol.comparisons[name]["task"]),
    }
    for entry in page["order"]:
        group, name = entry.split()
        try:
            yield group, name, actions[group](name)
        except NotRunError:
            continue
        except UnavailableError as error:
            print(f"{entry}: not run. {error}")


def summarise(runs: Runs) -> dict[str, Any]:
    """All that the lines hold."""
    found: dict[str, dict[str, Any]] = {group: {} for group in ("compare", "fresh", "curves", "betas", "scores")}
    reader = Runs(runs.protocol, runs.path, work=runs.work, end=None, is_report=True)
    for group, name, figures in work(reader):
        found[group][name] = figures
    adjust(found["compare"], len(runs.protocol.comparisons))
    for name, one in found["fresh"].items():
        first = found["compare"][name]["equal steps"]
        one["agrees"] = abs(one["equal steps"]["mean"] - first["mean"]) <= 1.4 * first["half"]
    tried = {}
    for line in reader.lines.values():
        if line.get("seed") in (runs.protocol.page["first_seed"], runs.protocol.page["final_seed"]):
            name = f"{line['task']}, {line['arm']}, {line['steps']} steps"
            tried.setdefault(name, []).append([*line["setting"].values(), line["valid"]])
    lines = [line for line in reader.lines.values() if "seconds" in line]
    names = list(runs.protocol.comparisons)
    return {
        "processors": sorted({line["processor"] for line in lines}),
        "torch": sorted({line["torch"] for line in lines}),
        "product_versions": len({line["product"] for line in lines}),
        "runs": len(lines),
        "minutes": sum(line["seconds"] for line in lines) / 60,
        "not_run": [name for name in names if name not in found["compare"]],
        **found,
        "tried": tried,
    }


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then write what all lines say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dozen", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, help="start no run after so many minutes")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--protocol", type=Path, default=HERE / "dozen.toml")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of dozen.jsonl and dozen.json")
    parser.add_argument("--work", type=Path, default=Path("build/study"), help="folder of data and teachers")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    path = options.out / "dozen.jsonl"
    runs = Runs(Protocol(options.protocol), path, work=options.work, end=end, is_report=options.report)
    try:
        for group, name, _ in () if options.report else work(runs):
            print(f"{group} {name}: done", flush=True)
            _write(options.out / "dozen.json", summarise(runs))
    except OutOfTimeError:
        print("the time is over; the same command goes on")
    result = summarise(runs)
    _write(options.out / "dozen.json", result)
    for name, one in result["compare"].items():
        for kind in ("equal steps", "equal time"):
            row = one[kind]
            print(f"{name}, {kind}: {row['mean']:+.4f} ± {row['half']:.4f}, Holm's P {row['holm']:.3g}")


def _write(path: Path, result: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
