"""From runs to figures: means with 95% t intervals, and differences from the base loss alone, paired by seed.

Two runs are compared only if they started from the same weights. P values of paired t tests are adjusted over all
comparisons of all tasks, as Holm (chance of any false one) and Benjamini and Hochberg (share of false ones) do.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks.study.arms import ALONE, Arm, Grid, read_grid
from benchmarks.study.origin import ORIGIN
from benchmarks.study.runs import Record

COLUMNS = ("gain", "over_shd", "over_start")
"""What an arm is compared with; each has an interval and P values."""
BEFORE = {"squeezed": "kept", "kept": "unaligned kept"}


@dataclass(frozen=True)
class Row:
    """An arm over its seeds. Intervals are half widths at 95%, NaN for one seed.

    Attributes:
        task: name of the grid.
        part: of the grid.
        label: what tells the arm from others of its part.
        method: a rival's name, or ``base``.
        beta: of the arm.
        options: all other options that its part varies.
        seeds: how many were run.
        metric: what ``valid``, ``test`` and ``gain`` are figures of.
        valid: mean on samples of validation, by which beta may be chosen.
        test: mean on other samples.
        test_interval: of it.
        gain: by how much ``test`` is better than that of the base loss alone, from the same start and on the same
            data; mean of differences by seed. NaN where there is none to compare with.
        gain_interval: of it.
        gain_p: of a t test of these differences; ``gain_holm`` and ``gain_bh`` adjusted, by ``compare_all`` alone.
        over_shd: the same over SHD as its source has it (adjacent pairs, an alpha a map), at this beta where there is
            such an arm, else at the first beta of the grid; for a chosen beta, over the beta that is chosen for SHD
            in the same part. NaN for SHD itself and for the base loss alone.
        over_shd_interval: of it.
        over_shd_p: like ``gain_p``; so are ``over_shd_holm`` and ``over_shd_bh``.
        over_start: by how much ``test`` is better than that of the same arm from the start before: aligned kept heads
            over unaligned ones (which is what alignment adds), squeezed heads over aligned kept ones (merging).
        over_start_interval: of it.
        over_start_p: like ``gain_p``; so are ``over_start_holm`` and ``over_start_bh``.
        is_chosen: whether this beta has the best ``valid`` of its method and options.
        step_seconds: processor time of a training step without the teacher's pass, median.
        sample_bytes: what of the teacher a sample's loss reads, in half precision.
        parameter_bytes: that are trained beside the student and thrown away.
        gradient_share: of the whole gradient's norm at the first step.
    """

    task: str
    part: str
    label: str
    method: str
    beta: float
    options: str
    seeds: int
    metric: str
    valid: float
    test: float
    test_interval: float
    gain: float
    gain_interval: float
    over_shd: float
    over_shd_interval: float
    is_chosen: bool
    step_seconds: float
    sample_bytes: float
    parameter_bytes: float
    gradient_share: float
    gain_p: float = math.nan
    gain_holm: float = math.nan
    gain_bh: float = math.nan
    over_shd_p: float = math.nan
    over_shd_holm: float = math.nan
    over_shd_bh: float = math.nan
    over_start: float = math.nan
    over_start_interval: float = math.nan
    over_start_p: float = math.nan
    over_start_holm: float = math.nan
    over_start_bh: float = math.nan


def compare(grid: Grid, record: Record) -> list[Row]:
    """One row an arm that was run with any seed, part after part."""
    summaries = []
    for arm in grid.arms:
        runs = {seed: run for seed in range(arm.seeds) if (run := record.found.get(arm.key(seed))) is not None}
        if runs:
            summaries.append((arm, runs, _summarise(grid, record, arm, runs)))
    best: dict[Any, tuple[Arm, Row]] = {}
    for arm, _, row in summaries:
        key = (row.part, row.method, row.options)
        if key not in best or _rank(row) > _rank(best[key][1]):
            best[key] = arm, row
    rows = []
    for arm, runs, row in summaries:
        is_chosen = row is best[row.part, row.method, row.options][1]
        shd = best.get((row.part, "shd", row.options))
        if is_chosen and shd is not None and arm.method not in (ALONE, "shd"):
            row = replace(row, **_describe("over_shd", _gains(record, arm, runs, shd[0], row.metric)))
        rows.append(replace(row, is_chosen=is_chosen))
    return rows


def _rank(row: Row) -> tuple[bool, float]:
    """Betas are chosen among those that can be compared with the base loss alone."""
    return not math.isnan(row.gain), row.valid if _is_higher_better(row.metric) else -row.valid


def compare_all(tasks: Sequence[str], record: Record, preset: str | None = None) -> dict[str, list[Row]]:
    """The rows of these tasks, with P values adjusted over all comparisons; one that two parts make counts once."""
    found = {task: compare(read_grid(task, preset), record) for task in tasks}
    columns = COLUMNS

    def key(row: Row, column: str) -> tuple[Any, ...]:
        return row.task, getattr(row, column), getattr(row, f"{column}_p")

    keys = {key(row, column) for rows in found.values() for row in rows for column in columns}
    tested = [one for one in sorted(keys, key=str) if not math.isnan(one[2])]
    adjusted = dict(zip(tested, adjust([one[2] for one in tested]), strict=True))
    for task, rows in found.items():
        for place, row in enumerate(rows):
            for column in columns:
                if key(row, column) in adjusted:
                    holm, bh = adjusted[key(row, column)]
                    more: dict[str, Any] = {f"{column}_holm": holm, f"{column}_bh": bh}
                    rows[place] = row = replace(row, **more)
        found[task] = rows
    return found


def count_comparisons(found: Mapping[str, Sequence[Row]]) -> int:
    """Over how many different comparisons ``compare_all`` adjusted."""
    rows = [row for own in found.values() for row in own]
    values = {(row.task, getattr(row, name), getattr(row, f"{name}_p")) for row in rows for name in COLUMNS}
    return sum(not math.isnan(p) for _, _, p in values)


def adjust(values: Sequence[float]) -> list[tuple[float, float]]:
    """P values after Holm, and after Benjamini and Hochberg."""
    if not values:
        return []
    p = np.asarray(values)
    order = np.argsort(p, kind="stable")
    holm = np.empty(len(p))
    holm[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return [(float(one), float(other)) for one, other in zip(holm, stats.false_discovery_control(p), strict=True)]


def _is_higher_better(metric: str) -> bool:
    return metric in ("accuracy", "rouge_l")


def _summarise(grid: Grid, record: Record, arm: Arm, runs: dict[int, dict[str, Any]]) -> Row:
    metric = next(name for name in ("accuracy", "rouge_l", "distance", "loss") if f"test_{name}" in runs[min(runs)])
    gains = _gains(record, arm, runs, _find_alone(grid, arm), metric)
    over_shd = [] if arm.method == ALONE else _gains(record, arm, runs, _find_shd(grid, arm), metric)
    over_start = _gains(record, arm, runs, _find_start(grid, arm), metric)
    varied = {
        name: value
        for name, value in arm.options.items()
        if name not in ("method", "beta") and any(o.options.get(name) != value for o in grid.arms)
    }
    options = ", ".join(f"{name}={value}" for name, value in varied.items())
    own = _own_options(grid, arm)
    tests = [run[f"test_{metric}"] for run in runs.values()]

    def mean(name: str) -> float:
        return float(np.mean([run[name] for run in runs.values()]))

    return Row(
        task=arm.task,
        part=arm.part,
        label=", ".join([name_method(arm), *own]),
        method=arm.method,
        beta=float(arm.options["beta"]),
        options=options,
        seeds=len(runs),
        metric=metric,
        valid=mean(f"valid_{metric}"),
        test=float(np.mean(tests)),
        test_interval=half_interval(tests),
        **_describe("gain", gains),
        **_describe("over_shd", over_shd),
        **_describe("over_start", over_start),
        is_chosen=False,
        step_seconds=mean("step_seconds"),
        sample_bytes=mean("sample_bytes"),
        parameter_bytes=mean("parameter_bytes"),
        gradient_share=float(np.mean([run["gradient_share"].get("first", 0.0) for run in runs.values()])),
    )


def _describe(column: str, gains: Sequence[float]) -> dict[str, Any]:
    """The fields of ``Row`` that a comparison fills."""
    mean = float(np.mean(gains)) if gains else math.nan
    return {column: mean, f"{column}_interval": half_interval(gains), f"{column}_p": p_value(gains)}


def _gains(record: Record, arm: Arm, runs: dict[int, dict[str, Any]], other: Arm | None, metric: str) -> list[float]:
    """By how much an arm is better than another, seed by seed, where the two differ in what is asked alone."""
    if other is None or other == arm:
        return []
    is_pair = _is_same_start if arm.options.get("start") == other.options.get("start") else has_same_origin
    sign = 1 if _is_higher_better(metric) else -1
    pairs = [(run, record.found.get(other.key(seed))) for seed, run in runs.items()]
    name = f"test_{metric}"
    return [sign * (run[name] - there[name]) for run, there in pairs if there and is_pair(run, there)]


def _is_same_start(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Runs from before fingerprints have none, or the name of the version of ``shrink`` that made their start."""
    return bool(run.get("start") == other.get("start")) and has_same_origin(run, other)


def has_same_origin(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether data, teacher, code and processor are the same, as far as both runs have stored them."""
    return all(run[name] == other[name] for name in ORIGIN if name in run and name in other)


def stale_runs(grid: Grid, record: Record) -> list[tuple[Arm, int]]:
    """Runs to train again, an arm and its base loss alone.

    They did not start from the same weights, or from some that are known only by the version that made them.
    """
    again = {}
    for arm, seed in grid.runs():
        run, base = record.found.get(arm.key(seed)), _find_alone(grid, arm)
        if run and base and (not can_compare(grid, record, arm, seed) or " " in str(run.get("start", ""))):
            again |= {arm.key(seed): (arm, seed), base.key(seed): (base, seed)}
    return list(again.values())


def can_compare(grid: Grid, record: Record, arm: Arm, seed: int) -> bool:
    """Whether a run started from the weights of its base loss alone, or that was not run."""
    base = _find_alone(grid, arm)
    other = None if base is None else record.found.get(base.key(seed))
    return other is None or _is_same_start(record.found[arm.key(seed)], other)


def _find_shd(grid: Grid, arm: Arm) -> Arm | None:
    """SHD as its source has it, from the same start and on the same data."""
    plain = {"method": "shd", "plan": "progressive", "alpha_per": "map", "temperature": 1.0}
    wanted = {name: plain.get(name, value) for name, value in arm.options.items() if name != "beta"}
    if wanted == {name: value for name, value in arm.options.items() if name != "beta"}:
        return None
    found = [
        other
        for other in grid.arms
        if other.settings == arm.settings and {n: v for n, v in other.options.items() if n != "beta"} == wanted
    ]
    same = [other for other in found if other.options["beta"] == arm.options["beta"]]
    return next(iter([*same, *found]), None)


def _find_start(grid: Grid, arm: Arm) -> Arm | None:
    """The same arm from the start before its own."""
    wanted = arm.options | {"start": BEFORE.get(arm.options.get("start", ""), "")}
    return next((other for other in grid.arms if (other.options, other.settings) == (wanted, arm.settings)), None)


def _find_alone(grid: Grid, arm: Arm) -> Arm | None:
    """The arm with the same base loss, start and data, and nothing beside it."""
    own = [arm.options[name] for name in grid.base_options]
    alone = (other for other in grid.arms if other.method == ALONE and other.settings == arm.settings)
    return next((other for other in alone if [other.options[name] for name in grid.base_options] == own), None)


def _own_options(grid: Grid, arm: Arm) -> list[str]:
    """Options that differ from one arm to another within the part."""
    same = [other for other in grid.arms if other.part == arm.part]
    own = {n: v for n, v in arm.options.items() if n not in ("method", "beta")}
    return [f"{n} {v}" for n, v in own.items() if len({str(other.options.get(n, v)) for other in same}) > 1]


_UNITS = {"accuracy": "accuracy, %", "rouge_l": "Rouge-L, %", "loss": "loss, nats", "distance": "Frechet distance"}
_NAMES = {ALONE: "base loss alone", "shd": "SHD", "as_printed": "alpha as printed", "mse": "MSE of maps", "js": "JS"}


def name_method(arm: Arm) -> str:
    """As people say it, with beta where there is one."""
    name = _NAMES.get(arm.method, arm.method.replace("_", " "))
    has_beta = arm.method != ALONE and arm.options["beta"] > 0
    return f"{name}, beta {arm.options['beta']:g}" if has_beta else name


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95% t interval of a mean; NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def paired_gain(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """The second's mean ``gain`` over the first, seed by seed, with ``half`` of its 95% interval."""
    gains = [b - a for a, b in zip(first, second, strict=True)]
    return {"gain": statistics.fmean(gains), "half": half_interval(gains)}


def p_value(values: Sequence[float]) -> float:
    """Of a two-sided t test that the mean is 0; NaN for fewer than two values, or for equal ones."""
    if len(values) < 2 or np.ptp(values) == 0:
        return math.nan
    return float(stats.ttest_1samp(values, 0.0).pvalue)


def write_table(rows: Sequence[Row], path: Path) -> None:
    """One line an arm."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(row).items()})


def print_tables(rows: Sequence[Row], grid: Grid, console: Console) -> None:
    """A table a part."""
    for title, lines in _tables(rows, grid):
        table = Table(title=title, title_justify="left")
        for column in lines[0]:
            table.add_column(column, justify="left" if column == "arm" else "right")
        for line in lines[1:]:
            table.add_row(*line)
        console.print(table)


def _tables(rows: Sequence[Row], grid: Grid) -> Iterator[tuple[str, list[list[str]]]]:
    """Title, and lines of cells, of each part that was run; the first line is the head."""
    for part, question in grid.questions.items():
        own = [row for row in rows if row.part == part]
        if own:
            head = ["arm", "seeds", f"test {_UNITS.get(own[0].metric, own[0].metric)}", "gain over base", P_VALUES]
            more = ["over SHD", P_VALUES, *(["over start before", P_VALUES] if _has_starts(own) else [])]
            last = ["share", "ms per step", "kB per sample"]
            yield f"{part}: {question}", [[*head, *more, *last], *(cells(row, _has_starts(own)) for row in own)]


def _has_starts(rows: Sequence[Row]) -> bool:
    return any(not math.isnan(row.over_start) for row in rows)


P_VALUES = "p (Holm, BH)"


def cells(row: Row, has_starts: bool) -> list[str]:
    """A row as it is printed, with or without a comparison of starts."""
    scale, form = (100, ".2f") if _is_higher_better(row.metric) else (1, ".4f")

    def signed(value: float, half: float) -> str:
        return "" if math.isnan(value) else f"{scale * value:+{form}} ± {scale * half:{form}}"

    def chances(p: float, holm: float, bh: float) -> str:
        return "" if math.isnan(p) else f"{p:.2g} ({holm:.2g}, {bh:.2g})"

    starts = chances(row.over_start_p, row.over_start_holm, row.over_start_bh)
    return [
        row.label,
        str(row.seeds),
        f"{scale * row.test:{form}} ± {scale * row.test_interval:{form}}",
        signed(row.gain, row.gain_interval),
        chances(row.gain_p, row.gain_holm, row.gain_bh),
        signed(row.over_shd, row.over_shd_interval),
        chances(row.over_shd_p, row.over_shd_holm, row.over_shd_bh),
        *((signed(row.over_start, row.over_start_interval), starts) if has_starts else ()),
        f"{row.gradient_share:.2f}" if row.gradient_share else "",
        f"{1e3 * row.step_seconds:.0f}",
        f"{row.sample_bytes / 1e3:.0f}",
    ]
