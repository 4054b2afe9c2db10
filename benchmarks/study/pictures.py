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

from benchmarks.study.analysis import Row, can_compare, name_method
from benchmarks.study.arms import Grid
from benchmarks.study.runs import Record


def draw_all(rows: Sequence[Row], grid: Grid, record: Record, folder: Path) -> None:
    """Gains with their intervals, and curves where they were measured."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_gains(rows, folder / f"{grid.task}-gains.png")
    draw_curves(grid, record, folder / f"{grid.task}-curves.png")


def draw_gains(rows: Sequence[Row], path: Path) -> None:
    """A dot with its interval for each arm of the chosen beta, part after part."""
    own = _once(rows)
    if not own:
        return
    figure, axis = plt.subplots(figsize=(7.2, 0.8 + 0.24 * len(own)), layout="constrained")
    colors = plt.get_cmap("tab10")
    parts = list(dict.fromkeys(row.part for row in own))
    scale = 100 if own[0].metric in ("accuracy", "rouge_l") else 1
    for place, row in enumerate(own):
        half = 0.0 if math.isnan(row.gain_interval) else scale * row.gain_interval
        color = colors(parts.index(row.part) % 10)
        axis.errorbar(scale * row.gain, place, xerr=half, marker="o", markersize=4, capsize=2, color=color)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(own)), [f"{row.part}: {row.label}" for row in own], fontsize=7)
    axis.set_ylim(len(own) - 0.5, -0.5)
    unit = "points" if scale == 100 else "nats a token" if own[0].metric == "loss" else own[0].metric
    axis.set_xlabel(f"gain over the base loss alone, {unit} (95% interval)", fontsize=8)
    axis.grid(axis="x", linewidth=0.4, alpha=0.5)
    _save(figure, path)


def _once(rows: Sequence[Row]) -> list[Row]:
    """Gains of the chosen betas; an arm that several parts ask for has its first label."""
    found: dict[tuple[str, float, str, float], Row] = {}
    for row in rows:
        if row.is_chosen and not math.isnan(row.gain):
            found.setdefault((row.method, row.beta, row.options, row.test), row)
    return list(found.values())


def draw_curves(grid: Grid, record: Record, path: Path) -> None:
    """The test figure by step, mean over seeds, where runs were evaluated on the way."""
    figure, axis = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    drawn = 0
    for arm in grid.arms:
        runs = [run for seed in range(arm.seeds) if (run := record.found.get(arm.key(seed)))]
        if arm.part not in ("beta", "start") or not runs or len(runs[0]["curve"]) < 3 or "test_accuracy" in runs[0]:
            continue
        if not all(can_compare(grid, record, arm, run["seed"]) for run in runs):
            continue
        steps = sorted({int(step) for step in runs[0]["curve"]} - {0})
        metric = "loss"
        means = [sum(run["curve"][str(step)][f"test_{metric}"] for run in runs) / len(runs) for step in steps]
        start = arm.options.get("start", "random")
        style = {"random": ":", "kept": "--", "unaligned kept": "-.", "squeezed": "-"}[start]
        axis.plot(steps, means, style, marker="o", markersize=2.5, label=f"{start}: {name_method(arm)}")
        drawn += 1
    if drawn:
        axis.set_xscale("log")
        axis.set_xticks(steps, [str(step) for step in steps])
        axis.minorticks_off()
        axis.set_xlabel("step")
        axis.set_ylabel("test loss, nats")
        axis.legend(fontsize=6, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        _save(figure, path)
    plt.close(figure)


UNITS = {"loss": ("nats a token", 1), "spearman": ("rank correlation with people", 1), "accuracy": ("points", 100)}


def draw_dozen(compared: Mapping[str, Any], path: Path) -> None:
    """Gains of the dozen with their intervals, at equal steps and at equal time, a panel for each unit."""
    groups = {
        measure: [one for one in compared.values() if one["measure"] == measure]
        for measure in UNITS
        if any(one["measure"] == measure for one in compared.values())
    }
    sizes = [len(own) + 1 for own in groups.values()]
    shape = {"height_ratios": sizes, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(len(groups), 1, figsize=(7.6, 0.42 * sum(sizes) + 0.5), **shape)
    for axis, (measure, own) in zip(axes[:, 0], groups.items(), strict=True):
        unit, scale = UNITS[measure]
        for kind, shift, fill in (("equal steps", -0.13, "full"), ("equal time", 0.13, "none")):
            means, halves = ([scale * one[kind][name] for one in own] for name in ("mean", "half"))
            places = [place + shift for place in range(len(own))]
            style: dict[str, Any] = {
                "fmt": "o",
                "markersize": 5,
                "capsize": 2,
                "fillstyle": fill,
                "color": "tab:blue",
            }
            axis.errorbar(means, places, xerr=halves, label=f"at {kind}", **style)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(own)), [one["question"] for one in own], fontsize=8)
        axis.set_ylim(len(own) - 0.5, -0.5)
        axis.set_xlabel(f"gain, {unit} (95% interval of six seeds)", fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(axis="x", linewidth=0.4, alpha=0.5)
    axes[0, 0].legend(fontsize=8, frameon=False)
    _save(figure, path)


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
