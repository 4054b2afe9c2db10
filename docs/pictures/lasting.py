"""Draws ``docs/pictures/lasting.svg``: how long a start from the teacher stays ahead, from the runs of the study.

PYTHONPATH=. python docs/pictures/lasting.py
"""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.figures import steps

MARKS = (50, 150, 300, 600, 1000, 2000, 3000)
LEFT, RIGHT, TOP, BOTTOM = 76, 696, 70, 340
LOW, HIGH = 1.8, 3.9  # nats
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { fill: #1f2328; font-family: Helvetica, Arial, "Liberation Sans", "DejaVu Sans", sans-serif; font-size: 19px }
  .head { font-size: 24px; font-weight: bold }
  .soft { fill: #59636e; font-size: 18px }
  .axis { stroke: #d0d7de }
  path { fill: none; stroke-width: 3.5 }
  .random { stroke: #59636e }
  .squeezed { stroke: #1a7f37 }
  .shd { stroke-dasharray: 10 6 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d }
    text { fill: #f0f6fc }
    .soft { fill: #9da7b3 }
    .axis { stroke: #3d444d }
    .random { stroke: #9da7b3 }
    .squeezed { stroke: #3fb950 }
  }
"""


def main() -> None:
    """Read the means of three seeds, and write the picture."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 440" width="720" role="img">',
        "<title>A student that starts from its teacher stays ahead of random weights for 3,000 steps</title>",
        f"<style>{STYLE}</style>",
        '<rect class="card" x="1" y="1" width="718" height="438" rx="12"/>',
        '<text class="head" x="24" y="42">Test loss of a small story model, nats per token</text>',
    ]
    for nats in (2.0, 2.5, 3.0, 3.5):
        parts.append(f'<line class="axis" x1="{LEFT}" y1="{_y(nats):.0f}" x2="{RIGHT}" y2="{_y(nats):.0f}"/>')
        parts.append(f'<text class="soft" x="{LEFT - 10}" y="{_y(nats) + 6:.0f}" text-anchor="end">{nats}</text>')
    under = f'y="{BOTTOM + 26}" text-anchor="middle"'
    parts += [f'<text class="soft" x="{_x(mark):.0f}" {under}>{mark:,}</text>' for mark in MARKS]
    for start in ("random", "squeezed"):
        for with_shd in (False, True):
            losses = [float(steps(start, with_shd, mark).mean()) for mark in MARKS]
            points = "L".join(f"{_x(mark):.1f} {_y(loss):.1f}" for mark, loss in zip(MARKS, losses, strict=True))
            parts.append(f'<path class="{start}{" shd" if with_shd else ""}" d="M{points}"/>')
    parts += [
        f'<text x="{_x(150):.0f}" y="{_y(3.3):.0f}">random weights</text>',
        f'<text x="{_x(60):.0f}" y="{_y(1.9):.0f}">from the teacher</text>',
    ]
    notes = (
        "training steps; full line: KD, dashed: KD + SHD; three seeds",
        "8 heads and 5 layers to 4 and 3; the teacher has 1.494",
    )
    for line, note in enumerate(notes):
        parts.append(f'<text class="soft" x="{LEFT}" y="{BOTTOM + 56 + 26 * line}">{note}</text>')
    parts.append("</svg>\n")
    path = Path(__file__).with_suffix(".svg")
    path.write_text("\n".join(parts), encoding="utf-8")
    print(path, path.stat().st_size)


def _x(step: float) -> float:
    return LEFT + 20 + (RIGHT - LEFT - 50) * math.log(step / MARKS[0]) / math.log(MARKS[-1] / MARKS[0])


def _y(nats: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * (nats - LOW) / (HIGH - LOW)


if __name__ == "__main__":
    main()
