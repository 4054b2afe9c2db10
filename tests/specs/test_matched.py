"""Plans chosen on calibration data are the best of all matchings of their size."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shd_ref import ShdError, matched_plan, plan_groups, softmax, solve_alpha, squeeze_heads

pytest.importorskip("networkx", reason="matched plans need networkx")


def teacher(heads: int = 6, seed: int = 0, *, batch: int = 2, keys: int = 6) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return softmax(rng.normal(size=(batch, heads, 5, keys)) * 2), rng.normal(size=(batch, heads, keys, 7))


def matchings(heads: list[int], size: int) -> Iterator[list[tuple[int, int]]]:
    if size == 0:
        yield []
        return
    for i, p in enumerate(heads):
        for j in range(i + 1, len(heads)):
            rest = heads[i + 1 : j] + heads[j + 1 :]  # pairs in order of their first head: each set once
            for others in matchings(rest, size - 1):
                yield [(p, heads[j]), *others]


def cost(probs: Any, outputs: Any, p: int, q: int, by: str) -> float:
    """The squared error of a pair, from the definition."""
    a, b, x, y = probs[:, p], probs[:, q], outputs[:, p], outputs[:, q]
    if by == "similarity":
        return float(((a - b) ** 2).sum())
    alpha = solve_alpha(a, b, x, y)[:, None, None]
    return float((((alpha * a + (1 - alpha) * b) @ (x + y) - a @ x - b @ y) ** 2).sum())


@pytest.mark.parametrize("by", ["residual", "similarity"])
@pytest.mark.parametrize(("heads", "student_heads"), [(6, 3), (6, 4), (7, 5), (5, 3)])
def test_the_first_round_is_the_best_of_all(by: str, heads: int, student_heads: int) -> None:
    items = [teacher(heads, 1), teacher(heads, 2, batch=1, keys=4)]
    plan = matched_plan(items, student_heads, by)
    assert len(plan[0]) == heads - student_heads
    assert list(plan[0]) == sorted(plan[0])
    assert all(p < q for p, q in plan[0])
    table = {(p, q): sum(cost(*item, p, q, by) for item in items) for p in range(heads) for q in range(p + 1, heads)}
    best = min(sum(table[pair] for pair in pairs) for pairs in matchings([*range(heads)], heads - student_heads))
    assert sum(table[pair] for pair in plan[0]) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("by", ["residual", "similarity"])
def test_of_equal_sets_the_first_is_taken(by: str) -> None:
    """Three copies each of two heads: which pairs meet is all the same, so rounding must not say it."""
    probs, outputs = teacher(2, batch=3)
    order = [0, 1, 0, 1, 0, 1]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        samples = rng.permutation(3)
        maps, values = (part[samples][:, order] for part in (probs, outputs))
        maps = maps * (1 + 1e-9 * rng.normal(size=maps.shape))
        assert matched_plan([(maps, values)], 3, by) == (((0, 1), (2, 4), (3, 5)),)
        assert matched_plan([(maps[:, [0] * 6], values[:, [0] * 6])], 3, by) == (((0, 1), (2, 3), (4, 5)),)


def test_equal_heads_find_each_other() -> None:
    probs, outputs = teacher(3)
    order = [0, 1, 2, 1, 2, 0]
    for by in ("residual", "similarity"):
        assert matched_plan([(probs[:, order], outputs[:, order])], 3, by) == (((0, 5), (1, 3), (2, 4)),)


@pytest.mark.parametrize("alpha_per", ["map", "row"])
def test_later_rounds_are_scored_on_the_merged_heads(alpha_per: str) -> None:
    probs, outputs = teacher(7, 4)
    plan = matched_plan([(probs, outputs)], 2, alpha_per=alpha_per)
    assert [len(one_round) for one_round in plan] == [3, 2]  # 7 -> 4 -> 2
    after = squeeze_heads(probs, outputs, 4, plan=plan[:1], alpha_per=alpha_per)
    merged = np.stack([outputs[:, list(g)].sum(1) for g in plan_groups(plan[:1], 7)], axis=1)
    assert matched_plan([(after.probs, merged)], 2, alpha_per=alpha_per) == plan[1:]
    assert sorted(sum(plan_groups(plan, 7), ())) == [*range(7)]


def test_it_merges_better_than_adjacent_pairs() -> None:
    probs, outputs = teacher(8, 5)
    chosen = squeeze_heads(probs, outputs, 4, plan=matched_plan([(probs, outputs)], 4))
    assert chosen.residual.mean() < squeeze_heads(probs, outputs, 4).residual.mean()


@pytest.mark.parametrize("by", ["residual", "similarity"])
def test_uncounted_rows_do_not_matter(by: str) -> None:
    probs, outputs = teacher(6, 6)
    mask = np.array([[True] * 5, [True, True, False, False, False]])
    changed = probs.copy()
    changed[1, :, 2:] = softmax(np.random.default_rng(9).normal(size=changed[1, :, 2:].shape) * 9)
    before, after = (matched_plan([(maps, outputs, mask)], 3, by) for maps in (probs, changed))
    assert before == after
    assert matched_plan([(probs, outputs, None)], 3, by) == matched_plan([(probs, outputs)], 3, by)


def test_equal_counts_are_the_identity_and_bad_calibration_is_an_error() -> None:
    probs, outputs = teacher()
    assert matched_plan([(probs, outputs)], 6) == ()
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("argument-value", [], {}),
        ("argument-shape", [(probs,)], {}),
        ("argument-shape", [(probs, outputs), (probs[:, :5], outputs[:, :5])], {}),
        ("argument-shape", [(probs, outputs[:, :5])], {}),
        ("argument-value", [(probs, outputs)], {"by": "cosine"}),
        ("argument-value", [(probs, outputs)], {"alpha_per": "head"}),
        ("argument-value", [(probs, outputs)], {"num_student_heads": 0}),
        ("heads-exceed", [(probs, outputs)], {"num_student_heads": 7}),
        ("not-a-distribution", [(probs / 2, outputs)], {}),
    ]
    for code, items, keywords in cases:
        with pytest.raises(ShdError) as caught:
            matched_plan(items, **{"num_student_heads": 3, **keywords})
        assert caught.value.code == code
    assert len(matched_plan([(probs / 2, outputs)], 3, row_sums="at_most_one")[0]) == 3


def test_without_networkx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(ShdError, match="squeezing-heads\\[oracles\\]") as caught:
        matched_plan([teacher()], 3)
    assert caught.value.code == "dependency-missing"
