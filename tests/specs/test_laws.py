"""Laws that need no oracle, on seeded inputs, for every implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, Implementation

from shd_ref import ShdError, merge_plan, plan_groups, squeeze_heads
from shd_ref import softmax as reference_softmax
from shd_ref.mixing import STRATEGIES

REACHED = [(16, 6), (12, 6), (25, 12), (25, 16), (25, 20), (40, 32), (9, 3), (6, 3), (7, 7), (1, 1), (5, 1)]


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda impl: impl.name)
def impl(request: pytest.FixtureRequest) -> Implementation:
    return request.param


def teacher(heads: int = 6, *, batch: int = 2, rows: int = 5, keys: int = 7, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    probs = reference_softmax(rng.normal(size=(batch, heads, rows, keys)) * 2)
    return probs, rng.normal(size=(batch, heads, keys, 9))


@pytest.mark.parametrize(("teacher_heads", "student_heads"), REACHED)
@pytest.mark.parametrize("kind", ["progressive", "balanced"])
def test_plans_reach_the_student(teacher_heads: int, student_heads: int, kind: str) -> None:
    plan = merge_plan(teacher_heads, student_heads, kind)
    groups = plan_groups(plan, teacher_heads)
    assert len(groups) == student_heads
    assert sorted(head for group in groups for head in group) == list(range(teacher_heads))
    if kind == "balanced":
        assert [head for group in groups for head in group] == list(range(teacher_heads))
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert merge_plan(teacher_heads, student_heads, plan) == plan


def test_progressive_keeps_the_last_heads() -> None:
    assert merge_plan(25, 16) == (tuple((2 * i, 2 * i + 1) for i in range(9)),)
    assert plan_groups(merge_plan(25, 16), 25)[9:] == tuple((head,) for head in range(18, 25))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("alpha_per", ["map", "row"])
@pytest.mark.parametrize("kind", ["progressive", "balanced"])
def test_merged_maps_are_distributions(impl: Implementation, strategy: str, alpha_per: str, kind: str) -> None:
    probs, outputs = teacher()
    result = impl.squeeze_heads(probs, outputs, 2, strategy=strategy, alpha_per=alpha_per, plan=kind, temperature=1.7)
    assert result["probs"].shape == (2, 2, 5, 7)
    assert result["mixing"].shape == ((2, 2, 6) if alpha_per == "map" else (2, 2, 6, 5))
    np.testing.assert_allclose(result["probs"].sum(-1), 1.0, atol=1e-12)
    np.testing.assert_allclose(result["mixing"].sum(2), 1.0, atol=1e-12)
    assert (result["mixing"] >= 0).all()


def test_alpha_is_antisymmetric_and_blind_to_value_bias(impl: Implementation) -> None:
    probs, outputs = teacher(heads=2, seed=3)
    p, q, x, y = probs[:, 0], probs[:, 1], outputs[:, 0], outputs[:, 1] * 0.9 + outputs[:, 0] * 0.3
    forward = impl.solve_alpha(p, q, x, y)
    assert ((forward > 0) & (forward < 1)).all()
    np.testing.assert_allclose(forward + impl.solve_alpha(q, p, y, x), 1.0, atol=1e-9)
    np.testing.assert_allclose(impl.solve_alpha(p, q, x + 5.0, y - 2.0), forward, atol=1e-9)
    printed = impl.solve_alpha(p, q, x, y, rule="as_printed")
    assert np.abs(impl.solve_alpha(p, q, x + 5.0, y - 2.0, rule="as_printed") - printed).max() > 0.01


@pytest.mark.parametrize("alpha_per", ["map", "row"])
def test_alpha_is_found_by_a_grid_search(impl: Implementation, alpha_per: str) -> None:
    probs, outputs = teacher(heads=2, batch=3, seed=5)
    p, q, x, y = probs[:, 0], probs[:, 1], outputs[:, 0], outputs[:, 1]
    alpha = impl.solve_alpha(p, q, x, y, alpha_per=alpha_per)
    grid = np.linspace(0, 1, 2001)
    errors = np.stack([((a * p + (1 - a) * q) @ (x + y) - p @ x - q @ y) ** 2 for a in grid]).sum(-1)  # (grid, B, L)
    best = grid[(errors.sum(-1) if alpha_per == "map" else errors).argmin(0)]
    np.testing.assert_allclose(alpha, best, atol=5.1e-4)


def test_equal_heads_merge_to_themselves_with_half(impl: Implementation) -> None:
    probs, outputs = teacher(heads=1)
    both = np.repeat(probs, 2, axis=1), np.concatenate([outputs, outputs[:, ::-1]], axis=1)
    result = impl.squeeze_heads(*both, 1)
    assert result["num_degenerate"] == 2
    assert result["num_clipped"] == 0
    assert (result["alphas"][0] == 0.5).all()
    np.testing.assert_allclose(result["probs"], probs, atol=1e-15)
    np.testing.assert_allclose(result["residual"], 0.0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["shd", "hard", "constant", "simplex"])
def test_as_many_heads_is_the_identity(impl: Implementation, strategy: str) -> None:
    probs, outputs = teacher()
    result = impl.squeeze_heads(probs, outputs, 6, strategy=strategy)
    np.testing.assert_array_equal(result["probs"], probs)
    np.testing.assert_array_equal(result["mixing"], np.broadcast_to(np.eye(6), (2, 6, 6)))
    assert result["plan"] == ()
    np.testing.assert_array_equal(result["residual"], 0.0)


@pytest.mark.parametrize("alpha_per", ["map", "row"])
def test_uncounted_rows_and_other_samples_do_not_matter(impl: Implementation, alpha_per: str) -> None:
    probs, outputs = teacher()
    mask = np.array([[True] * 5, [True, True, True, False, False]])
    before = impl.squeeze_heads(probs, outputs, 3, query_mask=mask, alpha_per=alpha_per)
    changed = probs.copy()
    changed[1, :, 3:] = np.roll(changed[1, :, 3:], 1, axis=-1)
    after = impl.squeeze_heads(changed, outputs, 3, query_mask=mask, alpha_per=alpha_per)
    np.testing.assert_array_equal(before["probs"][1, :, :3], after["probs"][1, :, :3])
    np.testing.assert_array_equal(before["residual"], after["residual"])
    alone = impl.squeeze_heads(probs[1:], outputs[1:], 3, query_mask=mask[1:], alpha_per=alpha_per)
    np.testing.assert_allclose(alone["mixing"], before["mixing"][1:], atol=1e-12)
    full = impl.squeeze_heads(probs, outputs, 3, alpha_per=alpha_per)
    assert np.abs(full["mixing"][1] - before["mixing"][1]).max() > 1e-3


def test_a_mask_that_leaves_no_row_is_degenerate(impl: Implementation) -> None:
    probs, outputs = teacher()
    mask = np.array([[True] * 5, [False] * 5])
    result = impl.squeeze_heads(probs, outputs, 3, query_mask=mask)
    assert (result["alphas"][0][1] == 0.5).all()
    assert result["num_degenerate"] == 3
    assert result["residual"][1] == 0.0
    assert np.isfinite(result["probs"]).all()


def test_fully_masked_rows_stay_zero(impl: Implementation) -> None:
    probs, outputs = teacher()
    probs[0, :, 2] = 0.0
    result = impl.squeeze_heads(probs, outputs, 2, temperature=2.0)
    assert (result["probs"][0, :, 2] == 0.0).all()
    logits = np.zeros_like(result["probs"])
    logits[0, :, 2] = -np.inf
    assert np.isfinite(impl.shd_loss(result["probs"], logits))


def test_simplex_is_the_optimum(impl: Implementation) -> None:
    probs, outputs = teacher(heads=4, seed=11)
    total = outputs.sum(1)
    target = (probs @ outputs).sum(1)

    def objective(weights: Any) -> Any:  # (B, 4) -> (B,)
        return (((weights[:, :, None, None] * probs).sum(1) @ total - target) ** 2).sum((1, 2))

    best = impl.squeeze_heads(probs, outputs, 1, strategy="simplex")["mixing"][:, 0]
    floor = objective(best)
    rng = np.random.default_rng(0)
    for _ in range(300):
        other = rng.dirichlet(np.full(4, 0.5), size=2)
        assert (objective(other) >= floor - 1e-9).all()
        nearby = np.clip(best + rng.normal(size=best.shape) * 1e-3, 0, None)
        assert (objective(nearby / nearby.sum(1, keepdims=True)) >= floor - 1e-9).all()
    pair = impl.squeeze_heads(probs[:, :2], outputs[:, :2], 1, strategy="simplex")["mixing"]
    shd = impl.squeeze_heads(probs[:, :2], outputs[:, :2], 1)["mixing"]
    np.testing.assert_allclose(pair, shd, atol=1e-9)


@pytest.mark.parametrize("alpha_per", ["map", "row"])
def test_one_pair_shd_is_never_worse_than_constant_or_hard(impl: Implementation, alpha_per: str) -> None:
    probs, outputs = teacher(heads=2, batch=4, seed=8)
    residual = {
        name: impl.squeeze_heads(probs, outputs, 1, strategy=name, alpha_per=alpha_per)["residual"]
        for name in ("shd", "constant", "hard")
    }
    assert (residual["shd"] <= residual["constant"] + 1e-12).all()
    assert (residual["shd"] <= residual["hard"] + 1e-12).all()
    if alpha_per == "row":
        per_map = impl.squeeze_heads(probs, outputs, 1)["residual"]
        assert (residual["shd"] <= per_map + 1e-12).all()


def test_temperature_softens_before_mixing(impl: Implementation) -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(1, 4, 3, 6)) * 3
    outputs = rng.normal(size=(1, 4, 6, 5))
    result = impl.squeeze_heads(reference_softmax(logits), outputs, 2, temperature=2.5)
    plain = impl.squeeze_heads(reference_softmax(logits), outputs, 2)
    np.testing.assert_allclose(result["mixing"], plain["mixing"], atol=1e-12)
    soft = impl.softmax(logits, temperature=2.5)
    np.testing.assert_allclose(result["probs"], impl.mix_heads(soft, plain["mixing"]), atol=1e-12)
    np.testing.assert_allclose(impl.soften(reference_softmax(logits), 2.5), soft, atol=1e-12)
    other = impl.squeeze_heads(reference_softmax(logits), outputs, 2, temperature=2.5, alpha_from="softened")
    assert np.abs(other["mixing"] - plain["mixing"]).max() > 1e-4


def test_loss_is_zero_only_when_equal_and_ignores_uncounted_rows(impl: Implementation) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(2, 3, 4, 6))
    target = reference_softmax(logits)
    assert impl.shd_loss(target, logits) == pytest.approx(0.0, abs=1e-12)
    other = rng.normal(size=logits.shape)
    loss = impl.shd_loss(target, other)
    assert loss > 0.1
    mask = np.array([[True, True, False, False], [True, False, False, False]])
    masked = impl.shd_loss(target, other, loss_mask=mask)
    other[0, :, 2:] += 100 * rng.normal(size=other[0, :, 2:].shape)
    assert impl.shd_loss(target, other, loss_mask=mask) == pytest.approx(masked, rel=1e-12)
    by_hand = np.mean([_kl(target[b, :, i], other[b, :, i]) for b, i in ((0, 0), (0, 1), (1, 0))], axis=0)
    assert masked == pytest.approx(by_hand.sum(), rel=1e-12)
    assert impl.shd_loss(target, other, loss_mask=np.zeros((2, 4), dtype=bool)) == 0.0
    two = impl.shd_loss([target, target], [logits, other], loss_mask=mask, beta=0.5, reduction="mean")
    assert two == pytest.approx(0.5 * masked / 6, rel=1e-12)


def test_loss_temperature_and_mask(impl: Implementation) -> None:
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(1, 2, 4, 4)) * 2
    causal = np.tril(np.ones((4, 4), dtype=bool))
    target = reference_softmax(logits, causal, temperature=3.0)
    assert impl.shd_loss(target, logits, attn_mask=causal, temperature=3.0) == pytest.approx(0.0, abs=1e-12)
    assert impl.shd_loss(target, logits, attn_mask=causal) > 0.01


def _kl(target: Any, logits: Any) -> Any:
    student = reference_softmax(logits)
    return (target * (np.log(target) - np.log(student))).sum(-1)


INVALID: list[tuple[str, str, dict[str, Any]]] = [
    ("heads-exceed", "squeeze", {"num_student_heads": 7}),
    ("argument-value", "squeeze", {"num_student_heads": 0}),
    ("argument-value", "squeeze", {"strategy": "best"}),
    ("argument-value", "squeeze", {"alpha_per": "head"}),
    ("argument-value", "squeeze", {"alpha_rule": "printed"}),
    ("argument-value", "squeeze", {"temperature": 0.0}),
    ("argument-value", "squeeze", {"temperature": float("nan")}),
    ("argument-value", "squeeze", {"plan": "random"}),
    ("plan-invalid", "squeeze", {"plan": [[(0, 1)]]}),
    ("plan-invalid", "squeeze", {"plan": [[(0, 1), (1, 2), (3, 4), (5, 0)]]}),
    ("plan-invalid", "squeeze", {"plan": [[(0, 6), (1, 2), (3, 4)]]}),
    ("argument-shape", "squeeze", {"probs": lambda a: a[0]}),
    ("argument-shape", "squeeze", {"outputs": lambda x: x[:, :5]}),
    ("argument-shape", "squeeze", {"outputs": lambda x: x[:, :, :6]}),
    ("argument-shape", "squeeze", {"query_mask": np.ones((2, 4), dtype=bool)}),
    ("argument-dtype", "squeeze", {"query_mask": np.ones((2, 5))}),
    ("not-finite", "squeeze", {"probs": lambda a: np.where(a == a.max(), np.nan, a)}),
    ("not-finite", "squeeze", {"outputs": lambda x: np.where(x == x.max(), np.inf, x)}),
    ("not-a-distribution", "squeeze", {"probs": lambda a: a * 1.01}),
    ("not-a-distribution", "squeeze", {"probs": lambda a: a - 0.01}),
    ("argument-value", "loss", {"beta": -1.0}),
    ("argument-value", "loss", {"beta": float("inf")}),
    ("argument-value", "loss", {"reduction": "batchmean"}),
    ("argument-value", "loss", {"temperature": -2.0}),
    ("argument-shape", "loss", {"student_logits": lambda z: z[:, :1]}),
    ("argument-shape", "loss", {"student_logits": lambda z: [z, z]}),
    ("argument-shape", "loss", {"loss_mask": np.ones((2, 7), dtype=bool)}),
    ("argument-dtype", "loss", {"loss_mask": np.ones((2, 5), dtype=np.int64)}),
    ("argument-shape", "loss", {"attn_mask": np.ones((5, 6), dtype=bool)}),
    ("not-finite", "loss", {"student_logits": lambda z: np.where(z == z.max(), np.nan, z)}),
    ("not-a-distribution", "loss", {"supervision": lambda a: a * 0.9}),
    ("support-mismatch", "loss", {"attn_mask": np.tril(np.ones((5, 7), dtype=bool))}),
]


@pytest.mark.parametrize(("code", "call", "change"), INVALID, ids=[f"{c}-{i}" for i, (c, _, _) in enumerate(INVALID)])
def test_bad_input_is_one_clear_error(impl: Implementation, code: str, call: str, change: dict[str, Any]) -> None:
    arguments = dict(change)
    probs, outputs = teacher()
    if call == "squeeze":
        probs = arguments.pop("probs", lambda a: a)(probs)
        outputs = arguments.pop("outputs", lambda x: x)(outputs)
        positional = (probs, outputs, arguments.pop("num_student_heads", 2))
    else:
        logits = np.random.default_rng(6).normal(size=probs.shape)
        logits = arguments.pop("student_logits", lambda z: z)(logits)
        positional = (arguments.pop("supervision", lambda a: a)(probs), logits)
    with pytest.raises(ShdError) as caught:
        getattr(impl, f"{call}_heads" if call == "squeeze" else "shd_loss")(*positional, **arguments)
    assert caught.value.code == code
    assert "got" in str(caught.value)
    assert str(caught.value).endswith("]")


def test_nan_error_names_the_place() -> None:
    probs, outputs = teacher()
    probs[1, 4, 2, 3] = np.nan
    with pytest.raises(ShdError, match=r"teacher_probs must be finite; got nan at sample 1, head 4, row 2, key 3"):
        squeeze_heads(probs, outputs, 2)


def test_arguments_are_not_changed(impl: Implementation) -> None:
    probs, outputs = teacher()
    copies = probs.copy(), outputs.copy()
    impl.squeeze_heads(probs, outputs, 2, temperature=2.0, strategy="simplex")
    impl.shd_loss(probs, np.log(probs), attn_mask=np.ones((5, 7), dtype=bool))
    np.testing.assert_array_equal(probs, copies[0])
    np.testing.assert_array_equal(outputs, copies[1])


def test_layer_maps() -> None:
    from shd_ref import layer_map

    for teacher_layers in range(1, 30):
        for student_layers in range(1, teacher_layers + 1):
            pairs = layer_map(teacher_layers, student_layers)
            assert pairs[-1] == (student_layers - 1, teacher_layers - 1)
            assert [s for s, _ in pairs] == list(range(student_layers))
            assert all(0 <= t < teacher_layers for _, t in pairs)
            assert len({t for _, t in pairs}) == student_layers
    assert layer_map(12, 4, [(3, 11), (0, 2)]) == ((0, 2), (3, 11))
    for bad in ({"num_student_layers": 13}, {"pairs": [(0, 12)]}, {"pairs": [(0, 1), (0, 2)]}, {"pairs": []}):
        with pytest.raises(ShdError) as caught:
            layer_map(12, bad.pop("num_student_layers", 4), **bad)
        assert caught.value.code == "layers-invalid"
