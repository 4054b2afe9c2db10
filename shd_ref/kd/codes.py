"""Sparse targets as bytes (CACHE-166): rows of one size, each readable by itself, with a stated error.

The head's probabilities are coded by their cube roots: these lie between steps of equal size in the probability,
which lose small classes, and in its logarithm, which round large ones as coarsely as small ones. At the same bits
they left the least error in a student's gradient (``benchmarks/kd_targets.py``). Ids are Elias-Fano codes, below
``log2(V / m) + 3`` bits each; ids in order of probability would cost ``log2(V)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError

Array: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.uint8]
Ids: TypeAlias = NDArray[np.int64]

MAX_VOCABULARY = 1 << 24
_EPS = 2.0**-11  # half a unit in the last place of a float16, relative
_TINY = 2.0**-25  # and absolute, below its normal numbers


class DecodedRows(NamedTuple):
    """What a row says: the first fields of ``TopkTargets``."""

    head_ids: Ids  # (R, head), ascending
    log_probs: Array  # (R, head)
    log_tail: Array  # (R,)


@dataclass(frozen=True)
class RowCode:
    """How rows are coded: of V classes ``head`` with a probability each, and the mass of the rest."""

    vocab_size: int
    head: int
    value_bits: int = 8

    def __post_init__(self) -> None:
        in_range = {
            "vocab_size": 1 <= self.vocab_size <= MAX_VOCABULARY,
            "head": 1 <= self.head <= self.vocab_size,
            "value_bits": 4 <= self.value_bits <= 16,
        }
        ranges = "vocab_size 1 to 2^24, head 1 to vocab_size and value_bits 4 to 16"
        for name, fits in in_range.items():
            if not fits:
                message = f"a code of rows needs {ranges}; got {name} = {getattr(self, name)}"
                raise ShdError("argument-value", message)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return sum(self._parts())

    def _parts(self) -> tuple[int, int, int]:
        """Bytes of ``log_tail``, of the head's codes, and of its ids."""
        return 2, -(-self.head * self.value_bits // 8), _id_bytes(self.head, self.vocab_size)

    def encode(self, head_ids: NDArray[Any], log_probs: NDArray[Any], log_tail: NDArray[Any]) -> Bytes:
        """Rows as bytes ``(R, row_bytes)``; ids ascend without repeats, and ``log_tail`` may be -inf.

        Raises ``argument-value``: ids out of order or range, numbers that float16 cannot hold.
        """
        ids, values = np.asarray(head_ids), np.asarray(log_probs, np.float64)
        _check_ids(ids, self.vocab_size, "argument-value")
        roots = np.exp((values - values.max(axis=-1, keepdims=True)) / 3)
        codes = np.maximum(np.rint(roots * self._levels), 1).astype(np.int64)
        header = _as_half(np.asarray(log_tail, np.float64)[:, None], "log_tail").astype("<f2").view(np.uint8)
        packed = _pack(codes, self.value_bits), _pack_ids(ids, self.vocab_size)
        return np.concatenate((header, *packed), axis=-1)

    def decode(self, rows: Bytes) -> DecodedRows:
        """What was coded, within ``bound``; ``cache-corrupt`` for bytes that ``encode`` does not write."""
        rows = np.asarray(rows)
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != self.row_bytes:
            raise _corrupt(f"rows must be bytes (R, {self.row_bytes}); got {rows.dtype} {rows.shape}")
        numbers, values, _ = self._parts()
        log_tail = np.ascontiguousarray(rows[:, :numbers]).view("<f2").astype(np.float64)[:, 0]
        if not (log_tail <= 0.0).all():  # nor NaN
            raise _corrupt("log_tail of a row is not a number, or above 0")
        head_ids = _unpack_ids(rows[:, numbers + values :], self.head, self.vocab_size)
        shares = self._shares(rows)
        log_probs = np.log(shares / shares.sum(axis=-1, keepdims=True)) + _log_rest(log_tail)[:, None]
        return DecodedRows(head_ids, log_probs, log_tail)

    def bound(self, rows: Bytes) -> Array:
        """How far a decoded probability of the head may be from what was encoded ``(R, head)``.

        With h half a step, a class whose share of the largest is ``x^3`` is off by ``(x + 2h)^3 - x^3`` at most, and
        the scale that all share by the sum of these; ``log_tail`` moves that scale by what float16 rounds. It holds
        for rows that summed to one.
        """
        shares = self._shares(rows)
        off = (np.cbrt(shares) + 1 / self._levels) ** 3 - shares
        whole, total = shares.sum(axis=-1, keepdims=True), off.sum(axis=-1, keepdims=True)
        log_tail = np.ascontiguousarray(rows[:, :2]).view("<f2").astype(np.float64)
        head = np.exp(_log_rest(log_tail))
        moved = np.where(np.isneginf(log_tail), 0.0, np.abs(log_tail) * 2 * _EPS + _TINY)
        by_tail = np.exp(log_tail + moved) * moved
        certain = whole > total
        scaled = head * (off + shares * total / whole) / np.where(certain, whole - total, 1.0)
        bound: Array = np.where(certain, scaled, 1.0) + 2 * by_tail * shares / whole + 1e-12
        return bound

    def _shares(self, rows: Bytes) -> Array:
        """The head's probabilities as shares of the largest ``(R, head)``."""
        numbers, values, _ = self._parts()
        codes = _unpack(rows[:, numbers : numbers + values], self.head, self.value_bits)
        if codes.size and codes.min() < 1:
            raise _corrupt("the code of a probability must be at least 1")
        shares: Array = (codes / self._levels) ** 3
        return shares

    @property
    def _levels(self) -> int:
        return (1 << self.value_bits) - 1


def _log_rest(log_tail: Array) -> Array:
    """``log(1 - exp(log_tail))``, stable; the least that float16 can tell from nothing where it rounded to 0."""
    return np.log(-np.expm1(np.minimum(log_tail, -_TINY)))


def _as_half(numbers: Array, name: str) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        halves = numbers.astype(np.float16)
    if not (halves < np.inf).all():
        raise ShdError("argument-value", f"{name} must be numbers that float16 holds; got {numbers.max():.6g}")
    return halves


def _id_layout(count: int, vocab_size: int) -> tuple[int, int, int]:
    """The low bits of an id, the bytes of all of these, and the length of the string of high bits."""
    low = max(vocab_size // count, 1).bit_length() - 1
    return low, -(-count * low // 8), count + ((vocab_size - 1) >> low) + 1


def _id_bytes(count: int, vocab_size: int) -> int:
    _, low_bytes, high = _id_layout(count, vocab_size)
    return low_bytes + -(-high // 8)


def _pack_ids(ids: NDArray[Any], vocab_size: int) -> Bytes:
    count = ids.shape[1]
    low, _, high = _id_layout(count, vocab_size)
    places = (ids >> low) + np.arange(count)
    bits = np.zeros((len(ids), high), np.uint8)
    np.put_along_axis(bits, places, 1, -1)
    return np.concatenate((_pack(ids & ((1 << low) - 1), low), np.packbits(bits, axis=-1, bitorder="little")), -1)


def _unpack_ids(rows: Bytes, count: int, vocab_size: int) -> Ids:
    low, at, _ = _id_layout(count, vocab_size)
    bits = np.unpackbits(rows[:, at:], axis=-1, bitorder="little")
    if (bits.sum(axis=-1, dtype=np.int64) != count).any():
        raise _corrupt(f"the ids of a row must be {count}")
    places = np.nonzero(bits)[1].reshape(len(rows), count)
    ids: Ids = ((places - np.arange(count)) << low) | _unpack(rows[:, :at], count, low)
    _check_ids(ids, vocab_size, "cache-corrupt")
    return ids


def _pack(values: NDArray[Any], width: int) -> Bytes:
    """``width`` bits per value, lowest first."""
    bits = (values[..., None] >> np.arange(width)) & 1
    return np.packbits(bits.reshape(len(values), -1).astype(np.uint8), axis=-1, bitorder="little")


def _unpack(rows: Bytes, count: int, width: int) -> Ids:
    bits = np.unpackbits(rows, axis=-1, bitorder="little", count=count * width)
    values: Ids = bits.reshape(len(rows), count, width).astype(np.int64) @ (np.int64(1) << np.arange(width))
    return values


def _check_ids(ids: NDArray[Any], vocab_size: int, code: str) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size or (np.diff(ids, axis=-1) < 1).any()):
        raise ShdError(code, f"ids of a row must ascend within 0 to {vocab_size - 1}, without repeats")


def _corrupt(problem: str) -> ShdError:
    return ShdError("cache-corrupt", f"{problem}: the bytes are damaged, or of another code")


class TopkTargets(NamedTuple):
    """The k likeliest classes of every row, and the mass of all others in one number."""

    ids: Ids  # (..., k), ascending
    log_probs: NDArray[np.float64]  # (..., k), log P at the temperature
    log_tail: NDArray[np.float64]  # (...), log of the mass of all others; -inf where there are none
    temperature: float
    vocab_size: int
