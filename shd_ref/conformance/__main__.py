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

from shd_ref.conformance.doors import Program, ProgramError, serve
from shd_ref.conformance.judging import judge, parts_of
from shd_ref.conformance.specification import DTYPES, load_everything
from shd_ref.errors import printable

PASSED, FAILED, UNUSABLE = 0, 1, 2


def main(argv: Sequence[str] | None = None, prog: str = "python -m shd_ref.conformance") -> int:
    """Judge one implementation: 0 where it conforms, 1 where something failed, 2 where nothing could be judged."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["--host"]:  # the process of a module, which ``_judge`` starts
        serve(words[1])
        return PASSED
    parser = make_parser(prog)
    options = parser.parse_args(words)
    if options.arguments and not options.program:
        parser.error(f"unexpected arguments: {' '.join(options.arguments)}")
    if options.timeout is None:
        # Where other programs share the processor, a sound answer takes as many times longer.
        options.timeout = 2.0 * max(1.0, 2.0 * os.getloadavg()[0] / (os.cpu_count() or 1))
    if not options.timeout > 0:
        parser.error(f"--timeout must be above 0; got {options.timeout:g}")
    parts = parts_of(options.only, options.profile)
    if not parts:
        shows = f"--list{' --profile core' if options.profile == 'core' else ''} shows"
        parser.error(f"--only names nothing that {shows}; got {' '.join(options.only)}")
    if options.list:
        sys.stdout.write("".join(f"{operation}/{part}\n" for operation in parts for part in parts[operation]))
        return PASSED
    # All that a verdict depends on is in memory before the implementation starts, and no import meanwhile searches
    # the current folder, which is its own.
    load_everything()
    searched = list(sys.path)
    sys.path[:] = [folder for folder in searched if folder not in ("", str(Path.cwd()))]
    try:
        return _judge(options)
    except (ProgramError, OSError) as error:
        sys.stderr.write(printable(f"shd_ref.conformance: {error}\n"))
        return UNUSABLE
    finally:
        sys.path[:] = searched


def _judge(options: argparse.Namespace) -> int:
    """Judge the implementation in a process of its own, which may start again once an operation."""
    seed = secrets.randbits(32) if options.seed is None else options.seed
    command = [options.program, *options.arguments] if options.arguments else shlex.split(options.program or "")
    command = [sys.executable, "-m", "shd_ref.conformance", "--host", options.impl] if options.impl else command
    name = f"--impl {options.impl}" if options.impl else None
    with Program(command, timeout=options.timeout, name=name) as program:
        reports = [
            judge(program, dtype=dtype, only=options.only, seed=seed, profile=options.profile)
            for dtype in options.dtype or ["float64"]
        ]
    if options.report:
        document = {"runs": [report.to_json() for report in reports]}
        Path(options.report).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(printable("".join(report.summary() + "\n" for report in reports)))
    if any(report.failures for report in reports):
        return FAILED
    return PASSED if all(report.judged for report in reports) else UNUSABLE


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The options."""
    about = "Does an implementation compute what specs/shd.md says? Exit status: 0 it conforms, 1 something failed, "
    parser = argparse.ArgumentParser(prog=prog, description=f"{about}2 nothing could be judged.")
    subject, add = parser.add_mutually_exclusive_group(required=True), parser.add_argument
    subject.add_argument("--impl", metavar="MODULE[:OBJECT]", help="a Python module, or an adapter object in it")
    subject.add_argument("--program", metavar="COMMAND", help="a program that speaks the JSON-lines protocol")
    subject.add_argument("--list", action="store_true", help="list what is judged, an operation and a part a line")
    add("arguments", nargs="*", metavar="ARGUMENT", help="arguments of the program, after --")
    add("--dtype", action="append", choices=DTYPES, help="dtype of the implementation; repeat for several")
    add("--profile", choices=("core", "full"), default="full", help="core: seven operations, masks")
    add("--only", action="append", metavar="ID", help="an operation, id or glob; repeatable")
    add("--seed", type=_seed, metavar="N", help="seed of all inputs (default: drawn, and printed)")
    add("--report", metavar="FILE", help="write the report as JSON")
    add("--timeout", type=float, metavar="SECONDS", help="limit per call (default 2, more where the machine is busy)")
    return parser


def _seed(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"must be from 0 to {2**32 - 1}; got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
