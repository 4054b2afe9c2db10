"""The demo's pictures, each one question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure  # without pyplot: files, no window
from numpy.typing import NDArray

from shd_torch.demo.students import Method

COLORS: Final = {"CE": "#7f7f7f", "CE + KD": "#1f77b4", "CE + KD + SHD": "#d62728"}
"""By terms; a line of a random start is dashed."""
DPI: Final = 150

Panels = Sequence[tuple[str, NDArray[Any]]]
"""Titles, and the class token's attention to the patches, ``(heads, n, n)``."""


def draw_maps(images: Sequence[NDArray[Any]], lines: Sequence[Panels], path: Path) -> None:
    """Where the class token looks: for each image a line of the teacher's heads, and one of what was made of them.

    All maps have one scale of colours, from 0 to the largest entry, wider for the small ones.
    """
    largest = max(float(maps.max()) for line in lines for _, maps in line)
    count = max(sum(len(maps) for _, maps in line) for line in lines)
    scale = PowerNorm(0.4, 0, largest)  # or a head that looks at one patch would leave the others black
    figure = Figure((1.1 * (count + 1), 1.25 * len(lines)), DPI, layout="constrained")
    axes = figure.subplots(len(lines), count + 1, squeeze=False)
    drawn: Any = None
    for number, (row, line) in enumerate(zip(axes, lines, strict=True)):
        for axis in row:
            axis.set_axis_off()
        if number % 2 == 0:
            row[0].imshow(1 - images[number // 2], cmap="gray", vmin=0, vmax=1)
        column = 1
        for title, maps in line:
            row[column].set_title(title, fontsize=8, pad=3, loc="left")
            for attention in maps:
                drawn = row[column].imshow(attention, cmap="magma", norm=scale)
                column += 1
    figure.colorbar(drawn, ax=axes, label="attention", fraction=0.02)
    figure.savefig(path)


def draw_alphas(alphas: NDArray[Any], titles: Sequence[str], labels: Sequence[Sequence[str]], path: Path) -> None:
    """How alphas ``(N, layers, pairs)``, before clipping, spread over samples; ``labels`` name each pair."""
    figure = Figure((4.6 * len(titles), 3.2), DPI, layout="tight")
    axes = figure.subplots(1, len(titles), sharey=True, squeeze=False)
    for layer, (axis, title) in enumerate(zip(axes[0], titles, strict=True)):
        axis.axhspan(0, 1, color="#f2f2f2", zorder=0)
        axis.axhline(0.5, color="#999999", linewidth=0.8, linestyle="--", zorder=1)
        fliers = {"markersize": 2, "alpha": 0.3}
        axis.boxplot(alphas[:, layer], tick_labels=list(labels[layer]), widths=0.6, flierprops=fliers)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("merged teacher heads")
    axes[0][0].set_ylabel("alpha (weight of the first)")
    figure.savefig(path)


def draw_losses(curves: Mapping[str, Mapping[Method, NDArray[Any]]], path: Path) -> None:
    """Loss terms by step: title of the term -> method -> ``(points, 2)``, steps and means over seeds."""
    figure = Figure((4.0 * len(curves), 3.2), DPI)
    axes = figure.subplots(1, len(curves), squeeze=False)
    for axis, (title, methods) in zip(axes[0], curves.items(), strict=True):
        for method, points in methods.items():
            axis.plot(points[:, 0], points[:, 1], **_line(method))
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step")
        axis.set_yscale("log")
    axes[0][0].set_ylabel("nats")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path)


def draw_accuracy(rows: Mapping[Method, Sequence[Mapping[str, Any]]], lines: Mapping[str, float], path: Path) -> None:
    """Test accuracy against the number of labelled images, with 95% intervals over seeds, beside lines by name."""
    figure = Figure((6.4, 4.0), DPI, layout="tight")
    axis = figure.subplots()
    counts = sorted({row["labels"] for chosen in rows.values() for row in chosen})
    for number, (method, chosen) in enumerate(rows.items()):
        at = [counts.index(row["labels"]) + 0.05 * (number - (len(rows) - 1) / 2) for row in chosen]
        mean = [100 * row["mean"] for row in chosen]
        spread = [100 * (row["interval"] or 0.0) for row in chosen]
        axis.errorbar(at, mean, yerr=spread, marker="o", markersize=4, capsize=2, **_line(method))
    for (name, accuracy), style in zip(lines.items(), (":", "-."), strict=True):
        axis.axhline(100 * accuracy, color="black", linewidth=0.8, linestyle=style, label=name)
    axis.set_xticks(range(len(counts)), [str(count) for count in counts])
    axis.set_xlabel("labelled images")
    axis.set_ylabel("test accuracy, % (mean, 95% interval)")
    axis.legend(fontsize=7, frameon=False, loc="lower right")
    figure.savefig(path)


def _line(method: Method) -> dict[str, Any]:
    style = "--" if method.start == "random" else "-"
    label = f"{method.start}: {method.terms}"
    return {"label": label, "color": COLORS[method.terms], "linewidth": 1.2, "linestyle": style}
