"""Draws ``docs/idea.svg``: real maps of a pretrained encoder, merged, and a student that starts from them.

python docs/pictures/idea.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from minilm import load, look
from numpy.typing import NDArray

import shd_ref as shd
from shd_torch.shrink import shrink

LAYER, HEADS, ROWS = 2, 6, (0, 1, 4)  # which layer, how many student heads, which of the six pairs are shown
CELL, PITCH, TOP = 9, 146, 118
COLUMNS = {"p": 34, "q": 190, "merged": 378, "student": 750}
LEVELS = 9
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { fill: #1f2328; font-family: Helvetica, Arial, "Liberation Sans", "DejaVu Sans", sans-serif; font-size: 18px }
  .head { font-size: 25px; font-weight: bold }
  .soft { fill: #59636e }
  .teacher { stroke: #1f5f9b }
  .merged { stroke: #b05a00 }
  .student { stroke: #1a7f37 }
  .frame { fill: none; stroke-width: 1.5 }
  .line { fill: none; stroke: #59636e; stroke-width: 2 }
  .tip { fill: #59636e }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d }
    text { fill: #f0f6fc }
    .soft { fill: #9da7b3 }
    .teacher { stroke: #6cb2ff }
    .merged { stroke: #ffa657 }
    .student { stroke: #56d364 }
    .line { stroke: #9da7b3 }
    .tip { fill: #9da7b3 }
  }
"""


def main() -> None:
    """Run the teacher, merge, start a student, and write the picture beside the pages."""
    teacher, inputs = load()
    mask = inputs["attention_mask"].numpy().astype(bool)
    maps, outputs = look(teacher, inputs, LAYER)
    plan = shd.matched_plan([(maps, outputs, mask)], HEADS)
    merged = shd.squeeze_heads(maps, outputs, HEADS, plan=plan, query_mask=mask)
    made = shrink(teacher, inputs, heads=HEADS, plan="matched")
    student, _ = look(made.student.eval(), inputs, LAYER)
    words = int(mask[0].sum())
    shown = [
        {
            "p": maps[0, p],
            "q": maps[0, q],
            "merged": merged.probs[0, i],
            "student": student[0, i],
            "alpha": merged.alphas[0][0, i],
            "kl": divergence(merged.probs[:1, i : i + 1], student[:1, i : i + 1], mask[:1]),
            "heads": (p, q),
        }
        for i, (p, q) in enumerate(plan[0])
        if i in ROWS
    ]
    path = Path(__file__).resolve().parents[1] / "idea.svg"
    path.write_text(draw(shown, words), encoding="utf-8")
    print(path, path.stat().st_size)


def divergence(supervision: NDArray[np.float64], student: NDArray[np.float64], mask: NDArray[np.bool_]) -> float:
    """Nats a row of one head, as the loss counts them."""
    with np.errstate(divide="ignore"):  # a probability of 0 is a logit of -inf
        return shd.shd_loss(supervision, np.log(student), loss_mask=mask, support="intersect")


def draw(rows: list[dict], words: int) -> str:
    """The whole picture as SVG text."""
    size = CELL * words
    bottom = TOP + PITCH * len(rows)
    width, height = 896, bottom + 128
    x, y = COLUMNS, TOP
    gap = (x["merged"] + size + x["student"]) / 2 + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>Squeezing heads: pairs of a teacher's attention maps are merged into one map for each student head; "
        "the student starts from the merged weights and learns from the merged maps</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="6" markerHeight="6" '
        'orient="auto-start-reverse"><path class="tip" d="M0 0 10 5 0 10z"/></marker></defs>',
        f'<rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="12"/>',
        _text(x["p"], 46, "Teacher", "head"),
        _text(x["p"], 74, "12 heads, merged in pairs", "soft"),
        _text(x["merged"], 46, "Merged maps", "head"),
        _text(x["merged"], 74, "6, no parameters", "soft"),
        _text(gap, 46, "learns", "head", "middle"),
        _text(gap, 74, "KL(merged ‖ own)", "soft", "middle"),
        _text(x["student"], 46, "Student", "head"),
        _text(x["student"], 74, "6 heads", "soft"),
    ]
    for row in rows:
        middle = y + size / 2
        weights = {"p": row["alpha"], "q": 1 - row["alpha"]}
        for name, kind in (("p", "teacher"), ("q", "teacher"), ("merged", "merged"), ("student", "student")):
            parts.append(_heatmap(row[name][:words, :words], x[name], y, kind))
        for name, head in zip("pq", row["heads"], strict=True):
            label = f"{weights[name]:.2f} × head {head}"
            parts.append(_text(x[name] + size / 2, y - 7, label, "soft", "middle"))
        parts += [
            _text((x["p"] + size + x["q"]) / 2, middle + 9, "+", "head", "middle"),
            _arrow(x["q"] + size + 14, middle, x["merged"] - 12, middle),
            _arrow(x["merged"] + size + 14, middle, x["student"] - 12, middle),
            _text(gap - 12, middle - 10, f"{row['kl']:.2f} nats", "", "middle"),
        ]
        y += PITCH
    under = y - PITCH + size + 12
    left, right = (x["p"] + x["q"] + size) / 2, x["student"] + size / 2
    parts += [
        f'<path class="line" marker-end="url(#tip)" d="M{left:g} {under}v30H{right:g}V{under}"/>',
        _text((left + right) / 2, under + 56, "starts: the teacher’s weights merge in the same pairs", "", "middle"),
        _text(
            width / 2,
            height - 42,
            "Real maps: layer 2 of a pretrained MiniLM, three of six pairs; nats per row before any training.",
            "soft",
            "middle",
        ),
        _text(
            width / 2,
            height - 18,
            "“the cat sat on the mat because it was tired”: rows are queries, columns are keys.",
            "soft",
            "middle",
        ),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _heatmap(probs: NDArray[np.float64], x: float, y: float, kind: str) -> str:
    """Cells by level of the square root, a path a level: few bytes, and no colour but the theme's."""
    levels = np.rint(np.sqrt(probs) * LEVELS).astype(int)
    rows = []
    for level in range(1, LEVELS + 1):
        cells = "".join(
            f"M{c * CELL} {r * CELL + CELL / 2:g}h{CELL}" for r, c in zip(*np.nonzero(levels == level), strict=True)
        )
        if cells:
            rows.append(f'<path stroke-opacity="{level / LEVELS:.2f}" d="{cells}"/>')
    size = CELL * len(probs)
    return (
        f'<g class="{kind}" transform="translate({x:g} {y:g})" stroke-width="{CELL}">{"".join(rows)}'
        f'<rect class="frame" style="stroke-width:1.5" width="{size}" height="{size}"/></g>'
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="line" marker-end="url(#tip)" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>'


if __name__ == "__main__":
    main()
