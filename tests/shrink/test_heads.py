"""Merged heads: the exact cases equal the teacher with its logits mixed, the others are the best of their rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shd_ref import gram_tensor, matched_plan, merge_plan, softmax, solve_alpha, squeeze_heads, value_outputs
from shd_ref.errors import ShdError
from shd_ref.shrink.heads import (
    HeadWeights,
    Rotary,
    attend,
    concatenate_heads,
    factor_forms,
    low_rank_heads,
    mix_queries,
    moment_roots,
)
from shd_ref.shrink.merges import HeadMerge, grouped_plan, merge_heads, pooled_mixing

WIDTH, DIM = 12, 4
CAUSAL = np.tri(6, dtype=bool)


def make_weights(heads: int, kv_heads: int, seed: int = 0, biases: str = "qkvo", dim: int = DIM) -> HeadWeights:
    random = np.random.default_rng(seed)

    def draw(*size: int) -> np.ndarray:
        return random.normal(size=size) / np.sqrt(WIDTH)

    names = {"query_bias": (heads, dim), "key_bias": (kv_heads, dim), "value_bias": (kv_heads, dim)}
    drawn = {name: draw(*size) if name[0] in biases else None for name, size in names.items()}
    return HeadWeights(
        2 * draw(heads, WIDTH, dim),
        2 * draw(kv_heads, WIDTH, dim),
        draw(kv_heads, WIDTH, dim),
        draw(heads, dim, WIDTH),
        **drawn,
        output_bias=draw(WIDTH) if "o" in biases else None,
    )


def make_inputs(batch: int = 3, length: int = 6, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(batch, length, WIDTH)) + 0.5


def make_merge(groups: tuple[tuple[int, ...], ...], seed: int = 2) -> HeadMerge:
    random = np.random.default_rng(seed)
    mixing = np.zeros((len(groups), sum(map(len, groups))))
    for head, group in enumerate(groups):
        mixing[head, list(group)] = random.dirichlet(np.ones(len(group)))
    return HeadMerge(mixing, groups)


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2).reshape(-1, WIDTH + 1)
    centred = (x - x.mean(axis=1, keepdims=True)).reshape(-1, WIDTH)
    return rows.T @ rows / len(rows), centred.T @ centred / len(rows)


ROTARY = Rotary(10000.0 ** (-np.arange(DIM // 2) * 2 / DIM))
PARTIAL = Rotary(np.array([0.7]))  # half of the head does not turn


@pytest.mark.parametrize("biases", ["", "qkv", "qkvo"])
@pytest.mark.parametrize("rotary", [None, ROTARY, PARTIAL], ids=["plain", "rotary", "partly rotary"])
def test_heads_of_one_key_head_merge_exactly(rotary: Rotary | None, biases: str) -> None:
    teacher = make_weights(8, 2, biases=biases)
    merge = make_merge(((0, 2), (3, 1), (4, 5, 6), (7,)))
    student = mix_queries(teacher, merge)
    assert (student.num_heads, student.num_kv_heads) == (4, 2)
    for length, batch in ((6, 3), (9, 2)):
        x, mask = make_inputs(batch, length), np.tri(length, dtype=bool)
        wanted = attend(x, teacher, merge=merge, attn_mask=mask, rotary=rotary)
        np.testing.assert_allclose(attend(x, student, attn_mask=mask, rotary=rotary), wanted, atol=1e-12)


@pytest.mark.parametrize("biases", ["", "qkv", "qkvo"])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(6, 2 * DIM), (6, 3 * DIM + 1), (3, 2 * DIM)])
def test_heads_side_by_side_are_exact(kv_heads: int, head_dim: int, biases: str) -> None:
    teacher = make_weights(6, kv_heads, biases=biases)
    merge = make_merge(((0, 5), (1,), (4, 3), (2,)))
    student = concatenate_heads(teacher, merge, head_dim)
    assert student.query.shape == (4, WIDTH, head_dim)
    for length in (6, 9):
        x = make_inputs(2, length)
        wanted = attend(x, teacher, merge=merge)
        np.testing.assert_allclose(attend(x, student), wanted, atol=1e-12)


@pytest.mark.parametrize("biases", ["", "qkv", "qkvo"])
def test_full_rank_is_exact(biases: str) -> None:
    """Without positions: rank as large as the group's heads side by side loses nothing."""
    teacher = make_weights(4, 4, biases=biases)
    merge = make_merge(((0, 3), (1, 2)))
    x = make_inputs()
    student = low_rank_heads(teacher, merge, 2, 2 * DIM + 1, moments(x)[0], ridge=1e-12)
    np.testing.assert_allclose(attend(x, student), attend(x, teacher, merge=merge), atol=1e-7)


@pytest.mark.parametrize("rotary", [None, ROTARY], ids=["plain", "rotary"])
def test_a_merge_of_equal_heads_is_exact_at_any_rank(rotary: Rotary | None) -> None:
    one = make_weights(2, 2)
    twice = HeadWeights(
        *(np.repeat(part, 2, axis=0) for part in (one.query, one.key, one.value, one.output)),
        *(
            None if part is None else np.repeat(part, 2, axis=0)
            for part in (one.query_bias, one.key_bias, one.value_bias)
        ),
        output_bias=one.output_bias,
    )
    x, merge = make_inputs(), make_merge(((0, 1), (2, 3)))
    student = low_rank_heads(twice, merge, 2, DIM, *moments(x)[:1], rotary=rotary, ridge=1e-12)
    wanted = attend(x, twice, attn_mask=CAUSAL, rotary=rotary)
    np.testing.assert_allclose(attend(x, student, attn_mask=CAUSAL, rotary=rotary), wanted, atol=1e-6)


def test_low_rank_beats_other_projections_and_centring_helps() -> None:
    teacher, merge = make_weights(4, 4, biases=""), make_merge(((0, 1), (2, 3)))
    x = make_inputs(64, 8, seed=5) @ np.diag(np.linspace(0.2, 2.0, WIDTH)) + np.linspace(-3, 3, WIDTH)
    s, centred = moments(x)
    wanted = attend(x, teacher, merge=merge)

    def error(student: HeadWeights) -> float:
        return float(np.linalg.norm(attend(x, student) - wanted) / np.linalg.norm(wanted))

    found = error(low_rank_heads(teacher, merge, 2, DIM, s, key_moment=centred))
    uncentred = error(low_rank_heads(teacher, merge, 2, DIM, s, key_moment=s[:-1, :-1]))
    blind = error(low_rank_heads(teacher, merge, 2, DIM, np.eye(WIDTH + 1), key_moment=np.eye(WIDTH)))
    assert found < uncentred
    assert found < blind


def test_factors_are_the_best_of_their_rank() -> None:
    random = np.random.default_rng(3)
    forms, half = random.normal(size=(3, 5, 4)), random.normal(size=(5, 5))
    s1, s2 = half @ half.T, np.diag([1.0, 2.0, 3.0, 4.0])

    def error(left: np.ndarray, right: np.ndarray) -> float:
        gap = forms - left @ right.T
        return float(np.einsum("gij,ik,gkl,lj->", gap, s1, gap, s2))

    (root1, inverse1), (root2, inverse2) = moment_roots(s1, 1e-12), moment_roots(s2, 1e-12)

    def factor(rank: int) -> tuple[np.ndarray, np.ndarray, float]:
        found = factor_forms(list(root1 @ forms), [root2] * 3, rank)
        return inverse1 @ found.left, inverse2 @ found.right, found.error

    left, right, share = factor(2)
    best = error(left, right)
    assert best == pytest.approx(share * error(np.zeros((3, 5, 1)), np.zeros((4, 1))), rel=1e-6)
    for _ in range(20):
        right = random.normal(size=(4, 2))
        left = forms @ s2 @ right @ np.linalg.inv(right.T @ s2 @ right)  # the best for this right factor
        assert error(left, right) >= best
    left, right, _ = factor(6)
    assert left.shape == (3, 5, 6)
    np.testing.assert_allclose(left @ right.T, forms, atol=1e-6)


def calibration(heads: int, seed: int = 7) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """Maps, value outputs, and the gram tensor summed over items and samples."""
    random = np.random.default_rng(seed)
    items, total = [], np.zeros((heads,) * 4)
    for length in (5, 7):
        probs = softmax(2 * random.normal(size=(3, heads, length, length)))
        values, projection = random.normal(size=(3, heads, length, 3)), random.normal(size=(heads * 3, WIDTH))
        items.append((probs, value_outputs(values, projection)))
        total += gram_tensor(probs, values, projection).sum(axis=0)
    return items, total


def test_pooled_alpha_is_one_least_squares_over_all_samples() -> None:
    items, gram = calibration(4)
    merge = pooled_mixing(gram, merge_plan(4, 3))
    # The same pair as one long sample: rows of every sample, one below the other.
    rows, lengths = [], []
    for probs, outputs in items:
        difference = probs[:, 0] - probs[:, 1]
        u, m = difference @ outputs[:, 0], difference @ (outputs[:, 0] + outputs[:, 1])
        rows.append((float((u * m).sum()), float((m * m).sum())))
        lengths.append(solve_alpha(probs[:, 0], probs[:, 1], outputs[:, 0], outputs[:, 1]))
    assert merge.mixing[0, 0] == pytest.approx(np.clip(sum(n for n, _ in rows) / sum(d for _, d in rows), 0, 1))
    assert merge.groups == ((0, 1), (2,), (3,))
    every = np.concatenate(lengths)
    assert every.min() <= merge.mixing[0, 0] <= every.max()
    np.testing.assert_array_equal(pooled_mixing(gram, ()).mixing, np.eye(4))


def test_matched_plan_stays_inside_key_heads() -> None:
    pytest.importorskip("networkx")
    _, gram = calibration(8)
    plan = grouped_plan(gram, 4, 2)
    merge = pooled_mixing(gram, plan)
    assert [sorted(head // 4 for head in group) for group in merge.groups] == [[0, 0], [0, 0], [1, 1], [1, 1]]
    deeper = pooled_mixing(gram, grouped_plan(gram, 2, 2))
    assert [sorted(group) for group in deeper.groups] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_without_key_groups_it_is_the_matched_plan_of_one_long_sample() -> None:
    pytest.importorskip("networkx")
    random = np.random.default_rng(11)
    probs, values = softmax(2 * random.normal(size=(1, 6, 9, 9))), random.normal(size=(1, 6, 9, 3))
    projection = random.normal(size=(18, WIDTH))
    gram = gram_tensor(probs, values, projection)[0]
    outputs = value_outputs(values, projection)
    for count in (5, 4, 3, 2):
        assert grouped_plan(gram, count, 1) == matched_plan([(probs, outputs)], count)


def test_of_equal_plans_the_first_is_chosen() -> None:
    """Three copies each of two heads, which only rounding tells apart (PLAN-9)."""
    pytest.importorskip("networkx")
    random = np.random.default_rng(0)
    maps, values = softmax(2 * random.normal(size=(5, 2, 6, 6))), random.normal(size=(5, 2, 6, 3))
    order, output = [0, 1, 0, 1, 0, 1], np.tile(random.normal(size=(6, 9)), (3, 1))
    gram = gram_tensor(maps[:, order], values[:, order], output).sum(axis=0)
    for seed in range(8):
        shaken = gram * (1 + 1e-15 * np.random.default_rng(seed).normal(size=gram.shape))
        assert grouped_plan(shaken, 3, 1) == (((0, 1), (2, 4), (3, 5)),)


@pytest.mark.parametrize(("kind", "kv_heads"), [("matched", 2), ("matched", 3), ("balanced", 2), ("progressive", 2)])
def test_a_merge_by_a_kind_of_plan(kind: str, kv_heads: int) -> None:
    """Inside key heads where these divide the student's heads (HEAD-4); the alphas are those of the plan (HEAD-3)."""
    if kind == "matched":
        pytest.importorskip("networkx")
    _, gram = calibration(6)
    merge = merge_heads(gram, 4, kind, kv_heads)
    plan = grouped_plan(gram, 4, {2: 2, 3: 1}[kv_heads]) if kind == "matched" else merge_plan(6, 4, kind)
    assert merge.plan == plan
    np.testing.assert_array_equal(merge.mixing, pooled_mixing(gram, plan).mixing)


def test_a_pool_s_alphas_are_those_of_its_merged_maps() -> None:
    """Two rounds on the gram tensor equal the same rounds on maps and value outputs (GRAM-4)."""
    random = np.random.default_rng(2)
    probs, values = softmax(2 * random.normal(size=(1, 6, 9, 9))), random.normal(size=(1, 6, 9, 3))
    projection = random.normal(size=(18, WIDTH))
    merge = pooled_mixing(gram_tensor(probs, values, projection)[0], merge_plan(6, 2))
    wanted = squeeze_heads(probs, value_outputs(values, projection), 2).mixing[0]
    np.testing.assert_allclose(merge.mixing, wanted, atol=1e-9)


@pytest.mark.parametrize("rotary", [None, ROTARY], ids=["plain", "rotary"])
def test_rounding_chooses_no_sign(rotary: Rotary | None) -> None:
    """Factors are those of the rule, not of the last bit (HEAD-13)."""
    teacher, merge, s = make_weights(4, 4), make_merge(((0, 3), (1, 2))), moments(make_inputs(16))[0]
    keys = low_rank_heads(teacher, merge, 1, DIM, s, rotary=rotary).key
    for seed in range(4):
        shaken = s * (1 + 1e-13 * np.random.default_rng(seed).normal(size=s.shape))
        np.testing.assert_allclose(low_rank_heads(teacher, merge, 1, DIM, shaken, rotary=rotary).key, keys, atol=1e-7)


TEACHER, MERGE = make_weights(4, 2), make_merge(((0, 1), (2, 3)))
CROSSED = make_merge(((0, 2), (1, 3)))


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: mix_queries(TEACHER, CROSSED), "shrink-unsupported"),
        (lambda: mix_queries(TEACHER, make_merge(((0,), (1,), (2, 3)))), "shrink-unsupported"),
        (lambda: mix_queries(make_weights(6, 2), MERGE), "argument-shape"),
        (lambda: concatenate_heads(TEACHER, MERGE, 2 * DIM - 1), "argument-value"),
        (lambda: low_rank_heads(TEACHER, MERGE, 2, DIM, np.eye(WIDTH)), "argument-shape"),
        (lambda: low_rank_heads(TEACHER, MERGE, 2, 8, np.eye(WIDTH + 1), rotary=ROTARY), "shrink-unsupported"),
        (lambda: HeadMerge(np.full((1, 2), 0.6), ((0, 1),)), "mixing-invalid"),
        (lambda: HeadMerge(np.eye(2), ((0, 1), (1,))), "argument-shape"),
        (lambda: HeadMerge(np.full((2, 2), 0.5), ((0,), (1,))), "mixing-invalid"),
        (lambda: pooled_mixing(np.ones((2, 2, 2)), ()), "argument-shape"),
        (lambda: pooled_mixing(np.ones((2, 2, 2, 2)), [[(0, 2)]]), "plan-invalid"),
        (lambda: grouped_plan(np.ones((4, 4, 4, 4)), 3, 2), "argument-value"),
        (lambda: grouped_plan(np.ones((4, 4, 4, 4)), "2", 2), "argument-value"),  # type: ignore[arg-type]
        (lambda: concatenate_heads(TEACHER, MERGE, 12.0), "argument-value"),  # type: ignore[arg-type]
        (lambda: low_rank_heads(TEACHER, MERGE, 0, DIM, np.eye(WIDTH + 1)), "argument-value"),
        (lambda: low_rank_heads(TEACHER, MERGE, 2, 0, np.eye(WIDTH + 1)), "argument-value"),
    ],
)
def test_refusals(call: Any, code: str) -> None:
    with pytest.raises(ShdError) as error:
        call()
    assert error.value.code == code
