"""Rows of logits as codes, and what that costs (CACHE-164 to CACHE-170): likeliest classes, or all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import LogitsError, merge_errors
from shd_ref.errors import need
from shd_ref.kd.codes import DecodedRows, RowCode
from shd_ref.tolerances import load_tolerances

LOGITS_CODECS: Final = ("topk", "float16")

_HELD_NUMBERS: Final = 1 << 18
"""Numbers of a few rows that are worked on at once, in a processor's cache: a whole sample's may take gigabytes."""

_BLOCK: Final = 64
"""Neighbours of which the largest is looked at first, where few of many numbers are wanted."""

_HELD_BYTES: Final = 1 << 20
"""Coded bytes that are decoded at once: on the way every bit is a number."""

Array = NDArray[np.float64]


def pick_classes(logits: NDArray[Any], head: int, temperature: float) -> DecodedRows:
    """The likeliest classes of every row with the mass of the rest.

    Of equal logits ``(R, V)`` at the edge those of lower ids.
    """
    return _joined(_pick(logits[rows], head, temperature) for rows in _slices(*logits.shape))


def decode_rows(code: RowCode, rows: NDArray[np.uint8]) -> DecodedRows:
    """What rows of bytes say, at least one, in bounded memory; ``cache-corrupt`` for bytes that no encoder writes."""
    return _joined(code.decode(rows[some]) for some in _coded_slices(code, len(rows)))


def _joined(parts: Iterable[DecodedRows]) -> DecodedRows:
    ids, log_probs, log_tail = map(np.concatenate, zip(*parts, strict=True))
    return DecodedRows(ids, log_probs, log_tail)


def head_moves(code: RowCode, rows: NDArray[np.uint8]) -> Array:
    """The most that coding moved the probabilities of each row's head, summed ``(R,)``, in bounded memory."""
    return np.concatenate([code.bound(rows[some]).sum(axis=-1) for some in _coded_slices(code, len(rows))])


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
    """What coding cost rows of logits ``(R, V)`` (CACHE-170), in bounded memory; ``decode`` gives rows as stored."""
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
    kept = np.take_along_axis(logits, ids, -1).astype(np.float64) / temperature
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
    whole = np.logaddexp(log_rest, _logsumexp(kept))
    return DecodedRows(ids, kept - whole[:, None], log_rest - whole)


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
    said = np.exp(log_coded) if isinstance(decoded, np.ndarray) else _expand(decoded, p.shape[1])
    classes = np.exp(log_classes)
    ratios = np.zeros_like(classes)
    np.subtract(log_classes, log_coded, out=ratios, where=classes > 0)
    kl = np.maximum((classes * ratios).sum(axis=-1), 0.0)  # rounding can leave -1e-17
    tv = np.abs(classes - np.exp(log_coded)).sum(axis=-1) / 2
    gradient = np.linalg.norm(said - p, axis=-1) / np.linalg.norm(p, axis=-1)
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
    """What a record says of every class: of its tail, that the classes are equally likely."""
    said = np.empty((len(rows.log_tail), vocab_size))
    said[:] = np.exp(rows.log_tail)[:, None] / max(vocab_size - rows.head_ids.shape[1], 1)
    np.put_along_axis(said, rows.head_ids, np.exp(rows.log_probs), -1)
    return said


def _log_softmax(logits: NDArray[Any], temperature: float) -> Array:
    values = logits.astype(np.float64) / temperature
    return values - _logsumexp(values)[:, None]


def _logsumexp(values: Array) -> Array:
    peak = values.max(axis=-1, keepdims=True, initial=-np.inf)
    peak[np.isneginf(peak)] = 0.0
    with np.errstate(divide="ignore"):  # of nothing it is -inf
        return np.asarray(np.log(np.exp(values - peak).sum(axis=-1)) + peak[:, 0], dtype=np.float64)


def _coded_slices(code: RowCode, num_rows: int) -> Iterator[slice]:
    step = max(1, _HELD_BYTES // code.row_bytes)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def _slices(num_rows: int, width: int) -> Iterator[slice]:
    """Some rows at a time; all of them in one where there are few."""
    step = max(1, _HELD_NUMBERS // width)
    return (slice(start, start + step) for start in range(0, num_rows, step))
