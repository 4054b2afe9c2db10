"""Kernels on the codes of a cache, against the reference on the decoded maps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.binding.kernel_cases import Case, assert_gradient, assert_value
from support.binding.twins import assert_agrees
from torch_path.kernels.conftest import Kernel

from shd_ref.cache import decode, encode, pack
from shd_torch.data import CodedSupervision

CASES = [
    Case("causal, L=63, d=40, grouped queries", 63, width=40, kv_heads=1, is_causal=True),
    Case("L=65, S=70, padded, T=2.5", 65, 70, has_key_mask=True, temperature=2.5),
    Case("causal, padded on the left: empty rows", 70, is_causal=True, has_key_mask=True, batch=2),
    Case("d=64, window of 20, L=131", 131, width=64, groups=((0, 1),), kv_heads=1, teacher_kv_heads=2, window=20),
    Case(
        "float16, d=64, L=129, causal",
        129,
        width=64,
        groups=((0, 1),),
        kv_heads=1,
        teacher_kv_heads=1,
        is_causal=True,
        dtype="float16",
    ),
]


@pytest.mark.parametrize("deterministic", [True, False], ids=["two-passes", "one-pass"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value_and_gradients_agree(kernel: Kernel, case: Case, deterministic: bool) -> None:
    codes = encode("sqrt8-row", case.supervision)
    value, dq, dk, weights = case.expect(decode("sqrt8-row", codes).astype(np.float64))
    actual = kernel(
        "kl_coded", **case.student_arguments, codes=codes, row_weights=weights, deterministic=deterministic
    )
    assert_value(float((weights.astype(np.float64) * actual["kl"]).sum()), value, case.dtype)
    assert_gradient(actual["dq"], dq, case.dtype, "dq")
    assert_gradient(actual["dk"], dk, case.dtype, "dk")
    assert actual["changed"] == []


@pytest.mark.parametrize("support", ["full", "causal"])
def test_the_bytes_of_a_cache_are_read_as_they_lie(kernel: Kernel, support: str) -> None:
    """Two layers, samples of different lengths, one after the other; the padding around them is no supervision."""
    case = Case("packed", 40, is_causal=support == "causal", batch=3)
    lengths = (40, 1, 23)
    codes = encode("sqrt8-row", case.supervision)
    blobs = [pack(codes[sample, :, :n, :n], support) for sample, n in enumerate(lengths)]
    other = [np.full_like(blob, 255) for blob in blobs]
    buffer = torch.from_numpy(np.concatenate([*other, *blobs]))
    batch = CodedSupervision(buffer, lengths, (0, 5), 2, "sqrt8-row", support)
    coded = batch.supervise()[1]
    assert coded.starts[:2] == (buffer.numel() // 2, buffer.numel() // 2 + blobs[0].size)
    weights = np.random.default_rng(0).random((3, 2, 40)).astype(np.float32)
    names = ("starts", "lengths", "num_student_heads", "codec", "support", "length")
    given = {name: getattr(coded, name) for name in names} | {"buffer": buffer.numpy()}
    straight = kernel("kl_coded", **case.student_arguments, codes=given, row_weights=weights)
    for sample, n in enumerate(lengths):
        codes[sample, :, n:] = 0
        codes[sample, :, :, n:] = 0
    plain = kernel("kl_coded", **case.student_arguments, codes=codes, row_weights=weights)
    assert_agrees(batch.decode()[1], decode("sqrt8-row", codes).astype(np.float64), "float32", "probs")
    for name in ("kl", "dq", "dk"):
        assert np.abs(plain[name]).max() > 0
        np.testing.assert_array_equal(straight[name], plain[name], err_msg=name)


def test_code_one_and_code_zero(kernel: Kernel) -> None:
    """Code 1 is the centroid of its bin, three quarters of a step squared; code 0 has no mass at all (CACHE-115)."""
    codes = np.array([[[[1, 2, 0, 255]]]], np.uint8)
    zeros = np.zeros((1, 1, 4, 16), np.float32)
    actual = kernel(
        "kl_coded",
        student_q=zeros[:, :, :1],
        student_k=zeros,
        codes=codes,
        row_weights=np.ones((1, 1, 1), np.float32),
        scale=1.0,
    )
    probs = np.array([0.75, 4, 255**2]) / (0.75 + 4 + 255**2)
    assert_value(float(actual["kl"][0, 0, 0]), float((probs * np.log(4 * probs)).sum()), "float32")


def test_mass_outside_of_the_mask_is_infinite_and_moves_nothing(kernel: Kernel) -> None:
    case = Case("outside", 40, is_causal=True)
    codes = encode("sqrt8-row", case.supervision)
    codes[0, 1, 5, 9] = 3
    actual = kernel("kl_coded", **case.student_arguments, codes=codes, row_weights=np.ones((1, 2, 40), np.float32))
    assert np.argwhere(np.isinf(actual["kl"])).tolist() == [[0, 1, 5]]
    assert not actual["dq"][0, 1, 5].any()
    assert np.isfinite(actual["dk"]).all()
    uncounted = np.ones((1, 2, 40), np.float32)
    uncounted[0, 1, 5] = 0
    assert np.isfinite(kernel("kl_coded", **case.student_arguments, codes=codes, row_weights=uncounted)["kl"]).all()
