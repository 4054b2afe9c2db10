"""JSON documents of the cache: one spelling, their own checksum, strict reading (CACHE-10 to CACHE-15); foreign JSON.

Content becomes dataclasses by their type hints (msgspec). What these would be written as must be what was read: so
nothing is converted, no member is unknown, and none is there with its default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, cast

import numpy as np

from shd_ref.cache.storage.storage import NEEDS, Storage, xxh3_128
from shd_ref.errors import ShdError, import_package

MAX_DOCUMENT_BYTES: Final = 1 << 28
"""Larger documents are refused unread (CACHE-14)."""

MAX_INTEGER: Final = 2**53 - 1
"""Integers are 0 to this, exact in every JSON reader (CACHE-12)."""

_Content = TypeVar("_Content")
_OPTIONAL: Final = "optional"


def optional(default: Any) -> Any:
    """A dataclass field that a document leaves out where it has this default (CACHE-16)."""
    return dataclasses.field(default=default, metadata={_OPTIONAL: True})


def encode_document(content: Any, **more: Any) -> bytes:
    """Canonical bytes of a dataclass and further members, with the checksum added (CACHE-11, CACHE-13)."""
    members = fields_of(content) | more
    return _serialise(members | {"checksum": xxh3_128(_serialise(members))})


def checksum_of(content: Any) -> str:
    """The checksum of a dataclass: XXH3-128 of its canonical bytes without the checksum (CACHE-13)."""
    return xxh3_128(_serialise(fields_of(content)))


def read_document(storage: Storage, name: str) -> bytes:
    """A document that is regular and not too large (CACHE-14); FileNotFoundError where there is none."""
    size = storage.size(name)
    if size > MAX_DOCUMENT_BYTES:
        message = f"{storage.locate(name)} must hold at most {MAX_DOCUMENT_BYTES} bytes; got {size}"
        raise ShdError("cache-corrupt", message, "CACHE-14")
    data = np.empty(size, dtype=np.uint8)
    return data[: storage.open(name)(0, [data])].tobytes()


def parse_members(data: bytes, source: object) -> dict[str, Any]:
    """The members of a document whose spelling and checksum are right; ``cache-corrupt`` naming ``source``."""
    try:
        members = json.loads(data, parse_int=_parse_integer)
        canonical = isinstance(members, dict) and _serialise(members) == data
    except (ValueError, RecursionError) as error:  # not JSON, NaN, a huge number, or nested too deep
        raise _corrupt(source, f"not a document of this format: {error}", "CACHE-11") from error
    if not canonical:
        problem = "not in canonical form: its bytes were changed, or another tool wrote them"
        raise _corrupt(source, problem, "CACHE-11")
    checksum = members.pop("checksum", None)
    expected = xxh3_128(_serialise(members))
    if checksum != expected:
        raise _corrupt(source, f"its checksum must be {expected}; got {checksum}", "CACHE-13")
    return cast(dict[str, Any], members)


def build(kind: type[_Content], members: dict[str, Any], source: object) -> _Content:
    """A dataclass of members, and of no others; ``cache-corrupt``."""
    with refusing(source):
        content = convert(members, kind)
    check_members(fields_of(content), members, source)
    return content


def convert(value: Any, kind: type[_Content]) -> _Content:
    """A value by its type hints; ValueError for another type, or a member that is missing."""
    msgspec = import_package("msgspec", NEEDS)
    try:
        return cast(_Content, msgspec.convert(value, kind, dec_hook=lambda custom, inner: custom.from_members(inner)))
    except msgspec.ValidationError as error:  # no ValueError in all releases
        raise ValueError(str(error)) from error


def check_members(content: dict[str, Any], members: dict[str, Any], source: object) -> None:
    """Refuse members that do not come back where content made of them is written: ``cache-corrupt``."""
    if _serialise(content) != _serialise(members):
        odd = ", ".join(sorted(members.keys() ^ content.keys())) or "an inner one"
        problem = f"{odd} is unknown, or must be left out where it has its default"
        raise _corrupt(source, f"its members must be those of the specification; {problem}", "CACHE-15")


@contextlib.contextmanager
def refusing(source: object) -> Iterator[None]:
    """A document's own rules as ``cache-corrupt``."""
    try:
        yield
    except ValueError as error:  # of msgspec, and ShdError
        raise _corrupt(source, str(error), "CACHE-15") from error


def fields_of(content: Any) -> dict[str, Any]:
    """The members of a dataclass; of a mapping, its own."""
    if isinstance(content, dict):
        return content
    return {
        field.name: value
        for field in dataclasses.fields(content)
        if (value := getattr(content, field.name)) != field.default or _OPTIONAL not in field.metadata
    }


def _parse_integer(digits: str) -> int:
    number = int(digits)
    if not 0 <= number <= MAX_INTEGER:
        raise ValueError(f"integers must be 0 to 2^53 - 1; got {digits[:20]}")
    return number


def _serialise(members: dict[str, Any]) -> bytes:
    text = json.dumps(members, sort_keys=True, separators=(",", ":"), allow_nan=False, default=fields_of)
    return text.encode("ascii") + b"\n"


def _corrupt(source: object, message: str, spec_id: str) -> ShdError:
    advice = "restore the file from a copy, or write it again: a receipt with its shard, a manifest with the cache"
    return ShdError("cache-corrupt", f"{source}: {message}; {advice}", spec_id)


MAX_JSON_BYTES: Final = 1 << 26
"""Larger ones are refused unread: the smallest objects take twenty times their bytes in memory."""


def parse_json(data: bytes) -> Any:
    """The value of a JSON text; ValueError for repeated members, NaN, infinities, deep nesting, or a large text."""
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"it must have at most {MAX_JSON_BYTES} bytes")
    try:
        return json.loads(str(data, "utf-8"), object_pairs_hook=_distinct, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(file: Path) -> Any:
    """The value of a JSON file; OSError, ValueError."""
    with file.open("rb") as stream:
        return parse_json(stream.read(MAX_JSON_BYTES + 1))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the member {name[:80]!r} is there twice")
    return members


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
