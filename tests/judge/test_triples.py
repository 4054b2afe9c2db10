"""The laws of three options: each option shows in the answer, with any values of two other options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from implementations import ReferenceWithOracles

from shd_ref.conformance.adapter import RefusedError, Subject, as_adapter
from shd_ref.conformance.laws import LawBrokenError, Trial
from shd_ref.conformance.laws import pair_merging as triples
from shd_ref.conformance.laws.formulas import check_diagnosis
from shd_ref.conformance.laws.pair_rows import Row, cover

REFERENCE = ReferenceWithOracles()
ARGUMENTS = {
    "squeeze_heads": (
        "strategy", "plan", "alpha_per", "alpha_rule", "alpha_from", "row_sums", "temperature", "query_mask",
    ),
    "diagnose": ("plan", "alpha_per", "row_sums", "query_mask", "strategies"),
    "matched_plan": ("by", "alpha_per", "row_sums", "query_mask"),
}  # fmt: skip
DEFAULTS = {
    **triples.DEFAULTS,
    "plan": "progressive", "temperature": "one", "query_mask": "none", "strategies": "not given",
}  # fmt: skip
ROWS: Mapping[str, Callable[[], list[Row]]] = {
    "squeeze_heads": triples.squeeze_rows,
    "diagnose": triples.diagnosis_rows,
    "matched_plan": triples.matched_rows,
}
INPUTS: Mapping[str, Callable[[Trial, int, Row], list[dict[str, Any]]]] = {
    "squeeze_heads": lambda *row: [triples.squeeze_inputs(*row)],
    "diagnose": lambda *row: [triples.diagnosis_inputs(*row)],
    "matched_plan": triples.matched_inputs,
}


@pytest.fixture(autouse=True)
def solvers() -> None:
    for library in ("networkx", "scipy"):
        pytest.importorskip(library, reason="diagnose and matched_plan need the extra 'oracles'")


def moot(operation: str, name: str, row: Row) -> bool:
    """Whether an option has no meaning beside the others of its row."""
    strategy, alone = row.get("strategy", "shd"), row.get("rounds") == "none"
    if name == "plan":
        # In one round a balanced plan is the progressive one.
        return alone or (row["plan"] == "balanced" and row["rounds"] == "one")
    if name == "alpha_rule":
        return alone or strategy in ("constant", "mean")
    if name == "alpha_from":
        return alone or strategy in ("constant", "mean") or row["temperature"] == "one"
    if name == "strategy":
        return alone and strategy != "mean"
    return operation == "diagnose" and name == "alpha_per" and alone


def without(inputs: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The inputs with an option at its default."""
    if name == "query_mask" and "calibration" in inputs:
        return {**inputs, "calibration": [item[:2] for item in inputs["calibration"]]}
    return {key: value for key, value in inputs.items() if key != name}


def shows(operation: str, trial: Trial, inputs: Mapping[str, Any], name: str, row: Row) -> bool:
    """Whether the law finds out that an option is ignored."""

    class Ignoring:
        def run_operation(self, called: str, given: Mapping[str, Any], dtype: str) -> Any:
            return getattr(REFERENCE, called)(**(without(given, name) if called == operation else given))

    wrong = Trial(Subject(Ignoring(), trial.subject.dtype))
    try:
        if operation == "diagnose":
            check_diagnosis(wrong, inputs, "")
        elif operation == "squeeze_heads":
            triples.check_squeezed(wrong, inputs, wrong.call(operation, **inputs), row)
        else:
            triples.check_matching(wrong, inputs, wrong.call(operation, **inputs))
    except (LawBrokenError, RefusedError):
        return True
    return False


@pytest.mark.parametrize("operation", ARGUMENTS)
def test_every_option_shows_beside_any_two_others(operation: str) -> None:
    trial = Trial(Subject(as_adapter(REFERENCE), "float32"))  # whose tolerances allow more than those of float64
    rows = ROWS[operation]()
    calls = [INPUTS[operation](trial, number, row) for number, row in enumerate(rows)]
    hidden = []
    with np.errstate(all="ignore"):
        for name in ARGUMENTS[operation]:
            default = DEFAULTS[name]
            asked = [
                (row, any(shows(operation, trial, call, name, row) for call in inputs))
                for row, inputs in zip(rows, calls, strict=True)
                if row[name] != default and not moot(operation, name, row)
            ]
            others = [other for other in rows[0] if other != name]
            for one, other in combinations(others, 2):
                found: dict[tuple[str, ...], bool] = {}
                for row, shown in asked:
                    key = row[name], row[one], row[other]
                    found[key] = found.get(key, False) or shown
                hidden += [(name, one, other, key) for key, shown in found.items() if not shown]
    assert hidden == []


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_rows_hold_every_meeting(strength: int) -> None:
    options = {"a": ("1", "2"), "b": ("1", "2", "3"), "c": ("1", "2"), "d": ("1", "2", "3")}

    def allowed(row: Row) -> bool:
        return not (row.get("a") == "1" and row.get("b") == "3")

    rows = cover(options, allowed, strength=strength)
    assert all(allowed(row) for row in rows)
    assert len(rows) < 36
    for names in combinations(options, strength):
        for values in product(*(options[name] for name in names)):
            meeting = dict(zip(names, values, strict=True))
            assert not allowed(meeting) or any(meeting.items() <= row.items() for row in rows), meeting
