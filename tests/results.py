"""What the judge says of every implementation in the table, sentence by sentence: ``specs/results.md``.

Written by ``cd tests && python -m results``, which judges everything and also refreshes the short table of
``docs/judge.md``.
``tests/judge/test_implementations.py`` holds both to what it sees.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from implementations import JUDGED, Judged

from shd_ref.conformance import Report, Status, judge
from shd_ref.conformance.specification import load_sentences, spec_edition

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "specs" / "results.md"
TABLE_PAGE = ROOT / "docs" / "judge.md"
# What runs on every machine, and is judged by everything.
SHOWN = tuple(row for row in JUDGED if not row.name.endswith("cuda") and row.only is None)
_BLOCK = re.compile(r"(<!-- written by `cd tests && python -m results` -->\n).*?(<!-- end -->)", re.DOTALL)
_INTRODUCTION = """# Results

Every sentence of [`shd.md`](shd.md), edition {edition}, and how many items of the judge hold for each implementation:
vectors, laws and refusals that name the sentence. Each is judged here at the widest dtype that it computes in; CI
judges every dtype. A cross is a failure; a dash says that the implementation does not offer what the sentence speaks
of, or, in a whole row of them, that no single answer can show it.

Written by `cd tests && python -m results`; not by hand.
"""


def widest(row: Judged) -> str:
    """The dtype at which a row is shown."""
    return row.dtypes[0]


def column(report: Report) -> dict[str, str]:
    """A report's cell for every sentence."""
    return {spec_id: _cell(row) for spec_id, row in report.requirements().items() if spec_id in load_sentences()}


def line(row: Judged, report: Report) -> str:
    """A report's line in the short table."""
    rows = [row for row in report.requirements().values() if row[Status.PASSED] or row[Status.FAILED]]
    clean = sum(not row[Status.FAILED] for row in rows)
    total = len(load_sentences())
    return (
        f"| `{row.name}` | {widest(row)} | {report.count(Status.PASSED)} | {report.count(Status.FAILED)} "
        f"| {clean} of {total} |"
    )


def _cell(row: Mapping[str, int]) -> str:
    if row[Status.FAILED] or row[Status.KNOWN]:
        return f"✗ {row[Status.FAILED] + row[Status.KNOWN]}"
    return str(row[Status.PASSED]) if row[Status.PASSED] else "–"


def render(columns: Mapping[str, Mapping[str, str]]) -> str:
    """The page.

    Args:
        columns: for each implementation's name, its cell for every sentence.
    """
    names = list(columns)
    lines = [
        _INTRODUCTION.format(edition=spec_edition()),
        f"| sentence | {' | '.join(names)} |",
        f"|---{'|--:' * len(names)}|",
    ]
    lines += [
        f"| {spec_id} | {' | '.join(columns[name][spec_id] for name in names)} |" for spec_id in load_sentences()
    ]
    return "\n".join(lines) + "\n"


def read() -> dict[str, dict[str, str]]:
    """The page's columns, as ``render`` took them."""
    rows = [
        [cell.strip() for cell in text.strip("|").split("|")]
        for text in PAGE.read_text(encoding="utf-8").splitlines()
        if text.startswith("| ")
    ]
    names = rows[0][1:]
    return {name: {row[0]: row[i + 1] for row in rows[1:]} for i, name in enumerate(names)}


def main() -> None:
    """Judge everything; write the page and the short table."""
    columns, lines = {}, []
    for row in SHOWN:
        reason = row.absent()
        if reason:
            raise SystemExit(f"{row.name} {reason}")
        with row.open() as implementation:
            report = judge(implementation, dtype=widest(row), name=row.name)
        columns[row.name] = column(report)
        lines.append(line(row, report))
    PAGE.write_text(render(columns), encoding="utf-8")
    table = [
        "| implementation | dtype | items passed | failed | sentences that hold |",
        "|---|---|--:|--:|--:|",
        *lines,
    ]
    text = TABLE_PAGE.read_text(encoding="utf-8")
    TABLE_PAGE.write_text(_BLOCK.sub(lambda m: m[1] + "\n".join(table) + "\n" + m[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
