"""What each operation refuses, beyond what the test vectors can ask: every code with the sentence that gives it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shd_ref
from shd_ref import ShdError

HALF = np.full((1, 2, 1, 2), 0.5)
OUTPUTS = np.ones((1, 2, 2, 3))
GRAM = np.ones((1, 2, 2, 2, 2))
ALPHAS = [np.full((2, 1), 0.5)]
ROUNDS = [[[0, 1]]]

REFUSED: list[tuple[str, str, Callable[[], Any]]] = [
    ("MAP-13", "argument-shape", lambda: shd_ref.softmax([0.0, 1.0])),
    ("MAP-13", "argument-shape", lambda: shd_ref.soften([0.5, 0.5], 2.0)),
    ("MAP-3", "not-a-distribution", lambda: shd_ref.soften([[1.0, -1e-300]], 1.0)),
    ("MAP-3", "not-a-distribution", lambda: shd_ref.align_tokens(-HALF, query_mask=np.zeros((1, 1), dtype=bool))),
    ("MAP-5", "not-finite", lambda: shd_ref.compose_mixing([np.array([[np.nan]])], ROUNDS, 2)),
    ("PLAN-1", "argument-value", lambda: shd_ref.merge_plan(True, 1)),
    ("PLAN-1", "argument-value", lambda: shd_ref.plan_groups([], 0)),
    ("PLAN-1", "argument-value", lambda: shd_ref.compose_mixing(ALPHAS, ROUNDS, 2.0)),  # type: ignore[arg-type]
    ("PLAN-7", "plan-invalid", lambda: shd_ref.merge_plan(2, 1, [[[0, True]]])),
    ("PLAN-7", "plan-invalid", lambda: shd_ref.plan_groups([0, 1], 3)),  # type: ignore[list-item]
    ("PLAN-7", "plan-invalid", lambda: shd_ref.compose_mixing(ALPHAS, [[[0, 1.0]]], 2)),  # type: ignore[list-item]
    ("MIX-13", "argument-shape", lambda: shd_ref.compose_mixing([], [], 2)),
    ("MIX-13", "argument-shape", lambda: shd_ref.compose_mixing(ALPHAS * 2, ROUNDS, 2)),
    ("MIX-13", "argument-shape", lambda: shd_ref.compose_mixing([np.full((2, 2), 0.5)], ROUNDS, 2)),
    ("MIX-13", "argument-shape", lambda: shd_ref.compose_mixing([*ALPHAS, np.full((1, 1), 0.5)], ROUNDS * 2, 3)),
    ("GRAM-6", "mixing-invalid", lambda: shd_ref.merge_gram(GRAM, 0, 1, [1.5])),
    ("GRAM-6", "argument-value", lambda: shd_ref.merge_gram(GRAM, 0, True, [0.5])),
    ("GRAM-6", "argument-value", lambda: shd_ref.solve_alpha_from_gram(GRAM, 0, 1.0)),  # type: ignore[arg-type]
    ("MIX-3", "mixing-invalid", lambda: shd_ref.mix_heads(HALF, np.full((1, 1, 2), 0.50004))),
    ("MAP-3", "not-a-distribution", lambda: shd_ref.mix_heads(-HALF, np.full((1, 1, 2), 0.5))),
    ("MAP-9", "not-a-distribution", lambda: shd_ref.mix_heads(HALF * 1.5, np.full((1, 1, 2), 0.5))),
    ("ALPHA-4", "argument-value", lambda: shd_ref.squeeze_heads(HALF, OUTPUTS, 1, strategy="mean", alpha_rule="x")),
    ("ORACLE-7", "argument-value", lambda: shd_ref.diagnose(HALF, OUTPUTS, 1, strategies=("shd", "matched"))),
    ("LOSS-3", "argument-shape", lambda: shd_ref.shd_loss([], [])),
    ("LOSS-3", "argument-shape", lambda: shd_ref.shd_loss(HALF, [HALF])),
    ("LOSS-3", "argument-shape", lambda: shd_ref.shd_loss_gradient_qk([HALF], HALF, HALF[:, :, [0, 0]], scale=1.0)),
    ("LAYER-2", "layers-invalid", lambda: shd_ref.layer_map(2, 2.0)),  # type: ignore[arg-type]
    ("LAYER-4", "layers-invalid", lambda: shd_ref.layer_map(2, 2, [(0, 1.0)])),  # type: ignore[list-item]
    ("LAYER-4", "layers-invalid", lambda: shd_ref.layer_map(2, 2, [(0,)])),  # type: ignore[list-item]
    ("TOKEN-4", "argument-value", lambda: shd_ref.align_tokens(HALF, columns=[1.0])),  # type: ignore[list-item]
    ("TOKEN-4", "argument-value", lambda: shd_ref.align_tokens(HALF, rows=["0"])),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("spec_id", "code", "call"), REFUSED, ids=[f"{n}-{r[0]}" for n, r in enumerate(REFUSED)])
def test_refused_with_its_code(spec_id: str, code: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ShdError) as caught:
        call()
    assert (caught.value.spec_id, caught.value.code) == (spec_id, code)
    assert "got" in str(caught.value)
    assert str(caught.value).endswith(f"[{spec_id}]")


def test_an_error_names_the_place() -> None:
    probs = np.full((2, 6, 5, 7), 1 / 7)
    probs[1, 4, 2, 3] = np.nan
    with pytest.raises(ShdError, match=r"teacher_probs must be finite; got nan at sample 1, head 4, row 2, key 3"):
        shd_ref.squeeze_heads(probs, np.ones((2, 6, 7, 9)), 2)


def test_explicit_rounds_come_back_as_they_are() -> None:
    rounds = np.array([[[3, 1], [0, 4]]])
    assert shd_ref.merge_plan(5, 3, rounds) == (((3, 1), (0, 4)),)
    assert shd_ref.plan_groups(rounds, 5) == ((3, 1), (0, 4), (2,))
    assert shd_ref.layer_map(np.int64(4), 2) == ((0, 1), (1, 3))  # type: ignore[arg-type]


def test_rows_that_do_not_count_may_have_any_sum() -> None:
    maps = np.array([[[[0.5, 0.5], [3.0, 0.0]], [[1.0, 0.0], [0.0, 7.0]]]])
    mask = np.array([[True, False]])
    result = shd_ref.squeeze_heads(maps, np.ones((1, 2, 2, 3)), 1, query_mask=mask, temperature=2.0)
    assert result.probs.shape == (1, 1, 2, 2)
    loss = shd_ref.shd_loss(maps, np.zeros_like(maps), loss_mask=mask)
    assert loss == shd_ref.shd_loss([maps], [np.zeros_like(maps)], loss_mask=mask)


def test_one_attention_mask_serves_every_layer() -> None:
    maps = [np.full((1, 1, 1, 2), 0.5), np.full((1, 3, 2, 2), 0.5)]
    logits = [np.zeros_like(m) for m in maps]
    mask = np.array([True, True])
    assert shd_ref.shd_loss(maps, logits, attn_mask=mask) == shd_ref.shd_loss(maps, logits)
    with pytest.raises(ShdError, match="supervision must be 0"):
        shd_ref.shd_loss(maps, logits, attn_mask=np.array([True, False]))


def test_strategies_count_what_they_solve() -> None:
    maps, outputs = np.full((1, 2, 2, 2), 0.5), np.random.default_rng(0).normal(size=(1, 2, 2, 3))
    for strategy in ("mean", "constant"):
        result = shd_ref.squeeze_heads(maps, outputs, 1, strategy=strategy)
        assert (result.num_clipped, result.num_degenerate) == (0, 0)
        assert len(result.alphas) == (strategy == "constant")
    assert shd_ref.squeeze_heads(maps, outputs, 2).alphas == ()
    assert shd_ref.squeeze_heads(maps, outputs, 1, strategy="hard").num_degenerate == 1
