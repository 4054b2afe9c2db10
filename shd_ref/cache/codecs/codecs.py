"""Codecs: rows of maps as numbers (CACHE-110 to 121), these as bytes (CACHE-125 to 130), and vectors (CACHE-147).

Every lossy decoder makes rows sum to one again, so no scale is stored. Codes come of float32 operations that IEEE 754
rounds correctly, so that an ONNX graph can end in the same quantiser. ``kl_bound`` says what each costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_option

FloatArray = NDArray[np.float32] | NDArray[np.float64]

_BITS: Final = {"float32": 32, "sqrt8-row": 8, "u4": 4}
CODECS: Final = tuple(_BITS)

SMALLEST_PROB: Final = 2.0**-126
"""The smallest normal float32. Anything below counts as zero: accelerators flush it (CACHE-111)."""

SQRT8_LEVELS: Final = 255
"""Code of the row's largest entry; codes go as the square root of the probability."""

U4_LEVELS: Final = 15
"""Code of the row's largest entry in ``u4``; codes go as the cube root of the probability."""


def code_dtype(codec: str) -> np.dtype[Any]:
    """The type that holds one code in memory: float32 or uint8; ``argument-value`` for another codec."""
    return np.dtype(np.float32 if code_bits(codec) == 32 else np.uint8)


def code_bits(codec: str) -> int:
    """Bits of one stored code; below 8, several codes share a byte (CACHE-110)."""
    check_option("codec", codec, CODECS, "CACHE-110")
    return _BITS[codec]


def check_finite(name: str, values: NDArray[Any], spec_id: str, code: str = "not-finite") -> None:
    need(bool(np.isfinite(values).all()), code, name, "be finite", "NaN or infinity", spec_id=spec_id)


def check_blob(name: str, blob: NDArray[Any], size: int, layout: str, spec_id: str) -> None:
    """Refuse bytes of another number or type: ``argument-shape``."""
    fits, got = blob.dtype == np.uint8 and blob.shape == (size,), f"{blob.shape} {blob.dtype}"
    need(fits, "argument-shape", name, f"be ({size},) uint8 for {layout}", got, spec_id=spec_id)


def sqrt8_table() -> NDArray[np.float32]:
    """Decoded value of each sqrt8 code, in units of the row's largest entry ``(256,)`` (CACHE-115).

    Code 0 is exactly zero: masked. Code 1 also covers all smaller positive values, and decodes to the centroid of its
    bin: for roots spread evenly over (0, 1.5), the mean of the square is 1.5^2 / 3 = 0.75.
    """
    return _power_table(SQRT8_LEVELS, 2, 0.75)


def u4_table() -> NDArray[np.float32]:
    """Decoded value of each u4 code, in units of the row's largest entry ``(16,)`` (CACHE-118).

    As in ``sqrt8_table``, code 1 decodes to the centroid of its bin: the mean of ``x^3`` over (0, 1.5) is 0.84375.
    """
    return _power_table(U4_LEVELS, 3, 0.84375)


def u4_thresholds() -> NDArray[np.float32]:
    """Smallest share of the largest entry for codes from 2 on: no rule says how to round a cube root (CACHE-117)."""
    return (((np.arange(2, U4_LEVELS + 1) - 0.5) / U4_LEVELS) ** 3).astype(np.float32)


def _power_table(levels: int, power: int, centroid: float) -> NDArray[np.float32]:
    powers = np.arange(levels + 1, dtype=np.float64) ** power
    powers[1] = centroid
    return (powers / float(levels**power)).astype(np.float32)


def encode(codec: str, probs: FloatArray) -> NDArray[Any]:
    """Code probability rows ``(..., S)``, float32 or float64, as ``code_dtype`` (CACHE-112, CACHE-114, CACHE-117).

    Rows that are all zero stay so. Raises ``argument-value`` (codec), ``argument-dtype``, ``not-finite``, and
    ``not-a-distribution`` for a negative entry.
    """
    dtype = code_dtype(codec)
    is_float = probs.dtype in (np.float32, np.float64)
    need(is_float, "argument-dtype", "probs", "be float32 or float64", probs.dtype, spec_id="CACHE-111")
    values = probs.astype(np.float32)
    check_finite("probs", values, "CACHE-111")
    least = values.min(initial=0.0)
    need(least >= 0, "not-a-distribution", "probs", "not be negative", least, spec_id="CACHE-111")
    values[values < SMALLEST_PROB] = 0.0  # -0.0 becomes 0.0 as well
    if dtype == np.float32:
        return values
    row_max = values.max(axis=-1, keepdims=True, initial=0.0)
    shares = np.divide(values, np.where(row_max > 0, row_max, 1.0), dtype=np.float32)
    if codec == "sqrt8-row":
        codes = np.clip(np.rint(np.sqrt(shares) * np.float32(SQRT8_LEVELS)), 1, SQRT8_LEVELS)
        return np.where(values > 0, codes, 0).astype(np.uint8)
    return np.where(values > 0, np.searchsorted(u4_thresholds(), shares, side="right") + 1, 0).astype(np.uint8)


def decode(codec: str, codes: NDArray[Any]) -> NDArray[np.float32]:
    """Probability rows ``(..., S)`` float32 from codes (CACHE-112, CACHE-115, CACHE-118).

    Rows of the lossy codecs sum to one, or are zero where every code is zero. Raises ``argument-value`` (codec, a u4
    code above 15), ``argument-dtype``.
    """
    check_dtype(codec, codes)
    if codec == "float32":
        return codes.astype(np.float32)
    values: NDArray[np.float32] = (u4_table() if codec == "u4" else sqrt8_table())[codes]
    mass = values.sum(axis=-1, keepdims=True, dtype=np.float64)
    return (values / np.where(mass > 0, mass, 1.0)).astype(np.float32)


def check_codes(codec: str, codes: NDArray[Any]) -> None:
    """Reject codes that no encoder produces, such as the NaN of a broken teacher (CACHE-110)."""
    check_dtype(codec, codes)
    if codec != "float32":
        return
    name, least = f"codes of {codec}", codes.min(initial=0.0)
    check_finite(name, codes, "CACHE-111")
    need(not np.signbit(codes).any(), "not-a-distribution", name, "not be negative", least, spec_id="CACHE-111")


def check_dtype(codec: str, codes: NDArray[Any]) -> None:
    """Refuse codes of another type (``argument-dtype``), or beyond the codec's last code (``argument-value``)."""
    name, dtype = f"codes of {codec}", code_dtype(codec)
    need(codes.dtype == dtype, "argument-dtype", name, f"be {dtype}", codes.dtype, spec_id="CACHE-110")
    largest, last = codes.max(initial=0), U4_LEVELS
    need(codec != "u4" or largest <= last, "argument-value", name, f"be at most {last}", largest, spec_id="CACHE-110")


SUPPORTS: Final = ("full", "causal")


def packed_size(codec: str, support: str, num_heads: int, length: int, num_keys: int | None = None) -> int:
    """Bytes of one blob: heads x entries of the support x bits of a code, in whole bytes (CACHE-125)."""
    return -(-code_bits(codec) * num_codes(support, num_heads, length, num_keys) // 8)


def num_codes(support: str, num_heads: int, length: int, num_keys: int | None = None) -> int:
    """Codes of one blob: heads x entries of the support; as many keys as rows, unless ``num_keys`` is given."""
    check_option("support", support, SUPPORTS, "CACHE-125")
    num_keys = length if num_keys is None else num_keys
    got, is_square = f"{length} rows and {num_keys} keys", support != "causal" or num_keys == length
    need(is_square, "argument-shape", "maps of causal support", "be square", got, spec_id="CACHE-128")
    return num_heads * (length * num_keys if support == "full" else length * (length + 1) // 2)


def pack(codes: NDArray[Any], support: str, codec: str | None = None) -> NDArray[np.uint8]:
    """The codes of one layer as bytes: head by head, row by row, little endian (CACHE-126).

    ``codes`` are ``(H_s, n, n)``, with full support also ``(H_s, n, S)``; zero is probability zero in every codec.
    With causal support nothing stands above the diagonal (``support-mismatch``). ``u4`` is to be named as ``codec``:
    two of its codes share a byte. Raises ``argument-shape``, ``argument-value`` (support, codec), ``argument-dtype``.
    """
    check_option("support", support, SUPPORTS, "CACHE-125")
    if codec is not None:
        check_dtype(codec, codes)
    fits = codes.ndim == 3 and (support != "causal" or codes.shape[1] == codes.shape[2])
    need(fits, "argument-shape", "codes", "be (H_s, n, n)", codes.shape, spec_id="CACHE-125")
    stored = codes
    if support == "causal":
        stored = codes.reshape(len(codes), -1)[:, _lower_triangle(codes.shape[1])]
        if np.count_nonzero(stored) != np.count_nonzero(codes):
            head, row, key = np.argwhere(np.triu(codes, 1))[0]
            position = f"{codes[head, row, key]} at head {head}, row {row}, key {key}"
            message = f"codes must be zero above the diagonal for causal support; got {position}"
            raise ShdError("support-mismatch", message, "CACHE-127")
    little = np.ascontiguousarray(stored, dtype=codes.dtype.newbyteorder("<")).reshape(-1)
    if codec != "u4":
        return little.view(np.uint8)
    # Two codes a byte, the first in the lower half; a last one alone is followed by zero bits.
    even = np.pad(little, (0, len(little) % 2))
    return np.asarray(even[0::2] | (even[1::2] << np.uint8(4)), np.uint8)


def unpack(
    blob: NDArray[np.uint8], codec: str, support: str, num_heads: int, length: int, num_keys: int | None = None
) -> NDArray[Any]:
    """The inverse of ``pack`` (CACHE-130): codes ``(H_s, length, num_keys)``, which may share memory with ``blob``.

    Without ``num_keys`` there are as many as rows. Raises ``argument-value`` (codec, support), and ``argument-shape``
    for a blob of the wrong size.
    """
    num_keys = length if num_keys is None else num_keys
    size = packed_size(codec, support, num_heads, length, num_keys)
    layout = f"{num_heads} heads x {length} rows x {num_keys} keys ({codec}, {support})"
    check_blob("blob", blob, size, layout, "CACHE-130")
    dtype = code_dtype(codec)
    if codec == "u4":
        halves = np.stack([blob & 0x0F, blob >> 4], axis=-1).reshape(-1)
        stored = halves[: num_codes(support, num_heads, length, num_keys)]
    else:
        stored = blob.view(dtype.newbyteorder("<")).astype(dtype, copy=False)
    if support == "full":
        return stored.reshape(num_heads, length, num_keys)
    codes = np.zeros((num_heads, length * length), dtype=dtype)
    codes[:, _lower_triangle(length)] = stored.reshape(num_heads, -1)
    return codes.reshape(num_heads, length, length)


def _lower_triangle(length: int) -> NDArray[np.intp]:
    # Positions in the flattened map, row by row; faster to index with than a mask.
    return np.flatnonzero(np.tri(length, dtype=np.bool_))


VECTOR_CODECS: Final = ("float32", "float16", "int8")
"""Of rows that are vectors: hidden states, embeddings and last states."""

INT8_LEVELS: Final = 127
"""Code of a vector's largest component; -128 is not used."""


def to_float16(name: str, values: NDArray[Any], remedy: str = "use int8") -> NDArray[np.float16]:
    """Finite values rounded to nearest even; ``argument-value`` where one would become infinite."""
    with np.errstate(over="ignore"):
        codes = values.astype(np.float16)
    if not np.isfinite(codes).all():
        message = f"{name} must be below 65520 for float16; got {np.abs(values).max():g}: {remedy}"
        raise ShdError("argument-value", message, "CACHE-147")
    return codes


def to_int8(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes ``(..., d)`` and steps ``(...)`` of finite vectors."""
    largest = codes = np.abs(values)
    while largest.shape[-1] > 1:  # by halves: NumPy is slow along a short axis
        half = (largest.shape[-1] + 1) // 2
        largest = np.maximum(largest[..., :half], largest[..., -half:])
    steps = np.asarray(largest[..., 0] / np.float32(INT8_LEVELS), np.float32)
    steps[steps < np.finfo(np.float32).tiny] = 0.0  # subnormal numbers, which accelerators flush
    np.divide(values, np.where(steps > 0, steps, np.float32(np.inf))[..., None], out=codes)
    return np.rint(codes, out=codes).astype(np.int8), steps


def largest_move(codec: str, values: NDArray[Any]) -> NDArray[np.float64]:
    """How far coding moves a component of each vector ``(..., d)`` at most: u of CACHE-151, and float32 rounding."""
    largest = np.abs(values).max(axis=-1).astype(np.float64)
    if codec == "int8":
        return np.asarray(largest / (2 * INT8_LEVELS) * (1 + 2.0**-14), dtype=np.float64)
    return np.asarray(np.maximum(largest * 2.0**-11, 2.0**-25) * (1 + 2.0**-10), dtype=np.float64)


class RowError(ABC):
    """The error of coding rows: a dataclass of numbers whose names end in ``_mean`` or ``_max``, and ``rows``."""

    rows: int

    @abstractmethod
    def describe(self) -> str:
        """For a listing and a report."""


@dataclass(frozen=True)
class CodecError(RowError):
    """Error measured over rows that have mass; of none every number is 0."""

    kl_mean: float  # of KL(exact || decoded), in nats per row
    kl_max: float
    tv_mean: float  # total variation, half the sum of absolute differences, in [0, 1]
    rows: int  # that were measured

    def describe(self) -> str:
        return f"KL {self.kl_mean:.2g} nats per row, at most {self.kl_max:.2g}; total variation {self.tv_mean:.2%}"


@dataclass(frozen=True)
class LogitsError(RowError):
    """Error of rows of logits that count (CACHE-170); of none every number is 0.

    KL(exact || stored) in nats and total variation are over the classes that a record tells apart: all of them, or
    those of the head and the rest as one. So they are what rounding costs. ``gradient_mean``, of ``|p' - p| / |p|``
    with p the teacher's whole row and p' what the record says of it, counts what is left out too: it is the error of
    the gradient of forward KL by the logits for a student that spreads its own tail evenly.
    """

    kl_mean: float
    kl_max: float
    tv_mean: float
    gradient_mean: float
    rows: int  # that were measured

    def describe(self) -> str:
        return f"KL {self.kl_mean:.2g} nats per row from rounding; gradient {self.gradient_mean:.2%} of a row's"


@dataclass(frozen=True)
class HiddenError(RowError):
    """Error of rows of vectors that count, over all layers (CACHE-178); of none every number is 0."""

    relative_mean: float  # of |x' - x| / |x|, with x' as decoded; 0 for a row of zeros
    relative_max: float
    rows: int  # that were measured

    def describe(self) -> str:
        return f"{self.relative_mean:.2%} of a row's norm, at most {self.relative_max:.2%}"


_TILE_BYTES: Final = 2**24
"""Of rows that are compared in float64 at once."""

_Error = TypeVar("_Error", bound=RowError)


def kl_bound(codec: str, num_positive: Any, largest: Any) -> Any:
    """The most that a codec can cost a row, in nats, stated before anything is coded (CACHE-121).

    Of a row with ``num_positive`` positive entries, of which m is the ``largest``. Before normalisation
    ``KL <= sum (p log(p/q) - p + q)``. ``sqrt8-row``: with x = 255 sqrt(p/m), a term in units of m / 255^2 is about
    2 e^2 for codes from 2 on, |e| <= 1/2, and below 0.98 for code 1. ``u4``: with x = 15 (p/m)^(1/3), in units of
    m / 15^3 about 4.5 c e^2, at most 16.4.
    """
    return num_positive * largest * {"float32": 0.0, "sqrt8-row": 1 / 255**2, "u4": 1 / 206}[codec]


def row_tv_bound(codec: str, probs: NDArray[Any]) -> NDArray[np.float64]:
    """Bound on the total variation of each row ``(..., L)``: Pinsker's inequality on ``kl_bound`` (CACHE-121)."""
    bound = kl_bound(codec, (probs >= SMALLEST_PROB).sum(axis=-1), probs.max(axis=-1, initial=0.0).astype(np.float64))
    return np.asarray(np.sqrt(bound / 2), dtype=np.float64)


def codec_error(probs: NDArray[Any], decoded: NDArray[Any]) -> CodecError:
    """Compare exact rows ``(..., L, S)`` with decoded ones, in float64 (CACHE-120); ``argument-shape``.

    Rows without mass are not measured; ``kl_max`` is infinite if a decoder lost part of the support.
    """
    fits, rule = probs.shape == decoded.shape, f"have the shape of probs {probs.shape}"
    need(fits, "argument-shape", "decoded", rule, decoded.shape, spec_id="CACHE-120")
    exact, coded = (maps.reshape(-1, maps.shape[-1]) for maps in (probs, decoded))
    size = max(1, _TILE_BYTES // (8 * max(exact.shape[-1], 1)))
    tiles = (_tile_error(exact[row : row + size], coded[row : row + size]) for row in range(0, len(exact), size))
    return merge_errors(CodecError, tiles)


def _tile_error(probs: NDArray[Any], decoded: NDArray[Any]) -> CodecError:
    """Of the rows ``(rows, S)`` that have mass."""
    exact = probs.astype(np.float64)
    exact[exact < SMALLEST_PROB] = 0.0
    counted = exact.sum(axis=-1) > 0
    exact, coded = exact[counted], decoded[counted].astype(np.float64)
    exact /= exact.sum(axis=-1, keepdims=True)
    ratios = np.ones_like(exact)
    with np.errstate(divide="ignore"):
        np.divide(exact, coded, out=ratios, where=exact > 0)
    log_ratios = np.log(ratios, out=ratios)
    kl = np.maximum((exact * log_ratios).sum(axis=-1), 0.0)  # rounding can leave -1e-17
    if not len(kl):
        return CodecError(0.0, 0.0, 0.0, 0)
    return CodecError(
        float(kl.mean()), float(kl.max()), float(np.abs(exact - coded).sum(axis=-1).mean() / 2), len(kl)
    )


def merge_errors(kind: type[_Error], errors: Iterable[_Error]) -> _Error:
    """The error over all rows of several measurements: means are weighted by rows; of no row every number is 0."""
    parts = list(errors)
    rows = sum(error.rows for error in parts)
    numbers: dict[str, float] = {}
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if field.name.endswith("_mean"):
            numbers[field.name] = sum(getattr(error, field.name) * error.rows for error in parts) / max(rows, 1)
        elif field.name.endswith("_max"):
            numbers[field.name] = max((getattr(error, field.name) for error in parts if error.rows), default=0.0)
    return kind(rows=rows, **numbers)  # type: ignore[call-arg]
