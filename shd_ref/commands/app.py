"""The application ``shd``: its commands, in the order of use."""

from __future__ import annotations

from typing import Annotated, Final

from cyclopts import App, Group, Parameter

from shd_ref.commands.caches import ls, merge, report, verify
from shd_ref.commands.graphs import inspect
from shd_ref.commands.plan import plan
from shd_ref.commands.precompute import precompute
from shd_ref.commands.program import Program

_TEXT: Final = """Squeeze a transformer teacher's attention into fewer heads, offline, and cache it.

shd inspect teacher.onnx

shd precompute teacher.onnx --inputs data.npz --student-heads 4 --out cache/

shd verify cache/
"""


def conformance(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
    """Judge an implementation of the specification, in any language."""
    from shd_ref.conformance.__main__ import main

    return main(words, "shd conformance")


def make_program() -> Program:
    program = Program("shd", _TEXT)
    look = Group("Look before you spend", sort_key=-4)
    make = Group("Make a cache", sort_key=-3)
    files = Group("Caches as files", sort_key=-2)
    others = Group("Implementations", sort_key=-1)
    shards = "the same command resumes: the finished shards are kept in --out"
    program.add(inspect, panel=look)
    program.add(plan, panel=look)
    program.add(precompute, panel=make, after=shards)
    program.add(verify, panel=make)
    program.add(report, panel=make)
    program.add(ls, panel=files)
    program.add(merge, panel=files, after=shards)
    # It reads its own options, as it does where there is no cyclopts.
    judge = App("conformance", group=others, help_flags=(), version_flags=(), end_of_options_delimiter="")
    judge.default(conformance)
    program.app.command(judge)
    return program
