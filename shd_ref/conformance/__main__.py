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

from shd_ref.conformance.doors import Program, ProgramError
from shd_ref.conformance.judging import cases, judge
from shd_ref.conformance.specification import DTYPES, OUTPUTS, load_everything
from shd_ref.printable import printable

PASSED, FAILED, UNUSABLE = 0, 1, 2


def main(argv: Sequence[str] | None = None, prog: str = "python -m shd_ref.conformance") -> int:
    """Judge one implementation: 0 where it conforms, 1 where something failed, 2 where nothing could be judged."""
    parser = make_parser(prog)
    options = parser.parse_args(argv)
    if options.arguments and not options.program:
        parser.error(f"unexpected arguments: {' '.join(options.arguments)}")
    if not options.timeout > 0:
        parser.error(f"--timeout must be above 0; got {options.timeout:g}")
    if options.list:
        sys.stdout.write("".join(f"{case.id}\n" for case in cases(options.only)))
        return PASSED
    if not cases(options.only):
        parser.error(f"--only names nothing that --list shows; got {' '.join(options.only)}")
    # All that a verdict depends on is in memory before the implementation starts, and no later import searches the
    # current folder, which is its own.
    load_everything()
    sys.path[:] = [folder for folder in sys.path if folder not in ("", str(Path.cwd()))]
    try:
        status, text = _judge(options)
    except (ProgramError, OSError) as error:
        sys.stderr.write(printable(f"shd_ref.conformance: {error}\n"))
        return UNUSABLE
    sys.stdout.write(printable(text))
    return status


def _judge(options: argparse.Namespace) -> tuple[int, str]:
    """The exit status, and the words for standard output."""
    seed = secrets.randbits(32) if options.seed is None else options.seed
    chosen = {"only": options.only, "seed": seed, "profile": options.profile}
    with _open_implementation(options) as program:
        reports = [judge(program, dtype=dtype, name=program.name, **chosen) for dtype in options.dtype or ["float64"]]
    document = {"runs": [report.to_json() for report in reports]}
    status = UNUSABLE if any(report.empty for report in reports) else PASSED
    status = FAILED if any(report.failures for report in reports) else status
    if options.report:
        _write(Path(options.report), json.dumps(document, indent=1) + "\n")
    return status, "".join(report.summary() + "\n" for report in reports)


def _open_implementation(options: argparse.Namespace) -> Program:
    """The implementation in a process of its own; it may start again once an operation."""
    restarts = len(OUTPUTS)
    if options.impl:
        command = [sys.executable, "-m", "shd_ref.conformance.host", options.impl]
        return Program(command, timeout=options.timeout, max_restarts=restarts, name=f"--impl {options.impl}")
    command = [options.program, *options.arguments] if options.arguments else shlex.split(options.program)
    return Program(command, timeout=options.timeout, max_restarts=restarts)


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Does an implementation compute what specs/shd.md says? Exit status: 0 it conforms, "
        "1 something failed, 2 nothing could be judged.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--impl", metavar="MODULE[:OBJECT]", help="a Python module, or an adapter object in it")
    what.add_argument("--program", metavar="COMMAND", help="a program that speaks the JSON-lines protocol")
    what.add_argument("--list", action="store_true", help="list what is judged, an operation and a part a line")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of the program, after --")
    parser.add_argument(
        "--dtype", action="append", choices=DTYPES, help="dtype of the implementation; repeat for several"
    )
    parser.add_argument("--profile", choices=("core", "full"), default="full", help="core: seven operations, masks")
    parser.add_argument("--only", action="append", metavar="ID", help="an operation, id or glob; repeatable")
    parser.add_argument("--seed", type=_seed, metavar="N", help="seed of all inputs (default: drawn, and printed)")
    parser.add_argument("--report", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--timeout", type=float, default=2.0, metavar="SECONDS", help="limit per call (default 2)")
    return parser


def _seed(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"must be from 0 to {2**32 - 1}; got {text}")
    return int(text)


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all; a pipe or a terminal as it comes."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
