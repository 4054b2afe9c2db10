"""``attention_kl`` by the kernels against the reference: value and gradients, of queries and keys and of codes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.binding.kernel_cases import Case, assert_gradient, kernel_case, relative_error

import shd_ref
from shd_ref.cache import decode, encode, pack
from shd_ref.conformance import load_tolerances

Loss = Callable[..., dict[str, Any]]
BETA = 1e-3
ONE_HEAD: dict[str, Any] = {"groups": ((0, 1),), "key_heads": 1}
CASES = [
    kernel_case(
        "causal, L=63, d=40 and 24, grouped", 63, None, 40, 24, key_heads=1, teacher_key_heads=2, is_causal=True
    ),
    kernel_case("L=65, S=70, T=2.5", 65, 70, temperature=2.5),
    kernel_case("causal, padded on the left: empty rows", 70, is_causal=True, padded=True, batch=2),
    kernel_case("groups of 3, 1 and 2", 37, groups=((0, 4, 2), (5,), (1, 3)), key_heads=3, teacher_key_heads=6),
    kernel_case("five heads in one", 34, groups=((0, 1, 2, 3, 4),), key_heads=1, teacher_key_heads=5, padded=True),
    kernel_case("d=64, window, L=131", 131, None, 64, 64, **ONE_HEAD, is_causal=True, window=20, teacher_key_heads=2),
    kernel_case("window of 9 both ways, sinks", 75, groups=((0,), (1,)), window=9, teacher_key_heads=2, sinks=True),
    kernel_case("float16, d=64", 129, None, 64, 64, **ONE_HEAD, teacher_key_heads=1, is_causal=True, dtype="float16"),
    kernel_case("float16, d=200 and 80", 40, width=200, teacher_width=80, padded=True, dtype="float16"),
    kernel_case("float16, d=256 and 32, L=17", 17, width=256, teacher_width=32, is_causal=True, dtype="float16"),
    kernel_case("float16, d=128", 19, width=128, teacher_width=128, key_heads=1, dtype="float16"),
    kernel_case(
        "twelve heads in one, L=21", 21, groups=(tuple(range(12)),), key_heads=1, teacher_key_heads=4, is_causal=True
    ),
]
PASSES = [
    *(pytest.param(case, True, id=f"{case.name}-two-passes") for case in CASES),
    *(pytest.param(case, False, id=f"{case.name}-one-pass") for case in CASES[:3]),
]
CODED_CASES = [
    kernel_case("causal, L=63, d=40, grouped queries", 63, width=40, key_heads=1, is_causal=True),
    kernel_case("L=65, S=70, padded, T=2.5", 65, 70, padded=True, temperature=2.5),
    kernel_case("causal, padded on the left: empty rows", 70, is_causal=True, padded=True, batch=2),
    kernel_case("d=64, window of 20, L=131", 131, width=64, **ONE_HEAD, teacher_key_heads=2, window=20),
    kernel_case("float16, d=64", 129, width=64, **ONE_HEAD, teacher_key_heads=1, is_causal=True, dtype="float16"),
]


def factored(case: Case) -> dict[str, Any]:
    return {
        "queries": case.array("teacher_queries"),
        "keys": case.array("teacher_keys"),
        "mixing": case.mixing.astype(np.float32),
        "groups": case.groups,
        "row_mass": None if case.row_mass is None else case.row_mass.astype(np.float32),
    }


def coded(case: Case, codes: NDArray[np.uint8]) -> dict[str, Any]:
    """Codes ``(B, H_s, L, S)`` of whole maps as a cache would hold them."""
    batch, heads, rows, keys = codes.shape
    fields = {"buffer": codes.flatten(), "starts": tuple(range(0, codes.size, codes.size // batch))}
    fields |= {"lengths": (rows,) * batch, "num_student_heads": heads, "codec": "sqrt8-row", "support": "full"}
    fields |= {} if rows == keys else {"key_lengths": (keys,) * batch, "num_keys": keys}
    return fields | {"length": rows, "temperature": case.temperature}


def arguments(case: Case, **more: Any) -> dict[str, Any]:
    options = {"temperature": case.temperature, "beta": BETA, "loss_mask": case.loss_mask, **case.masks}
    return {"student_q": case.array("queries"), "student_k": case.array("keys")} | options | more


def assert_agrees(actual: dict[str, Any], expected: tuple[Any, ...], dtype: str) -> None:
    """Value and gradients, by beta, within the published tolerances."""
    value, dq, dk = expected
    limit = load_tolerances()["agreement"][dtype]["loss"]
    np.testing.assert_allclose(float(actual["loss"]) / BETA, value, **limit, err_msg="loss")
    assert_gradient(actual["dq"] / BETA, dq, dtype, "dq")
    assert_gradient(actual["dk"] / BETA, dk, dtype, "dk")


@pytest.mark.parametrize(("case", "deterministic"), PASSES)
def test_factored_supervision(loss: Loss, case: Case, deterministic: bool) -> None:
    actual = loss(factored(case), arguments(case), deterministic)
    assert (actual["choice"].name, actual["choice"].reason) == ("triton", "it was asked for")
    assert_agrees(actual, case.expected(), case.dtype)


def test_a_row_of_one_key_moves_nothing(loss: Loss) -> None:
    """A probability of 1 keeps its digits."""
    case = kernel_case("one key", 1, width=64, teacher_width=64)
    actual = loss(factored(case), arguments(case, beta=1.0, scale=1.0))
    limit = load_tolerances()["agreement"]["float32"]["gradient"]["atol"]
    assert max(np.abs(actual[name]).max() for name in ("dq", "dk")) <= limit


@pytest.mark.parametrize("case", CODED_CASES, ids=lambda case: case.name)
def test_coded_supervision(loss: Loss, case: Case) -> None:
    codes = encode("sqrt8-row", case.maps())
    actual = loss(coded(case, codes), arguments(case), case is not CODED_CASES[0])
    assert_agrees(actual, case.expected(decode("sqrt8-row", codes).astype(np.float64)), case.dtype)


@pytest.mark.parametrize("support", ["full", "causal"])
def test_a_batch_of_a_cache(loss: Loss, support: str) -> None:
    """Samples of different lengths behind other bytes; padding has no supervision, and does not count."""
    case = kernel_case("coded", 40, is_causal=support == "causal", batch=2, temperature=1.5)
    lengths = (40, 23)
    codes = encode("sqrt8-row", case.maps())
    codes[1, :, 23:] = 0
    codes[1, :, :, 23:] = 0
    blobs = [pack(codes[sample, :, :n, :n], support) for sample, n in enumerate(lengths)]
    buffer, starts = np.concatenate([np.full(7, 255, np.uint8), *blobs]), (7, 7 + blobs[0].size)
    own = {"buffer": buffer, "starts": starts, "lengths": lengths, "codec": "sqrt8-row", "support": support}
    actual = loss(coded(case, codes) | own, arguments(case))
    assert_agrees(actual, case.expected(decode("sqrt8-row", codes).astype(np.float64)), "float32")


def test_gradients_without_the_value(loss: Loss) -> None:
    case = CASES[0]
    actual = loss(factored(case), arguments(case, value="surrogate"))
    value, dq, *rest = case.expected()
    assert_agrees(actual | {"loss": BETA * value}, (value, dq, *rest), case.dtype)
    surrogate = BETA * float((case.queries * dq).sum())
    np.testing.assert_allclose(actual["loss"], surrogate, **load_tolerances()["agreement"]["float32"]["loss"])


@pytest.mark.parametrize("deterministic", [True, False], ids=["two-passes", "one-pass"])
def test_rows_that_do_not_count_are_exactly_zero(loss: Loss, deterministic: bool) -> None:
    case = CASES[2]
    weights, key_mask = case.weights, case.masks["attn_mask"]
    actual = loss(factored(case), arguments(case), deterministic)
    assert (weights == 0).sum() > 20
    assert not actual["dq"][weights == 0].any()
    assert not actual["dk"][~np.repeat(key_mask[:, 0], 2, axis=1)].any()
    nothing = loss(factored(case), arguments(case, loss_mask=np.zeros((2, 70), bool)), deterministic)
    assert not any(nothing[name].any() for name in ("loss", "dq", "dk"))


def test_the_difference_is_taken_before_it_is_rounded(loss: Loss) -> None:
    """A student that is close to its teacher: rounding each map first would leave an error of a tenth."""
    case = kernel_case("close", 64, None, 32, 32, **ONE_HEAD, teacher_key_heads=2, dtype="float16")
    rng = np.random.default_rng(0)
    near = [np.repeat(x, 2, 1) + 0.02 * rng.standard_normal((1, 2, 64, 32)) for x in (case.queries, case.keys)]
    near = [x.astype(np.float16).astype(np.float64) for x in near]
    case = replace(case, teacher_queries=near[0], teacher_keys=near[1])
    value, dq, dk = case.expected()
    assert 1e-4 < value < 1e-2
    tolerance = load_tolerances()["kernels"]["gradient"]["float16"]
    for deterministic in (True, False):
        actual = loss(factored(case), arguments(case, beta=1.0), deterministic)
        assert relative_error(actual["dq"], dq) <= tolerance
        assert relative_error(actual["dk"], dk) <= tolerance
    own = shd_ref.softmax(case.queries @ case.keys.swapaxes(-1, -2) * 32**-0.5)
    probs = own.astype(np.float16) - case.maps().astype(np.float16)
    rounded = case.weights[..., None] * probs.astype(np.float64) @ case.keys * 32**-0.5
    assert relative_error(rounded, dq) > 5 * tolerance


@pytest.mark.parametrize("beta", [1e-9, 1e6])
def test_any_size_of_row_weight_keeps_its_precision(loss: Loss, beta: float) -> None:
    """beta / n of a long batch lies below what float16 can hold."""
    case = kernel_case("float16", 40, dtype="float16")
    _, dq, dk = case.expected()
    actual = loss(factored(case), arguments(case, beta=beta), True)
    tolerance = load_tolerances()["kernels"]["gradient"]["float16"]
    assert relative_error(actual["dq"] / beta, dq) <= tolerance
    assert relative_error(actual["dk"] / beta, dk) <= tolerance


def test_two_passes_give_the_same_bits(loss: Loss) -> None:
    first, second = (loss(factored(CASES[0]), arguments(CASES[0]), True) for _ in range(2))
    for name in ("loss", "dq", "dk"):
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize(("length", "causal"), [(40, True), (1, False)], ids=["teacher", "one row, one key"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(loss: Loss, length: int, causal: bool) -> None:
    case = kernel_case("same", length, groups=((0,), (1,)), teacher_key_heads=2, is_causal=causal)
    case = replace(case, teacher_queries=case.queries, teacher_keys=case.keys)
    actual = loss(factored(case), arguments(case, beta=1.0))
    tolerances = load_tolerances()["agreement"]["float32"]
    for name, quantity in (("loss", "loss"), ("dq", "gradient"), ("dk", "gradient")):
        np.testing.assert_allclose(actual[name], 0.0, atol=tolerances[quantity]["atol"], err_msg=name)


def test_mass_outside_of_the_mask_is_infinite_and_moves_nothing(loss: Loss) -> None:
    case = kernel_case("outside", 40, is_causal=True)
    codes = encode("sqrt8-row", case.maps())
    codes[0, 1, 5, 9] = 3
    every = np.ones((1, 40), dtype=bool)
    actual = loss(coded(case, codes), arguments(case, loss_mask=every, check=False))
    assert np.isinf(actual["loss"])
    assert not actual["dq"][0, 1, 5].any()
    assert np.isfinite(actual["dk"]).all()
    every[0, 5] = False
    assert np.isfinite(loss(coded(case, codes), arguments(case, loss_mask=every, check=False))["loss"])


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("moved", [0.0, 1e-3], ids=["equal", "near"])
@pytest.mark.parametrize("shared", [0.0, 2.0], ids=["rows of few keys", "even rows"])
def test_large_logits_near_the_teacher_stay_within_the_stated_bound(
    loss: Loss, backend: str, shared: float, moved: float
) -> None:
    """A float16 student at logits of 10^4, and its teacher in float32; keys of even rows share a large part."""
    rng, shape, size = np.random.default_rng(0), (1, 1, 48, 64), 120.0
    common, *parts = rng.normal(size=64) / 64**0.25, rng.normal(size=shape), rng.normal(size=shape)
    q, k = ((size / 2 * (shared * common + part / (size if shared else 1))).astype(np.float16) for part in parts)
    taught = (q * (1 + moved * rng.normal(size=shape))).astype(np.float32)
    actual = loss(
        {"queries": taught, "keys": k.astype(np.float32), "mixing": np.ones((1, 1, 1), np.float32)},
        {"student_q": q, "student_k": k, "beta": 1.0, "backend": backend, "product_dtype": torch.float32},
    )
    q, k, taught = (x.astype(np.float64) for x in (q, k, taught))
    dz = np.subtract(*(shd_ref.softmax(x @ k.swapaxes(-1, -2) / 8) for x in (q, taught)))
    largest = max((np.abs(x) @ np.abs(k).swapaxes(-1, -2) / 8).max() for x in (q, taught))
    assert largest > 1e4
    share, weight = (48 + largest * (64 + 8)) * 2.0**-24, 1 / 8 / 48  # scale, and the weight of a row
    moved_by = 2 * share + 2.0**-10 * np.abs(dz).sum(-1)  # of each row; products of half precision too
    errors = {"dk": actual["dk"] - weight * dz.swapaxes(-1, -2) @ q, "dq": actual["dq"] - weight * dz @ k}
    assert np.linalg.norm(errors["dk"]) <= weight * (moved_by * np.linalg.norm(q, axis=-1)).sum()
    most = np.linalg.norm(k, axis=-1).max()
    assert (np.linalg.norm(errors["dq"], axis=-1) <= weight * moved_by * most).all()
