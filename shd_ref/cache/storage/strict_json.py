"""JSON from elsewhere, read strictly: one meaning for every reader, and no more memory than its size allows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final, NoReturn

MAX_JSON_BYTES: Final = 1 << 26
"""Larger ones are refused unread: the smallest objects take twenty times their bytes in memory."""


def parse_json(data: bytes) -> Any:
    """The value of a JSON text; ValueError for repeated members, NaN, infinities, deep nesting, or a large text."""
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"it must have at most {MAX_JSON_BYTES} bytes")
    try:
        return json.loads(str(data, "utf-8"), object_pairs_hook=_members, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(file: Path) -> Any:
    """The value of a JSON file; OSError, ValueError."""
    with file.open("rb") as stream:
        return parse_json(stream.read(MAX_JSON_BYTES + 1))


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the member {name[:80]!r} is there twice")
    return members


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
