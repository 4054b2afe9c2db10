"""Sparse targets as bytes (CACHE-166): rows of one size, each readable by itself, with a stated error.

The head's probabilities are coded by their cube roots: these lie between steps of equal size in the probability,
which lose small classes, and in its logarithm, which round large ones as coarsely as small ones. At the same bits
they left the least error in a student's gradient (``benchmarks/kd_targets.py``). Ids are Elias-Fano codes, below
``log2(V / m) + 3`` bits each; ids in order of probability would cost ``log2(V)``.
"""

from __future__ import annotations

import math
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
    """What a row says: the fields of ``TopkTargets``, or with draws, by ``slots``, of ``SampledTargets``."""

    head_ids: Ids  # (R, head), ascending
    log_probs: Array  # (R, head)
    log_tail: Array  # (R,)
    draw_ids: Ids  # (R, draws), ascending
    entropy: Array | None  # (R,), with draws

    def slots(self) -> tuple[Ids, Array]:
        """Ids and weights ``(R, head + draws)``, as ``SampledTargets`` has them."""
        share = np.exp(self.log_tail)[:, None] / max(self.draw_ids.shape[1], 1)
        weights = np.concatenate((np.exp(self.log_probs), np.broadcast_to(share, self.draw_ids.shape)), axis=-1)
        return np.concatenate((self.head_ids, self.draw_ids), axis=-1), weights


@dataclass(frozen=True)
class RowCode:
    """How rows are coded: of V classes ``head`` with a probability each, and ``draws`` from the rest."""

    vocab_size: int
    head: int
    draws: int = 0
    value_bits: int = 8

    def __post_init__(self) -> None:
        in_range = {
            "vocab_size": 1 <= self.vocab_size <= MAX_VOCABULARY,
            "head": 0 <= self.head <= self.vocab_size,
            "draws": 0 <= self.draws <= MAX_VOCABULARY and not (self.draws and self.head == self.vocab_size),
            "value_bits": 4 <= self.value_bits <= 16,
        }
        ranges = "vocab_size 1 to 2^24, head 0 to vocab_size, draws of at least 0 (0 with a whole head)"
        for name, fits in in_range.items():
            if not fits:
                message = f"a code of rows needs {ranges} and value_bits 4 to 16; got {name} = {getattr(self, name)}"
                raise ShdError("argument-value", message)
        if not self.head and not self.draws:
            raise ShdError("argument-value", "a code of rows needs a head or draws; got neither")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return sum(self._parts())

    def _parts(self) -> tuple[int, int, int, int]:
        """Bytes of the numbers, of the head's codes, and of both lists of ids."""
        numbers = 2 + 2 * (self.draws > 0)
        values = -(-self.head * self.value_bits // 8)
        return numbers, values, _id_bytes(self.head, self.vocab_size), _id_bytes(self.draws, self.vocab_size)

    @property
    def max_entropy(self) -> float:
        """log V as binary16 holds it: the largest entropy of a row, rounded as an entropy is."""
        return float(np.float16(math.log(self.vocab_size)))

    def encode(
        self,
        head_ids: NDArray[Any],
        log_probs: NDArray[Any],
        log_tail: NDArray[Any],
        draw_ids: NDArray[Any] | None = None,
        entropy: NDArray[Any] | None = None,
    ) -> Bytes:
        """Rows as bytes ``(R, row_bytes)``; ids ascend, a head's without repeats, and ``log_tail`` may be -inf.

        Raises ``argument-value``: ids out of order or range, numbers that float16 cannot hold.
        """
        log_tail = np.asarray(log_tail, np.float64)
        draws = np.zeros((len(log_tail), 0), np.int64) if draw_ids is None else np.asarray(draw_ids)
        for ids, least in ((np.asarray(head_ids), 1), (draws, 0)):
            _check_ids(ids, self.vocab_size, least, "argument-value")
        fields = [_as_half(log_tail, "log_tail")]
        parts: list[Bytes] = []
        if self.head:
            values = np.asarray(log_probs, np.float64)
            roots = np.exp((values - values.max(axis=-1, keepdims=True)) / 3)
            codes = np.maximum(np.rint(roots * self._levels), 1).astype(np.int64)
            parts += [_pack(codes, self.value_bits), _pack_ids(np.asarray(head_ids), self.vocab_size)]
        if self.draws:
            fields.append(_as_half(np.asarray(entropy, np.float64), "entropy"))
            parts.append(_pack_ids(draws, self.vocab_size))
        header = np.stack(fields, axis=-1).astype("<f2").view(np.uint8)
        return np.concatenate((header, *parts), axis=-1)

    def decode(self, rows: Bytes) -> DecodedRows:
        """What was coded, within ``bound``; ``cache-corrupt`` for bytes that ``encode`` does not write."""
        rows = np.asarray(rows)
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != self.row_bytes:
            raise _corrupt(f"rows must be bytes (R, {self.row_bytes}); got {rows.dtype} {rows.shape}")
        numbers, values, head_bytes, _ = self._parts()
        header = np.ascontiguousarray(rows[:, :numbers]).view("<f2").astype(np.float64)
        log_tail = header[:, 0]
        if np.isnan(header).any() or (log_tail > 0.0).any() or not np.isfinite(header[:, 1:]).all():
            raise _corrupt("a number of a row is not finite, or log_tail is above 0")
        if (header[:, 1:] < 0.0).any() or (header[:, 1:] > self.max_entropy).any():
            raise _corrupt(f"the entropy of a row must be 0 to log {self.vocab_size}")
        at = numbers + values
        head_ids = _unpack_ids(rows[:, at : at + head_bytes], self.head, self.vocab_size, 1)
        draw_ids = _unpack_ids(rows[:, at + head_bytes :], self.draws, self.vocab_size, 0)
        log_probs = np.zeros((len(rows), 0))
        if self.head:
            shares = self._shares(rows)
            log_probs = np.log(shares / shares.sum(axis=-1, keepdims=True)) + _log_rest(log_tail)[:, None]
        return DecodedRows(head_ids, log_probs, log_tail, draw_ids, header[:, -1] if self.draws else None)

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
        numbers, values, _, _ = self._parts()
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
    _, low_bytes, high = _id_layout(count, vocab_size) if count else (0, 0, 0)
    return low_bytes + -(-high // 8)


def _pack_ids(ids: NDArray[Any], vocab_size: int) -> Bytes:
    count = ids.shape[1]
    low, _, high = _id_layout(count, vocab_size)
    places = (ids >> low) + np.arange(count)
    bits = np.zeros((len(ids), high), np.uint8)
    np.put_along_axis(bits, places, 1, -1)
    return np.concatenate((_pack(ids & ((1 << low) - 1), low), np.packbits(bits, axis=-1, bitorder="little")), -1)


def _unpack_ids(rows: Bytes, count: int, vocab_size: int, least: int) -> Ids:
    if not count:
        return np.zeros((len(rows), 0), np.int64)
    low, at, _ = _id_layout(count, vocab_size)
    bits = np.unpackbits(rows[:, at:], axis=-1, bitorder="little")
    if (bits.sum(axis=-1, dtype=np.int64) != count).any():
        raise _corrupt(f"the ids of a row must be {count}")
    places = np.nonzero(bits)[1].reshape(len(rows), count)
    ids: Ids = ((places - np.arange(count)) << low) | _unpack(rows[:, :at], count, low)
    _check_ids(ids, vocab_size, least, "cache-corrupt")
    return ids


def _pack(values: NDArray[Any], width: int) -> Bytes:
    """``width`` bits per value, lowest first."""
    bits = (values[..., None] >> np.arange(width)) & 1
    return np.packbits(bits.reshape(len(values), -1).astype(np.uint8), axis=-1, bitorder="little")


def _unpack(rows: Bytes, count: int, width: int) -> Ids:
    bits = np.unpackbits(rows, axis=-1, bitorder="little", count=count * width)
    values: Ids = bits.reshape(len(rows), count, width).astype(np.int64) @ (np.int64(1) << np.arange(width))
    return values


def _check_ids(ids: NDArray[Any], vocab_size: int, least: int, code: str) -> None:
    if not ids.size:
        return
    if ids.min() < 0 or ids.max() >= vocab_size or (np.diff(ids, axis=-1) < least).any():
        message = f"ids of a row must ascend within 0 to {vocab_size - 1}, those of a head without repeats"
        raise ShdError(code, message)


def _corrupt(problem: str) -> ShdError:
    return ShdError("cache-corrupt", f"{problem}: the bytes are damaged, or of another code")


class TopkTargets(NamedTuple):
    """The k likeliest classes of every row, and the mass of all others in one number (KD-8)."""

    ids: Ids  # (..., k), ascending
    log_probs: NDArray[np.float64]  # (..., k), log P at the temperature
    log_tail: NDArray[np.float64]  # (...), log of the mass of all others; -inf where there are none
    temperature: float
    vocab_size: int


class SampledTargets(NamedTuple):
    """Classes kept and drawn, with weights that make any sum over the vocabulary unbiased (KD-12, KD-13)."""

    ids: Ids  # (..., keep + n), kept classes first; may repeat
    weights: NDArray[np.float64]  # (..., keep + n)
    entropy: NDArray[np.float64]  # (...), that of the whole row
    temperature: float
    vocab_size: int
