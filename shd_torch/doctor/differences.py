"""What differs between the models of a pair, and what each difference does to attention supervision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shd_ref.cache.storage.strict_json import read_json
from shd_ref.errors import ShdError
from shd_torch.doctor.pair import Parts

BLOCKS: Final = "blocks"
"""Supervision cannot work with it."""
HURTS: Final = "hurts"
"""Supervision is known to do worse with it."""
NOTE: Final = "note"
"""Good to know."""

TOKENIZER_BYTES: Final = 2**27
"""A larger tokenizer.json is not read."""

_OF_TOKENS: Final = ("normalizer", "pre_tokenizer", "model", "post_processor", "added_tokens")
"""Sections of tokenizer.json that decide which ids a text becomes."""


@dataclass(frozen=True)
class Difference:
    """Attributes:
    part: of the models.
    teacher, student: what each has.
    effect: ``blocks``, ``hurts`` or ``note``.
    remedy: what to do about it, in a sentence.
    """

    part: str
    teacher: str
    student: str
    effect: str
    remedy: str


def compare_parts(teacher: Parts, student: Parts) -> list[Difference]:
    """All differences of two Hugging Face models, those that block first.

    What hurts is what arXiv 2605.07191 found: where the teacher's attention relies on LayerScale or registers,
    students without them lose by attention transfer, and no longer do once they have such parts, initialised at
    random.
    """
    found = [*_sizes(teacher, student), *_seen(teacher, student), *_inside(teacher, student)]
    return sorted(found, key=lambda one: (BLOCKS, HURTS, NOTE).index(one.effect))


def compare_tokenizers(teacher: Path | None, student: Path) -> list[Difference]:
    """Whether both folders make the same tokens of a text: maps of different tokens do not correspond.

    Raises:
        ShdError: ``read-failed`` for a tokenizer.json that is no JSON.
    """
    given = [_read_tokenizer(folder) if folder is not None else None for folder in (teacher, student)]
    if given[0] is None or given[1] is None:
        return []
    other = [name for name in _OF_TOKENS if given[0].get(name) != given[1].get(name)]
    if not other:
        return []
    # Tokens that were added do not change what other text becomes.
    is_model = any(name != "added_tokens" for name in other)
    what = ", ".join(name.replace("_", " ") for name in other)
    return [
        Difference(
            "tokenizer",
            "its own",
            f"another {what}",
            BLOCKS if is_model else NOTE,
            "train the student with the teacher's tokenizer" if is_model else "keep added tokens out of shared texts",
        )
    ]


def _sizes(teacher: Parts, student: Parts) -> Iterator[Difference]:
    if student.heads > teacher.heads:
        yield Difference(
            "heads", str(teacher.heads), str(student.heads), BLOCKS, "heads can be merged, not split: use fewer"
        )
    if student.layers > teacher.layers:
        yield Difference(
            "layers", str(teacher.layers), str(student.layers), NOTE, "name the pairs: some layers stay untaught"
        )
    if teacher.learned_sinks:
        yield Difference(
            "learned sinks",
            "yes",
            _yes(student.learned_sinks),
            NOTE if student.learned_sinks else HURTS,
            "rows of the teacher sum to less than one; the student should have sinks too",
        )


def _seen(teacher: Parts, student: Parts) -> Iterator[Difference]:
    """What the models look at: tokens and their order."""
    if (teacher.patches is None) != (student.patches is None):
        kinds = ["images" if parts.patches else "texts" for parts in (teacher, student)]
        yield Difference("input", kinds[0], kinds[1], BLOCKS, "choose a teacher that sees what the student sees")
        return
    if teacher.patches != student.patches:
        shown = [" x ".join(map(str, (parts.patches or ())[:2])) for parts in (teacher, student)]
        same = shown[0] == shown[1]
        remedy = "feed both the same channels" if same else "choose image and patch size so that the grids agree"
        shown = [str(parts.patches) for parts in (teacher, student)] if same else shown
        yield Difference("patches", shown[0], shown[1], BLOCKS, remedy)
    elif teacher.specials != student.specials:
        yield Difference(
            "tokens beside patches",
            str(teacher.specials),
            str(student.specials),
            HURTS,
            "give the student the same, or cut merged maps with shd_torch.maps.align_tokens",
        )
    if teacher.vocabulary != student.vocabulary and teacher.vocabulary and student.vocabulary:
        yield Difference(
            "vocabulary",
            str(teacher.vocabulary),
            str(student.vocabulary),
            NOTE,
            "fine for attention if both make the same tokens; KD reads the first classes (vocab_size)",
        )
    if teacher.is_causal != student.is_causal:
        names = [("causal" if parts.is_causal else "both ways") for parts in (teacher, student)]
        remedy = (
            "the teacher attends where the student may not: choose a causal teacher"
            if student.is_causal
            else "the student is taught not to look ahead: choose a teacher that does"
        )
        yield Difference("direction", names[0], names[1], BLOCKS if student.is_causal else HURTS, remedy)
    if student.window is not None and (teacher.window is None or teacher.window > student.window):
        yield Difference(
            "window",
            "all" if teacher.window is None else str(teacher.window),
            str(student.window),
            HURTS,
            "texts longer than the window have mass where the student may not look: support='intersect'",
        )


def _inside(teacher: Parts, student: Parts) -> Iterator[Difference]:
    """Parts of the models' own."""
    for part, own, other, remedy in (
        ("LayerScale", teacher.layer_scale, student.layer_scale, "one too, at its usual start (arXiv 2605.07191)"),
        ("registers", bool(teacher.registers), bool(student.registers), "as many, at random (arXiv 2605.07191)"),
        ("QK-norm", teacher.qk_norm, student.qk_norm, "one too"),
    ):
        if own and not other:
            yield Difference(part, "yes", "no", HURTS, f"give the student {remedy}")
        elif other and not own:
            yield Difference(part, "no", "yes", NOTE, "the student has what the teacher's attention did without")
    if teacher.positions != student.positions:
        yield Difference(
            "positions",
            teacher.positions,
            student.positions,
            HURTS,
            "attention by distance is learned otherwise: the teacher's kind is easier to follow",
        )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _read_tokenizer(folder: Path) -> dict[str, Any] | None:
    path = folder / "tokenizer.json"
    if not path.is_file() or path.stat().st_size > TOKENIZER_BYTES:
        return None
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ShdError("read-failed", f"{path} must be a tokenizer's JSON: {error!r}") from error
    return found if isinstance(found, dict) else None
