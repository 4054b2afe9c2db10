"""JSON documents of the cache: one spelling, their own checksum, strict reading (CACHE-10 to CACHE-15); foreign JSON.

Content becomes dataclasses by their type hints, without any conversion. Fields made with ``optional`` are left out
where they have their default. Where a hint allows several dataclasses, the member ``form`` tells which it is.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from shd_ref.cache.storage.storage import Storage, xxh3_128
from shd_ref.errors import ShdError

MAX_DOCUMENT_BYTES: Final = 1 << 28
"""Larger documents are refused unread (CACHE-14)."""

MAX_INTEGER: Final = 2**53 - 1
"""Integers are 0 to this, exact in every JSON reader (CACHE-12)."""

_Content = TypeVar("_Content")
_PRIMITIVES: Final = (int, str, float, bool)
_OPTIONAL: Final = "optional"
_TAG: Final = "form"
_NOTHING: Final[Mapping[str, Any]] = types.MappingProxyType({})


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
    return storage.read(name)


def parse_members(data: bytes, source: object) -> dict[str, Any]:
    """The members of a document whose spelling and checksum are right; ``cache-corrupt`` naming ``source``."""
    try:
        members = json.loads(data)
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
    return typing.cast(dict[str, Any], members)


def build(
    kind: type[_Content],
    members: dict[str, Any],
    source: object,
    gathered: Mapping[str, Mapping[str, Any]] = _NOTHING,
) -> _Content:
    """A dataclass of members; ``gathered`` fields are tuples of the members of these names and types."""
    rest = {name: value for name, value in members.items() if not any(name in hints for hints in gathered.values())}
    try:
        fields = {
            field: tuple(_build(hint, members[name], name) for name, hint in hints.items() if name in members)
            for field, hints in gathered.items()
        }
        return typing.cast(_Content, _build_fields(kind, rest, "", fields))
    except ShdError as error:
        raise _corrupt(source, str(error), None) from error


def fields_of(content: Any) -> dict[str, Any]:
    """The members of a dataclass; of a mapping, its own."""
    if isinstance(content, dict):
        return content
    return {
        field.name: value
        for field in dataclasses.fields(content)
        if (value := getattr(content, field.name)) != field.default or _OPTIONAL not in field.metadata
    }


def _serialise(members: dict[str, Any]) -> bytes:
    text = json.dumps(members, sort_keys=True, separators=(",", ":"), allow_nan=False, default=fields_of)
    return text.encode("ascii") + b"\n"


def _corrupt(source: object, message: str, spec_id: str | None) -> ShdError:
    advice = "restore the file from a copy, or write it again: a receipt with its shard, a manifest with the cache"
    return ShdError("cache-corrupt", f"{source}: {message}; {advice}", spec_id)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else hints
    return {name: hints[name] for name in names}


@functools.cache
def _defaults(kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Members that may be left out, and those that a dataclass does not take, as its kind decides them."""
    fields = dataclasses.fields(kind)
    left_out = {field.name: field.default for field in fields if _OPTIONAL in field.metadata}
    return left_out, {field.name: field.default for field in fields if not field.init}


@functools.cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    origin = typing.get_origin(hint)
    return origin, typing.get_args(hint) if origin else tuple(_hints(hint).values())


def _build(hint: Any, value: Any, where: str) -> Any:
    if hint in _PRIMITIVES:
        if type(value) is hint and (hint is not int or 0 <= value <= MAX_INTEGER):
            return value
        raise _mistyped(hint.__name__, value, where)
    origin, arguments = _parts(hint)
    if origin is types.UnionType:
        if value is None and types.NoneType in arguments:
            return None
        return _build(_choose_kind(arguments, value, where), value, where)
    if origin is tuple:
        return _build_tuple(arguments, value, where)
    if issubclass(hint, tuple):  # a named tuple is stored as a list
        return hint(*_build_tuple(arguments, value, where))
    if not issubclass(hint, dict):
        return _build_fields(hint, value, where)
    hints = hint.hints()  # of members of which none must be there
    if type(value) is not dict:
        raise _mistyped("an object", value, where)
    if unknown := sorted(value.keys() - hints.keys()):
        raise ShdError("cache-corrupt", f"{where} must have members of {sorted(hints)}; got {unknown}", "CACHE-15")
    return hint({name: _build(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _build_tuple(hints: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if type(value) is not list:
        raise _mistyped("a list", value, where)
    if hints[-1] is Ellipsis:
        return tuple([_build(hints[0], item, where) for item in value])
    if len(value) != len(hints):
        raise _mistyped(f"{len(hints)} items", value, where)
    return tuple([_build(hint, item, where) for hint, item in zip(hints, value, strict=True)])


def _build_fields(kind: type, value: Any, where: str, gathered: Mapping[str, Any] = _NOTHING) -> Any:
    hints = {name: hint for name, hint in _hints(kind).items() if name not in gathered} if gathered else _hints(kind)
    if type(value) is not dict:
        raise _mistyped("an object", value, where)
    defaults, fixed = _defaults(kind)
    for name, default in defaults.items():
        if name in value and value[name] == (list(default) if isinstance(default, tuple) else default):
            message = f"{where or 'the document'} must leave out {name} where it is {value[name]!r}"
            raise ShdError("cache-corrupt", message, "CACHE-16")
    unknown, missing = sorted(value.keys() - hints.keys()), sorted(hints.keys() - value.keys() - defaults.keys())
    if unknown or missing:
        rule = f"{where or 'the document'} must have the members of the spec"
        raise ShdError("cache-corrupt", f"{rule}; unknown {unknown}, missing {missing}", "CACHE-15")
    return kind(
        **{
            name: _build(hint, value[name], f"{where}.{name}" if where else name)
            for name, hint in hints.items()
            if name in value and name not in fixed
        },
        **gathered,
    )


def _choose_kind(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """Which of several types a value is of: the one that is not None, or the dataclass that its ``form`` names."""
    if len(kinds) == 2 and kinds[1] is types.NoneType:
        return kinds[0]
    tags = {_defaults(kind)[1][_TAG]: kind for kind in kinds if kind is not types.NoneType}
    tag = value.get(_TAG) if type(value) is dict else None
    if not isinstance(tag, str) or tag not in tags:
        raise _mistyped(f"an object whose {_TAG} is one of {', '.join(tags)}", tag, where)
    return tags[tag]


def _mistyped(expected: str, value: Any, where: str) -> ShdError:
    return ShdError("cache-corrupt", f"{where} must be {expected}; got {str(value)[:80]!r}", "CACHE-15")


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
