"""What a student learns from: a teacher's logits, its top k with a tail, or classes drawn from it (KD-5 to KD-15)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, Mask, as_float, check_option, check_temperature
from shd_ref.errors import ShdError
from shd_ref.integers import check_integer
from shd_ref.kd.records import Ids, SampledTargets, TopkTargets
from shd_ref.tolerances import load_tolerances

MEANS: tuple[str, ...] = ("logits", "probs")


def mean_logits(
    logits: Sequence[ArrayLike],
    *,
    of: str = "logits",
    weights: Sequence[float] | None = None,
    temperature: float = 1.0,
) -> Array:
    """The mean of several teachers, as logits (KD-15).

    Args:
        logits: one array ``(..., V)`` a teacher, all of one shape.
        of: ``"logits"`` (BabyLlama), or ``"probs"``: the result's softmax at the temperature is the mean of theirs.
        weights: one number above 0 a teacher, divided by their sum; equal without it.
        temperature: T, of the probabilities.

    Returns:
        Logits ``(..., V)``.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    check_option("of", of, MEANS, "KD-15")
    temperature = check_temperature(temperature)
    teachers = [as_logits(given, f"logits[{number}]") for number, given in enumerate(logits)]
    shares = np.ones(len(teachers)) if weights is None else np.array([_check_weight(weight) for weight in weights])
    if not teachers or len(shares) != len(teachers):
        raise ShdError(
            "argument-value",
            f"logits must hold at least one teacher, and weights one number a teacher; "
            f"got {len(teachers)} teachers and {len(shares)} weights",
            "KD-15",
        )
    if len({teacher.shape for teacher in teachers}) > 1:
        shapes = ", ".join(str(teacher.shape) for teacher in teachers)
        raise ShdError(
            "argument-shape",
            f"logits must have one shape, for teachers that share vocabulary and rows; got {shapes}",
            "KD-15",
        )
    shares = shares / shares.sum()
    stacked = np.stack(teachers)
    by_teacher = shares.reshape(-1, *[1] * teachers[0].ndim)
    if of == "logits":
        mean: Array = (by_teacher * stacked).sum(axis=0)
        return mean
    return temperature * logsumexp(log_softmax(stacked / temperature) + np.log(by_teacher), axis=0)


def kd_targets_topk(
    teacher_logits: ArrayLike, k: int, *, temperature: float = 1.0, vocab_size: int | None = None
) -> TopkTargets:
    """The k largest classes of every row with their log-probabilities, and the mass of the rest (KD-8, KD-9).

    Args:
        teacher_logits: u ``(..., V)``.
        k: number of classes, 1 to V.
        temperature: T > 0, to which the targets are bound from now on.
        vocab_size: read the first so many classes alone; the others are padding, and must look like it (KD-7).

    Returns:
        The record; ids ascend.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    temperature = check_temperature(temperature)
    logits = cut_teacher(as_logits(teacher_logits, "teacher_logits"), vocab_size, temperature)
    size = logits.shape[-1]
    k = check_integer("k", k, 1, size, "KD-8")
    log_p = log_softmax(logits / temperature)
    ids = _largest(logits, k)
    others = _without(log_p, ids)
    return TopkTargets(ids, np.take_along_axis(log_p, ids, -1), logsumexp(others), temperature, size)


def kd_targets_sampled(
    teacher_logits: ArrayLike,
    uniforms: ArrayLike,
    *,
    keep: int = 0,
    power: float = 1.0,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> SampledTargets:
    """The ``keep`` largest classes as they are, and draws from the others with unbiased weights (KD-12, KD-13).

    Args:
        teacher_logits: u ``(..., V)``.
        uniforms: ``(..., n)`` numbers in [0, 1), one a draw; independent ones, or fewer-sided ones that are each
            uniform (``systematic_uniforms``), which keep every mean and lower the variance.
        keep: number of classes that are not left to chance, 0 to V - 1.
        power: classes are drawn in proportion to ``P^power``; 1 gives every draw the same weight.
        temperature: T > 0, to which the targets are bound from now on.
        vocab_size: as in ``kd_targets_topk``.

    Returns:
        The record; kept classes first.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    temperature = check_temperature(temperature)
    logits = cut_teacher(as_logits(teacher_logits, "teacher_logits"), vocab_size, temperature)
    size = logits.shape[-1]
    keep = check_integer("keep", keep, 0, size - 1, "KD-13")
    power = _check_power(power)
    draws = _check_uniforms(uniforms, logits.shape[:-1])
    log_p = log_softmax(logits / temperature)
    kept = _largest(logits, keep)
    proposal = _without(power * log_p, kept)  # log q, not yet divided by its sum
    # Relative to the largest, so that a row whose others have little mass is drawn as well as any.
    shares = np.exp(proposal - proposal.max(axis=-1, keepdims=True))
    sums = shares.cumsum(axis=-1)
    drawn = _first_above(sums, draws * sums[..., -1:])
    log_q = proposal - logsumexp(proposal)[..., None]
    weights = np.exp(np.take_along_axis(log_p - np.where(np.isneginf(log_q), 0.0, log_q), drawn, -1))
    return SampledTargets(
        np.concatenate((kept, drawn), axis=-1),
        np.concatenate((np.exp(np.take_along_axis(log_p, kept, -1)), weights / draws.shape[-1]), axis=-1),
        -(np.exp(log_p) * log_p).sum(axis=-1),
        temperature,
        size,
    )


def systematic_uniforms(rows: Sequence[int], count: int, seed: int) -> Array:
    """Uniforms ``(*rows, count)`` at equal distances from one random start a row.

    Each is uniform by itself, so that no mean changes; a class with the share q of the draws is drawn
    ``count * q`` times up to rounding, which independent draws do in the mean alone.
    """
    start = np.random.default_rng(seed).random((*rows, 1))
    return (np.arange(count) + start) / count


def log_softmax(logits: Array) -> Array:
    """Log-probabilities, finite for finite logits of any size."""
    return logits - logsumexp(logits)[..., None]


def logsumexp(numbers: Array, axis: int = -1) -> Array:
    """The logarithm of the sum of exponentials; -inf over nothing."""
    peak = numbers.max(axis=axis, keepdims=True, initial=-np.inf)
    finite = np.where(np.isneginf(peak), 0.0, peak)
    sums = np.exp(numbers - finite).sum(axis=axis)
    with np.errstate(divide="ignore"):  # log 0 is -inf, as it should be
        found: Array = np.log(sums) + finite.squeeze(axis)
    return found


def as_logits(value: ArrayLike, name: str) -> Array:
    """Finite logits ``(..., V)`` with at least one leading axis and one class (KD-1)."""
    logits = as_float(value, name)
    if logits.ndim < 2 or not logits.shape[-1]:
        message = f"{name} must be (..., V) with rows of at least one class; got shape {logits.shape}"
        raise ShdError("argument-shape", message, "KD-1")
    return logits


def cut_teacher(logits: Array, vocab_size: int | None, temperature: float, counted: Mask | None = None) -> Array:
    """The teacher's logits without padded classes, which must have next to no mass where a row counts (KD-7)."""
    kept = cut(logits, vocab_size, "teacher_logits")
    if kept.shape[-1] == logits.shape[-1]:
        return kept
    mass = np.exp(logsumexp(log_softmax(logits / temperature)[..., kept.shape[-1] :]))
    largest = float(mass.max(initial=0.0, where=np.True_ if counted is None else counted))
    allowed = float(load_tolerances()["constants"]["cut_mass"])
    if largest > allowed:
        raise ShdError(
            "argument-value",
            f"vocab_size must cut padding alone, with a mass of at most {allowed:g} in every row; "
            f"got {largest:.6g} on the classes from {kept.shape[-1]} to {logits.shape[-1] - 1}",
            "KD-7",
        )
    return kept


def cut(logits: Array, vocab_size: int | None, name: str) -> Array:
    """The first ``vocab_size`` classes (KD-7)."""
    if vocab_size is None:
        return logits
    size = check_integer("vocab_size", vocab_size, 1, None, "KD-7")
    if logits.shape[-1] < size:
        raise ShdError(
            "argument-shape",
            f"{name} must have at least vocab_size = {size} classes; got {logits.shape[-1]}",
            "KD-7",
        )
    return logits[..., :size]


def _largest(logits: Array, k: int) -> Ids:
    """The ids of the k largest, ascending; of equal ones at the edge the lower ids."""
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    ascending: Ids = np.sort(order, axis=-1).astype(np.int64)
    return ascending


def _without(numbers: Array, ids: Ids) -> Array:
    """A copy with -inf at the ids."""
    rest = numbers.copy()
    np.put_along_axis(rest, ids, -np.inf, -1)
    return rest


def _first_above(sums: Array, points: Array) -> Ids:
    """For each point the first class whose running sum exceeds it (KD-12)."""
    flat_sums, flat_points = sums.reshape(-1, sums.shape[-1]), points.reshape(-1, points.shape[-1])
    found = [np.searchsorted(row, wanted, side="right") for row, wanted in zip(flat_sums, flat_points, strict=True)]
    # A product may round up to the whole sum: the last class that has a share is meant.
    last = (flat_sums < flat_sums[:, -1:]).sum(axis=-1, keepdims=True)
    ids: Ids = np.minimum(np.array(found).reshape(flat_points.shape), last).reshape(points.shape).astype(np.int64)
    return ids


def _check_uniforms(uniforms: ArrayLike, rows: tuple[int, ...]) -> Array:
    draws = as_float(uniforms, "uniforms")
    if draws.ndim != len(rows) + 1 or draws.shape[:-1] != rows or not draws.shape[-1]:
        raise ShdError(
            "argument-shape",
            f"uniforms must be {rows} + (n,) with n at least 1, the rows of the logits; got {draws.shape}",
            "KD-13",
        )
    if draws.size and not (draws.min() >= 0.0 and draws.max() < 1.0):
        worst = draws.min() if draws.min() < 0.0 else draws.max()
        raise ShdError("argument-value", f"uniforms must lie in [0, 1); got {worst:.6g}", "KD-13")
    return draws


def _check_weight(weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < np.inf:
        raise ShdError("argument-value", f"weights must be finite numbers above 0; got {weight!r}", "KD-15")
    return float(weight)


def _check_power(power: Any) -> float:
    if isinstance(power, bool) or not isinstance(power, int | float) or not 0 <= power < np.inf:
        raise ShdError("argument-value", f"power must be a finite number of at least 0; got {power!r}", "KD-13")
    return float(power)
