"""Denoising diffusion, and a teacher that sees the same noise (REC-27 to REC-33)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.attention import Array, as_float
from shd_ref.errors import ShdError
from shd_ref.integers import check_integer
from shd_ref.recipes.terms import Term, Terms, check_weight

Steps = NDArray[np.int64]

LEAST_MASS = 1e-12
"""What the mass of a bin is raised to before its logarithm (REC-32)."""


def linear_betas(steps: int = 1000) -> Array:
    """Variances that rise linearly from ``.1 / steps`` to ``20 / steps``, both included (REC-27).

    Args:
        steps: at least 21, so that every variance is below 1.

    Raises:
        ShdError: ``argument-value``.
    """
    steps = check_integer("steps", steps, 21, None, "REC-27")
    return np.linspace(0.1 / steps, 20.0 / steps, steps)


def noised(x0: ArrayLike, noise: ArrayLike, t: ArrayLike, *, betas: ArrayLike | None = None) -> Array:
    """``sqrt(abar_t) x0 + sqrt(1 - abar_t) noise``, the input of both models (REC-28).

    Args:
        x0: pictures or latents ``(B, C, ...)``.
        noise: same shape.
        t: steps ``(B,)``, integers from 0.
        betas: as in ``diffusion``.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    schedule = _schedule(betas)
    x, e = _same_shape(x0, noise)
    steps = _steps(t, len(x), len(schedule.betas))
    kept = schedule.kept[steps].reshape(-1, *[1] * (x.ndim - 1))
    return np.sqrt(kept) * x + np.sqrt(1 - kept) * e


def diffusion(
    student_output: ArrayLike,
    x0: ArrayLike,
    noise: ArrayLike,
    t: ArrayLike,
    *,
    teacher_output: ArrayLike | None = None,
    betas: ArrayLike | None = None,
    snr_clip: float | None = 5.0,
    kd_weight: float = 1.0,
    bound_weight: float = 1.0,
) -> Terms:
    """``mean_b w_b |eps_S - noise|^2 + bound + g mean_b w_b |eps_S - eps_T|^2`` (REC-29 to REC-33).

    Args:
        student_output: epsilon ``(B, C, ...)``, or epsilon and range ``(B, 2 C, ...)``, of ``noised(x0, noise, t)``.
        x0: ``(B, C, ...)``, in [-1, 1].
        noise: same shape.
        t: steps ``(B,)``, integers from 0.
        teacher_output: of the same input, with or without a range, which is not read.
        betas: ``(steps,)``, each in (0, 1); default ``linear_betas()``.
        snr_clip: k of min-SNR-k; None weighs every step with 1.
        kd_weight: g.
        bound_weight: of the variational bound that teaches the range.

    Returns:
        The terms ``mse`` (weight 1), ``bound`` where the student has a range, and ``kd`` where there is a teacher.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    weights = check_weight("kd_weight", kd_weight), check_weight("bound_weight", bound_weight)
    schedule = _schedule(betas)
    x, e = _same_shape(x0, noise)
    steps = _steps(t, len(x), len(schedule.betas))
    importance = _importance(schedule.kept[steps], snr_clip)
    epsilon, span = _split(student_output, "student_output", x.shape)
    terms = {"mse": Term(_weighed(importance, epsilon - e), 1.0)}
    if span is not None:
        terms["bound"] = Term(_bound(schedule, steps, x, e, epsilon, span), weights[1])
    if teacher_output is not None:
        teacher, _ = _split(teacher_output, "teacher_output", x.shape)
        terms["kd"] = Term(_weighed(importance, epsilon - teacher), weights[0])
    return terms


@dataclass(frozen=True)
class _Schedule:
    betas: Array
    kept: Array  # abar, the running product of 1 - beta
    kept_before: Array  # of the step before; 1 at the first


def _schedule(betas: ArrayLike | None) -> _Schedule:
    given = linear_betas() if betas is None else as_float(betas, "betas", ndim=1)
    if len(given) < 2 or (given <= 0).any() or (given >= 1).any():
        raise ShdError("argument-value", "betas must be two numbers at least, each between 0 and 1", "REC-27")
    kept = np.cumprod(1 - given, dtype=np.float64)
    return _Schedule(given, kept, np.append(1.0, kept[:-1]))


def _same_shape(x0: ArrayLike, noise: ArrayLike) -> tuple[Array, Array]:
    x, e = as_float(x0, "x0"), as_float(noise, "noise")
    if x.shape != e.shape or x.ndim < 2:
        raise ShdError(
            "argument-shape", f"x0 and noise must share one shape (B, C, ...); got {x.shape} and {e.shape}", "REC-28"
        )
    return x, e


def _steps(t: ArrayLike, batch: int, steps: int) -> Steps:
    given = np.asarray(t)
    if given.dtype.kind not in "iu":
        raise ShdError("argument-dtype", f"t must be integers; got dtype {given.dtype}", "REC-28")
    if given.shape != (batch,):
        raise ShdError("argument-shape", f"t must be one step a sample ({batch},); got {given.shape}", "REC-28")
    if ((given < 0) | (given >= steps)).any():
        raise ShdError("argument-value", f"t must be 0 to {steps - 1}; got {given.tolist()}", "REC-28")
    return given.astype(np.int64)


def _split(output: ArrayLike, name: str, shape: tuple[int, ...]) -> tuple[Array, Array | None]:
    given = as_float(output, name)
    channels = shape[1]
    fits = given.ndim == len(shape) and (given.shape[0], *given.shape[2:]) == (shape[0], *shape[2:])
    if not fits or given.shape[1] not in (channels, 2 * channels):
        raise ShdError(
            "argument-shape",
            f"{name} must be {shape}, or have twice the channels where it holds a range; got {given.shape}",
            "REC-29",
        )
    return given[:, :channels], given[:, channels:] if given.shape[1] > channels else None


def _importance(kept: Array, snr_clip: float | None) -> Array:
    """``min(SNR, k) / SNR`` of each sample (REC-30)."""
    if snr_clip is None:
        return np.ones_like(kept)
    if check_weight("snr_clip", snr_clip) == 0:
        raise ShdError("argument-value", f"snr_clip must be above 0, or None; got {snr_clip!r}", "REC-30")
    snr = kept / (1 - kept)
    return np.minimum(snr, snr_clip) / snr


def _weighed(importance: Array, difference: Array) -> float:
    return float((importance * _per_sample(difference**2)).mean())


def _per_sample(values: Array) -> Array:
    means: Array = values.reshape(len(values), -1).mean(axis=1)
    return means


def _bound(schedule: _Schedule, t: Steps, x0: Array, noise: Array, epsilon: Array, span: Array) -> float:
    """The term of the variational bound, in bits a number, the mean over samples (REC-31, REC-32)."""
    axes = (-1, *[1] * (x0.ndim - 1))
    beta, kept, before = (table[t].reshape(axes) for table in (schedule.betas, schedule.kept, schedule.kept_before))
    variances = schedule.betas * (1 - schedule.kept_before) / (1 - schedule.kept)
    variances[0] = variances[1]
    log_true = np.log(variances[t].reshape(axes))
    share = (span + 1) / 2
    log_made = share * np.log(beta) + (1 - share) * log_true
    noisy = np.sqrt(kept) * x0 + np.sqrt(1 - kept) * noise
    guessed = (noisy - np.sqrt(1 - kept) * epsilon) / np.sqrt(kept)
    of_start, of_noisy = beta * np.sqrt(before) / (1 - kept), (1 - before) * np.sqrt(1 - beta) / (1 - kept)
    true, made = (of_start * start + of_noisy * noisy for start in (x0, guessed))
    divergence = 0.5 * (
        log_made - log_true - 1 + np.exp(log_true - log_made) + (true - made) ** 2 * np.exp(-log_made)
    )
    first = (t == 0).reshape(axes)
    nats = np.where(first, -_log_mass(x0, made, np.exp(0.5 * log_made)), divergence)
    return float(_per_sample(nats).mean() / math.log(2))


def _log_mass(x: Array, mean: Array, deviation: Array) -> Array:
    """The logarithm of the mass of the bin of width 2/255 around x; the outermost bins are open (REC-32)."""
    above, below = (_normal_cdf((x - mean + edge) / deviation) for edge in (1 / 255, -1 / 255))
    mass = np.where(x < -0.999, above, np.where(x > 0.999, 1 - below, above - below))
    return np.log(np.maximum(mass, LEAST_MASS))


def _normal_cdf(x: Array) -> Array:
    """The published approximation ``(1 + tanh(sqrt(2 / pi) (x + .044715 x^3))) / 2`` (REC-32)."""
    return 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
