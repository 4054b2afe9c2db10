"""Calls that must be refused, or taken, and what is said of an implementation that does otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shd_ref.conformance.adapter import Missing, RefusedError
from shd_ref.conformance.laws.formulas import in_words
from shd_ref.conformance.laws.law import Trial, broken

VALUE, SHAPE, DTYPE = ("argument-value",), ("argument-shape",), ("argument-dtype",)
FINITE, SUMS, MISMATCH = ("not-finite",), ("not-a-distribution",), ("support-mismatch",)


@dataclass(frozen=True)
class Asked:
    """A call, and the codes of which any is right; without one it must be answered."""

    what: str
    codes: tuple[str, ...]
    operation: str
    inputs: Mapping[str, Any]


def ask(trial: Trial, asked: Asked) -> str:
    """The message of the refusal; empty where an answer was right."""
    code, message = "", ""
    try:
        trial.subject.run(asked.operation, asked.inputs)
    except RefusedError as refusal:
        code, message = refusal.code, str(refusal)
    if (code in asked.codes) if asked.codes else not code:
        return message
    problem = "must be refused" if not code else "has another code" if asked.codes else "must not be refused"
    what = f"{asked.operation} with {asked.what} ({in_words(asked.inputs)})"
    raise broken(what, problem, " or ".join(asked.codes) or "an answer", message or "an answer")


def ask_all(trial: Trial, calls: Iterable[Asked]) -> None:
    """Every call; missing where the implementation lacks the options for all of them."""
    missing: Missing | None = None
    answered = False
    for asked in calls:
        try:
            ask(trial, asked)
            answered = True
        except Missing as reason:
            missing = reason
    if missing and not answered:
        raise missing
