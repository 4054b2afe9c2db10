"""How the tokens of a student are made of the teacher's, where maps are stored pooled (CACHE-131)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from shd_ref.cache.forms.form import require
from shd_ref.errors import argument_value

_GRID: Final = r"[1-9][0-9]{0,4}(?:x[1-9][0-9]{0,4}){0,3}"
_FORM: Final = re.compile(rf"patches:({_GRID}):({_GRID})(?::([1-9][0-9]{{0,4}}))?|(ids|weights):([ -~]{{1,200}})")


@dataclass(frozen=True)
class TokenGroups:
    """Groups of tokens, by their name in options and manifests.

    Attributes:
        teacher_grid, student_grid: of patches, row-major; empty where each sample has its own groups.
        extra: tokens in front of the patches that both sides have.
        kind: of the column with a sample's groups: ``"ids"``, the group of each teacher token ``(L,)``, below 0 for
            none, or ``"weights"`` of each teacher token in each student token ``(L, l)``; empty for patches.
        column: its name, an input of the sample's key.
    """

    teacher_grid: tuple[int, ...] = ()
    student_grid: tuple[int, ...] = ()
    extra: int = 0
    kind: str = ""
    column: str = ""

    @classmethod
    def parse(cls, text: str) -> TokenGroups:
        """``argument-value`` for anything but ``patches:14x14:7x7``, ``patches:14x14:7x7:1`` and ``ids:COLUMN``."""
        match = _FORM.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            rule = (
                "groups must be patches:14x14:7x7 (the teacher's grid, the student's), the same with :1 for a class "
            )
            raise argument_value(f"{rule}token in front, ids:COLUMN or weights:COLUMN; got {text!r}", "CACHE-131")
        large, small, extra, kind, column = match.groups()
        if kind:
            return cls(kind=kind, column=column)
        teacher, student = (tuple(map(int, grid.split("x"))) for grid in (large, small))
        rule = "grids of groups must have as many axes, and at most 65,536 patches"
        fits = len(teacher) == len(student) and max(math.prod(teacher), math.prod(student)) <= 65_536
        require(fits, rule, text, "CACHE-131")
        return cls(teacher, student, int(extra or 0))

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Tokens of the teacher and of the student; None where they are a sample's own."""
        if self.column:
            return None
        return math.prod(self.teacher_grid) + self.extra, math.prod(self.student_grid) + self.extra
