"""Packing: the codes of one sample and layer as one run of bytes (CACHE-125 to CACHE-130).

With ``"full"`` support all of a map is stored, ``length`` query rows and as many keys, or another number of keys
(CACHE-128); with ``"causal"`` support, which is square, only the lower triangle, the diagonal included, row by row.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import check_dtype, code_bits, code_dtype
from shd_ref.errors import ShdError

SUPPORTS: Final = ("full", "causal")


def packed_size(codec: str, support: str, num_heads: int, length: int, num_keys: int | None = None) -> int:
    """Bytes of one blob: heads x entries of the support x bits of a code, in whole bytes (CACHE-125)."""
    return -(-code_bits(codec) * num_codes(support, num_heads, length, num_keys) // 8)


def num_codes(support: str, num_heads: int, length: int, num_keys: int | None = None) -> int:
    """Codes of one blob: heads x entries of the support; as many keys as rows, unless ``num_keys`` is given."""
    _check_support(support)
    num_keys = length if num_keys is None else num_keys
    if support == "causal" and num_keys != length:
        raise ShdError(
            "argument-shape",
            f"maps of causal support must be square; got {length} rows and {num_keys} keys",
            "CACHE-128",
        )
    return num_heads * (length * num_keys if support == "full" else length * (length + 1) // 2)


def pack(codes: NDArray[Any], support: str, codec: str | None = None) -> NDArray[np.uint8]:
    """The codes of one layer as bytes: head by head, row by row, little endian (CACHE-126).

    Args:
        codes: ``(H_s, n, n)`` codes, with full support also ``(H_s, n, S)``; a code of zero means probability zero in
            every codec.
        support: ``"full"`` or ``"causal"``.
        codec: the codec; needed for ``u4``, which packs two codes into a byte.

    Returns:
        ``(packed_size,)`` uint8.

    Raises:
        ShdError: ``argument-shape``; ``argument-value`` (support, codec); ``argument-dtype``; ``support-mismatch``
            when causal codes hold something above the diagonal.
    """
    _check_support(support)
    if codec is not None:
        check_dtype(codec, codes)
    if codes.ndim != 3 or (support == "causal" and codes.shape[1] != codes.shape[2]):
        raise ShdError("argument-shape", f"codes must be (H_s, n, n); got {codes.shape}", "CACHE-125")
    stored = codes
    if support == "causal":
        stored = codes.reshape(len(codes), -1)[:, _lower_triangle(codes.shape[1])]
        if np.count_nonzero(stored) != np.count_nonzero(codes):
            head, row, key = np.argwhere(np.triu(codes, 1))[0]
            raise ShdError(
                "support-mismatch",
                f"codes must be zero above the diagonal for causal support; got {codes[head, row, key]} "
                f"at head {head}, row {row}, key {key}",
                "CACHE-127",
            )
    little = np.ascontiguousarray(stored, dtype=codes.dtype.newbyteorder("<")).reshape(-1)
    return _pack_halves(little) if codec == "u4" else little.view(np.uint8)


def unpack(
    blob: NDArray[np.uint8], codec: str, support: str, num_heads: int, length: int, num_keys: int | None = None
) -> NDArray[Any]:
    """The inverse of ``pack`` (CACHE-130).

    Args:
        blob: ``(packed_size,)`` uint8.
        codec: one of ``CODECS``; determines the width of a code.
        support: ``"full"`` or ``"causal"``.
        num_heads: H_s.
        length: n, the counted positions of the sample.
        num_keys: of a map with another number of keys than of rows.

    Returns:
        ``(H_s, n, n)`` or ``(H_s, n, num_keys)`` codes of ``code_dtype(codec)``. May share memory with ``blob``.

    Raises:
        ShdError: ``argument-value`` (codec, support); ``argument-shape`` for a blob of the wrong size.
    """
    num_keys = length if num_keys is None else num_keys
    size = packed_size(codec, support, num_heads, length, num_keys)
    if blob.dtype != np.uint8 or blob.shape != (size,):
        raise ShdError(
            "argument-shape",
            f"blob must be ({size},) uint8 for {num_heads} heads x {length} rows x {num_keys} keys "
            f"({codec}, {support}); "
            f"got {blob.shape} {blob.dtype}",
            "CACHE-130",
        )
    dtype = code_dtype(codec)
    if codec == "u4":
        stored = _unpack_halves(blob)[: num_codes(support, num_heads, length, num_keys)]
    else:
        stored = blob.view(dtype.newbyteorder("<")).astype(dtype, copy=False)
    if support == "full":
        return stored.reshape(num_heads, length, num_keys)
    codes = np.zeros((num_heads, length * length), dtype=dtype)
    codes[:, _lower_triangle(length)] = stored.reshape(num_heads, -1)
    return codes.reshape(num_heads, length, length)


def _pack_halves(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two codes a byte, the first in the lower half; a last one alone is followed by zero bits."""
    even = np.zeros(len(codes) + len(codes) % 2, dtype=np.uint8)
    even[: len(codes)] = codes
    packed: NDArray[np.uint8] = even[0::2] | (even[1::2] << np.uint8(4))
    return packed


def _unpack_halves(blob: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.stack([blob & 0x0F, blob >> 4], axis=-1).reshape(-1)


def _lower_triangle(length: int) -> NDArray[np.intp]:
    # Positions in the flattened map, row by row; faster to index with than a mask.
    return np.flatnonzero(np.tri(length, dtype=np.bool_))


def _check_support(support: str) -> None:
    if support not in SUPPORTS:
        raise ShdError(
            "argument-value", f"support must be one of {', '.join(SUPPORTS)}; got {support!r}", "CACHE-125"
        )
