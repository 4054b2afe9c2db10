"""``attention_kl`` by the kernels against the reference, value and gradients by name; when they are taken."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.binding.kernel_cases import Case, assert_value, relative_error
from support.binding.kernel_interpreter import call_loss

from shd_ref.cache import decode, encode, pack
from shd_ref.tolerances import load_tolerances
from shd_torch import attention_kl, explain_backend
from shd_torch.kernels import RowsKl
from shd_torch.kl import backends
from shd_torch.kl.backends import BACKENDS, choose_backend
from shd_torch.kl.request import KlRequest
from shd_torch.supervision import Dense, Factored
from shd_torch.supervision.coded import Coded

Loss = Callable[..., dict[str, Any]]

BETA = 1e-3
CASES = [
    Case("causal, L=63, d=40 and 24, grouped", 63, None, 40, 24, kv_heads=1, teacher_kv_heads=2, is_causal=True),
    Case("L=65, S=70, weights per row, T=2.5", 65, 70, mixes_rows=True, temperature=2.5),
    Case("causal, padded on the left: empty rows", 40, is_causal=True, has_key_mask=True, batch=2),
    Case(
        "groups of 3, 1 and 2, window", 37, groups=((0, 4, 2), (5,), (1, 3)), kv_heads=3, teacher_kv_heads=6, window=9
    ),
    Case("six heads in one", 34, groups=(tuple(range(6)),), kv_heads=1, teacher_kv_heads=3),
    Case("window of 9 both ways, sinks", 45, groups=((0,), (1,)), window=9, teacher_kv_heads=2, has_sinks=True),
    Case("float16, d=80, causal, L=70", 70, width=80, teacher_width=32, is_causal=True, dtype="float16"),
]


@pytest.fixture
def loss(kernel: Any, request: pytest.FixtureRequest) -> Loss:
    """``loss(supervision, arguments)`` on the device of the fixture ``kernel``."""
    if request.node.callspec.params["kernel"] == "cuda":
        return lambda supervision, arguments: call_loss(supervision, arguments, "cuda")
    pool = request.getfixturevalue("interpreter")
    return lambda supervision, arguments: pool.submit(call_loss, supervision, arguments).result(timeout=300)


def factored(case: Case) -> dict[str, Any]:
    return {
        "queries": case.tensors["teacher_q"],
        "keys": case.tensors["teacher_k"],
        "mixing": case.mixing.astype(np.float32),
        "groups": case.groups,
        "row_mass": case.row_mass.astype(np.float32) if case.has_sinks else None,
    }


def arguments(case: Case) -> dict[str, Any]:
    mask = {} if case.key_mask is None else {"attn_mask": case.key_mask[:, None, None]}
    return {
        "student_q": case.tensors["student_q"],
        "student_k": case.tensors["student_k"],
        "is_causal": case.is_causal,
        "window": case.window,
        "temperature": case.temperature,
        "loss_mask": case.loss_mask,
        "beta": BETA,
    } | mask


def assert_agrees(actual: dict[str, Any], expected: tuple[Any, ...], dtype: str) -> None:
    """The loss by its published tolerance, gradients as a whole by the kernels'."""
    value, dq, dk, _ = expected
    assert_value(float(actual["loss"]) / BETA, value, dtype)
    tolerance = load_tolerances()["kernels"]["gradient"][dtype]
    for name, want in (("dq", dq), ("dk", dk)):
        assert relative_error(actual[name] / BETA, want) <= tolerance, name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_factored_supervision(loss: Loss, case: Case) -> None:
    actual = loss(factored(case), arguments(case))
    assert (actual["choice"].name, actual["choice"].reason) == ("triton", "it was asked for")
    assert_agrees(actual, case.expect(case.supervision), case.dtype)


def test_groups_need_not_be_given(loss: Loss) -> None:
    case = CASES[3]
    actual = loss(factored(case) | {"groups": None}, arguments(case))
    assert_agrees(actual, case.expect(case.supervision), case.dtype)


@pytest.mark.parametrize("support", ["full", "causal"])
@pytest.mark.parametrize("codec", ["sqrt8-row", "sqrt8-abs"])
def test_a_batch_of_a_cache(loss: Loss, support: str, codec: str) -> None:
    """Samples of different lengths; padding has no supervision, and does not count."""
    case = Case("coded", 40, is_causal=support == "causal", batch=2, temperature=1.5)
    lengths = (40, 23)
    codes = encode(codec, case.supervision)
    codes[1, :, 23:] = 0
    codes[1, :, :, 23:] = 0
    blobs = [pack(codes[sample, :, :n, :n], support) for sample, n in enumerate(lengths)]
    supervision = {
        "buffer": np.concatenate([np.full(7, 255, np.uint8), *blobs]),
        "starts": (7, 7 + blobs[0].size),
        "lengths": lengths,
        "num_student_heads": 2,
        "codec": codec,
        "support": support,
        "length": 40,
        "temperature": 1.5,
    }
    actual = loss(supervision, arguments(case))
    assert_agrees(actual, case.expect(decode(codec, codes).astype(np.float64)), "float32")


def test_gradients_without_the_value(loss: Loss) -> None:
    case = CASES[0]
    actual = loss(factored(case), arguments(case) | {"value": "surrogate"})
    value, dq, dk, weights = case.expect(case.supervision)
    exact = BETA * float((case.tensors["student_q"] * dq).sum())
    assert_agrees(actual | {"loss": BETA * value}, (value, dq, dk, weights), case.dtype)
    np.testing.assert_allclose(actual["loss"], exact, **load_tolerances()["agreement"]["float32"]["loss"])


def heads(length: int = 8, width: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 2, length, width, dtype=dtype, generator=torch.Generator().manual_seed(length + width))


def teach(q: torch.Tensor, **fields: Any) -> Factored:
    return Factored(q, q, torch.eye(2).expand(2, 2, 2), **fields)


def cross(support: str) -> Coded:
    """Maps with rows and keys of two sequences."""
    buffer = torch.zeros(256, dtype=torch.uint8)
    return Coded(buffer, (0, 128), (8, 8), 2, "sqrt8-row", support, 8, key_lengths=(8, 8), num_keys=8)


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
        (teach(heads()), {"alibi_slopes": torch.ones(2)}, "the student has an added mask or ALiBi"),
        (teach(heads(), attn_mask=torch.zeros(8, 8)), {}, "the teacher has an added mask"),
        (teach(heads()), {"attn_mask": torch.zeros(8, 8, requires_grad=True)}, "the gradient of an added mask"),
        (teach(heads()), {"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, r"of heads or rows \(1, 1, 8, 8\)"),
        (teach(heads(), is_causal=True), {}, "must have one mask"),
        (teach(heads(), is_causal=True, window=3), {"is_causal": True, "window": 4}, "must have one mask"),
        (teach(heads(), attn_mask=KEYS.clone()), {"attn_mask": KEYS}, "must have one mask"),
        (teach(heads(), attn_mask=KEYS), {"attn_mask": KEYS}, None),
        (teach(heads(), is_causal=True, window=3), {"is_causal": True, "window": 3}, None),
    ],
)
def test_what_the_kernels_do_not_read_is_said(
    monkeypatch: pytest.MonkeyPatch, supervision: Any, keywords: dict[str, Any], part: str | None
) -> None:
    """On a device that they do run on, for which any device is taken here."""
    monkeypatch.setattr("shd_torch.kernels.unsupported_reason", lambda *tensors: None)
    (choice,) = explain_backend(heads().requires_grad_(), heads(), supervision, check=False, **keywords)
    reason = choice.refused.get("triton")
    assert reason is None if part is None else re.search(part, str(reason)), reason


@pytest.mark.parametrize("mode", [False, True])
def test_pytorchs_switch_decides_whether_two_passes_run(monkeypatch: pytest.MonkeyPatch, mode: bool) -> None:
    taken = []

    def record(*tensors: torch.Tensor, deterministic: bool, **options: Any) -> RowsKl:
        taken.append(deterministic)
        return RowsKl(tensors[0][..., 0], *tensors[:2])

    monkeypatch.setattr("shd_torch.kernels.unsupported_reason", lambda *tensors: None)
    monkeypatch.setattr("shd_torch.kernels.kl_factored", record)
    torch.use_deterministic_algorithms(mode)
    try:
        attention_kl(heads().requires_grad_(), heads(), teach(heads()), backend="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    assert taken == [mode]


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
        (2048, torch.bfloat16, {(8, 0): 1024}, "sdpa", "512 or more"),
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
    serving = {name: each._replace(unsupported_reason=lambda request: None) for name, each in BACKENDS.items()}
    monkeypatch.setattr(backends, "BACKENDS", serving)
    shape = (1, 2, length, length)
    request = SimpleNamespace(weights=SimpleNamespace(device=torch.device("cuda", 0)), shape=shape)
    request.queries = SimpleNamespace(dtype=dtype)
    choice = choose_backend(cast(KlRequest, request), "auto")
    assert choice.name == chosen
    assert part in choice.reason
