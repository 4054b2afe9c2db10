"""The loss from queries and keys: every backend against the float64 reference, value and gradients by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from support.binding.kl_cases import KlCase, make_case
from support.binding.twins import to_float64
from support.refusals import refusal
from torch import Tensor
from torch.autograd import forward_ad

import shd_torch.maps as shd
from shd_ref import ShdError
from shd_ref.conformance import load_tolerances
from shd_torch import attention_kl
from shd_torch.supervision import Coded, Dense, Factored, Supervision

BACKENDS = ("dense", "sdpa")
LossOf: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def padded(batch: int, keys: int, *, left: bool = False) -> np.ndarray[Any, Any]:
    """``(B, 1, 1, S)``: the last sample lacks a third of its keys."""
    mask = np.ones((batch, 1, 1, keys), dtype=np.bool_)
    mask[-1, ..., slice(0, keys // 3) if left else slice(keys - keys // 3, keys)] = False
    return mask


def both(**masks: Any) -> dict[str, Any]:
    return {"masks": masks, "teacher_masks": masks}


def cases() -> list[Any]:
    rng = np.random.default_rng(5)
    loss_mask = rng.random((2, 63)) > 0.4
    biased = rng.standard_normal((1, 1, 63, 63))
    biased[..., rng.random((63, 63)) > 0.8] = -np.inf
    biased[..., 0] = 0.0
    table: dict[str, KlCase] = {
        "L197-S65": make_case(197, 65, student_heads=3, key_heads=3, teacher_heads=6, grouped=True),
        "L65-S197-causal": make_case(65, 197, **both(is_causal=True)),
        "L530-left-padded": make_case(530, **both(is_causal=True, attn_mask=padded(2, 530, left=True))),
        "L300-window": make_case(300, batch=1, **both(window=17)),
        "L300-S40-window-dead-rows": make_case(300, 40, batch=1, **both(window=17)),
        "L300-causal-window": make_case(300, batch=1, **both(is_causal=True, window=40)),
        "left-padded-causal-dead-rows": make_case(300, **both(attn_mask=padded(2, 300, left=True), is_causal=True)),
        "additive": make_case(**both(attn_mask=biased)),
        "student-sees-more": make_case(teacher_masks={"is_causal": True, "window": 11}, masks={"is_causal": True}),
        "six-members": make_case(student_heads=1, teacher_heads=6, teacher_key_heads=2, grouped=True),
        "unequal-groups": make_case(student_heads=3, key_heads=1, teacher_heads=7, grouped=True),
        "every-pair": make_case(student_heads=4, key_heads=2, teacher_heads=6, teacher_key_heads=3),
        "padded-warm": make_case(temperature=2.0, **both(attn_mask=padded(2, 63), is_causal=True)),
        "wider-teacher": make_case(width=16, teacher_width=40),
        "cold": make_case(temperature=0.5, **both(is_causal=True)),
        "sinks-empty-rows": make_case(row_mass=(rng.random((2, 5, 63)) > 0.7) * 0.5, temperature=1.5),
        "loss-mask": make_case(loss_mask=loss_mask),
        "nothing-counts": make_case(loss_mask=np.zeros((2, 63), dtype=np.bool_)),
        "mean": make_case(reduction="mean", beta=0.25),
        "sharp": make_case(sharpness=6.0),
    }
    return [pytest.param(case, id=name) for name, case in table.items()]


def run(case: KlCase, supervision: Any, backend: str, dtype: torch.dtype, **options: Any) -> tuple[Any, ...]:
    """The loss and its gradients for queries and keys."""
    q, k = case.student(dtype)
    loss = attention_kl(q, k, supervision, backend=backend, **case.options() | options)
    assert loss.shape == ()
    loss.backward()
    assert q.grad is not None
    assert k.grad is not None
    assert q.grad.dtype == k.grad.dtype == dtype
    return loss.item(), to_float64(q.grad), to_float64(k.grad)


def assert_close(actual: tuple[Any, ...], expected: tuple[Any, ...], dtype: str) -> None:
    agreement = load_tolerances()["agreement"][dtype]
    for name, got, want in zip(("loss", "dq", "dk"), actual, expected, strict=True):
        tolerance = agreement["loss" if name == "loss" else "gradient"]
        np.testing.assert_allclose(got, want, **tolerance, err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", cases())
def test_agrees_with_the_reference(case: KlCase, backend: str) -> None:
    expected = case.expected()
    factored = case.supervision(torch.float64)
    assert_close(run(case, factored, backend, torch.float64), expected, "float64")
    np.testing.assert_allclose(to_float64(factored.probs(temperature=case.temperature)), case.maps(), atol=1e-13)
    maps = Dense(torch.from_numpy(case.maps()), temperature=case.temperature, row_sums=factored.row_sums)
    assert_close(run(case, maps, backend, torch.float64), expected, "float64")
    assert_close(run(case, case.supervision(torch.float32), backend, torch.float32), expected, "float32")


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "masks",
    [{}, {"is_causal": True}, {"window": 5}, {"is_causal": True, "attn_mask": padded(2, 33)}],
    ids=["open", "causal", "window", "padded-causal"],
)
def test_a_scale_may_be_negative_or_zero(masks: dict[str, Any], backend: str, scale: float) -> None:
    """PyTorch's fused attention masks before it scales: its causal calls give NaN where the scale is not above 0."""
    case = make_case(33, **both(**masks))
    # The same maps and gradients, by the scale that the case's reference has.
    share = scale / case.scale
    teacher = replace(case.supervision(torch.float64), scale=scale)
    turned = replace(case, queries=case.queries * share, teacher_queries=case.teacher_queries * scale * 24**0.5)
    value, dq, dk = turned.expected()
    for supervision in (teacher, Dense(torch.from_numpy(turned.maps()))):
        actual = run(case, supervision, backend, torch.float64, scale=scale)
        assert_close(actual, (value, share * dq, dk), "float64")
    vectors = torch.from_numpy(np.random.default_rng(3).standard_normal((2, 2, 33, 6)))
    np.testing.assert_allclose(teacher.apply_to(vectors), turned.maps() @ vectors.numpy(), atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_divergences_in_half_precision_lose_no_more_than_the_last_rounding(dtype: str, backend: str) -> None:
    half = getattr(torch, dtype)
    case = make_case(student_heads=1, teacher_heads=1, width=24, dtype=dtype, **both(is_causal=True))
    step = np.random.default_rng(1).standard_normal(case.queries.shape)
    moved = torch.from_numpy(case.teacher_queries + 0.1 * step).to(half)
    # Gradients this small are below float16's normal range; a gradient scaler's factor is what beta is here.
    case = replace(case, queries=to_float64(moved), keys=case.teacher_keys, mixing=np.ones((2, 1, 1)), beta=1024.0)
    expected = case.expected()
    assert 2e-4 < expected[0] / 1024 < 5e-3
    _, *gradients = run(case, case.supervision(half), backend, half)
    for got, want in zip(gradients, expected[1:], strict=True):
        assert np.linalg.norm(got - want) < torch.finfo(half).eps / 2 * np.linalg.norm(want)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["factored", "dense", "coded"])
def test_uncounted_rows_may_hold_anything(form: str, backend: str, check: bool) -> None:
    """Of the student, and of the teacher in each form; a row that counts is looked at all the same."""
    case = make_case(loss_mask=np.arange(63)[None, :].repeat(2, 0) < 40)
    factored, maps = case.supervision(torch.float64), torch.from_numpy(case.maps())
    queries, keys = case.student(torch.float64)
    for rows in (factored.queries, maps, queries.detach()):
        rows[:, :, 40:] = torch.nan
    supervision: Supervision = factored if form == "factored" else Dense(maps)
    if form == "coded":
        codes = maps.float().view(torch.uint8)
        supervision = Coded(codes.flatten(), (0, codes[0].numel()), (63, 63), 2, "float32", "full", 63)
    expected = case.expected()
    for value in ("exact", "surrogate"):
        options = case.options() | {"backend": backend, "check": check, "value": value}
        loss = attention_kl(queries, keys, supervision, **options)
        gradients = [to_float64(gradient) for gradient in torch.autograd.grad(loss, (queries, keys))]
        actual = (loss.item() if value == "exact" else expected[0], *gradients)
        assert_close(actual, expected, "float32" if form == "coded" else "float64")
        assert (gradients[0][:, :, 40:] == 0).all()
    for student in (case.student(torch.float64), (queries, keys)):
        taught = supervision if student[0] is not queries else case.supervision(torch.float64)
        with refusal("not-finite"):
            attention_kl(*student, taught, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["factored", "dense"])
def test_autocast_changes_nothing(form: str, backend: str) -> None:
    """Products in bfloat16 would lose a small divergence."""
    case = make_case(**both(is_causal=True))
    supervision = case.supervision(torch.float32) if form == "factored" else torch.from_numpy(case.maps()).float()
    outside = run(case, supervision, backend, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = run(case, supervision, backend, torch.float32)
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == torch.bfloat16
    for one, other in zip(outside, inside, strict=True):
        np.testing.assert_array_equal(one, other)


def penalise(f: LossOf, q: Tensor, k: Tensor) -> Any:
    # The cube has a second derivative: without the refusal it alone would come back.
    (dq,) = torch.autograd.grad(f(q, k) + k.pow(3).sum(), q, create_graph=True)
    return torch.autograd.grad(dq.square().sum(), k)


def backward_of_backward(f: LossOf, q: Tensor, k: Tensor) -> Any:
    f(q, k).backward(create_graph=True)
    assert q.grad is not None
    (q.grad.square().sum() + q.sum()).backward()


def forward_mode(f: LossOf, q: Tensor, k: Tensor) -> Any:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(q.detach(), torch.ones_like(q)), k.detach())


def of_a_mask(f: LossOf, q: Tensor, k: Tensor) -> Any:
    """Twice by a bias, or once in forward mode."""
    teacher = torch.full((2, 2, 5, 5), 0.2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.zeros((5, 5), dtype=q.dtype), torch.ones((5, 5), dtype=q.dtype))
        with pytest.raises(ShdError, match="attention_kl must be differentiated"):
            attention_kl(q.detach(), k.detach(), teacher, attn_mask=dual)
    return penalise(lambda b, _: attention_kl(q.detach(), k.detach(), teacher, attn_mask=b) + b.square(), k.sum(), k)


def functional_gradient(f: LossOf, q: Tensor, k: Tensor) -> Any:
    return torch.func.grad(lambda q: f(q, k.detach()))(q.detach())


OTHER_DERIVATIVES = (penalise, backward_of_backward, of_a_mask, forward_mode, functional_gradient)


@pytest.mark.parametrize(("form", "backend"), [("dense", "dense"), ("factored", "sdpa"), ("surrogate", "sdpa")])
# Forward mode imports a part of torch that torch itself deprecates; create_graph in backward() warns of a cycle.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize("way", OTHER_DERIVATIVES)
def test_derivatives_that_are_not_computed_are_refused_and_never_zero(way: Any, form: str, backend: str) -> None:
    case = make_case(5, width=3)
    supervision = torch.from_numpy(case.maps()) if form == "dense" else case.supervision(torch.float64)
    value = "surrogate" if form == "surrogate" else "exact"
    q, k = case.student(torch.float64)

    def loss_of(q: Tensor, k: Tensor) -> Tensor:
        return attention_kl(q, k, supervision, backend=backend, value=value, check=False)

    with refusal("argument-value", "attention_kl must be differentiated"):
        way(loss_of, q, k)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_second_derivatives_of_a_compiled_loss_are_refused() -> None:
    case = make_case(5, width=3)
    supervision = torch.from_numpy(case.maps())
    compiled = torch.compile(lambda q, k: attention_kl(q, k, supervision, check=False), backend="aot_eager")
    with pytest.raises(RuntimeError, match="double backward"):
        penalise(compiled, *case.student(torch.float64))


def test_softcap_and_its_teacher() -> None:
    capped = make_case(sharpness=9.0, masks={"softcap": 3.0, "is_causal": True}, teacher_masks={"is_causal": True})
    expected = capped.expected()
    assert_close(run(capped, capped.supervision(torch.float64), "dense", torch.float64), expected, "float64")
    teacher = make_case(sharpness=9.0, teacher_masks={"softcap": 3.0})
    for backend in BACKENDS:
        got = run(teacher, teacher.supervision(torch.float64), backend, torch.float64)
        assert_close(got, teacher.expected(), "float64")


@pytest.mark.parametrize("shape", [(1, 1, 9, 9), (2, 9, 9), (2, 1, 1, 9), (9,)], ids=str)
def test_learned_bias_gets_its_gradient(shape: tuple[int, ...]) -> None:
    case = make_case(9, width=4)
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(shape, dtype=torch.float64, generator=generator)
    q, k = case.student(torch.float64)

    supervision = case.supervision(torch.float64)
    if shape == (1, 1, 9, 9):  # a key that is masked in both models
        supervision = replace(supervision, attn_mask=torch.arange(9) != 3)

    def loss_of(mask: torch.Tensor) -> torch.Tensor:
        if shape == (1, 1, 9, 9):
            mask = mask.masked_fill(torch.arange(9) == 3, -torch.inf)
        return attention_kl(q, k, supervision, attn_mask=mask, temperature=2.0)

    assert torch.autograd.gradcheck(loss_of, (bias.requires_grad_(),))
    with pytest.raises(ShdError, match="gradient of an added mask"):
        attention_kl(q, k, case.supervision(torch.float64), attn_mask=bias, backend="sdpa")


# The compiler makes an instance of torch.autograd.Function, which torch itself deprecates.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("value", "backend"), [("exact", "sdpa"), pytest.param("surrogate", "dense", marks=pytest.mark.nightly)]
)
def test_compiles_whole(value: str, backend: str) -> None:
    case = make_case(
        9,
        width=8,
        grouped=True,
        loss_mask=np.arange(18).reshape(2, 9) % 4 != 1,
        **both(is_causal=True, attn_mask=padded(2, 9)),
    )

    def loss_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        supervision = case.supervision(torch.float32)
        taught = [supervision if backend == "sdpa" else supervision.probs(temperature=1.0)]
        return attention_kl([q], [k], taught, backend=backend, value=value, check=False, **options)

    options = case.options()
    results = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        q, k = case.student(torch.float32)
        function(q, k).backward()
        results.append((q.grad, k.grad))
    torch.testing.assert_close(results[0], results[1])


def test_intersect() -> None:
    case = make_case(33, masks={"is_causal": True, "window": 7}, teacher_masks={"is_causal": True})
    q, k = case.student(torch.float64)
    supervision = case.supervision(torch.float64)
    with refusal("support-mismatch"):
        attention_kl(q, k, supervision, **case.options())
    logits = q @ k.mT * case.scale
    allowed = torch.ones(33, 33, dtype=torch.bool).tril() & ~torch.ones(33, 33, dtype=torch.bool).tril(-7)
    options = {"temperature": 1.0, "beta": 1.5, "support": "intersect"}
    expected = shd.shd_loss(supervision.probs(), logits, attn_mask=allowed, **options)
    loss = attention_kl(q, k, supervision, support="intersect", **case.options())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, (q, k)), torch.autograd.grad(expected, (q, k)))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"backend": "eager"}, "argument-value"),
        ({"backend": "sdpa", "softcap": 5.0}, "argument-value"),
        ({"beta": -1.0}, "argument-value"),
        ({"window": 0}, "argument-value"),
        ({"scale": float("nan")}, "argument-value"),
        ({"temperature": 2.0, "supervision": "dense"}, "argument-value"),
        ({"student_k": torch.zeros(2, 3, 9, 40)}, "argument-shape"),
        ({"student_q": torch.full((2, 2, 9, 40), torch.nan)}, "not-finite"),
        ({"attn_mask": torch.ones(3, 9, 9, dtype=torch.bool)}, "argument-shape"),
        ({"attn_mask": torch.ones(9, 9, dtype=torch.int64)}, "argument-dtype"),
        ({"loss_mask": torch.ones(2, 9)}, "argument-dtype"),
        ({"supervision": None}, "argument-dtype"),
        ({"alibi_slopes": torch.ones(2)}, "argument-value"),
        ({"product_dtype": "float16"}, "argument-dtype"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], code: str) -> None:
    case = make_case(9)
    q, k = case.student(torch.float32)
    arguments: dict[str, Any] = {"student_q": q, "student_k": k, "supervision": case.supervision(torch.float32)}
    if changes.get("supervision") == "dense":
        changes = changes | {"supervision": Dense(torch.from_numpy(case.maps()).float(), temperature=1.0)}
    with refusal(code):
        attention_kl(**arguments | changes)


def test_fused_products_in_float16_where_rows_look_at_one_key() -> None:
    """A steady channel through which rows look at the first key: sums of a column that float16 cannot hold, and whose
    difference is thousands of times smaller than they are."""
    generator, length = torch.Generator().manual_seed(0), 1024
    q, k, noise, other = (torch.randn(1, 1, length, 64, generator=generator) for _ in range(4))
    q[..., 0], k, other = 96.0, 0.3 * k, 0.3 * other
    k[..., 0], k[:, :, 0, 0], noise[..., 0], other[..., 0] = 0.0, 1.0, 0.0, 0.0
    student = [each.bfloat16() for each in (q, k)]
    teacher = [each.bfloat16() for each in (q + 0.5 * noise, k + 0.5 * other)]
    limit = load_tolerances()["kernels"]["gradient"]["bfloat16"]

    def gradients(dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
        queries, keys = (each.to(dtype).requires_grad_() for each in student)
        taught = Factored.teacher(*(each.to(dtype) for each in teacher), is_causal=True)
        attention_kl(queries, keys, taught, is_causal=True, value="surrogate", check=False, **options).backward()
        return [each.grad.double() for each in (queries, keys) if each.grad is not None]

    exact = gradients(torch.float64, backend="dense")
    actual = gradients(torch.bfloat16, backend="sdpa", product_dtype=torch.float16)
    for got, want in zip(actual, exact, strict=True):
        assert torch.linalg.vector_norm(got - want) < limit * torch.linalg.vector_norm(want)


@pytest.mark.parametrize("backend", ["dense", "sdpa"])
def test_queries_and_keys_are_taught_without_a_copy_to_the_device(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """``torch.tensor`` makes the host wait for the device, and ends the recording of a CUDA graph."""
    case = make_case()
    q, k = case.student(torch.float32)
    taught = case.supervision(torch.float32)
    assert isinstance(taught, Factored)
    monkeypatch.setattr(torch, "tensor", lambda *arguments, **keywords: pytest.fail("copies"))
    attention_kl(q, k, taught, backend=backend, check=False).backward()
