"""The words of a command line that another command tells the user to paste."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from shd_ref.commands.derive import option_of
from shd_ref.teacher.run.options import Shown


def option_words(*groups: Any, without: Collection[str] = ()) -> list[str]:
    """The options that say what dataclasses hold: those of fields that are ``Shown`` and are not at their default.

    Args:
        *groups: dataclasses.
        without: fields to leave out.
    """
    words: list[str] = []
    for group in groups:
        hints = get_type_hints(type(group), include_extras=True)
        for field in fields(group):
            hint, value = hints[field.name], getattr(group, field.name)
            is_shown = get_origin(hint) is not None and any(isinstance(note, Shown) for note in get_args(hint)[1:])
            if is_shown and field.name not in without and (field.default is MISSING or value != field.default):
                given = value if isinstance(value, tuple) and isinstance(value[0], Path) else (value,)
                words += [word for one in given for word in (option_of(field.name), write_value(field.name, one))]
    return words


def write_value(field: str, value: Any) -> str:
    """A value as ``derive`` reads it again."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={number}" for key, number in value.items())
    if field == "shards":
        return "/".join(map(str, value))
    if isinstance(value, tuple):
        return ",".join(":".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in value)
    return str(value)
