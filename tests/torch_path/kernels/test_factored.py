"""Kernels on the teacher's queries and keys, against the reference on its maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.binding.kernel_cases import Case, assert_gradient, assert_value, logits, relative_error
from torch_path.kernels.conftest import Kernel

import shd_ref
from shd_ref.tolerances import load_tolerances

CASES = [
    Case(
        "causal, L=63, d=40 and 24, grouped queries", 63, None, 40, 24, kv_heads=1, teacher_kv_heads=2, is_causal=True
    ),
    Case("L=65, S=70, weights per row, T=2.5", 65, 70, mixes_rows=True, temperature=2.5),
    Case("causal, padded on the left: empty rows", 70, is_causal=True, has_key_mask=True, batch=2),
    Case("groups of 3, 1 and 2", 37, groups=((0, 4, 2), (5,), (1, 3)), kv_heads=3, teacher_kv_heads=6),
    Case("five heads in one", 34, groups=((0, 1, 2, 3, 4),), kv_heads=1, teacher_kv_heads=5, has_key_mask=True),
    Case(
        "d=64, window of 20, causal, L=131",
        131,
        width=64,
        teacher_width=64,
        groups=((0, 1),),
        kv_heads=1,
        is_causal=True,
        window=20,
        teacher_kv_heads=2,
    ),
    Case("window of 9 both ways, sinks", 75, groups=((0,), (1,)), window=9, teacher_kv_heads=2, has_sinks=True),
    Case(
        "float16, d=64, L=129, causal",
        129,
        width=64,
        teacher_width=64,
        groups=((0, 1),),
        kv_heads=1,
        teacher_kv_heads=1,
        is_causal=True,
        dtype="float16",
    ),
    Case("float16, d=200 and 80", 40, width=200, teacher_width=80, has_key_mask=True, dtype="float16"),
    Case("float16, d=256 and 32, L=17", 17, width=256, teacher_width=32, is_causal=True, dtype="float16"),
    Case("float16, d=128", 19, width=128, teacher_width=128, kv_heads=1, dtype="float16"),
    Case("twelve heads in one, L=21", 21, groups=(tuple(range(12)),), kv_heads=1, teacher_kv_heads=4, is_causal=True),
    Case("one row, one key", 1, groups=((0,),), kv_heads=1, teacher_kv_heads=1),
]


PASSES = [
    *(pytest.param(case, True, id=f"{case.name}-two-passes") for case in CASES),
    *(pytest.param(case, False, id=f"{case.name}-one-pass") for case in CASES[:6]),
]


@pytest.mark.parametrize(("case", "deterministic"), PASSES)
def test_value_and_gradients_agree(kernel: Kernel, case: Case, deterministic: bool) -> None:
    value, dq, dk, weights = case.expect(case.supervision)
    actual = kernel("kl_factored", **case.factored_arguments, row_weights=weights, deterministic=deterministic)
    assert_value(float((weights.astype(np.float64) * actual["kl"]).sum()), value, case.dtype)
    if case.length == 1:
        assert not actual["dq"].any()
        assert not actual["dk"].any()
        return
    assert_gradient(actual["dq"], dq, case.dtype, "dq")
    assert_gradient(actual["dk"], dk, case.dtype, "dk")
    assert actual["changed"] == []


@pytest.mark.parametrize("deterministic", [True, False], ids=["two-passes", "one-pass"])
def test_rows_that_do_not_count_are_exactly_zero(kernel: Kernel, deterministic: bool) -> None:
    case = CASES[2]
    *_, weights = case.expect(case.supervision)
    actual = kernel("kl_factored", **case.factored_arguments, row_weights=weights, deterministic=deterministic)
    assert (weights == 0).sum() > 20
    assert not actual["dq"][weights == 0].any()
    assert not actual["kl"][weights == 0].any()
    assert not actual["dk"][~np.repeat(case.key_mask[:, None], 2, axis=1)].any()  # type: ignore[index]
    nothing = kernel(
        "kl_factored", **case.factored_arguments, row_weights=np.zeros_like(weights), deterministic=deterministic
    )
    assert not any(nothing[name].any() for name in ("kl", "dq", "dk"))


def test_the_difference_is_taken_before_it_is_rounded(kernel: Kernel) -> None:
    """A student that is close to its teacher: rounding each map first would leave an error of a tenth."""
    case = Case(
        "close", 64, width=32, teacher_width=32, kv_heads=1, groups=((0, 1),), teacher_kv_heads=2, dtype="float16"
    )
    rng = np.random.default_rng(0)
    student = case.tensors["student_q"], case.tensors["student_k"]
    near = [np.repeat(x, 2, 1) + 0.02 * rng.standard_normal((1, 2, 64, 32)) for x in student]
    case.tensors.update(teacher_q=near[0].astype(np.float16), teacher_k=near[1].astype(np.float16))
    value, dq, dk, weights = case.expect(case.supervision)
    assert 1e-4 < value < 1e-2
    tolerance = load_tolerances()["kernels"]["gradient"]["float16"]
    for deterministic in (True, False):
        actual = kernel("kl_factored", **case.factored_arguments, row_weights=weights, deterministic=deterministic)
        assert relative_error(actual["dq"], dq) <= tolerance
        assert relative_error(actual["dk"], dk) <= tolerance
    probs = shd_ref.softmax(logits(*student)).astype(np.float16) - case.supervision.astype(np.float16)
    rounded = weights[..., None] * probs.astype(np.float64) @ student[1].astype(np.float64) * 32**-0.5
    assert relative_error(rounded, dq) > 5 * tolerance


@pytest.mark.parametrize("factor", [1e-9, 1e6])
def test_any_size_of_row_weight_keeps_its_precision(kernel: Kernel, factor: float) -> None:
    """beta / n of a long batch lies below what float16 can hold."""
    case = Case("float16", 40, dtype="float16")
    _, dq, dk, weights = case.expect(case.supervision)
    actual = kernel(
        "kl_factored", **case.factored_arguments, row_weights=weights * np.float32(factor), deterministic=True
    )
    tolerance = load_tolerances()["kernels"]["gradient"]["float16"]
    assert relative_error(actual["dq"] / factor, dq) <= tolerance
    assert relative_error(actual["dk"] / factor, dk) <= tolerance


def test_two_passes_give_the_same_bits_and_the_value_is_optional(kernel: Kernel) -> None:
    case = CASES[0]
    *_, weights = case.expect(case.supervision)
    first, second = (kernel("kl_factored", **case.factored_arguments, row_weights=weights) for _ in range(2))
    assert_same(first, second, exactly=True)
    without = kernel("kl_factored", **case.factored_arguments, row_weights=weights, want_value=False)
    assert without["kl"] is None
    assert_same(without, first | {"kl": None}, exactly=True)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(kernel: Kernel) -> None:
    case = Case("same", 40, groups=((0,), (1,)), teacher_kv_heads=2, is_causal=True)
    tensors = case.tensors
    case.tensors.update(teacher_q=tensors["student_q"], teacher_k=tensors["student_k"])
    weights = np.full((1, 2, 40), 1 / 40, np.float32)
    actual = kernel("kl_factored", **case.factored_arguments, row_weights=weights)
    tolerances = load_tolerances()["agreement"]["float32"]
    for name, quantity in (("kl", "loss"), ("dq", "gradient"), ("dk", "gradient")):
        np.testing.assert_allclose(actual[name], 0.0, atol=tolerances[quantity]["atol"], err_msg=name)


def assert_same(actual: dict[str, Any], expected: dict[str, Any], *, exactly: bool) -> None:
    tolerances = load_tolerances()["agreement"]["float32"]
    for name in ("kl", "dq", "dk"):
        if expected[name] is None or exactly:
            np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
        else:
            quantity = tolerances["loss" if name == "kl" else "gradient"]
            np.testing.assert_allclose(actual[name], expected[name], **quantity, err_msg=name)
