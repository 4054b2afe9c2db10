"""What agrees with the reference: an answer as near as its dtype allows, and no other."""

from typing import Any

import numpy as np
import pytest

from shd_ref.conformance.comparison import compare
from shd_ref.conformance.sessions import Call


def differs(inputs: dict[str, Any], dtype: str, **changes: Any) -> str:
    """The wrong output of an answer of ``squeeze_heads`` that is the reference's but for these; "" where none is."""
    call = Call("squeeze_heads", inputs, dtype)
    wrong = compare(call.answer[1], lambda: call.near, {**call.answer[1], **changes}, dtype, inputs)
    return wrong.output if wrong else ""


@pytest.mark.parametrize(
    ("dtype", "optimum", "counts"),
    [
        ("float64", 1.0001, {1}),
        *(("float32", 1.0001, {0, 1}), ("float32", -0.0001, {0, 1})),
        *(("float32", 1.001, {1}), ("float32", 0.999, {0})),
        *(("bfloat16", 1.02, {0, 1}), ("bfloat16", 1.05, {1}), ("bfloat16", 0.5, {0})),
    ],
)
def test_a_count_turns_only_where_an_optimum_is_as_near_to_0_or_1_as_alphas_agree(
    dtype: str, optimum: float, counts: set[int]
) -> None:
    maps = np.eye(2, dtype="float64" if dtype == "float64" else "float32")[None, :, None]
    outputs = (np.array([optimum, 1 - optimum])[None, :, None, None] * np.array([[1.0], [0.5]])).astype(maps.dtype)
    inputs = {"teacher_probs": maps, "value_outputs": outputs, "num_student_heads": 1}
    agreeing = {count for count in range(-1, 4) if not differs(inputs, dtype, num_clipped=count)}
    assert agreeing == counts
    assert differs({**inputs, "strategy": "hard"}, dtype, num_clipped=1)


@pytest.mark.parametrize(("value", "agreeing"), [(0.0, {0.0, np.inf}), (1.0, {0.0})])
def test_of_heads_that_give_nothing_a_solver_says_whether_an_optimum_is_0(value: float, agreeing: set[float]) -> None:
    pytest.importorskip("scipy", reason="the oracles need scipy")
    inputs = {"teacher_probs": np.eye(2)[None, None], "value_outputs": np.full((1, 1, 2, 1), value)}
    inputs |= {"num_student_heads": 1, "strategies": []}
    right = Call("diagnose", inputs, "float64").answer[1]
    answers = {answer: {**right, "stochastic": np.array([answer])} for answer in (0.0, 0.5, np.inf)}
    same = {one for one, got in answers.items() if not compare(right, list, got, "float64", inputs)}
    assert same == agreeing
