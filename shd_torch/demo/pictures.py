"""The demo's pictures, each one question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from numpy.typing import NDArray

mpl.use("Agg")  # files, no window

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

COLORS: Final = {"CE": "#7f7f7f", "CE + KD": "#1f77b4", "CE + KD + SHD": "#d62728"}
"""By terms; a line of a random start is dashed."""
_GAP: Final = 0.2
"""Behind each pair of maps, in widths of one."""

Panels = Sequence[tuple[str, NDArray[Any]]]
"""Titles, and the class token's attention to the patches, ``(heads, n, n)``."""


def draw_maps(images: Sequence[NDArray[Any]], rows: Sequence[tuple[Panels, Panels]], path: Path) -> None:
    """Where the class token looks: for each image the teacher's heads, and below them what was made of them.

    All maps have one scale of colours, from 0 to the largest entry, wider for the small ones.

    Args:
        images: ``(H, W)`` in [0, 1].
        rows: for each image its two lines of panels, of equally many maps.
        path: of the png.
    """
    lines = [line for pair in rows for line in pair]
    largest = max(float(maps.max()) for line in lines for _, maps in line)
    count = max(sum(len(maps) for _, maps in line) for line in lines)
    scale = PowerNorm(0.4, 0, largest)  # or a head that looks at one patch would leave the others black
    # In widths of a map: the image, the maps with a gap behind each pair, and the bar.
    width, height = 1.3 + count + _GAP * (count // 2) + 0.5, 1.24 * len(lines)
    figure = plt.figure(figsize=(width, height))

    def axis_at(left: float, bottom: float, size: float) -> Axes:
        axis = figure.add_axes((left / width, bottom / height, size / width, size / height))
        axis.set_xticks([])
        axis.set_yticks([])
        return axis

    drawn: Any = None
    for number, line in enumerate(lines):
        bottom = height - 1.24 * (number + 1) + 0.03
        if number % 2 == 0:
            axis_at(0.1, bottom - 0.62, 1.0).imshow(1 - images[number // 2], cmap="gray", vmin=0, vmax=1)
        column = 0
        for title, maps in line:
            for head, attention in enumerate(maps):
                axis = axis_at(1.3 + column + _GAP * (column // 2), bottom, 0.95)
                drawn = axis.imshow(attention, cmap="magma", norm=scale)
                if head == 0:
                    axis.set_title(title, fontsize=8, pad=3, loc="left")
                column += 1
    bar = figure.add_axes(((width - 0.55) / width, 0.2, 0.13 / width, 0.6))
    figure.colorbar(drawn, cax=bar)
    bar.tick_params(labelsize=7)
    bar.set_title("attention", fontsize=7)
    _save(figure, path)


def draw_alphas(alphas: NDArray[Any], titles: Sequence[str], labels: Sequence[Sequence[str]], path: Path) -> None:
    """How alphas spread over samples, layer by layer.

    Args:
        alphas: ``(N, layers, pairs)``, before clipping.
        titles: of the layers.
        labels: by layer what each pair merges.
        path: of the png.
    """
    figure, axes = plt.subplots(1, len(titles), figsize=(4.6 * len(titles), 3.2), sharey=True, squeeze=False)
    for layer, (axis, title) in enumerate(zip(axes[0], titles, strict=True)):
        axis.axhspan(0, 1, color="#f2f2f2", zorder=0)
        axis.axhline(0.5, color="#999999", linewidth=0.8, linestyle="--", zorder=1)
        fliers = {"markersize": 2, "alpha": 0.3}
        axis.boxplot(alphas[:, layer], tick_labels=list(labels[layer]), widths=0.6, flierprops=fliers)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("merged teacher heads")
    axes[0][0].set_ylabel("alpha (weight of the first)")
    figure.tight_layout()
    _save(figure, path)


def draw_losses(curves: Mapping[str, Mapping[tuple[str, str], NDArray[Any]]], path: Path) -> None:
    """Loss terms by step: title of the term -> (start, terms) -> ``(points, 2)``, steps and means over seeds."""
    figure, axes = plt.subplots(1, len(curves), figsize=(4.0 * len(curves), 3.2), squeeze=False)
    for axis, (title, methods) in zip(axes[0], curves.items(), strict=True):
        for (start, terms), points in methods.items():
            axis.plot(points[:, 0], points[:, 1], label=f"{start}: {terms}", **_line(start, terms))
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step")
        axis.set_yscale("log")
    axes[0][0].set_ylabel("nats")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    _save(figure, path)


def draw_accuracy(
    rows: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], lines: Mapping[str, float], path: Path
) -> None:
    """Test accuracy against the number of labelled images, with 95% intervals over seeds.

    Args:
        rows: by start and terms, a mean a number of labels.
        lines: accuracies beside them, by what they are of.
        path: of the png.
    """
    figure, axis = plt.subplots(figsize=(6.4, 4.0))
    counts = sorted({row["labels"] for chosen in rows.values() for row in chosen})
    for number, ((start, terms), chosen) in enumerate(rows.items()):
        at = [counts.index(row["labels"]) + 0.05 * (number - (len(rows) - 1) / 2) for row in chosen]
        mean = [100 * row["mean"] for row in chosen]
        spread = [100 * (row["interval"] or 0.0) for row in chosen]
        look = {"marker": "o", "markersize": 4, "capsize": 2, **_line(start, terms)}
        axis.errorbar(at, mean, yerr=spread, label=f"{start}: {terms}", **look)
    for (name, accuracy), style in zip(lines.items(), (":", "-."), strict=True):
        axis.axhline(100 * accuracy, color="black", linewidth=0.8, linestyle=style, label=name)
    axis.set_xticks(range(len(counts)), [str(count) for count in counts])
    axis.set_xlabel("labelled images")
    axis.set_ylabel("test accuracy, % (mean, 95% interval)")
    axis.legend(fontsize=7, frameon=False, loc="lower right")
    figure.tight_layout()
    _save(figure, path)


def _line(start: str, terms: str) -> dict[str, Any]:
    return {"color": COLORS[terms], "linewidth": 1.2, "linestyle": "--" if start == "random" else "-"}


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)
