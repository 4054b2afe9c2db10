"""Write the figures of README and docs from the JSON of the benchmarks; ``--check`` names those that differ.

``figures.jinja`` holds what pages say. ``@ PAGE`` begins a page. ``@@ NAME`` begins the rows of the table below
``<!-- figures: NAME -->``, which replace those of the page. Every other line is a phrase of the page, found by its
words, however wrapped; the numbers in its ``{{ }}`` are replaced.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from scipy import stats

BENCHMARKS = Path(__file__).resolve().parent
ROOT, RESULTS = BENCHMARKS.parent, BENCHMARKS / "results"
FIGURE = re.compile("\x01([^\x02]*)\x02")  # what came from JSON, in a rendered line


def n(value: float, digits: int = 0, sign: bool = False) -> str:
    """A figure as pages write it: rounded half up."""
    # Twelve digits first: means of binary numbers differ from the decimal that they stand for in the last digits.
    rounded = Decimal(f"{value:.12g}").quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return f"{rounded:+,}" if sign else f"{rounded:,}"


def pm(values: Sequence[float], digits: int, sign: bool = False) -> str:
    """Mean and half the width of its 95% t interval, ``+0.109 ± 0.042``."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{n(np.mean(values), digits, sign)} ± {n(half, digits)}"


@functools.cache
def load(name: str) -> Any:
    text = (RESULTS / name).read_text(encoding="utf-8")
    if name.endswith(".csv"):
        return list(csv.DictReader(text.splitlines()))
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


def pick(entries: Iterable[Any], path: str, **where: Any) -> Any:
    """Values at a dotted path of those entries whose fields are as said, as an array."""
    chosen = [entry for entry in entries if all(entry[name] == value for name, value in where.items())]
    return np.array([functools.reduce(lambda at, name: at[name], path.split("."), entry) for entry in chosen])


def row(task: str, part: str, label: str) -> dict[str, str]:
    (one,) = (row for row in load(f"study/{task}.csv") if (row["part"], row["label"]) == (part, label))
    return one


def gain(task: str, part: str, label: str, digits: int, column: str = "gain", sign: bool = False) -> str:
    """A gain with its interval, in points where the figure is a share."""
    one = row(task, part, label)
    scale = 100 if one["metric"] in ("accuracy", "rouge_l") else 1
    value, interval = scale * float(one[column]), scale * float(one[f"{column}_interval"])
    return f"{n(value, digits, sign)} ± {n(interval, digits)}"


def share(row: dict[str, str], digits: int | None = None) -> str:
    """Of the gradient at the first step, in percent: with one digit below a tenth."""
    fraction = float(row["gradient_share"])
    return f"{n(100 * fraction, int(fraction < 0.1) if digits is None else digits)}%"


def beta(row: dict[str, str]) -> str:
    return n(float(row["beta"]), 3).rstrip("0").rstrip(".")


def costs(task: str) -> Any:
    """Processor time of a step with SHD over one without, for all pairs of the same part, start and base loss."""
    rows = load(f"study/{task}.csv")
    kinds = [(row["part"], *re.findall(r"\b(?:start|base)=[^,]+", row["options"])) for row in rows]
    plain = {kind: row for kind, row in zip(kinds, rows, strict=True) if row["method"] == "base"}
    pairs = [(row, plain.get(kind)) for kind, row in zip(kinds, rows, strict=True) if row["method"] == "shd"]
    return np.array([float(row["step_seconds"]) / float(base["step_seconds"]) for row, base in pairs if base])


def trials(task: str, parts: Sequence[str], suffix: str = "") -> list[dict[str, str]]:
    """SHD's rows of these parts by beta; of the first, those whose label ends so."""
    own = [row for row in load(f"study/{task}.csv") if row["part"] in parts and row["method"] == "shd"]
    own = [row for row in own if row["label"].endswith(suffix) or row["part"] != parts[0]]
    return sorted(own, key=lambda row: float(row["beta"]))


def losses(path: str, task: str, **options: Any) -> Any:
    """A figure of the runs with these options, by seed."""
    runs = load("study/runs.jsonl")
    own = [run for run in runs if run["task"] == task and run["options"].items() >= options.items()]
    return np.array([pick(own, path, seed=seed)[-1] for seed in range(3)])


def steps(start: str, shd: bool, mark: int = 3000) -> Any:
    """Test losses of 3,000 steps on stories after so many, by seed."""
    return losses(f"curve.{mark}.test_loss", "language", steps=3000, start=start, method="shd" if shd else "base")


def rival(method: str) -> str:
    """Cells of a method at the weight that validation chose: over KD and over SHD, on digits and on stories."""
    cells = []
    for task, digits in (("images", 1), ("language", 3)):
        own = pick(load(f"study/{task}.csv"), "label", part="rivals", method=method, is_chosen="True")
        for column in ("gain", "over_shd"):
            known = len(own) and (method, column) != ("shd", "over_shd")
            cells.append(gain(task, "rivals", own[0], digits, column, sign=True) if known else "")
    return " | ".join(cells).replace("  ", " ").strip()


def seeds(runs: dict[str, Any], name: str, mark: str) -> Any:
    """A figure of a run for each seed, which stands in the run's name."""
    return np.array([runs[name.format(seed)][mark] for seed in range(3)])


def rendered() -> Iterator[tuple[str, str, list[str]]]:
    """Page, table or ``""``, and the table's rows or one phrase; figures stand between two control characters."""
    settings = {"undefined": jinja2.StrictUndefined, "extensions": ["jinja2.ext.do"], "line_statement_prefix": "%"}
    environment = jinja2.Environment(**settings, finalize=lambda value: f"\x01{value}\x02")
    functions = (n, pm, load, pick, row, gain, share, beta, trials, losses, steps, rival, seeds)
    functions += (costs, zip, min, max, sorted, sum)
    environment.globals |= {function.__name__: function for function in functions} | {"np": np, "mean": np.mean}
    environment.filters |= {"each": np.vectorize(n, otypes="O"), "share": share, "beta": beta}
    page, table, rows = "", "", list[str]()
    template = environment.from_string((BENCHMARKS / "figures.jinja").read_text(encoding="utf-8"))
    for line in [*filter(None, template.render().splitlines()), "@"]:
        text = shown(line)
        if text.startswith("|"):
            rows.append(text)
            continue
        if table:
            yield page, table, rows
            table, rows = "", []
        if text.startswith("@@"):
            table = text[2:].strip()
        elif text.startswith("@"):
            page = text[1:].strip()
        else:
            yield page, "", [line]


def shown(line: str) -> str:
    return FIGURE.sub(r"\1", line)


def written(text: str, table: str, lines: list[str]) -> str:
    """The page with these figures; ValueError where it has not this table, or not one place with these words."""
    plain = "\n".join(map(shown, lines))
    if table:
        pattern = rf"(?<=<!-- figures: {table} -->\n\n)(\|.*\n\|.*\n)((?:\|.*\n)*)"
        plain += "\n"
    elif re.search(re.escape(plain).replace("\\ ", r"\s+"), text):
        return text
    else:
        pieces = [re.escape(piece) for piece in FIGURE.split(lines[0])]
        pieces[1::2] = [re.sub(r"(\\[-+]|\+)?(\\?[\d.,])*\d", r"[-+]?[\\d.,]*\\d", piece) for piece in pieces[1::2]]
        pattern = "()(" + "".join(pieces).replace("\\ ", r"\s+") + ")"
    matches = list(re.finditer(pattern, text))
    if len(matches) != 1:
        raise ValueError(f"{len(matches)} places for {table or plain!r}")
    if not table:  # lines end where they did
        spaces = iter(re.findall(r"\s+", matches[0][2]))
        plain = re.sub(r"\s+", lambda _: next(spaces), plain)
    return text[: matches[0].start(2)] + plain + text[matches[0].end(2) :]


def main() -> int:
    check = "--check" in sys.argv
    wrong = 0
    for page, table, lines in rendered():
        path = ROOT / page
        old = path.read_text(encoding="utf-8")
        try:
            new = written(old, table, lines)
        except ValueError as error:
            print(f"{page}: {error}")
            wrong += 1
            continue
        if not check:
            path.write_text(new, encoding="utf-8")
        elif new != old:
            print(f"{page}: the JSON has other figures: {table or shown(lines[0])}")
            wrong += 1
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
