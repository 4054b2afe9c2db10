"""``python -m shd_ref.conformance``: judge a Python module or a program from the command line."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from shd_ref.conformance.program import Program, ProgramError, make_request
from shd_ref.conformance.report import KnownFailures, KnownFailuresError, Report
from shd_ref.conformance.runner import cases, judge
from shd_ref.conformance.specification import DTYPES
from shd_ref.conformance.vectors import VectorError
from shd_ref.printable import printable

PASSED, FAILED, UNUSABLE = 0, 1, 2


def main(
    argv: Sequence[str] | None = None,
    prog: str = "python -m shd_ref.conformance",
    parser: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> int:
    """Judge one implementation: 0 where it conforms, 1 where something failed, 2 where nothing could be judged."""
    made = make_parser(prog, parser)
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = made.parse_args(arguments)
    if options.arguments and not options.program:
        made.error(f"unexpected arguments: {' '.join(options.arguments)}")
    if not options.timeout > 0:
        made.error(f"--timeout must be above 0; got {options.timeout:g}")
    try:
        status, text = _judge(options)
    except (ProgramError, VectorError, KnownFailuresError, OSError) as error:
        sys.stderr.write(printable(f"shd_ref.conformance: {error}\n"))
        return UNUSABLE
    sys.stdout.write(printable(text))
    return status


def _judge(options: argparse.Namespace) -> tuple[int, str]:
    """The exit status, and the words for standard output."""
    if options.list:
        items = cases(options.only, vectors=options.vectors)
        if options.json:
            return PASSED, json.dumps([{"id": item.id, "spec": item.spec} for item in items]) + "\n"
        return PASSED, "".join(f"{item.id}  {' '.join(item.spec)}\n" for item in items)
    known = KnownFailures.read(options.known_failures) if options.known_failures else None
    program, how = _open_implementation(options)
    chosen = {"only": options.only, "vectors": options.vectors, "seed": options.seed, "known": known}
    with program:
        reports = [judge(program, dtype=dtype, name=program.name, **chosen) for dtype in options.dtype or ["float64"]]
    if options.save_calls:
        _save_calls(Path(options.save_calls), reports)
    document = {"runs": [report.to_json() for report in reports]}
    status = UNUSABLE if any(report.empty for report in reports) else PASSED
    status = FAILED if any(not report.passed for report in reports) else status
    if options.report:
        _write(Path(options.report), json.dumps(document, indent=1) + "\n")
    if options.json:
        return status, json.dumps(document) + "\n"
    return status, "".join(report.summary(how) + "\n\n" for report in reports)


def _open_implementation(options: argparse.Namespace) -> tuple[Program, str]:
    """The implementation in a process of its own, and the options that name it."""
    if options.impl:
        command, how = [sys.executable, "-m", "shd_ref.conformance.host", options.impl], f"--impl {options.impl}"
        return Program(command, timeout=options.timeout, name=how), how
    command = shlex.split(options.program) if len(options.arguments) == 0 else [options.program, *options.arguments]
    return Program(command, timeout=options.timeout), f"--program {shlex.quote(shlex.join(command))}"


def make_parser(prog: str, kind: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options, for ``shd conformance`` too."""
    parser = kind(
        prog=prog,
        description="Does an implementation compute what specs/shd.md says? Exit status: 0 it conforms, "
        "1 something failed, 2 nothing could be judged.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--impl", metavar="MODULE[:OBJECT]", help="a Python module, or an adapter object in it")
    what.add_argument("--program", metavar="COMMAND", help="a program that speaks the JSON-lines protocol")
    what.add_argument("--list", action="store_true", help="list the ids of all items and the sentences they check")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of the program, after --")
    parser.add_argument(
        "--dtype", action="append", choices=DTYPES, help="dtype of the implementation; repeat for several"
    )
    parser.add_argument("--only", action="append", metavar="ID", help="an id or glob, such as 'law/*'; repeatable")
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="seed of the laws' inputs (default 0), or random"
    )
    parser.add_argument("--known-failures", metavar="FILE", help="lines of `ID [@dtype]  # reason`")
    parser.add_argument("--json", action="store_true", help="print the report, or the list, as JSON")
    parser.add_argument("--report", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--save-calls", metavar="FOLDER", help="write the exact call of every failure as JSON")
    parser.add_argument(
        "--timeout", type=float, default=20.0, metavar="SECONDS", help="time limit per answer (default 20)"
    )
    parser.add_argument("--vectors", metavar="FOLDER", help="vector files that replace the specification's")
    return parser


def _seed(text: str) -> int:
    """A seed of as many bits as the laws' generator has, drawn where it is asked for."""
    if text == "random":
        return secrets.randbits(32)
    if not (text.isdecimal() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"must be from 0 to {2**32 - 1}, or random; got {text}")
    return int(text)


def _save_calls(folder: Path, reports: Sequence[Report]) -> None:
    """One file a failure, in the form in which programs are asked."""
    folder.mkdir(parents=True, exist_ok=True)
    for report in reports:
        for result in report.failures:
            if result.call:
                request = make_request(result.call.operation, result.call.inputs, result.dtype)
                path = folder / f"{result.id.replace('/', '-')}-{result.dtype}.json"
                _write(path, json.dumps(request) + "\n")


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all; a pipe or a terminal as it comes."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
