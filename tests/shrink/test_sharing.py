"""Key and value heads are turned without any change, and merge without any where they are turns of one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.closed_forms import attend

from shd_ref.shrink.heads import HeadMerge, HeadWeights
from shd_ref.shrink.sharing import (
    Group,
    SeenGroup,
    find_rotations,
    fit_keys,
    fit_values,
    group_heads,
    rotate_heads,
    share_heads,
)

RANDOM = np.random.default_rng(3)
WIDTH, HEADS, LENGTH = 10, 8, 7
ROTATIONS = {"none": None, "partial": np.array([0.9, 0.02]), "whole": np.array([1.0, 0.3, 0.01])}
"""Frequencies of the rotated pairs of a head of 6."""


def make_weights(kv_heads: int, *, biased: bool) -> HeadWeights:
    shapes = {"query": (HEADS, WIDTH, 6), "key": (kv_heads, WIDTH, 6), "value": (kv_heads, WIDTH, 6)}
    made: dict[str, Any] = {name: RANDOM.normal(size=shape) for name, shape in shapes.items()}
    if biased:
        made |= {f"{name}_bias": RANDOM.normal(size=(shape[0], 6)) for name, shape in shapes.items()}
    return HeadWeights(**made, output=RANDOM.normal(size=(HEADS, 6, WIDTH)))


def groups_of(weights: HeadWeights, kv_heads: int) -> list[Group]:
    merge = HeadMerge(np.eye(HEADS), tuple((head,) for head in range(HEADS)))
    return group_heads(weights, merge, kv_heads)


def random_turn(pairs: int, entries: int) -> NDArray[np.float64]:
    """A turn that commutes with rotary positions."""
    turn = np.zeros((6, 6))
    for i, angle in enumerate(RANDOM.uniform(-3, 3, pairs)):
        j = i + pairs
        turn[i, i] = turn[j, j] = np.cos(angle)
        turn[i, j], turn[j, i] = np.sin(angle), -np.sin(angle)
    turn[2 * pairs :, 2 * pairs :] = np.linalg.qr(RANDOM.normal(size=(entries, entries)))[0]
    return turn


def look(group: Group, size: int) -> SeenGroup:
    forms = RANDOM.normal(size=(len(group.heads), 40, len(group.members) * size))
    moments = forms.swapaxes(1, 2) @ forms
    return SeenGroup(moments, moments)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize(("kv_heads", "after", "biased"), [(8, 2, True), (4, 4, False)])
def test_turned_heads_are_the_same_attention(kv_heads: int, after: int, rotation: str, *, biased: bool) -> None:
    weights, frequencies = make_weights(kv_heads, biased=biased), ROTATIONS[rotation]
    x, groups = RANDOM.normal(size=(2, LENGTH, WIDTH)), groups_of(weights, after)
    rows = np.concatenate([x, np.ones((2, LENGTH, 1))], axis=2).reshape(-1, WIDTH + 1)
    pairs = 0 if frequencies is None else len(frequencies)
    turned = rotate_heads(weights, groups, find_rotations(weights, groups, rows.T @ rows, pairs))
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    exact = attend(x, weights, None, causal, frequencies)
    np.testing.assert_allclose(attend(x, turned, None, causal, frequencies), exact, rtol=0, atol=1e-12)

    def apart(heads: HeadWeights) -> float:
        bias = 0.0 if heads.key_bias is None else heads.key_bias[:, None]
        keys = (x.reshape(-1, WIDTH) @ heads.key + bias).reshape(after, kv_heads // after, -1)
        return float(np.square(keys - keys.mean(axis=1, keepdims=True)).sum())

    assert apart(turned) <= apart(weights) * (0.9 if after < kv_heads else 1.0)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize(("kv_heads", "after", "biased"), [(4, 2, False), (8, 1, True)])
@pytest.mark.parametrize("turns", [False, True])
def test_turns_of_one_head_merge_without_error(
    kv_heads: int, after: int, rotation: str, *, turns: bool, biased: bool
) -> None:
    """Also equal ones; what a calibration saw of them changes nothing then."""
    weights, frequencies, per = make_weights(kv_heads, biased=biased), ROTATIONS[rotation], kv_heads // after
    pairs = 0 if frequencies is None else len(frequencies)
    spread: dict[str, Any] = {}
    for name, positions in (("key", pairs), ("value", 0)):
        matrices = [random_turn(positions, 6 - 2 * positions) if turns else np.eye(6) for _ in range(kv_heads)]
        for field in (name, f"{name}_bias"):
            heads = getattr(weights, field)
            if heads is not None:
                spread[field] = np.stack([heads[at // per * per] @ turn for at, turn in enumerate(matrices)])
    weights, x = replace(weights, **spread), RANDOM.normal(size=(2, LENGTH, WIDTH))
    groups, rows = groups_of(weights, after), np.concatenate([x, np.ones((2, LENGTH, 1))], axis=2)
    moment = rows.reshape(-1, WIDTH + 1).T @ rows.reshape(-1, WIDTH + 1)
    turned = rotate_heads(weights, groups, find_rotations(weights, groups, moment, pairs))
    seen = [look(group, 6) for group in groups]
    shared, exact = share_heads(turned, groups, pairs, seen)
    assert exact
    assert (shared.num_heads, shared.num_kv_heads) == (HEADS, after)
    assert (shared.key_bias is None) != biased
    expected = attend(x, weights, None, None, frequencies)
    np.testing.assert_allclose(attend(x, shared, None, None, frequencies), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("pairs", [0, 2, 3])
def test_what_was_seen_lowers_the_error(pairs: int) -> None:
    """Below the average's, in the measure of the moments; heads whose moment is zero are no matter."""
    homes = (0, 0, 1, 1, 2)
    forms = RANDOM.normal(size=(5, 60, 18)) * np.exp(RANDOM.normal(size=18))
    moments = forms.swapaxes(1, 2) @ forms
    unit = np.r_[np.ones(pairs), np.zeros(pairs), np.ones(6 - 2 * pairs)]

    def error(weigh: NDArray[np.float64], scale: NDArray[np.float64]) -> float:
        def numbers(factor: NDArray[np.float64]) -> Any:
            return np.r_[factor[:pairs] + 1j * factor[pairs : 2 * pairs], factor[2 * pairs :]]

        total = 0.0
        for moment, home, c in zip(moments, homes, scale, strict=True):
            product = np.array([numbers(c).conj() * numbers(a) for a in weigh])
            product[home] -= 1.0
            away = np.concatenate([np.r_[b[:pairs].real, b[:pairs].imag, b[pairs:].real] for b in product])
            total += float(away @ moment @ away)
        return total

    def numbers_of(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.r_[
            matrix[:pairs, :pairs].diagonal(),
            matrix[:pairs, pairs:].diagonal()[:pairs],
            matrix.diagonal()[2 * pairs :],
        ]

    keys, queries = fit_keys(moments, homes, 3, pairs)
    weigh, scale = (np.array([numbers_of(m) for m in parts]) for parts in (keys.reshape(3, 6, 6), queries))
    assert error(weigh, scale) < 0.9 * error(np.tile(unit / 3, (3, 1)), np.tile(unit, (5, 1)))

    mix, outputs = np.tile(np.eye(6) / 3, (3, 1)), RANDOM.normal(size=(5, 6, WIDTH))
    goals = np.zeros((5, 18, WIDTH))
    for goal, home, output in zip(goals, homes, outputs, strict=True):
        goal[home * 6 : home * 6 + 6] = output

    def gap(mix: NDArray[np.float64], outputs: NDArray[np.float64]) -> float:
        away = goals - mix @ outputs
        return float((away * (moments @ away)).sum())

    assert gap(*fit_values(moments, homes, mix, outputs)) < 0.9 * gap(mix, outputs)
