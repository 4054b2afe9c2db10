"""What a recipe gives, and what it asks of its weights (REC-1, REC-2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from shd_ref.errors import ShdError


class Term(NamedTuple):
    """One part of a loss."""

    value: float  # before its weight
    weight: float


Terms: TypeAlias = dict[str, Term]


def total(terms: Mapping[str, Term]) -> float:
    """The loss: ``sum of weight * value`` (REC-1)."""
    return math.fsum(term.weight * term.value for term in terms.values())


def check_weight(name: str, value: Any) -> float:
    """A weight of a term: a finite number of at least 0 (REC-2)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ShdError("argument-value", f"{name} must be a finite number of at least 0; got {value!r}", "REC-2")
    return float(value)


def check_share(name: str, value: Any) -> float:
    """A weight that divides a loss between two terms: a number from 0 to 1 (REC-2)."""
    share = check_weight(name, value)
    if share > 1:
        raise ShdError(
            "argument-value", f"{name} must be at most 1, as the other term has the rest; got {value!r}", "REC-2"
        )
    return share
