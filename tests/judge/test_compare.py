"""The comparison rules, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shd_ref
from shd_ref.conformance import cases, check
from shd_ref.conformance.adapter import Functions, Subject
from shd_ref.conformance.compare import compare_output
from shd_ref.conformance.laws import LawBrokenError, Trial
from shd_ref.conformance.specification import agreement

CLOSE = {"rule": "close", "quantity": "probs"}
ZEROS = {**CLOSE, "exact_zeros": True}


def array(*data: Any, shape: list[int] | None = None, **more: Any) -> dict[str, Any]:
    return {"shape": shape or [len(data)], "data": list(data), **more}


@pytest.mark.parametrize(
    ("rule", "expected", "got"),
    [
        (CLOSE, array(0.5, "1e-3"), np.array([0.5 + 1e-10, 0.001], np.float64)),
        (CLOSE, array("inf", 1), [np.inf, 1.0]),
        (CLOSE, array("-inf", "inf", 1), [-np.inf, np.inf, 1.0]),
        (CLOSE, "inf", np.inf),
        (CLOSE, array("inf", "0.25", shape=[2, 2], at=[0, 3]), np.array([[np.inf, np.inf], [-np.inf, 0.25]])),
        ({"rule": "alpha"}, array("inf"), [np.inf]),
        ({"rule": "exact"}, "inf", np.inf),
        ({"rule": "exact"}, array("inf", "-inf"), [np.inf, -np.inf]),
        ({"rule": "exact"}, [array("inf"), array(0, 0)], [np.array([np.inf]), np.zeros(2)]),
        (ZEROS, array(0, 1), [0.0, 1.0]),
        (CLOSE, [array(1), array(2, 3)], (np.array([1.0]), [2.0, 3.0])),
        (CLOSE, array("0.25", shape=[2, 2], at=[3]), np.array([[9.0, 9.0], [9.0, 0.25]])),
        (CLOSE, "0.125", 0.125),
        ({"rule": "exact"}, [[0, 1], [2, 3]], ((0, 1), (2, 3))),
        ({"rule": "exact"}, 3, np.int64(3)),
        ({"rule": "exact"}, array(1, 2), np.array([1.0, 2.0])),
        ({"rule": "plan"}, [[[0, 1]]], (((0, 1),),)),
        ({"rule": "plan"}, [], ()),
        ({"rule": "alpha"}, array(0.5), [0.5 + 1e-10]),
    ],
)
def test_passes(rule: dict[str, Any], expected: Any, got: Any) -> None:
    assert compare_output(rule, expected, got, "float64") is None


@pytest.mark.parametrize(
    ("rule", "expected", "got", "words"),
    [
        (CLOSE, array(0.5, 1), [0.5, 1.1], "differs by 0.1, allowed 1.01e-09 at index [1] (expected 1, got 1.1"),
        (CLOSE, array(0.5), [np.nan], "is NaN at index [0]"),
        (CLOSE, array("inf"), [1e300], "differs by inf"),
        (CLOSE, array(0.5), [np.inf], "differs by inf"),
        (CLOSE, array("inf"), [-np.inf], "differs by inf"),
        ({"rule": "exact"}, "inf", 1e300, "differs by inf"),
        ({"rule": "exact"}, [array("inf"), array(0)], [[np.inf], [1.0]], "item 1: differs by 1"),
        (CLOSE, array(0.5), 0.5, "must have the shape [1]; got []"),
        (CLOSE, array(0.5), "half", "must be numbers"),
        (CLOSE, array(0.5), None, "must be numbers"),
        (CLOSE, [array(1), array(2)], [[1.0]], "must be a list of 2 arrays"),
        (CLOSE, [array(1), array(2)], [[1.0], [3.0]], "item 1: differs by 1"),
        (CLOSE, array("0.25", shape=[2, 2], at=[3]), np.ones((2, 2)), "at index [1, 1] (expected 0.25, got 1)"),
        (ZEROS, array(0), [1e-13], "must be exactly 0; got 1"),
        ({"rule": "exact"}, 1, True, "is not equal"),
        ({"rule": "exact"}, 3, 4, "is not equal"),
        ({"rule": "plan"}, [[[0, 1]], [[0, 2]]], [[[0, 1]], [[0, 1]]], "differs first in round 1"),
        ({"rule": "plan"}, [[[0, 1]]], [[[0, 1]], [[0, 1]]], "must have 1 rounds of pairs; got 2"),
        ({"rule": "plan"}, [[[0, 1]]], None, "must have 1 rounds of pairs"),
        ({"rule": "alpha"}, array(0.5), [0.5001], "differs by 0.0001"),
    ],
)
def test_fails(rule: dict[str, Any], expected: Any, got: Any, words: str) -> None:
    difference = compare_output(rule, expected, got, "float64")
    assert difference
    assert words in difference.problem


def test_tolerances_come_from_the_file_alone() -> None:
    assert agreement("float32", "alpha") == (0.0005, 0.0)
    with pytest.raises(LookupError, match="no agreement for dtype 'float8', quantity 'alpha'"):
        agreement("float8", "alpha")
    with pytest.raises(LookupError, match="quantity 'speed'"):
        compare_output({"rule": "close", "quantity": "speed"}, 1, 1, "float32")


@pytest.mark.parametrize("quantity", ["alpha", "residual"])
def test_an_infinite_bound_holds_for_all_but_nan(quantity: str) -> None:
    trial = Trial(Subject(Functions(None), "float64"))
    trial.at_most([1.0, np.inf], [np.inf, np.inf], quantity, "a ratio")
    trial.at_most([-np.inf, 1.0], [-np.inf, 1.0], quantity, "a ratio")
    for got, bound in ((np.nan, np.inf), (np.inf, 1.0), (0.0, -np.inf)):
        with pytest.raises(LawBrokenError):
            trial.at_most([got], [bound], quantity, "a ratio")


@pytest.mark.parametrize("extra", [2.0**-53, -(2.0**-53)])
def test_rounding_over_an_output_of_zero_is_no_mistake(extra: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy", reason="oracles need the extra 'oracles'")
    from shd_ref.merging import oracles

    exact = oracles.stochastic_optimum

    def solve(probs: Any, *given: Any, **options: Any) -> Any:
        return exact(probs, *given, **options) + extra * (np.arange(probs.shape[-1]) == 0)

    monkeypatch.setattr(oracles, "stochastic_optimum", solve)
    (law,) = cases("law/oracles-of-odd-outputs")
    with np.errstate(all="ignore"):
        check(law, shd_ref)
