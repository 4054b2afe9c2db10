"""Judging: every operation by its core, then option by option, then all options crossed.

An operation or option that an implementation lacks is not failed, and never hidden: the verdict names it. Of an
operation that fails one failure is told, the one that says most.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from shd_ref.conformance.comparison import abbreviate, arrays_of, compare, compare_matched
from shd_ref.conformance.doors import Direct, Program, Reply
from shd_ref.conformance.generator import FACTORS, Inputs
from shd_ref.conformance.mistakes import recognise
from shd_ref.conformance.report import Finding, OperationResult, Report
from shd_ref.conformance.sessions import (
    Call,
    Session,
    Step,
    core_factors,
    make_session,
    option_tokens,
    options_of,
    sessions_of,
)
from shd_ref.conformance.specification import CORE, DTYPES, OUTPUTS, load_everything

PARTS = ("core", "options")
KEPT_FINDINGS = 40
_FEWEST = {"core": 24, "options": 240}  # sessions of an operation


class ConformanceError(AssertionError):
    """An implementation failed a case; the message is the whole report of it."""


class Missing(unittest.SkipTest):
    """The implementation lacks an operation. Test runners report it as a skip."""


@dataclass(frozen=True)
class Case:
    """A part of what is judged of one operation, such as ``softmax/core``."""

    operation: str
    part: str

    @property
    def id(self) -> str:
        """Its name."""
        return f"{self.operation}/{self.part}"


def cases(only: str | Iterable[str] | None = None) -> list[Case]:
    """What is judged, part by part, to be run one by one with ``check``.

    Args:
        only: operations, ids or globs (``"solve_alpha"``, ``"*/core"``); all without it.
    """
    patterns = [only] if isinstance(only, str) else list(only) if only is not None else ["*"]
    found = [Case(operation, part) for operation in OUTPUTS for part in PARTS]
    return [one for one in found if any(fnmatchcase(one.id, p) or fnmatchcase(one.operation, p) for p in patterns)]


def check(case: Case, implementation: Any, dtype: str = "float64", *, seed: int = 0) -> None:
    """One case against one implementation, for your own tests; ``judge`` says what that does not promise.

    Raises:
        ConformanceError: it failed; an ``AssertionError`` whose message says how.
        Missing: it lacks the operation; a ``unittest.SkipTest``.
    """
    report = judge(implementation, dtype=dtype, only=case.id, seed=seed)
    if report.empty:
        raise Missing(f"{case.operation} is missing")
    if report.failures:
        raise ConformanceError(report.failures[0].describe(dtype, seed))


def judge(
    implementation: Any,
    *,
    dtype: str = "float64",
    only: str | Iterable[str] | None = None,
    seed: int = 0,
    profile: str = "full",
    name: str | None = None,
) -> Report:
    """Judge an implementation at one dtype.

    An object is judged in this process, which it shares with the judge: it could change the reference, the tolerances
    or this very function. So this is for an implementer's own tests; the command, which runs a module as a process of
    its own, is for a verdict that others shall believe. A call that does not end is not interrupted here.

    Args:
        implementation: a module or object with the operations' functions, an ``Adapter``, or a ``Program``.
        dtype: what the implementation computes in.
        only: operations, ids or globs, as in ``cases``.
        seed: of everything that is drawn.
        profile: ``"full"``, or ``"core"`` for seven operations with masks and no other option.
        name: of the implementation in the report.

    Returns:
        The report; ``report.passed`` says whether nothing failed.
    """
    if dtype not in DTYPES:
        raise LookupError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    load_everything()
    subject: Direct | Program = implementation if isinstance(implementation, Program) else Direct(implementation)
    chosen = [case for case in cases(only) if profile == "full" or (case.operation in CORE and case.part == "core")]
    results = []
    with np.errstate(all="ignore"):  # NumPy's own warnings about its arithmetic are not the judge's to print
        for operation in dict.fromkeys(case.operation for case in chosen):
            parts = [case.part for case in chosen if case.operation == operation]
            results.append(_Bench(subject, operation, dtype, seed).judge(parts))
    return Report(name or subject.name, dtype, seed, profile, tuple(results))


@dataclass
class _Bench:
    """One operation of one implementation under judgement."""

    subject: Direct | Program
    operation: str
    dtype: str
    seed: int
    calls: int = 0
    answered: bool = False
    ended: bool = False
    part: str = "core"
    findings: list[Finding] = field(default_factory=list)
    lacks: set[str] = field(default_factory=set)
    failed_parts: set[str] = field(default_factory=set)

    def judge(self, parts: Sequence[str]) -> OperationResult:
        """All parts in order, until the implementation answers no more."""
        core = core_factors(self.operation)
        self._has({})
        offered = self._offered([name for name in options_of(self.operation) if name in core or "options" in parts])
        for part in PARTS:
            if part in parts and self.answered and not self.ended and len(self.findings) < KEPT_FINDINGS:
                self.part = part
                factors = {name: levels for name, levels in offered.items() if name in core or part == "options"}
                self._run(sessions_of(self.operation, self.dtype, self.seed, factors, part, _FEWEST[part]))
        best = min(self.findings, key=lambda finding: finding.order, default=None)
        lacks, failed = tuple(sorted(self.lacks)), tuple(sorted(self.failed_parts))
        return OperationResult(self.operation, self.calls, self.answered, best, len(self.findings), lacks, failed)

    def _offered(self, options: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """The factors with the levels that the implementation has, each asked for alone."""
        offered = dict(FACTORS[self.operation])
        for name in options if self.answered else ():
            lacking = [level for level in offered[name] if level and not self._has({name: level})]
            offered[name] = tuple(level for level in offered[name] if level not in lacking)
            tokens = [option_tokens(self.operation, {name: level})[0] for level in lacking]
            self.lacks |= {tokens[0].partition("=")[0]} if lacking and not any(offered[name]) else set(tokens)
        return {name: levels for name, levels in offered.items() if len(levels) > 1}

    def _has(self, levels: dict[str, str]) -> bool:
        """Whether the implementation has an option, by a call that gives no other."""
        base = {name: first for name, (first, *_) in FACTORS[self.operation].items() if first}
        key = [
            self.seed,
            list(OUTPUTS).index(self.operation),
            sum(map(ord, "".join(levels) + "".join(levels.values()))),
        ]
        session = make_session(self.operation, self.operation, key, self.dtype, base | levels, 0)
        reply = self._ask(session.steps[0].call, copy_in_layout(session.steps[0].call.inputs))
        return self.ended or reply.kind != "missing"

    def _run(self, sessions: Iterator[Session]) -> None:
        for session in sessions:
            self._run_session(session)
            if self.ended or len(self.findings) >= KEPT_FINDINGS:
                return

    def _run_session(self, session: Session) -> None:
        first = session.steps[0].call
        kept = held = copy_in_layout(first.inputs)
        for number, step in enumerate(session.steps):
            call = step.call
            if step.beside:
                self._ask_together(step)
                continue
            again = number > 0 and call is first
            if step.over or again:
                held = kept if write_over(kept, call.inputs) else copy_in_layout(call.inputs)
            elif number:
                held = copy_in_layout(call.inputs)
            company = "its arrays written over since the last call" if step.over else ""
            company = "again, after other calls" if again else company
            reply = self._ask(call, held, company)
            if (reply.kind == "missing" and not number) or self.ended:
                return

    def _ask(self, call: Call, inputs: Inputs, company: str = "") -> Reply:
        """One call, with what is wrong with its reply kept as a finding."""
        if call.answer[0] == "skip":
            return Reply("missing", code="unspoken")
        self.calls += 1
        reply = self.subject.ask(call.operation, inputs, self.dtype)
        self._take(call, reply, company)
        return reply

    def _ask_together(self, step: Step) -> None:
        beside = [call for call in step.beside if call.answer[0] != "skip"]
        self.calls += len(beside)
        if beside:
            calls = [(call.operation, copy_in_layout(call.inputs)) for call in beside]
            for number, reply in enumerate(self.subject.ask_together(calls, self.dtype)):
                self._take(beside[number % len(beside)], reply, "in one of several threads")

    def _take(self, call: Call, reply: Reply, company: str) -> None:
        if reply.kind == "missing":
            if call.operation == self.operation and self.part == "options" and reply.code != "unspoken":
                tokens = option_tokens(call.operation, call.levels)
                named = [token for token in tokens if token.partition("=")[0] == reply.code] or (
                    [reply.code] if reply.code == "layouts" else []
                )
                self.lacks |= set(named or ([" with ".join(tokens)] if 0 < len(tokens) < 3 else []))
            return
        self.answered |= call.operation == self.operation
        self.ended |= reply.ended
        found = self.examine(call, reply, company)
        if found:
            self.findings.append(found)
            self.failed_parts.add(self.part)

    def examine(self, call: Call, reply: Reply, company: str = "") -> Finding | None:
        """What is wrong with a reply, or None."""
        kind, right, _ = call.answer
        looks_like: Sequence[str] = ()
        narrow = False
        if reply.kind == "broken" or kind == "error" or reply.kind == "refused":
            wrong = _examine_refusal(call, reply, company)
        else:
            if call.operation == "matched_plan" and "plan" in reply.outputs:
                difference = compare_matched(call.inputs, reply.outputs["plan"], self.dtype)
            else:
                difference = compare(
                    right, lambda: call.near, reply.outputs, self.dtype, call.inputs, exact=call.exact
                )
            wrong = None
            if difference:
                wrong = (3 if company else 1, *astuple(difference))
                output = difference.output.partition("[")[0].partition(".")[0]
                looks_like = recognise(call.operation, call.inputs, right, reply.outputs, output, self.dtype)
                narrow = self.dtype == "float64" and "differs by" in difference.problem
                narrow = narrow and _narrow(call, right, reply)
        if wrong is None:
            return None
        rank, output, problem, expected, got = wrong
        size = sum(array.size for array in arrays_of(call.inputs))
        return Finding(
            call.operation,
            (0 if looks_like and not company else rank, len(call.inputs), size),
            problem,
            output,
            expected,
            got,
            ", ".join(filter(None, (call.title, company))),
            call,
            tuple(looks_like),
            reply.code if reply.kind == "broken" else "",
            narrow,
        )


def _examine_refusal(call: Call, reply: Reply, company: str) -> tuple[int, str, str, str, str] | None:
    """Of a call or an answer that is no value: the rank of what is wrong, output, problem, expected and got."""
    refusal = f"the error {' or '.join(sorted(call.accepted))}" if call.answer[0] == "error" else ""
    if reply.kind == "broken":
        if not refusal or reply.code or reply.ended:
            return 3 if company else 2, "", reply.message, "" if refusal else "an answer", ""
        if any(array.dtype.kind == "O" for array in arrays_of(call.inputs)):
            return None  # the language's own words will do (ERR-8)
        return 5, "", f"must be refused with a code: {reply.message}", refusal, ""
    if not refusal:
        problem = f"valid inputs were refused with {reply.code}: {reply.message}"
        return 2, "", problem, "an answer", reply.code
    if reply.kind == "value":
        return 4, "", "invalid inputs were accepted", refusal, abbreviate(dict(reply.outputs))
    if reply.code not in call.accepted:
        return 5, "", f"invalid inputs were refused with another code: {reply.message}", refusal, reply.code
    lost = [f"{name} {place}" for name, place in sorted(call.told) if f"{name} {place}" not in reply.message]
    return (6, "", f"the message must name {', '.join(lost)}; got: {reply.message}", "", "") if lost else None


def _narrow(call: Call, right: Mapping[str, Any], reply: Reply) -> bool:
    return compare(right, lambda: call.near, reply.outputs, "float32", call.inputs, exact=False) is None


def copy_in_layout(value: Any) -> Any:
    """A copy of all arrays as they lie in memory; one that lies oddly is given as it is."""
    if isinstance(value, dict):
        return {name: copy_in_layout(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_in_layout(item) for item in value)
    plain = isinstance(value, np.ndarray) and value.flags.carray
    return value.copy() if plain else value


def write_over(old: Any, new: Any) -> bool:
    """Write the new numbers into the old arrays and lists; False where they do not fit, and nothing is written."""
    if not _fits(old, new):
        return False
    for key in old if isinstance(old, dict) else range(len(old)):
        if isinstance(old[key], np.ndarray):
            old[key][...] = new[key]
        elif isinstance(old[key], dict | list | tuple):
            write_over(old[key], new[key])
        elif not isinstance(old, tuple):
            old[key] = new[key]
    return True


def _fits(old: Any, new: Any) -> bool:
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return (old.shape, old.dtype, type(old)) == (new.shape, new.dtype, type(new)) and old.flags.carray
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_fits(old[name], new[name]) for name in old)
    if isinstance(old, list | tuple) and type(old) is type(new) and len(old) == len(new):
        return all(map(_fits, old, new))
    return type(old) is type(new)
