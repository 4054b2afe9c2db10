"""Draws ``docs/idea.svg``: real maps of a pretrained encoder, merged, and a student that starts from them.

PYTHONPATH=. python docs/pictures/idea.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from minilm import load, look
from numpy.typing import NDArray

import shd_ref as shd
from benchmarks.card import Card
from shd_torch.shrink import shrink

LAYER, HEADS, ROWS = 2, 6, (0, 1, 4)  # which layer, how many student heads, which of the six pairs are shown
CELL, PITCH, TOP = 7, 128, 112
COLUMNS = {"p": 16, "q": 118, "merged": 240, "student": 376}
LEVELS = 9


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
    draw(shown, words, Path(__file__).resolve().parents[1] / "idea.svg")


def divergence(supervision: NDArray[np.float64], student: NDArray[np.float64], mask: NDArray[np.bool_]) -> float:
    """Nats a row of one head, as the loss counts them."""
    with np.errstate(divide="ignore"):  # a probability of 0 is a logit of -inf
        return shd.shd_loss(supervision, np.log(student), loss_mask=mask, support="intersect")


def draw(rows: list[dict], words: int, path: Path) -> None:
    """A line of maps for each pair: two of the teacher, their merge, the student's."""
    size, x, y = CELL * words, COLUMNS, TOP
    card = Card(
        "Squeezing heads: pairs of a teacher's attention maps are merged into one map for each student head; "
        "the student starts from the merged weights and learns from the merged maps"
    )
    for column, head, small in (
        ("p", "Teacher: 12 heads", "merged in pairs"),
        ("merged", "Merged", "no parameters"),
        ("student", "Student", "6 heads"),
    ):
        card.text(x[column], 38, head, "head")
        card.text(x[column], 62, small, "soft")
    for row in rows:
        middle = y + size / 2
        weights = {"p": row["alpha"], "q": 1 - row["alpha"]}
        for name, color in (("p", "blue"), ("q", "blue"), ("merged", "orange"), ("student", "green")):
            heatmap(card, row[name][:words, :words], x[name], y, color)
        for name, head in zip("pq", row["heads"], strict=True):
            card.text(x[name] + size / 2, y - 7, f"{weights[name]:.2f} x {head}", "soft", "middle")
        card.text((x["p"] + size + x["q"]) / 2, middle + 6, "+", "strong", "middle")
        card.line((x["q"] + size + 6, middle), (x["merged"] - 5, middle), tip=True)
        card.line((x["merged"] + size + 6, middle), (x["student"] - 5, middle), tip=True)
        card.text((x["merged"] + size + x["student"]) / 2, middle - 12, f"{row['kl']:.2f}", "", "middle")
        y += PITCH
    under = y - PITCH + size + 8
    left, right = (x["p"] + x["q"] + size) / 2, x["student"] + size / 2
    card.line((left, under), (left, under + 18), (right, under + 18), (right, under + 2), tip=True)
    card.text((left + right) / 2, under + 40, "starts from weights merged in the same pairs", "", "middle")
    note = (
        "Real maps: layer 2 of MiniLM, three of six pairs, alpha x head; rows are queries, columns keys of “the cat "
        "sat on the mat because it was tired”. On the arrows: KL in nats per row before any training."
    )
    card.save(path, card.lines(20, under + 68, note, 54, "soft", 20))


def heatmap(card: Card, probs: NDArray[np.float64], x: float, y: float, color: str) -> None:
    """Cells by level of the square root, a path a level: few bytes, and no colour but the theme's."""
    levels = np.rint(np.sqrt(probs) * LEVELS).astype(int)
    card.parts.append(f'<g class="{color}" transform="translate({x:g} {y:g})" stroke-width="{CELL}">')
    for level in range(1, LEVELS + 1):
        cells = "".join(
            f"M{c * CELL} {r * CELL + CELL / 2:g}h{CELL}" for r, c in zip(*np.nonzero(levels == level), strict=True)
        )
        if cells:
            card.parts.append(f'<path stroke-opacity="{level / LEVELS:.2f}" d="{cells}"/>')
    size = CELL * len(probs)
    card.parts.append(f'<rect width="{size}" height="{size}" fill="none" stroke-width="1.5"/></g>')


if __name__ == "__main__":
    main()
