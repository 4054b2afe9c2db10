"""The demo's pictures, each one question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

mpl.use("Agg")  # files, no window

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

COLORS = {"CE": "#7f7f7f", "CE + KD": "#1f77b4", "CE + SHD": "#ff7f0e", "CE + KD + SHD": "#d62728"}


def draw_maps(image: NDArray[Any], rows: Sequence[tuple[str, NDArray[Any]]], path: Path) -> None:
    """Where the class token looks: one row of panels per model, one panel per head, over the image.

    Args:
        image: ``(H, W)`` in [0, 1].
        rows: title and the class token's attention to the patches, ``(heads, n, n)``.
        path: of the png.
    """
    columns = max(len(maps) for _, maps in rows)
    figure, axes = plt.subplots(
        len(rows), columns + 1, figsize=(1.2 * (columns + 1), 1.45 * len(rows)), squeeze=False, layout="constrained"
    )
    for (title, maps), line in zip(rows, axes, strict=True):
        for axis in line:
            axis.axis("off")
        line[0].imshow(1 - image, cmap="gray", vmin=0, vmax=1)
        line[0].set_title(title, fontsize=7, pad=2)
        for head, (axis, attention) in enumerate(zip(line[1:], maps, strict=False)):
            scale = image.shape[0] // attention.shape[0]
            heat = np.kron(attention, np.ones((scale, scale)))
            axis.imshow(1 - image, cmap="gray", vmin=0, vmax=1)
            axis.imshow(heat, cmap="inferno", alpha=0.65, vmin=0, vmax=attention.max())
            axis.set_title(f"head {head}, max {attention.max():.2f}", fontsize=6, pad=2)
    figure.suptitle("Attention of the class token, last layer", fontsize=10)
    _save(figure, path)


def draw_alphas(alphas: NDArray[Any], titles: Sequence[str], labels: Sequence[str], path: Path) -> None:
    """How alphas spread over samples, layer by layer: ``alphas`` is ``(N, layers, pairs)``, before clipping."""
    figure, axes = plt.subplots(1, len(titles), figsize=(4.2 * len(titles), 3.2), sharey=True, squeeze=False)
    for layer, (axis, title) in enumerate(zip(axes[0], titles, strict=True)):
        axis.axhspan(0, 1, color="#f2f2f2", zorder=0)
        axis.axhline(0.5, color="#999999", linewidth=0.8, linestyle="--", zorder=1)
        axis.boxplot(
            alphas[:, layer], tick_labels=list(labels), widths=0.6, flierprops={"markersize": 2, "alpha": 0.3}
        )
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("merged teacher heads")
    axes[0][0].set_ylabel("alpha (weight of the first)")
    figure.tight_layout()
    _save(figure, path)


def draw_losses(curves: Mapping[str, Mapping[str, NDArray[Any]]], path: Path) -> None:
    """Loss terms by step: term -> method -> mean over seeds."""
    titles = {"ce": "cross entropy (training)", "kd": "KD", "shd": "SHD: sum of KL over layers and heads"}
    figure, axes = plt.subplots(1, len(curves), figsize=(4.2 * len(curves), 3.2), squeeze=False)
    for axis, (term, methods) in zip(axes[0], curves.items(), strict=True):
        for method, values in methods.items():
            axis.plot(np.arange(1, len(values) + 1), values, label=method, color=COLORS[method], linewidth=1.2)
        axis.set_title(titles[term], fontsize=9)
        axis.set_xlabel("step")
        axis.set_yscale("log")
        axis.legend(fontsize=7, frameon=False)
    axes[0][0].set_ylabel("nats")
    figure.tight_layout()
    _save(figure, path)


def draw_accuracy(rows: Sequence[Mapping[str, Any]], teacher: float, path: Path) -> None:
    """Test accuracy against the number of labelled images, with 95% intervals over seeds."""
    figure, axis = plt.subplots(figsize=(5.4, 3.6))
    counts = sorted({row["labels"] for row in rows})
    for number, (method, color) in enumerate(COLORS.items()):
        chosen = sorted((row for row in rows if row["method"] == method), key=lambda row: row["labels"])
        at = [counts.index(row["labels"]) + 0.06 * (number - 1.5) for row in chosen]
        mean = [100 * row["accuracy"] for row in chosen]
        spread = [100 * row["interval"] for row in chosen]
        axis.errorbar(
            at, mean, yerr=spread, label=method, color=color, marker="o", markersize=4, capsize=2, linewidth=1
        )
    axis.axhline(100 * teacher, color="black", linewidth=0.8, linestyle=":", label="teacher (8 heads, all labels)")
    axis.set_xticks(range(len(counts)), [str(count) for count in counts])
    axis.set_xlabel("labelled images")
    axis.set_ylabel("test accuracy, % (mean, 95% interval)")
    axis.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)
