"""One implementation under judgement: which options it has, its sessions, and what is wrong with a reply."""

from __future__ import annotations

import copy
import re
import unittest
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from shd_ref.conformance.comparison import Difference, abbreviate, arrays_of, compare, compare_matched
from shd_ref.conformance.doors import Direct, Program, Reply, write_over
from shd_ref.conformance.generator import FACTORS, OUTPUTS, Inputs, draw_call
from shd_ref.conformance.mistakes import recognise
from shd_ref.conformance.report import Finding, OperationResult, Report
from shd_ref.conformance.sessions import Call, Step, core_factors, option_tokens, options_of, sessions_of
from shd_ref.conformance.specification import CORE, DTYPES, load_everything

KEPT_FINDINGS = 40
_FEWEST = {"core": 24, "options": 240}  # sessions of an operation, by part


class ConformanceError(AssertionError):
    """An implementation failed a case; the message is the whole report of it."""


class Missing(unittest.SkipTest):
    """The implementation lacks an operation. Test runners report it as a skip."""


class Case(NamedTuple):
    """A part of what is judged of one operation, such as ``softmax/core``."""

    operation: str
    part: str

    @property
    def id(self) -> str:
        """Its name."""
        return f"{self.operation}/{self.part}"


def cases(only: str | Iterable[str] | None = None, profile: str = "full") -> list[Case]:
    """What is judged, part by part, to be run one by one with ``check``.

    Args:
        only: operations, ids or globs (``"solve_alpha"``, ``"*/core"``); all without it.
        profile: ``"full"`` or ``"core"``.
    """
    patterns = [only] if isinstance(only, str) else ["*"] if only is None else list(only)
    chosen = [Case(operation, part) for operation in OUTPUTS for part in _FEWEST]
    chosen = [case for case in chosen if profile == "full" or (case.operation in CORE and case.part == "core")]
    return [case for case in chosen if any(fnmatchcase(n, p) for n in (case.id, case.operation) for p in patterns)]


def check(case: Case, implementation: Any, dtype: str = "float64", *, seed: int = 0) -> None:
    """One case against one implementation, for your own tests; ``judge`` says what that does not promise.

    Raises:
        ConformanceError: it failed; an ``AssertionError`` whose message says how.
        Missing: it lacks the operation; a ``unittest.SkipTest``.
    """
    report = judge(implementation, dtype=dtype, only=case.id, seed=seed)
    if not report.judged:
        raise Missing(f"{case.operation} is missing")
    for result in report.failures:
        raise ConformanceError(result.finding and result.finding.describe(dtype, seed, case.operation))


def judge(
    implementation: Any,
    *,
    dtype: str = "float64",
    only: str | Iterable[str] | None = None,
    seed: int = 0,
    profile: str = "full",
    name: str | None = None,
) -> Report:
    """Judge an implementation at one dtype; ``report.passed`` says whether nothing failed.

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
    """
    if dtype not in DTYPES:
        raise LookupError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    load_everything()
    subject: Direct | Program = implementation if isinstance(implementation, Program) else Direct(implementation)
    chosen: dict[str, list[str]] = {}
    for case in cases(only, profile):
        chosen.setdefault(case.operation, []).append(case.part)
    with np.errstate(all="ignore"):  # NumPy's own warnings about its arithmetic are not the judge's to print
        results = [_Bench(subject, operation, dtype, seed).judge(parts) for operation, parts in chosen.items()]
    offered = subject.dtypes if isinstance(subject, Program) else DTYPES
    return Report(name or subject.name, dtype, seed, profile, tuple(results), offered)


class _Bench:
    """One operation of one implementation under judgement."""

    def __init__(self, subject: Direct | Program, operation: str, dtype: str, seed: int) -> None:
        self.subject, self.operation, self.dtype, self.seed = subject, operation, dtype, seed
        self.result, self.ended, self.part = OperationResult(operation), False, "core"

    def judge(self, parts: Sequence[str]) -> OperationResult:
        """All parts in order, until the implementation answers no more."""
        core = core_factors(self.operation)
        self._has({})
        offered = self._offered([name for name in options_of(self.operation) if name in core or "options" in parts])
        for part in parts if self.result.answered else ():
            self.part = part
            factors = {name: levels for name, levels in offered.items() if name in core or part == "options"}
            fewest = _FEWEST[part]
            for steps in sessions_of(self.operation, self.dtype, self.seed, factors, self.part, fewest):
                if self.ended or len(self.result.findings) >= KEPT_FINDINGS:
                    break
                self._run(steps)
        return self.result

    def _offered(self, options: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """The factors with the levels that the implementation has, each asked for alone."""
        offered = dict(FACTORS[self.operation])
        for name in options if self.result.answered else ():
            lacking = [level for level in offered[name] if level and not self._has({name: level})]
            offered[name] = tuple(level for level in offered[name] if level not in lacking)
            tokens = [option_tokens(self.operation, {name: level})[0] for level in lacking]
            self.result.lacks |= {tokens[0].partition("=")[0]} if lacking and not any(offered[name]) else set(tokens)
        return {name: levels for name, levels in offered.items() if len(levels) > 1}

    def _has(self, levels: dict[str, str]) -> bool:
        """Whether the implementation has an option, by a call that gives no other."""
        levels = {name: first for name, (first, *_) in FACTORS[self.operation].items() if first} | levels
        key = [self.seed, list(OUTPUTS).index(self.operation), sum(map(ord, "".join(map("".join, levels.items()))))]
        call = Call(self.operation, draw_call(self.operation, key, self.dtype, levels), self.dtype, levels=levels)
        return self.ended or self._ask(call, copy.deepcopy(call.inputs)).kind != "missing"

    def _run(self, steps: Sequence[Step]) -> None:
        """A session, to the first call that cannot be answered; arguments of the first are those written over."""
        first = copy.deepcopy(steps[0].call.inputs)
        for number, (call, over, beside) in enumerate(steps):
            if beside:
                self._ask_together(beside)
                continue
            again = number > 0 and call is steps[0].call
            kept = not number or ((over or again) and write_over(first, call.inputs))
            company = "its arrays written over since the last call" if over else ""
            company = "again, after other calls" if again else company
            reply = self._ask(call, first if kept else copy.deepcopy(call.inputs), company, kept=kept)
            if self.ended or reply.kind == "broken" or (reply.kind == "missing" and not number):
                break

    def _ask(self, call: Call, inputs: Inputs, company: str = "", *, kept: bool = False) -> Reply:
        """One call, with what is wrong with its reply kept as a finding."""
        if call.answer[0] == "skip":
            return Reply("missing", code="unspoken")
        layout = call.seed + 1 if call.levels.get("layout") else 0
        reply = self.subject.ask(call.operation, inputs, self.dtype, layout=layout, kept=kept and not layout)
        self._take(call, reply, company)
        return reply

    def _ask_together(self, calls: Sequence[Call]) -> None:
        calls = [call for call in calls if call.answer[0] != "skip"]
        asked = [(call.operation, copy.deepcopy(call.inputs)) for call in calls]
        replies = self.subject.ask_together(asked, self.dtype) if asked else []
        for call, reply in zip([*calls, *calls], replies, strict=False):
            self._take(call, reply, "in one of several threads")

    def _take(self, call: Call, reply: Reply, company: str) -> None:
        result, mine = self.result, call.operation == self.operation
        result.calls += 1
        if reply.kind == "missing":
            tokens = option_tokens(call.operation, call.levels)
            options = {token for token in tokens if token.partition("=")[0] == reply.code}
            options |= {reply.code} if reply.code == "layouts" else set()
            if mine and self.part == "options" and reply.code != "unspoken":
                drawn = not call.title  # a changed call may give an option that its levels do not tell
                result.lacks |= options or ({" with ".join(tokens)} if drawn and 0 < len(tokens) < 3 else set())
            return
        result.answered |= mine
        self.ended |= reply.ended
        rank, looks_like, narrow = 3 if company else 1, [], False
        if reply.kind == "value" and call.answer[0] == "value":
            wrong = _compare(call, reply.outputs, self.dtype)
            if wrong:
                output = re.split(r"[.\[]", wrong.output)[0]
                looks_like = recognise(call.operation, call.inputs, call.answer[1], reply.outputs, output, self.dtype)
                rank = 0 if looks_like and not company else rank
                narrow = self.dtype == "float64" and not _compare(call, reply.outputs, "float32")
        else:
            refused, wrong = _examine_refusal(call, reply)
            rank = max(rank, refused)
        if wrong:
            order = (rank, not mine, len(call.inputs), sum(array.size for array in arrays_of(call.inputs)))
            title = ", ".join(filter(None, (call.title, company)))
            spec = reply.code if reply.kind == "broken" else ""
            result.findings.append(Finding(call, wrong, order, title, tuple(looks_like), spec, narrow))
            result.failed_parts.add(self.part)


def _compare(call: Call, outputs: Mapping[str, Any], dtype: str) -> Difference | None:
    if call.operation == "matched_plan" and "plan" in outputs:
        return compare_matched(call.inputs, outputs["plan"], dtype)
    return compare(call.answer[1], lambda: call.near, outputs, dtype, call.inputs)


def _examine_refusal(call: Call, reply: Reply) -> tuple[int, Difference | None]:
    """Of a call or an answer that is no value: the rank of what is wrong, and what it is."""
    refusal = f"the error {' or '.join(sorted(call.accepted))}" if call.answer[0] == "error" else ""
    if reply.kind == "broken" and (not refusal or reply.code or reply.ended):
        return 2, Difference("", reply.message, "" if refusal else "an answer", "")
    if not refusal:
        problem = f"valid inputs were refused with {reply.code}: {reply.message}"
        return 2, Difference("", problem, "an answer", reply.code)
    if reply.kind == "broken":
        # Of objects the language's own words will do (ERR-8).
        objects = any(array.dtype.kind == "O" for array in arrays_of(call.inputs))
        return 5, None if objects else Difference("", f"must be refused with a code: {reply.message}", refusal, "")
    if reply.kind == "value":
        return 4, Difference("", "invalid inputs were accepted", refusal, abbreviate(dict(reply.outputs)))
    if reply.code not in call.accepted:
        problem = f"invalid inputs were refused with another code: {reply.message}"
        return 5, Difference("", problem, refusal, reply.code)
    patterns = call.patterns if reply.code == call.answer[1] else []
    absent = [place for place in patterns if not re.search(rf"\b(?:{place})\b", reply.message)]
    names = ", ".join(place.replace("[0-9]+", "and its number") for place in absent)
    problem = f"the message must name {names}; got: {reply.message}"
    return 6, Difference("", problem, "", "") if absent else None
