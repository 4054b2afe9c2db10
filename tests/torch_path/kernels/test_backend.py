"""When the kernels are taken, and what is said where they are not."""

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.calls import calls_of

from shd_torch import attention_kl, explain_backend
from shd_torch.kl import backends
from shd_torch.kl.backends import BACKENDS, choose_backend
from shd_torch.supervision import Coded, Dense, Factored


def heads(length: int = 8, width: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 2, length, width, dtype=dtype, generator=torch.Generator().manual_seed(length + width))


def teach(q: torch.Tensor, **fields: Any) -> Factored:
    return Factored(q, q, torch.eye(2).expand(2, 2, 2), **fields)


def cross(support: str) -> Coded:
    """Maps with rows and keys of two sequences."""
    buffer = torch.zeros(256, dtype=torch.uint8)
    return Coded(buffer, (0, 128), (8, 8), 2, "sqrt8-row", support, 8, key_lengths=(8, 8), num_keys=8)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that they do run on, for which any device is taken here."""
    monkeypatch.setattr("shd_torch.kernels.unsupported_reason", lambda *tensors: None)


KEYS = torch.ones(2, 1, 1, 8, dtype=torch.bool)


@pytest.mark.parametrize(
    ("supervision", "keywords", "part"),
    [
        (Dense(torch.full((2, 2, 8, 8), 1 / 8)), {}, "and no maps"),
        (Coded(torch.zeros(128, dtype=torch.uint8), (0, 64), (8, 8), 2, "u4", "full", 8), {}, "got u4"),
        (cross("causal"), {}, "triangles of square maps"),
        (cross("full"), {}, None),
        (teach(heads()), {"support": "intersect"}, "needs the maps"),
        (teach(heads()), {"softcap": 3.0}, "the student has a soft cap"),
        (teach(heads(), softcap=3.0), {}, "the teacher has a soft cap"),
        (teach(heads()), {"attn_mask": torch.zeros(8, 8)}, "the student has an added mask"),
        (teach(heads(), attn_mask=torch.zeros(8, 8)), {}, "the teacher has an added mask"),
        (teach(heads()), {"attn_mask": torch.zeros(8, 8, requires_grad=True)}, "the gradient of an added mask"),
        (teach(heads()), {"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, r"of heads or rows \(1, 1, 8, 8\)"),
        (teach(heads(), is_causal=True, window=3), {"is_causal": True, "window": 4}, "must have one mask"),
        (teach(heads(), attn_mask=KEYS.clone()), {"attn_mask": KEYS}, "must have one mask"),
        (teach(heads(), attn_mask=KEYS), {"attn_mask": KEYS}, None),
        (teach(heads(), is_causal=True, window=3), {"is_causal": True, "window": 3}, None),
    ],
)
def test_what_the_kernels_do_not_read_is_said(
    served: None, supervision: Any, keywords: dict[str, Any], part: str | None
) -> None:
    (choice,) = explain_backend(heads().requires_grad_(), heads(), supervision, check=False, **keywords)
    reason = choice.refused.get("triton")
    assert reason is None if part is None else re.search(part, str(reason)), reason


@pytest.mark.parametrize("mode", [False, True])
def test_pytorchs_switch_decides_whether_two_passes_run(served: None, mode: bool) -> None:
    pytest.importorskip("triton", reason="the kernels are Triton's")
    torch.use_deterministic_algorithms(mode)
    try:
        # There is no device after all.
        with calls_of("kl_rows") as calls, pytest.raises(Exception, match=r"(?i)driver|cuda|gpu|interpret|cpu"):
            attention_kl(heads().requires_grad_(), heads(), teach(heads()), backend="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    assert [call["deterministic"] for call in calls] == [mode]


def test_device_dtype_and_head_size_are_said_first() -> None:
    (choice,) = explain_backend(heads(), heads(), teach(heads()))
    assert "need a CUDA device" in choice.refused["triton"]
    (choice,) = explain_backend(heads(8, 264), heads(8, 264), teach(heads()))
    assert "a size of 1 to 128 in float32; got 264" in choice.refused["triton"]
    (choice,) = explain_backend(heads(8, 264, torch.float16), heads(8, 264, torch.float16), teach(heads()))
    assert "a size of 1 to 256 in float16; got 264" in choice.refused["triton"]
    (choice,) = explain_backend(heads(dtype=torch.float64), heads(dtype=torch.float64), teach(heads()))
    assert "float16, bfloat16 or float32; got torch.float64" in choice.refused["triton"]


@pytest.mark.parametrize(
    ("length", "dtype", "lengths", "chosen", "part"),
    [
        (2048, torch.bfloat16, {(9, 0): 1024}, "triton", "measured"),
        (512, torch.bfloat16, {(9, 0): 1024}, "sdpa", "512 or more"),
        (2048, torch.float32, {(9, 0): 1024}, "sdpa", "512 or more"),
        (256, torch.bfloat16, {(9, 0): 0}, "dense", "fewer than 512"),
        (2048, torch.bfloat16, {}, "sdpa", "512 or more"),
    ],
)
def test_auto_takes_the_kernels_where_they_were_measured_to_pay(
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    dtype: torch.dtype,
    lengths: dict[tuple[int, int], int],
    chosen: str,
    part: str,
) -> None:
    monkeypatch.setattr(backends, "TRITON_LENGTHS", lengths)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    serving = {
        name: SimpleNamespace(run=way.run, unsupported_reason=lambda request: None) for name, way in BACKENDS.items()
    }
    monkeypatch.setattr(backends, "BACKENDS", serving)
    shape = (1, 2, length, length)
    request = SimpleNamespace(weights=SimpleNamespace(device=torch.device("cuda", 0)), shape=shape)
    request.queries = SimpleNamespace(dtype=dtype)
    choice = choose_backend(cast(Any, request), "auto")
    assert choice.name == chosen
    assert part in choice.reason
