"""KD from last states and a head equals KD on whole logits, in value, gradients and refusals."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.refusals import refusal
from torch import Tensor

from shd_ref.cache import FinalNorm
from shd_torch import ExactTargets, TeacherHead, kd_loss, linear_kd_loss
from shd_torch.kd import targets

ROWS, WIDTH, OWN, CLASSES = (3, 5), 6, 4, 11
MASK = torch.tensor([[True] * 5, [False, True, True, False, True], [False] * 5])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": 3 * random(CLASSES, seed=1)},
    "scale and cap": {"scale": 0.3, "soft_cap": 2.5},
    "rms norm": {"norm": FinalNorm("rms", 1e-3, False), "norm_weight": random(WIDTH, seed=2)},
    "layer norm": {
        "norm": FinalNorm("layer", 1e-2, True),
        "norm_weight": random(WIDTH, seed=3),
        "norm_bias": random(WIDTH, seed=4),
        "bias": random(CLASSES, seed=5),
        "soft_cap": 4.0,
    },
}


def head_of(kind: str = "plain") -> TeacherHead:
    return TeacherHead(2 * random(CLASSES, WIDTH, seed=6), **HEADS[kind])


def whole_logits(states: Tensor, head: TeacherHead) -> Tensor:
    """By the words of CACHE-190."""
    if head.norm is not None:
        if head.norm.kind == "layer":
            states = states - states.mean(-1, keepdim=True)
        states = states / (states.pow(2).mean(-1, keepdim=True) + head.norm.epsilon).sqrt() * head.norm_weight
        states = states if head.norm_bias is None else states + head.norm_bias
    logits = head.scale * (states @ head.weight.T)
    logits = logits if head.bias is None else logits + head.bias
    return logits if head.soft_cap is None else head.soft_cap * torch.tanh(logits / head.soft_cap)


def pairs_of(loss: Callable[..., Tensor], *arguments: Tensor, **keywords: Any) -> list[Tensor]:
    """A loss and its gradients."""
    roots = [argument.clone().requires_grad_() for argument in arguments]
    value = loss(*roots, **keywords)
    return [value, *torch.autograd.grad(value, roots)]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("divergence", ["kl", "jsd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 2.0, "loss_mask": MASK},
        {"reduction": "batch_mean", "loss_mask": MASK, "check": False, "mixing": 0.1},
    ],
    ids=["plain", "warm", "batch"],
)
def test_exact_targets_are_whole_logits(
    kind: str, divergence: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(targets._ENTRIES, "cpu", 2 * CLASSES)
    states, head = random(*ROWS, WIDTH, seed=7), head_of(kind)
    exact, whole = ExactTargets(states, head), whole_logits(states, head)
    student = random(*ROWS, CLASSES, seed=8)
    parts = random(*ROWS, OWN, seed=9), random(CLASSES, OWN, seed=10), random(CLASSES, seed=11)
    keywords = {"divergence": divergence, **options}
    for loss, arguments in ((kd_loss, (student,)), (linear_kd_loss, parts)):
        actual, reference = (pairs_of(partial(loss, teacher), *arguments, **keywords) for teacher in (exact, whole))
        for value, expected in zip(actual, reference, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_head_is_widened_some_classes_at_a_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    head = replace(head_of("bias"), weight=head_of().weight.to(dtype))
    states = random(7, WIDTH, seed=12)
    wide = replace(head, weight=head.weight.double())
    monkeypatch.setitem(targets._ENTRIES, "cpu", 3 * WIDTH)
    torch.testing.assert_close(head.logits(states), wide.logits(states), rtol=1e-12, atol=1e-12)
    assert head.logits(states.float()).dtype == torch.float32


def test_padding_is_cut_from_both_heads() -> None:
    states, head, size = random(*ROWS, WIDTH, seed=13), head_of(), CLASSES - 2
    bias = torch.zeros(CLASSES, dtype=torch.float64)
    bias[size:] = -1e3
    padded = ExactTargets(states, replace(head, bias=bias))
    student = random(*ROWS, CLASSES, seed=14)
    expected = kd_loss(whole_logits(states, head.cut(size)), student[..., :size])
    assert kd_loss(padded, student, vocab_size=size).item() == pytest.approx(expected.item(), rel=1e-12)
    with refusal("argument-value", "must cut padding alone"):
        kd_loss(ExactTargets(states, head), student, vocab_size=size)
    with refusal("argument-shape", "must have the student's 9 classes"):
        kd_loss(padded, student[..., :size])
    with refusal("argument-shape", "classes; got 11"):
        kd_loss(padded, random(*ROWS, CLASSES + 1, seed=15))


@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd"])
def test_a_students_prefix_of_the_classes(divergence: str) -> None:
    """With a soft cap that leaves the padding nothing, and a temperature."""
    states, size = random(*ROWS, WIDTH, seed=22), CLASSES - 3
    bias = torch.zeros(CLASSES, dtype=torch.float64)
    bias[size:] = -1e4
    head = replace(head_of(), bias=bias, scale=0.7, soft_cap=500.0)
    parts = random(*ROWS, OWN, seed=23), random(CLASSES, OWN, seed=24)
    keywords: dict[str, Any] = {"divergence": divergence, "temperature": 1.5, "loss_mask": MASK}
    actual = pairs_of(partial(linear_kd_loss, ExactTargets(states, head), vocab_size=size, **keywords), *parts)
    hidden, weight = parts
    expected = pairs_of(
        partial(linear_kd_loss, whole_logits(states, head)[..., :size], **keywords), hidden, weight[:size]
    )
    torch.testing.assert_close(actual[:2], expected[:2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual[2][:size], expected[2], rtol=1e-12, atol=1e-12)
    assert not actual[2][size:].any()


def test_what_does_not_fit_is_refused() -> None:
    states, head, student = random(*ROWS, WIDTH, seed=16), head_of(), random(*ROWS, CLASSES, seed=17)
    with refusal("argument-shape", "width of the teacher's head"):
        kd_loss(ExactTargets(states[..., 1:], head), student)
    with refusal("argument-shape", "width of the teacher's head"):
        kd_loss(ExactTargets(states[:2], head), student)
    with refusal("argument-dtype"):
        kd_loss(ExactTargets(states.to(torch.complex64), head), student)
    states[0, 0, 0] = torch.nan
    with refusal("not-finite"):
        kd_loss(ExactTargets(states, head), student)
    with refusal("argument-value", "must be on meta"):
        kd_loss(ExactTargets(states, head), student.to("meta"), check=False)
