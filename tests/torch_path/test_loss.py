"""The loss against the reference: values, every gradient, masks, errors, compilation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.binding.twins import (
    DEVICES,
    DTYPES,
    TWINS,
    Implementation,
    assert_agrees,
    row_mask,
    to_float64,
    to_tensor,
)

import shd_ref
import shd_torch
from shd_ref import ShdError

SHAPES = [(2, 3, 7, 9), (2, 2, 63, 65), (1, 1, 1, 5)]  # (B, H_s, L, S)


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


def counted_rows(supervision: NDArray[Any], mask: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    counted = supervision.astype(np.float64).sum(-1) > 0
    return counted if mask is None else counted & mask[:, None, :]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("masked", [False, True], ids=["all-rows", "masked"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradient_agree(
    shape: tuple[int, ...], masked: bool, temperature: float, reduction: str, dtype: str, device: str
) -> None:
    supervision, logits, attn_mask = loss_case(shape, dtype)
    mask = row_mask(shape[0], shape[2]) if masked else None
    options = {"beta": 1.5, "temperature": temperature, "reduction": reduction}
    expected = shd_ref.shd_loss(supervision, logits, attn_mask=attn_mask, loss_mask=mask, **options)

    teacher = to_tensor(supervision, device).requires_grad_()
    student = to_tensor(logits, device).requires_grad_()
    loss = shd_torch.shd_loss(
        teacher,
        student,
        attn_mask=to_tensor(attn_mask, device),
        loss_mask=None if mask is None else to_tensor(mask, device),
        **options,
    )
    loss.backward()

    assert loss.shape == ()
    assert loss.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert_agrees(loss, np.float64(expected), dtype, "loss")
    # dz = beta (m A_student - A~) / (rows T), with m the mass of the row: one up to rounding
    counted = counted_rows(supervision, mask)
    rows = np.maximum(counted.sum((0, 2)), 1)[None, :, None, None]
    exact = supervision.astype(np.float64)
    gradient = exact.sum(-1, keepdims=True) * shd_ref.softmax(logits, attn_mask, temperature=temperature) - exact
    gradient *= counted[..., None] * 1.5 / (rows * temperature * (shape[1] if reduction == "mean" else 1))
    assert teacher.grad is None
    assert student.grad is not None
    assert student.grad.dtype == student.dtype
    assert_agrees(student.grad, gradient, dtype, "gradient")
    assert (student.grad[~to_tensor(counted, device)] == 0).all()


def test_gradient_agrees_with_finite_differences_of_the_reference() -> None:
    supervision, logits, attn_mask = loss_case((2, 2, 3, 4), "float64")
    student = to_tensor(logits).requires_grad_()
    shd_torch.shd_loss(
        to_tensor(supervision), student, attn_mask=to_tensor(attn_mask), temperature=1.7, beta=2.0
    ).backward()
    assert student.grad is not None
    step = 1e-6
    for place in np.ndindex(logits.shape):
        if np.isneginf(logits[place]):
            assert student.grad[place] == 0
            continue
        losses = []
        for sign in (1, -1):
            moved = logits.copy()
            moved[place] += sign * step
            losses.append(shd_ref.shd_loss(supervision, moved, attn_mask=attn_mask, temperature=1.7, beta=2.0))
        assert float(student.grad[place]) == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=1e-8)


def test_layers_add_up() -> None:
    cases = [loss_case((2, heads, 5, 6), "float64", seed) for seed, heads in enumerate((3, 2))]
    supervision, logits = [c[0] for c in cases], [np.where(np.isinf(c[1]), -30.0, c[1]) for c in cases]
    for reduction in ("sum", "mean"):
        reference, binding = (
            twin.call("shd_loss", supervision, logits, beta=0.5, reduction=reduction) for twin in TWINS
        )
        assert float(binding) == pytest.approx(reference, rel=1e-12)
    single = [float(shd_torch.shd_loss(to_tensor(t), to_tensor(s))) for t, s in zip(supervision, logits, strict=True)]
    assert float(TWINS[1].call("shd_loss", supervision, logits)) == pytest.approx(sum(single), rel=1e-12)


def test_equal_maps_cost_nothing() -> None:
    logits = torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    loss = shd_torch.shd_loss(shd_torch.softmax(logits.detach(), temperature=2.0), logits, temperature=2.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-15)
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-15


@pytest.mark.parametrize("empty", ["loss_mask", "supervision"])
def test_nothing_counted_is_exactly_zero_and_attached(empty: str) -> None:
    supervision, logits, attn_mask = loss_case((2, 3, 5, 6), "float32")
    student = to_tensor(logits).requires_grad_()
    loss = shd_torch.shd_loss(
        to_tensor(supervision * (empty != "supervision")),
        student,
        attn_mask=to_tensor(attn_mask),
        loss_mask=torch.zeros(2, 5, dtype=torch.bool) if empty == "loss_mask" else None,
    )
    assert loss.requires_grad
    assert loss.item() == 0.0
    loss.backward()
    assert student.grad is not None
    assert (student.grad == 0).all()


def test_uncounted_rows_may_hold_anything_without_checks() -> None:
    supervision, logits, _ = loss_case((1, 2, 4, 5), "float32")
    supervision[:] = 0.2
    logits[np.isinf(logits)] = 0.0
    logits[:, :, 1] = np.nan
    logits[:, :, 2] = -np.inf
    supervision[:, :, 3] = np.nan
    mask = torch.tensor([[True, False, False, False]])
    student = to_tensor(logits).requires_grad_()
    loss = shd_torch.shd_loss(to_tensor(supervision), student, loss_mask=mask, check=False)
    loss.backward()
    assert torch.isfinite(loss)
    assert student.grad is not None
    assert (student.grad[:, :, 1:] == 0).all()
    assert (student.grad[:, :, 0] != 0).any()


def test_support_violations_stay_visible_without_checks() -> None:
    supervision = torch.full((1, 1, 1, 4), 0.25)
    logits = torch.tensor([[[[0.0, 0.0, 0.0, -torch.inf]]]])
    assert not torch.isfinite(shd_torch.shd_loss(supervision, logits, check=False))
    assert not torch.isfinite(shd_torch.shd_loss(supervision, torch.full_like(logits, -torch.inf), check=False))


def test_inputs_are_not_written() -> None:
    arrays = [to_tensor(a) for a in loss_case((2, 3, 5, 6), "float32")]
    before = [a.clone() for a in arrays]
    supervision, logits, attn_mask = arrays
    shd_torch.shd_loss(supervision, logits.requires_grad_(), attn_mask=attn_mask).backward()
    assert all(torch.equal(a, b) for a, b in zip(arrays, before, strict=True))


def test_compiles_whole() -> None:
    supervision, logits, attn_mask = (to_tensor(a) for a in loss_case((2, 3, 7, 9), "float32"))
    mask = to_tensor(row_mask(2, 7))

    def loss_of(student: torch.Tensor) -> torch.Tensor:
        return shd_torch.shd_loss(
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own
def test_compiles_whole_with_inductor() -> None:
    supervision, logits, attn_mask = (to_tensor(a) for a in loss_case((2, 3, 7, 9), "float32"))
    compiled = torch.compile(shd_torch.shd_loss, fullgraph=True)
    eager = shd_torch.shd_loss(supervision, logits, attn_mask=attn_mask)
    torch.testing.assert_close(compiled(supervision, logits, attn_mask=attn_mask, check=False), eager)


def bad_losses() -> list[Any]:
    supervision, logits, attn_mask = loss_case((2, 3, 5, 6), "float64")
    logits[np.isinf(logits)] = -30.0
    good = {"supervision": supervision, "student_logits": logits}
    negative, nan, infinite, outside = supervision.copy(), logits.copy(), logits.copy(), logits.copy()
    negative[0, 0, 0, 0] = -0.5
    nan[1, 2, 3, 4] = np.nan
    infinite[1, 2, 3, 4] = np.inf
    outside[0, 1, 2, int(supervision[0, 1, 2].argmax())] = -np.inf
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "shapes": ({"student_logits": logits[:, :2]}, "argument-shape"),
        "three-axes": ({"supervision": supervision[0], "student_logits": logits[0]}, "argument-shape"),
        "layers": ({"supervision": [supervision], "student_logits": [logits, logits]}, "argument-shape"),
        "no-layer": ({"supervision": [], "student_logits": []}, "argument-shape"),
        "nan-logit": ({"student_logits": nan}, "not-finite"),
        "infinite-logit": ({"student_logits": infinite}, "not-finite"),
        "nan-supervision": ({"supervision": supervision * np.nan}, "not-finite"),
        "negative": ({"supervision": negative}, "not-a-distribution"),
        "row-sum": ({"supervision": 0.5 * supervision}, "not-a-distribution"),
        "support-logit": ({"student_logits": outside}, "support-mismatch"),
        "support-mask": ({"attn_mask": ~attn_mask}, "support-mismatch"),
        "empty-row": ({"attn_mask": np.zeros((5, 6), dtype=np.bool_)}, "support-mismatch"),
        "loss-mask-shape": ({"loss_mask": np.ones((2, 6), dtype=np.bool_)}, "argument-shape"),
        "loss-mask-dtype": ({"loss_mask": np.ones((2, 5))}, "argument-dtype"),
        "attn-mask-shape": ({"attn_mask": np.ones((2, 5, 6), dtype=np.bool_)}, "argument-shape"),
        "attn-mask-dtype": ({"attn_mask": np.ones((5, 6))}, "argument-dtype"),
        "beta-negative": ({"beta": -1.0}, "argument-value"),
        "beta-boolean": ({"beta": True}, "argument-value"),
        "beta-infinite": ({"beta": float("inf")}, "argument-value"),
        "temperature": ({"temperature": -1.0}, "argument-value"),
        "reduction": ({"reduction": "none"}, "argument-value"),
    }
    return [pytest.param(good | change, code, id=name) for name, (change, code) in cases.items()]


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@pytest.mark.parametrize(("arguments", "code"), bad_losses())
def test_refuses(twin: Implementation, arguments: dict[str, Any], code: str) -> None:
    with pytest.raises(ShdError) as caught:
        twin.call("shd_loss", **arguments)
    assert caught.value.code == code


def test_support_error_names_where() -> None:
    supervision = torch.full((1, 1, 1, 4), 0.25)
    logits = torch.tensor([[[[0.0, 0.0, 0.0, -torch.inf]]]])
    with pytest.raises(ShdError, match="layer 1, sample 0, head 0, row 0, key 3"):
        shd_torch.shd_loss([supervision, supervision], [torch.zeros_like(logits), logits])


def test_squeeze_then_loss_trains_a_student() -> None:
    """A student that may choose its logits freely reaches the merged maps."""
    teacher = shd_torch.softmax(torch.randn(2, 6, 5, 5, generator=torch.Generator().manual_seed(0)))
    outputs = torch.randn(2, 6, 5, 8, generator=torch.Generator().manual_seed(1))
    supervision = shd_torch.squeeze_heads(teacher, outputs, 2).probs
    student = torch.zeros(2, 2, 5, 5, requires_grad=True)
    optimizer = torch.optim.SGD([student], lr=10.0)
    for _ in range(200):
        optimizer.zero_grad()
        shd_torch.shd_loss(supervision, student).backward()
        optimizer.step()
    np.testing.assert_allclose(to_float64(student.softmax(-1)), to_float64(supervision), atol=1e-3)
