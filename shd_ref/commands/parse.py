"""What options mean that typer does not read itself: lists, pairs and parts, all written with commas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from shd_ref.cache.forms.attention import KINDS
from shd_ref.errors import ShdError


def read_list(
    option: str, text: str | None, *, kind: type, choices: tuple[str, ...] = (), least: int | None = None
) -> tuple[Any, ...]:
    """The values of an option that takes several, such as ``4,6``: numbers from ``least``, or some of ``choices``."""
    if text is None:
        return ()
    parts = [word.strip() for word in text.split(",")]
    if kind is int:
        least = 1 if least is None else least
        if not all(word.isdecimal() and int(word) >= least for word in parts):
            message = f"{option} must be numbers from {least}, separated by commas: 4,6; got {text!r}"
            raise ShdError("argument-value", message)
        return tuple(int(word) for word in parts)
    if not set(parts) <= set(choices):
        message = f"{option} must be one or several of {', '.join(choices)}, separated by commas; got {text!r}"
        raise ShdError("argument-value", message)
    return tuple(parts)


def parse_student_layers(text: str | None) -> int | dict[str, int] | None:
    """``--student-layers``: a number, or one for each kind."""
    if text is None:
        return None
    parts = [word.strip().partition("=") for word in text.split(",")]
    numbers = {kind.strip(): number.strip() for kind, _, number in parts}
    if len(parts) == 1 and not parts[0][1]:
        numbers = {"": parts[0][0]}
    counts = {kind: int(number) if number.isdecimal() else 0 for kind, number in numbers.items()}
    known = counts.keys() <= set(KINDS) or counts.keys() == {""}
    if len(counts) != len(parts) or not known or min(counts.values()) < 1:
        rule = f"a number from 1, or one for each kind ({', '.join(KINDS)}) such as encoder=2,decoder=3,cross=3"
        raise ShdError("argument-value", f"--student-layers must be {rule}; got {text!r}", "LAYER-2")
    return counts.get("", counts)


def parse_layer_pairs(text: str | None) -> tuple[tuple[int, int], ...] | None:
    """``--layer-pairs``."""
    if text is None:
        return None
    try:
        pairs = [pair.split(":") for pair in text.split(",")]
        return tuple((int(student), int(teacher)) for student, teacher in pairs)
    except ValueError:
        message = f"--layer-pairs must be student:teacher pairs such as 0:3,1:7; got {text!r}"
        raise ShdError("argument-value", message, "LAYER-4") from None


def parse_shards(text: str | None) -> tuple[int, int]:
    """``--shards``: part and number of parts."""
    if text is None:
        return (0, 1)
    share, _, parts = text.partition("/")
    if not (share.isdecimal() and parts.isdecimal() and int(share) < int(parts)):
        raise ShdError("argument-value", f"--shards must be i/n with 0 <= i < n, such as 0/4; got {text!r}")
    return int(share), int(parts)


PARSERS: Final[dict[str, Callable[[Any], Any]]] = {
    "num_student_layers": parse_student_layers,
    "layer_pairs": parse_layer_pairs,
    "shards": parse_shards,
}
"""By field: how the text of its option is read."""
