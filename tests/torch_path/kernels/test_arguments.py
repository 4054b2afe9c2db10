"""What the kernels refuse, and what they say about it; packages and devices that they cannot do without."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from support.binding.kernel_cases import Case
from support.binding.kernel_interpreter import call_kernel, call_reason

from shd_torch import ShdError
from shd_torch.kernels import kl_factored, unsupported_reason

CASE = Case("refused", 8)
ONES = np.ones((1, 2, 8), np.float32)


@pytest.mark.parametrize(
    ("change", "code", "part"),
    [
        ({"student_k": np.ones((1, 2, 8, 17), np.float32)}, "argument-shape", r"student_q and student_k .*GRAD-5"),
        ({"student_k": np.ones((1, 3, 8, 16), np.float32)}, "argument-shape", "H_kv a divisor of H"),
        ({"student_k": np.ones((1, 2, 8, 16), np.float16)}, "argument-dtype", "must have one dtype"),
        ({"teacher_q": np.ones((1, 4, 9, 16), np.float32)}, "argument-shape", r"\(B, L, S\) = \(1, 8, 8\)"),
        ({"mixing": np.ones((1, 2, 3), np.float32)}, "argument-shape", r"\(B, H_s, H_t\) = \(1, 2, 4\)"),
        ({"mixing": np.ones((1, 2, 4, 7), np.float32)}, "argument-shape", "a last axis L = 8"),
        ({"row_weights": ONES[:, :1]}, "argument-shape", "row_weights"),
        ({"row_weights": ONES.astype(np.float16)}, "argument-dtype", "row_weights must be float32"),
        ({"teacher_lse": ONES}, "argument-shape", "teacher_lse"),
        ({"student_lse": np.ones((1, 8, 2), np.float32)}, "argument-shape", "student_lse"),
        ({"key_mask": np.ones((1, 9), bool)}, "argument-shape", "key_mask must have shape"),
        ({"key_mask": np.ones((1, 8), np.int64)}, "argument-dtype", "key_mask must be a boolean"),
        ({"window": 0}, "argument-value", "window must be an integer of at least 1; got 0"),
        ({"scale": float("inf")}, "argument-value", "scale must be a finite number"),
        ({"temperature": 0.0}, "argument-value", "temperature must be"),
        ({"groups": ((0, 1),)}, "argument-shape", "H_s=2 heads; got 1"),
        ({"groups": ((0, 1), (2, 4))}, "argument-value", "0 to 3, each once; got .2, 4. for student head 1"),
        ({"groups": ((0, 1), (2, 2))}, "argument-value", "each once"),
        (
            {"student_q": np.ones((1, 2, 8, 16)), "student_k": np.ones((1, 2, 8, 16))},
            "argument-value",
            "got .*float64",
        ),
        (
            {"teacher_q": np.ones((1, 4, 8, 129), np.float32), "teacher_k": np.ones((1, 4, 8, 129), np.float32)},
            "argument-value",
            "a size of 1 to 128 in float32; got 129",
        ),
        (
            {"teacher_q": np.ones((1, 4, 8, 257), np.float16), "teacher_k": np.ones((1, 4, 8, 257), np.float16)},
            "argument-value",
            "a size of 1 to 256 in float16; got 257",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    interpreter: Any, change: dict[str, Any], code: str, part: str
) -> None:
    arguments = CASE.factored_arguments | {"row_weights": ONES} | change
    with pytest.raises(ShdError, match=part) as refused:
        interpreter.submit(call_kernel, "kl_factored", arguments).result()
    assert refused.value.code == code


def test_interpreted_bfloat16_is_refused(interpreter: Any) -> None:
    """It would be wrong without a word."""
    assert interpreter.submit(call_reason, "float32", "float16").result() is None
    assert "computes bfloat16 wrongly" in interpreter.submit(call_reason, "float32", "bfloat16").result()


def test_a_host_without_interpreter_is_refused() -> None:
    tensors = {name: torch.from_numpy(value) for name, value in CASE.tensors.items()}
    assert "need a CUDA device" in str(unsupported_reason(*tensors.values()))
    with pytest.raises(ShdError, match="need a CUDA device, or the environment variable TRITON_INTERPRET=1; got cpu"):
        kl_factored(
            **tensors,
            mixing=torch.from_numpy(CASE.mixing),
            row_weights=torch.from_numpy(ONES),
            scale=1.0,
            teacher_scale=1.0,
        )


@pytest.mark.slow
def test_without_triton_the_package_imports_and_a_call_says_what_to_install() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
import shd_torch, shd_torch.kernels
assert "shd_torch.kernels.passes" not in sys.modules
x = torch.zeros(1, 1, 2, 4)
print(shd_torch.kernels.unsupported_reason(x))
try:
    shd_torch.kernels.kl_coded(x, x, torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.zeros(1, 1, 2), scale=1.0)
except shd_torch.ShdError as error:
    print(error.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pip install 'squeezing-heads[triton]'") == 1
    assert done.stdout.splitlines()[-1] == "dependency-missing"
