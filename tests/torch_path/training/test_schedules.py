"""Beta over the training."""

import pickle
import re
from typing import Any

import pytest
from support.refusals import refusal

from shd_torch import BetaSchedule


def test_schedules_by_hand() -> None:
    whole, early = BetaSchedule(2.0), BetaSchedule(1.0, until=0.5)
    assert [whole(t) for t in (0.0, 0.5, 1.0)] == [2.0, 2.0, 2.0]
    assert [early(t) for t in (0.0, 0.49, 0.5)] == [1.0, 1.0, 0.0]
    assert [schedule.is_over(0.5) for schedule in (early, whole)] == [True, False]
    assert not whole.is_over(1.0)
    assert pickle.loads(pickle.dumps(early)) == early


@pytest.mark.parametrize(
    "arguments", [{"weight": -1.0}, {"weight": "0.1"}, {"weight": 1.0, "until": 0.0}, {"weight": 1.0, "until": 1.5}]
)
def test_refuses(arguments: dict[str, Any]) -> None:
    name, value = list(arguments.items())[-1]
    with refusal("argument-value", re.escape(f"{name} must be ") + ".*" + re.escape(f"got {value!r}")):
        BetaSchedule(**arguments)
