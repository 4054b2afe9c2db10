"""Divergences, supports and sinks in the loss: values, gradients three ways, what may stand where, compilation."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.binding.twins import DTYPES, assert_agrees, row_mask, to_float64, to_tensor

import shd_ref
import shd_torch.maps as shd
from shd_ref.loss import DIVERGENCES

SHAPE = (2, 3, 5, 7)  # (B, H_s, L, S)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"row_sums": "at_most_one", "temperature": 2.5},
    "intersect": {"support": "intersect", "temperature": 0.7, "reduction": "mean"},
    "both": {"support": "intersect", "row_sums": "at_most_one", "beta": 0.3},
}


def case(variant: str, dtype: str, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any], dict[str, Any]]:
    """Supervision, logits and keywords; some keys masked, a row without mass, a row that does not count.

    The teacher has mass wherever the student may attend, for ``reverse_kl``; with ``intersect`` also elsewhere.
    """
    options, rng = dict(VARIANTS[variant]), np.random.default_rng(seed)
    attn_mask = rng.random((2, 1, 5, 7)) > 0.3
    attn_mask[..., 0] = True
    logits = 2.0 * rng.standard_normal(SHAPE)
    logits[:, 1, :, 3] = -np.inf
    may_attend = attn_mask & ~np.isinf(logits)
    allowed = np.ones_like(may_attend) if "support" in options else may_attend
    probs = shd_ref.softmax(rng.standard_normal(SHAPE), allowed)
    probs[-1, :, 4] = 0.0
    if "row_sums" in options:
        probs *= rng.uniform(0.2, 1.0, (2, 3, 5, 1))
    probs, logits = probs.astype(DTYPES[dtype]), logits.astype(DTYPES[dtype])
    return probs, logits, options | {"attn_mask": attn_mask, "loss_mask": row_mask(2, 5)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_automatic_differentiation_gives_the_closed_form(divergence: str, variant: str, dtype: str) -> None:
    """Which the judge holds to the reference, as it does the values."""
    supervision, logits, options = case(variant, dtype)
    tensors = {k: to_tensor(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    tensors["divergence"] = divergence
    teacher, student = to_tensor(supervision).requires_grad_(), to_tensor(logits).requires_grad_()
    shd.shd_loss(teacher, student, **tensors).backward()
    closed = shd.shd_loss_gradient(teacher, student, **tensors)
    assert teacher.grad is None
    assert student.grad is not None
    assert not closed.requires_grad
    assert_agrees(student.grad, to_float64(closed), dtype, "gradient")
    assert (student.grad[closed == 0] == 0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("empty", ["loss_mask", "supervision", "intersection"])
def test_nothing_counted_is_exactly_zero_and_attached(empty: str, divergence: str) -> None:
    supervision, logits, options = case("plain", "float32")
    student = to_tensor(logits).requires_grad_()
    loss = shd.shd_loss(
        to_tensor(supervision * (empty != "supervision")),
        student,
        attn_mask=torch.zeros(7, dtype=torch.bool) if empty == "intersection" else to_tensor(options["attn_mask"]),
        loss_mask=torch.zeros(2, 5, dtype=torch.bool) if empty == "loss_mask" else None,
        divergence=divergence,
        support="intersect",
    )
    assert loss.requires_grad
    assert loss.item() == 0.0
    loss.backward()
    assert student.grad is not None
    assert (student.grad == 0).all()


@pytest.mark.parametrize("row_sums", ["one", "at_most_one"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_uncounted_rows_may_hold_anything_without_checks(divergence: str, row_sums: str) -> None:
    supervision, logits = torch.full((1, 2, 4, 5), 0.2), torch.randn(1, 2, 4, 5)
    logits[:, :, 1], logits[:, :, 2], supervision[:, :, 3] = torch.nan, -torch.inf, torch.nan
    mask = torch.tensor([[True, False, False, False]])
    student = logits.requires_grad_()
    options: dict[str, Any] = {"loss_mask": mask, "divergence": divergence, "row_sums": row_sums, "check": False}
    loss = shd.shd_loss(supervision, student, **options)
    loss.backward()
    closed = shd.shd_loss_gradient(supervision, student, **options)
    assert torch.isfinite(loss)
    for gradient in (student.grad, closed):
        assert isinstance(gradient, torch.Tensor)
        assert (gradient[:, :, 1:] == 0).all()
        assert (gradient[:, :, 0] != 0).any()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_violations_stay_visible_without_checks(divergence: str) -> None:
    supervision, logits = torch.full((1, 1, 2, 2), 0.5), torch.zeros(1, 1, 2, 2)
    closed = logits.masked_fill(torch.tensor([False, True]), -torch.inf)
    for teacher, student in (
        (supervision, closed),
        (supervision, torch.full_like(logits, -torch.inf)),
        (supervision * torch.nan, logits),
        (supervision, logits * torch.nan),
    ):
        attached = student.clone().requires_grad_()
        loss = shd.shd_loss(teacher, attached, divergence=divergence, check=False)
        assert not torch.isfinite(loss)
        loss.backward()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_logits_of_any_size_are_finite(dtype: str, divergence: str) -> None:
    supervision = np.array([[[[0.5, 0.5], [0.75, 0.25]]]], dtype=dtype)
    largest = float(np.finfo(dtype).max)
    for logits in ([0.0, -2000.0], [largest, -largest], [-largest, -largest], [largest, 0.0]):
        for temperature in (0.5, 1.0, 8.0):
            student = torch.tensor([[[logits, logits]]], dtype=getattr(torch, dtype), requires_grad=True)
            options: dict[str, Any] = {"divergence": divergence, "temperature": temperature}
            loss = shd.shd_loss(to_tensor(supervision), student, **options)
            loss.backward()
            assert torch.isfinite(loss)
            closed = shd.shd_loss_gradient(to_tensor(supervision), student, **options)
            torch.testing.assert_close(student.grad, closed)
            assert torch.isfinite(closed).all()
            assert torch.isfinite(shd.softmax(student, temperature=temperature)).all()


@pytest.mark.parametrize(("divergence", "variant"), [("kl", "intersect"), ("js", "both")])
def test_compiles_whole(divergence: str, variant: str) -> None:
    supervision, logits, options = case(variant, "float32")
    teacher = to_tensor(supervision)
    tensors = {k: to_tensor(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}

    def loss_of(student: torch.Tensor) -> torch.Tensor:
        return shd.shd_loss(teacher, student, divergence=divergence, check=False, **tensors)

    torch.compiler.reset()  # every case compiles the same function: together they would pass its limit
    runs = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        student = to_tensor(logits).requires_grad_()
        loss = function(student)
        loss.backward()
        runs.append((loss.detach(), student.grad))
    torch.testing.assert_close(runs[0], runs[1])


def test_gradients_work_in_inference_mode_and_under_functional_transforms() -> None:
    supervision, logits, _ = case("plain", "float64")
    logits = np.where(np.isinf(logits), -3.0, logits)
    teacher = shd.softmax(to_tensor(supervision) * 0 + to_tensor(logits).flip(-1))
    student = to_tensor(logits)
    with torch.inference_mode():
        closed = shd.shd_loss_gradient(teacher.clone(), student.clone())
    functional = torch.func.grad(lambda z: shd.shd_loss(teacher, z, check=False))(student)
    torch.testing.assert_close(functional, closed)
    leaf = student[:1, :1, :2].clone().requires_grad_()
    for divergence in DIVERGENCES:
        assert torch.autograd.gradgradcheck(
            lambda z, name=divergence: shd.shd_loss(teacher[:1, :1, :2], z, divergence=name), (leaf,)
        )
