"""A program of commands: plain functions whose options cyclopts reads from their annotations and dataclasses.

Every command can print its result as JSON, and says its mistakes in the same way, by one message: exit code 1 for a
``ShdError`` and any other value that an option refuses, 2 for words that are no command line, 130 for Ctrl-C. All
else keeps its traceback.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, is_dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Final, TypeAlias, get_args

from cyclopts import App, ArgumentCollection, CycloptsError, Group, Parameter
from cyclopts.exceptions import CoercionError, ValidationError

import shd_ref
from shd_ref.commands.terminal import PlainConsole, console, marked, messages, quiet_progress
from shd_ref.errors import ShdError, need
from shd_ref.teacher.options import OPTIONS, Needs

Document: TypeAlias = dict[str, Any] | list[dict[str, Any]]
"""A command's result as JSON can say it: one object, or one for each student."""

COMMANDS: Final = {
    "shd": ("inspect", "plan", "precompute", "verify", "report", "ls", "merge", "conformance"),
    "shd-torch": ("compress", "export", "doctor", "shrink", "time"),
}
"""Of both programs, neither of which imports the other's."""

STARTS_OVER: Final = "the same command starts over"
"""After a command that keeps nothing of its work."""

_CALLED: Final = {"pairs": "layer_pairs", "inputs": "data"}
"""Names of arguments in messages of functions below, and the fields of their options."""

_ARGUMENT: Final = re.compile(
    r"^((?:sample \d+ \(key \w+\): )?)"
    r"((?:inputs|data|held_out|compare|tokenizer)(?= \S+)|\w+(?:, \w+)*(?: (?:or|and) \w+)?(?= must ))"
)
"""What a message says must be otherwise, where it begins with it or several, with it and a path, or with the sample
that it is about."""


class Failed(Exception):  # noqa: N818  (no error of the command)
    """Exit code 1 with a result all the same, such as a list of damaged files."""

    def __init__(self, document: Document) -> None:
        super().__init__()
        self.document = document


@OPTIONS
@dataclass(frozen=True)
class _Common:
    """Options of every command."""

    json: Annotated[bool, Parameter(help="Print only the result, as JSON, on standard output.")] = False
    quiet: Annotated[bool, Parameter(help="Hide progress; results, remarks and errors are still shown.")] = False


def require_packages(*packages: str) -> None:
    """Refuse to run a command of ``shd-torch`` without some packages: ``dependency-missing``.

    The remedy brings what all of them need: with the extra of one command the next one would fail.
    """
    for package in packages:
        if find_spec(package) is None:
            remedy = "pip install '.[cpu]' (in a checkout; '.[all]' for a GPU)"
            raise ShdError("dependency-missing", f"this command needs the package {package}: {remedy}")


def option_of(field: str) -> str:
    """``num_student_heads`` -> ``--student-heads``, as the options of fields are called."""
    return f"--{_transform(field)}"


def _transform(name: str) -> str:
    return name.removeprefix("num_").replace("_", "-")


def _show_default(value: Any) -> str | None:
    """A default as one would type it; none of flags, and of options that are simply left out."""
    if isinstance(value, bool) or value in (None, ()):
        return None
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


_PLAIN: Final = Parameter(negative=(), name_transform=_transform, show_default=_show_default, allow_repeating=True)
"""Of options that say nothing else: a flag has no opposite, and the last of several counts."""


class Program:
    """A command line: calling it with its words gives the exit code."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.after: dict[str, str] = {}
        self.app = App(
            name,
            help=text,
            help_format="markdown",
            help_flags="--help",
            version=f"squeezing-heads {shd_ref.__version__}, specification {shd_ref.SPEC_VERSION}",
            version_flags="--version",
            group_commands=Group("Commands", sort_key=-5),
            group_parameters=(options := Group("Options", sort_key=0)),
            default_parameter=_PLAIN,
            config=_check_needs,
        )
        self.app.register_install_completion_command()
        for flag in ("--help", "--version", "--install-completion"):
            self.app[flag].group = (options,)

    def add(
        self,
        function: Callable[..., Document | None],
        *,
        name: str | None = None,
        panel: Group | None = None,
        after: str = STARTS_OVER,
    ) -> None:
        """Add a command; ``after``: what the same one does after it was stopped, or could not write."""
        name = name or function.__name__
        self.after[name] = after

        def command(*words: Any, **options: Any) -> Document | None:
            return function(*words, **options)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        signature = inspect.signature(function, eval_str=True)
        last = inspect.Parameter("common", inspect.Parameter.KEYWORD_ONLY, default=_Common(), annotation=_Common)
        parameters = [*signature.parameters.values(), last]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {}  # those of the signature count
        self.app.command(command, name=name, group=panel, sort_key=len(self.after), default_parameter=_PLAIN)

    def arguments(self, name: str) -> ArgumentCollection:
        return self.app[name].assemble_argument_collection(parse_docstring=False)

    def __call__(self, words: Iterable[str] | None = None) -> int:
        """Run a command line, by default the process's."""
        words = list(sys.argv[1:] if words is None else words)
        name = next(iter(words), "")
        after = self.after.get(name, STARTS_OVER)
        try:
            for program, names in COMMANDS.items():
                if program != self.name and name in names:
                    raise CycloptsError(f"{name} is a command of {program}: {shlex.join([program, *words])}")
            function, bound, _ = self.app.parse_args(
                words, console=PlainConsole(), exit_on_error=False, print_error=False
            )
            if "common" not in bound.signature.parameters:  # --help, --version, and the judge
                return function(*bound.args, **bound.kwargs) or 0
            self._run(function, bound, bound.arguments.pop("common", _Common()))
            sys.stdout.flush()
        except ShdError as error:
            return self._report(error, name, after)
        except CycloptsError as error:
            if isinstance(error.__cause__, ShdError):  # of a function that reads a value
                return self._report(error.__cause__, name, after)
            error.verbose = False
            messages.say(marked("error", "bold red", f": {error}"))
            command = f"{self.name} {name}" if name in self.after else self.name
            messages.say(f"{command} --help says more")
            return 1 if isinstance(error, CoercionError | ValidationError) else 2
        except Failed:
            return 1
        except BrokenPipeError:  # of a reader such as head, which has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except KeyboardInterrupt:
            messages.say(marked("stopped", "yellow", f": {after}"))
            return 130  # as a shell counts SIGINT
        return 0

    def _run(self, function: Callable[..., Any], bound: inspect.BoundArguments, common: _Common) -> None:
        """Run a command; where JSON is wanted its result is printed, and the console is silent meanwhile."""
        silent, console.quiet = console.quiet, common.json or console.quiet
        try:
            with quiet_progress(common.quiet):
                _print_json(function(*bound.args, **bound.kwargs), common.json)
        except Failed as failed:
            _print_json(failed.document, common.json)
            raise
        finally:
            console.quiet = silent

    def _report(self, error: ShdError, name: str, after: str) -> int:
        """Say an error, with the name of the option in place of the argument that the message begins with."""
        option_names: dict[str, str] = {}
        for argument in self.arguments(name) if name in self.after else ():
            if argument.name.startswith("--"):
                field = argument.field_info.name
                option_names |= {f"num_{field}": argument.name, field: argument.name}
        option_names |= {called: option_names[field] for called, field in _CALLED.items() if field in option_names}

        def rename(match: re.Match[str]) -> str:
            return match[1] + re.sub(r"\w+", lambda word: option_names.get(word[0], word[0]), match[2])

        messages.say(marked("error", "bold red", f" ({error.code}): {_ARGUMENT.sub(rename, str(error))}"))
        if error.code == "write-failed" and error.__cause__ is not None:  # else nothing was tried
            messages.say(after)
        return 1


def _check_needs(app: App, words: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse options that are given without those that they belong to, as nothing would read them."""
    by_field = {argument.field_info.name: argument for argument in arguments}
    for argument in arguments:
        needs = [note for note in get_args(argument.field_info.annotation)[1:] if isinstance(note, Needs)]
        for note in needs if argument.tokens else ():
            field, _, choices = note.partition("=")
            needed = by_field[field]
            values = {part for token in needed.tokens for part in (token.value or "yes").split(",")}
            if choices and not values:
                values = set(str(_show_default(needed.field_info.default)).split(","))
            ok = bool(values & {*choices.split("|")}) if choices else bool(values - {"none", "0"})
            option = f"{needed.name} {choices.replace('|', ' or ')}".rstrip()
            got = f"{argument.tokens[0].value} without it"
            need(ok, "argument-value", argument.name, f"go with {option}", got)


def _print_json(result: Document | None, is_wanted: bool) -> None:
    if is_wanted:
        for document in result if isinstance(result, list) else [result]:
            print(json.dumps(document, default=_plain))


def _plain(value: Any) -> Any:
    """A JSON value for a value of Python or NumPy."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)
