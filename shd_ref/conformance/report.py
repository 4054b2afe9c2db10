"""The report: what was judged, what failed and what is lacking, for people and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

from shd_ref.conformance.comparison import abbreviate
from shd_ref.conformance.doors import NotSpokenError, make_request
from shd_ref.conformance.sessions import Call
from shd_ref.conformance.specification import CORE, OUTPUTS, load_sentences, spec_edition

REPORT_VERSION = "2"
_LARGEST_CALL = 4096  # numbers of a call that the report spells out


@dataclass(frozen=True)
class Finding:
    """Why an operation failed, for somebody who does not know the judge's code."""

    operation: str
    order: tuple[int, ...]  # the smallest says most: recognised mistakes, then values, then state, then refusals
    problem: str
    output: str
    expected: str
    got: str
    title: str
    call: Call = field(repr=False)
    looks_like: tuple[str, ...] = ()
    spec: str = ""
    narrow: bool = False  # right for a narrower dtype

    def describe(self, dtype: str, seed: int) -> str:
        """The failure in lines: what was asked, what came, and what it looks like."""
        sentence = load_sentences().get(self.spec, "")
        rows = [
            ("problem", self.problem),
            ("looks like", "; ".join(f"this equals what you get if {sentence}" for sentence in self.looks_like)),
            ("called", f"{self.operation}({abbreviate(self.call.inputs)})"),
            ("company", self.title),
            ("expected", self.expected),
            ("got", self.got),
            ("requires", f"{self.spec}: {sentence}" if sentence else ""),
            ("again", f"--dtype {dtype} --seed {seed} --only {self.operation}"),
        ]
        lines = [f"{self.operation} at {dtype}"]
        for label, text in rows:
            for number, line in enumerate(textwrap.wrap(text, 66, break_long_words=False, break_on_hyphens=False)):
                lines.append(f"  {label if not number else '':<11}{line}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """As ``specs/schemas/report.schema.json`` says; the exact call too, where it is small."""
        entry: dict[str, Any] = {
            name: getattr(self, name) for name in ("problem", "output", "expected", "got", "title")
        }
        entry |= {
            "looks_like": list(self.looks_like),
            "spec": self.spec,
            "called": f"{self.operation}({abbreviate(self.call.inputs)})",
        }
        try:
            if self.order[-1] <= _LARGEST_CALL:
                entry["call"] = make_request(self.operation, self.call.inputs, self.call.dtype)
        except NotSpokenError:
            pass
        return entry


@dataclass(frozen=True)
class OperationResult:
    """How one operation was judged."""

    operation: str
    calls: int
    answered: bool
    finding: Finding | None
    num_findings: int
    lacks: tuple[str, ...]
    failed_parts: tuple[str, ...]

    @property
    def status(self) -> str:
        """``missing``, ``failed`` or ``passed``."""
        return "failed" if self.finding else "passed" if self.answered else "missing"

    def describe(self, dtype: str, seed: int) -> str:
        """Its failure."""
        return self.finding.describe(dtype, seed) if self.finding else f"{self.operation}: {self.status}"


@dataclass(frozen=True)
class Report:
    """What came of one implementation at one dtype.

    Attributes:
        name: of the implementation.
        dtype: what it computed in.
        seed: of everything that was drawn.
        profile: ``core`` or ``full``.
        results: one an operation.
    """

    name: str
    dtype: str
    seed: int
    profile: str
    results: tuple[OperationResult, ...]

    @property
    def failures(self) -> tuple[OperationResult, ...]:
        """The operations that failed."""
        return tuple(result for result in self.results if result.finding)

    @property
    def passed(self) -> bool:
        """Whether something was judged and nothing failed; what is missing is no failure."""
        return not self.failures and not self.empty

    @property
    def empty(self) -> bool:
        """Whether nothing was judged."""
        return not any(result.answered or result.finding for result in self.results)

    @property
    def lacks(self) -> tuple[str, ...]:
        """The options that the judged operations lack."""
        return tuple(sorted({option for result in self.results for option in result.lacks if result.answered}))

    @property
    def not_judged(self) -> tuple[str, ...]:
        """The operations of the specification that were not judged; indexers as one where all are."""
        judged = {result.operation for result in self.results if result.answered or result.finding}
        names = [name for name in OUTPUTS if name not in judged]
        indexers = [name for name in OUTPUTS if name.startswith("indexer")]
        if all(name in names for name in indexers):
            names = [name for name in names if name not in indexers] + ["indexers"]
        return tuple(names)

    @property
    def verdict(self) -> str:
        """What was judged and how, in one line; "conforms" alone where nothing is missing."""
        if self.empty:
            return "nothing was judged"
        judged = {result.operation: result for result in self.results if result.answered or result.finding}
        core = all(name in judged and "core" not in judged[name].failed_parts for name in CORE)
        parts = ["conforms to core" if core else ""]
        if self.failures:
            parts = [f"does not conform: {', '.join(result.operation for result in self.failures)}", *parts]
        elif not core:
            few = [name for name in CORE if name in judged] if len(judged) > 8 else list(judged)
            parts = [f"conforms to {', '.join(few) or 'what it offers'}"]
        whole = core and not self.failures and not self.lacks and not self.not_judged and self.profile == "full"
        if whole:
            return "conforms"
        options = [] if self.profile == "core" else [f"lacks {', '.join(self.lacks)}" if self.lacks else ""]
        missing = (
            f"not judged: {', '.join(self.not_judged) if self.profile == 'full' else 'options, other operations'}"
        )
        return "; ".join(
            filter(None, [*parts, *options, missing if self.not_judged or self.profile == "core" else ""])
        )

    def summary(self) -> str:
        """For a terminal: one whole failure an operation, and the verdict."""
        told = sorted(self.failures, key=lambda result: result.finding.order if result.finding else ())
        parts = [f"FAILED {result.describe(self.dtype, self.seed)}" for result in told]
        values = [result.finding for result in told if result.finding and result.finding.order[0] < 2]
        if values and all(finding.narrow for finding in values):
            parts.append("Your answers look like float32: judge with --dtype float32, or enable 64 bits.")
        calls = sum(result.calls for result in self.results)
        parts.append(
            f"{self.name} at {self.dtype}, specification {spec_edition()}, {calls} calls, seed {self.seed}:\n"
            f"{self.verdict}"
        )
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """As ``specs/schemas/report.schema.json`` says."""
        return {
            "report_version": REPORT_VERSION,
            "implementation": self.name,
            "dtype": self.dtype,
            "seed": self.seed,
            "profile": self.profile,
            "spec_edition": spec_edition(),
            "passed": self.passed,
            "verdict": self.verdict,
            "lacks": list(self.lacks),
            "not_judged": list(self.not_judged),
            "results": [_result_to_json(result) for result in self.results],
        }


def _result_to_json(result: OperationResult) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "operation": result.operation,
        "status": result.status,
        "calls": result.calls,
        "lacks": list(result.lacks),
    }
    if result.finding:
        entry |= {"failures": result.num_findings, "finding": result.finding.to_json()}
    return entry
