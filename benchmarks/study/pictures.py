"""Pictures of the study, each one question."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files, no window

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.card import Card
from benchmarks.study.analysis import Row, can_compare
from benchmarks.study.arms import Grid
from benchmarks.study.runs import Record

KINDS = ("equal steps", "equal time")


def draw_all(rows: Sequence[Row], grid: Grid, record: Record, folder: Path) -> None:
    """Gains with their intervals, and curves where they were measured."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_gains(rows, folder / f"{grid.task}-gains.svg")
    draw_curves(grid, record, folder / f"{grid.task}-curves.svg")


def draw_gains(rows: Sequence[Row], path: Path) -> None:
    """A dot with its interval for each arm of the chosen beta, part after part."""
    own = _once(rows)
    if not own:
        return
    scale, digits = (100, 1) if own[0].metric in ("accuracy", "rouge_l") else (1, 3)
    unit = "points" if scale == 100 else "nats per token" if own[0].metric == "loss" else own[0].metric
    halves = [0.0 if math.isnan(row.gain_interval) else scale * row.gain_interval for row in own]
    low = min(0.0, *(scale * row.gain - half for row, half in zip(own, halves, strict=True)))
    high = max(0.0, *(scale * row.gain + half for row, half in zip(own, halves, strict=True)))
    card = Card("Gains over the base loss alone, with 95% intervals")
    card.text(24, 36, f"Gain over the base loss alone, {unit}", "head")
    card.text(24, 60, "bars: 95% intervals, unadjusted", "soft")
    y, part = 70.0, ""
    for row, half in zip(own, halves, strict=True):
        if row.part != part:
            part = row.part
            card.text(24, y + 24, part.replace("_", " "), "strong")
            y += 28
        y = card.lines(24, y + 18, row.label, 56, "soft", 19)
        mean, color = scale * row.gain, "grey"
        if abs(mean) > half > 0:
            color = "green" if mean > 0 else "orange"
        _draw_interval(card, y - 4, (low, high), mean, half, color)
        card.text(card.width - 24, y + 2, f"{mean:+.{digits}f}", "soft", "end")
        y += 14
    card.save(path, y + 10)


def _draw_interval(
    card: Card, y: float, span: tuple[float, float], mean: float, half: float, color: str, is_open: bool = False
) -> None:
    """A dot with its interval and where zero is, in the scale of ``span``."""

    def place(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * (value - span[0]) / (span[1] - span[0])

    card.line((place(0.0), y - 11), (place(0.0), y + 11))
    card.box(place(mean - half), y - 1.5, place(mean + half) - place(mean - half), 3, color, 1)
    card.dot(place(mean), y, color, is_open)


def _once(rows: Sequence[Row]) -> list[Row]:
    """Gains of the chosen betas; an arm that several parts ask for has its first label."""
    found: dict[tuple[str, float, str, float], Row] = {}
    for row in rows:
        if row.is_chosen and not math.isnan(row.gain):
            found.setdefault((row.method, row.beta, row.options, row.test), row)
    return list(found.values())


COLORS = {"random": "grey", "kept": "orange", "unaligned kept": "blue", "squeezed": "green"}


def draw_curves(grid: Grid, record: Record, path: Path) -> None:
    """The test loss by step, mean over seeds, where runs were evaluated on the way; with SHD dashed."""
    curves, names = [], {}
    for arm in grid.arms:
        runs = [run for seed in range(arm.seeds) if (run := record.found.get(arm.key(seed)))]
        if arm.part not in ("beta", "start") or not runs or len(runs[0]["curve"]) < 3 or "test_accuracy" in runs[0]:
            continue
        if not all(can_compare(grid, record, arm, run["seed"]) for run in runs):
            continue
        steps = sorted({int(step) for step in runs[0]["curve"]} - {0})
        means = [sum(run["curve"][str(step)]["test_loss"] for run in runs) / len(runs) for step in steps]
        start = arm.options.get("start", "random")
        color = COLORS[start] + " dashed" * (arm.options["method"] != "base")
        curves.append((list(zip(map(float, steps), means, strict=True)), color))
        names[color] = f"{start}, {'SHD at several betas' if 'dashed' in color else 'base loss alone'}"
    if not curves:
        return
    card = Card("Test loss by training step, for each start, with and without SHD")
    card.text(24, 36, "Test loss, nats, by training step", "head")
    losses = [loss for points, _ in curves for _, loss in points]
    low, high = math.floor(2 * min(losses)) / 2, math.ceil(2 * max(losses)) / 2
    ticks = [low + 0.5 * number for number in range(round(2 * (high - low)) + 1)]
    y = card.chart(58, curves, [step for step, _ in curves[0][0]], ticks, is_log=False)
    card.save(path, card.legend(y + 24, [(name, color) for color, name in names.items()]))


UNITS = {
    "loss": ("nats per token", 1, 3),
    "accuracy": ("points of accuracy", 100, 1),
    "spearman": ("rank correlation with people", 1, 3),
}
LEFT, RIGHT = 24, 366  # where intervals are drawn; their means stand right of it


def draw_dozen(compared: Mapping[str, Any], path: Path) -> None:
    """Gains of the dozen with their intervals, at equal steps and at equal time, in a scale for each unit."""
    card = Card("Gains over a tuned baseline, after as many steps and after as much time, with 95% intervals")
    card.text(24, 38, "Gain over a tuned baseline", "head")
    card.dot(31, 62, "grey")
    card.text(44, 68, "same steps")
    card.dot(151, 62, "grey", is_open=True)
    card.text(164, 68, "same processor time")
    card.text(24, 92, "bars: 95% intervals, six paired seeds", "soft")
    for x, kind, words in (
        (24, "green", "better"),
        (100, "orange", "worse"),
        (168, "soft", "not significant (Holm)"),
    ):
        card.text(x, 116, words, f"strong {kind}" if kind != "soft" else kind)
    y = 134.0
    for measure, (unit, scale, digits) in UNITS.items():
        own = [one for one in compared.values() if one["measure"] == measure]
        if own:
            y = _draw_unit(card, own, y, unit, scale, digits)
    card.save(path, y + 6)


def _draw_unit(card: Card, own: Sequence[Mapping[str, Any]], y: float, unit: str, scale: int, digits: int) -> float:
    ends = [
        scale * (one[kind]["mean"] + sign * one[kind]["half"]) for one in own for kind in KINDS for sign in (-1, 1)
    ]
    low, high = min(*ends, 0.0), max(*ends, 0.0)

    card.line((24, y), (card.width - 24, y), kind="axis")
    card.text(24, y + 26, unit, "strong")
    y += 30
    for one in own:
        y = card.lines(24, y + 22, one["question"], 50)
        for kind in KINDS:
            row = one[kind]
            mean, half = scale * row["mean"], scale * row["half"]
            color = "grey" if row["holm"] >= 0.05 else "green" if mean > 0 else "orange"
            _draw_interval(card, y, (low, high), mean, half, color, is_open=kind == "equal time")
            card.text(card.width - 24, y + 6, f"{mean:+.{digits}f}", "soft" if color == "grey" else color, "end")
            y += 24
    return y + 8


def draw_maps(image: NDArray[Any], rows: Sequence[tuple[str, NDArray[Any]]], path: Path) -> None:
    """Where the class token looks: a line of maps a model, all in one scale of colours.

    Args:
        image: ``(H, W)`` in [0, 1].
        rows: title and maps ``(heads, n, n)``.
        path: of the png.
    """
    count, largest = max(len(maps) for _, maps in rows), max(float(maps.max()) for _, maps in rows)
    size = (1.1 * (count + 1), 1.25 * len(rows))
    figure, axes = plt.subplots(len(rows), count + 1, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for line, (title, maps) in zip(axes, rows, strict=True):
        line[0].imshow(1 - image, cmap="gray", vmin=0, vmax=1)
        line[0].set_title(title, fontsize=7, pad=2)
        for head, (axis, attention) in enumerate(zip(line[1:], maps, strict=False)):
            axis.imshow(attention, cmap="magma", vmin=0, vmax=largest)
            axis.set_title(f"head {head}", fontsize=6, pad=2)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)
