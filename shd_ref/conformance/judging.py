"""One implementation under judgement: which options it has, its sessions, and what is wrong with a reply."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import numpy as np

from shd_ref.conformance.comparison import Difference, abbreviate, arrays_of, compare, compare_matched
from shd_ref.conformance.doors import Direct, Program, Reply, write_over
from shd_ref.conformance.generator import FACTORS, OUTPUTS, Inputs, draw_call
from shd_ref.conformance.mistakes import recognise
from shd_ref.conformance.report import Finding, OperationResult, Report
from shd_ref.conformance.sessions import Call, Step, core_factors, option_tokens, options_of, sessions_of
from shd_ref.conformance.specification import CORE, DTYPES, load_everything

KEPT_FINDINGS = 40
_FEWEST = {"core": 24, "options": 220}  # sessions of an operation, by part


def parts_of(only: str | Iterable[str] | None = None, profile: str = "full") -> dict[str, list[str]]:
    """The judged parts of each operation, ``core``, ``options`` or both; ``only`` and ``profile`` as of ``judge``."""
    patterns = [only] if isinstance(only, str) else ["*"] if only is None else list(only)
    chosen: dict[str, list[str]] = {}
    for operation, part in product(
        CORE if profile == "core" else OUTPUTS, _FEWEST if profile == "full" else ["core"]
    ):
        if any(fnmatchcase(name, pattern) for name in (operation, f"{operation}/{part}") for pattern in patterns):
            chosen.setdefault(operation, []).append(part)
    return chosen


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
        dtype: of the implementation's arithmetic.
        only: operations, ids such as ``"softmax/core"``, or globs; all without it.
        seed: of everything that is drawn.
        profile: ``"full"``, or ``"core"`` for seven operations with masks and no other option.
        name: of the implementation in the report.
    """
    if dtype not in DTYPES:
        raise LookupError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    load_everything()
    subject: Direct | Program = implementation if isinstance(implementation, Program) else Direct(implementation)
    chosen = parts_of(only, profile)
    with np.errstate(all="ignore"):  # NumPy's own warnings about its arithmetic are not the judge's to print
        results = [_Bench(subject, operation, dtype, seed).judge(parts) for operation, parts in chosen.items()]
    return Report(name or subject.name, dtype, seed, profile, tuple(results), subject.dtypes)


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
        return self.ended or any(reply.kind != "missing" for reply in self._ask([call]))

    def _run(self, steps: Sequence[Step]) -> None:
        """A session, to a call that cannot be answered; the arrays of the first call are those written over."""
        inputs: Inputs = {}
        (first,) = steps[0].calls
        for number, (calls, over) in enumerate(steps):
            again = calls[0] is first and len(calls) == 1
            company = "again, after other calls" if again and number else "its arrays written over" if over else ""
            company = "in one of several threads" if len(calls) > 1 else company
            if over or again:
                inputs = write_over(inputs, calls[0].inputs)
            replies = self._ask(calls, company, inputs if over or again else None)
            kinds = {reply.kind for reply in replies}
            if self.ended or "broken" in kinds or ("missing" in kinds and not number):
                break

    def _ask(self, calls: Sequence[Call], company: str = "", over: Inputs | None = None) -> list[Reply]:
        """One call, perhaps in the arrays ``over``, or several at once; what is wrong with the replies is kept."""
        calls = [call for call in calls if call.answer[0] != "skip"]
        if not calls:
            return []
        shared = over is None and isinstance(self.subject, Direct)  # no other gets these very arrays
        requests = [(call.operation, copy.deepcopy(call.inputs) if shared else over or call.inputs) for call in calls]
        layout = calls[0].seed + 1 if calls[0].levels.get("layout") and len(calls) == 1 else 0
        replies = self.subject.ask(requests, self.dtype, layout=layout, over=over is not None and not layout)
        for call, reply in zip([*calls, *calls], replies, strict=False):
            self._take(call, reply, company)
        return replies

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
