"""Squeezing without maps against the reference that has them, and the gram tensor from fused attention."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.binding.allocations import Live
from support.binding.kl_cases import make_case
from support.binding.twins import assert_agrees, row_mask, to_float64

import shd_ref
from shd_torch import attention_kl
from shd_torch.live import squeeze_factored
from shd_torch.supervision import Factored

STRATEGIES = ["shd", "constant", "hard", "mean"]


def teacher_case(
    heads: int = 7, rows: int = 12, **fields: Any
) -> tuple[Factored, torch.Tensor, torch.Tensor, np.ndarray[Any, Any]]:
    """A teacher, its values (grouped where the heads are even), its projection, and its maps by the reference."""
    rng = np.random.default_rng(3)
    case = make_case(rows, teacher_heads=heads, teacher_masks={"is_causal": True}, sharpness=4.0)
    q, k = torch.from_numpy(case.teacher_queries), torch.from_numpy(case.teacher_keys)
    teacher = Factored.teacher(q, k, is_causal=True, **fields)
    num_kv_heads = heads // 2 if heads % 2 == 0 else heads
    values = torch.from_numpy(rng.standard_normal((2, num_kv_heads, rows, 5)))
    projection = torch.from_numpy(rng.standard_normal((heads * 5, 16)))
    logits = case.teacher_queries @ case.teacher_keys.swapaxes(-1, -2) * case.teacher_queries.shape[3] ** -0.5
    probs = np.asarray(shd_ref.softmax(logits, np.tri(rows, dtype=np.bool_)))
    if teacher.row_mass is not None:
        probs = probs * to_float64(teacher.row_mass)[..., None]
    return teacher, values, projection, probs


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("masked", [False, True], ids=["all-rows", "masked"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_agrees_with_squeeze_heads(strategy: str, masked: bool, dtype: str) -> None:
    for heads, student_heads, plan in (
        (7, 2, "progressive"),
        (6, 4, "balanced"),
        (6, 6, None),
        (6, 1, "progressive"),
        (6, 3, (((0, 5), (2, 3)), ((0, 2),))),
    ):
        teacher, values, projection, probs = teacher_case(heads)
        mask = row_mask(2, 12) if masked else None
        options: dict[str, Any] = {"plan": plan, "strategy": strategy}
        outputs = shd_ref.value_outputs(values.numpy(), projection.numpy())
        expected = shd_ref.squeeze_heads(probs, outputs, student_heads, query_mask=mask, **options)
        real = getattr(torch, dtype)
        narrow = Factored.teacher(teacher.queries.to(real), teacher.keys.to(real), is_causal=True)
        actual = squeeze_factored(
            narrow,
            values.to(real),
            projection.to(real),
            student_heads,
            query_mask=None if mask is None else torch.from_numpy(mask),
            **options,
        )
        assert actual.plan == expected.plan
        assert len(actual.alphas) == len(expected.alphas)
        for got, want in zip(actual.alphas, expected.alphas, strict=True):
            assert got.dtype == real
            if strategy != "hard" or dtype == "float64":
                assert_agrees(got, want, dtype, "alpha")
        if strategy == "hard" and dtype == "float32":
            continue  # near a* = 1/2 the choice may fall either way
        assert actual.mixing.dtype == real
        assert_agrees(actual.mixing, expected.mixing, dtype, "alpha")
        assert_agrees(actual.residual, expected.residual, dtype, "residual")
        if dtype == "float64":
            assert int(actual.num_clipped) == expected.num_clipped
            assert int(actual.num_degenerate) == expected.num_degenerate
            np.testing.assert_allclose(to_float64(actual.supervision.probs()), expected.probs, atol=1e-9)
        warm = shd_ref.squeeze_heads(probs, outputs, student_heads, query_mask=mask, temperature=2.0, **options)
        np.testing.assert_allclose(to_float64(actual.supervision.probs(temperature=2.0)), warm.probs, atol=2e-4)


@pytest.mark.parametrize("strategy", ["shd", "hard"])
@pytest.mark.parametrize("name", ["left-padded", "causal-window", "softcap"])
def test_masked_teachers_with_grouped_keys(name: str, strategy: str) -> None:
    """Keys and values are shared by heads, which read them alike; rows without any key give nothing."""
    rng = np.random.default_rng(7)
    heads, rows = 6, 13
    padding = np.ones((2, 1, 1, rows), dtype=np.bool_)
    padding[1, ..., slice(0, 4) if name == "left-padded" else slice(9, rows)] = False
    masks: dict[str, Any] = {
        "left-padded": {"attn_mask": padding, "is_causal": True},
        "causal-window": {"window": 4, "is_causal": True},
        "softcap": {"softcap": 2.0, "is_causal": True},
    }[name]
    case = make_case(rows, teacher_heads=heads, teacher_key_heads=2, teacher_masks=masks, sharpness=4.0)
    case = replace(case, mixing=np.eye(heads)[None].repeat(2, 0))  # the reference's maps before any mixing
    probs, queries, keys = case.maps(), torch.from_numpy(case.teacher_queries), torch.from_numpy(case.teacher_keys)
    fields = {each: torch.from_numpy(m) if isinstance(m, np.ndarray) else m for each, m in masks.items()}
    teacher = Factored.teacher(queries, keys, **fields)
    values, projection = rng.standard_normal((2, 2, rows, 5)), rng.standard_normal((heads * 5, 16))
    counted = probs.sum(-1).min(1) > 0.5
    assert counted.all() != (name == "left-padded")
    outputs = shd_ref.value_outputs(values, projection)
    options: dict[str, Any] = {"plan": "balanced", "strategy": strategy}
    expected = shd_ref.squeeze_heads(probs, outputs, 4, query_mask=counted, **options)
    actual = squeeze_factored(
        teacher,
        torch.from_numpy(values),
        torch.from_numpy(projection),
        4,
        query_mask=torch.from_numpy(counted),
        **options,
    )
    assert_agrees(actual.residual, expected.residual, "float64", "residual")
    rows_that_count = counted[:, None, :, None]
    got = np.where(rows_that_count, to_float64(actual.supervision.probs()), 0.0)
    assert_agrees(torch.from_numpy(got), np.where(rows_that_count, expected.probs, 0.0), "float64", "probs")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_tensor_is_quadratic_in_the_length(strategy: str) -> None:
    """All that operations hold at once, from the call to the gradient, grows as the length, not its square."""

    def largest(rows: int) -> int:
        generator = torch.Generator().manual_seed(0)
        queries, keys, values = (torch.randn(1, heads, rows, 8, generator=generator) for heads in (4, 2, 2))
        projection = torch.randn(32, 16, generator=generator)
        with Live(queries, keys, values, projection) as made:
            teacher = Factored.teacher(queries, keys, is_causal=True)
            squeezed = squeeze_factored(teacher, values, projection, 2, strategy=strategy)
            student = torch.randn(1, 2, rows, 8, generator=generator).requires_grad_()
            attention_kl(
                student,
                torch.randn(1, 2, rows, 8, generator=generator),
                squeezed.supervision,
                is_causal=True,
                backend="sdpa",
                value="surrogate",
                check=False,
            ).backward()
        return made.most

    assert largest(2048) <= 2 * largest(1024)


def test_printed_rule_and_sinks() -> None:
    mass = torch.rand(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    teacher, values, projection, probs = teacher_case(row_mass=mass)
    outputs = shd_ref.value_outputs(values.numpy(), projection.numpy())
    for rule in ("least_squares", "as_printed"):
        expected = shd_ref.squeeze_heads(probs, outputs, 3, alpha_rule=rule, row_sums="at_most_one")
        actual = squeeze_factored(teacher, values, projection, 3, alpha_rule=rule)
        assert_agrees(actual.mixing, expected.mixing, "float64", "alpha")
        assert_agrees(actual.residual, expected.residual, "float64", "residual")
        np.testing.assert_allclose(to_float64(actual.supervision.mass()), expected.probs.sum(-1), atol=1e-9)
