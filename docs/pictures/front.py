"""Draws ``docs/pictures/front.svg``: how fast MiniLM, its int8 and its students are, and how good.

python docs/pictures/front.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOP, PITCH, LEFT, SCALE = 128, 62, 190, 26  # pixels; SCALE for each time faster
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { fill: #1f2328; font-family: Helvetica, Arial, "Liberation Sans", "DejaVu Sans", sans-serif; font-size: 20px }
  .head { font-size: 25px; font-weight: bold }
  .soft { fill: #59636e; font-size: 18px }
  .teacher { fill: #9da7b3 }
  .student { fill: #1a7f37 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d }
    text { fill: #f0f6fc }
    .soft { fill: #9da7b3 }
    .teacher { fill: #59636e }
    .student { fill: #3fb950 }
  }
"""


def main() -> None:
    """Read the figures of the benchmark, and write the picture."""
    document = json.loads((ROOT / "benchmarks" / "results" / "compress_minilm.json").read_text(encoding="utf-8"))
    models = document["models"]
    rows = [
        ("teacher", "float", "teacher", models["float, fused"]),
        ("teacher, int8", "of compress", "teacher", models["ours"]),
        ("teacher, int8", "of OpenVINO", "teacher", models["OpenVINO, NNCF"]),
    ]
    for student in document["compress"]["students"]:
        times = student["wish"].split()[0]
        rows.append(("student, int8", f"--faster {times}", "student", models[f"student, {student['wish']}"]))
    path = ROOT / "docs" / "pictures" / "front.svg"
    path.write_text(draw(rows), encoding="utf-8")
    print(path, path.stat().st_size)


def draw(rows: list[tuple[str, str, str, dict[str, Any]]]) -> str:
    """The whole picture as SVG text: a bar for a batch of 1, a thinner one for 32, and two figures of quality."""
    width, height = 720, TOP + PITCH * len(rows) + 72
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        "<title>Students of MiniLM are faster than its int8, and agree as well with human scores</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="12"/>',
        _text(24, 46, "all-MiniLM-L6-v2 on one CPU thread", "head"),
        _text(LEFT, 84, "times faster than float", ""),
        _text(LEFT, 108, "batch 1, and 32 below", "soft"),
        _text(566, 84, "human", "", "end"),
        _text(566, 108, "scores", "soft", "end"),
        _text(690, 84, "teacher's", "", "end"),
        _text(690, 108, "top 10", "soft", "end"),
    ]
    for number, (name, detail, kind, model) in enumerate(rows):
        y = TOP + PITCH * number
        one, many = model["times_faster"]["1"], model["times_faster"]["32"]
        index = fmean(part["index"] for part in model["quality"].values())
        parts += [
            _text(24, y + 20, name, ""),
            _text(24, y + 42, detail, "soft"),
            f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{SCALE * one:.0f}" height="26" rx="3"/>',
            f'<rect class="{kind}" x="{LEFT}" y="{y + 29}" width="{SCALE * many:.0f}" height="13" rx="3"/>',
            _text(LEFT + SCALE * one + 10, y + 20, f"{one:.1f}", ""),
            _text(LEFT + SCALE * many + 10, y + 42, f"{many:.1f}", "soft"),
            _text(566, y + 26, f"{fmean(model['sts'].values()):.3f}", "", "end"),
            _text(690, y + 26, f"{100 * index:.0f}%", "", "end"),
        ]
    notes = (
        "Human scores: mean Spearman correlation, STS 2012-14 and 2016.",
        "Top 10: share of the nearest ten that are found in the teacher's index.",
    )
    parts += [_text(24, height - 44 + 26 * line, note, "soft") for line, note in enumerate(notes)]
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


if __name__ == "__main__":
    main()
