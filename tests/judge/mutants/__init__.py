"""Wrong implementations, to judge the judge: each is the reference with one mistake that somebody would make.

They stand in text files beside this one, one a chapter and one an optional part, as ``read_chapter`` describes.
"""

from __future__ import annotations

from pathlib import Path

from judge.mutants.mutant import SHOWN_BY, Edit, Mutant

from shd_ref.conformance.specification import load_mistakes

_FILES = ("maps", "alphas", "merging", "learning", "indexers", "edges", "layouts")
_FIELDS = ("mistake", "on", "dtype")


def read_chapter(path: Path) -> tuple[str, tuple[Mutant, ...]]:
    """The title and the mutants of one file.

    A file is paragraphs: ``# title``, then one for each mutant, whose second to fourth lines are optional::

        name: what it does, in one sentence. Or the name alone, where its mistake says it.
        mistake: a name in specs/mistakes.json; then the report of a failure must recognise it
        on: the operations that show it, where the chapters that it edits have too many
        dtype: float64, for what the tolerances of float32 allow
        in chapter of the reference, and the name of a function where the chapter has several such places
        - an expression or statements that the chapter holds once
        + the code that replaces it
          a line that stays

    ``-``, ``+`` and the blank are followed by one blank and the text; ``in`` begins another edit. Names of local
    variables and the layout are free, and ``...`` is any number of statements (``pattern.py``).

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
    mistake = fields["mistake"]
    if mistake:
        if mistake not in load_mistakes():
            raise ValueError(f"{where}: specs/mistakes.json does not have {mistake!r}")
        wrong = wrong or as_sentence(load_mistakes()[mistake])
    if not wrong or not edits:
        raise ValueError(f"{where}: a mutant needs a sentence and an edit")
    operations = fields["on"].split() or dict.fromkeys(name for edit in edits for name in SHOWN_BY[edit.chapter])
    return Mutant(name, wrong, edits, tuple(operations), mistake, fields["dtype"] or "float32")


def as_sentence(words: str) -> str:
    """With a capital, unless the first word is a name or a formula, and a full stop."""
    first = words.split()[0]
    plain = first == "a" or (first.isalpha() and len(first) > 1)
    return (words[0].upper() + words[1:] if plain else words) + "."


def _edit(where: str, hunk: str) -> Edit:
    heading, *lines = hunk.split("\n")
    chapter, _, function = heading.partition(" ")
    for line in lines:
        if line[:1] not in set("-+ ") or line[1:2].strip():
            raise ValueError(f"{where}: not a line of an edit: {line!r}")
    old, new = ("\n".join(line[2:] for line in lines if line[0] in marks) for marks in ("- ", "+ "))
    if chapter not in SHOWN_BY or not old or old == new:
        raise ValueError(f"{where}: an edit changes what stands in one of {', '.join(SHOWN_BY)}")
    return Edit(chapter, old, new, function)


CHAPTERS = dict(read_chapter(Path(__file__).parent / f"{name}.txt") for name in _FILES)
MUTANTS = tuple(mutant for mutants in CHAPTERS.values() for mutant in mutants)
