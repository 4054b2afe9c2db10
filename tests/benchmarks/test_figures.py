"""Figures in README and docs are those of the JSON beside the benchmarks.

Each function below makes sentences or table rows from the JSON; the page that it names must hold them word for word,
however they are wrapped. Change the page when a benchmark was run again, or this file when a sentence was rewritten.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

stats = pytest.importorskip("scipy.stats", reason="intervals need scipy")

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
SEEDS = range(3)
PAGES: dict[str, list[Callable[[], Iterator[str]]]] = {}


def on(page: str) -> Callable[[Callable[[], Iterator[str]]], Callable[[], Iterator[str]]]:
    """Register a function that yields what a page must say."""

    def register(function: Callable[[], Iterator[str]]) -> Callable[[], Iterator[str]]:
        PAGES.setdefault(page, []).append(function)
        return function

    return register


@functools.cache
def load(name: str) -> Any:
    return json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))


def n(value: float, digits: int = 0, *, sign: bool = False, bare: bool = False) -> str:
    """A figure as pages write it: rounded half up; ``bare`` leaves out the 0 before the point."""
    # Twelve digits first: means of binary numbers are a little beside the decimal that they stand for.
    rounded = Decimal(f"{value:.12g}").quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    text = f"{rounded:+,}" if sign else f"{rounded:,}"
    return re.sub(r"^([+-]?)0\.", r"\1.", text) if bare else text


def half(values: Sequence[float] | Any) -> float:
    """Half the width of a mean's 95% t interval."""
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def pm(values: Sequence[float] | Any, digits: int, *, sign: bool = False, bare: bool = False) -> str:
    """Mean and interval, ``+0.109 ± 0.042``."""
    return f"{n(np.mean(values), digits, sign=sign, bare=bare)} ± {n(half(values), digits, bare=bare)}"


# 3,000 steps on stories: the study's parts last (beta .1) and last_start (.005)

MARKS = (50, 150, 300, 600, 1000, 2000, 3000)


@functools.cache
def runs_of_study() -> list[dict[str, Any]]:
    text = (BENCHMARKS / "study" / "results" / "runs.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def steps(start: str, shd: bool, mark: int) -> Any:
    """Test losses by seed after so many steps."""
    losses = {
        run["seed"]: run["curve"][str(mark)]["test_loss"]
        for run in runs_of_study()
        if run["task"] == "language"
        and (run["options"]["steps"], run["options"]["start"]) == (3000, start)
        and (run["options"]["method"] == "shd") == shd
    }
    return np.array([losses[seed] for seed in SEEDS])


def shd_gain(start: str, mark: int = 3000) -> Any:
    return steps(start, False, mark) - steps(start, True, mark)


def end(start: str, shd: bool) -> str:
    return n(steps(start, shd, 3000).mean(), 3)


def teacher_loss() -> str:
    return n(next(run["teacher_loss"] for run in runs_of_study() if run["options"].get("steps") == 3000), 3)


@on("README.md")
def readme_stories() -> Iterator[str]:
    yield f"the teacher has {teacher_loss()}:"
    random, squeezed = (pm(shd_gain(start), 3) for start in ("random", "squeezed"))
    yield f"| random weights | {end('random', False)} | **{end('random', True)}** | {random} |"
    kd, shd = (end("squeezed", shd) for shd in (False, True))
    yield f"| teacher's weights, merged and aligned | {kd} | {shd} | {squeezed} |"


@on("docs/results.md")
def results_stories() -> Iterator[str]:
    start_gain = steps("random", False, 3000) - steps("squeezed", False, 3000)
    yield f"ends {pm(start_gain, 3)} nats per token below one from random weights"
    gains = [pm(shd_gain(start), 3) for start in ("random", "squeezed")]
    yield f"SHD gains {gains[0]} nats from random weights and {gains[1]} from the teacher's"


@on("docs/students.md")
def students_lasting() -> Iterator[str]:
    for start, shd in itertools.product(("random", "squeezed"), (False, True)):
        cells = [n(steps(start, shd, mark).mean(), 3) for mark in (0, *MARKS)]
        yield f"| {start}, {'KD + SHD' if shd else 'KD'} | {' | '.join(cells)} |"
    for start in ("random", "squeezed"):
        gains = [pm(shd_gain(start, mark), 3, sign=True) for mark in (150, 600, 1000, 3000)]
        yield f"{gains[0]}, {gains[1]}, {gains[2]} and {gains[3]}"
    for shd, said in ((False, "by {} from random weights and {}"), (True, "is significant ({}, {})")):
        rises = [pm(steps(one, shd, 3000) - steps(one, shd, 2000), 3, sign=shd) for one in ("random", "squeezed")]
        yield said.format(*rises)
    lead = steps("random", True, 3000) - steps("squeezed", False, 3000)
    yield f"still better, by {pm(lead, 3)} nats"


ALIGNED = "closed form, aligned"


@on("docs/students.md")
def shrink_starts() -> Iterator[str]:
    file = load("shrink/start.json")
    yield f"The teacher's is {n(file['teacher'], 3)}."

    def cell(size: str, start: str) -> str:
        return n(file["runs"][f"{size}: {start}"], 3)

    whole = ("closed form", ALIGNED, "kept heads", "kept heads, aligned", "mean pooling", "random")
    for size, name in {
        "8 -> 4 heads": "8 -> 4 heads",
        "8 -> 2 heads": "8 -> 2 heads",
        "4 heads, layers 0, 2, 4": "4 heads, layers 0, 2, 4",
        "4 heads, width 48": "4 heads, width 48",
        "4 heads, width 32": "4 heads, width 32",
    }.items():
        first, best, *others = (cell(size, start) for start in whole)
        yield f"| {name} | {first} | **{best}** | {' | '.join(others)} |"
    layers = [cell("layers 0, 2, 4", start) for start in ("closed form", ALIGNED, "random")]
    yield f"| every second layer (0, 2, 4) | {layers[0]} | **{layers[1]}** | | | | {layers[2]} |"


@on("docs/students.md")
def shrink_models() -> Iterator[str]:
    runs = load("shrink/models.json")["runs"]
    sizes = (
        "MiniLM, 12 -> 6 heads",
        "MiniLM, 12 -> 4 heads",
        "ViT-S, 6 -> 3 heads of 64",
        "ViT-S, 6 -> 3 heads of 128",
    )
    for size in sizes:
        starts = ("closed form", ALIGNED, "kept heads", "kept heads, aligned", "mean pooling")
        values = [runs[f"{size}: {start}"] for start in starts]
        best = min(range(len(values)), key=lambda place: values[place]["output"])
        outputs = [n(value["output"], 3) for value in values]
        outputs[best] = f"**{outputs[best]}**"
        cells = [f"{output} ({n(value['tokens'], 3)})" for output, value in zip(outputs, values, strict=True)]
        yield f"| {size} | {' | '.join(cells)} | {n(values[0]['speed'], 2)} |"
    gaps = [
        n(runs[f"{size}: {ALIGNED}"]["output"] / runs[f"{size}: kept heads, aligned"]["output"], 2, bare=True)
        for size in sizes
    ]
    yield f"On MiniLM the aligned squeezed start has {gaps[0]} of the error of aligned kept heads"
    yield f"with 6 heads and {gaps[1]} with 4; on the ViT-S {gaps[2]} and {gaps[3]}."


@on("docs/compress.md")
def compress_minilm() -> Iterator[str]:
    result = load("compress_minilm.json")
    students = {student["name"]: student for student in result["compress"]["students"]}
    for name, key, wish, graph in (
        ("teacher, int8", "teacher, int8", "4.25x", "teacher, int8"),
        ("`--faster 4.25`, int8", "4.25x, int8", "4.25x", "int8"),
        ("`--faster 6.2`, int8", "6.2x, int8", "6.2x", "int8"),
    ):
        times = students[wish]["times"]
        speeds = [n(entry["times_faster"]["median"], 2) for entry in times if entry["graph"] == graph]
        walls = {
            kind: [one["wall"]["median"] for one in times if one["graph"] == kind]
            for kind in ("teacher, int8", graph)
        }
        ratios = (
            [n(before / after, 2) for before, after in zip(*walls.values(), strict=True)]
            if len(walls) > 1
            else ["1.00"] * 2
        )
        spearmans = [n(result[texts][key]["spearman"], 3) for texts in ("wikitext_test", "docstrings")]
        yield f"| {name} | {' / '.join(speeds)} | {' / '.join(ratios)} | {' | '.join(spearmans)} |"
    yield f"{result['compress']['samples']['train']:,} sentences"
    yield f"{n(result['minutes'])} minutes"
    steps = [f"{student['steps']:,}" for student in students.values()]
    yield f"{steps[0]} and {steps[1]} steps"
    loops = result["loop_ms"]
    first, second = (
        " / ".join(n(loops["teacher"][batch] / loops[name][batch], 2) for batch in ("1", "32"))
        for name in ("4.25x, int8", "6.2x, int8")
    )
    over_int8 = [
        " / ".join(n(loops["teacher, int8"][batch] / loops[name][batch], 2) for batch in ("1", "32"))
        for name in ("4.25x, int8", "6.2x, int8")
    ]
    yield f"{first} and {second} times faster than the teacher"
    yield f", and {over_int8[0]} and {over_int8[1]} times faster than its int8"
    errors = [abs(error) for error in result["compress"]["costs"]["errors"]]
    yield f"within {n(100 * sorted(errors)[-2], 1)}% in five of six cases and {n(100 * max(errors), 1)}% off in one"


@on("README.md")
def readme_compress() -> Iterator[str]:
    result = load("compress_minilm.json")
    ratios: list[float] = []
    for student in result["compress"]["students"]:
        walls = {
            graph: [one["wall"]["median"] for one in student["times"] if one["graph"] == graph]
            for graph in ("teacher, int8", "int8")
        }
        ratios += [before / after for before, after in zip(*walls.values(), strict=True)]
    loops = result["loop_ms"]
    for name in ("4.25x", "6.2x"):
        ratios += [loops["teacher, int8"][batch] / loops[f"{name}, int8"][batch] for batch in ("1", "32")]
    yield f"[{n(min(ratios), 1)} to {n(max(ratios), 1)} times faster](docs/compress.md#measured)"
    near, far = (
        [n(result[texts][name]["spearman"], 3, bare=True) for name in ("4.25x, int8", "6.2x, int8", "teacher, int8")]
        for texts in ("wikitext_test", "docstrings")
    )
    yield f"with rank correlations of {near[0]} and {near[1]} instead of {near[2]},"
    yield f"and of {far[0]} and {far[1]} instead of {far[2]} on texts of another kind"


@on("docs/compress.md")
def compress_arms() -> Iterator[str]:
    results = load("compress_arms.json")
    counts = {"vit_s": "3", "stories": "2", "minilm": "3"}
    errors = [max(map(abs, results[teacher][count]["cost_errors"])) for teacher, count in counts.items()]
    vit, stories, minilm = (n(100 * error, 1) for error in errors)
    yield f"within {vit}% on the ViT-S below, {stories}% on stories260K and {minilm}% on MiniLM."
    search = results["search"]["minilm"]
    seconds, errors = search["processor_seconds"], search["cost_errors"]
    yield f"take {n(sum(seconds['shared']))} s of processor time, {n(search['ten_to_one'], 1)} times as much as one"
    yield f"once in {n(seconds['losses'])} s, ten take {n(search['ten_to_one_with_losses'], 1)} times as much as one"
    yield f"predictions were within {n(100 * max(map(abs, errors)), 1)}% on MiniLM, on one core"
    first, second = (results["shd"]["minilm"][name]["gains"] for name in ("4.25x", "6.2x"))
    yield f"lowered the loss of 100 steps by {pm(first, 4, bare=True)} on the first"
    yield f"raised it by {pm(-np.array(second), 4, bare=True)} on the second"
    names = {"minilm": "all-MiniLM-L6-v2, {} of 6", "vit_s": "ViT-S, {} of 12", "stories": "stories260K, {} of 5"}
    for teacher in names:
        counts = load("compress_arms.json")[teacher]
        for count, entry in sorted(counts.items()):
            arms = {arm: row["quality"] for arm, row in entry["arms"].items()}
            rivals = [arm for arm in arms if arm.startswith("sentence-transformers")]
            columns = ["layers", "kept, aligned", "kept"]
            columns += [max(rivals, key=lambda arm: np.mean(arms[arm]))] if rivals else []
            cells = [n(float(np.mean(arms["compress"])), 3)]
            for arm in columns:
                if arm not in arms:  # was not run
                    cells.append("")
                    continue
                gains = np.subtract(arms["compress"], arms[arm])
                gain = pm(gains, 3, sign=True) if len(gains) > 1 else n(float(gains[0]), 3, sign=True)
                cells.append(f"{n(float(np.mean(arms[arm])), 3)} ({gain})")
            cells += [""] * (5 - len(cells))
            yield " ".join(f"| {names[teacher].format(count)} | {' | '.join(cells)} |".split())


@on("docs/shrink.md")
def shrink_timing() -> Iterator[str]:
    cases = [case for setting in load("deploy_timing.json")["settings"].values() for case in setting.values()]
    most = max(abs(case[name] - 1) for case in cases for name in ("processor_ratio", "ratio"))
    yield f"wall and processor times agree within {math.ceil(100 * most)}% in all {len(cases)} cases"


@on("docs/students.md")
def shrink_depth() -> Iterator[str]:
    file = load("shrink/depth.json")
    runs, marks = file["runs"], ("0", "25", "100", "200")
    chosen = file["students"]["chosen"]["2"]
    names = {"layers": "layers 0, 3, 4, 5", "parts": "no attention in 1, 2, 3"}
    for kind, terms in itertools.product(names, ("CE", "CE + KD", "CE + KD + SHD")):
        means = [
            np.mean([runs[f"{kind} as fast as 4 layers, {terms}, seed {s}"][mark] for s in SEEDS]) for mark in marks
        ]
        cells = [n(mean, 3) for mean in means]
        if (kind, terms) == ("layers", "CE + KD + SHD"):
            cells[-1] = f"**{cells[-1]}**"
        head = f"| {names[kind]} | {n(chosen[kind]['latency'], 2)} | {n(chosen[kind]['flops'], 2)} |"
        yield f"{head if terms == 'CE' else '| | | |'} {terms} | {' | '.join(cells)} |"


@on("docs/students.md")
def shrink_parts() -> Iterator[str]:
    file = load("shrink/depth.json")
    runs, marks = file["runs"], ("0", "25", "100", "200")
    yield f"at {n(file['teacher'], 3)} nats per token; [`benchmarks/shrink/depth.py`]"
    for part, name in {"attention": "one attention block", "activations": "one activation"}.items():
        losses = [
            [
                runs[f"{part} of layer {layer}, CE + KD, seed {layer % 3}"][mark]
                - runs[f"nothing dropped, CE + KD, seed {layer % 3}"][mark]
                for layer in range(6)
            ]
            for mark in marks
        ]
        means = [float(np.mean(values)) for values in losses]
        yield f"| {name} | {' | '.join(n(mean, 3) for mean in means)} | {n(100 * means[-1] / means[0])}% |"

    def last(kind: str, terms: str) -> Any:
        return np.array([runs[f"{kind} as fast as 4 layers, {terms}, seed {seed}"]["200"] for seed in SEEDS])

    ce, kd, shd = (
        pm(last("parts", terms) - last("layers", terms), 3) for terms in ("CE", "CE + KD", "CE + KD + SHD")
    )
    yield f"Whole layers are better here, by {ce}, {kd} and {shd} nats after 200 steps,"
    layers, parts = (pm(last(kind, "CE") - last(kind, "CE + KD"), 3) for kind in ("layers", "parts"))
    yield f"Adding KD lowers the loss by {layers} (whole layers) and {parts} (parts)"
    layers, parts = (pm(last(kind, "CE + KD") - last(kind, "CE + KD + SHD"), 3) for kind in ("layers", "parts"))
    yield f"and adding SHD by another {layers} and {parts}."


# 400 steps on stories: benchmarks/stories_distillation.json


def distilled(heads: int, source: str, beta: float) -> Any:
    runs = load("stories_distillation.json")["runs"]
    names = [f"heads={heads} source={source} beta={beta:g} compiled=False seed={seed}" for seed in SEEDS]
    return np.array([runs[name]["valid_loss"] for name in names])


def distilled_gain(heads: int, beta: float) -> Any:
    return distilled(heads, "none", 0) - distilled(heads, "cache", beta)


@on("docs/results.md")
def results_distillation() -> Iterator[str]:
    for heads in (4, 2):
        kd, shd, live = (
            n(distilled(heads, source, beta).mean(), 3)
            for source, beta in (("none", 0), ("cache", 0.02), ("live", 0.02))
        )
        yield f"| {heads} heads | {kd} | **{shd}** | {pm(distilled_gain(heads, 0.02), 3, sign=True)} | {live} |"


@on("docs/choose.md")
def choose_distillation() -> Iterator[str]:
    for beta in (0.1, 0.02, 0.004):
        bold = "**" if beta == 0.02 else ""
        cells = [f"{bold}{pm(distilled_gain(heads, beta), 2)}{bold}" for heads in (4, 2)]
        yield f"| {beta:g} | {cells[0]} | {cells[1]} |"


# The study: benchmarks/study/results/*.csv and runs.jsonl


@functools.cache
def rows(task: str) -> list[dict[str, str]]:
    with (BENCHMARKS / "study" / "results" / f"{task}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def row(task: str, part: str, label: str) -> dict[str, str]:
    (one,) = (row for row in rows(task) if (row["part"], row["label"]) == (part, label))
    return one


def gain(task: str, part: str, label: str, digits: int, *, column: str = "gain", **form: bool) -> str:
    """A gain with its interval, in points where the figure is a share."""
    one = row(task, part, label)
    scale = 100 if one["metric"] in ("accuracy", "rouge_l") else 1
    value, interval = scale * float(one[column]), scale * float(one[f"{column}_interval"])
    return f"{n(value, digits, **form)} ± {n(interval, digits, bare=form.get('bare', False))}"


def over(task: str, part: str, label: str, digits: int) -> str:
    return gain(task, part, label, digits, column="over_shd", sign=True, bare=True)


def over_start(task: str, label: str, digits: int, part: str = "start") -> str:
    return gain(task, part, label, digits, column="over_start", bare=True)


def share(row: dict[str, str], digits: int = 0) -> str:
    """Of the gradient at the first step, in percent."""
    return f"{n(100 * float(row['gradient_share']), digits, bare=True)}%"


@on("docs/study.md")
def study_by_start() -> Iterator[str]:
    """The table of starts: a line for each beta that was tried."""
    for task, part, start, name in (
        ("language", "length", "", "random, stories, 600 steps"),
        ("images", "draws", "", "random, digits, 600 steps"),
        ("language", "pretrained", "", "trained before, stories, 300 steps"),
        ("language", "pretrained_long", "", "trained before, stories, 3,000 steps"),
        ("language", "pretrained_same", "", "trained before on the same windows, 300 steps"),
        ("images", "pretrained", "", "trained before, digits, 300 steps"),
        ("instructions", "pretrained", "", "trained before, instructions, 300 steps"),
        ("language", "start", ", start squeezed", "squeezed, stories, 150 steps"),
        ("language", "start", ", start kept", "kept heads, stories, 150 steps"),
        ("language", "last_start", "", "squeezed, stories, 3,000 steps"),
        ("images", "start", ", start squeezed", "squeezed, digits, 300 steps"),
        ("images", "start", ", start kept", "kept heads, digits, 300 steps"),
        ("vit_s", "start", "", "squeezed, ViT-S, 300 steps"),
        ("instructions", "start", ", start squeezed", "squeezed, instructions, 300 steps"),
        ("instructions", "start", ", start kept", "kept heads, instructions, 300 steps"),
    ):
        parts = (part, f"{part}_beta") if start == ", start squeezed" else (part,)
        own = [row for row in rows(task) if row["part"] in parts and row["method"] == "shd"]
        own = [row for row in own if row["label"].endswith(start) or row["part"] != part]
        own.sort(key=lambda row: float(row["beta"]))
        digits, unit = (3, "nats") if task == "language" else (1, "points")
        digits += (start != "" or part == "pretrained") and task == "language"
        gains = [gain(task, row["part"], row["label"], digits, sign=True, bare=True) for row in own]
        cells = [
            f"{text} (beta {n(float(row['beta']), 3, bare=True).rstrip('0')}, {share(row, share_digits(row))})"
            for text, row in zip(gains, own, strict=True)
        ]
        yield f"| {name} | {own[0]['seeds']} | {unit} | {'; '.join(cells)} |"


def beta_of(row: dict[str, str]) -> float:
    return float(row["beta"])


def share_digits(row: dict[str, str]) -> int:
    return int(float(row["gradient_share"]) < 0.1)


@on("docs/study.md")
def study_starts() -> Iterator[str]:
    kept, squeezed = (over_start("language", f"base loss alone, start {one}", 3) for one in ("kept", "squeezed"))
    yield f"Alignment adds {kept} nats to kept heads"
    yield f"merging heads adds {squeezed} nats"
    merged, aligned = (over_start("images", f"base loss alone, start {one}", 1) for one in ("squeezed", "kept"))
    yield f"On digits merging adds {merged} points"
    yield f"alignment {aligned}"
    merged, aligned = (over_start("instructions", f"base loss alone, start {one}", 1) for one in ("squeezed", "kept"))
    yield f"On instructions (Rouge-L) merging {merged}, alignment {aligned}"
    stories = steps("random", True, 3000) - steps("squeezed", False, 3000)
    yield f"is {pm(stories, 3, bare=True)} nats better than a random one with KD + SHD"
    stories = steps("random", False, 3000) - steps("squeezed", False, 3000)
    yield f"and {pm(stories, 3, bare=True)} better than one with KD alone"


@on("docs/study.md")
def study_answers() -> Iterator[str]:
    label = "SHD, beta 0.1"
    text, heads = (gain("language", part, label, 3, bare=True) for part in ("text", "heads"))
    yield f"{text} nats on bytes of WikiText-2, {heads} with 2 heads"
    yield f"{gain('language', 'longer', label, 3, bare=True)} after 2,000 steps"
    yield f"{pm(shd_gain('random'), 3, bare=True)} after 3,000"
    yield f"two teachers {gain('language', 'teachers', 'SHD, beta 1', 2, bare=True)} at beta 1"
    vit = [n(100 * float(row("vit_s", "table4", one)["test"]), 1) for one in ("base loss alone", label)]
    yield f"from {vit[0]} to {vit[1]}%"
    yield (
        f"{gain('images', 'labels', label, 0)} points with 1,000 labels, "
        f"{gain('images', 'table4', 'SHD, beta 0.1, base ce', 0)} over cross entropy, "
        f"{gain('images', 'table4', 'SHD, beta 0.1, base vitkd_nkd', 0)} over ViTKD + NKD"
    )
    rouge = gain("instructions", "kd", label, 1, sign=True)
    yield f"Rouge-L {rouge}, with MiniLLM {gain('instructions', 'minillm', label, 2, sign=True, bare=True)}"
    large = gain("generation", "table1", "SHD, beta 1, base kd", 1, sign=True)
    yield f"generation (Frechet distance {large} at beta 1)"
    copied = gain("images", "copy", "attention copy", 1), gain("language", "copy", "attention copy", 2, bare=True)
    yield f"{copied[0]} points on digits and {copied[1]} nats on stories"


@on("docs/study.md")
def study_rivals() -> Iterator[str]:
    """The table of rivals: each at the weight that validation chose, against SHD at its own."""
    page = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    chosen = {
        (task, row["method"]): row["label"]
        for task in ("images", "language")
        for row in rows(task)
        if row["part"] == "rivals" and row["is_chosen"] == "True"
    }
    for method in dict.fromkeys(method for _, method in chosen if method != "base"):
        cells = [
            gain(task, "rivals", chosen[task, method], digits, column=column, sign=True, bare=True)
            if (task, method) in chosen and (method, column) != ("shd", "over_shd")
            else ""
            for task, digits in (("images", 1), ("language", 3))
            for column in ("gain", "over_shd")
        ]
        line = next((line for line in page.splitlines() if line.startswith(f"| `{method}` |")), "| | |")
        yield f"| `{method}` | {line.split('|')[2].strip()} | {' | '.join(cells)} |".replace("  ", " ")
    differences = [
        over("language", part, f"{method}, beta 0.1", 3)
        for method in ("hard", "constant")
        for part in ("text", "heads")
    ]
    yield f"hard selection {differences[0]} nats on WikiText-2 and {differences[1]} with 2 heads"
    yield f"a constant {differences[2]} and {differences[3]}"
    plans = over("images", "matching", "SHD, beta 0.1, plan matched, alpha_per map", 1)
    alphas = over("images", "matching", "SHD, beta 0.1, plan progressive, alpha_per row", 1)
    yield f"Not significantly on digits: {plans} and {alphas} points"


@on("docs/study.md")
def study_harms() -> Iterator[str]:
    label = "SHD, beta 0.1, plan matched, alpha_per map"
    yield f"a matched plan on stories, {over('language', 'matching', label, 3)} nats against adjacent pairs"
    small = [gain("generation", "table1", f"SHD, beta 0.01, base {base}", 1) for base in ("kd", "alone")]
    yield f"beta .01 in generation, {small[0]} of distance ({small[1]} without KD)"
    starts = [gain("language", "start", f"SHD, beta 0.1, start {one}", 4, bare=True) for one in ("squeezed", "kept")]
    yield f"beta .1 on the squeezed start of stories, {starts[0]} nats, and on kept heads, {starts[1]}"
    kept = gain("instructions", "start", "SHD, beta 0.1, start kept", 1, bare=True)
    yield f"on kept heads of instructions, {kept} points"
    losses = {
        (run["options"]["method"], run["seed"]): run["test_loss"]
        for run in runs_of_study()
        if (run["task"], run["options"].get("start")) == ("instructions", "pretrained")
        and run["options"]["beta"] in (0.0, 0.1)
    }
    harm = np.array([losses["base", seed] - losses["shd", seed] for seed in SEEDS])
    rouge = gain("instructions", "pretrained", "SHD, beta 0.1", 1, bare=True)
    yield f"trained before, {pm(harm, 3, bare=True)} nats of cross entropy (Rouge-L {rouge}, not significant)"
    trained = [gain("language", "pretrained", f"SHD, beta {beta}", 4, bare=True) for beta in ("0.005", "0.02", "0.1")]
    yield f"trained before on other windows, {trained[0]}, {trained[1]} and {trained[2]} nats"
    yield f"({gain('language', 'pretrained_rate', 'SHD, beta 0.02', 3, bare=True)} at the learning rate"
    own = [gain("language", "rivals", f"{one}, beta 1", 2, bare=True) for one in ("SHD", "mean", "reverse kl")]
    yield f"after 200 steps with a weight of 1: SHD {own[0]}, means {own[1]}, reverse KL {own[2]}"
    own = [
        gain("language", "rivals", f"{one}, beta 1", 2, bare=True) for one in ("soft alignment", "learned alignment")
    ]
    yield f"AMAD's alignment {own[0]}, a learned one {own[1]}"
    yield f"sums of logits at every weight, {gain('language', 'rivals', 'sum mse, beta 0.02', 2, bare=True)} at .02"
    hot = over("images", "temperature", "SHD, beta 0.1, temperature 4.0", 1)
    yield f"attention temperature 4 on digits, {hot} points against 1"
    copied = gain("generation", "mixing", "attention copy, beta 0.1", 1)
    yield f"copied maps in generation, {copied} of distance"


@on("docs/study.md")
def study_levels() -> Iterator[str]:
    """What students, teachers and a linear baseline reach on digits, means over six draws."""
    kd, shd = (n(100 * float(row("images", "draws", one)["test"]), 1) for one in ("base loss alone", "SHD, beta 0.1"))
    drawn = [run for run in runs_of_study() if run["settings"].get("draws") and run["options"]["method"] == "base"]
    linear, teacher = (np.mean([run[f"{one}_accuracy"] for run in drawn]) for one in ("linear", "teacher"))
    yield f"{kd}% with KD and {shd}% with SHD after 600 steps"
    yield f"logistic regression on the pixels {n(100 * linear, 1)}%, the teachers {n(100 * teacher, 1)}%"


@on("docs/study.md")
def study_adjusted() -> Iterator[str]:
    """Comparisons whose P value stays below .05 after Holm's adjustment."""
    survivors = {
        (row["task"], row["part"], row["label"], column)
        for task in ("images", "language", "instructions", "generation", "vit_s")
        for row in rows(task)
        for column in ("gain", "over_shd", "over_start")
        if float(row[f"{column}_holm"]) < 0.05
    }
    assert survivors == {
        ("language", "start", "base loss alone, start kept", "over_start"),
        ("language", "start", "SHD, beta 0.1, start squeezed", "over_start"),
        ("language", "pretrained", "SHD, beta 0.1", "gain"),
        ("language", "rivals", "sum mse, beta 1", "over_shd"),
        ("images", "copy", "attention copy", "gain"),
    }
    holm, bh = (float(row("language", "length", "SHD, beta 0.1")[f"gain_{one}"]) for one in ("holm", "bh"))
    yield f"after 600 steps has {n(holm, 3, bare=True)} (Benjamini-Hochberg {n(bh, 3, bare=True)})"


@on("README.md")
def readme_study() -> Iterator[str]:
    for task in ("images", "language", "instructions", "generation"):
        for row in rows(task):
            if row["method"] in ("hard", "constant"):
                assert float(row["over_shd"]) > -float(row["over_shd_interval"]), row["label"]
    yield "closed-form coefficients did not train significantly better than a constant 1/2 or the better head"


@on("docs/choose.md")
def choose_study() -> Iterator[str]:
    best, large, small = (gain("images", "beta", f"SHD, beta {beta}", 0) for beta in ("0.1", "1", "0.01"))
    shares = [
        100 * float(row("images", "beta", f"SHD, beta {beta}")["gradient_share"]) for beta in ("0.1", "1", "0.01")
    ]
    yield f"0.1 ({n(shares[0])}% of the gradient) gained {best} points of accuracy"
    yield f"1 ({n(shares[1])}%) gained {large}"
    yield f"the gain of 0.01 ({n(shares[2], 1, bare=True)}%) was not significant ({small})"
    for label, words, digits in (
        ("SHD, beta 0.005, start squeezed", "0.005 ({}) gained {} nats", 1),
        ("SHD, beta 0.1, start squeezed", "0.1 ({}) harmed by {}", 0),
    ):
        figure = gain("language", "start", label, 4, bare=True).removeprefix("-")
        yield words.format(share(row("language", "start", label), digits), figure)
    label = "SHD, beta 0.02"
    figure = gain("language", "pretrained", label, 3, bare=True).removeprefix("-")
    yield f"0.02 ({share(row('language', 'pretrained', label))}) harmed by {figure}"
    assert all(
        float(row["gain"]) < float(row["gain_interval"])
        for row in rows("language")
        if (row["part"], row["method"]) == ("pretrained", "shd")
    )
    lasting = [gain("language", "pretrained_long", f"SHD, beta {beta}", 3, bare=True) for beta in ("0.02", "0.005")]
    yield f"steps 0.02 gained {lasting[0]} and 0.005 {lasting[1]}"


@on("docs/doctor.md")
def doctor_evidence() -> Iterator[str]:
    for task, part, suffix, name in (
        ("images", "beta", "", "digits, random start, 120 steps"),
        ("language", "rivals", "", "stories260K, random start, 200 steps"),
        ("language", "last", "", "stories260K, random start, 3,000 steps"),
        ("language", "pretrained", "", "stories260K, trained before, 300 steps"),
        ("language", "pretrained_same", "", "stories260K, trained before on the same windows, 300 steps"),
        ("language", "pretrained_long", "", "stories260K, trained before, 3,000 steps"),
        ("images", "pretrained", "", "digits, trained before, 300 steps"),
        ("instructions", "pretrained", "", "instructions, trained before, 300 steps"),
        ("language", "start", ", start squeezed", "stories260K, squeezed start, 150 steps"),
        ("language", "start", ", start kept", "stories260K, kept heads, 150 steps"),
        ("language", "last_start", "", "stories260K, squeezed start, 3,000 steps"),
        ("images", "start", ", start squeezed", "digits, squeezed start, 300 steps"),
    ):
        parts = (part, f"{part}_beta") if task == "images" else (part,)
        own = [row for row in rows(task) if row["part"] in parts and row["method"] == "shd"]
        own = sorted((row for row in own if row["label"].endswith(suffix) or row["part"] != part), key=beta_of)
        found = ", ".join(share(one, share_digits(one)) for one in own)
        tried = ", ".join(n(beta_of(one), 3, bare=True).rstrip("0").rstrip(".") for one in own)
        digits, unit = (4 if suffix or "pretrained" in part else 3, "nats") if task == "language" else (1, "points")
        gains = ", ".join(gain(task, one["part"], one["label"], digits, sign=True, bare=True) for one in own)
        yield f"| {name} | {own[0]['seeds']} | {found} (beta {tried}) | {gains} {unit}"
    small = gain("language", "start", "SHD, beta 0.005, start squeezed", 4, bare=True)
    yield f".005 gains {small} nats, .1 does harm; .02 not significant"


# Time, memory and bytes


def demo(table: str, name: str, labels: int, *, sign: bool = False) -> str:
    file = json.loads((ROOT / "docs" / "demo" / "results.json").read_text(encoding="utf-8"))
    (one,) = (row for row in file[table] if (row["name"], row["labels"]) == (name, labels))
    return f"{n(100 * one['mean'], 1, sign=sign)} ± {n(100 * one['interval'], 1)}"


@on("docs/demo/README.md")
def demo_tables() -> Iterator[str]:
    best = {50: "squeezed start: CE + KD + SHD", 300: "squeezed start: CE + KD"}
    for start, terms in itertools.product(("random", "squeezed"), ("CE", "CE + KD", "CE + KD + SHD")):
        name = f"{start} start: {terms}"
        bold = {labels: "**" * (best[labels] == name) for labels in best}
        cells = [f"{bold[labels]}{demo('accuracy', name, labels)}{bold[labels]}" for labels in best]
        yield f"| {name} | {cells[0]} | {cells[1]} |"
    starts = [f"adding SHD to KD, {start} start" for start in ("random", "squeezed")]
    for name in (*starts, "squeezed instead of random start, both with KD"):
        few, many = (demo("gain", name, labels, sign=True) for labels in (50, 300))
        yield f"| {name} | {few} | {many} |"


@on("docs/results.md")
def results_demo() -> Iterator[str]:
    yield f"({demo('gain', 'squeezed instead of random start, both with KD', 50)} points with 50 labels and KD)"
    harm = demo("gain", "adding SHD to KD, squeezed start", 300)
    yield f"harms a squeezed one by {harm.removeprefix('-')} points with 300 labels"


@on("docs/results.md")
def results_costs() -> Iterator[str]:
    teachers = load("squeeze_overhead.json")["teachers"]
    bert, gpt = (teachers[name]["12 -> 6, uint8"]["ratio"] for name in teachers)
    yield f"takes {n(bert, 2)} (MiniLM) to {n(gpt, 2)} (GPT-2 small) times as long as a plain onnxruntime"
    figures = load("precompute_overhead.json")["figures"]
    six, four, eager = (
        figures[name] for name in ("precompute 12 -> 6", "precompute 12 -> 4", "eager, all maps in float16")
    )
    low, high = (n(six[f"{end}_ratio"], 2) for end in ("lowest", "highest"))
    yield f"takes {n(six['ratio'], 2)} times ({low} to {high} in five rounds), and {n(four['ratio'], 2)}"
    for name, one in {
        "eager, all maps in float16": eager,
        "`shd precompute`, 12 to 6": six,
        "`shd precompute`, 12 to 4": four,
    }.items():
        yield f"| {name} | {n(one['ratio'], 2)} |"
        yield f"| {n(one['megabytes'])} |"
    cpu = load("attention_kl_cpu.json")
    long, memory = cpu["time"]["2048"], cpu["memory_megabytes"]
    cache = sorted(long[name]["ratio"] for name in ("cache, dense", "cache, sdpa"))
    yield f"takes {n(cache[0], 1)} to {n(cache[1], 1)} times as long with SHD from the cache as without"
    eager, compiled = (n(long[name]["ratio"], 1) for name in ("eager", "compiled"))
    yield f"{eager} times in eager PyTorch and {compiled} times compiled"
    yield f"about {n(memory['sdpa']['4096'])} MB at length 4096 and {n(memory['sdpa']['8192'])} MB at 8192;"
    yield f"the eager loss adds {n(memory['eager']['4096'])} MB at 4096"
    factors = sorted(long[f"queries and keys, {path}"]["ratio"] for path in ("dense", "sdpa"))
    yield f"From cached queries and keys it takes {n(factors[0], 1)} to {n(factors[1], 1)} times."
    short = cpu["time"]["512"]
    maps, cached = (
        sorted(short[name]["ratio"] for name in names)
        for names in (("eager", "compiled"), ("cache, dense", "cache, sdpa"))
    )
    yield f"{n(maps[0], 1)} to {n(maps[1], 1)} times, against {n(cached[0], 1)} to {n(cached[1], 1)} from the cache"
    whole = load("whole_cache.json")
    peaks = [whole[f"{count} samples"]["peak_megabytes"] for count in (1000, 10000)]
    yield f"take {n(whole['peak_ratio'], 2)} times the memory of 1,000, {n(peaks[1])} instead of {n(peaks[0])} MB"
    sources = load("precompute_memory.json")["megabytes"]
    most = max(sources[name]["ratio"] for name in ("npz", "parquet", "jsonl"))
    yield f"4,000 at most {n(most, 2)} times that of 400"


@on("docs/results.md")
def results_reading() -> Iterator[str]:
    plain = load("cache_read.json")["cases"]
    codes, maps = (sorted(case[kind]["ratio"] for case in plain) for kind in ("codes", "maps"))
    yield f"delivers checked codes {n(codes[0], 1)} to {n(codes[-1], 1)} times as fast as a memmap of float16 maps"
    full = {case["workers"]: case["codes"]["ratio"] for case in plain if case["support"] == "full"}
    yield f"with `sqrt8-row` {n(full[0], 1)} times for full maps without workers, {n(full[2], 1)} with two"
    yield f"leaves {n(maps[0], 2)} to {n(maps[-1], 2)} of the memmap's throughput"
    gigabytes = [
        load("teacher_length.json")["runs"]["factored"][str(length)]["gigabytes"] for length in (2048, 16384)
    ]
    yield f"takes {n(gigabytes[0], 2)} to {n(gigabytes[1], 2)} GB of memory for samples of 2,048 to 16,384 tokens"
    bytes_a_token = load("teacher_free.json")["stored"]["logits_bytes_a_token"]
    yield f"with the total of the others, take {n(bytes_a_token)} bytes per token"


@on("docs/results.md")
def results_indexer() -> Iterator[str]:
    file = load("indexer_kl_cpu.json")
    time, memory = file["time"]["4096"], file["memory_megabytes"]
    yield f"adds {n(memory['dense']['8192'])} MB at length 8192, and at 4096 takes {n(time['dense']['ratio'], 2)}"
    top = n(memory["top-k"]["8192"]), n(time["top-k"]["ratio"], 2)
    yield f"which adds {n(memory['maps']['4096'])} MB"
    yield f"; with a top-k of 512, {top[0]} MB and {top[1]} of that dense loss"


@on("docs/choose.md")
def choose_costs() -> Iterator[str]:
    for length, forms in load("factored_records.json")["lengths"].items():
        maps, factors = (
            forms[name]["bytes_a_sample"] / int(length) for name in ("maps, sqrt8-row", "factored, int8")
        )
        best = min(maps, factors)
        cells = [f"**{n(value)}**" if value == best else n(value) for value in (maps, factors)]
        yield f"| {length} | {cells[0]} | {cells[1]} |"
    codecs = {one["form"]: one for one in load("codec_rate.json")["full"]}
    for codec, name, digits in (("sqrt8-row", "`sqrt8-row` (default)", 1), ("u4", "`u4`", 0)):
        one, size = codecs[codec], {"u4": "1/2"}.get(codec, "1")
        yield f"| {name} | {size} | {n(100 * one['gradient_error'], digits)}% | {one['kl']:.0e} |".replace(
            "e-0", "e-"
        )
    targets = load("exact_targets.json")
    errors = [{one["way"]: one for one in targets["gradient"][classes]} for classes in ("512", "32000", "151936")]
    for way, name, digits in (
        ("exact float16", "exact, `float16`", (4, 4, 4)),
        ("exact int8", "exact, `int8`", (3, 3, 3)),
        ("top 32 with tail", "top 32 and the rest", (3, 3, 3)),
        ("top 128 with tail", "top 128 and the rest", (4, 3, 3)),
        ("whole float16", "whole, `float16`", (4, 4, 4)),
    ):
        values = [
            n(one[way]["gradient_error"], places, bare=True) for one, places in zip(errors, digits, strict=True)
        ]
        row = re.escape(f"| {name} | ") + r"[^|]*" + "".join(rf" \| \**{re.escape(value)}\**" for value in values)
        (line,) = re.findall(row, (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")) or [
            f"| {name} | {values}"
        ]
        yield line
    means, made, wide = (
        {one["way"]: n(one["mean"], 3) for one in targets["training"][classes]}
        for classes in ("512", "32000", "151936")
    )
    yield f"(KL from the teacher {means['live']}): top 32 at {means['top 32']}, `int8` at {means['exact int8']}."
    few = "whole float16, as many bytes"
    yield f"end at {means[few]}"
    for end, top, classes in ((made, 52, "32,000"), (wide, 46, "151,936")):
        own = [end[way] for way in ("exact float16", "whole float16", f"top {top}", "top 32", few)]
        yield f"| {classes} | {own[0]} | {own[1]} | {own[2]} (k = {top}) | {own[3]} | {own[4]} |"


@on("docs/teachers.md")
def teachers_lengths() -> Iterator[str]:
    runs = load("teacher_length.json")["runs"]
    whole_maps = runs["factored, whole maps"]
    lengths = "2048", "4096", "8192", "16384"
    for length in lengths:
        own, graph, torch = (runs[way][length] for way in ("factored", "graph alone", "PyTorch fused"))
        whole = f"{n(whole_maps[length]['gigabytes'], 2)} GB " if length in whole_maps else ""
        seconds = " | ".join(f"{n(row['seconds'], 2)} s" for row in (own, graph, torch))
        gigabytes = f"{n(own['gigabytes'], 2)} GB | {whole}| {n(torch['gigabytes'], 2)} GB"
        yield f"| {int(length):,} | {gigabytes} | {seconds} |"
    for way, said in (
        ("factored", "A sample takes {} to {} times as long"),
        ("graph alone", "alone takes {} to {} times"),
    ):
        ratios = [runs[way][length]["seconds"] / runs["PyTorch fused"][length]["seconds"] for length in lengths]
        yield said.format(n(min(ratios), 1), n(max(ratios), 1))
    short, long, whole = (
        n(runs[way][length]["gigabytes"], 2)
        for way, length in (("maps", "4096"), ("maps", "8192"), ("maps, whole maps", "4096"))
    )
    yield f"needs {short} GB at 4,096 tokens (whole maps {whole} GB) and {long} GB at 8,192"


@on("docs/training.md")
def training_long() -> Iterator[str]:
    runs = load("long_training.json")["runs"]
    steps = [n(runs[way][length]["gigabytes"], 2) for length in ("16384", "32768") for way in ("attention", "base")]
    yield f"a step of 16,384 tokens peaked at {steps[0]} GB, and without the term at {steps[1]} GB"
    yield f"of 32,768 tokens at {steps[2]} and {steps[3]} GB"
    exact = runs["exact"]["8192"]
    yield f"Exact targets of 8,192 tokens over 151,936 classes added {n(exact['gigabytes'] - exact['before'], 2)} GB"


def plain(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("page", "said"), [(page, said) for page in PAGES for said in PAGES[page]])
def test_the_page_has_the_figures_of_its_json(page: str, said: Callable[[], Iterator[str]]) -> None:
    text = plain((ROOT / page).read_text(encoding="utf-8"))
    absent = [sentence for sentence in map(plain, said()) if sentence not in text]
    assert not absent, f"{page} does not say: {absent}"


def test_rounding() -> None:
    assert n(1.095, 2) == "1.10"  # half up, although the binary number is smaller
    assert n(-0.0017, 3, sign=True, bare=True) == "-.002"
    assert n(1812.4) == "1,812"
    assert pm([0.1, 0.2, 0.3], 3, sign=True) == "+0.200 ± 0.248"
