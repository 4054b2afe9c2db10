"""Wrong implementations, to judge the judge: each is the reference with one mistake that somebody would make.

They stand in this folder's text files, one a chapter, as ``read_chapter`` describes.
"""

from __future__ import annotations

from pathlib import Path

from judge.mutants.mutant import SHOWN_BY, Edit, Mutant

_FILES = ("maps", "alphas", "merging", "learning", "edges")
_FIELDS = ("report", "on", "dtype")


def read_chapter(path: Path) -> tuple[str, tuple[Mutant, ...]]:
    """The title and the mutants of one file.

    A file is paragraphs: ``# title``, then one a mutant::

        name: what it does, in one sentence.
        report: words by which the report of a failure must name the mistake      (may be left out)
        on: operation operation                  (which show it; else those of the chapters that it edits)
        dtype: float64                           (where float32 allows it)
        in chapter of the reference
        - a line, or a piece of one, that the chapter holds once
        + what stands there in its place
          a line that stays

    ``-``, ``+`` and the blank are followed by one blank and the text; ``in`` begins another edit.

    Raises:
        ValueError: a line that is none of these, or a mutant that changes nothing.
    """
    title, *paragraphs = path.read_text(encoding="utf-8").strip().split("\n\n")
    return title.removeprefix("# "), tuple(_mutant(path.name, paragraph) for paragraph in paragraphs)


def _mutant(file: str, paragraph: str) -> Mutant:
    head, *hunks = paragraph.split("\nin ")
    first, *rest = head.split("\n")
    name, _, wrong = first.partition(": ")
    where = f"{file}, {name}"
    fields = dict.fromkeys(_FIELDS, "")
    for line in rest:
        field, _, value = line.partition(": ")
        if field not in fields or not value:
            raise ValueError(f"{where}: not a line of a mutant: {line!r}")
        fields[field] = value
    edits = tuple(_edit(where, hunk) for hunk in hunks)
    if not wrong or not edits:
        raise ValueError(f"{where}: a mutant needs a sentence and an edit")
    operations = fields["on"].split() or dict.fromkeys(name for edit in edits for name in SHOWN_BY[edit.chapter])
    return Mutant(name, wrong, edits, tuple(operations), fields["report"], fields["dtype"] or "float32")


def _edit(where: str, hunk: str) -> Edit:
    chapter, *lines = hunk.split("\n")
    for line in lines:
        if line[:1] not in set("-+ ") or line[1:2].strip():
            raise ValueError(f"{where}: not a line of an edit: {line!r}")
    old, new = ("\n".join(line[2:] for line in lines if line[0] in marks) for marks in ("- ", "+ "))
    if chapter not in SHOWN_BY or not old or old == new:
        raise ValueError(f"{where}: an edit changes what stands in one of {', '.join(SHOWN_BY)}")
    return Edit(chapter, old, new)


CHAPTERS = dict(read_chapter(Path(__file__).parent / f"{name}.txt") for name in _FILES)
MUTANTS = tuple(mutant for mutants in CHAPTERS.values() for mutant in mutants)
