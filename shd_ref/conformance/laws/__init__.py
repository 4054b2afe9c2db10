"""Laws: facts about an implementation's own answers, on seeded inputs.

``law.py`` says what a law is, ``answers.py`` what is right; one file a chapter holds its laws, ``pair_*.py`` those of
options together, and ``refus*.py`` those of errors. A new law is a function of its chapter's file under ``LAWS.add``.
"""

from shd_ref.conformance.laws import (
    alphas,
    calls,
    indexers,
    layouts,
    learning,
    maps,
    merging,
    pair_maps,
    pair_merging,
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
    *pair_maps.LAWS,
    *pair_merging.LAWS,
    *refusals.LAWS,
    *shapes.LAWS,
    *calls.LAWS,
    *layouts.LAWS,
    *student.LAWS,
    *symmetries.LAWS,
    *indexers.LAWS,
)
"""Every law of ``specs/shd.md``, by chapter."""

__all__ = ["LAWS", "Law", "LawBrokenError", "Trial"]
