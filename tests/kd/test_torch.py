"""The losses on logits and hidden states beyond the goldens: precision, memory, compilation, other derivatives."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the PyTorch binding needs torch")

from support.binding.allocations import Live  # noqa: E402
from support.refusals import refusal  # noqa: E402
from torch import Tensor  # noqa: E402

import shd_torch.kd  # noqa: E402
from shd_ref import ShdError  # noqa: E402
from shd_ref.conformance import load_tolerances  # noqa: E402

RNG = np.random.default_rng(11)
V = 13
TEACHER, STUDENT = 3 * RNG.standard_normal((2, 5, V)), 2 * RNG.standard_normal((2, 5, V))
HIDDEN, WEIGHT, BIAS = RNG.standard_normal((2, 5, 4)), RNG.standard_normal((V, 4)), RNG.standard_normal(V)
MASK = RNG.random((2, 5)) < 0.6


def tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))


def test_no_cosine_rounds_above_one() -> None:
    """Half of these rows would be at a distance of about -1e-16 from themselves."""
    for row in np.random.default_rng(0).standard_normal((100, 1, 24)):
        student = tensor(row).requires_grad_()
        loss = shd_torch.kd.hidden_loss(student, tensor(row * 3.0), distance="cosine")
        loss.backward()
        assert loss.item() >= 0.0
        assert student.grad.abs().max() < 1e-15


def test_garbage_in_rows_that_do_not_count_goes_nowhere() -> None:
    """With ``check=False`` even what is not finite there has a gradient of exactly 0."""
    bad = tensor(STUDENT)
    bad[~tensor(MASK)] = torch.nan
    bad.requires_grad_()
    for loss in (
        shd_torch.kd.kd_loss(tensor(TEACHER), bad, loss_mask=tensor(MASK), check=False),
        shd_torch.kd.hidden_loss(bad, tensor(TEACHER), distance="cosine", loss_mask=tensor(MASK), check=False),
    ):
        bad.grad = None
        loss.backward()
        assert loss.isfinite()
        assert (bad.grad[~tensor(MASK)] == 0).all()
        assert bad.grad.isfinite().all()


def test_second_derivatives_are_refused() -> None:
    z = tensor(STUDENT).requires_grad_()
    (gradient,) = torch.autograd.grad(shd_torch.kd.kd_loss(tensor(TEACHER), z), z, create_graph=True)
    with pytest.raises(ShdError, match="kd_loss"):
        gradient.square().sum().backward()
    arguments = [tensor(array).requires_grad_() for array in (HIDDEN, WEIGHT)]
    loss = shd_torch.kd.linear_kd_loss(tensor(TEACHER), *arguments)
    (gradient, _) = torch.autograd.grad(loss, arguments, create_graph=True)
    with pytest.raises(ShdError, match="linear_kd_loss"):
        gradient.square().sum().backward()
    for call in (
        lambda x: shd_torch.kd.kd_loss(tensor(TEACHER), x),
        lambda x: shd_torch.kd.linear_kd_loss(tensor(TEACHER), x @ tensor(WEIGHT), tensor(WEIGHT)),
    ):
        with pytest.raises(ShdError, match="kd_loss must be differentiated in reverse mode"):
            torch.func.grad(call)(tensor(STUDENT))


@pytest.mark.parametrize("kept", [None, 4])
def test_half_precision_is_for_storage(kept: int | None) -> None:
    """bfloat16 logits and heads give the loss of those numbers; sums and softmax are in float32."""
    targets: Any = tensor(TEACHER)
    if kept is not None:
        targets = shd_torch.kd.kd_targets_topk(targets, kept)
        targets = targets._replace(ids=targets.ids.to(torch.uint16))  # as caches hold those of small vocabularies
    z = tensor(STUDENT).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = shd_torch.kd.kd_loss(targets, z)
    loss.backward()
    assert loss.dtype == torch.float32
    assert z.grad.dtype == torch.bfloat16
    exact = z.detach().double().requires_grad_()
    expected = shd_torch.kd.kd_loss(targets, exact)
    expected.backward()
    limits = load_tolerances()["agreement"]
    assert loss.item() == pytest.approx(expected.item(), rel=limits["float32"]["loss"]["rtol"])
    bound = limits["bfloat16"]["gradient"]
    torch.testing.assert_close(z.grad.double(), exact.grad, atol=bound["atol"], rtol=bound["rtol"])

    hidden, weight = (tensor(array).float().requires_grad_() for array in (HIDDEN, WEIGHT))
    with torch.autocast("cpu", torch.bfloat16):
        fused = shd_torch.kd.linear_kd_loss(targets, hidden, weight)
        parts = shd_torch.kd.kd_loss(targets, torch.nn.functional.linear(hidden, weight))
    assert fused.item() == pytest.approx(parts.item(), rel=limits["float32"]["loss"]["rtol"])
    fused.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", ["logits", "topk", "exact"])
@pytest.mark.parametrize("masked", [False, True])
def test_no_wide_copy_of_the_logits_is_made(kind: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width, size, chunk = 512, 8, 1000, 4
    some = 16 * 8 * chunk * size  # a few chunks of float64
    shape = (2, rows // 2)
    kd, teacher = shd_torch.kd, torch.randn(*shape, size, dtype=torch.bfloat16)
    assert some < teacher.nbytes / 1.9
    monkeypatch.setitem(shd_torch.kd.targets._ENTRIES, "cpu", chunk * size)
    keywords: dict[str, Any] = {"temperature": 2.0, "check": False}
    if masked:
        keywords["loss_mask"] = torch.rand(shape) < 0.9
    targets: Any = teacher
    before: list[Tensor] = [teacher]
    if kind == "topk":
        with Live(teacher) as making:
            targets = kd.kd_targets_topk(teacher, 8, temperature=2.0, check=False)
        assert making.most < some
        before += targets[:3]
    elif kind == "exact":
        before += [torch.randn(*shape, width), torch.randn(size, width)]
        targets = kd.ExactTargets(before[1], kd.TeacherHead(before[2]))
    z = torch.randn(*shape, size, dtype=torch.bfloat16, requires_grad=True)
    with Live(z, *before) as dense:
        kd.kd_loss(targets, z, **keywords).backward()
    assert z.nbytes <= dense.most < z.nbytes + some  # the gradient itself, in the logits' dtype
    hidden, weight = torch.randn(*shape, width, requires_grad=True), torch.randn(size, width, requires_grad=True)
    with Live(hidden, weight, *before) as fused:
        kd.linear_kd_loss(targets, hidden, weight, **keywords).backward()
    assert fused.most < some


@pytest.mark.parametrize("targets", [None, object(), {"ids": 1}])
def test_targets_that_are_no_arrays_are_refused(targets: Any) -> None:
    with refusal("argument-value", "targets must be logits, TopkTargets or ExactTargets"):
        shd_torch.kd.kd_loss(targets, torch.zeros(2, 3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("operation", ["linear_kd_loss", "hidden_loss"])
def test_a_step_compiles_whole(operation: str) -> None:
    """Without checks there is nothing that the host must wait for, and one graph holds the loss."""
    arrays = {"linear_kd_loss": (HIDDEN, WEIGHT), "hidden_loss": (STUDENT,)}[operation]
    leaves = [tensor(array).requires_grad_() for array in arrays]
    targets = shd_torch.kd.kd_targets_topk(tensor(TEACHER), 3)

    def loss(*arguments: Tensor) -> Tensor:
        if operation == "hidden_loss":
            return shd_torch.kd.hidden_loss(*arguments, tensor(TEACHER), loss_mask=mask, check=False)
        return shd_torch.kd.linear_kd_loss(targets, *arguments, loss_mask=mask, check=False)

    mask = tensor(MASK)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got, expected = compiled(*leaves), loss(*leaves)
    torch.testing.assert_close(got, expected)
    for one, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(one, other)


def test_a_tail_of_nearly_everything_keeps_its_digits() -> None:
    """A sum over it rounds by more than its logarithm, on any processor."""
    logits = torch.zeros(1, 50_000)
    logits[0, 7] = 0.125
    targets = shd_torch.kd.kd_targets_topk(logits, 1)
    exact = -torch.tensor([0.125], dtype=torch.float64).exp().div(49_999).log1p()
    limit = load_tolerances()["agreement"]["float32"]["loss"]["rtol"]
    torch.testing.assert_close(targets.log_tail.double(), exact, rtol=limit, atol=0)
