"""The report: what happened to every item and sentence, and the known-failures file that it is held against.

A line of that file is an id or glob, optionally ``@dtype`` (several with commas), and after ``#`` the reason:

    shd_loss/temperature-*  @float16,bfloat16   # softens in the narrow dtype until issue 12 is fixed
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shd_ref.conformance.adapter import Call
from shd_ref.conformance.compare import abbreviate
from shd_ref.conformance.specification import DTYPES, VECTORS_VERSION, load_sentences, spec_edition


class KnownFailuresError(ValueError):
    """A known-failures file that cannot be read."""


@dataclass(frozen=True)
class Entry:
    """One declared failure."""

    pattern: str
    dtypes: tuple[str, ...]
    reason: str

    def matches(self, item_id: str, dtype: str) -> bool:
        """Whether the entry is about this item at this dtype."""
        return dtype in self.dtypes and fnmatchcase(item_id, self.pattern)


@dataclass(frozen=True)
class KnownFailures:
    """The entries of a file."""

    entries: tuple[Entry, ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> KnownFailures:
        """The file's entries.

        Raises:
            KnownFailuresError: a line without a reason, or with an unknown dtype.
        """
        entries = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            words, separator, reason = line.partition("#")
            if not separator or not reason.strip():
                raise KnownFailuresError(f"{path}, line {number}: give the reason after '#'; got {line.strip()!r}")
            pattern, *rest = words.split()
            dtypes = DTYPES
            if rest:
                dtypes = tuple(rest[0].removeprefix("@").split(","))
            if len(rest) > 1 or (rest and not rest[0].startswith("@")) or not set(dtypes) <= set(DTYPES):
                raise KnownFailuresError(
                    f"{path}, line {number}: expected `<id or glob> [@dtype,...]  # reason` with dtypes of "
                    f"{', '.join(DTYPES)}; got {line.strip()!r}"
                )
            entries.append(Entry(pattern, dtypes, reason.strip()))
        return cls(tuple(entries))

    def reason_for(self, item_id: str, dtype: str) -> str | None:
        """Why this item is known to fail at this dtype, or None."""
        return next((entry.reason for entry in self.entries if entry.matches(item_id, dtype)), None)

    def stale_among(self, passed: Iterable[str], failed: Iterable[str], dtype: str) -> list[Entry]:
        """Entries that speak only of items that passed: to be deleted."""
        passed, failed = list(passed), list(failed)
        return [
            entry
            for entry in self.entries
            if any(entry.matches(item_id, dtype) for item_id in passed)
            and not any(entry.matches(item_id, dtype) for item_id in failed)
        ]


REPORT_VERSION = "1"


class Status(StrEnum):
    """What happened to an item."""

    PASSED = "passed"
    FAILED = "failed"
    KNOWN = "known_failure"
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """Why an item failed, for somebody who does not know the judge's code."""

    problem: str
    output: str
    expected: str
    got: str
    looks_like: tuple[str, ...] = ()
    spec: tuple[str, ...] = ()  # the sentences about this very problem, if not all of the item's do


@dataclass(frozen=True)
class Result:
    """What happened to one item at one dtype."""

    id: str
    dtype: str
    operations: tuple[str, ...]
    spec: tuple[str, ...]
    flags: Mapping[str, str]
    comment: str
    status: Status
    seconds: float
    note: str = ""  # why it is missing, or known to fail
    finding: Finding | None = None
    call: Call | None = field(default=None, repr=False)  # the last one before it failed

    def to_json(self) -> dict[str, Any]:
        """As ``specs/schemas/report.schema.json`` says."""
        entry: dict[str, Any] = {
            "id": self.id,
            "status": str(self.status),
            "operations": list(self.operations),
            "spec": list(self.spec),
            "seconds": round(self.seconds, 6),
        }
        if self.note:
            entry["note"] = self.note
        if self.finding:
            spec, called = list(self.finding.spec or self.spec), _describe_call(self.call) if self.call else ""
            looks_like = list(self.finding.looks_like)
            entry["finding"] = {**vars(self.finding), "looks_like": looks_like, "spec": spec, "called": called}
        return entry


@dataclass(frozen=True)
class Report:
    """Every result of one implementation at one dtype.

    Attributes:
        name: of the implementation.
        dtype: what it computed in.
        results: in the order in which they ran.
        stale: entries of the known-failures file whose items pass.
        seed: of the laws' inputs.
    """

    name: str
    dtype: str
    results: tuple[Result, ...]
    stale: tuple[Entry, ...] = field(default=())
    seed: int = 0

    @classmethod
    def of(cls, name: str, dtype: str, results: Iterable[Result], known: KnownFailures, seed: int = 0) -> Report:
        """Results as they came, after declared failures are told from the others."""
        results = list(results)
        passed = [r.id for r in results if r.status is Status.PASSED]
        failed = [r.id for r in results if r.status is Status.FAILED]
        stale = known.stale_among(passed, failed, dtype)
        return cls(name, dtype, tuple(_mark_known(result, known) for result in results), tuple(stale), seed)

    def count(self, status: Status) -> int:
        """How many items ended so."""
        return sum(result.status is status for result in self.results)

    @property
    def failures(self) -> tuple[Result, ...]:
        """The items that failed and were not declared."""
        return tuple(result for result in self.results if result.status is Status.FAILED)

    @property
    def passed(self) -> bool:
        """Whether nothing failed undeclared and no declaration is stale; missing operations are not failures."""
        return not self.failures and not self.stale

    @property
    def empty(self) -> bool:
        """Whether nothing was judged: no item, or all of them missing."""
        return self.count(Status.MISSING) == len(self.results)

    def requirements(self) -> dict[str, dict[str, int]]:
        """For every sentence of the specification, how its items ended; zeros where no item names it."""
        table = {spec_id: dict.fromkeys(map(str, Status), 0) for spec_id in load_sentences()}
        for result in self.results:
            for spec_id in result.spec:
                row = table.setdefault(spec_id, dict.fromkeys(map(str, Status), 0))
                row[str(result.status)] += 1
        return table

    def to_json(self) -> dict[str, Any]:
        """As ``specs/schemas/report.schema.json`` says."""
        sentences = load_sentences()
        return {
            "report_version": REPORT_VERSION,
            "implementation": self.name,
            "dtype": self.dtype,
            "seed": self.seed,
            "spec_edition": spec_edition(),
            "vectors_version": VECTORS_VERSION,
            "passed": self.passed,
            "counts": {str(status): self.count(status) for status in Status},
            "requirements": {
                spec_id: {"sentence": sentences.get(spec_id, ""), **row}
                for spec_id, row in self.requirements().items()
            },
            "results": [result.to_json() for result in self.results],
            "stale_known_failures": [{"pattern": entry.pattern, "reason": entry.reason} for entry in self.stale],
        }

    def summary(self, how: str = "", full: int = 10) -> str:
        """For a terminal: the failures, what is missing, and the counts.

        Args:
            how: the options that name the implementation, for the line that says how to run one item again.
            full: how many failures to tell in full; of the others only the problem.
        """
        parts = [f"FAILED {describe(result, how, self.seed)}" for result in self.failures[:full]]
        if self.failures[full:]:
            lines = [f"  {r.id}: {r.finding.problem}" for r in self.failures[full:] if r.finding]
            parts.append("also failed:\n" + "\n".join(textwrap.shorten(line, 160) for line in lines))
        missing: dict[str, int] = {}
        for result in self.results:
            if result.status is Status.MISSING:
                missing[result.note] = missing.get(result.note, 0) + 1
        if missing:
            parts.append("missing:\n" + "\n".join(f"  {note} ({count} items)" for note, count in missing.items()))
        known = [result for result in self.results if result.status is Status.KNOWN]
        if known:
            parts.append("known failures:\n" + "\n".join(f"  {result.id}: {result.note}" for result in known))
        if self.stale:
            lines = [f"  {entry.pattern}  # {entry.reason}" for entry in self.stale]
            parts.append("known failures that pass; delete these lines from the file:\n" + "\n".join(lines))
        rows = self.requirements().values()
        judged = [row for row in rows if row[Status.PASSED] or row[Status.FAILED] or row[Status.KNOWN]]
        clean = sum(not row[Status.FAILED] and not row[Status.KNOWN] for row in judged)
        counts = ", ".join(f"{self.count(status)} {status.replace('_', ' ')}" for status in Status)
        verdict = "nothing was judged" if self.empty else "conforms" if self.passed else "does not conform"
        drawn = f", seed {self.seed}" if self.seed else ""
        parts.append(
            f"{self.name} at {self.dtype}, specification {spec_edition()}{drawn}: {verdict}\n"
            f"  items: {counts}\n"
            f"  sentences: {clean} of {len(judged)} judged hold, of {len(rows)} in the specification"
        )
        return "\n\n".join(parts)


def describe(result: Result, how: str = "", seed: int = 0) -> str:
    """One failure: what was asked, what came, and what it looks like."""
    finding = result.finding
    if finding is None:
        return f"{result.id} at {result.dtype}"
    sentences = load_sentences()
    spec = finding.spec or result.spec
    required = [f"{spec_id}: {sentences.get(spec_id, '(not in this edition)')}" for spec_id in spec]
    options = f"--dtype {result.dtype}{f' --seed {seed}' if seed else ''} --only '{result.id}'"
    rows: list[tuple[str, Sequence[str]]] = [
        ("shows", [result.comment] if result.comment else []),
        ("requires", required),
        ("called", [_describe_call(result.call)] if result.call else []),
        ("output", [finding.output] if finding.output else []),
        ("expected", [finding.expected] if finding.expected else []),
        ("got", [finding.got] if finding.got else []),
        ("problem", [finding.problem]),
        ("looks like", [f"this equals what you get if {sentence}" for sentence in finding.looks_like]),
        ("hunts", [f"{flag}: {note}" for flag, note in result.flags.items()]),
        ("again", [f"python -m shd_ref.conformance {how or '--impl ...'} {options}"]),
    ]
    lines = [f"{result.id} at {result.dtype}"]
    for label, texts in rows:
        for text in texts:
            wrapped = textwrap.wrap(text, 112, break_long_words=False, break_on_hyphens=False) or [""]
            lines.append(f"  {label:<11}{wrapped[0]}")
            lines += [f"  {'':<11}{line}" for line in wrapped[1:]]
            label = ""
    return "\n".join(lines)


def _describe_call(call: Call) -> str:
    arguments = ", ".join(f"{name}={abbreviate(value)}" for name, value in call.inputs.items())
    return f"{call.operation}({arguments})"


def _mark_known(result: Result, known: KnownFailures) -> Result:
    reason = known.reason_for(result.id, result.dtype) if result.status is Status.FAILED else None
    if reason is None:
        return result
    return Result(**{**vars(result), "status": Status.KNOWN, "note": reason})
