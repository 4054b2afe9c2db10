"""The loss on tensors: compiled, inductor included, places named in errors, and a student that learns by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.binding.twins import (
    DTYPES,
    row_mask,
    to_float64,
    to_tensor,
)

import shd_ref
import shd_torch.maps as shd
from shd_ref import ShdError


def loss_case(
    shape: tuple[int, ...], dtype: str, seed: int = 0
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
    """Supervision, student logits (some -inf) and an attention mask that share one support; one row is empty."""
    rng = np.random.default_rng(seed)
    attn_mask = rng.random((shape[0], 1, *shape[2:])) > 0.3
    attn_mask[..., 0] = True
    if shape[2] > 1:
        attn_mask[-1, 0, shape[2] - 1] = False
    supervision = shd_ref.softmax(2.0 * rng.standard_normal(shape), attn_mask).astype(DTYPES[dtype])
    logits = (2.0 * rng.standard_normal(shape)).astype(DTYPES[dtype])
    logits[0, 0, 0, (supervision[0, 0, 0] == 0)] = -np.inf
    return supervision, logits, attn_mask


def test_equal_maps_cost_nothing() -> None:
    logits = torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    loss = shd.shd_loss(shd.softmax(logits.detach(), temperature=2.0), logits, temperature=2.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-15)
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-15


def test_layers_compile_whole() -> None:
    supervision, logits, attn_mask = (to_tensor(a) for a in loss_case((2, 3, 7, 9), "float32"))
    mask = to_tensor(row_mask(2, 7))

    def loss_of(student: torch.Tensor) -> torch.Tensor:
        return shd.shd_loss(
            [supervision, supervision],
            [student, 2 * student],
            attn_mask=attn_mask,
            loss_mask=mask,
            temperature=2.0,
            check=False,
        )

    grads = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        student = logits.clone().requires_grad_()
        function(student).backward()
        grads.append(student.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_support_error_names_where() -> None:
    supervision = torch.full((1, 1, 1, 4), 0.25)
    logits = torch.tensor([[[[0.0, 0.0, 0.0, -torch.inf]]]])
    with pytest.raises(ShdError, match="layer 1, sample 0, head 0, row 0, key 3"):
        shd.shd_loss([supervision, supervision], [torch.zeros_like(logits), logits])


def test_squeeze_then_loss_trains_a_student() -> None:
    """A student that may choose its logits freely reaches the merged maps."""
    teacher = shd.softmax(torch.randn(2, 6, 5, 5, generator=torch.Generator().manual_seed(0)))
    outputs = torch.randn(2, 6, 5, 8, generator=torch.Generator().manual_seed(1))
    supervision = shd.squeeze_heads(teacher, outputs, 2).probs
    student = torch.zeros(2, 2, 5, 5, requires_grad=True)
    optimizer = torch.optim.SGD([student], lr=10.0)
    for _ in range(200):
        optimizer.zero_grad()
        shd.shd_loss(supervision, student).backward()
        optimizer.step()
    np.testing.assert_allclose(to_float64(student.softmax(-1)), to_float64(supervision), atol=1e-3)
