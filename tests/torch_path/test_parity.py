"""The binding against the reference: merging, in every dtype, at the published tolerances."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from support.binding.twins import (
    DEVICES,
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
from shd_ref.mixing import mix_maps
from shd_ref.tolerances import load_tolerances

# (B, H_t, L, S, D, H_s): rectangular, odd, one head left, identity
SHAPES = [(2, 6, 7, 9, 8, 2), (2, 9, 63, 65, 5, 3), (2, 8, 5, 5, 16, 1), (1, 4, 8, 8, 8, 4)]


def names(shape: tuple[int, ...]) -> str:
    return "B{}-H{}-L{}-S{}-D{}-to{}".format(*shape)


def as_reference(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    return array.astype(DTYPES[name])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True], ids=["all-rows", "masked"])
@pytest.mark.parametrize("alpha_per", ["map", "row"])
@pytest.mark.parametrize("plan", ["progressive", "balanced"])
@pytest.mark.parametrize("strategy", ["shd", "constant", "hard", "mean", "simplex"])
def test_squeeze_heads_agrees(
    strategy: str, plan: str, alpha_per: str, masked: bool, dtype: str, device: str
) -> None:
    for number, shape in enumerate(SHAPES):
        batch, _, rows, _, _, num_student_heads = shape
        probs, outputs = teacher_case(*shape[:5], dtype, seed=number)
        mask = row_mask(batch, rows) if masked else None
        for temperature, alpha_from in ((1.0, "teacher"), (2.5, "teacher"), (0.5, "softened")):
            options = {
                "plan": plan,
                "strategy": strategy,
                "alpha_per": alpha_per,
                "temperature": temperature,
                "alpha_from": alpha_from,
            }
            expected = shd_ref.squeeze_heads(probs, outputs, num_student_heads, query_mask=mask, **options)
            actual = shd_torch.squeeze_heads(
                to_tensor(probs, device),
                to_tensor(outputs, device),
                num_student_heads,
                query_mask=None if mask is None else to_tensor(mask, device),
                **options,
            )
            assert actual.probs.dtype == to_tensor(probs).dtype
            assert actual.mixing.dtype == (torch.float64 if dtype == "float64" else torch.float32)
            assert actual.plan == expected.plan
            assert len(actual.alphas) == len(expected.alphas)
            for alphas, expected_alphas in zip(actual.alphas, expected.alphas, strict=True):
                assert_agrees(alphas, expected_alphas, dtype, "alpha")
            assert actual.mixing.shape == expected.mixing.shape
            if strategy == "simplex":
                assert_as_good(actual, expected, probs, outputs, mask, options, dtype)
            else:
                assert_agrees(actual.mixing, expected.mixing, dtype, "alpha")
                assert_agrees(actual.probs, expected.probs, dtype, "probs")
                assert_agrees(actual.residual, expected.residual, dtype, "residual")
            assert int(actual.num_clipped) == expected.num_clipped
            assert int(actual.num_degenerate) == expected.num_degenerate


def assert_as_good(
    actual: shd_torch.SqueezeResult,
    expected: shd_ref.SqueezeResult,
    probs: np.ndarray[Any, Any],
    outputs: np.ndarray[Any, Any],
    mask: np.ndarray[Any, Any] | None,
    options: dict[str, Any],
    dtype: str,
) -> None:
    """Optimal weights need not be unique: they are judged by their objective, what follows by them (NUM-6)."""
    softened = shd_ref.soften(probs, options["temperature"])
    solved_on = softened if options["alpha_from"] == "softened" else probs.astype(np.float64)
    mixing = to_float64(actual.mixing)
    assert mixing.min() >= 0.0
    np.testing.assert_allclose(mixing.sum(2), 1.0, atol=1e-6)
    groups = shd_ref.plan_groups(expected.plan, probs.shape[1])
    reached, best = (
        group_errors(solved_on, outputs, weights, groups, mask, options["alpha_per"])
        for weights in (mixing, expected.mixing)
    )
    allowed = load_tolerances()["agreement"][dtype]["residual"]
    assert (reached <= best + allowed["atol"] + allowed["rtol"] * best).all()
    assert_agrees(actual.probs, mix_maps(softened, mixing), dtype, "probs")
    plain = shd_ref.mix_heads(probs, mixing)
    assert_agrees(actual.residual, residual(probs, outputs, plain, groups, mask), dtype, "residual")


def group_errors(
    probs: np.ndarray[Any, Any],
    outputs: np.ndarray[Any, Any],
    mixing: np.ndarray[Any, Any],
    groups: tuple[tuple[int, ...], ...],
    mask: np.ndarray[Any, Any] | None,
    alpha_per: str,
) -> np.ndarray[Any, Any]:
    """Root of each group's error (MIX-7) relative to its members' merged outputs: ``(B, H_s)``, or per row."""
    outputs, found = outputs.astype(np.float64), []
    for head, group in enumerate(map(list, groups)):
        members, total = probs[:, group], outputs[:, group].sum(1, keepdims=True)
        weights = mixing[:, head, group].reshape(*members.shape[:2], -1, 1)
        error = (weights * members).sum(1) @ total[:, 0] - (members @ outputs[:, group]).sum(1)
        squares = np.stack([(error**2).sum(-1), ((members @ total) ** 2).sum((1, 3))])  # (2, B, L)
        squares = squares if mask is None else squares * mask
        error_square, scale = squares.sum(-1, keepdims=True) if alpha_per == "map" else squares
        found.append(np.sqrt(error_square / np.where(scale == 0, 1.0, scale)))
    return np.stack(found, axis=1)


def residual(
    probs: np.ndarray[Any, Any],
    outputs: np.ndarray[Any, Any],
    merged: np.ndarray[Any, Any],
    groups: tuple[tuple[int, ...], ...],
    mask: np.ndarray[Any, Any] | None,
) -> np.ndarray[Any, Any]:
    """MIX-8, as it is written."""
    outputs = outputs.astype(np.float64)
    of_groups = np.stack([outputs[:, list(group)].sum(1) for group in groups], axis=1)
    target = (probs.astype(np.float64) @ outputs).sum(1)
    error = (merged @ of_groups).sum(1) - target
    if mask is not None:
        target, error = target * mask[..., None], error * mask[..., None]
    return np.linalg.norm(error, axis=(1, 2)) / np.linalg.norm(target, axis=(1, 2))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("rule", ["least_squares", "as_printed"])
@pytest.mark.parametrize("alpha_per", ["map", "row"])
@pytest.mark.parametrize("masked", [False, True], ids=["all-rows", "masked"])
def test_solve_alpha_agrees(masked: bool, alpha_per: str, rule: str, dtype: str) -> None:
    probs, outputs = teacher_case(3, 2, 63, 65, 5, dtype)
    arrays = [probs[:, 0], probs[:, 1], outputs[:, 0], outputs[:, 1]]
    mask = row_mask(3, 63) if masked else None
    options = {"rule": rule, "alpha_per": alpha_per, "query_mask": mask}
    reference, binding = (twin.call("solve_alpha", *arrays, **options) for twin in TWINS)
    assert_agrees(binding, reference, dtype, "alpha")


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_soften_and_mix_heads_agree(dtype: str) -> None:
    probs, _ = teacher_case(2, 4, 7, 9, 5, dtype)
    rng = np.random.default_rng(3)
    logits = as_reference(3.0 * rng.standard_normal((2, 4, 7, 9)), dtype)
    logits[0, 0, 0, :4] = -np.inf
    attn_mask = rng.random((2, 1, 7, 9)) > 0.3
    attn_mask[1, 0, 2] = False
    weights = as_reference(rng.dirichlet(np.ones(4), (2, 3)), dtype)  # (B, H_s, H_t)
    by_row = as_reference(np.moveaxis(rng.dirichlet(np.ones(4), (2, 3, 7)), -1, 2), dtype)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("softmax", (logits, attn_mask), {"temperature": 1.7}),
        ("softmax", (logits,), {}),
        ("soften", (probs, 2.0), {}),
        ("soften", (probs, 0.3), {}),
        ("soften", (probs, 1.0), {}),
        ("mix_heads", (probs, weights), {}),
        ("mix_heads", (probs, by_row), {}),
    ]
    for function, args, kwargs in calls:
        reference, binding = (twin.call(function, *args, **kwargs) for twin in TWINS)
        assert binding.dtype == to_tensor(probs).dtype
        assert_agrees(binding, reference, dtype, "probs")
        np.testing.assert_array_equal(to_float64(binding) == 0, reference.astype(DTYPES[dtype]) == 0)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_value_outputs_agree_with_grouped_queries(num_kv_heads: int) -> None:
    rng = np.random.default_rng(4)
    values, projection = rng.standard_normal((2, num_kv_heads, 9, 5)), rng.standard_normal((6 * 5, 11))
    reference, binding = (twin.call("value_outputs", values, projection) for twin in TWINS)
    np.testing.assert_allclose(to_float64(binding), reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("alpha_per", ["map", "row"])
@pytest.mark.parametrize("heads", [2, 5, 12])
def test_simplex_reaches_the_reference_objective(heads: int, alpha_per: str) -> None:
    probs, outputs = teacher_case(3, heads, 6, 8, 4, "float64")
    probs[:, 1] = probs[:, 0]  # equal heads make the problem singular
    reference, binding = (
        twin.call("squeeze_heads", probs, outputs, 1, strategy="simplex", alpha_per=alpha_per) for twin in TWINS
    )
    np.testing.assert_allclose(to_float64(binding.residual), reference.residual, rtol=1e-9, atol=1e-14)
    assert float(binding.mixing.min()) >= 0.0
    np.testing.assert_allclose(to_float64(binding.mixing.sum(2)), 1.0, rtol=1e-12)


def test_equal_heads_merge_to_themselves() -> None:
    probs, outputs = teacher_case(2, 1, 7, 9, 5, "float32")
    probs, outputs = np.repeat(probs, 4, axis=1), np.repeat(outputs, 4, axis=1)
    for strategy in ("shd", "simplex"):
        result = shd_torch.squeeze_heads(to_tensor(probs), to_tensor(outputs), 2, strategy=strategy)
        torch.testing.assert_close(result.probs, to_tensor(probs[:, :2]))
        assert int(result.num_degenerate) == (4 if strategy == "shd" else 0)
        assert float(result.residual.max()) < 1e-6


def test_no_row_left_is_no_error_and_no_preference() -> None:
    probs, outputs = teacher_case(2, 4, 5, 6, 3, "float64")
    nothing = np.zeros((2, 5), dtype=np.bool_)
    for strategy in ("shd", "simplex"):
        for alpha_per in ("map", "row"):
            options = {"query_mask": nothing, "strategy": strategy, "alpha_per": alpha_per}
            reference, binding = (twin.call("squeeze_heads", probs, outputs, 2, **options) for twin in TWINS)
            np.testing.assert_allclose(to_float64(binding.mixing), reference.mixing, atol=1e-15)
            assert to_float64(binding.residual).tolist() == reference.residual.tolist() == [0.0, 0.0]
            assert int(binding.num_degenerate) == reference.num_degenerate


def test_rows_that_do_not_count_may_hold_anything_without_checks() -> None:
    probs, outputs = teacher_case(2, 4, 5, 6, 3, "float32")
    mask = row_mask(2, 5)
    mask[:, -1] = False
    clean = shd_torch.squeeze_heads(to_tensor(probs), to_tensor(outputs), 2, query_mask=to_tensor(mask))
    probs[:, :, -1] = np.nan
    dirty = shd_torch.squeeze_heads(to_tensor(probs), to_tensor(outputs), 2, query_mask=to_tensor(mask), check=False)
    torch.testing.assert_close(dirty.mixing, clean.mixing)
    torch.testing.assert_close(dirty.residual, clean.residual)


def test_nothing_flows_back_and_nothing_is_written() -> None:
    probs, outputs = (to_tensor(a).requires_grad_() for a in teacher_case(2, 6, 7, 9, 5, "float32"))
    before = probs.detach().clone(), outputs.detach().clone()
    for strategy in ("shd", "constant", "hard", "mean", "simplex"):
        result = shd_torch.squeeze_heads(probs, outputs, 4, strategy=strategy, temperature=2.0)
        assert not result.probs.requires_grad
        assert not result.mixing.requires_grad
    assert torch.equal(probs, before[0])
    assert torch.equal(outputs, before[1])


def test_softmax_gradient_is_finite_on_fully_masked_rows() -> None:
    logits = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 1, 4, 5) > 0.4
    mask[0, 0, 1] = False
    shd_torch.softmax(logits, mask).square().sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~mask.expand_as(logits)] == 0).all()


@pytest.mark.parametrize("strategy", ["shd", "constant", "hard", "mean"])
def test_squeeze_heads_compiles_whole(strategy: str) -> None:
    probs, outputs = (to_tensor(a) for a in teacher_case(2, 6, 7, 9, 5, "float32"))

    def merge(maps: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = shd_torch.squeeze_heads(maps, x, 2, strategy=strategy, temperature=2.0, check=False)
        return result.probs, result.residual

    compiled = torch.compile(merge, fullgraph=True, backend="eager")
    for actual, expected in zip(compiled(probs, outputs), merge(probs, outputs), strict=True):
        torch.testing.assert_close(actual, expected)


def good_arguments() -> dict[str, Any]:
    probs, outputs = teacher_case(2, 4, 5, 6, 3, "float64")
    return {"teacher_probs": probs, "value_outputs": outputs, "num_student_heads": 2}


def changed(array: np.ndarray[Any, Any], where: tuple[int, ...], value: float) -> np.ndarray[Any, Any]:
    copy = array.copy()
    copy[where] = value
    return copy


def bad_squeezes() -> list[Any]:
    good = good_arguments()
    probs, outputs = good["teacher_probs"], good["value_outputs"]
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "more-student-heads": ({"num_student_heads": 5}, "heads-exceed"),
        "no-student-head": ({"num_student_heads": 0}, "argument-value"),
        "three-axes": ({"teacher_probs": probs[0]}, "argument-shape"),
        "values-three-axes": ({"value_outputs": outputs[0]}, "argument-shape"),
        "other-keys": ({"value_outputs": outputs[:, :, :-1]}, "argument-shape"),
        "other-batch": ({"value_outputs": outputs[:1]}, "argument-shape"),
        "other-heads": ({"value_outputs": outputs[:, :3]}, "argument-shape"),
        "nan-map": ({"teacher_probs": changed(probs, (1, 2, 0, 0), np.nan)}, "not-finite"),
        "infinite-value": ({"value_outputs": changed(outputs, (1, 2, 0, 0), np.inf)}, "not-finite"),
        "negative": ({"teacher_probs": changed(probs, (0, 1, 2, 3), -0.1)}, "not-a-distribution"),
        "row-sum": ({"teacher_probs": probs * 0.9}, "not-a-distribution"),
        "complex": ({"teacher_probs": probs.astype(np.complex128)}, "argument-dtype"),
        "boolean-map": ({"teacher_probs": probs > 0.1}, "argument-dtype"),
        "integer-mask": ({"query_mask": np.ones((2, 5), dtype=np.int64)}, "argument-dtype"),
        "mask-shape": ({"query_mask": np.ones((2, 6), dtype=np.bool_)}, "argument-shape"),
        "plan-name": ({"plan": "greedy"}, "argument-value"),
        "plan-short": ({"plan": [[(0, 1)]]}, "plan-invalid"),
        "plan-twice": ({"plan": [[(0, 1), (1, 2)]]}, "plan-invalid"),
        "plan-range": ({"plan": [[(0, 4), (1, 2)]]}, "plan-invalid"),
        "plan-junk": ({"plan": [[("a", "b")]]}, "plan-invalid"),
        "strategy": ({"strategy": "median"}, "argument-value"),
        "alpha-rule": ({"alpha_rule": "guessed"}, "argument-value"),
        "alpha-per": ({"alpha_per": "key"}, "argument-value"),
        "row-sums": ({"row_sums": "any"}, "argument-value"),
        "row-sum-above-one": ({"teacher_probs": probs * 1.1, "row_sums": "at_most_one"}, "not-a-distribution"),
        "alpha-from": ({"alpha_from": "student"}, "argument-value"),
        "temperature-zero": ({"temperature": 0.0}, "argument-value"),
        "temperature-boolean": ({"temperature": True}, "argument-value"),
        "temperature-nan": ({"temperature": float("nan")}, "argument-value"),
    }
    return [pytest.param(good | change, code, id=name) for name, (change, code) in cases.items()]


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@pytest.mark.parametrize(("arguments", "code"), bad_squeezes())
def test_squeeze_heads_refuses(twin: Implementation, arguments: dict[str, Any], code: str) -> None:
    with pytest.raises(ShdError) as caught:
        twin.call("squeeze_heads", **arguments)
    assert caught.value.code == code


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@pytest.mark.parametrize(
    ("function", "args", "code"),
    [
        ("mix_heads", (np.full((1, 2, 3, 3), 1 / 3), np.full((1, 1, 3), 0.5)), "argument-shape"),
        ("mix_heads", (np.full((1, 2, 3, 3), 1 / 3), np.full((1, 1, 2), 0.4)), "mixing-invalid"),
        ("mix_heads", (np.full((1, 2, 3, 3), 1 / 3), np.array([[[-0.5, 1.5]]])), "mixing-invalid"),
        ("softmax", (np.zeros((2, 2)), np.ones((3, 2), dtype=np.bool_)), "argument-shape"),
        ("softmax", (np.zeros((2, 2)), np.ones((2, 2, 2), dtype=np.bool_)), "argument-shape"),
        ("softmax", (np.zeros((2, 2)), np.ones((2, 2))), "argument-dtype"),
        ("softmax", (np.full((2, 2), np.inf),), "not-finite"),
        ("soften", (np.full((1, 2), np.nan), 2.0), "not-finite"),
        ("value_outputs", (np.zeros((1, 2, 3, 4)), np.zeros((12, 5))), "argument-shape"),
        ("value_outputs", (np.zeros((1, 2, 3, 4)), np.zeros((8, 5, 1))), "argument-shape"),
        ("solve_alpha", (np.zeros((1, 2, 2)),) * 2 + (np.zeros((1, 3, 2)),) * 2, "argument-shape"),
        ("solve_alpha", (np.zeros((1, 2)),) * 2 + (np.zeros((1, 2, 2)),) * 2, "argument-shape"),
        ("merge_plan", (4, 5), "heads-exceed"),
        ("layer_map", (2, 3), "layers-invalid"),
    ],
)
def test_other_functions_refuse(twin: Implementation, function: str, args: tuple[Any, ...], code: str) -> None:
    with pytest.raises(ShdError) as caught:
        twin.call(function, *args)
    assert caught.value.code == code


def test_maps_are_checked_wherever_they_come_in() -> None:
    """MAP-3 and MAP-9 hold for every operation that takes maps, not for the large ones alone."""
    soften, mix_heads = shd_torch.soften, shd_torch.mix_heads
    for call in (
        lambda: soften(torch.full((1, 2), 0.4), 2.0),
        lambda: soften(torch.tensor([[1.5, -0.5]]), 2.0),
        lambda: soften(torch.full((1, 2), 0.8), 2.0, row_sums="at_most_one"),
        lambda: mix_heads(torch.full((1, 2, 3, 3), -1 / 3), torch.full((1, 1, 2), 0.5)),
    ):
        with pytest.raises(ShdError) as caught:
            call()
        assert caught.value.code == "not-a-distribution"
    sunk = torch.full((1, 2), 0.4)
    torch.testing.assert_close(soften(sunk, 2.0, row_sums="at_most_one"), sunk)
    torch.testing.assert_close(soften(sunk, 2.0, check=False), torch.full((1, 2), 0.5))


def test_error_names_where() -> None:
    good = good_arguments()
    probs = to_tensor(changed(good["teacher_probs"], (1, 2, 0, 3), np.nan))
    with pytest.raises(ShdError, match="got nan at sample 1, head 2, row 0, key 3"):
        shd_torch.squeeze_heads(probs, to_tensor(good["value_outputs"]), 2)


def test_without_checks_only_values_pass() -> None:
    good = {k: to_tensor(v) if isinstance(v, np.ndarray) else v for k, v in good_arguments().items()}
    assert shd_torch.squeeze_heads(**good | {"teacher_probs": good["teacher_probs"] * 0.9}, check=False) is not None
    with pytest.raises(ShdError, match="H_t=4"):
        shd_torch.squeeze_heads(**good | {"value_outputs": good["value_outputs"][:, :3]}, check=False)


FUNCTIONS = (
    "align_tokens compose_mixing gram_tensor intersect_support layer_map merge_gram merge_plan mix_heads plan_groups "
    "shd_loss shd_loss_gradient shd_loss_gradient_qk soften softmax solve_alpha solve_alpha_from_gram squeeze_heads "
    "value_outputs"
)


@pytest.mark.parametrize("function", FUNCTIONS.split())
def test_signatures_are_the_reference_ones_plus_check(function: str) -> None:
    reference = inspect.signature(getattr(shd_ref, function)).parameters
    binding = dict(inspect.signature(getattr(shd_torch, function)).parameters)
    binding.pop("check", None)
    assert [(p.name, p.kind, p.default) for p in binding.values()] == [
        (p.name, p.kind, p.default) for p in reference.values()
    ]


def test_result_fields_are_the_reference_ones() -> None:
    assert list(shd_torch.SqueezeResult.__dataclass_fields__) == list(shd_ref.SqueezeResult.__dataclass_fields__)
