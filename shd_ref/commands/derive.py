"""Commands made of plain functions: their options come from annotations, those of dataclasses included.

``--json`` prints the document that a function returns; a result that is a failure is raised as ``Failed``. A
parameter or field ``Annotated[T, Shown(...)]`` is an option of the same name; a parameter whose type is a dataclass
stands for the options of its fields, all but those of ``Without``. What typer itself annotates is left to typer.
"""

from __future__ import annotations

import functools
import inspect
import json
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from shd_ref.cache.forms.attention import KINDS
from shd_ref.commands.terminal import STARTS_OVER, ShownCommand, console, quiet_progress, reported_errors, show_all
from shd_ref.errors import ShdError
from shd_ref.teacher.options import LAST, PANELS, Pooling, Shown

Document: TypeAlias = dict[str, Any] | list[dict[str, Any]]
"""A command's result as JSON can say it: one object, or one for each student."""

_PLAIN: Final[dict[Any, str]] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""Types that typer reads, and what stands for a value in ``--help``."""

_REPEATED: Final = {"with_teachers": "--with-teacher"}
"""By field: options of paths that are given once a value."""

_ENUM: Final[Any] = StrEnum  # of names that are known when a command is made, which no type checker follows

_CALLED: Final = {"pairs": "layer_pairs", "inputs": "data"}
"""What messages of functions below call an argument, and the field that its option comes from."""

LAST_WORD: Final = "last"
"""What stands for ``LAST`` among hidden states."""

_MANY: Final = 25
"""Options that ``--help`` shows all of."""

_LONGEST: Final = 16
"""Characters that choices may take in ``--help`` before the option's name stands for them."""


@dataclass(frozen=True)
class Without:
    """Fields of a dataclass that are not options of a command."""

    names: frozenset[str]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", frozenset(names))


class Failed(typer.Exit):
    """Exit code 1 with a result all the same, such as a list of damaged files."""

    def __init__(self, document: Document) -> None:
        super().__init__(1)
        self.document = document


def require_packages(*packages: str) -> None:
    """Refuse to run a command of ``shd-torch`` without some packages: ``dependency-missing``.

    The remedy brings what all of them need: with the extra of one command the next one would fail.
    """
    for package in packages:
        if find_spec(package) is None:
            remedy = "pip install '.[cpu]' (in a checkout; '.[all]' for a GPU)"
            raise ShdError("dependency-missing", f"this command needs the package {package}: {remedy}")


def add_command(
    app: typer.Typer,
    function: Callable[..., Document | None],
    *,
    name: str | None = None,
    panel: str | None = None,
    is_long: bool = False,
    after: str = STARTS_OVER,
) -> None:
    """Make a command of a function whose parameters are annotated as this module says.

    A ``ShdError`` becomes one message and exit code 1. ``--json`` prints its result, a line each of a list, or the
    ``document`` of a ``Failed``; a function that returns None has none. ``is_long`` adds ``--quiet``. ``after`` says
    what the same command does after one that was stopped, or that could not write.
    """
    app.command(name or function.__name__.replace("_", "-"), cls=ShownCommand, rich_help_panel=panel)(
        expand(function, is_long=is_long, after=after)
    )


def expand(
    function: Callable[..., Document | None], *, is_long: bool = False, after: str = STARTS_OVER
) -> Callable[..., None]:
    """The function as typer can take it: one parameter an option, in the order of the panels."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: group for name, hint in hints.items() if (group := _Group.of(hint)) is not None}
    readers: dict[str, Callable[[Any], Any]] = {}
    parameters: list[inspect.Parameter] = []
    needs: list[tuple[str, str]] = []
    for name, parameter in inspect.signature(function).parameters.items():
        options_of = groups[name].fields if name in groups else {name: (hints[name], parameter.default)}
        for field, (hint, default) in options_of.items():
            parameters.append(_parameter(field, hint, default, readers))
            if (shown := shown_of(hint)) is not None and shown.needs is not None:
                needs.append((field, shown.needs))
    if hints.get("return") is not types.NoneType:
        parameters.append(flag("json", "Print only the result, as JSON, on standard output."))
    if is_long:
        parameters.append(quiet_flag())
    is_short = len(parameters) <= _MANY
    option = typer.Option("--help-all", is_eager=True, callback=show_all, hidden=is_short, help="Show all options.")
    parameters.append(keyword("help_all", Annotated[bool, option], False))
    defaults = {one.name: one.default for one in parameters}
    arguments = {one.name for one in parameters if isinstance(get_args(one.annotation)[1], ArgumentInfo)}
    options = {one.name: option_of(one.name) for one in parameters if one.name not in arguments}
    # Fields that the command fills in itself, as it makes a number of each of several; and what the mathematics calls
    # an argument.
    for group in groups.values():
        options |= {name: option_of(name) for name in group.names if option_of(name) in options.values()}
    options = {f"num_{name}": option for name, option in options.items()} | options
    options |= {name: options[field] for name, field in _CALLED.items() if field in options}

    def command(**given: Any) -> None:
        with reported_errors(options, after):
            _check_needs(needs, given, defaults)
            values = {name: readers[name](value) if name in readers else value for name, value in given.items()}
            is_json, is_quiet = values.pop("json", False), values.pop("quiet", False)
            values.pop("help_all")
            built = {name: group.build(values) for name, group in groups.items()}
            with _json_alone(is_json) as tell, quiet_progress(is_quiet):
                tell(function(**values, **built))

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(sorted(parameters, key=_place))  # type: ignore[attr-defined]
    return command


def _check_needs(needs: list[tuple[str, str]], given: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuse options that are given without those that they belong to, as nothing would read them."""
    for name, needed in needs:
        field, _, choices = needed.partition("=")
        if field not in given or given[name] == defaults[name]:
            continue
        value, known = given[field], choices.replace("|", " or ")
        if (choices and not {*str(value).split(",")} & {*choices.split("|")}) or not value or value == "none":
            option = f"{option_of(field)} {known}".rstrip()
            raise ShdError("argument-value", f"{option_of(name)} must go with {option}; got {given[name]} without it")


@contextmanager
def _json_alone(is_wanted: bool) -> Iterator[Callable[[Document | None], None]]:
    """What takes a command's result; where JSON is wanted it prints that, and the console is silent meanwhile."""

    def tell(result: Document | None) -> None:
        if is_wanted:
            for document in result if isinstance(result, list) else [result]:
                print(json.dumps(document, default=_plain))

    silent, console.quiet = console.quiet, is_wanted or console.quiet
    try:
        yield tell
    except Failed as failed:
        tell(failed.document)
        raise
    finally:
        console.quiet = silent


def _plain(value: Any) -> Any:
    """A JSON value for a value of Python or NumPy."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def keyword(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """A parameter of a command as typer reads it."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def flag(name: str, text: str) -> inspect.Parameter:
    """An option without a value."""
    return keyword(name, Annotated[bool, typer.Option(f"--{name}", help=text)], False)


def quiet_flag() -> inspect.Parameter:
    """``--quiet``."""
    return flag("quiet", "Hide progress; results, remarks and errors are still shown.")


def option_of(field: str) -> str:
    """``num_student_heads`` -> ``--student-heads``; the singular where each value gets its own option."""
    return _REPEATED.get(field) or f"--{field.removeprefix('num_').replace('_', '-')}"


@dataclass(frozen=True)
class _Group:
    """A parameter that stands for the fields of a dataclass."""

    cls: type
    names: tuple[str, ...]
    fields: dict[str, tuple[Any, Any]]
    is_partial: bool
    is_optional: bool

    @classmethod
    def of(cls, hint: Any) -> _Group | None:
        """None for a parameter that stands for itself.

        ``functools.partial[D]`` builds a ``partial`` that the command calls with the fields it lacks; ``D | None`` is
        None where the first field is not given.
        """
        without: frozenset[str] = frozenset()
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            without = frozenset().union(*(note.names for note in notes if isinstance(note, Without)))
        is_partial = get_origin(hint) is functools.partial
        target, is_optional = (get_args(hint)[0], False) if is_partial else _strip_none(hint)
        if not is_dataclass(target) or not isinstance(target, type):
            return None
        hints = get_type_hints(target, include_extras=True)
        shown = {
            field.name: (hints[field.name], inspect.Parameter.empty if field.default is MISSING else field.default)
            for field in fields(target)
            if field.name not in without and shown_of(hints[field.name]) is not None
        }
        if is_optional:
            first = next(iter(shown))
            shown[first] = shown[first][0], None
        return cls(target, tuple(field.name for field in fields(target)), shown, is_partial, is_optional)

    def build(self, values: dict[str, Any]) -> Any:
        """The dataclass, of values that are taken out of all."""
        own = {name: values.pop(name) for name in self.fields}
        if self.is_partial:
            return functools.partial(self.cls, **own)
        first = next(iter(own))
        if self.is_optional and own[first] is None:
            for name, value in own.items():
                if value != self.fields[name][1]:
                    message = f"{option_of(name)} must go with {option_of(first)}; got {value} without it"
                    raise ShdError("argument-value", message)
            return None
        return self.cls(**own)


def _parameter(name: str, hint: Any, default: Any, readers: dict[str, Callable[[Any], Any]]) -> inspect.Parameter:
    """A parameter that typer can take; what it cannot read itself is a string, with its reader among ``readers``."""
    shown = shown_of(hint)
    if shown is None:
        return keyword(name, hint, default)
    kind, optional = _strip_none(get_args(hint)[0])
    metavar = shown.metavar or _PLAIN.get(kind)
    if name in _REPEATED:
        readers[name] = tuple
        kind, default = list[Path], []
    elif get_origin(kind) is tuple and name not in PARSERS:
        reader = functools.partial(
            read_list, option_of(name), kind=get_args(kind)[0], choices=shown.choices, least=shown.least
        )
        # Nothing said is no value where the default is no value, and nothing where the default is nothing.
        readers[name] = reader if isinstance(default, tuple) else lambda text: None if text is None else reader(text)
        metavar = metavar or (
            f"{_PLAIN[get_args(kind)[0]]},..." if get_args(kind)[0] in (int, float) else f"{name.upper()},..."
        )
        if isinstance(default, tuple):
            optional, default = optional or not default, ",".join(map(str, default)) or None
        kind = str
    elif shown.choices:
        metavar = "|".join(shown.choices)
        metavar = metavar if len(metavar) <= _LONGEST else name.upper()
        kind = _ENUM(name, {choice: choice for choice in shown.choices})
        readers[name] = lambda value: value.value
        default = kind(default)
    elif kind not in _PLAIN:
        readers[name] = PARSERS[name]
        optional, kind = optional or default is not inspect.Parameter.empty, str
        default = None if optional else default
    option = typer.Option(
        option_of(name),
        help=shown.help,
        min=shown.least if kind in (int, float) else None,
        metavar=metavar,
        rich_help_panel=shown.panel,
    )
    return keyword(name, Annotated[kind | None if optional else kind, option], default)


def shown_of(hint: Any) -> Shown | None:
    """What a field or parameter says of its option; None where it is none."""
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((note for note in notes if isinstance(note, Shown)), None)


def _strip_none(hint: Any) -> tuple[Any, bool]:
    """The type without ``None``, and whether it had it; a union of several others stays one."""
    if get_origin(hint) is not types.UnionType:
        return hint, False
    others = [one for one in get_args(hint) if one is not types.NoneType]
    return functools.reduce(lambda a, b: a | b, others), len(others) < len(get_args(hint))


def _place(parameter: inspect.Parameter) -> int:
    """Everyday options first, then panels in their order; all keep the order of the signature."""
    panel = getattr(get_args(parameter.annotation)[1], "rich_help_panel", None)
    return 1 + PANELS.index(panel) if panel in PANELS else 0


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
    if kind is float:
        try:
            return tuple(map(float, parts))
        except ValueError:
            message = f"{option} must be numbers, separated by commas: 4,6.5; got {text!r}"
            raise ShdError("argument-value", message) from None
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


def parse_pooling(text: str | None) -> Pooling | None:
    """``--embeddings``: a way of pooling, or the folder that names it."""
    if text is None:
        return None
    from shd_ref.teacher.sources.sentence_folder import read_pooling

    return Pooling.parse(text) or read_pooling(Path(text))


def parse_hidden(text: str | None) -> tuple[int, ...]:
    """``--hidden``: numbers, and ``last``."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    numbers = ",".join(word for word in words if word != LAST_WORD)
    read = read_list("--hidden", numbers or None, kind=int, least=0)
    return read + (LAST,) * (LAST_WORD in words)


PARSERS: Final[dict[str, Callable[[Any], Any]]] = {
    "num_student_layers": parse_student_layers,
    "layer_pairs": parse_layer_pairs,
    "shards": parse_shards,
    "embeddings": parse_pooling,
    "hidden": parse_hidden,
}
"""By field: how the text of its option is read."""
