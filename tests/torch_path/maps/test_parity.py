"""What only tensors have: dtypes of results, gradients, unchecked values, compilation. Numbers are the judge's."""

import inspect

import numpy as np
import pytest
import torch
from support.binding.twins import DTYPES, row_mask, teacher_case, to_tensor
from support.pooled import draw_groups

import shd_ref
import shd_torch.maps as shd
from shd_ref import ShdError


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_keep_the_dtype(dtype: str) -> None:
    """Maps stay in theirs (MAP-14), weights and losses of half precision are float32, Gram tensors float64."""
    probs, outputs = (to_tensor(array) for array in teacher_case(2, 6, 7, 9, 8, dtype))
    real, wide = probs.dtype, torch.float64 if dtype == "float64" else torch.float32
    logits = torch.zeros_like(probs[:, :2])
    squeezed = shd.squeeze_heads(probs.requires_grad_(), outputs.requires_grad_(), 2, temperature=2.0)
    assert not squeezed.probs.requires_grad
    assert not squeezed.mixing.requires_grad
    probs, outputs = probs.detach(), outputs.detach()
    assert squeezed.probs.dtype == real
    assert squeezed.mixing.dtype == wide
    for maps in (
        shd.softmax(logits, temperature=1.7),
        shd.soften(probs, 0.3),
        shd.soften(probs, 1.0),
        shd.mix_heads(probs, squeezed.mixing),
        shd.align_tokens(probs, [6, 0], [8, 0, 3]).probs,
        shd.pool_tokens(probs, torch.ones(2, 7, dtype=real)).probs,
        shd.intersect_support(squeezed.probs, logits).supervision,
    ):
        assert maps.dtype == real
    assert shd.gram_tensor(probs, outputs[:, :2], torch.ones(48, 4, dtype=real)).dtype == torch.float64
    student = logits.requires_grad_()
    loss = shd.shd_loss(squeezed.probs, student)
    loss.backward()
    assert (loss.shape, loss.dtype) == ((), wide)
    assert student.grad is not None
    assert student.grad.dtype == real


def test_rows_that_do_not_count_may_hold_anything_without_checks() -> None:
    probs, outputs = teacher_case(2, 4, 5, 6, 3, "float32")
    mask = row_mask(2, 5)
    mask[:, -1] = False
    clean = shd.squeeze_heads(to_tensor(probs), to_tensor(outputs), 2, query_mask=to_tensor(mask))
    probs[:, :, -1] = np.nan
    dirty = shd.squeeze_heads(to_tensor(probs), to_tensor(outputs), 2, query_mask=to_tensor(mask), check=False)
    torch.testing.assert_close(dirty.mixing, clean.mixing)
    torch.testing.assert_close(dirty.residual, clean.residual)


def test_softmax_gradient_is_finite_on_fully_masked_rows() -> None:
    logits = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 1, 4, 5) > 0.4
    mask[0, 0, 1] = False
    shd.softmax(logits, mask).square().sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~mask.expand_as(logits)] == 0).all()


@pytest.mark.parametrize("strategy", ["shd", "constant", "hard", "mean"])
def test_squeeze_heads_compiles_whole(strategy: str) -> None:
    probs, outputs = (to_tensor(a) for a in teacher_case(2, 6, 7, 9, 5, "float32"))

    def merge(maps: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = shd.squeeze_heads(maps, x, 2, strategy=strategy, temperature=2.0, check=False)
        return result.probs, result.residual

    compiled = torch.compile(merge, fullgraph=True, backend="eager")
    for actual, expected in zip(compiled(probs, outputs), merge(probs, outputs), strict=True):
        torch.testing.assert_close(actual, expected)


def test_values_are_named_with_their_place_and_pass_without_checks() -> None:
    probs, outputs = (to_tensor(array) for array in teacher_case(2, 4, 5, 6, 3, "float64"))
    assert shd.squeeze_heads(0.9 * probs, outputs, 2, check=False) is not None
    sunk = torch.full((1, 2), 0.4)
    torch.testing.assert_close(shd.soften(sunk, 2.0, check=False), torch.full((1, 2), 0.5))
    with pytest.raises(ShdError, match="H_t=4"):
        shd.squeeze_heads(probs, outputs[:, :3], 2, check=False)
    probs[1, 2, 0, 3] = torch.nan
    with pytest.raises(ShdError, match="got nan at sample 1, head 2, row 0, key 3"):
        shd.squeeze_heads(probs, outputs, 2)


FUNCTIONS = (
    "align_tokens compose_mixing gram_tensor intersect_support layer_map merge_gram merge_plan mix_heads plan_groups "
    "pool_tokens "
    "shd_loss shd_loss_gradient shd_loss_gradient_qk soften softmax solve_alpha solve_alpha_from_gram squeeze_heads "
    "value_outputs"
)


@pytest.mark.parametrize("function", FUNCTIONS.split())
def test_signatures_are_the_reference_ones_plus_check(function: str) -> None:
    reference = inspect.signature(getattr(shd_ref, function)).parameters
    binding = dict(inspect.signature(getattr(shd, function)).parameters)
    binding.pop("check", None)
    assert [(p.name, p.kind, p.default) for p in binding.values()] == [
        (p.name, p.kind, p.default) for p in reference.values()
    ]


def test_result_fields_are_the_reference_ones() -> None:
    assert set(shd.SqueezeResult.__dataclass_fields__) == set(shd_ref.SqueezeResult.__dataclass_fields__)


def test_pooled_maps_are_the_reference_ones_and_have_a_gradient() -> None:
    """On the 200 groupings that the reference is held to plain loops with, in both precisions."""
    for number in range(200):
        rng = np.random.default_rng(number)
        maps = rng.dirichlet(np.ones(7), size=(2, 2, 5))
        groups, mask = (draw_groups(rng, 5), draw_groups(rng, 7)), rng.random((2, 5)) < 0.9
        right, loose = shd_ref.pool_tokens(maps, *groups, query_mask=mask), shd_ref.tolerances.load_tolerances()
        for dtype, atol in ((torch.float64, 1e-12), (torch.float32, loose["agreement"]["float32"]["probs"]["atol"])):
            tensors = [torch.from_numpy(array).to(dtype) for array in (maps, *groups)]
            got = shd.pool_tokens(*tensors, query_mask=torch.from_numpy(mask), row_sums="at_most_one")
            np.testing.assert_allclose(got.probs.double(), right.probs, rtol=0, atol=atol)
            np.testing.assert_allclose(got.dropped.double(), right.dropped, rtol=0, atol=atol)
    probs = torch.from_numpy(maps).requires_grad_()
    few, several = torch.tensor([0, 0, 1, -1, 1]), torch.from_numpy(draw_groups(rng, 7))
    assert torch.autograd.gradcheck(lambda x: shd.pool_tokens(x, shd.id_groups(few), several, check=False), (probs,))
    ids = shd.id_groups(torch.stack([few, few.flip(0)]), 3)
    np.testing.assert_array_equal(ids, shd_ref.id_groups(np.stack([few, few.flip(0)]), 3))
