"""The report: what was judged, what failed and what is lacking, for people and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

from shd_ref.conformance.comparison import abbreviate
from shd_ref.conformance.doors import NotSpokenError, make_request
from shd_ref.conformance.generator import OUTPUTS
from shd_ref.conformance.sessions import Call
from shd_ref.conformance.specification import CORE, DTYPES, load_sentences, spec_edition

_LARGEST_CALL = 4096  # numbers of a call that the report spells out


@dataclass(frozen=True)
class Finding:
    """Why an operation failed, for somebody who does not know the judge's code.

    Attributes:
        order: the smallest says most: recognised mistakes, then values, then state, then refusals.
        spec: the sentence that was broken, if it is just one.
        narrow: whether the answer is right for a narrower dtype.
    """

    operation: str
    order: tuple[int, ...]
    problem: str
    output: str
    expected: str
    got: str
    title: str
    call: Call = field(repr=False)
    looks_like: tuple[str, ...] = ()
    spec: str = ""
    narrow: bool = False

    def describe(self, dtype: str, seed: int, only: str = "") -> str:
        """The failure in lines: what was asked, what came, and what it looks like."""
        sentence = load_sentences().get(self.spec, "")
        rows = {
            "problem": self.problem,
            "looks like": "; ".join(f"this equals what you get if {sentence}" for sentence in self.looks_like),
            "called": f"{self.operation}({abbreviate(self.call.inputs)})",
            "company": self.title,
            "expected": self.expected,
            "got": self.got,
            "requires": f"{self.spec}: {sentence}" if sentence else "",
            "again": f"--dtype {dtype} --seed {seed} --only {only or self.operation}",
        }
        lines = [f"{self.operation} at {dtype}"]
        for label, text in rows.items():
            wrapped = textwrap.wrap(text, 66, break_long_words=False, break_on_hyphens=False)
            lines += [f"  {'' if number else label:<11}{line}" for number, line in enumerate(wrapped)]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """As ``specs/schemas/report.schema.json`` says; the exact call too, where it is small."""
        names = ("problem", "output", "expected", "got", "title", "spec")
        entry: dict[str, Any] = {name: getattr(self, name) for name in names}
        entry["called"] = f"{self.operation}({abbreviate(self.call.inputs)})"
        entry["looks_like"] = list(self.looks_like)
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

    def to_json(self) -> dict[str, Any]:
        """As the schema says."""
        entry: dict[str, Any] = {name: getattr(self, name) for name in ("operation", "status", "calls")}
        entry["lacks"] = list(self.lacks)
        more = {"failures": self.num_findings, "finding": self.finding.to_json()} if self.finding else {}
        return entry | more


@dataclass(frozen=True)
class Report:
    """What came of one implementation at one dtype, by ``profile`` (``core`` or ``full``) and ``seed``."""

    name: str
    dtype: str
    seed: int
    profile: str
    results: tuple[OperationResult, ...]
    dtypes: tuple[str, ...] = DTYPES  # that the implementation offers

    @property
    def failures(self) -> tuple[OperationResult, ...]:
        """The operations that failed."""
        return tuple(result for result in self.results if result.finding)

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
        """The options that the judged operations lack."""
        return tuple(sorted({option for result in self.results for option in result.lacks if result.answered}))

    @property
    def not_judged(self) -> tuple[str, ...]:
        """The operations of the specification that were not judged; indexers as one where all are."""
        names = [name for name in OUTPUTS if name not in self.judged]
        indexers = [name for name in names if name.startswith("indexer")]
        return tuple(names if len(indexers) < 3 else [*(name for name in names if name not in indexers), "indexers"])

    @property
    def verdict(self) -> str:
        """What was judged and how, in one line; "conforms" alone where nothing is missing."""
        judged, core_only = self.judged, self.profile == "core"
        absent = [result.operation for result in self.results if result.status == "missing"]
        if not judged:
            if self.dtype not in self.dtypes:
                return f"nothing was judged; lacks the dtype {self.dtype}, offers {', '.join(self.dtypes) or 'none'}"
            return f"nothing was judged; lacks {', '.join(absent) if len(absent) < 9 else 'all operations'}"
        core = all(name in judged and "core" not in judged[name].failed_parts for name in CORE)
        if core and not self.failures and not self.lacks and not self.not_judged and not core_only:
            return "conforms"
        few = [name for name in CORE if name in judged] if len(judged) > 8 else list(judged)
        conformity = f"conforms to {'core' if core else ', '.join(few) or 'what it offers'}"
        parts = (
            [f"does not conform: {', '.join(result.operation for result in self.failures)}"] if self.failures else []
        )
        parts += [conformity] if core or not self.failures else []
        lacks = absent if core_only else self.lacks
        parts += [f"lacks {', '.join(lacks)}"] if lacks else []
        missing = ["options", "other operations"] if core_only else self.not_judged
        return "; ".join(parts + ([f"not judged: {', '.join(missing)}"] if missing else []))

    def summary(self) -> str:
        """For a terminal: one whole failure an operation, and the verdict."""
        failed = [(result.finding, result.operation) for result in self.failures if result.finding]
        failed.sort(key=lambda one: one[0].order)
        parts = [f"FAILED {finding.describe(self.dtype, self.seed, operation)}" for finding, operation in failed]
        findings = [finding for finding, _ in failed]
        values = [finding for finding in findings if finding.order[0] < 2]
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
        names = ("dtype", "seed", "profile", "passed", "verdict", "lacks", "not_judged")
        entry = {name: getattr(self, name) for name in names}
        results = [result.to_json() for result in self.results]
        entry |= {"report_version": "2", "implementation": self.name, "spec_edition": spec_edition()}
        return entry | {"results": results}
