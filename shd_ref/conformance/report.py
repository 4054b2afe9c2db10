"""The report: judged operations, failures and missing options, for people and as JSON."""

from __future__ import annotations

import contextlib
import textwrap
from dataclasses import dataclass, field
from typing import Any

from shd_ref.conformance.comparison import Difference, abbreviate
from shd_ref.conformance.doors import NotSpokenError, make_request
from shd_ref.conformance.generator import OUTPUTS
from shd_ref.conformance.sessions import Call
from shd_ref.conformance.specification import CORE, DTYPES, spec_edition

_LARGEST_CALL = 4096  # numbers of a call that the report spells out


@dataclass(frozen=True)
class Finding:
    """Why an operation failed, for somebody who does not know the judge's code."""

    call: Call
    wrong: Difference
    # The smallest says most: recognised mistakes, then values, state, refusals; at last the size of all arrays.
    order: tuple[int, ...]
    title: str  # the change in the call, or around it
    looks_like: tuple[str, ...] = ()
    spec: str = ""  # the sentence that was broken, if it is just one
    narrow: bool = False  # whether the answer is right for a narrower dtype

    @property
    def called(self) -> str:
        return f"{self.call.operation}({abbreviate(self.call.inputs)})"

    def describe(self, dtype: str, seed: int, only: str) -> str:
        """The failure in lines: the call, the answer, and a mistake that gives the same."""
        rows = {
            "problem": self.wrong.problem + (f" ({self.spec})" if self.spec else ""),
            "looks like": "; ".join(f"this equals what you get if {sentence}" for sentence in self.looks_like),
            "called": self.called,
            "company": self.title,
            "expected": self.wrong.expected,
            "got": self.wrong.got,
            "again": f"--dtype {dtype} --seed {seed} --only {only}",
        }
        lines = [f"{self.call.operation} at {dtype}"]
        for label, text in rows.items():
            wrapped = textwrap.wrap(text, 66, break_long_words=False, break_on_hyphens=False)
            lines += [f"  {'' if number else label:<11}{line}" for number, line in enumerate(wrapped)]
        return "\n".join(lines)


@dataclass
class OperationResult:
    """How one operation was judged."""

    operation: str
    calls: int = 0
    answered: bool = False  # whether a reply was more than that it is missing
    findings: list[Finding] = field(default_factory=list)
    lacks: set[str] = field(default_factory=set)  # missing options, as ``option_tokens`` names them
    failed_parts: set[str] = field(default_factory=set)

    @property
    def finding(self) -> Finding | None:
        """The failure that says most."""
        return min(self.findings, key=lambda finding: finding.order, default=None)

    @property
    def status(self) -> str:
        """``missing``, ``failed`` or ``passed``."""
        return "failed" if self.findings else "passed" if self.answered else "missing"


@dataclass(frozen=True)
class Report:
    """The results of one implementation at one dtype, by ``profile`` (``core`` or ``full``) and ``seed``."""

    name: str
    dtype: str
    seed: int
    profile: str
    results: tuple[OperationResult, ...]
    dtypes: tuple[str, ...] = DTYPES  # that the implementation offers

    @property
    def failures(self) -> tuple[OperationResult, ...]:
        return tuple(result for result in self.results if result.findings)

    @property
    def judged(self) -> dict[str, OperationResult]:
        """The operations that were judged."""
        return {result.operation: result for result in self.results if result.status != "missing"}

    @property
    def passed(self) -> bool:
        """Whether something was judged and nothing failed; what is missing is no failure."""
        return bool(self.judged) and not self.failures

    @property
    def lacks(self) -> tuple[str, ...]:
        return tuple(sorted({option for result in self.judged.values() for option in result.lacks}))

    @property
    def not_judged(self) -> tuple[str, ...]:
        """The operations of the specification that were not judged; indexers as one where all are."""
        names = [name for name in OUTPUTS if name not in self.judged]
        indexers = [name for name in names if name.startswith("indexer")]
        return tuple(names if len(indexers) < 3 else [*(name for name in names if name not in indexers), "indexers"])

    @property
    def verdict(self) -> str:
        """The verdict in one line; "conforms" alone where nothing is missing."""
        judged, core_only = self.judged, self.profile == "core"
        absent = [result.operation for result in self.results if result.status == "missing"]
        if not judged and self.dtype not in self.dtypes:
            return f"nothing was judged; lacks the dtype {self.dtype}, offers {', '.join(self.dtypes) or 'none'}"
        if not judged:
            return f"nothing was judged; lacks {', '.join(absent) if len(absent) < 9 else 'all operations'}"
        has_core = all(name in judged and "core" not in judged[name].failed_parts for name in CORE)
        # More than fit a line are not all named.
        named = [name for name in CORE if name in judged] if len(judged) > 8 else list(judged)
        passed = [] if self.failures else named or ["what it offers"]
        missing = ["options", "other operations"] if core_only else self.not_judged
        lacks = absent if core_only else self.lacks
        if has_core and not (self.failures or lacks or missing):
            return "conforms"
        parts = {
            "does not conform: ": [result.operation for result in self.failures],
            "conforms to ": ["core"] if has_core else passed,
            "lacks ": lacks,
            "not judged: ": missing,
        }
        return "; ".join(label + ", ".join(names) for label, names in parts.items() if names)

    def summary(self) -> str:
        """For a terminal: one whole failure an operation, and the verdict."""
        failed = [(result.finding, result.operation) for result in self.failures if result.finding]
        failed.sort(key=lambda pair: pair[0].order)
        parts = [f"FAILED {finding.describe(self.dtype, self.seed, operation)}" for finding, operation in failed]
        values = [finding for finding, _ in failed if finding.order[0] < 2]  # neither state nor refusals
        if values and all(finding.narrow for finding in values):
            parts.append("Your answers look like float32: judge with --dtype float32, or enable 64 bits.")
        calls = sum(result.calls for result in self.results)
        head = f"{self.name} at {self.dtype}, specification {spec_edition()}, {calls} calls, seed {self.seed}:"
        return "\n\n".join([*parts, f"{head}\n{self.verdict}"])

    def to_json(self) -> dict[str, Any]:
        """As ``specs/schemas/report.schema.json`` says; the exact calls that failed too, where they are small."""
        results = []
        for result in self.results:
            entry: dict[str, Any] = {name: getattr(result, name) for name in ("operation", "status", "calls")}
            entry["lacks"] = sorted(result.lacks)
            if finding := result.finding:
                document = {
                    **finding.wrong._asdict(),
                    "called": finding.called,
                    "looks_like": list(finding.looks_like),
                    "title": finding.title,
                    "spec": finding.spec,
                }
                with contextlib.suppress(NotSpokenError):
                    if finding.order[-1] <= _LARGEST_CALL:
                        document["call"] = make_request(finding.call.operation, finding.call.inputs, self.dtype)
                entry |= {"failures": len(result.findings), "finding": document}
            results.append(entry)
        names = ("dtype", "seed", "profile", "passed", "verdict", "lacks", "not_judged")
        run = {name: getattr(self, name) for name in names} | {"implementation": self.name, "results": results}
        return run | {"report_version": "2", "spec_edition": spec_edition()}
