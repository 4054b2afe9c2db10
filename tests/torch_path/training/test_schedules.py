"""Beta over the training, and against the base loss."""

import pickle
import re
from typing import Any

import pytest
import torch
from support.refusals import refusal

from shd_torch import BetaSchedule, LossBalancer


def test_schedules_by_hand() -> None:
    assert [BetaSchedule(2.0)(t) for t in (0.0, 0.5, 1.0)] == [2.0, 2.0, 2.0]
    rising = BetaSchedule(2.0, warmup=0.5)
    assert [rising(t) for t in (0.0, 0.25, 0.5, 0.75)] == [0.0, 1.0, 2.0, 2.0]
    linear = BetaSchedule(3.0, "linear", warmup=0.2, end=1.0)
    assert [linear(t) for t in (0.1, 0.2, 0.6, 1.0, 2.0)] == pytest.approx([1.5, 3.0, 2.0, 1.0, 1.0])
    cosine = BetaSchedule(1.0, "cosine")
    assert [cosine(t) for t in (-1.0, 0.0, 0.25, 0.5, 1.0)] == pytest.approx([1.0, 1.0, 0.853553, 0.5, 0.0], abs=1e-6)
    assert pickle.loads(pickle.dumps(cosine)) == cosine


def test_balancer_makes_the_term_a_part_of_the_base_loss() -> None:
    base, term = torch.tensor(-3.0, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    scale = LossBalancer(0.25).scale(base, term)
    assert float(scale * term.detach()) == pytest.approx(0.75)
    assert not scale.requires_grad
    assert LossBalancer(1.0, limit=10.0).scale(base, torch.tensor(0.0)) == 10.0
    assert LossBalancer().scale(torch.tensor(0.0), term) == 0.0


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (BetaSchedule, {"peak": -1.0}),
        (BetaSchedule, {"peak": "0.1"}),
        (BetaSchedule, {"peak": 1.0, "kind": "square"}),
        (BetaSchedule, {"peak": 1.0, "warmup": 1.0}),
        (BetaSchedule, {"peak": 1.0, "end": -1.0}),
        (LossBalancer, {"fraction": 0.0}),
        (LossBalancer, {"limit": float("inf")}),
    ],
)
def test_refuses(make: Any, arguments: dict[str, Any]) -> None:
    name, value = list(arguments.items())[-1]
    with refusal("argument-value", re.escape(f"{name} must be ") + ".*" + re.escape(f"got {value!r}")):
        make(**arguments)
