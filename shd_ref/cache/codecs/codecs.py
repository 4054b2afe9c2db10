"""Codecs: how the rows of a squeezed map become stored numbers, and back (CACHE-110 to CACHE-121).

A codec works on rows along the last axis and keeps the shape. Every lossy codec's decoder makes the rows sum
to one again, so no scale is stored. The arithmetic is float32 and only uses operations that IEEE 754 rounds
correctly, so an ONNX graph can end in the same quantiser and give the same codes.

What each costs is known beforehand (CACHE-121): with S positive entries in a row, the largest of them m, KL in nats
is at most ``S m / 255^2`` (sqrt8-row), ``S / 255^2`` (sqrt8-abs), ``S m / 206`` (u4) and ``1.01 / 2^16`` (bf16).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError

FloatArray = NDArray[np.float32] | NDArray[np.float64]

CODECS: Final = ("float32", "bf16", "sqrt8-row", "sqrt8-abs", "u4")
DEFAULT_CODEC: Final = "sqrt8-row"

SMALLEST_PROB: Final = 2.0**-126
"""The smallest normal float32. Anything below counts as zero: accelerators flush it (CACHE-111)."""

SQRT8_LEVELS: Final = 255
"""Code of the row's largest entry (of 1 for ``sqrt8-abs``); codes go as the square root of the probability."""

U4_LEVELS: Final = 15
"""Code of the row's largest entry in ``u4``; codes go as the cube root of the probability."""

_CODE_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "bf16": np.dtype(np.uint16),
    "sqrt8-row": np.dtype(np.uint8),
    "sqrt8-abs": np.dtype(np.uint8),
    "u4": np.dtype(np.uint8),
}
_BITS: Final = {"float32": 32, "bf16": 16, "sqrt8-row": 8, "sqrt8-abs": 8, "u4": 4}


def code_dtype(codec: str) -> np.dtype[Any]:
    """The type that holds one code in memory: float32, uint16 or uint8.

    Raises:
        ShdError: ``argument-value`` for a codec that is not in ``CODECS``.
    """
    if codec not in _CODE_DTYPES:
        raise ShdError("argument-value", f"codec must be one of {', '.join(CODECS)}; got {codec!r}", "CACHE-110")
    return _CODE_DTYPES[codec]


def code_bits(codec: str) -> int:
    """Bits of one stored code; below 8, several codes share a byte (CACHE-110)."""
    code_dtype(codec)
    return _BITS[codec]


def code_values(codec: str) -> NDArray[np.float32]:
    """Decoded value of each code of a codec with few codes, before the row is made to sum to one.

    Returns:
        ``(256,)`` or ``(16,)`` float32.

    Raises:
        ShdError: ``argument-value`` for a codec whose codes are numbers themselves (float32, bf16).
    """
    if code_bits(codec) > 8:
        raise ShdError("argument-value", f"codec must be sqrt8-row, sqrt8-abs or u4; got {codec!r}", "CACHE-110")
    return u4_table() if codec == "u4" else sqrt8_table()


def u4_table() -> NDArray[np.float32]:
    """Decoded value of each u4 code before the row is made to sum to one (CACHE-118).

    As in ``sqrt8_table``, code 1 decodes to the centroid of its bin: the mean of ``x^3`` over (0, 1.5) is 0.84375.

    Returns:
        ``(16,)`` float32, in units of the row's largest entry.
    """
    cubes = np.arange(U4_LEVELS + 1, dtype=np.float64) ** 3
    cubes[1] = 0.84375
    return (cubes / U4_LEVELS**3).astype(np.float32)


def u4_thresholds() -> NDArray[np.float32]:
    """Smallest share of the largest entry for codes from 2 on: no rule says how to round a cube root (CACHE-117)."""
    return (((np.arange(2, U4_LEVELS + 1) - 0.5) / U4_LEVELS) ** 3).astype(np.float32)


def sqrt8_table() -> NDArray[np.float32]:
    """Decoded value of each sqrt8 code before the row is made to sum to one (CACHE-115).

    Code 0 is exactly zero: masked. Code 1 also covers all smaller positive values, and decodes to the centroid of its
    bin: for roots spread evenly over (0, 1.5), the mean of the square is 1.5^2 / 3 = 0.75.

    Returns:
        ``(256,)`` float32, in units of the row's largest entry (``sqrt8-row``) or of 1 (``sqrt8-abs``).
    """
    squares = np.arange(SQRT8_LEVELS + 1, dtype=np.float64) ** 2
    squares[1] = 0.75
    return (squares / SQRT8_LEVELS**2).astype(np.float32)


def encode(codec: str, probs: FloatArray) -> NDArray[Any]:
    """Code probability rows (CACHE-116, CACHE-117, CACHE-112, CACHE-113, CACHE-114).

    Args:
        codec: one of ``CODECS``.
        probs: ``(..., L, S)`` float32 or float64, rows over the last axis; rows that are all zero stay so.

    Returns:
        Codes of the same shape: float32, uint16 (bf16 bit patterns) or uint8.

    Raises:
        ShdError: ``argument-value`` (codec), ``argument-dtype``, ``not-finite``, ``not-a-distribution``
            (a negative entry).
    """
    dtype = code_dtype(codec)
    if probs.dtype not in (np.float32, np.float64):
        raise ShdError("argument-dtype", f"probs must be float32 or float64; got {probs.dtype}", "CACHE-111")
    values = probs.astype(np.float32)
    if not np.isfinite(values).all():
        raise ShdError("not-finite", "probs must be finite; got NaN or infinity", "CACHE-111")
    if (values < 0).any():
        raise ShdError("not-a-distribution", f"probs must not be negative; got {values.min()}", "CACHE-111")
    values[values < SMALLEST_PROB] = 0.0  # -0.0 becomes 0.0 as well
    if dtype == np.float32:
        return values
    if codec == "bf16":
        return _bf16_bits(values)
    if codec == "sqrt8-abs":
        return _sqrt8_codes(values, values)
    row_max = values.max(axis=-1, keepdims=True, initial=0.0)
    shares = np.divide(values, np.where(row_max > 0, row_max, 1.0), dtype=np.float32)
    return _sqrt8_codes(values, shares) if codec == "sqrt8-row" else _u4_codes(values, shares)


def decode(codec: str, codes: NDArray[Any]) -> NDArray[np.float32]:
    """Probability rows from codes (CACHE-118, CACHE-112, CACHE-113, CACHE-115).

    Args:
        codec: one of ``CODECS``.
        codes: ``(..., L, S)`` of ``code_dtype(codec)``.

    Returns:
        ``(..., L, S)`` float32. Rows of the lossy codecs sum to one, or are zero where every code is zero.

    Raises:
        ShdError: ``argument-value`` (codec, a u4 code above 15), ``argument-dtype``.
    """
    check_dtype(codec, codes)
    if codec == "float32":
        return codes.astype(np.float32)
    values = _bf16_values(codes) if codec == "bf16" else code_values(codec)[codes]
    mass = values.sum(axis=-1, keepdims=True, dtype=np.float64)
    return (values / np.where(mass > 0, mass, 1.0)).astype(np.float32)


def check_codes(codec: str, codes: NDArray[Any]) -> None:
    """Reject codes that no encoder produces, such as the NaN of a broken teacher (CACHE-110).

    Raises:
        ShdError: ``argument-value`` (codec), ``argument-dtype``, ``not-finite``, ``not-a-distribution``.
    """
    check_dtype(codec, codes)
    if code_bits(codec) <= 8:
        return
    values = codes if codec == "float32" else _bf16_values(codes)
    if not np.isfinite(values).all():
        raise ShdError("not-finite", f"codes of {codec} must be finite; got NaN or infinity", "CACHE-111")
    if np.signbit(values).any():
        raise ShdError("not-a-distribution", f"codes of {codec} must not be negative", "CACHE-111")


def check_dtype(codec: str, codes: NDArray[Any]) -> None:
    """Refuse codes of another type (``argument-dtype``), or beyond the codec's last code (``argument-value``)."""
    dtype = code_dtype(codec)
    if codes.dtype != dtype:
        raise ShdError("argument-dtype", f"codes of {codec} must be {dtype}; got {codes.dtype}", "CACHE-110")
    if codec == "u4" and codes.size and codes.max() > U4_LEVELS:
        raise ShdError("argument-value", f"codes of u4 must be at most {U4_LEVELS}; got {codes.max()}", "CACHE-110")


def _bf16_values(codes: NDArray[Any]) -> NDArray[np.float32]:
    return (codes.astype(np.uint32) << 16).view(np.float32)


def _bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Round to nearest, ties to even: just under half a unit, plus the bit that decides a tie.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _sqrt8_codes(values: NDArray[np.float32], shares: NDArray[np.float32]) -> NDArray[np.uint8]:
    codes = np.clip(np.rint(np.sqrt(shares) * np.float32(SQRT8_LEVELS)), 1, SQRT8_LEVELS)
    return np.where(values > 0, codes, 0).astype(np.uint8)


def _u4_codes(values: NDArray[np.float32], shares: NDArray[np.float32]) -> NDArray[np.uint8]:
    codes = np.searchsorted(u4_thresholds(), shares, side="right") + 1
    return np.where(values > 0, codes, 0).astype(np.uint8)
