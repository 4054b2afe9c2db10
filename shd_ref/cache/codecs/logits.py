"""Rows of logits as codes, and what that costs (CACHE-164 to CACHE-170): likeliest classes, or all.

The head's probabilities are coded by their cube roots: these lie between steps of equal size in the probability,
which lose small classes, and in its logarithm, which round large ones as coarsely as small ones. At the same bits
they left the least error in a student's gradient (``benchmarks/kd_targets.py``). Ids are Elias-Fano codes, below
``log2(V / m) + 3`` bits each; ids in order of probability would cost ``log2(V)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import LogitsError, merge_errors
from shd_ref.errors import ShdError, need
from shd_ref.tolerances import load_tolerances

LOGITS_CODECS: Final = ("topk", "float16")

_HELD_NUMBERS: Final = 1 << 18
"""Numbers of a few rows that are worked on at once, in a processor's cache: a whole sample's may take gigabytes."""

_BLOCK: Final = 64
"""Neighbours of which the largest is looked at first, where few of many numbers are wanted."""

_HELD_BYTES: Final = 1 << 20
"""Coded bytes that are decoded at once: on the way every bit is a number."""

Array: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.uint8]
Ids: TypeAlias = NDArray[np.int64]


def pick_classes(logits: NDArray[Any], head: int, temperature: float) -> DecodedRows:
    """The likeliest classes of every row with the mass of the rest.

    Of equal logits ``(R, V)`` at the edge those of lower ids.
    """
    return _joined(_pick(logits[rows], head, temperature) for rows in _slices(*logits.shape))


def _joined(parts: Iterable[DecodedRows]) -> DecodedRows:
    ids, log_probs, log_tail = map(np.concatenate, zip(*parts, strict=True))
    return DecodedRows(ids, log_probs, log_tail)


def check_row_numbers(rows: NDArray[np.uint8]) -> None:
    """Refuse rows whose numbers no encoder makes (CACHE-169): ``not-finite``, ``argument-value``."""
    log_tail = np.ascontiguousarray(rows[:, :2]).view("<f2")
    name, largest = "log_tail of a row of logits", log_tail.max(initial=-np.inf)
    need(not np.isnan(largest), "not-finite", name, "be a number", "NaN", spec_id="CACHE-169")
    need(bool(largest <= 0), "argument-value", name, "be at most 0", largest, spec_id="CACHE-169")


def check_padding(logits: NDArray[Any], vocab_size: int, temperature: float) -> None:
    """Refuse to cut classes from ``vocab_size`` on unless they have next to no mass (CACHE-168)."""
    if logits.shape[1] == vocab_size or not len(logits):
        return
    allowed = float(load_tolerances()["constants"]["cut_mass"])
    for rows in _slices(*logits.shape):
        mass = np.exp(_log_softmax(logits[rows], temperature)[:, vocab_size:]).sum(axis=-1).max()
        rule = f"cut padding alone, with a mass of at most {allowed:g} in every row"
        got = f"{mass:.6g} on the classes from {vocab_size} to {logits.shape[1] - 1}"
        need(bool(mass <= allowed), "argument-value", "vocab_size", rule, got, spec_id="CACHE-168")  # nor NaN


def logits_error(
    logits: NDArray[Any], temperature: float, decode: Callable[[slice], DecodedRows | NDArray[Any]]
) -> LogitsError:
    """The error of coded logits ``(R, V)`` (CACHE-170), in bounded memory; ``decode`` gives rows as stored."""
    slices = _slices(*logits.shape)
    return merge_errors(LogitsError, (_error(logits[rows], temperature, decode(rows)) for rows in slices))


def rows_moved(
    logits: NDArray[Any], temperature: float, decode: Callable[[slice], DecodedRows | NDArray[Any]]
) -> Array:
    """Total variation ``(R,)`` between stored rows and a teacher's, as far as a record tells (CACHE-91)."""
    parts: list[Array] = []
    for rows in _slices(*logits.shape):
        exact, coded = _told_apart(_log_softmax(logits[rows], temperature), temperature, decode(rows))
        parts.append(np.abs(np.exp(exact) - np.exp(coded)).sum(axis=-1) / 2)
    return np.concatenate(parts)


def _pick(logits: NDArray[Any], head: int, temperature: float) -> DecodedRows:
    ids = np.stack([_largest(row, head) for row in logits])
    likeliest = np.take_along_axis(logits, ids, -1).astype(np.float64) / temperature
    # The rest in single precision where the teacher's is no better: its sum is stored in binary16.
    rest = logits.astype(np.promote_types(logits.dtype, np.float32))
    np.put_along_axis(rest, ids, -np.inf, -1)
    peak = rest.max(axis=-1, keepdims=True)  # of the rest, so that a tail of any size has a logarithm
    rest -= np.where(np.isneginf(peak), 0.0, peak).astype(rest.dtype)
    if temperature != 1:
        rest /= rest.dtype.type(temperature)
    shares = np.exp(rest)
    sums, peaks = shares.sum(axis=-1, dtype=np.float64), peak[:, 0].astype(np.float64) / temperature
    with np.errstate(divide="ignore"):  # there may be no rest
        log_rest = np.log(sums) + peaks
    whole = np.logaddexp(log_rest, _logsumexp(likeliest))
    return DecodedRows(ids, likeliest - whole[:, None], log_rest - whole)


def _largest(row: NDArray[Any], count: int) -> NDArray[np.int64]:
    """The ids of the largest numbers, ascending; of equal ones at the edge the lower ids, on every machine."""
    candidates = row
    whole = len(row) // _BLOCK
    if whole > count:  # as many blocks hold a number of at least this: few others do
        largest = row[: whole * _BLOCK].reshape(whole, _BLOCK).max(axis=1)
        candidates = row[row >= np.partition(largest, whole - count)[whole - count]]
    edge = np.partition(candidates, len(candidates) - count)[len(candidates) - count]
    ids: NDArray[np.int64] = np.flatnonzero(row >= edge)
    if len(ids) > count:
        equal = ids[row[ids] == edge]
        ids = np.setdiff1d(ids, equal[count - len(ids) :], assume_unique=True)
    return ids


def _error(logits: NDArray[Any], temperature: float, decoded: DecodedRows | NDArray[Any]) -> LogitsError:
    log_p = _log_softmax(logits, temperature)
    p = np.exp(log_p)
    log_classes, log_coded = _told_apart(log_p, temperature, decoded)
    probs = np.exp(log_coded) if isinstance(decoded, np.ndarray) else _expand(decoded, p.shape[1])
    classes = np.exp(log_classes)
    ratios = np.zeros_like(classes)
    np.subtract(log_classes, log_coded, out=ratios, where=classes > 0)
    kl = np.maximum((classes * ratios).sum(axis=-1), 0.0)  # rounding can leave -1e-17
    tv = np.abs(classes - np.exp(log_coded)).sum(axis=-1) / 2
    gradient = np.linalg.norm(probs - p, axis=-1) / np.linalg.norm(p, axis=-1)
    return LogitsError(float(kl.mean()), float(kl.max()), float(tv.mean()), float(gradient.mean()), len(p))


def _told_apart(log_p: Array, temperature: float, decoded: DecodedRows | NDArray[Any]) -> tuple[Array, Array]:
    """Log-probabilities of the classes that a record tells apart, the teacher's and the record's."""
    if isinstance(decoded, np.ndarray):
        return log_p, _log_softmax(decoded, temperature)
    with np.errstate(divide="ignore"):
        rest = np.exp(log_p)
        np.put_along_axis(rest, decoded.head_ids, 0.0, -1)
        log_rest = np.log(rest.sum(axis=-1, keepdims=True))
    exact = np.concatenate((np.take_along_axis(log_p, decoded.head_ids, -1), log_rest), axis=-1)
    return exact, np.concatenate((decoded.log_probs, decoded.log_tail[:, None]), axis=-1)


def _expand(rows: DecodedRows, vocab_size: int) -> Array:
    """The log-probability of every class by a record: of its tail, that the classes are equally likely."""
    probs = np.empty((len(rows.log_tail), vocab_size))
    probs[:] = np.exp(rows.log_tail)[:, None] / max(vocab_size - rows.head_ids.shape[1], 1)
    np.put_along_axis(probs, rows.head_ids, np.exp(rows.log_probs), -1)
    return probs


def _log_softmax(logits: NDArray[Any], temperature: float) -> Array:
    values = logits.astype(np.float64) / temperature
    return values - _logsumexp(values)[:, None]


def _logsumexp(values: Array) -> Array:
    peak = values.max(axis=-1, keepdims=True, initial=-np.inf)
    peak[np.isneginf(peak)] = 0.0
    with np.errstate(divide="ignore"):  # of nothing it is -inf
        return np.asarray(np.log(np.exp(values - peak).sum(axis=-1)) + peak[:, 0], dtype=np.float64)


def _slices(num_rows: int, width: int) -> Iterator[slice]:
    """Some rows at a time; all of them in one where there are few."""
    step = max(1, _HELD_NUMBERS // width)
    return (slice(start, start + step) for start in range(0, num_rows, step))


MAX_VOCABULARY = 1 << 24
_EPS = 2.0**-11  # half a unit in the last place of a float16, relative
_TINY = 2.0**-25  # and absolute, below its normal numbers


class DecodedRows(NamedTuple):
    """The contents of a row: the first fields of ``TopkTargets``."""

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
        """The coded rows, within ``bound``; ``cache-corrupt`` for bytes that ``encode`` does not write."""
        rows = np.asarray(rows)
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != self.row_bytes:
            raise _corrupt(f"rows must be bytes (R, {self.row_bytes}); got {rows.dtype} {rows.shape}")
        return _joined(map(self._decode, self._slices(rows)))

    def _slices(self, rows: Bytes) -> Iterator[Bytes]:
        """Some rows at a time, for bounded memory; one at least."""
        step = max(1, _HELD_BYTES // self.row_bytes)
        return (rows[start : start + step] for start in range(0, max(len(rows), 1), step))

    def _decode(self, rows: Bytes) -> DecodedRows:
        numbers, values, _ = self._parts()
        log_tail = np.ascontiguousarray(rows[:, :numbers]).view("<f2").astype(np.float64)[:, 0]
        if not (log_tail <= 0.0).all():  # nor NaN
            raise _corrupt("log_tail of a row is not a number, or above 0")
        head_ids = _unpack_ids(rows[:, numbers + values :], self.head, self.vocab_size)
        shares = self._shares(rows)
        log_probs = np.log(shares / shares.sum(axis=-1, keepdims=True)) + _log_rest(log_tail)[:, None]
        return DecodedRows(head_ids, log_probs, log_tail)

    def head_moves(self, rows: Bytes) -> Array:
        """The most that coding moved the probabilities of each row's head, summed ``(R,)``."""
        return np.concatenate([self.bound(some).sum(axis=-1) for some in self._slices(rows)])

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
    low, low_bytes, _ = _id_layout(count, vocab_size)
    bits = np.unpackbits(rows[:, low_bytes:], axis=-1, bitorder="little")
    if (bits.sum(axis=-1, dtype=np.int64) != count).any():
        raise _corrupt(f"the ids of a row must be {count}")
    places = np.nonzero(bits)[1].reshape(len(rows), count)
    ids: Ids = ((places - np.arange(count)) << low) | _unpack(rows[:, :low_bytes], count, low)
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
