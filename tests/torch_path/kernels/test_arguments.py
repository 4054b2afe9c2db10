"""Packages and devices that the kernels cannot do without, and what they say where these are missing."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from support.binding.kernel_interpreter import call_reason

from shd_torch.kernels import unsupported_reason


def test_interpreted_bfloat16_is_refused(interpreter: Any) -> None:
    """It would be wrong without a word."""
    assert interpreter.submit(call_reason, "float32", "float16").result() is None
    assert "computes bfloat16 wrongly" in interpreter.submit(call_reason, "float32", "bfloat16").result()


def test_a_host_without_interpreter_is_refused() -> None:
    reason = unsupported_reason(torch.zeros(1, 1, 2, 4))
    assert reason == "the kernels need a CUDA device, or the environment variable TRITON_INTERPRET=1; got cpu"


@pytest.mark.slow
def test_without_triton_the_package_imports_and_a_call_says_what_to_install() -> None:
    code = """
import sys
sys.modules["triton"] = None
import pytest
import torch
import shd_torch, shd_torch.kernels
assert "shd_torch.kernels.passes" not in sys.modules
x = torch.zeros(1, 1, 2, 4)
try:
    shd_torch.attention_kl(x, x, torch.full((1, 1, 2, 2), 0.5), backend="triton")
except shd_torch.ShdError as error:
    print(error.code, error)
print(shd_torch.kernels.unsupported_reason(x))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("argument-value backend must be one that can serve this call; got 'triton'")
    assert done.stdout.count("pip install '.[triton]' (in a checkout; Linux only)") == 1
