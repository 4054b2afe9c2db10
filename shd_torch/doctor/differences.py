"""What differs between the models of a pair, and what each difference does to attention supervision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shd_ref.cache.storage.documents import read_json
from shd_ref.errors import ShdError
from shd_torch.doctor.pair import Parts

BLOCKS, HURTS, NOTE = EFFECTS = ("blocks", "hurts", "note")
"""Supervision cannot work with it; is known to do worse with it; good to know."""

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
    students without them lose by attention transfer.
    """
    found: list[Difference] = []

    def note(part: str, own: object, other: object, effect: str, remedy: str) -> None:
        words = ("no", "yes")[own is True], ("no", "yes")[other is True]
        own, other = words if isinstance(own, bool) else (own, other)
        found.append(Difference(part, str(own), str(other), effect, remedy))

    if student.heads > teacher.heads:
        note("heads", teacher.heads, student.heads, BLOCKS, "heads can be merged, not split: use fewer")
    if student.layers > teacher.layers:
        note("layers", teacher.layers, student.layers, NOTE, "name the pairs: some layers stay untaught")
    if teacher.learned_sinks:
        effect = NOTE if student.learned_sinks else HURTS
        remedy = "the teacher's rows sum to less than one; give the student sinks too"
        note("learned sinks", teacher.learned_sinks, student.learned_sinks, effect, remedy)
    if (teacher.patches is None) != (student.patches is None):
        own, other = ("images" if parts.patches else "texts" for parts in (teacher, student))
        note("input", own, other, BLOCKS, "choose a teacher with the same kind of input")
    else:
        _compare_inputs(teacher, student, note)
    for name, has, has_too, remedy in (
        ("LayerScale", teacher.layer_scale, student.layer_scale, "one too, at its usual start (arXiv 2605.07191)"),
        ("registers", bool(teacher.registers), bool(student.registers), "as many, at random (arXiv 2605.07191)"),
        ("QK-norm", teacher.qk_norm, student.qk_norm, "one too"),
    ):
        if has and not has_too:
            note(name, has, has_too, HURTS, f"give the student {remedy}")
        elif has_too and not has:
            note(name, has, has_too, NOTE, "the student has a part that the teacher lacks")
    if teacher.positions != student.positions:
        remedy = "distance is encoded differently: use the teacher's kind of positions"
        note("positions", teacher.positions, student.positions, HURTS, remedy)
    return sorted(found, key=lambda one: EFFECTS.index(one.effect))


def _compare_inputs(teacher: Parts, student: Parts, note: Callable[[str, object, object, str, str], None]) -> None:
    """Tokens and their order, of two models of texts or of images."""
    if teacher.patches != student.patches:
        own, other = (" x ".join(map(str, parts.patches or ())) for parts in (teacher, student))
        note("patches", own, other, BLOCKS, "choose image size, patch size and channels so that the grids agree")
    elif teacher.specials != student.specials:
        remedy = "give the student the same, or cut merged maps with shd_torch.maps.align_tokens"
        note("tokens beside patches", teacher.specials, student.specials, HURTS, remedy)
    if teacher.vocabulary != student.vocabulary and teacher.vocabulary and student.vocabulary:
        remedy = "fine for attention if both make the same tokens; KD reads the first classes (vocab_size)"
        note("vocabulary", teacher.vocabulary, student.vocabulary, NOTE, remedy)
    if teacher.is_causal != student.is_causal:
        own, other = ("causal" if parts.is_causal else "both ways" for parts in (teacher, student))
        remedy = "the student would learn not to look ahead: choose a bidirectional teacher"
        if student.is_causal:
            remedy = "the teacher attends where the student may not: choose a causal teacher"
        note("direction", own, other, BLOCKS if student.is_causal else HURTS, remedy)
    if student.window is not None and (teacher.window is None or teacher.window > student.window):
        remedy = "texts longer than the window have mass where the student may not look: support='intersect'"
        note("window", teacher.window or "all", student.window, HURTS, remedy)


def compare_tokenizers(teacher: Path | None, student: Path) -> list[Difference]:
    """Whether both folders make the same tokens of a text: maps of different tokens do not correspond."""
    own, other = (None if folder is None else _read_tokenizer(folder) for folder in (teacher, student))
    names = [name for name in _OF_TOKENS if own and other and own.get(name) != other.get(name)]
    if not names:
        return []
    # Tokens that were added do not change what other text becomes.
    is_model = names != ["added_tokens"]
    effect = BLOCKS if is_model else NOTE
    remedy = "train the student with the teacher's tokenizer" if is_model else "keep added tokens out of shared texts"
    another = f"another {', '.join(name.replace('_', ' ') for name in names)}"
    return [Difference("tokenizer", "its own", another, effect, remedy)]


def _read_tokenizer(folder: Path) -> dict[str, Any] | None:
    path = folder / "tokenizer.json"
    if not path.is_file() or path.stat().st_size > TOKENIZER_BYTES:
        return None
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise ShdError("read-failed", f"{path} must be a tokenizer's JSON: {error!r}") from error
    return document if isinstance(document, dict) else None
