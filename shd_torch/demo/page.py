"""What the demo found: figures, tables on a terminal, pictures, and the page that lies beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure  # without pyplot: files, no window
from numpy.typing import NDArray
from rich.table import Table

from shd_ref.commands.terminal import narrow_table
from shd_ref.teacher.study.intervals import half_width
from shd_torch.demo.models import Digits, fit_linear
from shd_torch.demo.students import METHODS, Method, Outcome

COMPARISONS: Final[dict[str, tuple[Method, Method]]] = {
    "adding SHD to KD, random start": (Method("random", True, True), Method("random", True)),
    "adding SHD to KD, squeezed start": (Method("squeezed", True, True), Method("squeezed", True)),
    "squeezed instead of random start, both with KD": (Method("squeezed", True), Method("random", True)),
    "squeezed start and SHD instead of random start": (Method("squeezed", True, True), Method("random", True)),
}
"""Each the first method's accuracy less the second's, seed by seed."""

YOUR_OWN: Final = """\
shd-torch export path/or/hub-id --out teacher.onnx
shd-torch shrink path --data tokens.npy --heads 4 --layers 3 --out student
shd precompute teacher.onnx --inputs data.npz --student student --logits topk --out cache
shd verify cache --teacher teacher.onnx --inputs data.npz"""
YOUR_TRAINING: Final = """\
student, joined = load_student("student"), SupervisedDataset(data, "cache")
SHDTrainer(model=student, train_dataset=joined, beta=0.02, kd=KdTerm(), args=...).train()"""


def summarise(outcomes: Sequence[Outcome]) -> dict[str, list[dict[str, Any]]]:
    """Means with 95% intervals over seeds: a row per number of labels and method, or comparison of two.

    Comparisons are paired: one seed has the same labelled images in every method, and the same random weights.
    """
    tables: dict[str, list[dict[str, Any]]] = {"accuracy": [], "gain": []}
    for labels in sorted({outcome.num_labels for outcome in outcomes}):
        accuracies: dict[Method, dict[int, float]] = {method: {} for method in METHODS}
        for outcome in sorted(outcomes, key=lambda outcome: outcome.seed):
            if outcome.num_labels == labels:
                accuracies[outcome.method][outcome.seed] = outcome.accuracy
        by_method = {method: np.array(list(by_seed.values())) for method, by_seed in accuracies.items()}
        for method in METHODS:
            tables["accuracy"].append({"labels": labels, "name": str(method), **_mean(by_method[method])})
        for name, (one, other) in COMPARISONS.items():
            tables["gain"].append({"labels": labels, "name": name, **_mean(by_method[one] - by_method[other])})
    return tables


def summarise_linear(digits: Digits, num_labels: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """A row like those of ``accuracy`` for each number of labels: what a student has to beat."""
    scores = {count: np.array([fit_linear(digits, count, seed) for seed in range(seeds)]) for count in num_labels}
    return [{"labels": count, "name": "logistic regression on pixels", **_mean(scores[count])} for count in scores]


def _mean(values: NDArray[Any]) -> dict[str, Any]:
    """A mean, half the width of its 95% t interval (None of one seed), and what it is the mean of."""
    return {"mean": float(values.mean()), "interval": half_width(values), "by_seed": values.tolist()}


def console_table(rows: Sequence[Mapping[str, Any]], title: str, form: str) -> Table:
    """A row per name, a column per number of labels; ``form`` formats a percentage."""
    table = narrow_table(title)
    table.add_column("", no_wrap=True)
    counts, lines = _grid(rows, form)
    for count in counts:
        table.add_column(f"{count} labels", justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def render_page(found: Mapping[str, Any]) -> str:
    """``README.md`` beside the pictures, from what ``results.json`` holds."""
    start, seeds = found["squeezed_start"], found["seeds"]
    accuracy = _markdown([*found["linear"], *found["accuracy"]], ".1f", found["accuracy"])
    gain = _markdown(found["gain"], "+.1f", [])
    right, pictures = f"{found['teacher_accuracy']:.1%}", found["test_images"]
    sizes = f"{start['teacher_parameters']:,} -> {start['parameters']:,} parameters"
    return f"""# What `shd-torch demo` shows

A vision transformer with {start["teacher_heads"]} heads and {start["teacher_layers"]} layers, trained on all
1,257 training images of scikit-learn's handwritten digits, classifies {right} of {pictures} test images correctly.
`shd-torch shrink` creates a student with {start["heads"]} heads and {start["layers"]} layers ({sizes}),
which reaches {start["accuracy"]:.1%} before any training. `shd precompute` stores the teacher's squeezed
attention and its logits in one cache of {found["cache_bytes"] / 1e6:.1f} MB. Students then train on a few labelled
images, from random weights or from the squeezed teacher, with cross entropy (CE), KD and SHD; the teacher is no
longer in memory. Everything uses the public commands and `SHDTrainer`.

Test accuracy in %, mean and 95% interval of {seeds} seeds, {found["steps"]} steps each:

{accuracy}
Differences in points, paired by seed, with 95% intervals; not significant if the interval contains 0:

{gain}
One toy task, {seeds} seeds, `beta` {found["beta"]:g} untuned; one learning rate ({found["learning_rate"]:g}) for
all students, chosen on training images whose labels they did not see. The demo shows that the path works,
not how much SHD gains on your task; logistic regression on the same labelled images shows how easy this task is.

{found["machine"]}; {found["cpu_seconds"]:.0f} s of CPU time.

Accuracy by number of labels, with 95% intervals:

![Accuracy by number of labels](accuracy.png)

Losses in training, mean over seeds:

![Loss curves](losses.png)

Merge weights of pairs of teacher heads, over the training images:

![Merge weights by layer](alphas.png)

## With your teacher

```bash
{YOUR_OWN}
```

```text
{YOUR_TRAINING}
```
"""


def _markdown(rows: Sequence[Mapping[str, Any]], form: str, best_of: Sequence[Mapping[str, Any]]) -> str:
    """The table; the best mean of each column among ``best_of`` is bold."""
    counts, lines = _grid(rows, form)
    best = {count: max((row["mean"] for row in best_of if row["labels"] == count), default=None) for count in counts}
    means = {(row["name"], row["labels"]): row["mean"] for row in rows}
    text = [f"| | {' | '.join(f'{count} labels' for count in counts)} |", "|---" * (1 + len(counts)) + "|"]
    for name, *cells in lines:
        marks = ["**" if means[name, count] == best[count] else "" for count in counts]
        marked = [f"{mark}{cell}{mark}" for mark, cell in zip(marks, cells, strict=True)]
        text.append(f"| {name} | {' | '.join(marked)} |")
    return "\n".join(text) + "\n"


def _grid(rows: Sequence[Mapping[str, Any]], form: str) -> tuple[list[int], list[list[str]]]:
    """The numbers of labels, and a line per name: its cells in percent."""
    counts = sorted({row["labels"] for row in rows})
    lines: dict[str, list[str]] = {}
    for row in rows:
        # One seed has no interval.
        interval = "" if row["interval"] is None else f" ± {100 * row['interval']:.1f}"
        lines.setdefault(row["name"], [row["name"]]).append(f"{100 * row['mean']:{form}}{interval}")
    return counts, list(lines.values())


COLORS: Final = {"CE": "#7f7f7f", "CE + KD": "#1f77b4", "CE + KD + SHD": "#d62728"}
"""By terms; a line of a random start is dashed."""
DPI: Final = 150


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
