"""Beta over the training."""

import pickle
import re
from typing import Any

import pytest
from support.refusals import refusal

from shd_torch import BetaSchedule


def test_schedules_by_hand() -> None:
    assert [BetaSchedule(2.0)(t) for t in (0.0, 0.5, 1.0)] == [2.0, 2.0, 2.0]
    rising = BetaSchedule(2.0, warmup=0.5)
    assert [rising(t) for t in (0.0, 0.25, 0.5, 0.75)] == [0.0, 1.0, 2.0, 2.0]
    linear = BetaSchedule(3.0, "linear", warmup=0.2, end=1.0)
    assert [linear(t) for t in (0.1, 0.2, 0.6, 1.0, 2.0)] == pytest.approx([1.5, 3.0, 2.0, 1.0, 1.0])
    cosine = BetaSchedule(1.0, "cosine")
    assert [cosine(t) for t in (-1.0, 0.0, 0.25, 0.5, 1.0)] == pytest.approx([1.0, 1.0, 0.853553, 0.5, 0.0], abs=1e-6)
    early = BetaSchedule(1.0, "linear", warmup=0.1, until=0.5)
    assert [early(t) for t in (0.05, 0.1, 0.3, 0.49, 0.5, 1.0)] == pytest.approx([0.5, 1.0, 0.5, 0.025, 0.0, 0.0])
    assert [BetaSchedule(1.0, until=0.5)(t) for t in (0.0, 0.49, 0.5)] == [1.0, 1.0, 0.0]
    assert [schedule.is_over(0.5) for schedule in (early, cosine)] == [True, False]
    assert not cosine.is_over(1.0)
    assert pickle.loads(pickle.dumps(cosine)) == cosine


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (BetaSchedule, {"peak": -1.0}),
        (BetaSchedule, {"peak": "0.1"}),
        (BetaSchedule, {"peak": 1.0, "kind": "square"}),
        (BetaSchedule, {"peak": 1.0, "warmup": 1.0}),
        (BetaSchedule, {"peak": 1.0, "end": -1.0}),
        (BetaSchedule, {"peak": 1.0, "until": 0.0}),
        (BetaSchedule, {"peak": 1.0, "until": 1.5}),
        (BetaSchedule, {"peak": 1.0, "until": 0.5, "warmup": 0.5}),
    ],
)
def test_refuses(make: Any, arguments: dict[str, Any]) -> None:
    name, value = list(arguments.items())[-1]
    with refusal("argument-value", re.escape(f"{name} must be ") + ".*" + re.escape(f"got {value!r}")):
        make(**arguments)
