"""The binding's closed forms against the reference's: two computations from one text, compared by products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shd_ref import gram_tensor, merge_plan, softmax
from shd_ref.shrink import align as ref_align
from shd_ref.shrink import width as ref_width
from shd_ref.shrink.ffn import Linear, keep_neurons
from shd_ref.shrink.heads import HeadWeights, Rotary, attend, concatenate_heads, low_rank_heads, mix_queries
from shd_ref.shrink.merges import HeadMerge as RefMerge
from shd_ref.shrink.merges import grouped_plan, pooled_mixing
from shd_torch.shrink.align import OutputFit
from shd_torch.shrink.gates import Ranking
from shd_torch.shrink.heads import SLOW_ANGLE, AttentionStatistics, squeeze_attention
from shd_torch.shrink.layer import most_important
from shd_torch.shrink.merges import HeadMerge, merge_heads
from shd_torch.shrink.weights import AttentionWeights
from shd_torch.shrink.width import principal_axes

WIDTH, DIM, LENGTH = 10, 6, 8
FREQUENCIES = np.array([1.0, 0.3, 0.01])  # the last one is slow
FIELDS = ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias", "output_bias")


def make_weights(heads: int, kv_heads: int, biases: str) -> HeadWeights:
    random = np.random.default_rng(heads)
    shapes = {"query": (heads, WIDTH, DIM), "key": (kv_heads, WIDTH, DIM), "value": (kv_heads, WIDTH, DIM)}
    shapes |= {"output": (heads, DIM, WIDTH), "query_bias": (heads, DIM), "key_bias": (kv_heads, DIM)}
    shapes |= {"value_bias": (kv_heads, DIM), "output_bias": (WIDTH,)}
    return HeadWeights(
        *(
            random.normal(size=shapes[name]) / 3 if not name.endswith("bias") or name[0] in biases else None
            for name in FIELDS
        )  # type: ignore[arg-type]
    )


def to_torch(weights: HeadWeights) -> AttentionWeights:
    parts = [getattr(weights, name) for name in FIELDS]
    return AttentionWeights(*(None if part is None else torch.from_numpy(part) for part in parts))  # type: ignore[arg-type]


def to_numpy(weights: AttentionWeights) -> HeadWeights:
    parts = [getattr(weights, name) for name in FIELDS]
    return HeadWeights(*(None if part is None else part.numpy() for part in parts))  # type: ignore[arg-type]


INPUTS = np.random.default_rng(0).normal(size=(4, LENGTH, WIDTH)) + 0.3


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2).reshape(-1, WIDTH + 1)
    away = (x - x.mean(axis=1, keepdims=True)).reshape(-1, WIDTH)
    return rows.T @ rows / len(rows), away.T @ away / len(rows)


@pytest.mark.parametrize("biases", ["", "qkv", "qkvo"])
@pytest.mark.parametrize(
    ("case", "kv_heads", "groups", "own_kv", "head_dim"),
    [
        ("queries", 2, ((0, 1), (2, 3)), 2, DIM),
        ("side-by-side", 4, ((0, 3), (1,), (2,)), 3, 2 * DIM),
        ("low-rank", 2, ((0, 2), (1, 3)), 1, DIM),
        ("low-rank", 4, ((0, 2), (1, 3)), 2, DIM + 1),
        ("rotary", 2, ((0, 2), (1, 3)), 2, DIM),
        ("rotary", 4, ((0, 1, 2), (3,)), 1, DIM),
    ],
)
def test_squeezed_attention(case: str, kv_heads: int, groups: Any, own_kv: int, head_dim: int, biases: str) -> None:
    teacher = make_weights(4, kv_heads, biases)
    mixing = np.zeros((len(groups), 4))
    for head, group in enumerate(groups):
        mixing[head, list(group)] = np.random.default_rng(head).dirichlet(np.ones(len(group)))
    augmented, centred = moments(INPUTS)
    rotary = Rotary(FREQUENCIES, slow=FREQUENCIES * LENGTH < SLOW_ANGLE) if case in ("rotary", "queries") else None
    found = squeeze_attention(
        to_torch(teacher),
        HeadMerge((), groups, torch.from_numpy(mixing)),
        AttentionStatistics(
            torch.zeros(4, 4, 4, 4), torch.from_numpy(augmented), torch.from_numpy(centred), torch.ones(4), LENGTH
        ),
        own_kv,
        head_dim,
        frequencies=None if rotary is None else torch.from_numpy(FREQUENCIES),
    )
    merge = RefMerge(mixing, groups)
    if case == "queries":
        wanted = mix_queries(teacher, merge)
    elif case == "side-by-side":
        wanted = concatenate_heads(teacher, merge, head_dim)
    else:
        wanted = low_rank_heads(teacher, merge, own_kv, head_dim, augmented, key_moment=centred, rotary=rotary)
    assert (found.case, found.exact) == (case, case in ("queries", "side-by-side"))
    x = np.random.default_rng(5).normal(size=(2, 5, WIDTH))
    np.testing.assert_allclose(
        attend(x, to_numpy(found.weights), rotary=rotary), attend(x, wanted, rotary=rotary), atol=1e-9
    )
    np.testing.assert_allclose(found.weights.key.numpy(), wanted.key, atol=1e-8)  # signs and phases too (HEAD-13)


@pytest.mark.parametrize(("heads", "students", "kv_heads"), [(8, 4, 2), (8, 2, 2), (6, 4, 1), (7, 3, 1), (8, 3, 2)])
@pytest.mark.parametrize("kind", ["matched", "progressive", "balanced"])
def test_merges(kind: str, heads: int, students: int, kv_heads: int) -> None:
    if kind == "matched":
        pytest.importorskip("networkx")
    random = np.random.default_rng(heads + students)
    maps = softmax(2 * random.normal(size=(5, heads, 6, 6)))
    gram = gram_tensor(maps, random.normal(size=(5, heads, 6, 3)), random.normal(size=(heads * 3, 9))).sum(axis=0)
    found = merge_heads(torch.from_numpy(gram), students, kind, kv_heads)
    inside = kv_heads if students % kv_heads == 0 else 1
    plan = grouped_plan(gram, students, inside) if kind == "matched" else merge_plan(heads, students, kind)
    wanted = pooled_mixing(gram, plan)
    assert (found.plan, found.groups) == (plan, wanted.groups)
    np.testing.assert_allclose(found.mixing.numpy(), wanted.mixing, atol=1e-9)


def test_of_equal_plans_and_neurons_the_first_stay() -> None:
    """Three copies each of two heads, and neurons that only rounding tells apart (PLAN-9, FFN-5, DEPTH-9)."""
    pytest.importorskip("networkx")
    random = np.random.default_rng(0)
    maps, values = softmax(2 * random.normal(size=(5, 2, 6, 6))), random.normal(size=(5, 2, 6, 3))
    order, output = [0, 1, 0, 1, 0, 1], np.tile(random.normal(size=(6, 9)), (3, 1))
    gram = gram_tensor(maps[:, order], values[:, order], output).sum(axis=0)
    for seed in range(8):
        noise = np.random.default_rng(seed).normal
        shaken = gram * (1 + 1e-15 * noise(size=gram.shape))
        plan = merge_heads(torch.from_numpy(shaken), 3, "matched", 1).plan
        assert plan == grouped_plan(shaken, 3, 1) == (((0, 1), (2, 4), (3, 5)),)
        scores = np.array([2.0, 1.0, 3.0, 1.0, 1.0, 0.5, 1.0]) * (1 + 1e-9 * noise(size=7))
        assert most_important(torch.from_numpy(scores), 4).tolist() == [0, 1, 2, 3]
        eye = Linear(np.eye(7), None)
        assert keep_neurons(eye, eye, scores, 4).kept == (0, 1, 2, 3)
        assert Ranking(tuple(scores), (), None).drop(attention=4).attention == (4, 5, 6)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_axes(norm: str) -> None:
    moment = moments(INPUTS)[0][:-1, :-1]
    for width in (10, 7, 3):
        wanted = ref_width.principal_axes(moment, width, norm).basis
        found = principal_axes(torch.from_numpy(moment), width, norm).numpy()
        np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, atol=1e-9)
        np.testing.assert_allclose(found.T @ found @ found.T, found.T, atol=1e-9)
        if norm == "rms":
            np.testing.assert_allclose(found, wanted, atol=1e-9)  # signs too (WIDTH-3)
        if norm == "layer":
            np.testing.assert_allclose((INPUTS @ found).mean(-1), 0.0, atol=1e-12)


@pytest.mark.parametrize("biased", [True, False])
def test_alignment(biased: bool) -> None:
    random = np.random.default_rng(3)
    z, t, w, b = (random.normal(size=size) for size in ((30, 5), (30, 4), (5, 4), 4))
    fit = OutputFit(torch.from_numpy(w), torch.from_numpy(b) if biased else None, 0.2)
    for part in (slice(0, 12), slice(12, 30)):
        fit.add(torch.from_numpy(z[part]), torch.from_numpy(t[part]))
    found = fit.solve()
    wanted = ref_align.align_output(z, t, w, b if biased else None, ridge=0.2)
    np.testing.assert_allclose(found[0].numpy(), wanted[0], atol=1e-10)
    assert (found[1] is None) == (wanted[1] is None)
    if found[1] is not None and wanted[1] is not None:
        np.testing.assert_allclose(found[1].numpy(), wanted[1], atol=1e-10)


def test_a_ridge_is_chosen_on_samples_that_are_held_out() -> None:
    """ALIGN-7: few rows for many columns are not fitted by heart; many rows are; noise leaves the closed form."""
    rng = np.random.default_rng(3)
    start, moved = rng.normal(size=(32, 4)), 0.5 * rng.normal(size=(32, 4))

    def fit(rows: int, ridge: float | None, change: NDArray[np.float64]) -> tuple[float, float | None]:
        z = rng.normal(size=(rows, 32))
        targets = z @ (start + change) + rng.normal(size=(rows, 4))
        fit = OutputFit(torch.from_numpy(start), None, ridge)
        held = torch.arange(rows) // 4 % 4 == 3  # samples of four rows
        fit.add(torch.from_numpy(z), torch.from_numpy(targets), held)
        found, _ = fit.solve()
        return float(np.square(found.numpy() - start - change).mean()), fit.chosen

    closed = float(np.square(moved).mean())
    few, many = fit(40, None, moved), fit(4000, None, moved)
    assert few[0] < fit(40, 1e-4, moved)[0]
    assert many[0] < 0.02 * closed
    assert many[1] == 1e-4
    still = fit(40, None, np.zeros_like(moved))
    assert still[1] is None or still[1] >= 1.0
    assert still[0] < fit(40, 1e-4, np.zeros_like(moved))[0]


def test_where_nothing_is_left_to_fit_the_closed_form_stays() -> None:
    """Not one of the ridges, whose errors are rounding (ALIGN-7)."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        z, start = rng.normal(size=(80, 8)), rng.normal(size=(8, 2))
        fit = OutputFit(torch.from_numpy(start), None, None)
        left = 1e-9 * rng.normal(size=8)[:, None]  # what float32 leaves of equal streams
        fit.add(torch.from_numpy(z), torch.from_numpy(z @ (start + left)), torch.arange(80) % 4 == 3)
        fit.solve()
        assert fit.chosen is None


def test_too_few_samples_to_hold_any_out_are_held_to_the_closed_form() -> None:
    rng = np.random.default_rng(4)
    fit = OutputFit(torch.from_numpy(rng.normal(size=(8, 2))), None, None)
    fit.add(
        torch.from_numpy(rng.normal(size=(9, 8))), torch.from_numpy(rng.normal(size=(9, 2))), torch.zeros(9).bool()
    )
    fit.solve()
    assert fit.chosen == 100.0
