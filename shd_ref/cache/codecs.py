"""Codecs: how the rows of a squeezed map become stored numbers, and back (CACHE-30 to CACHE-39).

A codec works on rows along the last axis and keeps the shape. Every lossy codec's decoder makes the rows sum
to one again, so no scale is stored. The arithmetic is float32 and only uses operations that IEEE 754 rounds
correctly, so an ONNX graph can end in the same quantiser and give the same codes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError

FloatArray = NDArray[np.float32] | NDArray[np.float64]

CODECS: Final = ("float32", "bf16", "sqrt8-row")
DEFAULT_CODEC: Final = "sqrt8-row"

SMALLEST_PROB: Final = 2.0**-126
"""The smallest normal float32. Anything below counts as zero: accelerators flush it (CACHE-31)."""

SQRT8_LEVELS: Final = 255
"""Code of the row's largest entry; codes are proportional to the square root of the probability."""

_CODE_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "bf16": np.dtype(np.uint16),
    "sqrt8-row": np.dtype(np.uint8),
}


def code_dtype(codec: str) -> np.dtype[Any]:
    """The type of one code: float32, uint16 or uint8.

    Raises:
        ShdError: ``argument-value`` for a codec that is not in ``CODECS``.
    """
    if codec not in _CODE_DTYPES:
        raise ShdError("argument-value", f"codec must be one of {', '.join(CODECS)}; got {codec!r}", "CACHE-30")
    return _CODE_DTYPES[codec]


def sqrt8_table() -> NDArray[np.float32]:
    """Decoded value of each sqrt8-row code before the row is made to sum to one (CACHE-35).

    Code 0 is exactly zero: masked. Code 1 holds every smaller positive value too, and decodes to the centroid
    of its bin: for roots spread evenly over (0, 1.5), the mean of the square is 1.5^2 / 3 = 0.75.

    Returns:
        ``(256,)`` float32, in units of the row's largest entry.
    """
    squares = np.arange(SQRT8_LEVELS + 1, dtype=np.float64) ** 2
    squares[1] = 0.75
    return (squares / SQRT8_LEVELS**2).astype(np.float32)


def encode(codec: str, probs: FloatArray) -> NDArray[Any]:
    """Code probability rows (CACHE-32, CACHE-33, CACHE-34).

    Args:
        codec: one of ``CODECS``.
        probs: ``(..., L, S)`` float32 or float64, rows over the last axis; rows that are all zero stay so.

    Returns:
        Codes of the same shape: float32, uint16 (bf16 bit patterns) or uint8 (sqrt8-row).

    Raises:
        ShdError: ``argument-value`` (codec), ``argument-dtype``, ``not-finite``, ``not-a-distribution``
            (a negative entry).
    """
    dtype = code_dtype(codec)
    if probs.dtype not in (np.float32, np.float64):
        raise ShdError("argument-dtype", f"probs must be float32 or float64; got {probs.dtype}", "CACHE-31")
    values = probs.astype(np.float32)
    if not np.isfinite(values).all():
        raise ShdError("not-finite", "probs must be finite; got NaN or infinity", "CACHE-31")
    if (values < 0).any():
        raise ShdError("not-a-distribution", f"probs must not be negative; got {values.min()}", "CACHE-31")
    values[values < SMALLEST_PROB] = 0.0  # -0.0 becomes 0.0 as well
    if dtype == np.float32:
        return values
    return _bf16_bits(values) if codec == "bf16" else _sqrt8_codes(values)


def decode(codec: str, codes: NDArray[Any]) -> NDArray[np.float32]:
    """Probability rows from codes (CACHE-32, CACHE-33, CACHE-35).

    Args:
        codec: one of ``CODECS``.
        codes: ``(..., L, S)`` of ``code_dtype(codec)``.

    Returns:
        ``(..., L, S)`` float32. Rows of the lossy codecs sum to one, or are zero where every code is zero.

    Raises:
        ShdError: ``argument-value`` (codec), ``argument-dtype``.
    """
    _check_dtype(codec, codes)
    if codec == "float32":
        return codes.astype(np.float32)
    values = _bf16_values(codes) if codec == "bf16" else sqrt8_table()[codes]
    mass = values.sum(axis=-1, keepdims=True, dtype=np.float64)
    return (values / np.where(mass > 0, mass, 1.0)).astype(np.float32)


def check_codes(codec: str, codes: NDArray[Any]) -> None:
    """Refuse codes that no encoder makes, such as the NaN of a broken teacher (CACHE-30).

    Raises:
        ShdError: ``argument-value`` (codec), ``argument-dtype``, ``not-finite``, ``not-a-distribution``.
    """
    _check_dtype(codec, codes)
    if codec == "sqrt8-row":
        return
    values = codes if codec == "float32" else _bf16_values(codes)
    if not np.isfinite(values).all():
        raise ShdError("not-finite", f"codes of {codec} must be finite; got NaN or infinity", "CACHE-31")
    if np.signbit(values).any():
        raise ShdError("not-a-distribution", f"codes of {codec} must not be negative", "CACHE-31")


def _check_dtype(codec: str, codes: NDArray[Any]) -> None:
    dtype = code_dtype(codec)
    if codes.dtype != dtype:
        raise ShdError("argument-dtype", f"codes of {codec} must be {dtype}; got {codes.dtype}", "CACHE-30")


def _bf16_values(codes: NDArray[Any]) -> NDArray[np.float32]:
    return (codes.astype(np.uint32) << 16).view(np.float32)


def _bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Round to nearest, ties to even: just under half a unit, plus the bit that decides a tie.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _sqrt8_codes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    row_max = values.max(axis=-1, keepdims=True, initial=0.0)
    roots = np.sqrt(values / np.where(row_max > 0, row_max, np.float32(1)))
    codes = np.clip(np.rint(roots * np.float32(SQRT8_LEVELS)), 1, SQRT8_LEVELS)
    return np.where(values > 0, codes, 0).astype(np.uint8)
