"""Exponents fitted to the mixture that a student's softmax makes (HEAD-21): both packages, and a real model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shd_ref import softmax
from shd_ref.errors import ShdError
from shd_ref.shrink import exponents
from shd_ref.shrink.merges import HeadMerge as RefMerge
from shd_torch.shrink.exponents import fit_mixing
from shd_torch.shrink.merges import HeadMerge


def draw(seed: int, heads: int, causal: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    maps = softmax(2 * random.normal(size=(3, heads, 6, 6)), np.tri(6, dtype=bool) if causal else None)
    return maps, random.normal(size=(3, heads, 6, 5)), random.random((3, 6)) < 0.7


def error(items: list[Any], group: tuple[int, ...], weights: np.ndarray) -> float:
    """The text of HEAD-21, in loops."""
    total = 0.0
    for maps, outputs, counted in items:
        for sample, row in zip(*np.nonzero(counted), strict=True):
            rows = maps[sample, list(group), row]
            allowed = (rows > 0).all(axis=0)
            mixture = np.where(allowed, np.exp(weights @ np.log(np.where(allowed, rows, 1.0))), 0.0)
            given = mixture / mixture.sum() @ outputs[sample, list(group)].sum(axis=0)
            total += float(((given - np.einsum("ks,ksd->d", rows, outputs[sample, list(group)])) ** 2).sum())
    return total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_both_packages_find_the_minimum(seed: int, causal: bool) -> None:
    groups = ((0, 3), (5, 1, 2), (4,))
    items = [draw(seed, 6, causal), draw(seed + 50, 6, causal)]
    mixing = np.zeros((3, 6))
    for head, group in enumerate(groups):
        mixing[head, list(group)] = 1.0 / len(group)
    wanted = exponents.fit_mixing(items, RefMerge(mixing, groups)).mixing
    found = fit_mixing(
        [[torch.from_numpy(part) for part in item] for item in items], HeadMerge((), groups, torch.from_numpy(mixing))
    ).mixing.numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    for head, group in enumerate(groups[:2]):
        weights, start = wanted[head, list(group)], mixing[head, list(group)]
        assert error(items, group, weights) < error(items, group, start)
        for corner in np.eye(len(group)):
            assert error(items, group, weights) <= error(items, group, weights + 0.02 * (corner - weights)) + 1e-12


@pytest.mark.parametrize("width", [4, 40])
def test_values_in_place_of_value_outputs(width: int) -> None:
    random = np.random.default_rng(1)
    maps, _, counted = (torch.from_numpy(part) for part in draw(3, 4, causal=True))
    values = torch.from_numpy(random.normal(size=(3, 2, 6, 5)))
    projection = torch.from_numpy(random.normal(size=(4, 5, width)))
    outputs = values.repeat_interleave(2, dim=1) @ projection
    merge = HeadMerge((), ((0, 3), (1, 2)), torch.tensor([[0.5, 0, 0, 0.5], [0, 0.5, 0.5, 0]]).double())
    found = fit_mixing([[maps, values, counted]], merge, projection).mixing
    torch.testing.assert_close(found, fit_mixing([[maps, outputs, counted]], merge).mixing, atol=1e-6, rtol=0.0)
    assert float((found - merge.mixing).abs().max()) > 1e-3


def test_equal_maps_stay_where_they_are() -> None:
    maps, outputs, counted = draw(0, 2, causal=False)
    maps[:, 1] = maps[:, 0]
    start = RefMerge(np.array([[0.3, 0.7]]), ((0, 1),))
    np.testing.assert_allclose(exponents.fit_mixing([(maps, outputs, counted)], start).mixing, start.mixing)
    found = fit_mixing(
        [[torch.from_numpy(maps), torch.from_numpy(outputs)]],
        HeadMerge((), ((0, 1),), torch.tensor([[0.3, 0.7]]).double()),
    )
    np.testing.assert_allclose(found.mixing.numpy(), start.mixing, atol=1e-7)


def test_a_student_with_fitted_weights() -> None:
    pytest.importorskip("transformers", reason="students are Hugging Face models: pip install 'squeezing-heads[hf]'")
    from support.shrink.models import make_data, make_teacher

    from shd_torch.shrink import shrink

    teacher, data = make_teacher("llama"), make_data("llama")
    reports = [
        shrink(teacher, data, heads=2, layers=[1], fit_samples=count, batch_size=2).report for count in (0, 3, 99)
    ]
    assert [report["fit_samples"] for report in reports] == [0, 3, 99]
    mixings = [np.array(report["layers"][0]["mixing"]) for report in reports]
    assert all(np.abs(one - other).max() > 1e-4 for one, other in pairwise(mixings))
    for mixing in mixings:
        np.testing.assert_allclose(mixing.sum(axis=-1), 1.0)
    with pytest.raises(ShdError) as refused:
        shrink(teacher, data, heads=2, fit_samples=-1)
    assert refused.value.code == "argument-value"


@pytest.mark.slow
def test_eight_samples_fit_a_real_model(shared_data: Path) -> None:
    """Eight heads to four without training or alignment: 1.371 nats with the alphas, less with fitted exponents."""
    pytest.importorskip("transformers", reason="students are Hugging Face models: pip install 'squeezing-heads[hf]'")
    from support.shrink.stories import load_llama, measure_loss

    from shd_torch.shrink import shrink

    folder = shared_data / "stories260K"
    tokens = torch.from_numpy(np.load(folder / "self_sampled_1024x256_uint16.npy").astype(np.int64))
    teacher = load_llama(folder / "stories260K.bin")
    made = shrink(teacher, {"input_ids": tokens[:64]}, heads=4, fit_samples=8, align=False)
    assert measure_loss(made.student, tokens[-128:, :128]) <= 1.366
