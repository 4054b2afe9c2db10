"""The binding against the reference: sinks, composition, gram tensors, tokens, supports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.binding.twins import (
    DTYPES,
    TWINS,
    Implementation,
    assert_agrees,
    row_mask,
    teacher_case,
    to_float64,
    to_tensor,
)

import shd_ref
import shd_torch
from shd_ref import ShdError


def sink_case(dtype: str, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    """Maps whose rows lose a different mass each, one row all of it, and value outputs."""
    probs, outputs = teacher_case(2, 6, 7, 9, 8, dtype, seed)
    mass = np.random.default_rng(seed + 1).uniform(0.1, 1.0, (2, 6, 7, 1))
    mass[0, :, 2] = 0.0
    return (probs.astype(np.float64) * mass).astype(DTYPES[dtype]), outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha_per", ["map", "row"])
@pytest.mark.parametrize("strategy", ["shd", "constant", "hard", "mean", "simplex"])
def test_sinks_squeeze_as_in_the_reference(strategy: str, alpha_per: str, dtype: str) -> None:
    probs, outputs = sink_case(dtype)
    for options in ({}, {"temperature": 2.5}, {"temperature": 0.5, "alpha_from": "softened"}):
        options = {"strategy": strategy, "alpha_per": alpha_per, "row_sums": "at_most_one", **options}
        expected, actual = (
            twin.call("squeeze_heads", probs, outputs, 4, query_mask=row_mask(2, 7), **options) for twin in TWINS
        )
        assert_agrees(actual.mixing, expected.mixing, dtype, "alpha")
        assert_agrees(actual.probs, expected.probs, dtype, "probs")
        assert_agrees(actual.residual, expected.residual, dtype, "residual")
        assert int(actual.num_degenerate) == expected.num_degenerate


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_keep_their_mass(dtype: str) -> None:
    probs, outputs = sink_case(dtype)
    for temperature in (0.25, 1.0, 3.0):
        expected, actual = (twin.call("soften", probs, temperature, row_sums="at_most_one") for twin in TWINS)
        assert_agrees(actual, expected, dtype, "probs")
        assert_agrees(actual.double().sum(-1), probs.astype(np.float64).sum(-1), dtype, "probs")
    alphas = [
        twin.call("solve_alpha", probs[:, 0], probs[:, 1], outputs[:, 0], outputs[:, 1], row_sums="at_most_one")
        for twin in TWINS
    ]
    assert_agrees(alphas[1], alphas[0], dtype, "alpha")


@pytest.mark.parametrize("alpha_per", ["map", "row"])
@pytest.mark.parametrize("heads", [2, 5, 9])
def test_composition_is_that_of_the_squeeze(heads: int, alpha_per: str) -> None:
    probs, outputs = teacher_case(2, heads, 5, 6, 4, "float64")
    result = shd_torch.squeeze_heads(to_tensor(probs), to_tensor(outputs), 1, alpha_per=alpha_per)
    composed = shd_torch.compose_mixing(list(result.alphas), result.plan, heads)
    torch.testing.assert_close(composed, result.mixing, rtol=0, atol=0)
    alphas = [to_float64(alpha) for alpha in result.alphas]
    np.testing.assert_allclose(
        to_float64(composed), shd_ref.compose_mixing(alphas, result.plan, heads), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize(
    ("alphas", "plan", "code"),
    [
        ([np.full((2, 1), 0.5)], [[(0, 3)]], "plan-invalid"),
        ([np.full((2, 2), 0.5)], [[(0, 1)]], "argument-shape"),
        ([np.full(2, 0.5)], [[(0, 1)]], "argument-shape"),
        ([np.full((2, 1), 0.5), np.full((3, 1), 0.5)], [[(0, 1)], [(0, 1)]], "argument-shape"),
        ([], [[(0, 1)]], "argument-shape"),
        ([], [], "argument-shape"),
        ([np.full((2, 1), np.nan)], [[(0, 1)]], "not-finite"),
    ],
)
def test_composition_refuses(alphas: list[Any], plan: Any, code: str) -> None:
    with pytest.raises(ShdError) as caught:
        TWINS[1].call("compose_mixing", alphas, plan, 3)
    assert caught.value.code == code


def gram_case(dtype: str, num_kv_heads: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(2)
    values, projection = rng.standard_normal((2, num_kv_heads, 9, 3)), rng.standard_normal((4 * 3, 10))
    probs, _ = teacher_case(2, 4, 7, 9, 5, dtype)
    return probs, values.astype(DTYPES[dtype]), projection.astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha_per", ["map", "row"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_gram_agrees_and_gives_the_alphas(num_kv_heads: int, alpha_per: str, dtype: str) -> None:
    arrays = gram_case(dtype, num_kv_heads)
    mask = row_mask(2, 7)
    reference, binding = (twin.call("gram_tensor", *arrays, query_mask=mask, alpha_per=alpha_per) for twin in TWINS)
    assert binding.dtype == torch.float64
    np.testing.assert_allclose(to_float64(binding), reference, rtol=1e-10, atol=1e-12 * np.abs(reference).max())
    squeezed = shd_torch.squeeze_heads(
        to_tensor(arrays[0]).double(),
        to_tensor(shd_ref.value_outputs(arrays[1], arrays[2])),
        1,
        query_mask=to_tensor(mask),
        alpha_per=alpha_per,
        check=False,  # half-precision rows do not sum to one as closely as float64 ones must
    )
    first, second = squeezed.alphas  # of the pairs (0, 1) and (2, 3), and of what they gave
    for p, q, wanted in ((2, 3, first[:, 1]), (1, 2, first[:, 0]), (1, 0, 1 - second[:, 0])):
        alphas = [shd_ref.solve_alpha_from_gram(reference, p, q), shd_torch.solve_alpha_from_gram(binding, p, q)]
        np.testing.assert_allclose(to_float64(alphas[1]), alphas[0], atol=1e-9)
        torch.testing.assert_close(alphas[1], wanted, rtol=0, atol=1e-9)
        reference = shd_ref.merge_gram(reference, p, q, alphas[0])
        binding = shd_torch.merge_gram(binding, p, q, alphas[1])
        np.testing.assert_allclose(to_float64(binding), reference, rtol=1e-9, atol=1e-9 * np.abs(reference).max())
    assert tuple(binding.shape[:5]) == (2, 1, 1, 1, 1)


ROW_LISTS = [(None, None), ([1, 2], [8, 0, 3]), (None, [0, 1, 2, 3, 4, 5, 6, 7, 8]), ([6, 0], None), ([3], [1])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), ROW_LISTS)
@pytest.mark.parametrize("row_sums", ["one", "at_most_one"])
def test_tokens_align_as_in_the_reference(row_sums: str, rows: Any, columns: Any, dtype: str) -> None:
    probs = sink_case(dtype)[0] if row_sums == "at_most_one" else teacher_case(2, 6, 7, 9, 8, dtype)[0]
    probs[0, 0, 1], probs[0, 0, 1, 2] = 0.0, 1.0  # all its mass is dropped where column 2 is
    expected, actual = (twin.call("align_tokens", probs, rows, columns, row_sums=row_sums) for twin in TWINS)
    assert actual.probs.dtype == to_tensor(probs).dtype
    assert_agrees(actual.probs, expected.probs, dtype, "probs")
    assert_agrees(actual.dropped, expected.dropped, dtype, "probs")
    if columns is None:
        kept = probs if rows is None else probs[:, :, rows]
        assert torch.equal(actual.probs, to_tensor(kept))
        assert float(actual.dropped.abs().max()) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_sums", ["one", "at_most_one"])
def test_supports_intersect_as_in_the_reference(row_sums: str, dtype: str) -> None:
    probs = sink_case(dtype)[0] if row_sums == "at_most_one" else teacher_case(2, 6, 7, 9, 8, dtype)[0]
    rng = np.random.default_rng(5)
    logits, attn_mask = np.where(rng.random(probs.shape) > 0.2, 1.0, -np.inf), rng.random((7, 9)) > 0.3
    attn_mask[1], attn_mask[3] = False, True
    logits[:, :, 3] = 0.0
    expected, actual = (
        twin.call("intersect_support", probs, logits.astype(DTYPES[dtype]), attn_mask=attn_mask, row_sums=row_sums)
        for twin in TWINS
    )
    assert actual.supervision.dtype == to_tensor(probs).dtype
    assert_agrees(actual.supervision, expected.supervision, dtype, "probs")
    assert_agrees(actual.dropped, expected.dropped, dtype, "probs")
    assert (to_float64(actual.supervision)[:, :, 1] == 0).all()
    assert torch.equal(actual.supervision[:, :, 3], to_tensor(probs)[:, :, 3])
    tiny = shd_torch.intersect_support(
        torch.tensor([[[[1e-310, 1.0]]]], dtype=torch.float64), torch.tensor([[[[0.0, -torch.inf]]]])
    )
    assert tiny.supervision.tolist() == [[[[1.0, 0.0]]]]


GRAM = np.ones((1, 2, 2, 2, 2))
HALF = np.full((1, 2, 2, 2), 0.5)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@pytest.mark.parametrize(
    ("function", "args", "options", "code"),
    [
        ("align_tokens", (HALF[0],), {}, "argument-shape"),
        ("align_tokens", (HALF, [-1]), {}, "argument-value"),
        ("align_tokens", (HALF, [2]), {}, "argument-value"),
        ("align_tokens", (HALF, [0, 0]), {}, "argument-value"),
        ("align_tokens", (HALF, None, []), {}, "argument-value"),
        ("align_tokens", (HALF, None, [0.0]), {}, "argument-value"),
        ("align_tokens", (HALF, None, [True]), {}, "argument-value"),
        ("align_tokens", (HALF / 2,), {}, "not-a-distribution"),
        ("align_tokens", (HALF,), {"row_sums": "two"}, "argument-value"),
        ("align_tokens", (HALF,), {"query_mask": np.ones((1, 3), dtype=np.bool_)}, "argument-shape"),
        ("intersect_support", (HALF, HALF[:, :1]), {}, "argument-shape"),
        ("intersect_support", (HALF, HALF * np.nan), {}, "not-finite"),
        ("intersect_support", (HALF / 2, HALF), {}, "not-a-distribution"),
        ("intersect_support", (HALF, HALF), {"attn_mask": np.ones((3, 2), dtype=np.bool_)}, "argument-shape"),
        ("intersect_support", (HALF, HALF), {"loss_mask": np.ones((1, 2))}, "argument-dtype"),
        ("gram_tensor", (HALF, np.ones((1, 1, 2, 3)), np.ones((9, 4))), {}, "argument-shape"),
        ("gram_tensor", (HALF, np.ones((1, 2, 3, 3)), np.ones((6, 4))), {}, "argument-shape"),
        ("gram_tensor", (HALF, np.ones((1, 2, 2, 3)), np.ones((6, 4))), {"alpha_per": "key"}, "argument-value"),
        ("gram_tensor", (HALF / 2, np.ones((1, 2, 2, 3)), np.ones((6, 4))), {}, "not-a-distribution"),
        ("solve_alpha_from_gram", (GRAM, 0, 0), {}, "argument-value"),
        ("solve_alpha_from_gram", (GRAM, 0, -1), {}, "argument-value"),
        ("solve_alpha_from_gram", (GRAM, 2, 0), {}, "argument-value"),
        ("solve_alpha_from_gram", (GRAM[..., 0], 0, 1), {}, "argument-shape"),
        ("solve_alpha_from_gram", (GRAM[:, :1], 0, 1), {}, "argument-shape"),
        ("merge_gram", (GRAM, 0, 1, np.ones(2)), {}, "argument-shape"),
        ("merge_gram", (GRAM, 0, 1, np.ones((1, 1))), {}, "argument-shape"),
        ("merge_gram", (GRAM, 0, 1, np.full(1, np.nan)), {}, "not-finite"),
        ("merge_gram", (GRAM, 1, 1, np.ones(1)), {}, "argument-value"),
    ],
)
def test_operations_refuse(
    twin: Implementation, function: str, args: tuple[Any, ...], options: dict[str, Any], code: str
) -> None:
    with pytest.raises(ShdError) as caught:
        twin.call(function, *args, **options)
    assert caught.value.code == code
