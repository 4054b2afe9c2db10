"""Packages and devices that the kernels cannot do without, and what they say where these are missing."""

import sys

import pytest
import torch
from support.refusals import refusal

from shd_torch import attention_kl
from shd_torch.kernels import divergence, unsupported_reason
from shd_torch.supervision import Factored


def test_interpreted_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be wrong without a word."""
    monkeypatch.setattr(divergence, "is_interpreted", lambda: True)
    x = torch.zeros(1, 1, 2, 4)
    assert unsupported_reason(x, x.half()) is None
    assert "computes bfloat16 wrongly" in str(unsupported_reason(x, x.bfloat16()))


def test_a_host_without_interpreter_is_refused() -> None:
    reason = unsupported_reason(torch.zeros(1, 1, 2, 4))
    assert reason == "the kernels need a CUDA device, or the environment variable TRITON_INTERPRET=1; got cpu"


def test_without_triton_a_call_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the package imports without it, ``test_imports`` shows."""
    monkeypatch.setitem(sys.modules, "triton", None)
    x = torch.zeros(1, 1, 2, 4)
    words = r"serve this call; got 'triton': .*pip install '.\[triton\]' \(in a checkout; Linux only\)"
    with refusal("argument-value", words):
        attention_kl(x, x, Factored(x, x, torch.ones(1, 1, 1)), backend="triton")
