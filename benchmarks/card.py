"""Pictures of the pages as SVG cards: labels that a phone of 390 pixels shows legibly, in light and dark."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

Bars = Sequence[tuple[str, float, str, str]]  # name, value, its label, colour
Curve = tuple[list[tuple[float, float]], str]  # points and colour
WIDTH = 480  # on a phone 358 pixels remain, so that 17 units are 12.7 pixels
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  .box { fill: #f6f8fa; stroke: #d0d7de }
  text { fill: #1f2328; font: 17px Helvetica, Arial, "Liberation Sans", "DejaVu Sans", sans-serif }
  .head { font-size: 20px; font-weight: bold }
  .strong { font-weight: bold }
  .soft { fill: #59636e; font-size: 16px }
  .code { font: 15px SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace }
  .line { stroke: #59636e; stroke-width: 2; fill: none }
  .axis { stroke: #d0d7de }
  .grey { fill: #9da7b3; stroke: #9da7b3 }
  .green { fill: #1a7f37; stroke: #1a7f37 }
  .orange { fill: #b05a00; stroke: #b05a00 }
  .blue { fill: #1f5f9b; stroke: #1f5f9b }
  .open { fill: #ffffff }
  .box.blue, .box.orange, .box.green { fill: #f6f8fa; stroke-width: 2 }
  path.curve { fill: none; stroke-width: 3 }
  .dashed { stroke-dasharray: 8 6 }
  text.grey, text.green, text.orange, text.blue { stroke: none }
  @media (prefers-color-scheme: dark) {
    .card, .open { fill: #0d1117; stroke: #3d444d }
    .box { fill: #161b22; stroke: #3d444d }
    text { fill: #f0f6fc }
    .soft { fill: #9da7b3 }
    .line { stroke: #9da7b3 }
    .axis { stroke: #3d444d }
    .grey { fill: #6e7681; stroke: #6e7681 }
    .green { fill: #3fb950; stroke: #3fb950 }
    .orange { fill: #ffa657; stroke: #ffa657 }
    .blue { fill: #6cb2ff; stroke: #6cb2ff }
    .box.blue, .box.orange, .box.green { fill: #161b22 }
  }
"""


class Card:
    """A picture that grows downwards; ``title`` is what it shows, for those who do not see it."""

    def __init__(self, title: str, width: int = WIDTH) -> None:
        self.title, self.width = title, width
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        mark = f' class="{kind}"' if kind else ""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(f'<text{mark} x="{x:g}" y="{y:g}"{place}>{escape(text, quote=False)}</text>')

    def lines(self, x: float, y: float, text: str, letters: int, kind: str = "", step: int = 21) -> float:
        """Wrap a text; the baseline of the line below it."""
        for line in textwrap.wrap(text, letters):
            self.text(x, y, line, kind)
            y += step
        return y

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box", radius: float = 6) -> None:
        size = f'width="{width:g}" height="{height:g}" rx="{radius:g}"'
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" {size}/>')

    def bar(self, x: float, y: float, width: float, kind: str, height: float = 18) -> None:
        self.box(x, y, max(width, 1), height, kind, 3)

    def line(self, *points: tuple[float, float], kind: str = "line", tip: bool = False) -> None:
        """Straight pieces; with an arrow's tip at the last point."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        mark = ' marker-end="url(#tip)"' if tip else ""
        self.parts.append(f'<path class="{kind}"{mark} d="M{path}"/>')

    def dot(self, x: float, y: float, kind: str, is_open: bool = False) -> None:
        hole = f'<circle class="open" cx="{x:.1f}" cy="{y:.1f}" r="2.6" stroke="none"/>' if is_open else ""
        self.parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>{hole}')

    def bars(self, y: float, head: str, bars: Bars, left: float = 226, wide: float = 180) -> float:
        """A group of bars under its head; where the next group begins."""
        self.text(24, y + 24, head, "strong")
        y += 36
        scale = wide / max(value for _, value, _, _ in bars)
        for name, value, label, color in bars:
            self.text(24, y + 15, name)
            self.bar(left, y, scale * value, color)
            self.text(left + 8 + scale * value, y + 15, label)
            y += 25
        return y + 12

    def chart(
        self, top: float, curves: Sequence[Curve], x: Sequence[float], y: Sequence[float], is_log: bool = True
    ) -> float:
        """Curves over a logarithmic x, with a grid at these ticks; where the next group begins."""
        left, right, bottom = 66, 432, top + 190

        def place(points: tuple[float, float]) -> tuple[float, float]:
            scale = math.log if is_log else float
            across = (math.log(points[0]) - math.log(x[0])) / (math.log(x[-1]) - math.log(x[0]))
            up = (scale(points[1]) - scale(y[0])) / (scale(y[-1]) - scale(y[0]))
            return left + (right - left) * across, bottom - (bottom - top) * up

        for tick in y:
            level = place((x[0], tick))[1]
            self.line((left, level), (right, level), kind="axis")
            self.text(left - 10, level + 6, f"{tick:g}", "soft", "end")
        for tick in x:
            self.text(place((tick, y[0]))[0], bottom + 24, f"{tick:,g}", "soft", "middle")
        for points, color in curves:
            self.line(*map(place, points), kind=f"curve {color}")
            for point in points * ("dashed" not in color):
                self.dot(*place(point), color)
        return bottom + 34

    def legend(self, y: float, names: Sequence[tuple[str, str]]) -> float:
        """A line of text for each curve, in its colour."""
        for name, color in names:
            self.line((24, y - 6), (50, y - 6), kind=f"curve {color}")
            self.text(60, y, name)
            y += 23
        return y

    def save(self, path: Path, height: float) -> None:
        marker = (
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="5" markerHeight="5" '
            'orient="auto"><path class="grey" d="M0 0 10 5 0 10z"/></marker></defs>'
        )
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height:g}" width="{self.width}" '
            f'height="{height:g}" role="img">',
            f"<title>{escape(self.title, quote=False)}</title>",
            f"<style>{STYLE}</style>",
            marker,
            f'<rect class="card" x="1" y="1" width="{self.width - 2}" height="{height - 2:g}" rx="12"/>',
        ]
        path.write_text("\n".join([*head, *self.parts, "</svg>\n"]), encoding="utf-8")
        print(path, path.stat().st_size)
