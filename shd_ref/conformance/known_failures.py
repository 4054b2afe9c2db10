"""The known-failures file: what an implementer knows to fail, and why.

One line an entry: an id or glob, optionally ``@dtype`` (several with commas), and after ``#`` the reason:

    shd_loss/temperature-*  @float16,bfloat16   # softens in the narrow dtype until issue 12 is fixed
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from shd_ref.conformance.specification import DTYPES


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
