"""Laws: facts about an implementation's own answers, on seeded inputs."""

from shd_ref.conformance.laws import (
    alphas,
    calls,
    learning,
    maps,
    merging,
    pairs,
    plans,
    refusals,
    shapes,
    student,
    symmetries,
)
from shd_ref.conformance.laws.law import Law, LawBrokenError, Trial

LAWS: tuple[Law, ...] = (
    *maps.LAWS,
    *plans.LAWS,
    *alphas.LAWS,
    *merging.LAWS,
    *learning.LAWS,
    *pairs.LAWS,
    *refusals.LAWS,
    *shapes.LAWS,
    *calls.LAWS,
    *student.LAWS,
    *symmetries.LAWS,
)
"""Every law, by chapter."""

__all__ = ["LAWS", "Law", "LawBrokenError", "Trial"]
