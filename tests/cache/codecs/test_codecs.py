import math
import struct
from typing import Any

import numpy as np
import pytest
from support.refusals import refusal

from shd_ref.cache import CODECS, CodecError, codec_error, decode, encode
from shd_ref.cache.codecs.codecs import check_codes, kl_bound, merge_errors

LOSSY = [codec for codec in CODECS if codec != "float32"]


def dirichlet(concentration: float, rows: int, keys: int) -> np.ndarray:
    draws = np.random.default_rng(5).gamma(concentration, size=(rows, keys))
    draws[:, 0] += 1e-3  # a tiny concentration can draw a row of zeros
    return (draws / draws.sum(axis=-1, keepdims=True)).astype(np.float32)


def peaked(rows: int, keys: int, rest: float) -> np.ndarray:
    values = np.full((rows, keys), rest)
    values[:, 0] = 1 - rest * (keys - 1)
    return values.astype(np.float32)


ROWS = {
    "uniform": np.full((4, 64), 1 / 64, dtype=np.float32),
    "diffuse": dirichlet(5.0, 64, 128),
    "attention-like": dirichlet(0.3, 64, 256),
    "peaky": dirichlet(0.02, 64, 256),
    "worst-case": peaked(4, 512, 2.2 / 255**2),
    "vanishing-tail": peaked(4, 512, 1e-30),
    "one-key": np.ones((3, 1), dtype=np.float32),
    "one-hot": np.eye(5, dtype=np.float32),
}


def sqrt8_by_hand(row: list[float]) -> list[int]:
    """CACHE-114 with plain numbers, each step rounded to binary32."""

    def single(x: float) -> float:
        return struct.unpack("<f", struct.pack("<f", x))[0]

    largest = max(row)
    codes = []
    for value in row:
        root = single(math.sqrt(single(value / largest))) if largest else 0.0
        codes.append(0 if value == 0 else min(max(round(single(255 * root)), 1), 255))
    return codes


def test_sqrt8_follows_its_formula_exactly() -> None:
    rows = np.concatenate([dirichlet(0.1, 40, 50), np.zeros((1, 50), dtype=np.float32)])
    rows[:, 7] = 0
    assert encode("sqrt8-row", rows).tolist() == [sqrt8_by_hand(row) for row in rows.tolist()]


def test_sqrt8_keeps_the_support() -> None:
    row = np.array([[1.0, 1e-30, 2.0**-126, 2.0**-127, 0.0]], dtype=np.float32)
    assert encode("sqrt8-row", row).tolist() == [[255, 1, 1, 0, 0]]


@pytest.mark.parametrize("codec", CODECS)
def test_rows_without_mass_stay_zero(codec: str) -> None:
    rows = ROWS["diffuse"].copy()
    rows[3] = 0
    decoded = decode(codec, encode(codec, rows))
    assert not decoded[3].any()
    np.testing.assert_allclose(np.delete(decoded.sum(axis=-1, dtype=np.float64), 3), 1, atol=1e-6)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("codec", LOSSY)
def test_error_stays_within_the_bound(codec: str, name: str) -> None:
    rows = ROWS[name]
    exact = rows.astype(np.float64)
    exact /= exact.sum(axis=-1, keepdims=True)
    bounds = kl_bound(codec, (exact > 0).sum(axis=-1), exact.max(axis=-1))
    decoded = decode(codec, encode(codec, rows))
    for row, coded, bound in zip(exact, decoded, bounds, strict=True):
        error = codec_error(row, coded)
        assert error.kl_max <= bound
        assert error.tv_mean <= math.sqrt(max(error.kl_max, 1e-15) / 2) + 1e-7


def test_u4_follows_its_formula() -> None:
    rows = np.concatenate([dirichlet(0.1, 40, 50), np.zeros((1, 50), dtype=np.float32)])
    rows[:, 7] = 0
    for row, codes in zip(rows, encode("u4", rows), strict=True):
        for value, code in zip(row, codes, strict=True):
            share = np.float32(value / row.max()) if row.max() else np.float32(0)
            above = sum(share >= np.float32(((k - 0.5) / 15) ** 3) for k in range(2, 16))
            assert code == (1 + above if value >= 2.0**-126 else 0)
    cubes = np.arange(1, 16, dtype=np.float32)[None] ** 3
    assert encode("u4", cubes / 3375).tolist() == [list(range(1, 16))]


def test_codec_error_by_hand() -> None:
    exact = np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    coded = np.array([[0.25, 0.75, 0.0], [0.0, 0.0, 0.0], [0.5, 0.25, 0.25]])
    first = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    error = codec_error(exact, coded)
    assert error.rows == 2
    assert error.kl_mean == pytest.approx((first + math.log(2)) / 2)
    assert error.kl_max == pytest.approx(math.log(2))
    assert error.tv_mean == pytest.approx((0.25 + 0.5) / 2)


def test_merged_errors_are_the_error_of_all_rows() -> None:
    rows = ROWS["peaky"]
    decoded = decode("sqrt8-row", encode("sqrt8-row", rows))
    whole = codec_error(rows, decoded)
    parts = merge_errors(
        CodecError, [codec_error(rows[part], decoded[part]) for part in (slice(10), slice(10, None))]
    )
    assert (parts.kl_max, parts.rows) == (whole.kl_max, whole.rows)
    assert parts.kl_mean == pytest.approx(whole.kl_mean)
    assert parts.tv_mean == pytest.approx(whole.tv_mean)


def test_errors_of_no_rows_and_of_lost_support() -> None:
    nothing = CodecError(0.0, 0.0, 0.0, 0)
    assert codec_error(np.zeros((2, 3)), np.zeros((2, 3))) == nothing
    assert merge_errors(CodecError, []) == merge_errors(CodecError, [nothing, nothing]) == nothing
    assert codec_error(np.array([[0.5, 0.5]]), np.array([[1.0, 0.0]])).kl_max == math.inf


def single(*numbers: float) -> np.ndarray:
    return np.array(numbers, dtype=np.float32)


@pytest.mark.parametrize(
    ("use", "codec", "array", "code"),
    [
        (encode, "zip", single(1, 1), "argument-value"),
        (encode, "u4", single(math.nan, 1), "not-finite"),
        (encode, "sqrt8-row", single(-0.1, 1.1), "not-a-distribution"),
        (check_codes, "float32", single(-1), "not-a-distribution"),
        (check_codes, "u4", np.array([16], dtype=np.uint8), "argument-value"),
    ],
)
def test_what_no_encoder_takes_or_makes_is_refused(use: Any, codec: str, array: np.ndarray, code: str) -> None:
    with refusal(code):
        use(codec, array)
