"""The table of mutants with the items that catch them, ``specs/mutants.md``.

``cd tests && python -m judge.mutants.table`` runs every mutant and writes it; ``test_judge.py`` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from judge.mutants import CHAPTERS
from judge.mutants.mutant import Mutant, built, failures, items_by_id, items_on, run

from shd_ref.conformance import Result, Status
from shd_ref.conformance.runner import Item
from shd_ref.conformance.specification import load_mistakes

PAGE = Path(__file__).resolve().parents[3] / "specs" / "mutants.md"
_NUM_IDS = 3
_INTRODUCTION = """# Wrong implementations

The judge of [`conformance.md`](conformance.md), judged. Each line is an implementation with one mistake: the
reference with one change of its text, in `tests/judge/mutants`. A test runs them with the tolerances as published, at
float32, or at float64 where the line says so, and requires that the items in the last column fail. At most {ids} are
listed: the one whose report names the mistake in words, if there is one (*), then a law, then vectors.

Written by `cd tests && python -m judge.mutants.table`; not by hand.
"""


def render(caught: Mapping[str, Sequence[str]]) -> str:
    """The page, from the ids of the items that catch each mutant."""
    parts = [_INTRODUCTION.format(ids=("none", "one", "two", "three")[_NUM_IDS])]
    for title, mutants in CHAPTERS.items():
        lines = [f"## {title}", "", "| mutant | what it does | caught by |", "|---|---|---|"]
        for mutant in mutants:
            found = ", ".join(f"`{name}`" for name in caught.get(mutant.name, ()))
            wrong = mutant.wrong + (f" At {mutant.dtype}." if mutant.dtype != "float32" else "")
            wrong = wrong.replace("|", r"\|")  # which would end the cell
            lines.append(f"| `{mutant.name}` | {wrong} | {found}{' *' * bool(mutant.mistake)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def read() -> dict[str, tuple[str, ...]]:
    """For each mutant of the page, the ids of its last column."""
    rows = re.findall(r"^\| `([^`]+)` \| .* \| ([^|]*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: tuple(re.findall(r"`([^`]+)`", cell)) for name, cell in rows}


def names_mistake(result: Result, mutant: Mutant) -> bool:
    """Whether a failure's report names this mistake."""
    return bool(mutant.mistake and result.finding and load_mistakes()[mutant.mistake] in result.finding.looks_like)


def choose(mutant: Mutant, found: Sequence[Result]) -> list[str]:
    """A few of the items that catch a mutant."""
    order = sorted(found, key=lambda result: not names_mistake(result, mutant))[:1]
    order += [result for result in found if result.id.startswith("law/")][:1]
    order += [result for result in found if not result.id.startswith("law/")]
    return list(dict.fromkeys(result.id for result in order))[:_NUM_IDS]


def _items(names: Sequence[str]) -> list[Item]:
    return [items_by_id()[name] for name in names]


def main() -> None:
    """Run every mutant and write the page: a row that still holds is kept, any other is found among all items."""
    with built() as reference:
        wrong = [result.id for result in run(reference, items_by_id().values()) if result.status is Status.FAILED]
    if wrong:
        print(f"the reference fails {len(wrong)} items, which catch nothing: {', '.join(wrong)}")
    caught: dict[str, Sequence[str]] = {}
    listed = read()
    for mutant in (mutant for mutants in CHAPTERS.values() for mutant in mutants):
        names = [name for name in listed.get(mutant.name, ()) if name in items_by_id()]
        found = failures(mutant, _items(names))
        named = not mutant.mistake or any(names_mistake(result, mutant) for result in found)
        if names and named and {result.id for result in found} == set(listed[mutant.name]):
            caught[mutant.name] = names
            continue
        found = [result for result in failures(mutant, items_on(mutant.operations)) if result.id not in wrong]
        caught[mutant.name] = choose(mutant, found)
        if {result.id for result in failures(mutant, _items(caught[mutant.name]))} != set(caught[mutant.name]):
            # A mistake that remembers calls: what catches it alone, without the items before.
            found = [result for result in found if failures(mutant, _items([result.id]))]
            caught[mutant.name] = choose(mutant, found)
        if not found:
            print(f"{mutant.name}: not caught")
        if mutant.mistake and not any(names_mistake(result, mutant) for result in found):
            print(f"{mutant.name}: no report names {mutant.mistake}")
    PAGE.write_text(render(caught), encoding="utf-8")


if __name__ == "__main__":
    main()
