"""Figures as inline SVG that takes its colours from the page, and maps as PNG. Needs the extra ``report``."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError
from shd_ref.report.content import LayerContent

try:
    import jinja2 as jinja2
    import matplotlib as mpl
    from markupsafe import Markup
    from matplotlib import image
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    message = f"shd report needs the package {error.name}: pip install '.[report]' (in a checkout)"
    raise ShdError("dependency-missing", message) from error

# Stand-ins that nothing else draws with; the page's style sheet says what they are in light and in dark.
_COLOURS: Final = {"#0a0b01": "var(--ink)", "#0a0b02": "var(--muted)", "#0a0b03": "var(--line)"}
_COLOURS_OF_SERIES: Final = {f"#0a0c0{number}": f"var(--series-{number})" for number in range(7)}
INK, MUTED, LINE = _COLOURS
SERIES: Final = tuple(_COLOURS_OF_SERIES)
MARKERS: Final = "os^Dv*P"

_SHOWN_ALPHAS: Final = (-0.25, 1.25)
"""Alphas beyond are drawn at the edge: they are counted as clipped anyway."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "squeezing-heads",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.frameon": False,
}


def alpha_figure(layer: LayerContent) -> Markup:
    """The distribution of alpha for every merge of a layer: median, middle half, middle nine tenths."""

    def draw(axes: Any) -> None:
        for level in (0.0, 0.5, 1.0):
            axes.axhline(level, color=LINE, linewidth=0.8, linestyle="--" if level == 0.5 else "-", zorder=0)
        for number, merge in enumerate(layer.merges):
            if merge.quantiles:
                low, lower, middle, upper, high = np.clip(merge.quantiles, *_SHOWN_ALPHAS)
                axes.plot([number, number], [low, high], color=SERIES[0], linewidth=1.2)
                axes.plot([number, number], [lower, upper], color=SERIES[0], linewidth=6, solid_capstyle="butt")
                axes.plot(number, middle, "o", color=SERIES[1], markersize=4.5)
        axes.set_xlim(-0.6, len(layer.merges) - 0.4)
        axes.set_ylim(_SHOWN_ALPHAS[0] - 0.05, _SHOWN_ALPHAS[1] + 0.05)
        axes.set_yticks([0.0, 0.5, 1.0])
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))

    return _svg(draw, (3.6, 2.2), "merge", "alpha", f"alpha{layer.student_layer}")


def entropy_figure(layers: Sequence[LayerContent]) -> Markup:
    """Mean row entropy of every student head, layer by layer."""

    def draw(axes: Any) -> None:
        for layer in layers:
            axes.plot([layer.student_layer] * len(layer.entropy), layer.entropy, "o", color=SERIES[0], alpha=0.6)
        means = [float(np.mean(layer.entropy)) for layer in layers]
        axes.plot([layer.student_layer for layer in layers], means, color=SERIES[1], linewidth=1.6, label="mean")
        axes.set_ylim(bottom=0.0)

    return _svg(draw, (6.4, 2.8), "student layer", "entropy (nats)", "entropy")


def residual_figure(layers: Sequence[int], series: Mapping[str, Sequence[float]]) -> Markup:
    """Residual by layer over that of the constant merge, a line for every strategy; the cache's own is first."""

    def draw(axes: Any) -> None:
        for number, (label, values) in enumerate(series.items()):
            widths = {"linewidth": 1.0, "markersize": 4.5} if number else {"linewidth": 2.4, "markersize": 7}
            marker, colour = MARKERS[number % len(MARKERS)], SERIES[number % len(SERIES)]
            axes.plot(layers, values, marker=marker, color=colour, label=label, zorder=1 + (number > 0), **widths)
        axes.axhline(1.0, color=LINE, linestyle="--", zorder=0)
        axes.figure.legend(loc="outside upper left", ncols=5, fontsize=8.5)

    return _svg(draw, (6.4, 3.4), "student layer", "error / constant merge", "residual")


def map_picture(probs: NDArray[Any]) -> str:
    """One map ``(n, n)`` as the data URI of a PNG, a pixel an entry; the root shows small entries too."""
    sound = np.clip(np.nan_to_num(probs.astype(np.float64), posinf=1.0), 0.0, 1.0)  # a file may hold anything
    top = float(sound.max(initial=0.0)) or 1.0
    buffer = io.BytesIO()
    image.imsave(buffer, np.sqrt(sound / top), cmap="viridis", vmin=0.0, vmax=1.0, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _svg(draw: Callable[[Any], None], size: tuple[float, float], x: str, y: str, name: str) -> Markup:
    """The figure as an element of the page: no header, no metadata, unique ids, colours of the page."""
    buffer = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot(xlabel=x, ylabel=y)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        draw(axes)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    for stand_in, colour in (_COLOURS | _COLOURS_OF_SERIES).items():
        text = text.replace(stand_in, colour)
    # The page names the figure; a reader need not hear its tick labels.
    return Markup(text.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1))
